"""Who watches a run sees what a tape holds: processes that begin and end, and every turn taken.

So checkers, marks, stories and tapes serve the simulated world live and real processes afterwards.
"""

import dataclasses
from typing import Protocol, Sequence

from diloco_jax.protocol import actions
from diloco_jax.protocol import events
from diloco_jax.protocol import tape


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
  """One process; `number` grows in the order of the starts of a run and is never used again."""

  number: int
  start: tape.Start


class Observer(Protocol):
  """Watches a run; all methods are called in the order of time."""

  def born(self, now_ns: int, life: Life) -> None:
    """A process begins."""

  def saw(self, life: Life, now_ns: int, event: events.Event,
          out: Sequence[actions.Action]) -> None:
    """A machine took an event and gave its actions; they are not carried out yet."""

  def crashed(self, life: Life, now_ns: int, event: events.Event, error: Exception) -> None:
    """A machine raised on an event: there are no actions."""

  def died(self, now_ns: int, life: Life, killed: bool) -> None:
    """A process is gone: killed, or ended by its machine's Exit."""


class Count(Observer):
  """How many turns the machines took."""

  def __init__(self):
    self.events = 0

  def saw(self, life: Life, now_ns: int, event: events.Event,
          out: Sequence[actions.Action]) -> None:
    self.events += 1
