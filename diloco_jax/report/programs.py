"""What the records have about each program of a run: its processes, and a learner's steps.

Times are seconds since the first fact of the run. Tokens are those that all learners have trained
together by then, so that the curves of restarted learners are right.
"""

import array
import dataclasses
import functools
import math
import statistics

from diloco_jax.report import facts as report_facts
from diloco_jax.report import steps as steps_lib

LAST_STEPS = 10  # whose mean is the training loss of a learner
ENDED = ('down', 'done', 'stopped', 'killed', 'refused', 'failed')
times = functools.partial(array.array, 'd')


@dataclasses.dataclass(slots=True)
class ProcessFacts:
  """One process of a program. `first_step_s`: its first inner or outer step; `last_s`: its last
  fact; `phase`: the last of its start; `ended`: done, killed, failed, refused, stopped, '' (still
  runs), or lost: the syncer lost it, or it began again, and nobody has recorded its end."""

  started_s: float
  phase: str = ''
  steps: int = 0
  first_step_s: float | None = None
  ended_s: float | None = None
  ended: str = ''
  last_s: float = dataclasses.field(init=False)

  def __post_init__(self):
    self.last_s = self.started_s

  def end(self, at_s: float, how: str) -> None:
    self.ended_s, self.ended = at_s, how


@dataclasses.dataclass(slots=True)
class ProgramFacts:
  """What the records have about the syncer or a learner; condition.py decides what is so.

  Attributes:
    state: its activity, in a word for people; since_s: since when; why: a reason.
    phase: of a process before its first step: importing, building, restoring, compiling, joining,
      waiting (for other learners); then ''.
    heard_s: the time of the newest record about it; known: whose record that is.
    supervised: a supervisor of this folder has started it.
    no_step: the newest fact that it makes no step: when, what it does, and for how long.
    quarantine: why it is in quarantine.
  """

  state: str = 'waiting'
  phase: str = ''
  since_s: float = 0.0
  why: str = ''
  heard_s: float = 0.0
  known: str = ''
  supervised: bool = False
  no_step: tuple[float, str, float] | None = None
  quarantine: str = ''
  processes: list[ProcessFacts] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class LearnerFacts(ProgramFacts):
  """Everything about one learner.

  Attributes:
    has_records: in this folder. For a learner on another machine we use the syncer's records, which
      have one step for each heartbeat.
    counted: the steps and tokens of all its processes in the syncer's records; None: none since a
      restore.
    tokens: that it has trained.
    has_loss: False: a loop without it among its metrics; the loss of its steps is NaN.
    step_s: time of a step, a moving average.
    merged_s: when each outer step with a contribution of it was published.
    joined: when it joined, and in which incarnation.
    lost: when the syncer lost it, and why; cut_s: when a syncer began, which has no members.
    fresh: how many of its processes joined a run in progress with fresh moments.
    cost: the newest one; None: no log line yet.
    held_out: (tokens of all learners, loss) of its own model, of which parts are never sent.
  """

  has_records: bool = False
  counted: tuple[int, int] | None = (0, 0)
  tokens: int = 0
  has_loss: bool = False
  steps: steps_lib.Steps = dataclasses.field(default_factory=steps_lib.Steps)
  step_s: float = 0.0
  tokens_per_step: float = 0.0
  staleness: int = 0
  incarnation: int = 0
  fresh: int = 0
  cost: report_facts.Cost | None = None
  merged_s: array.array = dataclasses.field(default_factory=times)
  steps_between: array.array = dataclasses.field(default_factory=lambda: array.array('q'))
  joined: list[tuple[float, int]] = dataclasses.field(default_factory=list)
  lost: list[tuple[float, str]] = dataclasses.field(default_factory=list)
  cut_s: float = -math.inf
  held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)

  @property
  def step(self) -> int:
    return self.steps[-1].step if self.steps else 0

  @property
  def loss(self) -> float | None:
    """The mean of its last steps; a learner on another machine has a step for each heartbeat."""
    last = self.steps.losses(-(LAST_STEPS if self.has_records else 1), len(self.steps))
    return statistics.fmean(last) if self.has_loss else None

  @property
  def is_live(self) -> bool:
    """Whether the syncer has it among its members."""
    away_s = [self.cut_s, *(at_s for at_s, _ in self.lost[-1:])]
    return bool(self.joined) and max(away_s) < self.joined[-1][0]

  @property
  def tokens_per_second(self) -> float:
    """While it makes steps (RunFacts.works)."""
    return self.tokens_per_step / self.step_s if self.step_s else 0.0

  @property
  def pace(self) -> tuple[int, float]:
    return self.steps.pace(self.processes[-1].first_step_s if self.processes else 0.0)

  def seconds_down(self, end_s: float) -> float:
    """Time between a death and the first step after it, or the end of the run."""
    down_s = 0.0
    for process, following in zip(self.processes, [*self.processes[1:], None]):
      if process.ended_s is None or process.ended in ('done', 'stopped'):
        continue
      back_s = None
      if following:  # which may die before its first step; its own time down follows
        back_s = following.ended_s if following.first_step_s is None else following.first_step_s
      down_s += (end_s if back_s is None else back_s) - process.ended_s
    return down_s


@dataclasses.dataclass(slots=True)
class Wire:
  """Bytes on the wire, through all processes of the syncer, each of which counts from 0."""

  bytes_up: int = 0
  bytes_down: int = 0
  bytes_data_parallel: int = 0
  _last: tuple[int, int] = (0, 0)

  def take(self, traffic: report_facts.Traffic) -> None:
    now = traffic.bytes_up, traffic.bytes_down
    before = self._last if all(a >= b for a, b in zip(now, self._last)) else (0, 0)
    self.bytes_up += now[0] - before[0]
    self.bytes_down += now[1] - before[1]
    self.bytes_data_parallel = traffic.bytes_data_parallel
    self._last = now
