"""Where a run stands, folded from its records: what the live table shows and chaos waits for.

A pure fold: facts in (report/records.py), numbers out. It keeps only the latest of everything; the
report, which draws curves, reads the records again.
"""

import dataclasses
from typing import Any

_SMOOTHING = 0.2  # weight of the newest step in the step time shown
_GONE = ('down', 'done', 'refused', 'failed')


@dataclasses.dataclass(slots=True)
class Fate:
  """What became of a program: its state (top of launch/supervisor.py), lives and time without a process."""

  state: str = 'waiting'
  starts: int = 0
  kills: int = 0
  last_error: str = ''


@dataclasses.dataclass(slots=True)
class LearnerView:
  """The latest of one learner. `state` is what a person would say it is doing."""

  name: str
  state: str = 'waiting'
  step: int = 0
  step_s: float = 0.0  # moving average
  tokens_per_step: float = 0.0
  loss: float | None = None
  staleness: int = 0
  incarnation: int = 0
  merged: int = 0  # contributions

  @property
  def tokens_per_second(self) -> float:
    return self.tokens_per_step / self.step_s if self.step_s and self.state not in _GONE else 0.0


@dataclasses.dataclass(slots=True)
class SyncerView:
  """The latest of the syncer."""

  state: str = 'waiting'
  sync: int = 0
  outer_steps: int = 0
  participants: tuple[str, ...] = ()
  grace_s: float = 0.0
  bytes_up: int = 0
  bytes_down: int = 0
  eval_loss: float | None = None


class RunView:
  """The whole run."""

  def __init__(self, learners: list[str], total_steps: int, syncer: bool = True):
    self.learners = {name: LearnerView(name) for name in learners}
    self.syncer = SyncerView() if syncer else None
    self.total_steps = total_steps
    self.last_event = ''

  @property
  def progress(self) -> float:
    """Share of the run that is done: the clock of the foremost learner, 0 to 1."""
    foremost = max((learner.step for learner in self.learners.values()), default=0)
    return min(1.0, foremost / self.total_steps)

  def update(self, process: str, fact: dict[str, Any]) -> None:
    """Takes one fact of a process; what it does not know it passes over."""
    if fact['name'] == 'process':
      self._process(fact)
    elif process == 'syncer' and self.syncer is not None:
      self._from_syncer(fact)
    elif process in self.learners:
      self._from_learner(self.learners[process], fact)

  def _process(self, fact: dict[str, Any]) -> None:
    """A fact of the supervisor about a child."""
    target = self.syncer if fact['child'] == 'syncer' else self.learners.get(fact['child'])
    if target is not None:
      target.state = fact['state']
    if fact.get('text'):
      self.last_event = f'{fact["child"]}: {fact["text"]}'

  def _from_learner(self, learner: LearnerView, fact: dict[str, Any]) -> None:
    match fact:
      case {'name': 'step', 'step': step, 'seconds': seconds}:
        learner.step, learner.loss = step, fact.get('loss')
        learner.step_s += (seconds - learner.step_s) * (_SMOOTHING if learner.step_s else 1.0)
        learner.tokens_per_step = fact.get('tokens', 0) / max(1, fact.get('steps', 1))
        if learner.state in ('waiting', 'starting'):
          learner.state = 'training'
      case {'name': 'adopted'}:
        learner.staleness = fact.get('staleness', learner.staleness)
      case {'name': 'settled', 'merged': True}:
        learner.merged += 1
      case {'name': 'state', 'state': state}:
        learner.state = {'joined': 'training', 'disconnected': 'alone'}.get(state, state)
        learner.incarnation = fact.get('incarnation') or learner.incarnation

  def _from_syncer(self, fact: dict[str, Any]) -> None:
    syncer = self.syncer
    match fact:
      case {'name': 'synced'}:
        syncer.state = 'merging'
        syncer.sync = fact.get('sync', syncer.sync)
        syncer.outer_steps += 1
        syncer.participants = tuple(fact.get('participants', ()))
        syncer.grace_s = fact.get('grace_ns', 0) / 1e9
      case {'name': 'eval', 'loss': loss}:
        syncer.eval_loss = loss
      case {'name': 'ledger', 'wire_bytes_up': up, 'wire_bytes_down': down}:
        syncer.bytes_up, syncer.bytes_down = up, down
