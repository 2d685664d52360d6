"""`diloco train --controller=single --pathways`, against a stand-in of Pathways (lib/pathways)."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from diloco_jax.launch import pathways
from diloco_jax.process import exits

_STUB = pathlib.Path(__file__).parent / 'lib' / 'pathways'

# Two islands, each a whole slice. The loss notes the devices of each mesh for which it is compiled.
_CONFIG = """
import pathlib

import jax  # before --pathways has said for which devices
import numpy as np

from diloco_jax.config import run_config
from diloco_jax.train import task as task_lib

def task(config):
  def loss(params, batch, sharding):
    if sharding is not None:
      with open(pathlib.Path(__file__).with_name('meshes'), 'a') as file:
        file.write(f'{[(d.id, d.slice_index) for d in sharding.mesh.devices.flat]}\\n')
    return jax.numpy.square(batch @ params['w'] + params['bias'] - 1).mean()

  return task_lib.Task(
    init=lambda seed: {'w': np.zeros((32, 8), np.float32), 'bias': np.zeros((1, 8), np.float32)},
    loss=loss,
    batches=lambda shard: [np.ones((4, 32), np.float32) / 32] * 100,
    tokens_per_batch=4,
  )

def get_config():
  config = run_config.Config(name='slices', task=f'{__file__}:task')
  config.mesh.data = 4
  config.sync.learners = 2
  config.sync.quorum = config.sync.overlap = 1
  config.sync.fragments = 2
  config.sync.period = 4
  config.optimizer.warmup_steps, config.train.steps = 2, 24
  config.train.log_every = config.train.checkpoint_every_steps = 8
  return config
"""


# What jax has after the start, and where two islands and the global model would lie.
_STARTED = """
import json
from diloco_jax.launch import pathways

pathways.start(devices=8)
import jax
from diloco_jax.train import mesh

devices = jax.devices()
islands = mesh.islands(devices, [4, 4])
syncer = mesh.syncer_devices(devices, islands)
print(json.dumps({
  'all are local': jax.local_devices() == devices,
  'processes': [jax.process_index(), jax.process_count()],
  'slices': [sorted({one.slice_index for one in island}) for island in islands],
  'syncer': [(one.id, one.device_kind, one.client is devices[0].client) for one in syncer],
  'own': [one.client is devices[0].client for one in jax.local_devices(backend='cpu')],
  'cache': jax.config.jax_enable_compilation_cache,
}))
"""


def run(words: list[str], **environment: str) -> subprocess.CompletedProcess:
  """Runs Python beside the stand-in; an empty value removes a variable."""
  paths = os.pathsep.join([str(_STUB), os.environ.get('PYTHONPATH', '')])
  changed = {'JAX_PLATFORMS': '', 'JAX_BACKEND_TARGET': 'grpc://stub', 'PYTHONPATH': paths}
  changed |= environment
  return subprocess.run(
    [sys.executable, *words],
    env={name: value for name, value in (os.environ | changed).items() if value},
    capture_output=True,
    text=True,
  )


def train(config: pathlib.Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
  return run(['-m', 'diloco_jax', 'train', f'--config={config}', *words], **environment)


@pytest.fixture
def config(tmp_path) -> pathlib.Path:
  path = tmp_path / 'slices.py'
  path.write_text(_CONFIG)
  return path


def test_all_slices_are_local_and_the_global_model_lies_on_their_hosts():
  done = run(['-c', _STARTED])
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == {
    'all are local': True,
    'processes': [0, 1],
    'slices': [[0], [1]],
    'syncer': [[8, 'cpu', True], [9, 'cpu', True]],
    'own': [False],
    'cache': False,
  }


@pytest.mark.full
def test_each_island_of_a_run_is_a_whole_slice_and_comes_back_from_its_checkpoint(config, tmp_path):
  workdir = tmp_path / 'run'
  words = ['--controller=single', '--pathways', f'--workdir={workdir}']
  done = train(config, *words)
  assert done.returncode == 0, done.stderr
  meshes = set((tmp_path / 'meshes').read_text().splitlines())
  assert meshes == {f'{[(id, index) for id in range(index, 8, 2)]}' for index in (0, 1)}
  summary = json.loads((workdir / 'report' / 'summary.json').read_text())
  assert summary['outer_steps'] and summary['tokens_merged'] == summary['tokens_trained'] > 0
  costs = [learner['cost'] for learner in summary['learners'].values()]
  assert [(cost['devices'], cost['kind'], cost['memory_bytes']) for cost in costs] == [
    (4, 'TPU stub', 0)
  ] * 2
  done = train(workdir, *words, '--resume', '--config.train.steps=40')
  assert done.returncode == 0, done.stderr
  for node in ('the syncer', 'l0', 'l1'):
    assert f'{node} continues from its checkpoint' in done.stdout, done.stdout


_SET = {'JAX_BACKEND_TARGET': 'grpc://stub'}


@pytest.mark.parametrize(
  ('single', 'environment', 'remedy'),
  [
    (False, _SET, 'needs --controller=single'),
    (True, {}, 'needs JAX_BACKEND_TARGET'),
    (True, _SET | {'JAX_PLATFORMS': 'cpu'}, 'set JAX_PLATFORMS=proxy,cpu'),
    (True, _SET | {'JAX_PLATFORMS': 'cpu,proxy'}, 'set JAX_PLATFORMS=proxy,cpu'),
    (True, _SET | {'ENABLE_PATHWAYS_PERSISTENCE': '1'}, 'unset it'),
  ],
)
def test_what_cannot_work_is_refused_with_the_remedy(single, environment, remedy, monkeypatch):
  monkeypatch.syspath_prepend(_STUB)
  with pytest.raises(ValueError, match=remedy):
    pathways.require(single, environment)
  for platforms in ('', 'proxy', 'proxy,cpu'):
    pathways.require(True, _SET | {'JAX_PLATFORMS': platforms})


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch):
  monkeypatch.setitem(sys.modules, 'pathwaysutils', None)
  with pytest.raises(ValueError, match=r"pip install 'diloco-jax\[pathways\]'"):
    pathways.require(True, _SET)


@pytest.mark.parametrize(
  ('words', 'environment', 'code', 'text'),
  [
    (
      ['--controller=single', '--config.sync.learners=3'],
      {},
      exits.NEVER_RETRY,
      'all islands need 12 devices, Pathways has 8 in 2 slices',
    ),
    (
      ['--controller=single'],
      {'JAX_BACKEND_TARGET': 'grpc://nobody'},
      exits.NOT_IN_TIME,
      'no Pathways proxy answers at JAX_BACKEND_TARGET=grpc://nobody',
    ),
  ],
)
def test_wrong_use_ends_with_one_line(config, tmp_path, words, environment, code, text):
  workdir = tmp_path / 'run'
  done = train(config, '--pathways', *words, f'--workdir={workdir}', **environment)
  assert done.returncode == code, done.stderr
  assert done.stderr.startswith(f'error: {text}') and done.stderr.count('\n') == 1, done.stderr
  assert not workdir.exists()
