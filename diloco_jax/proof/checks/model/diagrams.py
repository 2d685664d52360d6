"""Where every process and every sync is on the diagrams of docs/protocol.md, by its records."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from diloco_jax.proof.checks import observers
from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import gather

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


@dataclasses.dataclass(slots=True)
class _Process:
  connection: str = 'away'
  training: str = 'waiting'
  session: int = 0
  syncs: dict[int, str] = dataclasses.field(default_factory=dict)


class Diagrams:
  """All processes of a run."""

  def __init__(self):
    self._processes: dict[int, _Process] = collections.defaultdict(_Process)

  def moves(
    self, life: observers.ObservedProcess, event: events.Event, out: Sequence[actions.Action]
  ) -> Iterator[Move]:
    """The moves that a turn has made, drawn or not."""
    process = self._processes[life.number]
    if life.start.role == 'syncer':
      yield from self._syncer(process.syncs, event, out)
    else:
      yield from self._learner(process, event, out)

  def _syncer(
    self, syncs: dict[int, str], event: events.Event, out: Sequence[actions.Action]
  ) -> Iterator[Move]:
    if type(event) is events.MergeDone and not event.failed:
      yield from _sync(syncs, event.sync, 'published')
    for action in out:
      match action:
        case actions.Send(message=messages.Pull(sync=sync)) if syncs.get(sync) != 'gathering':
          yield from _sync(syncs, sync, 'gathering')
        case actions.Merge(sync=sync):
          yield from _sync(syncs, sync, 'merging')
        case actions.Report(fact=facts.Cancelled(sync=sync)):
          yield from _sync(syncs, sync, 'cancelled')

  def _learner(
    self, process: _Process, event: events.Event, out: Sequence[actions.Action]
  ) -> Iterator[Move]:
    match event:
      case events.Disconnected(session=process.session):
        yield from _connection(process, 'away')
      case events.Received(session=process.session, message=messages.Joined()):
        if process.connection == 'joining':
          yield from _connection(process, 'joined')
    for action in out:
      match action:
        case actions.Dial(session=session):
          process.session = session
          yield from _connection(process, 'dialing')
        case actions.Send(message=messages.Join()):
          yield from _connection(process, 'joining')
        case actions.Step() if process.training != 'training':
          yield from _training(process, 'training')
        case actions.Report(fact=facts.State(state='trained')):
          if process.training == 'waiting':  # its clock is at T before its first step
            yield from _training(process, 'training')
          yield from _training(process, 'trained')
        case actions.Exit():
          yield from _training(process, 'ended')


def _sync(syncs: dict[int, str], sync: int, target: str) -> Iterator[Move]:
  yield 'sync', syncs.get(sync, 'due'), target
  syncs[sync] = target


def _connection(process: _Process, target: str) -> Iterator[Move]:
  yield 'connection', process.connection, target
  process.connection = target


def _training(process: _Process, target: str) -> Iterator[Move]:
  yield 'training', process.training, target
  process.training = target
