"""Coverage points: situations to reach. Clean seeds mean little if they never reach these states.

A point is a name such as `event StepDone`, `sync merging -> published` or `discarded late`. The
required points follow from the protocol's own tables: every event, action and message, every reason
and refusal, every move of the tables of states, every verdict on a sync, every kind of
fault. `missing()` lists the required points that were not reached.

Points are an observer (protocol/tape/observers.py) of one seed; `merge` adds up those of many.
"""

import collections
import contextlib
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from diloco_jax.protocol import actions, events, facts, messages, states
from diloco_jax.protocol.learner import connection, machine
from diloco_jax.protocol.syncer import gather
from diloco_jax.protocol.tape import observers
from diloco_jax.verification import plans

# The other codes need another run's learner, or a very rare race.
REFUSALS = ('ID_IN_USE', 'FENCED', 'QUARANTINED', 'ID_IN_QUARANTINE')
DECLINES = ('empty', messages.Reason.BAD_VALUE)
VERDICTS = ('merged', 'cancelled', 'late', 'stale', 'duplicate', messages.Reason.BAD_VALUE)
# The first word of each reason.
MERGED_WHY, CANCELLED_WHY = ('all', 'grace'), ('all', 'not', 'every')
REJECTED_WHY = ('norm', 'NaN')
LEASES = ('begins', 'continues', 'is kept', 'is changed', 'is waited for')
LOG = ('appended', 'durable', 'recovered', 'torn', 'compacted', 'full', 'broken', 'cut', 'repaired')
EXITS = ('syncer 0', 'learner 0', 'learner 42')
FAULTS = tuple(plans.KINDS)
TABLES = {
  'sync': gather.SYNC_STATES,
  'connection': connection.CONNECTION_STATES,
  'training': machine.TRAINING_STATES,
}


def _names(kind: str, union: Any) -> Iterable[str]:
  return (f'{kind} {one.__name__}' for one in typing.get_args(union))


def required(faults: Iterable[str] = FAULTS) -> tuple[str, ...]:
  """All points that many seeds with these kinds of faults must reach."""
  return (
    *_names('event', events.Event),
    *_names('action', actions.Action),
    *_names('message', messages.Message),
    *(f'{name} {source} -> {to}' for name, rows in TABLES.items() for source, to, _ in rows),
    *(f'discarded {reason}' for reason in messages.Reason.ALL),
    *(f'settled {verdict}' for verdict in VERDICTS),
    *(f'declined {reason}' for reason in DECLINES),
    *(f'refused {code}' for code in REFUSALS),
    *(f'merged because {why}' for why in MERGED_WHY),
    *(f'cancelled because {why}' for why in CANCELLED_WHY),
    *(f'rejected for {why}' for why in REJECTED_WHY),
    *(f'exit {code}' for code in EXITS),
    *(f'fault {kind}' for kind in faults),
    *(f'lease {what}' for what in LEASES),
    *(f'log {kind}' for kind in LOG),
    'log recovered one more',
    'syncer restored',
    'learner restored',
    'syncs skipped',
    'late payload merged',
    'fragment repaired',
    'process killed',
  )


