"""`diloco train --controller=single --pathways`, against a stand-in of Pathways (lib/pathways)."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from diloco_jax.launch import cli, pathways

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
    return jax.numpy.square(batch @ params['w'] - 1).mean()

  return task_lib.Task(
    init=lambda seed: {'w': np.zeros((32, 8), np.float32)},
    loss=loss,
    batches=lambda shard: [np.ones((4, 32), np.float32) / 32] * 100,
    tokens_per_batch=4,
  )

def get_config():
  config = run_config.Config(name='slices', task=f'{__file__}:task')
  config.mesh.data = 4
  config.sync.learners = 2
  config.sync.quorum = config.sync.fragments = config.sync.overlap = 1
  config.sync.period = 4
  config.optimizer.warmup_steps, config.train.steps = 2, 24
  config.train.log_every = config.train.checkpoint_every_steps = 8
  return config
"""


def train(config: pathlib.Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
  """Runs the command beside the stand-in; an empty value removes a variable."""
  paths = os.pathsep.join([str(_STUB), os.environ.get('PYTHONPATH', '')])
  changed = {'JAX_PLATFORMS': '', 'JAX_BACKEND_TARGET': 'grpc://stub', 'PYTHONPATH': paths}
  changed |= environment
  return subprocess.run(
    [sys.executable, '-m', 'diloco_jax', 'train', f'--config={config}', *words],
    env={name: value for name, value in (os.environ | changed).items() if value},
    capture_output=True,
    text=True,
  )


@pytest.fixture
def config(tmp_path) -> pathlib.Path:
  path = tmp_path / 'slices.py'
  path.write_text(_CONFIG)
  return path


def test_each_island_of_a_run_is_a_whole_slice(config, tmp_path):
  run = tmp_path / 'run'
  words = ['--controller=single', '--pathways', f'--workdir={run}']
  done = train(config, *words)
  assert done.returncode == 0, done.stderr
  print((tmp_path / 'meshes').read_text())
  summary = json.loads((run / 'report' / 'summary.json').read_text())
  print(summary)
