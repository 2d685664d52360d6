"""The state of every process and every sync on the diagrams of docs/protocol.md, from the
records."""

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


class Diagrams:
  """All processes of a run."""

  def __init__(self):
    self._states: dict[tuple[int, str, int], str] = {}  # by process, diagram and sync (else 0)
    self._sessions: dict[int, int] = {}  # of each learner's process, the newest

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
    for (number, diagram, other), state in list(self._states.items()):
      if (number, diagram, state) == (process, 'sync', 'announced') and other < sync:
        yield self._move(process, 'sync', 'cancelled', other)
    if self._state(process, 'sync', sync) == 'due':
      yield self._move(process, 'sync', 'announced', sync)
    yield self._move(process, 'sync', 'gathering', sync)

  def _learner(self, process: int, event: events.Event, out: observers.Actions) -> Iterator[Move]:
    newest = self._sessions.get(process)
    match event:
      case events.Disconnected(session=session) if session == newest:
        yield self._move(process, 'connection', 'away')
      case events.Received(session=session, message=messages.Joined()) if session == newest:
        if self._state(process, 'connection') == 'joining':
          yield self._move(process, 'connection', 'joined')
    for action in out:
      match action:
        case actions.Dial(session=session):
          self._sessions[process] = session
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
    return self._states.get((process, diagram, sync), INITIAL[diagram])

  def _move(self, process: int, diagram: str, target: str, sync: int = 0) -> Move:
    source = self._state(process, diagram, sync)
    self._states[process, diagram, sync] = target
    return diagram, source, target
