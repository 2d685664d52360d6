"""The state of every process and every sync on the diagrams of docs/protocol.md, from the
records."""

import collections
from collections.abc import Iterator

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import gather
from diloco_jax.protocol.tape import observers

Move = tuple[str, str, str]  # diagram, source, target

DRAWN: tuple[Move, ...] = tuple(
  (diagram, source, target)
  for diagram, table in (
    ('sync', gather.SYNC_STATES),
    ('connection', connection.CONNECTION_STATES),
    ('training', learner_machine.TRAINING_STATES),
  )
  for source, target, _ in table
)


INITIAL = {'sync': 'due', 'connection': 'away', 'training': 'waiting'}


ENDS = ('published', 'cancelled')  # of a sync


class Diagrams:
  """All processes of a run that have not ended, with the syncs that they have in hand."""

  def __init__(self):
    # By process, then by diagram and sync (else 0).
    self._states: dict[int, dict[tuple[str, int], str]] = collections.defaultdict(dict)
    self._newest: dict[int, int] = {}  # of a learner's process the session, of a syncer's the sync

  def died(self, process: int) -> None:
    self._states.pop(process, None)
    self._newest.pop(process, None)

  def moves(
    self, life: observers.ObservedProcess, event: events.Event, out: observers.Actions
  ) -> Iterator[Move]:
    """The moves that a turn has made, drawn or not."""
    of_role = self._syncer if life.start.role == 'syncer' else self._learner
    return of_role(life.number, event, out)

  def _syncer(self, process: int, event: events.Event, out: observers.Actions) -> Iterator[Move]:
    if type(event) is events.MergeDone and not event.failed:
      yield self._move(process, 'sync', 'published', event.sync)
    for action in out:
      match action:
        case actions.Send(message=messages.Pull(sync=sync)):
          if self._state(process, 'sync', sync) == 'due':  # else another learner is asked
            yield self._move(process, 'sync', 'announced', sync)
        case actions.Report(fact=facts.Opened(sync=sync)):
          yield from self._opened(process, sync)
        case actions.Merge(sync=sync):
          yield self._move(process, 'sync', 'merging', sync)
        case actions.Report(fact=facts.Cancelled(sync=sync)):
          yield self._move(process, 'sync', 'cancelled', sync)

  def _opened(self, process: int, sync: int) -> Iterator[Move]:
    for (_, other), state in list(self._states[process].items()):
      if state == 'announced' and other < sync:
        yield self._move(process, 'sync', 'cancelled', other)
    if self._state(process, 'sync', sync) == 'due':
      yield self._move(process, 'sync', 'announced', sync)
    yield self._move(process, 'sync', 'gathering', sync)
    self._newest[process] = sync

  def _learner(self, process: int, event: events.Event, out: observers.Actions) -> Iterator[Move]:
    newest = self._newest.get(process)
    match event:
      case events.Disconnected(session=session) if session == newest:
        yield self._move(process, 'connection', 'away')
      case events.Received(session=session, message=messages.Joined()) if session == newest:
        if self._state(process, 'connection') == 'joining':
          yield self._move(process, 'connection', 'joined')
    for action in out:
      match action:
        case actions.Dial(session=session):
          self._newest[process] = session
          yield self._move(process, 'connection', 'dialing')
        case actions.Send(message=messages.Join()):
          yield self._move(process, 'connection', 'joining')
        case actions.Step() if self._state(process, 'training') != 'training':
          yield self._move(process, 'training', 'training')
        case actions.Report(fact=facts.State(state='trained')):
          if (
            self._state(process, 'training') == 'waiting'
          ):  # its clock is at T before its first step
            yield self._move(process, 'training', 'training')
          yield self._move(process, 'training', 'trained')
        case actions.Exit():
          yield self._move(process, 'training', 'ended')

  def _state(self, process: int, diagram: str, sync: int = 0) -> str:
    over = 0 < sync <= self._newest.get(process, 0)  # unless it is still in hand
    return self._states[process].get((diagram, sync), 'over' if over else INITIAL[diagram])

  def _move(self, process: int, diagram: str, target: str, sync: int = 0) -> Move:
    source = self._state(process, diagram, sync)
    self._states[process][diagram, sync] = target
    if target in ENDS:
      del self._states[process][diagram, sync]
    return diagram, source, target
