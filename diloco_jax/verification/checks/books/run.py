"""The books of a run: the truth according to the records alone. It never asks a machine.

The books are updated after the checkers (verification/checks/checkers.py) have seen a record, so
that a checker sees both sides of it.
"""

import collections
from collections.abc import Sequence
from typing import Any

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import messages
from diloco_jax.protocol import schedule as schedule_lib
from diloco_jax.protocol.syncer import recovery
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks.books import learner as learner_book
from diloco_jax.verification.checks.books import lineage as lineage_book
from diloco_jax.verification.checks.books import syncer as syncer_book

Book = learner_book.LearnerBook | syncer_book.SyncerBook
KEPT = 256  # outer steps, and checkpoints, to which a syncer may go back


class WrongState(LookupError):
  """A syncer continues from a wrong state."""


class TapeMissing(Exception):
  """The syncer did something that is on no tape: one ended before its process did, or was removed.
  What follows cannot be judged."""


class Run:
  """All processes of a run, and the states from which a new syncer may continue.

  Attributes:
    records: of all outer steps that were decided and are not lost, the first is number 1; None for
      those before the newest KEPT, which no syncer goes back to.
    ended: how many of them have ended according to the machines.
    durable: how many survive a power loss; None: unknown, as with real processes.
    repaired: the log was damaged, so the state of the next syncer is not the syncer's fault.
    healed_ns: when the last fault ended; None: faults may still come.
  """

  def __init__(self, config: config_lib.ProtocolConfig):
    self.config, self.schedule = config, schedule_lib.Schedule(config)
    self.learners: dict[int, learner_book.LearnerBook] = {}  # by nonce
    # Of learners' processes that were replaced: the tokens of each id, and the newest clock.
    self.trained: collections.Counter[str] = collections.Counter()
    self.clock = 0
    self.books: dict[int, Book] = {}  # of processes that have not ended, by number
    self.syncer: syncer_book.SyncerBook | None = None
    self.saved: list[lineage_book.Saved] = []  # without those after a rollback
    self.records: list[lineage_book.Record | None] = []
    self.ended = 0
    self.durable: int | None = None
    self.repaired = False
    self.healed_ns: int | None = None
    # Of the newest KEPT versions: by fragment, the digests by version; and by fragment, version
    # and digest, the digest of its base.
    self.history: list[dict[int, int]] = [{} for _ in range(config.fragments)]
    self.bases: dict[tuple[int, int, int], int] = {}
    self.lost: set[tuple[int, int, int]] = set()  # values that a repair lost

  def born(self, process: observers.ObservedProcess) -> Book:
    """A new process. Raises WrongState if a syncer continues from a wrong state, TapeMissing if it
    continues from one after the end of the tapes."""
    if process.start.role == 'learner':
      book = learner_book.LearnerBook(self.config, self.schedule, process)
      self.learners[book.nonce] = book
    else:
      book = self.syncer = syncer_book.SyncerBook(self, process, self._lineage(process.start))
    self.books[process.number] = book
    return book

  def died(self, process: observers.ObservedProcess) -> Book:
    """A process has ended."""
    book = self.books.pop(process.number)
    book.dead = True
    return book

  def healed_for(self, now_ns: int, leases: int) -> bool:
    """Whether the last fault ended so many leases ago."""
    return self.healed_ns is not None and now_ns >= self.healed_ns + leases * self.config.lease_ns

  def publish(self, p: int, version: int, digest: int) -> None:
    """A fragment has its next version."""
    history, old = self.history[p], version - KEPT
    self.bases[p, version, digest] = history[version - 1]
    history[version] = digest
    self.bases.pop((p, old, history.pop(old, None)), None)

  def decided(self, record: lineage_book.Record) -> None:
    """An outer step is decided."""
    self.records.append(record)
    if len(self.records) > KEPT and self.records[-KEPT - 1] is not None:
      self.records[-KEPT - 1].under_way = ()
      self.records[-KEPT - 1] = None

  def saves(self, saved: lineage_book.Saved) -> None:
    """A syncer asks for a checkpoint."""
    self.saved = [*self.saved[1 - KEPT :], saved]

  def forget_dead(self, lineage: lineage_book.Lineage) -> None:
    """Processes that have ended and hold no id any more give nothing that could be merged."""
    holders = {holder.nonce for holder in lineage.holders.values()}
    for book in [
      learner for learner in self.learners.values() if learner.dead and learner.nonce not in holders
    ]:
      self.trained[book.learner] += book.tokens
      self.clock = max(self.clock, book.clock)
      del self.learners[book.nonce]

  def logged(self, note: observers.LogNote) -> None:
    """A fact about the log from the simulated world."""
    match note.kind:
      case 'appended':
        record = self.records[note.number - 1]
        record.digest, record.failed, record.refused = note.digest, note.failed, note.refused
      case 'durable':
        self.durable = note.number
      case 'repaired':
        self.repaired = True

  def heard(self, event: Any) -> None:
    """A learner receives a message. Raises TapeMissing if the syncer sent it after the end of its
    tape."""
    message, syncer = getattr(event, 'message', None), self.syncer
    if type(message) is messages.Publish and syncer is not None and syncer.dead:
      self._require_opened(message.sync)

  def _require_opened(self, sync: int) -> None:
    """The opening of a sync is on the tape before its effects, unless the tape ended before; in the
    simulated world none does."""
    opened = self.syncer.lineage.opened if self.syncer else 0
    if self.durable is None and sync > opened:
      raise TapeMissing(
        f'sync {sync} was opened, the newest that is on a tape of the syncer is {opened}'
      )

  def _lineage(self, start: Any) -> lineage_book.Lineage:
    if start.state is not None:
      self._require_opened(start.state['opened'])
    number, lineage = self._find_record(start)
    self.records, self.ended = self.records[:number], number
    self.saved = [saved for saved in self.saved if saved.position <= number]
    self.repaired = False
    if self.durable is not None:
      self.durable = min(self.durable, number)  # until the next fact about the log
    for p, history in enumerate(self.history):
      version = lineage.versions[p]
      for lost in [recorded for recorded in history if recorded > version]:
        self.lost.add((p, lost, history.pop(lost)))
      if version not in history and version - 1 in history:
        # It is durable, but no learner had been told.
        self.publish(p, version, lineage.digests[p])
      history.setdefault(version, lineage.digests[p])
    for holder in lineage.holders.values():
      holder.done = False
    return lineage

  def _find_record(self, start: Any) -> tuple[int, lineage_book.Lineage]:
    """The record after which a syncer continues, and the lineage there."""
    if start.state is None:
      number, lineage = 0, self._initial(start.digests)
    else:
      states = (self._state_at(number, start.state) for number in range(len(self.records), -1, -1))
      number, lineage = next((state for state in states if state is not None), (None, None))
    if number is None:
      raise WrongState(self._describe_difference(start.state))
    first = self.ended if self.durable is None else max(self.ended, self.durable)
    lost = number < first and not self.repaired
    if lost or (self.durable is not None and number > first + 1):
      raise WrongState(f'it continues after record {number}, {first} are durable')
    return number, lineage

  def _state_at(
    self, number: int, machine_state: dict[str, Any]
  ) -> tuple[int, lineage_book.Lineage] | None:
    """The record and the lineage, if a machine state agrees with the lineage after that record."""
    for saved in reversed(self.saved):
      if saved.position == number and _are_equal(saved.machine_state, machine_state):
        return number, self._reopened(saved.lineage.copy(), saved.undecided)
    record = self.records[number - 1] if number else None
    if record is None or not self._knows_participants(machine_state, record):
      return None
    lineage = self._state_after(number, machine_state)
    if lineage_book.difference(machine_state, lineage):
      return None
    return number, self._reopened(lineage, record.undecided)

  def _knows_participants(self, machine_state: dict[str, Any], record: lineage_book.Record) -> bool:
    """Whether a machine state knows all participants of the outer steps in progress at a record."""
    members = {row['learner'] for row in machine_state['members']}
    return all(
      participant.learner in members
      for under_way in record.under_way
      for participant in under_way.merge.participants
    )

  def _state_after(self, number: int, machine_state: dict[str, Any]) -> lineage_book.Lineage:
    """The lineage after a record if the syncer decided nothing more."""
    record = self.records[number - 1]
    lineage = record.lineage.copy()
    for under_way in record.under_way:
      p = under_way.merge.fragment
      if under_way.digest is None:  # unknown: take it from the machine state
        is_merged = machine_state['versions'][p] == under_way.merge.version
        under_way.digest, under_way.failed = (
          machine_state['digests'][p],
          '' if is_merged else 'unknown',
        )
        under_way.refused = _refused(under_way, machine_state)
      under_way.end(lineage)
    return lineage

  def first_sync_after(self, after: lineage_book.Saved | lineage_book.Record) -> int:
    """The sync that a syncer opens first if it starts there."""
    return min([after.lineage.next, *self._closing(after.undecided)])

  def _reopened(
    self, lineage: lineage_book.Lineage, undecided: Sequence[int]
  ) -> lineage_book.Lineage:
    """All syncs from the first closing sync that ended with its process are opened again, since no
    later sync follows them."""
    closing = self._closing(undecided)
    if closing:
      lineage.next = min(closing)
      lineage.opened = min(lineage.opened, lineage.next - 1)
    return lineage

  def _closing(self, syncs: Sequence[int]) -> list[int]:
    return [sync for sync in syncs if sync > self.config.total_steps]

  def _describe_difference(self, machine_state: dict[str, Any]) -> str:
    """Describes how a machine state differs from the lineage after the last record."""
    if not self.records:
      return 'there is no record and no checkpoint'
    if not self._knows_participants(machine_state, self.records[-1]):
      return 'it does not know learners whose outer step was in progress'
    return lineage_book.difference(
      machine_state, self._state_after(len(self.records), machine_state)
    )

  def _initial(self, digests: Sequence[int]) -> lineage_book.Lineage:
    zeros = [0] * self.config.fragments
    lists = list(zeros), list(digests), list(zeros), list(zeros)
    return lineage_book.Lineage(*lists, self.schedule.next(0))


def _refused(record: lineage_book.Record, machine_state: dict[str, Any]) -> tuple[str, ...]:
  """The learners refused in an outer step known only from a machine state: their cursors stayed."""
  ends = dict(machine_state['data']['merged'])
  return tuple(
    participant.learner
    for participant, (shard, _, end) in zip(record.merge.participants, record.batches)
    if shard not in ends or ends[shard][record.merge.fragment] < end
  )


def _are_equal(saved: dict[str, Any], machine_state: dict[str, Any]) -> bool:
  """Whether two machine states are equal except for what belongs to the moment: `merging` (empty
  when a syncer starts or saves) and the age of the state."""
  moment = {'merging': [], recovery.UNSAVED: 0}
  return {**saved, **moment} == {**machine_state, **moment}
