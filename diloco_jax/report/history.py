"""What happened in a run, read back from its records: curves, lives, contributions.

Times are seconds since the first fact of the run. Tokens are those that all learners together have
trained by then, so that curves of learners that stopped and came back stand where they belong.
"""

import bisect
import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(slots=True)
class Step:
  """One inner step: when it ended, tokens of all learners by then, the learner's clock and loss."""

  at_s: float
  tokens: int
  step: int
  loss: float
  seconds: float


@dataclasses.dataclass(slots=True)
class Life:
  """One process of a learner. `ended`: done, killed, failed, refused, stopped, '' (runs still)."""

  started_s: float
  first_step_s: float | None = None
  ended_s: float | None = None
  ended: str = ''


@dataclasses.dataclass(slots=True)
class Evaluation:
  """Held-out loss of the global (or, alone, the learner's) model at a clock step."""

  at_s: float
  tokens: int
  step: int
  loss: float


@dataclasses.dataclass(slots=True)
class Learner:
  """Everything about one learner."""

  steps: list[Step] = dataclasses.field(default_factory=list)
  lives: list[Life] = dataclasses.field(default_factory=list)
  merged_s: list[float] = dataclasses.field(default_factory=list)
  steps_between: list[int] = dataclasses.field(default_factory=list)
  incarnation: int = 0

  def seconds_down(self, end_s: float) -> float:
    """Time between a death and the first step after it, or the end of the run."""
    down_s = 0.0
    for life, following in zip(self.lives, [*self.lives[1:], None]):
      if life.ended_s is None or life.ended in ('done', 'stopped'):
        continue
      back_s = following.first_step_s if following else None
      if back_s is None and following is not None and following.ended_s is not None:
        back_s = following.ended_s  # it fell again before it stepped; counted from there on
      down_s += (end_s if back_s is None else back_s) - life.ended_s
    return down_s


@dataclasses.dataclass(slots=True)
class Wire:
  """Bytes through the syncer over all its lives, each of which counts from 0."""

  bytes_up: int = 0
  bytes_down: int = 0
  _last: tuple[int, int] = (0, 0)

  def take(self, fact: dict[str, Any]) -> None:
    now = fact['wire_bytes_up'], fact['wire_bytes_down']
    before = self._last if all(a >= b for a, b in zip(now, self._last)) else (0, 0)
    self.bytes_up += now[0] - before[0]
    self.bytes_down += now[1] - before[1]
    self._last = now


class History:
  """A run, folded from (process, fact) in the order of time."""

  def __init__(self, rows: Iterable[tuple[str, dict[str, Any]]], learners: Iterable[str]):
    self.learners = {name: Learner() for name in learners}
    self.evaluations: list[Evaluation] = []
    self.syncs: list[dict[str, Any]] = []
    self.ledger: dict[str, Any] = {}
    self.wire = Wire()
    self.tokens = 0
    self.end_s = 0.0
    self._begin: float | None = None
    self._reached: list[tuple[int, int]] = []  # (clock, tokens of all), both rising
    self._kills: set[str] = set()
    for process, fact in rows:
      self._take(process, fact)
    for evaluation in self.evaluations:
      evaluation.tokens = self._tokens_at(evaluation.step)

  def _take(self, process: str, fact: dict[str, Any]) -> None:
    if self._begin is None:
      self._begin = fact.get('time', 0.0)
    at_s = fact.get('time', self._begin) - self._begin
    self.end_s = max(self.end_s, at_s)
    match fact:
      case {'name': 'step'} if process in self.learners:
        self._step(self.learners[process], at_s, fact)
      case {'name': 'adopted', 'steps_between': steps} if process in self.learners:
        if not fact.get('whole'):
          self.learners[process].steps_between.append(steps)
      case {'name': 'state', 'incarnation': number} if process in self.learners:
        learner = self.learners[process]
        learner.incarnation = max(learner.incarnation, number or 0)
      case {'name': 'eval', 'loss': loss}:
        self.evaluations.append(Evaluation(at_s, 0, fact.get('step', 0), loss))
      case {'name': 'synced'}:
        self.syncs.append(fact)
        for name in fact.get('participants', ()):
          if name in self.learners:
            self.learners[name].merged_s.append(at_s)
      case {'name': 'ledger'}:
        self.ledger = fact
        if 'wire_bytes_up' in fact:
          self.wire.take(fact)
      case {'name': 'process' | 'exit', 'child': child} if child in self.learners:
        self._life(self.learners[child], child, at_s, fact)

  def _step(self, learner: Learner, at_s: float, fact: dict[str, Any]) -> None:
    self.tokens += round(fact['tokens'] / max(1, fact['steps']))  # totals of a life, equal steps
    learner.steps.append(
      Step(at_s, self.tokens, fact['step'], fact['loss'], fact.get('seconds', 0.0))
    )
    if not self._reached or fact['step'] > self._reached[-1][0]:
      self._reached.append((fact['step'], self.tokens))
    if not learner.lives:
      learner.lives.append(Life(at_s))  # a run without a supervisor
    if learner.lives[-1].first_step_s is None:
      learner.lives[-1].first_step_s = at_s

  def _life(self, learner: Learner, child: str, at_s: float, fact: dict[str, Any]) -> None:
    if fact['name'] == 'exit':
      if learner.lives:
        killed = child in self._kills or fact['code'] < 0
        ended = {0: 'done', 42: 'refused'}.get(fact['code'], 'killed' if killed else 'failed')
        learner.lives[-1].ended_s, learner.lives[-1].ended = at_s, ended
        self._kills.discard(child)
    elif fact.get('state') == 'starting':
      if learner.lives and learner.lives[-1].ended_s is None:  # its supervisor was killed
        last_s = learner.steps[-1].at_s if learner.steps else at_s
        learner.lives[-1].ended_s, learner.lives[-1].ended = last_s, 'stopped'
      learner.lives.append(Life(at_s))
    elif 'chaos' in fact.get('text', ''):
      self._kills.add(child)

  def _tokens_at(self, step: int) -> int:
    """Tokens of all learners when the foremost reached clock `step`."""
    place = bisect.bisect_right(self._reached, (step, float('inf')))
    return self._reached[place - 1][1] if place else 0
