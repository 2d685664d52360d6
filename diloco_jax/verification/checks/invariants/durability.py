"""Safety: no result that the syncer sent is lost, whenever it ends and whatever its disk does."""

from typing import Any

from diloco_jax.protocol import actions, facts, messages
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks.books import lineage as lineage_book
from diloco_jax.verification.checks.books.syncer import SyncerBook
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Send

SYNCER = invariant.SYNCER


class CheckpointIsACut(invariant.Invariant):
  id = 'I16'
  sentence = (
    'The machine state that a syncer saves is of one moment between two outer steps: its versions, '
    'ids, ledger and cursors in the data agree with each other.'
  )

  @invariant.on(SYNCER, actions.Save)
  def save(self, book: SyncerBook, now_ns: int, save: actions.Save, event: Event) -> None:
    if book.merges:
      self.fail('an outer step is in progress')
    self._same(save.machine_state, book.lineage)

  @invariant.on(SYNCER, facts.Merging)
  def books(self, book: SyncerBook, now_ns: int, merging: facts.Merging, event: Event) -> None:
    """The same holds for the machine state in a Merge, at the moment of its decision."""
    merge = book.syncs[merging.sync].merging
    self._same(merge.machine_state, book.lineage)
    under_way = {t: sync.record.moves for t, sync in book.syncs.items() if sync.merging}
    if sorted(merge.machine_state['merging']) != sorted(under_way):
      self.fail(
        f'the outer steps in progress are {[*under_way]}, not {merge.machine_state["merging"]}'
      )
    moves = dict(merge.machine_state['data']['moves'])
    if moves != under_way:
      self.fail(f'the moves in progress are {under_way}, not {moves}')

  def _same(self, machine_state: dict[str, Any], lineage: lineage_book.Lineage) -> None:
    difference = lineage_book.difference(machine_state, lineage)
    if difference:
      self.fail(difference)


class DurableFirst(invariant.Invariant):
  id = 'I8'
  sentence = (
    'When the syncer reports how an outer step ended (merged, discarded, cancelled, published), '
    'the record of that outer step is already durable.'
  )

  @invariant.on(
    SYNCER,
    messages.Settled,
    messages.Publish,
    messages.Joined,
    messages.Finish,
    facts.Cancelled,
  )
  def said(self, book: SyncerBook, now_ns: int, what: Any, event: Event) -> None:
    durable, announced = self.run.durable, self.run.ended
    if durable is not None and durable < announced:
      self.fail(what, f'{announced} outer steps have ended, {durable} records are durable')


class FinishIsKnown(invariant.Invariant):
  id = 'I8b'
  sentence = (
    'The syncer sends Finish only once a syncer that starts from the disk would know that the run '
    'is over.'
  )

  @invariant.on(SYNCER, messages.Finish)
  def finish(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    """That syncer loads the newest checkpoint, or the machine state of a later outer step."""
    last, records = book.schedule.last, self.run.records
    verified = (save for save in reversed(self.run.saved) if save.verified)
    saved = max(verified, key=lambda save: save.position, default=None)
    if saved is not None and saved.position == len(records):
      known = self.run.first_sync_after(saved)
    else:
      known = self.run.first_sync_after(records[-1]) if records else 0
    if max(known, book.first) <= last:
      self.fail(send, f'it would continue with sync {known} of {last}')


class RecoveredState(invariant.Invariant):
  id = 'I10'
  sentence = (
    'A syncer continues from the state at the last durable record, or from one record later if '
    'that record reached the disk whole: no restart loses a version of which anybody was told, '
    'unless an operator repaired a damaged log.'
  )

  def logged(self, now_ns: int, note: observers.LogNote) -> None:
    """The log is called damaged only if a bit of its disk has rotted."""
    if note.kind == 'not recovered' or (note.kind == 'repaired' and not note.number):
      self.fail(note.text)
    if note.kind == 'recovered' and note.number != len(self.run.records):
      self.fail(
        f'the log ends with record {note.number}, the state is that after {len(self.run.records)}'
      )


class CompactionKeeps(invariant.Invariant):
  id = 'I20'
  sentence = 'Compaction never removes a record newer than the newest verified checkpoint.'

  def logged(self, now_ns: int, note: observers.LogNote) -> None:
    if note.kind == 'compacted':
      verified = max((save.position for save in self.run.saved if save.verified), default=0)
      if note.number > verified + 1:
        self.fail(f'record {note.number} is the oldest, the newest checkpoint holds {verified}')
