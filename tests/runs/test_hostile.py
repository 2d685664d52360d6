"""A real run of two honest learners, and what hostile processes do to it.

One run of `tiny` meets the attacks of hostile_attacks.py, one after the other, with quiet time
before; the tests read what its processes wrote meanwhile. The honest
learners are paced, so that two cores have time for the attacker, too. Their steps are counted by
the second; or, should other tests need the cores meanwhile, the time is measured in which a learner
is *blocked*: it neither runs nor waits for a CPU. Outer steps are counted by the second, or by the
step of the run's clock, at each of which a sync is due.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import pathlib
import statistics
import time
from concurrent import futures

import pytest

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.report import records as records_lib
from tests.runs.lib import conductor, hostile, hostile_attacks

DEADLINE_S = 900
pytestmark = [pytest.mark.long, pytest.mark.timeout(1_000)]
LEARNERS = ('l0', 'l1')
MIB = 1 << 20
SESSION_BYTES, ALL_BYTES = 16 * MIB, 64 * MIB
LINES_PER_MINUTE = 4  # of the syncer about one attack
OVERRIDES = {
  **conductor.ENDLESS,
  'sync.learners': 2,
  'sync.quorum': 1,
  'sync.checkpoint_every_syncs': 200,
  'train.checkpoint_every_steps': 1_000,
}


@dataclasses.dataclass
class Phase:
  """What happened from the begin of an attack to the end of the quiet time after it.

  Attributes:
    steps: inner steps of each honest learner.
    outer: outer steps.
    clock: by which the highest clock of the honest learners has moved.
    blocked: the share of the time for which each honest learner was blocked.
    losses: of the inner steps of each honest learner.
    starts: processes of the syncer that started.
    more_bytes: by which the syncer has grown.
    said: lines of the syncer.
  """

  name: str
  began_ns: int
  ended_ns: int = 0
  steps: dict[str, int] = dataclasses.field(default_factory=dict)
  outer: int = 0
  clock: int = 0
  blocked: dict[str, float] = dataclasses.field(default_factory=dict)
  losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
  starts: int = 0
  more_bytes: int = 0
  said: list[str] = dataclasses.field(default_factory=list)

  @property
  def seconds(self) -> float:
    return (self.ended_ns - self.began_ns) / 1e9

  def steps_per_s(self, learner: str) -> float:
    return self.steps[learner] / self.seconds


class Shares:
  """Samples of the time for which a process has run, or waited for a CPU, in all its threads."""

  def __init__(self):
    self._samples: list[tuple[int, dict[str, int]]] = []  # time, busy time by thread

  def sample(self, pid: int) -> None:
    threads = {}
    for path in pathlib.Path(f'/proc/{pid}/task').glob('*'):
      with contextlib.suppress(OSError, ValueError):
        ran, waited, _ = (path / 'schedstat').read_text().split()
        threads[path.name] = int(ran) + int(waited)
    if threads:
      self._samples.append((time.monotonic_ns(), threads))

  def blocked(self, began_ns: int, ended_ns: int) -> float:
    """The share of this time in which it did neither."""
    blocked = total = 0
    for (then, before), (now, after) in itertools.pairwise(self._samples):
      if began_ns <= then and now <= ended_ns:
        busy = [max(0, spent - before.get(thread, spent)) for thread, spent in after.items()]
        total += now - then
        blocked += max(0, now - then - sum(busy))
        # The kernel books a wait for a CPU when it ends, so a longer one began before this time.
        blocked -= sum(max(0, busy_ns - (now - then)) for busy_ns in busy)
    return max(0, blocked) / total if total else 0.0


def _with_small_pages(program: supervisor_lib.LocalProgram) -> supervisor_lib.LocalProgram:
  """Where the kernel gathers untouched memory to pages of 2 MiB, a process grows by tens of MiB
  without an attack."""
  tunables = program.environment['GLIBC_TUNABLES'] + ':glibc.malloc.hugetlb=0'
  return conductor.pace(
    dataclasses.replace(program, environment={**program.environment, 'GLIBC_TUNABLES': tunables})
  )


class Conductor(conductor.Conductor):
  """Attacks the run, one attack after the other; `seconds` for each."""

  def __init__(self, workdir: pathlib.Path, recorder: records_lib.Recorder, seconds: float):
    super().__init__(workdir, recorder, OVERRIDES, change=_with_small_pages)
    self._seconds = seconds
    self.shares = {name: Shares() for name in LEARNERS}
    self.phases: list[Phase] = []

  def look(self) -> None:
    """Also samples the learners."""
    super().look()
    for name in LEARNERS:
      if (child := self.supervisor.child(name)) is not None:
        self.shares[name].sample(child.pid)

  async def carry_out(self) -> None:
    await self.until(lambda: all(self.merges(name) >= 20 for name in LEARNERS))
    run, loop = hostile.Run.of(self.workdir), asyncio.get_running_loop()
    spawn = multiprocessing.get_context('spawn')
    with futures.ProcessPoolExecutor(1, spawn, hostile_attacks.prepare) as attacker:
      await loop.run_in_executor(attacker, hostile_attacks.ready)
      await self._phase('quiet', asyncio.sleep(2 * self._seconds))
      for name in hostile_attacks.ATTACKS:
        doing = loop.run_in_executor(attacker, hostile_attacks.act, name, run, self._seconds)
        await self._phase(name, doing)
    self.supervisor.retire()

  async def _phase(self, name: str, doing) -> None:
    phase = Phase(name, time.monotonic_ns())
    starts, bytes_before, said = self._starts(), self._syncer_bytes(), len(self.said)
    await doing
    lasted_s = (time.monotonic_ns() - phase.began_ns) / 1e9
    await self.until(lambda: False, max(0.3, self._seconds / 5 - lasted_s))
    phase.ended_ns = time.monotonic_ns()
    phase.starts = self._starts() - starts
    phase.more_bytes = self._syncer_bytes() - bytes_before
    phase.said = [line for line in self.said[said:] if line.startswith('[syncer]')]
    self.phases.append(phase)

  def _starts(self) -> int:
    return self.supervisor.statuses['syncer'].starts

  def _syncer_bytes(self) -> int:
    child = self.supervisor.child('syncer')
    return _own_bytes(child.pid) if child is not None else 0


def _own_bytes(pid: int) -> int:
  """Without the pages of files, such as the code of a library at its first use."""
  try:
    for line in pathlib.Path(f'/proc/{pid}/status').read_text(encoding='utf-8').splitlines():
      if line.startswith('RssAnon:'):
        return int(line.split()[1]) * 1024
  except OSError:
    pass
  return 0


# --- The run --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run(conductor.Run):
  """A finished run, and its phases by name."""

  phases: dict[str, Phase]
  full: bool


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory, counts) -> Run:
  seconds = 20.0 if counts.full else 1.5
  make = functools.partial(Conductor, seconds=seconds)
  conducted, left = conductor.play(tmp_path_factory.mktemp('hostile'), make, DEADLINE_S)
  run = Run(**vars(left), phases={part.name: part for part in conducted.phases}, full=counts.full)
  for phase in run.phases.values():
    measure(run, phase, conducted.shares)
  return run


def measure(run: Run, phase: Phase, shares: dict[str, Shares]) -> None:
  """Counts what happened in a phase."""

  def rows(name: str, fact: str) -> list[dict]:
    return [row for row in run.of(name, fact) if phase.began_ns <= row['t_ns'] <= phase.ended_ns]

  phase.outer = len(rows('syncer', 'outer'))
  steps = {name: rows(name, 'step') for name in LEARNERS}
  clocks = [row['step'] for of_learner in steps.values() for row in of_learner]
  phase.clock = max(clocks, default=0) - min(clocks, default=0)
  for name in LEARNERS:
    phase.steps[name] = len(steps[name])
    phase.losses[name] = [row['loss'] for row in steps[name]]
    phase.blocked[name] = shares[name].blocked(phase.began_ns, phase.ended_ns)


# --- What must hold -------------------------------------------------------------------------------

every_attack = pytest.mark.parametrize('name', hostile_attacks.ATTACKS)


def test_honest_processes_end_well_and_only_once(run):
  assert run.outcome.code == 0, run.outcome.text
  for name in ('syncer', *LEARNERS):
    codes = [fact['code'] for fact in run.of('supervisor', 'exit') if fact['child'] == name]
    assert codes == [0], (name, codes)


@every_attack
def test_the_syncer_stays_up(run, name):
  assert run.phases[name].starts == 0, run.phases[name].said


@every_attack
def test_honest_learners_are_not_held_up(run, name):
  """They make as many steps as before, or are blocked for no longer. A short phase on few cores
  shows only that they go on."""
  phase, quiet = run.phases[name], run.phases['quiet']
  lost = 0.02 if run.full else 0.7
  as_many = (
    min(phase.steps_per_s(learner) / quiet.steps_per_s(learner) for learner in LEARNERS) >= 1 - lost
  )
  before, blocked = (statistics.mean(part.blocked.values()) for part in (quiet, phase))
  assert as_many or blocked - before <= lost * (1 - before), (before, blocked)


@every_attack
def test_outer_steps_go_on(run, name):
  """As many as before, by the second or by the clock: a liar may make the clock run faster, another
  test may make it run slower. A disk that pauses once in a phase of 4 s takes a second of it."""
  phase, quiet = run.phases[name], run.phases['quiet']
  share = 0.95 if run.full else 0.25
  as_many = quiet.outer * min(phase.clock / quiet.clock, phase.seconds / quiet.seconds)
  assert phase.outer >= max(1, share * as_many - quiet.outer / quiet.seconds)


@every_attack
def test_the_model_learns_on(run, name):
  """At the end of the attack the honest loss is no worse than in the quiet time before all attacks;
  a lie that merges has it at ln 256 = 5.5 within seconds."""
  quiet = statistics.mean(itertools.chain(*run.phases['quiet'].losses.values()))
  for losses in run.phases[name].losses.values():
    assert statistics.mean(losses[len(losses) // 2 :]) < 1.1 * quiet, (quiet, losses)


@every_attack
def test_the_syncer_stays_small(run, name):
  assert run.phases[name].more_bytes <= SESSION_BYTES


def test_the_syncer_stays_small_over_all_attacks(run):
  assert sum(phase.more_bytes for phase in run.phases.values()) <= ALL_BYTES


@every_attack
def test_the_syncer_says_it_briefly(run, name):
  """A few lines a minute, and no text of a stranger as it came."""
  phase = run.phases[name]
  minutes = 1 + int(phase.seconds // 60)
  assert len(phase.said) <= LINES_PER_MINUTE * minutes, phase.said[:10]
  assert all(line.isprintable() for line in phase.said), phase.said
