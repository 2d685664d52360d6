"""The code of docs/your_model.md runs as it is written, and says the truth."""

import contextlib
import dataclasses
import pathlib
import re
import types

import flax
import jax
import numpy as np
import pytest
from flax import nnx

import diloco_jax
from diloco_jax.config import build, load
from diloco_jax.configs import own_loop
from diloco_jax.report import records as records_lib
from diloco_jax.storage import arrays
from diloco_jax.syncer import node as syncer_node
from diloco_jax.train import island as island_lib
from diloco_jax.train import task as task_lib
from tests.runs.lib import examples

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs' / 'your_model.md').read_text()
TASK, LOOP = re.findall(r'```python\n(.*?)\n```', PAGE, re.S)


def test_the_task_of_the_page_learns(tmp_path):
  file = tmp_path / 'my_model.py'
  file.write_text(TASK)
  config = load.load(str(file))
  config.validate()
  assembled = build.assemble(config)
  island = island_lib.Island(
    task=assembled.task,
    optimizer=config.optimizer,
    mesh=config.mesh,
    total_steps=config.train.steps,
    devices=jax.devices()[:1],
    seed=config.train.seed,
  )
  before = island.evaluate()
  for clock in range(20):
    assert island.step(clock).metrics.keys() == {'worst'}
  assert island.evaluate() < before


@pytest.mark.long
def test_the_loop_of_the_page_learns_by_the_clock(tmp_path):
  steps, sync = 40, dataclasses.replace(own_loop.get_config().sync, learners=1)
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    with diloco_jax.run_syncer(total_steps=steps, sync=sync) as server:
      page = {'steps': steps, 'address': server.address, 'workdir': tmp_path}
      exec(compile(LOOP, 'docs/your_model.md', 'exec'), page)
      merged = server.wait(60)
    last = page['opt_state'].inner_opt_state.hyperparams['learning_rate']
    np.testing.assert_allclose(last, page['rate'](page['clock']), rtol=1e-6)
    assert {'batch_stats/mean', 'batch_stats/var'} < merged.keys()
    assert merged['batch_stats/var'].min() > 0
    losses = [row['loss'] for row in diloco_jax.records(tmp_path) if row['name'] == 'step']
    assert losses[-1] == float(page['loss']) < np.square(page['batch']['y']).mean()


def headed(config):
  kernels = lambda: {name: {'kernel': np.ones((8, 8), 'f')} for name in ('body', 'head')}
  label = eval(re.search(r'^    label=(lambda .*)$', PAGE, re.M)[1], {'task_lib': task_lib})
  return task_lib.Task(
    init=lambda seed: kernels(), loss=..., batches=..., tokens_per_batch=1, label=label
  )


def test_the_label_of_the_page_keeps_a_head_local_in_a_task_and_in_a_loop(tmp_path, capfd):
  """And both say at the start what the labels have made of the arrays."""
  config = own_loop.get_config()
  config.task, config.optimizer.warmup_steps, config.sync.fragments = f'{__file__}:headed', 2, 1
  assembled = build.assemble(config)
  assert assembled.never_sent == ('head/kernel',)
  with contextlib.closing(records_lib.Recorder(tmp_path, 'syncer')) as recorder:
    syncer_node._introduce(assembled, recorder)
  assert 'labels of the arrays: 1 body, 1 local (head/kernel)\n' in capfd.readouterr().out

  params, label = assembled.task.init(0), assembled.task.label
  sync = diloco_jax.SyncConfig(learners=1, fragments=1, period=2, overlap=1)
  with diloco_jax.run_syncer(total_steps=4, sync=sync) as server:
    with diloco_jax.join(params, learner='l0', syncer=server.address, label=label) as peer:
      for _ in peer.steps():
        params = peer.sync(peer.params, tokens=1)
    assert server.wait(60).keys() == {'body/kernel'}
  labels = re.findall(r'^\[(\w+)\] \S+ labels of the arrays: (.*)$', capfd.readouterr().out, re.M)
  assert sorted(labels) == [('l0', '1 body, 1 local (head/kernel)'), ('syncer', '1 body')]


def test_the_example_with_a_schedule_follows_the_clock_and_not_its_updates():
  module = examples.load('loop_optax')
  params = module.init()
  batch, opt_state = module.read(0, 0), module.TX.init(params)
  with jax.numpy_dtype_promotion('standard'):
    rates = [
      module.step(params, opt_state, batch, module.RATE(clock))[1].hyperparams['learning_rate']
      for clock in (10, 200)
    ]
    np.testing.assert_allclose(rates, [module.RATE(10), module.RATE(200)], rtol=1e-6)


def test_nnx_takes_the_arrays_of_a_run_by_their_paths():
  page = (ROOT / 'docs' / 'howto' / 'pretrained.md').read_text()
  [block] = re.findall(r'```python\n(named = .*?)\n```', page, re.S)
  layer = lambda seed: nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
  build_model = lambda seed: nnx.Sequential(layer(seed), layer(seed))
  trained, model = build_model(0), build_model(1)
  named = arrays.by_name(nnx.state(trained))
  run = types.SimpleNamespace(load_params=lambda workdir: named)
  exec(block, {'diloco_jax': run, 'nnx': nnx, 'flax': flax, 'model': model})
  for name, array in arrays.by_name(nnx.state(model)).items():
    np.testing.assert_array_equal(array, named[name])


def test_the_page_names_files_that_exist():
  links = re.findall(r'\]\((?!https?:|#)([^)#]+)\)', PAGE)
  assert links and all((ROOT / 'docs' / link).exists() for link in links)
