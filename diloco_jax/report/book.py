"""The account of a run: each learner's wall time in exclusive categories, and figures of the run.

| category | what the learner does | name in ml-goodput-measurement 0.2.3 |
|---|---|---|
| merged_progress | merged inner steps at the ideal pace, without data_wait | productive time |
| wasted_progress | other inner steps, a killed process's last | WASTED_PROGRESS_FROM_DISRUPTION |
| slow_step | inner steps: what they take above the ideal pace | - |
| data_wait | waits for a batch | DATA_LOADING_SYNC |
| comm_exposed | encodes and adopts while no step runs | - |
| checkpoint_save_blocking | no step runs because of a save | UNPRODUCTIVE_CHECKPOINT_SAVE_TIME |
| wait_quorum | waits, less than K learners take part | - |
| wait_straggler | waits for other learners | - |
| syncer_down | waits for a syncer that has died | - |
| init | its process starts: imports | TPU_INITIALIZATION |
| prep | builds its island | TRAINING_PREP |
| startup_compile | compiles | PROGRAM_STARTUP |
| checkpoint_restore | reads its checkpoint, takes fragments and moments over from others | \
UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME |
| infra_recovery | has no process, or one that was asked to end | \
INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION |
| after_end | has trained to the end, or left and not come back | - |
| other | | OTHER |

A learner waits only before it has joined, and between steps with settings of lock step. Fold the
facts in the records of a run (report/run_facts.py) into a `Book`, in the order of time. Times are
in ns of one clock.
"""

import bisect
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco_jax.protocol import facts, ids
from diloco_jax.report import facts as report_facts
from diloco_jax.report import steps as steps_lib

MERGED, WASTED, SLOW = 'merged_progress', 'wasted_progress', 'slow_step'
DATA, COMM, SAVE = 'data_wait', 'comm_exposed', 'checkpoint_save_blocking'
QUORUM, STRAGGLER, SYNCER_DOWN = 'wait_quorum', 'wait_straggler', 'syncer_down'
INIT, PREP, COMPILE, RESTORE = 'init', 'prep', 'startup_compile', 'checkpoint_restore'
DOWN, AFTER_END, OTHER = 'infra_recovery', 'after_end', 'other'
STEPS, EXCHANGE = (MERGED, WASTED, SLOW), (DATA, COMM, SAVE)
WAITS, STARTS = (QUORUM, STRAGGLER, SYNCER_DOWN), (INIT, PREP, COMPILE, RESTORE)
CATEGORIES = *STEPS, *EXCHANGE, *WAITS, *STARTS, DOWN, AFTER_END, OTHER
PHASES = {'imported': PREP, 'built': RESTORE, 'restored': COMPILE}  # of a start, that follow
# What a learner may be doing beside these.
_WAITS, _TRAINS, _GONE = 'waits', 'trains', 'gone'
_ENDED = _GONE, DOWN, AFTER_END
LONG_GAP = 3  # a gap between two outer steps is long beyond so many usual ones


@dataclasses.dataclass(slots=True, eq=False)
class LearnerAccount:
  """The account of one learner. `spent_ns`: by category, without the time of finished steps.
  `lost_ns`: when the syncer lost it: its process ended then, unless it records more. `phase`: the
  last of its start.
  `times`: of its steps, with the wait for a batch, as the paper counts them; `own_times`: without.
  """

  began_ns: int
  at_ns: int  # its time is booked up to here
  doing: str
  phase: str = ''
  lost_ns: int | None = None
  joined_ns: int | None = None  # for the first time
  spent_ns: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  times: steps_lib.StepTimes = dataclasses.field(default_factory=steps_lib.StepTimes)
  own_times: steps_lib.StepTimes = dataclasses.field(default_factory=steps_lib.StepTimes)
  tokens: int = 0
  owed_ns: int = 0

  @property
  def rate(self) -> float:
    """Tokens per ns at the ideal pace."""
    return self.tokens * _inverse(self.ideal_ns)

  @property
  def ideal_ns(self) -> float:
    """Time of its steps at the ideal pace."""
    return self.times.count * self.times.ideal_ns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
  """Shares between 0 and 1, up to some time.

  Attributes:
    training: of the learners' wall time, in inner steps at the ideal pace (with their usual wait
      for a batch): the paper's goodput.
    training_since_joined: the same, of the time since each learner first joined.
    token: tokens merged, as a share of those of the ideal pace in that time.
    uptime: of the time since the first learner trained, with at least K learners that train. The
      time between the end of the last learner of an interrupted run and its first step after a
      resume does not count.
    system_uptime: of the same time between the first and the last outer step, without long gaps.
    merged: of the tokens trained.
    discarded: the same by reason; `unsettled` is one of them.
  """

  training: float
  training_since_joined: float
  token: float
  uptime: float
  system_uptime: float
  merged: float
  discarded: dict[str, float]


