"""Processes that are preempted, then killed repeatedly, under load: nothing is lost, other learners
do not pause.

One run of real processes serves all tests: `tiny` with two learners, three data shards and a
checkpoint every two outer steps. SIGTERM ends l1, then the syncer, and each comes back. Then
SIGKILL ends the syncer at any moment, from the test after a drawn time or from itself
at a failpoint, and the supervisor starts a new process. Meanwhile l1 is
killed, too, l0 is untouched. Then all processes are killed at once and restart in a drawn order. At
the very end l0 is frozen, to show that the tests notice a pause. The tests read the records of the
processes, and the judge reads their tapes.
"""

import asyncio
import collections
import dataclasses
import functools
import math
import pathlib
import random
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.protocol import events, messages
from diloco_jax.report import records as records_lib
from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.replay import tape_files
from tests import visits
from tests.runs.lib import conductor, failpoints, promises
from tests.runs.lib import pulse as pulse_lib

DEADLINE_S = 800
# Three minutes on two quiet cores.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SEED = 7
LEARNERS = ('l0', 'l1')
ANY = ''  # killed by the test
FREEZE_S = 2.5
NOTICE_S = 20.0  # a preempted process ends within 10 s; a busy machine takes longer
STEP_S = 0.03  # short, since a pause is told from the time between two steps
AFTERWARDS_NS = 2_000_000_000  # a gap this long after a restart still counts for the death
OVERRIDES = {
  **conductor.ENDLESS,
  'sync.learners': 2,
  'sync.checkpoint_every_syncs': 2,
  'data.shards': 3,
  'train.checkpoint_every_steps': 50,
}


def plan(random_kills: int) -> tuple[str, ...]:
  """Every failpoint of a run without a store once, with kills by the test between them: the
  supervisor abandons a program after several short processes in a row."""
  names = [name for name in failpoints.NAMES if not name.startswith('store.')]
  apart = math.ceil(len(names) / random_kills)
  places: list[str] = []
  for n, name in enumerate(names):
    places += [ANY, name] if n % apart == 0 else [name]
  return (*places, *[ANY] * (random_kills - places.count(ANY)))


@dataclasses.dataclass
class Run(conductor.Run):
  conducted: 'Conductor'

  def end(self, child: str) -> dict:
    """The exit of the process that got SIGTERM."""
    return next(
      fact
      for fact in self.of('supervisor', 'exit')
      if fact['child'] == child and fact['t_ns'] > self.conducted.asked_ns[child]
    )

  def deaths(self, child: str) -> list[int]:
    return [
      fact['t_ns']
      for fact in self.of('supervisor', 'exit')
      if fact['child'] == child and fact['code'] == -signal.SIGKILL
    ]

  def lives(self, child: str) -> list[tuple[int, int, int]]:
    """(pid, born, ended) of its processes."""
    ends = {
      fact['pid']: fact['t_ns'] for fact in self.of('supervisor', 'exit') if fact['child'] == child
    }
    return [
      (fact['pid'], fact['t_ns'], ends[fact['pid']])
      for fact in self.of('supervisor', 'process')
      if fact['child'] == child and fact['state'] == 'starting'
    ]

  def gaps_of_the_survivor(self) -> list[pulse_lib.Gap]:
    """The longest gap between two steps of l0 from each death of another to its return."""
    steps = [fact['t_ns'] for fact in self.of('l0', 'step')]
    gaps = [
      gap
      for pid, born_ns, ended_ns in self.lives('l0')
      for gap in self.conducted.pulse.gaps(
        pid, [t_ns for t_ns in steps if born_ns <= t_ns <= min(ended_ns, self.conducted.froze_ns)]
      )
    ]
    longest = []
    for name in ('syncer', 'l1'):
      back = [born_ns for _, born_ns, _ in self.lives(name)]
      for death_ns in self.deaths(name):
        back_ns = next((born_ns for born_ns in back if born_ns > death_ns), death_ns)
        around = [
          gap
          for gap in gaps
          if death_ns < gap.at_ns + gap.wall_ns and gap.at_ns < back_ns + AFTERWARDS_NS
        ]
        longest += [max(around)] if around else []  # l0 has died with it
    return longest


class NextLife(collections.UserDict):
  """The environment of the next process, with the failpoint at which it dies."""

  def __init__(self, environment: Mapping[str, str], place: Callable[[], str]):
    super().__init__({**environment, failpoints.VARIABLE: ANY})
    self._place = place

  def __getitem__(self, name: str) -> str:
    return self._place() if name == failpoints.VARIABLE else super().__getitem__(name)