class Points(observers.Observer):
  """The points that one seed, or many seeds, reached: `counts` by point."""

  def __init__(self):
    self.counts: collections.Counter[str] = collections.Counter()
    self._types: collections.Counter[type] = collections.Counter()
    self._claims: dict[tuple[int, int], tuple[int | None, int]] = {}  # by process and session
    self._durable = 0

  # --- Reading ------------------------------------------------------------------------------------

  def merge(self, other: 'Points') -> None:
    """Adds the counts of other seeds."""
    self.counts.update(other.total())

  def total(self) -> dict[str, int]:
    """The number of times that each point was reached."""
    kinds = {
      **dict.fromkeys(typing.get_args(events.Event), 'event'),
      **dict.fromkeys(typing.get_args(actions.Action), 'action'),
    }
    total = collections.Counter(self.counts)
    for one, count in self._types.items():
      total[f'{kinds.get(one, "message")} {one.__name__}'] += count
    return dict(total)

  def missing(self, faults: Iterable[str] = FAULTS) -> list[str]:
    """The required points that were not reached."""
    total = self.total()
    return [point for point in required(faults) if not total.get(point)]

  # --- Watching -----------------------------------------------------------------------------------

  @contextlib.contextmanager
  def moves(self) -> Iterator[None]:
    """Counts the moves that the machines of this process make meanwhile."""
    names, move = {id(table): name for name, table in TABLES.items()}, states.move

    def counted(table: states.Table, source: str, target: str) -> str:
      self.counts[f'{names[id(table)]} {source} -> {target}'] += 1
      return move(table, source, target)

    states.move = counted
    yield
    states.move = move

  def fault(self, kind: str) -> None:
    """A fault of this kind found its victim."""
    self.counts[f'fault {kind}'] += 1

  def born(self, now_ns: int, life: observers.ObservedProcess) -> None:
    if life.start.state is not None:
      self.counts[f'{life.start.role} restored'] += 1

  def died(self, now_ns: int, life: observers.ObservedProcess, killed: bool) -> None:
    if killed:
      self.counts['process killed'] += 1

  def logged(self, now_ns: int, note: observers.LogNote) -> None:
    self.counts[f'log {note.kind}'] += 1
    if note.kind == 'recovered' and note.number == self._durable + 1:
      self.counts['log recovered one more'] += 1  # the syncer had not told any learner of it
    if note.kind in ('durable', 'recovered'):
      self._durable = note.number

  def saw(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    kind = type(event)
    self._types[kind] += 1
    if kind is events.Received:
      self._types[type(event.message)] += 1
    if life.start.role == 'syncer':
      self._syncer(life.number, event, out)
    else:
      self._learner(out)

  def _syncer(self, process: int, event: events.Event, out: observers.Actions) -> None:
    if type(event) is events.Received and type(event.message) is messages.Confirm:
      self._claims[process, event.session] = event.message.shard, event.message.cursor
    for action in out:
      kind = type(action)
      self._types[kind] += 1
      if kind is actions.Send:
        self._count_sent(action.message)
        if type(action.message) is messages.Joined:
          self._count_lease(self._claims[process, action.session], action.message)
      elif kind is actions.Report:
        self._reported(action.fact)
      elif kind is actions.Exit:
        self.counts[f'exit syncer {action.code}'] += 1

  def _count_sent(self, message: messages.Message) -> None:
    kind = type(message)
    if kind is messages.Settled:
      self.counts[f'settled {message.reason or "merged"}'] += 1
    elif kind is messages.Refused:
      self.counts[f'refused {message.code}'] += 1

  def _count_lease(self, claim: tuple[int | None, int], joined: messages.Joined) -> None:
    if claim == (joined.shard, joined.cursor):
      self.counts['lease is kept'] += 1
    elif claim[0] is not None:
      self.counts['lease is changed'] += 1
    else:
      self.counts[f'lease {"continues" if joined.cursor else "begins"}'] += 1

  def _reported(self, fact: facts.Fact) -> None:
    match fact:
      case facts.Merging():
        self.counts[f'merged because {fact.why.split()[0]}'] += 1
        self.counts['late payload merged'] += len(fact.late)
      case facts.Cancelled():
        self.counts[f'cancelled because {fact.why.split()[0]}'] += 1
      case facts.Refused():
        self.counts[f'rejected for {fact.why.split()[0]}'] += 1
      case facts.Member(state='waits'):
        self.counts['lease is waited for'] += 1
      case facts.Ledger():
        for reason in fact.discarded:
          self.counts[f'discarded {reason}'] += 1
        self.counts['syncs skipped'] += fact.skipped
        self.counts['fragment repaired'] += fact.repaired

  def _learner(self, out: observers.Actions) -> None:
    for action in out:
      kind = type(action)
      self._types[kind] += 1
      if kind is actions.Send and type(action.message) is messages.Decline:
        self.counts[f'declined {action.message.reason}'] += 1
      elif kind is actions.Exit:
        self.counts[f'exit learner {action.code}'] += 1