class Book:
  """The accounts of all learners of a run.

  Args:
    quorum: K.
    steps_per_sync: inner steps between two outer steps, H / P.
  """

  def __init__(self, quorum: int = 1, steps_per_sync: float = 1.0):
    self._quorum, self._steps_per_sync = quorum, steps_per_sync
    self.learners: dict[str, LearnerAccount] = {}
    self.ledger: facts.Ledger | None = None
    self._members: set[str] = set()
    self._syncer_died = False
    self._syncer_ns: int | None = None  # of its last record
    # What a learner waits for, by time; the number of learners that train, by time.
    self._awaited: list[tuple[int, str]] = [(0, QUORUM)]
    self._training: set[str] = set()
    self._trained: set[str] = set()
    # When that number changed, and by how much; None: all have left.
    self._changes: list[tuple[int, int | None]] = []
    self._gaps = steps_lib.StepTimes()
    self._merged_ns: int | None = None

  # --- The life of a learner ----------------------------------------------------------------------

  def starts(self, name: str, at_ns: int) -> None:
    """A process of a learner starts."""
    learner = self._learner(name, at_ns, INIT)
    if learner.doing not in (*_ENDED, INIT):  # no record has the end of its last process
      self.died(name, learner.lost_ns or learner.at_ns, killed=True)
    learner.phase = ''
    if name in self._trained:  # the run goes on with more steps
      self._trained.discard(name)
      self._runs(name, at_ns, False)
    self.enters(name, at_ns, INIT)

  def enters(self, name: str, at_ns: int, category: str) -> None:
    """A learner spends its time in this category, until a later call."""
    learner = self._learner(name, at_ns)
    self._pass(learner, at_ns)
    learner.doing = category

  def waits(self, name: str, at_ns: int) -> None:
    """From now on a learner waits for others."""
    self.enters(name, at_ns, _WAITS)

  def joined(self, name: str, at_ns: int) -> None:
    """A learner takes part in the run, from its next step on if its process is new."""
    learner = self._learner(name, at_ns)
    if learner.joined_ns is None:
      learner.joined_ns = at_ns
    if name not in self._training:
      self.enters(name, at_ns, RESTORE)

  def trains(self, name: str, at_ns: int) -> None:
    """An inner step begins, or what must be done before it."""
    self.enters(name, at_ns, _TRAINS)
    self._runs(name, at_ns, True)

  def stepped(
    self,
    name: str,
    at_ns: int,
    tokens: int,
    step_ns: int,
    data_ns: int = 0,
    saving_ns: int = 0,
    waited_ns: int = 0,
  ) -> None:
    """An inner step is done.

    Args:
      name: of the learner.
      at_ns: now.
      tokens: it trained on so many.
      step_ns: what it took, with `data_ns`, the wait for its batch.
      saving_ns: what saves took before it.
      waited_ns: how long the learner waited for others before it, if that is not booked yet.
    """
    learner = self._learner(name, at_ns)
    if waited_ns:
      self._wait(learner, learner.at_ns + waited_ns)
    before = COMM if learner.doing in (_TRAINS, _WAITS) else learner.doing
    between_ns = learner.owed_ns + at_ns - learner.at_ns - step_ns - saving_ns
    learner.spent_ns[before] += max(0, between_ns)
    learner.owed_ns = min(0, between_ns)  # recorded later than it began: no time is below 0
    learner.spent_ns[DATA] += data_ns
    learner.spent_ns[SAVE] += saving_ns
    learner.times.add(step_ns)
    learner.own_times.add(step_ns - data_ns)
    learner.tokens += tokens
    learner.at_ns = at_ns
    if name not in self._trained:
      self.trains(name, at_ns)

  def trained(self, name: str, at_ns: int) -> None:
    """A learner has made its last step."""
    self._trained.add(name)
    learner = self._learner(name, at_ns)
    if learner.doing != _TRAINS:  # else the fact of that step, with its time, may follow
      self._pass(learner, at_ns)
    learner.doing = AFTER_END

  def died(self, name: str, at_ns: int, killed: bool) -> None:
    """A process of a learner has ended: it was killed, or it ended by itself."""
    learner = self._learner(name, at_ns)
    learner.lost_ns = None
    if learner.doing in (_TRAINS, _WAITS) and not killed:
      learner.doing = DOWN  # it was asked to end after its last step
    self._pass(learner, at_ns)
    self._runs(name, at_ns, False)
    learner.doing = AFTER_END if name in self._trained else DOWN if killed else _GONE
    if self._left:  # the time until the run is resumed is no downtime
      self._changes.append((at_ns, None))
      self._training.clear()  # also of those that have trained to the end

  def _learner(self, name: str, at_ns: int, doing: str = OTHER) -> LearnerAccount:
    return self.learners.setdefault(name, LearnerAccount(at_ns, at_ns, doing))

  def _pass(self, learner: LearnerAccount, at_ns: int) -> None:
    if learner.doing == _WAITS:
      self._wait(learner, at_ns)
    else:
      category = {_TRAINS: WASTED, _GONE: DOWN}.get(learner.doing, learner.doing)
      learner.spent_ns[category] += at_ns - learner.at_ns
      learner.at_ns = at_ns

  def _wait(self, learner: LearnerAccount, until_ns: int) -> None:
    """Books a time of waiting by what was awaited."""
    index = bisect.bisect_right(self._awaited, (learner.at_ns, '~')) - 1
    for (_, category), (next_ns, _) in zip(
      self._awaited[index:], [*self._awaited[index + 1 :], (until_ns, '')]
    ):
      end_ns = max(learner.at_ns, min(next_ns, until_ns))
      learner.spent_ns[category] += end_ns - learner.at_ns
      learner.at_ns = end_ns
    learner.spent_ns[OTHER] += until_ns - learner.at_ns  # 0, unless clocks disagree
    learner.at_ns = until_ns

  # --- The run ------------------------------------------------------------------------------------

  def take(self, name: str, at_ns: int, fact: report_facts.Fact) -> None:
    """A process reports a fact."""
    if name == ids.SYNCER:
      began = isinstance(fact, report_facts.Startup) and fact.phase == 'assembled'
      if began and self._syncer_ns is not None and not self._syncer_died:
        self.syncer_died(self._syncer_ns)  # no record has the end of its last process
      self._syncer_ns = at_ns
    if learner := self.learners.get(name):
      if isinstance(fact, report_facts.Startup) and fact.begins(learner.phase):
        self.starts(name, at_ns)
      learner.lost_ns = None  # it was the connection
    match fact:
      case report_facts.Process(child=child, state='starting') if child not in ids.NO_LEARNERS:
        self.starts(child, at_ns)
      case report_facts.Exit(child=ids.SYNCER):
        self.syncer_died(at_ns)
      case report_facts.Exit(child=child, code=code, stopped=stopped):
        self.died(child, at_ns, killed=code != 0 and not stopped)
      case report_facts.Startup(phase=phase) if name not in ids.NO_LEARNERS:
        self.enters(name, at_ns, PHASES.get(phase, _WAITS))
        self.learners[name].phase = phase
      case report_facts.Step():
        seconds = fact.seconds, fact.data_s, fact.saving_s, fact.waited_s
        times_ns = (round(time_s * 1e9) for time_s in seconds)
        self.stepped(name, at_ns, fact.tokens // fact.steps, *times_ns)
      case facts.State(state='joined'):
        self.joined(name, at_ns)
      case facts.State(state='trained'):
        self.trained(name, at_ns)
      case facts.Member(state='joined', learner=member):
        self._members.add(member)
        self._syncer_died = False
        self._await(at_ns)
      case facts.Member(state='lost', learner=member):
        self._members.discard(member)
        self._await(at_ns)
        lost = self.learners.get(member)
        if lost and lost.doing not in _ENDED:
          lost.lost_ns = at_ns
      case facts.Synced():
        if self._merged_ns is not None:
          self._gaps.add(at_ns - self._merged_ns)
        self._merged_ns = at_ns
      case facts.Ledger():
        self.ledger = fact

  def syncer_died(self, at_ns: int) -> None:
    self._members.clear()
    self._syncer_died = True
    self._await(at_ns)

  def _await(self, at_ns: int) -> None:
    awaited = QUORUM if len(self._members) < self._quorum else STRAGGLER
    if self._syncer_died:
      awaited = SYNCER_DOWN
    if awaited != self._awaited[-1][1]:
      self._awaited.append((at_ns, awaited))

  def _runs(self, name: str, at_ns: int, running: bool) -> None:
    """Counts the learners that train. One that has trained to the end is not missing."""
    if running == (name in self._training) or name in self._trained:
      return
    if running and (not self._changes or self._changes[-1][1] is None):
      self._merged_ns = None  # no gap reaches over the time in which no learner took part
    (self._training.add if running else self._training.discard)(name)
    self._changes.append((at_ns, 1 if running else -1))

  @property
  def _left(self) -> bool:
    """The last process of every learner has ended by itself."""
    return all(learner.doing in (_GONE, AFTER_END) for learner in self.learners.values())

  # --- Results ------------------------------------------------------------------------------------

  @property
  def over(self) -> bool:
    """Some learners have trained to the end, and no other one trains."""
    return bool(self._trained) and all(
      learner.doing != _TRAINS for learner in self.learners.values()
    )

  def partition(self, name: str, at_ns: int) -> dict[str, float]:
    """A learner's wall time in ns until now, by category; it adds up to the whole."""
    learner = self.learners[name]
    now = dataclasses.replace(learner, spent_ns=collections.Counter(learner.spent_ns))
    if now.lost_ns is not None:
      self._pass(now, now.lost_ns)
      now.doing = DOWN
    if now.doing == _GONE:
      now.doing = AFTER_END
    self._pass(now, at_ns)
    spent = now.spent_ns
    steps = learner.own_times
    ideal_ns = min(steps.total_ns, steps.count * steps.ideal_ns)
    merged_ns = ideal_ns * min(1.0, self._merged(name) * _inverse(learner.tokens))
    spent[MERGED] += merged_ns
    spent[WASTED] += ideal_ns - merged_ns
    spent[SLOW] += steps.total_ns - ideal_ns
    spent[max(spent, key=lambda category: spent[category])] += learner.owed_ns
    return {category: float(spent[category]) for category in CATEGORIES}

  def _merged(self, name: str) -> float:
    """Tokens of a learner that were merged."""
    if self.ledger is None:
      return 0.0
    return self.ledger.learners.get(name, {}).get('merged', 0) / self.ledger.fragments

  @property
  def untold(self) -> int:
    """Tokens in the records of learners that are not in the ledger: the syncer heard of none."""
    if self.ledger is None:
      return 0
    counted = {name: row.get('tokens', 0) for name, row in self.ledger.learners.items()}
    more = sum(
      max(0, learner.tokens - counted.get(name, 0)) for name, learner in self.learners.items()
    )
    return max(0, more - counted.get(ids.FORGOTTEN, 0))

  def summary(self, at_ns: int) -> dict[str, Any]:
    """The figures, and of each learner `wall_s` and `shares` by category, as JSON types."""
    learners = {}
    for name in self.learners:
      spent_ns = self.partition(name, at_ns)
      learners[name] = {'wall_s': sum(spent_ns.values()) / 1e9, 'shares': as_shares(spent_ns)}
    return {'learners': learners, **dataclasses.asdict(self.figures(at_ns))}

  def figures(self, at_ns: int) -> Figures:
    """The figures of the run until now."""
    learners = self.learners.values()
    ideal_ns = sum(learner.ideal_ns for learner in learners)
    walls = [
      (learner, at_ns - learner.joined_ns) for learner in learners if learner.joined_ns is not None
    ]
    merged = sum(map(self._merged, self.learners))
    return Figures(
      training=ideal_ns * _inverse(sum(at_ns - learner.began_ns for learner in learners)),
      training_since_joined=ideal_ns * _inverse(sum(wall_ns for _, wall_ns in walls)),
      token=merged * _inverse(sum(learner.rate * wall_ns for learner, wall_ns in walls)),
      uptime=self._uptime(at_ns),
      system_uptime=self._system_uptime(),
      **shares(self.ledger),
    )

  def _uptime(self, at_ns: int) -> float:
    lost = [
      (learner.lost_ns, -1) for name, learner in self.learners.items() if name in self._training
    ]
    changes = self._changes + [change for change in lost if change[0] is not None]
    changes.sort(key=lambda change: change[0])  # that a learner had died is known when it is back
    times_ns, training = collections.Counter(), None
    for (began_ns, change), (until_ns, _) in zip(changes, [*changes[1:], (at_ns, 0)]):
      training = None if change is None else (training or 0) + change
      times_ns[training] += until_ns - began_ns
    del times_ns[None]
    enough_ns = sum(ns for count, ns in times_ns.items() if count >= self._quorum)
    return enough_ns * _inverse(sum(times_ns.values()))

  def _system_uptime(self) -> float:
    """A gap is usual if it takes the steps between two outer steps of the fastest learner."""
    if not self._gaps.count:
      return float(self._merged_ns is not None)
    ideal_ns = [learner.times.ideal_ns for learner in self.learners.values() if learner.times.count]
    usual_ns = max(self._gaps.ideal_ns, self._steps_per_sync * min(ideal_ns, default=0))
    return 1 - self._gaps.beyond_ns(LONG_GAP * usual_ns) * _inverse(self._gaps.total_ns)


def shares(ledger: facts.Ledger | None) -> dict[str, Any]:
  """The shares of the trained fragment-tokens: merged, and discarded by reason."""
  if ledger is None:
    return {'merged': 0.0, 'discarded': {}}
  part = _inverse(ledger.fragments * ledger.trained)
  lost = {**ledger.discarded, 'unsettled': ledger.unsettled}
  return {
    'merged': ledger.merged * part,
    'discarded': {reason: count * part for reason, count in lost.items() if count},
  }


def _inverse(value: float) -> float:
  return 1 / value if value else 0.0


def as_shares(partition: Mapping[str, float]) -> dict[str, float]:
  """The categories that occur, as shares of their sum."""
  part = _inverse(sum(partition.values()))
  return {category: ns * part for category, ns in partition.items() if ns}
