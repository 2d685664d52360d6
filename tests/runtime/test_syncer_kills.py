"""A syncer that is killed again and again, at every failpoint and at any moment: nothing is missed.

One run of real processes serves all tests: `tiny` with two learners and a checkpoint every two
outer steps. Each life of the syncer is ended by SIGKILL, from outside after a drawn time or by
itself at a failpoint, and the next one is begun by the supervisor, without a flag. The tests read
what the processes have written down.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import random
import signal
from typing import Callable

import pytest

from diloco_jax.runtime import aftermath
from diloco_jax.runtime import failpoints
from diloco_jax.runtime import local
from diloco_jax.runtime import records
from diloco_jax.runtime import supervisor as supervisor_lib
from diloco_jax.runtime import tapes
from diloco_jax.runtime import view as view_lib
from experiments.configs import stdlib_lm

DEADLINE_S = 280
LEARNERS = ('l0', 'l1')
ANY = ''  # killed from outside; between them the supervisor loses its patience with short lives
PLAN = (ANY, *failpoints.NAMES[:3], ANY, *failpoints.NAMES[3:], ANY)
OVERRIDES = {
  'sync.learners': 2, 'sync.checkpoint_every_syncs': 2, 'train.steps': 1_000_000,
  'train.log_every': 1_000, 'train.eval_every': 0, 'train.checkpoint_every_steps': 1_000,
}


@dataclasses.dataclass
class Run:
  """What is left of the run: facts of every process, in the order of time."""

  workdir: pathlib.Path
  outcome: supervisor_lib.Outcome
  said: list[str]
  facts: list[tuple[str, dict]]

  def of(self, process: str, name: str) -> list[dict]:
    return [fact for who, fact in self.facts if (who, fact['name']) == (process, name)]

  def deaths(self) -> list[dict]:
    return [fact for fact in self.of('supervisor', 'exit')
            if fact['child'] == 'syncer' and fact['code'] == -signal.SIGKILL]


class Conductor:
  """Carries out the plan on a run, and waits for facts."""

  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    config = stdlib_lm.get_config('tiny')
    config.sync.learners = len(LEARNERS)
    flags = ['--config=experiments/configs/stdlib_lm.py:tiny',
             *(f'--config.{name}={value}' for name, value in OVERRIDES.items())]
    syncer, *learners = local.programs(config, workdir, flags, alone=False)
    self.environment = dict(syncer.environment)  # of the syncer's next life
    self.said: list[str] = []
    self.supervisor = supervisor_lib.Supervisor(
      [dataclasses.replace(syncer, environment=self.environment), *learners], workdir,
      view_lib.RunView(list(LEARNERS), config.train.steps), recorder,
      listen=lambda name, line: self.said.append(f'[{name}] {line}'),
    )
    self._tail = records.TailAll(workdir)
    self.facts: list[tuple[str, dict]] = []
    self._draw = random.Random(7)

  async def until(self, condition: Callable[[], object]) -> None:
    while not condition():
      await asyncio.sleep(0.05)
      self.facts += self._tail.read()

  def count(self, process: str, name: str) -> int:
    return sum((who, fact['name']) == (process, name) for who, fact in self.facts)

  async def carry_out(self) -> None:
    fate = self.supervisor.fates['syncer']
    for life, place in enumerate(PLAN, 1):
      await self.until(lambda: fate.starts == life)
      following = PLAN[life] if life < len(PLAN) else ANY
      self.environment[failpoints.VARIABLE] = f'{following}:kill' if following else ''
      if place == ANY:
        await self.commits(self._draw.randint(1, 4))
        await asyncio.sleep(0.2 * self._draw.random())  # any moment
        assert self.supervisor.bring_down('syncer', 0.1, 'killed by the test')
    await self.until(lambda: fate.starts == len(PLAN) + 1)
    await self.commits(3)
    self.supervisor.retire()

  async def commits(self, more: int) -> None:
    """Until the present life of the syncer has committed so many outer steps."""
    self.facts += self._tail.read()
    due = self.count('syncer', 'outer') + more
    await self.until(lambda: self.count('syncer', 'outer') >= due)


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory) -> Run:
  workdir = tmp_path_factory.mktemp('kills')
  with contextlib.closing(records.Recorder(workdir, 'supervisor', tensorboard=False)) as recorder:
    conductor = Conductor(workdir, recorder)
    outcome = asyncio.run(_play(conductor))
  return Run(workdir, outcome, conductor.said, records.TailAll(workdir).read())


async def _play(conductor: Conductor) -> supervisor_lib.Outcome:
  running = asyncio.create_task(conductor.supervisor.run())
  playing = asyncio.create_task(conductor.carry_out())
  try:
    async with asyncio.timeout(DEADLINE_S):
      await asyncio.wait({running, playing}, return_when=asyncio.FIRST_COMPLETED)
      assert playing.done(), '\n'.join(conductor.said)
      playing.result()
      return await running
  finally:
    playing.cancel()
    if not running.done():
      running.cancel()
      await asyncio.gather(running, return_exceptions=True)


def test_every_life_ends_as_planned_and_the_run_ends_well(run):
  assert run.outcome.code == 0, '\n'.join(run.said)
  assert len(run.deaths()) == len(PLAN)
  assert run.outcome.fates['syncer'].starts == len(PLAN) + 1
  assert {run.outcome.fates[name].starts for name in LEARNERS} == {1}  # nobody else fell


def test_learners_step_while_there_is_no_syncer(run):
  back = [fact['t_ns'] for fact in run.of('syncer', 'recovered')]
  for death, back_ns in zip(run.deaths(), back, strict=True):
    for name in LEARNERS:
      steps = [fact['t_ns'] for fact in run.of(name, 'step')]
      assert aftermath.within(steps, death['t_ns'], back_ns) >= 1, (name, death)


def test_no_version_that_a_learner_has_seen_is_ever_missing(run):
  seen, checked = {}, 0
  for who, fact in run.facts:
    if who in LEARNERS and fact['name'] == 'adopted':
      seen[fact['fragment']] = max(seen.get(fact['fragment'], 0), fact['version'])
    elif fact['name'] == 'recovered':
      checked += 1
      assert all(fact['versions'][p] >= version for p, version in seen.items()), (fact, seen)
  assert checked == len(PLAN) and any(seen.values())


def test_no_outer_step_is_made_twice_and_none_is_left_out(run):
  """Of one fragment the published versions follow one another through all lives. The record of one
  whose syncer was killed between commit and publication is missing, and comes with the recovery."""
  last = {}
  for _, fact in run.facts:
    if fact['name'] == 'recovered':
      last = dict(enumerate(fact['versions']))
    elif fact['name'] == 'outer':
      assert fact['version'] == last.get(fact['fragment'], 0) + 1, fact
      last[fact['fragment']] = fact['version']


def test_learners_and_syncer_have_the_same_bits_after_every_recovery(run):
  ledger = run.of('syncer', 'ledger')[-1]
  assert ledger['repaired'] == 0, 'a digest differed'


def test_the_books_add_up(run):
  ledger = run.of('syncer', 'ledger')[-1]
  assert ledger['unsettled'] == 0 and aftermath.balance(ledger) == 0
  assert ledger['merged'] > 0
  assert ledger['synced'] == sum(run.of('syncer', 'recovered')[-1]['versions']) + _outer(run)
  for name in LEARNERS:  # each ended in order: not one token is missing
    assert ledger['learners'][name]['tokens'] == run.of(name, 'step')[-1]['tokens']


def _outer(run: Run) -> int:
  """Outer steps of the last life."""
  back_ns = run.of('syncer', 'recovered')[-1]['t_ns']
  return sum(fact['t_ns'] > back_ns for fact in run.of('syncer', 'outer'))


def test_the_log_was_cut_and_both_checkpoints_are_there(run):
  folder = run.workdir / 'syncer'
  assert len([path for path in (folder / 'ckpt').iterdir() if path.name.isdigit()]) == 2
  oldest = min(int(path.stem) for path in (folder / 'wal').glob('*.wal'))
  assert oldest > 1


def test_every_life_takes_its_turns_again(run):
  lives = [life for life in tapes.find(run.workdir) if life.node == 'syncer']
  assert len(lives) == len(PLAN) + 1
  for life in lives:
    assert tapes.replay(life).identical, life.name
