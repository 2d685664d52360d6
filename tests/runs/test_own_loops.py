"""Loops of the user's own (experiments/examples) learn together, as threads and as processes."""

import difflib
import inspect
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import diloco_jax
from tests import programs
from tests.runs.lib import examples, records

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 240
CHANGED_LINES = 3
LEARNED = 1.3  # from 4.2; the noise of the data leaves 0.73


@pytest.mark.parametrize('name', ['loop_optax', 'lora'])
def test_a_loop_becomes_a_learner_by_three_lines(name):
  """Lines without their indentation, which `with` changes."""
  module = examples.load(name)
  alone, learner = map(inspect.getsource, (module.train_alone, module.train))
  changed = _changed(alone.partition('\n')[2], learner.partition('\n')[2])
  assert 0 < len(changed) <= CHANGED_LINES, '\n'.join(changed)


def test_so_do_those_of_the_tutorial_and_of_the_readme():
  """Beside an import. The join has no setting but the address."""
  page = (ROOT / 'docs' / 'tutorials' / 'own_loop.md').read_text()
  alone, learner = re.findall(r"\nif __name__ == '__main__':\n(.*?)```", page, re.S)[:2]
  readme = re.search(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)[1]
  ours = [line for line in readme.splitlines() if re.search(r'diloco_jax\.|peer', line)]
  for changed in (_changed(alone, learner), ours):
    assert len(changed) == 3, '\n'.join(changed)
    (join,) = [line for line in changed if 'join' in line]
    assert re.search(r'diloco_jax\.join\(params, syncer=[^,]+\) as peer:(  #.*)?$', join)


def _changed(before: str, after: str) -> list[str]:
  lines = ([line.strip() for line in text.splitlines()] for text in (before, after))
  return [line for line in difflib.ndiff(*lines) if line.startswith('+ ')]


@pytest.mark.full
def test_two_loops_learn_together_as_threads():
  module, losses = examples.load('loop_optax'), {}
  alone = _in_standard_types(module.train_alone)

  def learn(learner: str) -> None:
    losses[learner] = _in_standard_types(
      lambda: module.train(learner=learner, syncer=server.address)
    )

  with diloco_jax.run_syncer(total_steps=module.STEPS) as server:
    threads = [threading.Thread(target=learn, args=(name,), daemon=True) for name in ('l0', 'l1')]
    for thread in threads:
      thread.start()
    server.wait(DEADLINE_S)
    for thread in threads:
      thread.join(DEADLINE_S)
  assert losses.keys() == {'l0', 'l1'}
  for curve in (alone, *losses.values()):
    assert np.mean(curve[-20:]) < LEARNED < curve[0]


def _in_standard_types(call):
  """The examples are written for JAX's defaults, the tests have stricter ones."""
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    return call()


# --- Processes ------------------------------------------------------------------------------------


@pytest.fixture(name='start')
def _start():
  with programs.starting() as start:
    yield start


def _syncer(start, workdir: pathlib.Path, *flags: str) -> programs.Program:
  return start(*programs.diloco('syncer', '--config=own_loop', f'--workdir={workdir}', *flags))


@pytest.mark.long
def test_the_loop_of_the_readme_takes_the_overrides_of_the_syncer(start, tmp_path):
  workdir, loop = tmp_path / 'run', tmp_path / 'loop.py'
  example = start(*programs.diloco('example', 'loop_optax'))
  assert example.end() == 0
  loop.write_text(example.text)
  syncer = _syncer(start, workdir, '--config.sync.fragments=2', '--config.sync.period=6')
  place = f'--syncer=file:{workdir}/syncer/address'
  learners = [start(loop, f'--learner={name}', place) for name in ('l0', 'l1')]
  for learner in learners:
    steps, loss = _end_of(learner)
    assert steps > 20 and loss < 2.5, learner
  assert syncer.end() == 0, syncer
  merged = records.facts(workdir, 'syncer', 'synced')
  assert {fact['fragment'] for fact in merged} == {0, 1}
  assert {name for fact in merged for name in fact['participants']} == {'l0', 'l1'}


def _end_of(learner: programs.Program) -> tuple[int, float]:
  """The steps that a loop says it has made, and its last loss."""
  assert learner.end() == 0, learner
  match = re.search(r'(\d+) steps, the mean loss of the last 20 is ([\d.]+)', learner.text)
  return int(match[1]), float(match[2])


@pytest.mark.full
def test_a_syncer_begins_with_the_arrays_of_an_orbax_checkpoint(start, tmp_path):
  params = {name: jnp.full((8, 8), float(value)) for value, name in enumerate('abcd')}
  ocp.save(tmp_path / 'init', params)
  workdir = tmp_path / 'run'
  flags = (f'--init={tmp_path / "init"}', '--config.train.steps=8', '--config.sync.learners=1')
  syncer = _syncer(start, workdir, *flags)
  with diloco_jax.join(
    jax.tree.map(jnp.zeros_like, params), learner='l0', syncer=f'file:{workdir}/syncer/address'
  ) as peer:
    own = peer.params
    np.testing.assert_array_equal(own['d'], params['d'])
    for _ in peer.steps():
      own = peer.sync(own, tokens=1)
  assert syncer.end() == 0, syncer
