"""Real processes, all killed, then restored from kept checkpoints with other learners and meshes.

One run serves all tests: `tiny` with three learners of two devices keeps checkpoints; all processes
are killed at once; `diloco restore --to=CLOCK` brings the run back to one of them, with two
learners of one device, and `diloco train --resume` continues.
"""

import contextlib
import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from diloco_jax.launch import local_run
from diloco_jax.report import records
from diloco_jax.storage import checkpoint, folders
from tests.runs.lib import slow_data

DEADLINE_S = 280
pytestmark = pytest.mark.full  # tests/launch/test_restore.py has the command
KEEP_EVERY = 6
COMMON = (
  '--config=stdlib_lm:tiny',
  slow_data.FLAG,
  '--config.train.steps=1000000',
  '--config.train.log_every=1000',
  '--config.train.eval_every=0',
  '--config.train.checkpoint_every_steps=1000',
  '--config.sync.checkpoint_every_syncs=3',
  f'--config.sync.keep_every={KEEP_EVERY}',
)
ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Story:
  """The run before and after its restore, and what was said and recorded since.

  Attributes:
    saved: the machine's state in the syncer's checkpoint that it goes back to.
    learners: the clocks of each learner's checkpoints.
  """

  workdir: pathlib.Path
  saved: dict
  learners: dict[str, list[int]]
  said: str
  code: int
  facts: list[tuple[str, dict]]  # of the second half, in the order of time

  def of(self, process: str, name: str) -> list[dict]:
    return [fact for who, fact in self.facts if (who, fact['name']) == (process, name)]


@contextlib.contextmanager
def running(
  command: str, workdir: pathlib.Path, output: pathlib.Path, *flags: str
) -> Iterator[subprocess.Popen]:
  environment = local_run.environment(1)
  with open(output, 'ab') as file:
    process = subprocess.Popen(
      [sys.executable, '-m', 'diloco_jax', command, *flags, f'--workdir={workdir}'],
      cwd=ROOT,
      env=environment,
      stdout=file,
      stderr=subprocess.STDOUT,
    )
    try:
      yield process
    finally:
      if process.poll() is None:
        process.kill()
      process.wait()


def until(condition: Callable[[], object], output: pathlib.Path) -> None:
  end_s = time.monotonic() + DEADLINE_S
  while not condition():
    assert time.monotonic() < end_s, output.read_text(encoding='utf-8')
    time.sleep(0.05)


def family(process: subprocess.Popen) -> list[psutil.Process]:
  root = psutil.Process(process.pid)
  return [root, *root.children(recursive=True)]


def clocks_of(node: pathlib.Path) -> dict[int, int]:
  """The clocks of a node's checkpoints, by their numbers."""
  found = {}
  for number in folders.checkpoints(node):
    with contextlib.suppress(OSError, ValueError):  # it is removed at this moment
      found[number] = checkpoint.clock(node / folders.CHECKPOINTS / str(number))
  return found


def whole(node: pathlib.Path) -> dict[int, int]:
  """Those that verify: a kill may have come while an old one was removed."""
  found = clocks_of(node)
  for number in list(found):
    try:
      checkpoint.verify(node / folders.CHECKPOINTS / str(number))
    except (OSError, checkpoint.CheckpointError):
      del found[number]
  return found


@pytest.fixture(scope='module', name='story')
def _story(tmp_path_factory) -> Story:
  folder = tmp_path_factory.mktemp('kept')
  workdir, first, second = folder / 'run', folder / 'first.txt', folder / 'second.txt'
  syncer = folders.syncer_folder(workdir)
  islands = {name: workdir / 'islands' / name for name in ('l0', 'l1', 'l2')}

  def enough() -> bool:
    intervals = {clock // KEEP_EVERY for clock in clocks_of(syncer).values()}
    return len(intervals) >= 5 and all(clocks_of(node) for node in islands.values())

  with running('train', workdir, first, *COMMON) as process:
    until(enough, first)
    members = family(process)
    for one in members:
      with contextlib.suppress(psutil.NoSuchProcess):
        one.kill()
    process.wait()
    psutil.wait_procs(members, timeout=DEADLINE_S)
  tail = records.TailAll(workdir)
  tail.read()
  clocks = whole(syncer)
  learners = {name: list(whole(node).values()) for name, node in islands.items()}
  newest = max(clocks.values())  # two checkpoints may have one clock
  goal = max(number for number in clocks if clocks[number] < newest)
  saved, _ = checkpoint.verify(syncer / folders.CHECKPOINTS / str(goal))
  flags = (f'--to={clocks[goal]}', '--config.sync.learners=2', '--config.mesh.data=1')
  with running('restore', workdir, second, *flags) as process:
    assert process.wait(DEADLINE_S) == 0, second.read_text()
  with running('train', workdir, second, '--resume') as process:
    facts = []

    def under_way() -> bool:
      facts.extend(tail.read())
      done = {(who, fact['name']) for who, fact in facts}
      return done >= {('l0', 'step'), ('l1', 'step'), ('syncer', 'outer')}

    until(lambda: process.poll() is not None or under_way(), second)
    assert process.poll() is None, second.read_text()
    process.send_signal(signal.SIGTERM)
    code = process.wait(DEADLINE_S)
  facts.extend(tail.read())
  return Story(workdir, saved, learners, second.read_text(), code, facts)


def test_the_syncer_continues_from_its_checkpoint(story):
  (recovered,) = story.of('syncer', 'recovered')
  assert recovered['versions'] == story.saved['versions'] and recovered['replayed'] == 0
  assert (recovered['sync'], recovered['log']) == (story.saved['opened'], story.saved['log'])
  later = {}
  for outer in story.of('syncer', 'outer'):
    later.setdefault(outer['fragment'], []).append(outer['version'])
  assert later
  for fragment, found in later.items():
    first = recovered['versions'][fragment] + 1
    assert found == list(range(first, first + len(found)))


def test_learners_continue_from_theirs_on_another_mesh(story):
  for learner in ('l0', 'l1'):
    fit = [clock for clock in story.learners[learner] if clock <= story.saved['opened']]
    if fit:
      assert f'{learner} continues from its checkpoint at clock {max(fit)}' in story.said
    else:
      assert f'{learner} starts from the fragments of the syncer' in story.said
    assert story.of(learner, 'step'), story.said


def test_a_learner_without_a_place_has_left(story):
  assert 'l2 is not in this config' in story.said
  assert not story.of('l2', 'step')


def test_the_run_ends_in_order(story):
  assert story.code == 130, story.said
  assert not story.of('supervisor', 'refused')
  ledger = story.of('syncer', 'ledger')[-1]
  discarded = sum(ledger['discarded'].values())
  assert ledger['trained'] * ledger['fragments'] == (
    ledger['merged'] + discarded + ledger['unsettled']
  )
  row = ledger['learners'].get('l2')  # closed: none of its tokens is unsettled
  assert row is None or row['tokens'] * ledger['fragments'] == row['merged'] + row['discarded']
  assert json.loads((story.workdir / 'config.json').read_text())['sync']['learners'] == 2
