"""The trained model of a run: plain Orbax opens it, load_params and sample use it."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import diloco_jax
from diloco_jax.api import load_params
from diloco_jax.config import build, load
from diloco_jax.configs import stdlib_lm
from diloco_jax.node import loop
from diloco_jax.process import run_folder
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, states
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.syncer import global_model
from diloco_jax.syncer import node as syncer_node
from diloco_jax.train import evaluate
from diloco_jax.transport import in_process
from tests.launch.lib import command_line


@pytest.fixture(name='run', scope='module')
def _run(tmp_path_factory) -> pathlib.Path:
  """The folder of a short run, in this process."""
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = config.sync.quorum = config.mesh.data = 1
  config.sync.fragments = config.sync.period = 2
  config.sync.overlap = 1
  config.train.steps = 12
  folder = tmp_path_factory.mktemp('trained') / 'run'
  exits = diloco_jax.run(config, folder).exits
  assert {name: end.code for name, end in exits.items()} == {'syncer': 0, 'l0': 0}
  return folder


def test_an_opened_run_tells_what_it_has_recorded(run):
  opened = diloco_jax.open_run(run)
  clock, tokens, seconds, loss = opened.losses('l0')
  assert clock.tolist() == list(range(1, 13)) and (np.diff(tokens) > 0).all()
  assert (np.diff(seconds) >= 0).all() and loss[-1] < loss[0]
  assert opened.evaluations.loss[-1] == opened.summary['eval_loss_end']
  assert opened.summary['tokens_trained'] == tokens[-1]
  assert 'srcdoc=' in opened._repr_html_() and '100%: l0 done 12; ' in repr(opened)
  assert 'tokens/s' not in repr(opened) and opened.summary['learners']['l0']['status'] == 'done'
  first, *_, last = opened.evaluations.loss
  assert opened.loss_at(0) == first and opened.loss_at(tokens[-1]) == last
  for outside in (-1, tokens[-1] + 1):
    with pytest.raises(ValueError, match='no evaluation is before and after'):
      opened.loss_at(outside)
  assert opened.params['embedding'].shape == (256, 32)
  upper, _ = opened.plot().axes
  assert f' of {run.name}, ' in upper.get_title('left'), 'which run this is'
  with pytest.raises(ValueError, match='there is no run in'):
    diloco_jax.open_run(run / 'model')


def test_a_run_that_goes_on_is_read_again(run, tmp_path):
  opened = diloco_jax.open_run(shutil.copytree(run, tmp_path / 'run'))
  before = opened.losses('l0').loss.size
  with contextlib.closing(
    records_lib.Recorder(opened.workdir, 'l0', tensorboard=False)
  ) as recorder:
    recorder.report(report_facts.Step(step=12, steps=13, tokens=13, loss=1.0, seconds=1.0))
  assert opened.losses('l0').loss.size == before + 1


@pytest.mark.parametrize('kind', ['of NumPy', 'of no device', 'of one device'])
def test_what_is_given_keeps_its_types_and_its_places(run, kind):
  """A jitted step is compiled again for arrays that are committed to a device."""
  given = diloco_jax.load_params(run)
  if kind != 'of NumPy':
    given = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), given)
  if kind == 'of one device':
    given = jax.device_put(given, jax.devices()[1])
  read = diloco_jax.load_params(run, into=given)
  place = lambda leaf: (leaf.dtype, getattr(leaf, 'committed', None), leaf.device)
  assert jax.tree.map(place, read) == jax.tree.map(place, given)


def test_shapes_are_filled_with_arrays_of_their_types(run):
  model = diloco_jax.load_params(run)
  half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
  read = diloco_jax.load_params(run, into=jax.eval_shape(lambda: half))
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(read)} == {'bfloat16'}
  jax.tree.map(np.testing.assert_array_equal, read, half)


def test_plain_orbax_opens_the_model_as_a_tree_of_named_arrays(run):
  tree = ocp.load(run / 'model')
  assert tree['embedding'].shape == (256, 32)
  assert tree['layers']['1']['query'].shape == (32, 2, 16)
  params = diloco_jax.load_params(run)
  np.testing.assert_array_equal(params['layers'][1]['query'], tree['layers']['1']['query'])


@pytest.mark.parametrize('door', [pytest.param('model', marks=pytest.mark.long), 'checkpoint'])
def test_a_folder_of_zeros_does_not_fill_the_memory(run, tmp_path, door):
  """The folder of a run may be from somebody else; 128 MiB of zeros take some KB."""
  folder = shutil.copytree(run, tmp_path / 'run')
  record = json.dumps(states.read(folder / 'model').record)
  shutil.rmtree(folder / 'model')
  shutil.rmtree(folder / 'syncer' / 'ckpt')
  zeros = {'embedding': np.zeros((1 << 25,), np.float32)}
  if door == 'model':
    states.save(folder / 'model', 'model', zeros, json.loads(record))
  else:
    run_of = {'run': lineage_lib.read(folder).run}
    with contextlib.closing(checkpoint.Checkpoints(str(folder / 'syncer' / 'ckpt'))) as bomb:
      bomb.save(1, jax.tree.map(jax.numpy.asarray, zeros), 0, run_of)()
  refused = 'nothing was read' if door == 'model' else 'was saved as'
  with (
    warnings.catch_warnings(action='ignore'),
    pytest.raises((ValueError, states.StateError), match=refused),
  ):
    diloco_jax.load_params(folder)


@pytest.mark.long
def test_a_baseline_gives_its_model_and_goes_on(tmp_path):
  config = stdlib_lm.get_config('tiny')
  config.sync.fragments, config.train.eval_every = 2, 0
  models = []
  for steps in (6, 8):
    config.train.steps = steps
    exits = diloco_jax.run(config, tmp_path, syncer='none').exits
    assert {name: end.code for name, end in exits.items()} == {'l0': 0}
    models.append(diloco_jax.load_params(tmp_path))
  assert exits['l0'].text.startswith('done at step 8: 2 steps')
  first, last = (model['layers'][1]['query'] for model in models)
  assert first.shape == (32, 2, 16) and (first != last).any()
  with pytest.raises(ValueError, match='without a syncer; continue it with --syncer=none'):
    diloco_jax.run(config, tmp_path)
  with pytest.raises(ValueError, match="syncer is 'no': give 'local' or 'none'"):
    diloco_jax.run(config, tmp_path, syncer='no')
  config.train.seed = 1
  diloco_jax.run(config, tmp_path / 'other', syncer='none')
  config.train.seed = 0
  newest = tmp_path / 'islands' / 'l0' / 'ckpt' / '8'
  shutil.move(newest, tmp_path / '8')
  shutil.copytree(tmp_path / 'other' / 'islands' / 'l0' / 'ckpt' / '8', newest)
  with pytest.warns(UserWarning, match='it is of the run'):
    jax.tree.map(np.testing.assert_array_equal, diloco_jax.load_params(tmp_path), models[0])
  shutil.rmtree(newest)
  shutil.move(tmp_path / '8', newest)
  config.train.store = f'{tmp_path}-store'
  shutil.move(tmp_path / 'islands', f'{tmp_path}-store/islands')
  load.write(tmp_path, config)
  jax.tree.map(np.testing.assert_array_equal, diloco_jax.load_params(tmp_path), models[-1])


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run, tmp_path):
  shutil.copytree(run, tmp_path / 'run')
  model = diloco_jax.load_params(run)
  shutil.rmtree(tmp_path / 'run' / 'model')
  checkpoints = tmp_path / 'run' / 'syncer' / 'ckpt'
  newest = max(checkpoints.iterdir(), key=lambda path: int(path.name))
  damaged = shutil.copytree(newest, checkpoints / str(int(newest.name) + 1))
  os.truncate(damaged / states.MANIFEST, 100)
  with pytest.warns(UserWarning, match='does not read back'):
    read = diloco_jax.load_params(tmp_path / 'run')
  jax.tree.map(np.testing.assert_array_equal, read, model)
  for path in set(checkpoints.iterdir()) - {damaged}:
    shutil.rmtree(path)
  with pytest.warns(UserWarning), pytest.raises(states.StateError):
    diloco_jax.load_params(tmp_path / 'run')


def test_what_a_save_or_a_syncer_has_beside_checkpoints_makes_no_store_of_a_folder(run, tmp_path):
  shutil.copytree(run, tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run' / 'model')
  for name in ('new_99.orbax-checkpoint-tmp', 'unreadable-9'):
    (tmp_path / 'run' / 'syncer' / 'ckpt' / name).mkdir()
  read = diloco_jax.load_params(tmp_path / 'run')
  jax.tree.map(np.testing.assert_array_equal, read, diloco_jax.load_params(run))


def test_a_model_is_read_without_the_data_of_its_run(run, tmp_path):
  """As on another machine: from the model of the end, and from the newest checkpoint."""
  shutil.copytree(run, tmp_path / 'run')
  config = load.read(tmp_path / 'run')
  config.data.corpus = str(tmp_path / 'nowhere')
  load.write(tmp_path / 'run', config)
  ended = diloco_jax.load_params(tmp_path / 'run')
  shutil.rmtree(tmp_path / 'run' / 'model')
  jax.tree.map(np.testing.assert_array_equal, diloco_jax.load_params(tmp_path / 'run'), ended)


@pytest.mark.parametrize('more', [0, 12])
def test_the_model_of_an_end_is_gone_once_the_run_goes_on(run, tmp_path, monkeypatch, more):
  """Else it would be believed until the new end. A run that is over keeps it."""
  folder = tmp_path / 'run'
  shutil.copytree(run, folder)
  config = load_params.assemble(folder).config
  config.train.steps += more
  if more:
    run_folder.open_workdir(config, folder, resume=True)

  class Refused(Exception):
    pass

  def refuse(*args):
    raise Refused

  monkeypatch.setattr(syncer_node.syncer_work, 'SyncerWork', refuse)  # once it has recovered
  assembled = build.assemble(config)
  with pytest.raises(Refused):
    with contextlib.closing(records_lib.Recorder(folder, 'syncer')) as recorder:
      syncer_node.run(
        assembled,
        global_model.Theta(assembled),
        folder,
        loop.EventQueue(),
        in_process.InProcessHub().syncer_transport,
        recorder,
      )
  assert (folder / 'model').is_dir() == (not more)
  diloco_jax.load_params(folder)


def test_the_parameters_are_those_that_the_loss_takes(run):
  config = load_params.assemble(run).config
  task = build.make_task(config)
  loss = jax.jit(lambda params, batch: task.loss(params, batch, None))
  batch = task.eval_batches()[0]
  before = jax.tree.map(np.asarray, task.init(config.train.seed))
  after = diloco_jax.load_params(run)
  assert jax.tree.structure(before) == jax.tree.structure(after)
  assert float(loss(after, batch)) < float(loss(before, batch)) - 0.1


def test_the_same_seed_draws_the_same_text(run):
  task, params = load_params.assemble(run).task, diloco_jax.load_params(run)

  def draw(seed: int, temperature: float = 0.8) -> list[int]:
    drawn = evaluate.sample(task, params, b'def ', 32, temperature, seed)
    return list(itertools.islice(drawn, 40))  # more than the window of 32

  assert draw(1) == draw(1) != draw(2)
  assert draw(1, temperature=0.0) == draw(2, temperature=0.0)


def test_a_folder_without_a_model_is_refused(tmp_path, run):
  with pytest.raises(ValueError, match='there is no run in'):
    diloco_jax.load_params(tmp_path)
  shutil.copy(run / 'config.json', tmp_path)
  with pytest.raises(ValueError, match='has no model yet'):
    diloco_jax.load_params(tmp_path)


def test_the_command_prints_text(run):
  done = command_line.diloco('sample', f'--workdir={run}', '--prompt=import ', '--tokens=30')
  assert (done.returncode, done.stderr) == (0, '')
  text = done.stdout
  assert text.startswith('import ') and len('import ') + 10 < len(text) <= len('import ') + 30 + 1