class Conductor(conductor.Conductor):
  """Carries out a plan on a run, and waits for facts: where each process of the syncer ends, how
  many times l1 is killed meanwhile, how many times all processes at once after that.

  Attributes:
    pulse: samples of the learners' threads.
    asked_ns: when SIGTERM was sent to a node.
    killed_ns: when SIGTERM had been sent to all that get it.
    site_ns: when all processes were killed.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    recorder: records_lib.Recorder,
    plan: tuple[str, ...],
    learner_kills: int,
    site_kills: int,
    seed: int = SEED,
    overrides: dict[str, Any] | None = None,
  ):
    self.plan, self.learner_kills, self._site_kills = plan, learner_kills, site_kills
    self.pulse = pulse_lib.Pulse()
    self.asked_ns: dict[str, int] = {}
    self.killed_ns = 0
    self.site_ns: list[int] = []
    self.froze_ns = 0
    self._draw = random.Random(seed)
    config = {**OVERRIDES, **(overrides or {})}
    super().__init__(workdir, recorder, config, change=self._with_failpoints)

  def _with_failpoints(self, program: supervisor_lib.LocalProgram) -> supervisor_lib.LocalProgram:
    if program.name != 'syncer':
      return conductor.pace(program, STEP_S)
    return failpoints.instead(program, NextLife(program.environment, self._place_of_next_life))

  def _place_of_next_life(self) -> str:
    lived = self._kills('syncer')
    return self.plan[lived] if lived < len(self.plan) else ANY

  def look(self) -> None:
    """Also samples the learners."""
    super().look()
    for name in LEARNERS:
      if (child := self.supervisor.child(name)) is not None:
        self.pulse.sample(child.pid)

  def _kills(self, name: str) -> int:
    """How many of its processes have been started after one that was killed, and the first."""
    return self.supervisor.statuses[name].starts - (name in self.asked_ns)

  async def carry_out(self) -> None:
    assert self.plan[0] == ANY, 'it is preempted'
    await self._merges(3)
    await self._preempt('l1')
    await self._preempt('syncer')
    self.killed_ns = time.monotonic_ns()
    async with asyncio.TaskGroup() as both:
      both.create_task(self._kill_the_syncer())
      both.create_task(self._kill_a_learner())
    for _ in range(self._site_kills):
      await self._kill_everything()
    self.froze_ns = time.monotonic_ns()
    child = self.supervisor.child('l0')
    child.freeze()
    await asyncio.sleep(FREEZE_S)
    child.thaw()
    steps = self.count('l0', 'step')
    await self.until(lambda: self.count('l0', 'step') >= steps + 3)
    self.supervisor.retire()

  def merged(self, name: str, more: int) -> bool:
    """Whether the outer steps since the last death have had enough shares of a learner."""
    since = max(
      (
        index
        for index, (_, fact) in enumerate(self.facts)
        if fact['name'] == 'exit' and fact.get('child') in ('syncer', name)
      ),
      default=0,
    )
    return self.merges(name, since) >= more

  async def _merges(self, more: int) -> None:
    """Waits until every learner has had so many contributions merged from now on."""
    self.look()
    at = len(self.facts)
    await self.until(lambda: all(self.merges(name, at) >= more for name in LEARNERS))

  async def _preempt(self, name: str) -> None:
    """Sends SIGTERM at any moment, and waits for the next process."""
    await asyncio.sleep(0.3 * self._draw.random())
    self.asked_ns[name] = time.monotonic_ns()
    assert self.supervisor.bring_down(name, 0.0, 'preempted', politely=True)
    await self.until(lambda: self.supervisor.statuses[name].starts == 2)
    await self._merges(3)

  async def _kill_the_syncer(self) -> None:
    for life, place in enumerate(self.plan, 1):
      await self.until(lambda: self._kills('syncer') == life)
      if place == ANY:
        await self.commits(self._draw.randint(1, 4))
        await asyncio.sleep(0.2 * self._draw.random())  # any moment
        assert self.supervisor.bring_down('syncer', 0.0, 'killed by the test')
    await self.until(lambda: self._kills('syncer') == len(self.plan) + 1)
    await self.commits(3)

  async def commits(self, more: int) -> None:
    """Waits until the present process of the syncer has committed so many outer steps."""
    due = self.count('syncer', 'outer') + more
    await self.until(lambda: self.count('syncer', 'outer') >= due)

  async def _kill_a_learner(self) -> None:
    for life in range(1, self.learner_kills + 1):
      await self.until(lambda: self._kills('l1') == life and self.merged('l1', 1))
      await asyncio.sleep(0.5 * self._draw.random())
      assert self.supervisor.bring_down('l1', 0.0, 'killed by the test')
    await self.until(lambda: self._kills('l1') == self.learner_kills + 1 and self.merged('l1', 1))

  async def _kill_everything(self) -> None:
    pauses_s = self._draw.sample((0.0, 0.3, 0.6), 3)  # draws the order of restarts
    self.site_ns.append(time.monotonic_ns())
    for name, down_s in zip(('syncer', *LEARNERS), pauses_s):
      assert self.supervisor.bring_down(name, down_s, 'everything is killed')
    exits = len(self.asked_ns) + len(self.plan) + self.learner_kills + 3 * len(self.site_ns)
    await self.until(lambda: self.count('supervisor', 'exit') >= exits)
    await self.until(lambda: all(self.merged(name, 2) for name in LEARNERS))


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory, counts) -> Run:
  return play(
    tmp_path_factory.mktemp('kills'),
    plan=plan(counts.syncer_kills),
    learner_kills=counts.learner_kills,
    site_kills=counts.site_kills,
  )


def play(workdir: pathlib.Path, deadline_s: float = DEADLINE_S, **plan: Any) -> Run:
  """Carries out a plan (arguments of Conductor) in a new folder."""
  conducted, left = conductor.play(workdir, functools.partial(Conductor, **plan), deadline_s)
  return Run(**vars(left), conducted=conducted)


# --- Nothing is lost ------------------------------------------------------------------------------


def test_every_process_ends_as_planned_and_the_run_succeeds(run):
  assert run.outcome.code == 0, '\n'.join(run.said)
  assert len(run.deaths('syncer')) == len(run.conducted.plan) + len(run.conducted.site_ns)
  assert len(run.deaths('l1')) == run.conducted.learner_kills + len(run.conducted.site_ns)
  assert len(run.deaths('l0')) == len(run.conducted.site_ns)  # l0 dies only when the test kills it
  assert {status.state for status in run.outcome.statuses.values()} == {'done'}
  for place in set(run.conducted.plan) - {ANY}:
    visits.saw('failpoints', place)


def test_no_version_that_a_learner_has_adopted_is_lost(run):
  assert run.lost_versions() == [0] * (1 + len(run.conducted.plan) + len(run.conducted.site_ns))
  assert any(fact['version'] > 0 for fact in run.of('l0', 'adopted'))


def test_a_version_has_the_same_bits_in_every_process(run):
  """Published and recovered versions of every process."""
  digests: dict[tuple[int, int], set[int]] = {}
  for life in run.tapes():
    reader = tape_files.read(life)
    machine_state = reader.header.start.state
    if life.node == 'syncer' and machine_state is not None:
      for p, known in enumerate(zip(machine_state['versions'], machine_state['digests'])):
        digests.setdefault((p, known[0]), set()).add(known[1])
    for record in reader:
      match record.event:
        case events.Received(message=messages.Publish() as publish):
          digests.setdefault((publish.fragment, publish.version), set()).add(publish.digest)
  assert len(digests) > 10
  assert {key: values for key, values in digests.items() if len(values) > 1} == {}


def test_the_run_keeps_every_promise(run):
  verdict = promises.check(run)
  lives = [life for life in run.tapes() if life.node == 'syncer']
  assert len(lives) == len(run.conducted.plan) + len(run.conducted.site_ns) + 2
  assert verdict.turns > 1_000


def test_the_log_was_compacted_and_both_checkpoints_exist(run):
  folder = run.workdir / 'syncer'
  assert len([path for path in (folder / 'ckpt').iterdir() if path.name.isdigit()]) == 2
  oldest = min(int(path.stem) for path in (folder / 'wal').glob('*.rec'))
  assert oldest > 1


# --- SIGTERM --------------------------------------------------------------------------------------


def test_a_preempted_learner_leaves_in_order_and_in_time(run):
  assert run.outcome.code == 0
  end = run.end('l1')
  assert end['code'] == 0
  assert end['t_ns'] - run.conducted.asked_ns['l1'] < NOTICE_S * 1e9
  [left] = [
    fact
    for fact in run.of('syncer', 'member')
    if fact['learner'] == 'l1' and fact['state'] == 'lost'
  ][:1]
  assert left['reason'] == 'left: preempted'
  assert run.conducted.asked_ns['l1'] < left['t_ns'] < end['t_ns']


def test_a_preempted_learner_rejoins_from_its_checkpoint(run):
  end = run.end('l1')
  lives = {
    fact['incarnation']
    for fact in run.of('l1', 'state')
    if fact['state'] == 'joined' and fact['t_ns'] < run.conducted.killed_ns
  }
  assert lives == {1, 2}
  assert any(
    'l1' in fact['participants']
    for fact in run.of('syncer', 'synced')
    if end['t_ns'] < fact['t_ns'] < run.conducted.killed_ns
  )


def test_a_restart_of_the_syncer_loses_no_version_and_stops_no_learner(run):
  asked_ns, end = run.conducted.asked_ns['syncer'], run.end('syncer')
  back = run.of('syncer', 'recovered')[0]
  assert end['code'] == 0 and end['t_ns'] - asked_ns < NOTICE_S * 1e9
  assert back['replayed'] == 0  # it was saved
  assert all(
    chaos_report.within([fact['t_ns'] for fact in run.of(name, 'step')], asked_ns, back['t_ns'])
    for name in LEARNERS
  )
  seen = [
    fact for name in LEARNERS for fact in run.of(name, 'adopted') if fact['t_ns'] < back['t_ns']
  ]
  assert seen and all(back['versions'][fact['fragment']] >= fact['version'] for fact in seen)
  ledgers = [fact for fact in run.of('syncer', 'ledger') if fact['t_ns'] < run.conducted.killed_ns]
  assert not ledgers[-1]['discarded'].get('lost_with_process')


# --- No pause -------------------------------------------------------------------------------------


def test_training_continues_after_every_kill(run):
  """Every process of the syncer that was not killed in its first outer step has committed one."""
  recovered = [0, *(sum(fact['versions']) for fact in run.of('syncer', 'recovered'))]
  places = (ANY, *run.conducted.plan, *[ANY] * len(run.conducted.site_ns))
  for place, before, after in zip(places, recovered, recovered[1:]):
    assert after > before or (place != ANY and after == before), (place, recovered)
  synced = run.of('syncer', 'synced')
  for death_ns in run.deaths('l1'):
    following = [fact['participants'] for fact in synced if fact['t_ns'] > death_ns]
    assert any('l1' in participants for participants in following)


def test_learners_step_without_a_syncer(run):
  back = [fact['t_ns'] for fact in run.of('syncer', 'recovered')]
  alone = [
    death_ns
    for death_ns in run.deaths('syncer')
    if all(not -1e9 < death_ns - site_ns < 5e9 for site_ns in run.conducted.site_ns)
  ]
  assert len(alone) == len(run.conducted.plan)
  steps = [fact['t_ns'] for fact in run.of('l0', 'step')]
  for death_ns in alone:
    back_ns = next(t_ns for t_ns in back if t_ns > death_ns)
    assert chaos_report.within(steps, death_ns, back_ns) >= 1, death_ns


def test_a_surviving_learner_never_pauses(run):
  """l0, from each death of another to its return. The machine itself may stand still once in a
  while, and only a part of that can be told (pulse.py); what a death causes, it causes again and
  again. So the figure is printed, and there may be a pause in a tenth of the deaths, or three."""
  longest = run.gaps_of_the_survivor()
  pauses = {gap for gap in longest if gap.pause}  # deaths may share one
  print(f'{len(longest)} deaths, {len(pauses)} pauses; the longest gap {max(longest)}')
  assert len(longest) >= len(run.conducted.plan)
  assert len(pauses) <= max(3, len(longest) // 10), pauses


def test_a_pause_is_noticed(run):
  """l0 was stopped from outside at the very end."""
  pid, born_ns, _ = run.lives('l0')[-1]
  steps = [fact['t_ns'] for fact in run.of('l0', 'step') if fact['t_ns'] >= born_ns]
  gap = run.conducted.pulse.longest(pid, steps)
  assert gap.pause and gap.at_ns - 1e9 < run.conducted.froze_ns < gap.at_ns + gap.wall_ns, gap
