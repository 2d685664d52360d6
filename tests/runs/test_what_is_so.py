"""What the page, the report, the metrics and the lines say of real processes that are killed,
stopped, blocked, poisoned and left without each other is what `ps` says."""

import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from diloco_jax.report import serve
from diloco_jax.report import summary as summary_lib
from tests import programs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
LOOP = programs.ROOT / 'tests' / 'runs' / 'lib' / 'loop_that.py'
DEADLINE_S = 400


class World:
  """A syncer and loops in one folder."""

  def __init__(self, folder: pathlib.Path, start: Callable[..., programs.Program]):
    self.run, self.processes, self._start = (
      folder / 'own',
      dict[str, programs.Program](),
      start,
    )
    self._watch: serve.Watch | None = None

  def syncer(self, steps: int) -> None:
    words = ['--config=own_loop', f'--config.train.steps={steps}', f'--workdir={self.run}']
    self.processes['syncer'] = self._start(*programs.diloco('syncer', *words))

  def loop(self, learner: str, mode: str, here: bool = True) -> None:
    address, workdir = f'file:{self.run}/syncer/address', str(self.run) if here else ''
    self.processes[learner] = self._start(LOOP, mode, learner, address, workdir)

  def state(self) -> dict[str, Any]:
    self._watch = self._watch or serve.watch_of(self.run)
    return self._watch.state()

  def text(self, learner: str) -> str:
    return self.state()['learners'].get(learner, {}).get('condition', {}).get('text', '')

  def log(self, name: str) -> str:
    return self.processes[name].text

  def until(self, what: str, holds: Callable[[], Any]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not holds():
      logs = '\n'.join(map(str, self.processes.values()))
      assert time.monotonic() < end_s, f'{what}: {self._watch and self.state()}\n{logs}'
      time.sleep(0.5)

  def ps(self, name: str) -> str:
    """The status that `ps` shows, or the exit code."""
    program = self.processes[name]
    if not program.running:
      return f'exit {program.end()}'
    return psutil.Process(program.process.pid).status()


@pytest.fixture(name='world')
def _world(tmp_path) -> Iterator[World]:
  with programs.starting() as start:
    yield World(tmp_path, start)


def test_the_surfaces_say_what_ps_says(world):
  world.syncer(1_000_000)
  first = world.run / 'records' / 'syncer.jsonl'
  # Times count from the first record: from this one, not from one of l5.
  world.until('its first record', lambda: first.exists() and first.read_bytes().endswith(b'\n'))
  assert world.state()['condition']['state'] in ('starting', 'not begun')
  for learner, mode in (('l0', 'go'), ('l1', 'block'), ('l2', 'go'), ('l3', 'go'), ('l4', 'spoil'),
                        ('l5', 'behind'), ('l6', 'go')):  # fmt: skip
    world.loop(learner, mode, here=learner != 'l6')
  world.until('all have joined', lambda: sum(
    row['step'] > 20 for row in world.state()['learners'].values()) == 7)  # fmt: skip
  assert world.state()['condition']['state'] == 'training'
  world.processes['l2'].send(signal.SIGKILL)
  world.processes['l3'].send(signal.SIGSTOP)
  truth = {
    'l0': ('sleeping running', r'^training$'),
    'l1': ('sleeping running', r'^no step for \d+ s: reads its next batch$'),
    'l2': ('exit -9', r'^(lost: .*|not heard of for .*)'),
    'l3': ('stopped', r'^(lost: .*|not heard of for .*)'),
    'l4': ('exit 1', r'^in quarantine: NaN or Inf, '),
    'l5': ('sleeping running', r'^training$'),
    'l6': ('sleeping running', r'^training$'),
  }
  for learner, (_, says) in truth.items():
    world.until(f'{learner} {says}', lambda: re.search(says, world.text(learner)))  # noqa: B023
  for learner, (status, says) in truth.items():
    assert world.ps(learner) in status or status == world.ps(learner), learner
    assert re.search(says, world.text(learner)), world.text(learner)
  now = world.state()
  assert 0 < now['end_s'] < 3600, 'the clock of l5 is two hours behind'
  rates = {name: row['tokens_per_second'] > 0 for name, row in now['learners'].items()}
  assert rates == {name: name in ('l0', 'l5', 'l6') for name in truth}
  notices = '\n'.join(now['notices'])
  assert all(re.search(rf'^{lost}: ', notices, re.M) for lost in ('l1', 'l2', 'l3', 'l4'))
  world.until('a line', lambda: re.search('l1 on .* has made no step', world.log('syncer')))
  assert 'reads its next batch (wait in threading.py' in world.log('l1')
  assert 'unreachable' not in world.log('l1')
  metrics = serve.metrics(now)
  for learner, state in (('l0', 'training'), ('l1', 'no step'), ('l4', 'in quarantine')):
    assert f'diloco_learner_state{{learner="{learner}",state="{state}"}} 1' in metrics
  report = summary_lib.text(summary_lib.write(world.run, plot=False), world.run, 400)
  assert re.search(r'learner l1 .*; no step for \d+ s: reads its next batch', report)
  assert re.search(r'learner l4 .*in quarantine: NaN or Inf', report)

  world.processes['syncer'].kill()
  world.until('its silence', lambda: world.state()['condition']['kind'] == 'silent')
  now = world.state()
  assert now['seconds_left'] is None and 'records of the syncer end' in now['notices'][0]
  assert world.text('l0') == 'alone: Socket closed' or world.text('l0').startswith('alone')
  assert 'not heard of' in world.text('l6'), 'its records are not here'
  world.syncer(1_000_000)
  world.until('it is back', lambda: world.text('l0') == world.text('l6') == 'training')
  assert world.state()['condition']['state'] == 'training'


def test_a_blocked_learner_ends_by_itself_once_its_run_is_over(world):
  """stuck.sh: l1's loader blocks for ever."""
  world.syncer(200)
  for learner, mode in (('l0', 'go'), ('l1', 'block')):
    world.loop(learner, mode)
  world.until('the end', lambda: not world.processes['syncer'].running)
  over_s = time.monotonic()
  world.until('the end of l1', lambda: not world.processes['l1'].running)
  assert time.monotonic() - over_s < 10, 'a lease'
  assert [world.processes[name].end() for name in ('syncer', 'l0', 'l1')] == [0, 0, 0]
  assert re.search(
    r'the run closes: its last syncs wait for l1.*, at most \d+ s', world.log('syncer')
  )
  assert 'done at clock 200 of 200' in world.log('l0') and 'unreachable' not in world.log('l1')
  assert 'it ends without its step' in world.log('l1')
  world.until('all is read', lambda: not world.state()['behind'])
  now = world.state()
  assert (
    now['condition']['state'] == 'over' and not now['notices'] and now['tokens_per_second'] == 0
  )


def test_learners_of_a_syncer_that_ended_for_good_end_and_say_so(world):
  world.syncer(1_000_000)
  world.loop('l0', 'go')
  world.until(
    'it trains', lambda: (world.run / 'records').exists() and world.text('l0') == 'training'
  )
  world.processes['syncer'].kill()
  for path in (world.run / 'syncer').rglob('*'):
    if path.is_file() and 'wal' in path.parts:
      path.write_bytes(b'x' * max(64, path.stat().st_size))
  world.syncer(1_000_000)
  world.until('l0 has ended', lambda: not world.processes['l0'].running)
  assert world.processes['syncer'].end() == 42 and world.processes['l0'].end() != 0
  assert 'the syncer has ended for good' in world.log('l0')
  world.until('the page knows', lambda: world.state()['condition']['state'] == 'dead')
  assert 'The run is dead: the syncer refused (exit code 42)' in world.state()['notices'][0]
