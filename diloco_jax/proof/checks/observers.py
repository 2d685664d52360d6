"""Who watches a run sees what a tape holds: processes that begin and end, and every turn taken.

So checkers, marks, stories and tapes serve the simulated world live and real processes afterwards.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import tape


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
  """One process; `number` grows in the order of the starts of a run and is never used again."""

  number: int
  start: tape.Start


@dataclasses.dataclass(frozen=True, slots=True)
class LogNote:
  """What the world knows of the syncer's log, and no tape tells; `number` is of a record.

  | kind | |
  |---|---|
  | appended | the operating system has record `number`, an outer step that ended so |
  | durable | no power loss takes record `number` or one before it any more |
  | recovered | a syncer that was just born goes on behind record `number` |
  | not recovered | it could not, and its log did not say why: `text` |
  | torn | the log ended in a record that was not whole; it was dropped |
  | compacted | record `number` is the oldest that is kept |
  | full, broken | the disk takes no record; it has failed, and the process ends |
  | cut | the process, or its host, was gone in the middle of a call to the disk |
  | repaired | the next syncer goes on from what an operator could save of a damaged log; `number`
  bits of its disk have rotted |
  """

  kind: str
  number: int = 0
  digest: int = 0
  failed: str = ''
  text: str = ''
  norms: tuple[int, ...] = ()
  refused: tuple[str, ...] = ()


class Observer(Protocol):
  """Watches a run; all methods are called in the order of time."""

  def born(self, now_ns: int, life: Life) -> None:
    """A process begins."""

  def saw(
    self, life: Life, now_ns: int, event: events.Event, out: Sequence[actions.Action]
  ) -> None:
    """A machine took an event and gave its actions; they are not carried out yet."""

  def crashed(self, life: Life, now_ns: int, event: events.Event, error: Exception) -> None:
    """A machine raised on an event: there are no actions."""

  def died(self, now_ns: int, life: Life, killed: bool) -> None:
    """A process is gone: killed, or ended by its machine's Exit."""

  def logged(self, now_ns: int, note: LogNote) -> None:
    """Something happened to the syncer's log: in the simulated world only."""


class Count(Observer):
  """How many turns the machines took."""

  def __init__(self):
    self.events = 0

  def saw(
    self, life: Life, now_ns: int, event: events.Event, out: Sequence[actions.Action]
  ) -> None:
    self.events += 1
