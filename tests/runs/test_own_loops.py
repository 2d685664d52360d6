"""Loops of the user's own (experiments/examples) learn together, as threads and as processes."""

import difflib
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import diloco_jax
from tests.runs.lib import gated_loop

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 240
CHANGED_LINES = 3
LEARNED = 1.3  # from 4.2; the noise of the data leaves 0.73


@pytest.mark.parametrize('name', ['loop_nnx', 'loop_linen', 'loop_optax', 'lora'])
def test_a_loop_becomes_a_learner_by_three_lines(name):
  """Lines without their indentation, which `with` changes."""
  module = gated_loop.example(name)
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
    assert re.search(r'diloco_jax\.join\(params, syncer=[^,]+\) as peer:$', join)


def _changed(before: str, after: str) -> list[str]:
  lines = ([line.strip() for line in text.splitlines()] for text in (before, after))
  return [line for line in difflib.ndiff(*lines) if line.startswith('+ ')]


@pytest.mark.full
def test_two_loops_learn_together_as_threads():
  module, losses = gated_loop.example('loop_nnx'), {}
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
  for one in (alone, *losses.values()):
    assert np.mean(one[-20:]) < LEARNED < one[0]


def _in_standard_types(call):
  """The examples are written for JAX's defaults, the tests have stricter ones."""
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    return call()


# --- Processes ------------------------------------------------------------------------------------


@pytest.fixture(name='start')
def _start(tmp_path):
  started = []

  def start(*command: str) -> subprocess.Popen:
    started.append(
      subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={
          **os.environ,
          'PYTHONPATH': str(ROOT),
          'PYTHONWARNINGS': '',
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
      )
    )
    return started[-1]

  yield start
  for process in started:
    process.kill()
    process.communicate()


def _syncer(start, workdir: pathlib.Path, *flags: str) -> subprocess.Popen:
  return start('-m', 'diloco_jax', 'syncer', '--config=own_loop', f'--workdir={workdir}', *flags)


def _facts(workdir: pathlib.Path, name: str) -> list[dict]:
  path = workdir / 'records' / 'syncer.jsonl'
  lines = path.read_text().split('\n')[:-1] if path.exists() else ()
  return [fact for fact in map(json.loads, lines) if fact['name'] == name]


def test_the_loop_of_the_readme_takes_the_overrides_of_the_syncer(start, tmp_path):
  workdir, loop = tmp_path / 'run', tmp_path / 'loop.py'
  loop.write_text(
    start('-m', 'diloco_jax', 'example', 'loop_optax').communicate(timeout=DEADLINE_S)[0]
  )
  syncer = _syncer(start, workdir, '--config.sync.fragments=2', '--config.sync.period=6')
  place = f'--syncer=file:{workdir}/syncer/address'
  learners = [start(str(loop), f'--learner={name}', place) for name in ('l0', 'l1')]
  for learner in learners:
    text = learner.communicate(timeout=DEADLINE_S)[0]
    steps, loss = re.search(r'(\d+) steps, the mean loss of the last 20 is ([\d.]+)', text).groups()
    assert learner.returncode == 0 and int(steps) > 20 and float(loss) < 2.5, text
  assert syncer.wait(DEADLINE_S) == 0
  merged = _facts(workdir, 'synced')
  assert {one['fragment'] for one in merged} == {0, 1}
  assert {name for one in merged for name in one['participants']} == {'l0', 'l1'}


def test_a_killed_loop_comes_back_with_its_optimizer_state(start, tmp_path):
  """The other learner waits in the middle of the run until the killed one is merged again."""
  workdir, back = tmp_path / 'run', tmp_path / 'back'
  address = f'--syncer=file:{workdir}/syncer/address'
  again = [str(gated_loop.EXAMPLES / 'loop_linen.py'), '--learner=l0', address]
  again.append(f'--workdir={workdir}')
  syncer = _syncer(start, workdir)
  first = start(*again)
  other = start(gated_loop.__file__, str(back), 'l1', address.split('=')[1])
  saved = lambda: any(workdir.glob('islands/l0/ckpt/[0-9]*[0-9]'))
  gated_loop.until(lambda: saved() or first.poll() is not None)
  first.send_signal(signal.SIGKILL)
  assert first.wait() == -signal.SIGKILL, first.communicate()

  merged = lambda: [one for one in _facts(workdir, 'synced') if 'l0' in one['participants']]
  before = len(merged())
  second = start(*again)
  gated_loop.until(lambda: len(merged()) >= before + 4 or second.poll() is not None)
  back.touch()
  texts = [process.communicate(timeout=DEADLINE_S)[0] for process in (second, other)]
  assert ' l0 continues with the moments of its checkpoint at step' in texts[0], texts[0]
  for process, text in zip((second, other), texts):
    steps, loss = re.search(r'(\d+) steps, the mean loss of the last 20 is ([\d.]+)', text).groups()
    assert process.returncode == 0 and int(steps) > 0 and float(loss) < LEARNED, text
  assert syncer.wait(DEADLINE_S) == 0
  rows = _facts(workdir, 'ledger')[-1]['learners']
  assert rows['l0']['steps'] > 20 and rows['l1']['steps'] >= gated_loop.GATE


@pytest.mark.full
def test_a_syncer_begins_with_the_arrays_of_an_orbax_checkpoint(start, tmp_path):
  params = {name: jnp.full((8, 8), float(value)) for value, name in enumerate('abcd')}
  ocp.save(tmp_path / 'init', params)
  workdir = tmp_path / 'run'
  flags = (f'--init={tmp_path / "init"}', '--config.train.steps=8', '--config.sync.learners=1')
  syncer = _syncer(start, workdir, *flags)
  with diloco_jax.join(
    jax.tree.map(jnp.zeros_like, params),
    learner='l0',
    syncer=f'file:{workdir}/syncer/address',
  ) as peer:
    mine = peer.params
    np.testing.assert_array_equal(mine['d'], params['d'])
    for _ in peer.steps():
      mine = peer.sync(mine, tokens=1)
  assert syncer.wait(DEADLINE_S) == 0


def test_a_syncer_that_cannot_work_is_refused_in_one_line(start, tmp_path):
  flags = f'--workdir={tmp_path / "run"}', '--config=stdlib_lm:tiny', '--init=there'
  refused = start('-m', 'diloco_jax', 'syncer', *flags)
  said = refused.communicate(timeout=DEADLINE_S)[0]
  assert refused.returncode == 42 and said.count('error: ') == 1
  assert 'that of its task' in said, said
