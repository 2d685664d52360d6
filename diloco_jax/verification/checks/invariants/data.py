"""Safety: every batch of the data shards counts once, and no batch is skipped."""

from diloco_jax.protocol import actions, facts, messages
from diloco_jax.verification.checks.books.learner import LearnerBook
from diloco_jax.verification.checks.books.syncer import SyncerBook
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Send

LEARNER, SYNCER = invariant.LEARNER, invariant.SYNCER


class BatchesOnce(invariant.Invariant):
  id = 'I21'
  sentence = (
    'The syncer merges each batch of a data shard at most once per fragment, whichever process '
    'read it.'
  )

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    sync, shards = book.syncs[merge.sync], set()
    for participant in merge.participants:
      _, message = sync.payloads[participant.payload_id]
      merged = book.lineage.batches.get((message.shard, merge.fragment), 0)
      if message.cursor - message.steps < merged:
        self.fail(participant, message, f'merged up to batch {merged}')
      if message.shard in shards:
        self.fail(merge, f'two learners read data shard {message.shard}')
      shards.add(message.shard)


class LeasesJoin(invariant.Invariant):
  id = 'I21a'
  sentence = (
    'A learner is placed on a data shard exactly at the committed cursor, or where the same '
    'process stopped; no two live learners hold one shard. With data of its own it gets the '
    'number under which its batches were merged, or else a new one, and nobody waits for others.'
  )

  @invariant.on(SYNCER, messages.Joined)
  def joined(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    peer, said = book.peers[send.session], send.message
    committed = book.lineage.committed(said.shard)
    for other in book.members.values():
      if other is not peer and other.joined and other.next_position[0] == said.shard:
        self.fail(send, f'{other.join.learner} reads this data shard')
    if not said.shard < self.config.data_shards:
      self.fail(send, f'there are {self.config.data_shards} data shards')
    readers = book.lineage.readers
    own = [number for number, learner in readers.items() if learner == peer.join.learner]
    if self.config.local and said.shard not in (own or {said.shard} - readers.keys()):
      self.fail(send, f'its batches were merged under {own}, others under {readers}')
    if (said.shard, said.cursor) == peer.claim and said.cursor >= committed:
      return
    if said.cursor != committed:
      self.fail(send, f'it claimed {peer.claim}, the committed cursor is {committed}')
    for sync in book.syncs.values():
      if sync.record and any(shard == said.shard for shard, *_ in sync.record.batches):
        self.fail(send, f'the outer step of sync {sync.t} may move its cursor')

  @invariant.on(SYNCER, facts.Member)
  def waits(self, book: SyncerBook, now_ns: int, member: facts.Member, event: Event) -> None:
    if self.config.local and member.state == 'waits':
      self.fail(member)


class HonestReader(invariant.Invariant):
  id = 'I21b'
  sentence = (
    'A learner reads the data shard that it was given, batch by batch, and reports exactly which '
    'batches a contribution covers: one contiguous range of one shard.'
  )

  @invariant.on(LEARNER, messages.Contribution)
  def contribute(self, book: LearnerBook, now_ns: int, send: Send, event: Event) -> None:
    said, capture = send.message, book.payload_ids[send.payload_id]
    if capture.reads != ((said.shard, said.cursor - said.steps, said.cursor),):
      self.fail(book, said, f'it has read {capture.reads}')

  @invariant.on(LEARNER, messages.Confirm)
  def confirm(self, book: LearnerBook, now_ns: int, send: Send, event: Event) -> None:
    said = send.message
    true = (book.next_position or book.at) if said.incarnation == book.incarnation else None
    if (said.shard, said.cursor) != (true or (None, 0)):
      self.fail(book, said, f'it is at {true}')

  @invariant.on(LEARNER, actions.UseShard)
  def uses(self, book: LearnerBook, now_ns: int, use: actions.UseShard, event: Event) -> None:
    if book.running or (use.shard, use.cursor) != book.next_position:
      self.fail(book, use, f'it was given {book.next_position}')

  @invariant.on(LEARNER, actions.Step, actions.Encode)
  def works(self, book: LearnerBook, now_ns: int, work: actions.Work, event: Event) -> None:
    if book.next_position is not None:
      self.fail(book, work, f'it was given {book.next_position}')
