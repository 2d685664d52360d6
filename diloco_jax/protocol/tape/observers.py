"""An observer of a run sees what tapes hold: the start and end of processes, and every turn.

So checkers, narration and tapes watch the simulated world live and read the tapes of real
processes afterwards.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import tape as tape_lib

Actions = Sequence[actions.Action]


@dataclasses.dataclass(frozen=True, slots=True)
class ObservedProcess:
  """One process; `number` grows in the order of the starts of a run and is never used again."""

  number: int
  start: tape_lib.Start


@dataclasses.dataclass(frozen=True, slots=True)
class LogNote:
  """A fact about the syncer's log that no tape holds; `number` is of a record.

  | kind | |
  |---|---|
  | appended | the operating system has record `number`, an outer step that ended like this |
  | durable | a power loss can no longer destroy record `number` or an earlier one |
  | recovered | a new syncer continues after record `number` |
  | not recovered | recovery failed, and the log gave no reason: `text` |
  | torn | the log ended in an incomplete record, which was dropped |
  | compacted | record `number` is the oldest that is kept |
  | full, broken | the disk has no room for a record; the disk failed, and the process ends |
  | cut | the process, or its host, died in the middle of a call to the disk |
  | repaired | the next syncer continues from what an operator could save of a damaged log; `number`
  bits of its disk have rotted |
  """

  kind: str
  number: int = 0
  digest: int = 0
  failed: str = ''
  text: str = ''
  refused: tuple[str, ...] = ()


class Observer(Protocol):
  """Watches a run; all methods are called in the order of time."""

  def born(self, now_ns: int, process: ObservedProcess) -> None:
    """A process starts."""

  def saw(self, process: ObservedProcess, now_ns: int, event: events.Event, out: Actions) -> None:
    """A machine handled an event and returned actions; they are not carried out yet."""

  def crashed(
    self, process: ObservedProcess, now_ns: int, event: events.Event, error: Exception
  ) -> None:
    """A machine raised on an event and returned no actions."""

  def died(self, now_ns: int, process: ObservedProcess, killed: bool) -> None:
    """A process ended: it was killed, or its machine asked for Exit."""

  def logged(self, now_ns: int, note: LogNote) -> None:
    """The syncer's log changed (in the simulated world only)."""


class Count(Observer):
  """How many turns the machines took."""

  def __init__(self):
    self.events = 0

  def saw(self, process: ObservedProcess, now_ns: int, event: events.Event, out: Actions) -> None:
    self.events += 1
