"""Safety: every batch of the data shards counts once, and no batch is skipped."""

from diloco_jax.proof.checks.invariants import invariant
from diloco_jax.protocol import actions, facts, messages

LEARNER, SYNCER = invariant.LEARNER, invariant.SYNCER


class BatchesOnce(invariant.Invariant):
  id = 'I21'
  sentence = (
    'The syncer merges each batch of a data shard at most once per fragment, whichever process '
    'read it; the cursors that it writes down are those of the outer steps that succeeded.'
  )

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    gather, streams = book.gathers[merge.sync], set()
    for one in merge.participants:
      _, message = gather.payloads[one.handle]
      merged = book.lineage.batches.get((message.stream, merge.fragment), 0)
      if message.cursor - message.steps < merged:
        self.fail(one, message, f'merged up to batch {merged}')
      if message.stream in streams:
        self.fail(merge, f'two learners read data shard {message.stream}')
      streams.add(message.stream)

  @invariant.on(SYNCER, actions.Save)
  def save(self, book, now_ns, save, event):
    self._same(book, save.books['data'], [])

  @invariant.on(SYNCER, facts.Merging)
  def books(self, book, now_ns, merging, event):
    moves = [
      [
        sync,
        [
          [participant.learner, stream, one.fragment, end]
          for participant, (stream, _, end) in zip(
            one.record.merge.participants, one.record.batches
          )
        ],
      ]
      for sync, one in book.gathers.items()
      if one.record is not None
    ]
    merge = book.gathers[merging.sync].merging
    self._same(book, merge.books['data'], moves)

  def _same(self, book, data, moves):
    said = {
      (stream, p): cursor
      for stream, cursors in data['merged']
      for p, cursor in enumerate(cursors)
      if cursor
    }
    if said != book.lineage.batches:
      self.fail(f'cursors are {said}, they should be {book.lineage.batches}')
    if sorted(data['moves']) != sorted(moves):
      self.fail(f'the moves in progress are {moves}, not {data["moves"]}')


class LeasesJoin(invariant.Invariant):
  id = 'I21a'
  sentence = (
    'A learner is placed on a data shard exactly at the committed cursor, or where the same '
    'process stopped; no two live learners hold one shard.'
  )

  @invariant.on(SYNCER, messages.Joined)
  def joined(self, book, now_ns, send, event):
    peer, said = book.peers[send.session], send.message
    committed = book.lineage.committed(said.stream)
    for other in book.members.values():
      if other is not peer and other.joined and other.lease[0] == said.stream:
        self.fail(send, f'{other.join.learner} reads this data shard')
    if not said.stream < self.config.data_streams:
      self.fail(send, f'there are {self.config.data_streams} data shards')
    if (said.stream, said.cursor) == peer.claim and said.cursor >= committed:
      return
    if said.cursor != committed:
      self.fail(send, f'it claimed {peer.claim}, the committed cursor is {committed}')
    for gather in book.gathers.values():
      if gather.record and any(stream == said.stream for stream, *_ in gather.record.batches):
        self.fail(send, f'the outer step of sync {gather.sync} may move its cursor')


class HonestReader(invariant.Invariant):
  id = 'I21b'
  sentence = (
    'A learner reads the data shard that it was given, batch by batch, and reports exactly which '
    'batches a contribution covers: one contiguous range of one shard.'
  )

  @invariant.on(LEARNER, messages.Contribution)
  def contribute(self, book, now_ns, send, event):
    said, snapshot = send.message, book.handles[send.handle]
    if snapshot.reads != ((said.stream, said.cursor - said.steps, said.cursor),):
      self.fail(book, said, f'it has read {snapshot.reads}')

  @invariant.on(LEARNER, messages.Confirm)
  def confirm(self, book, now_ns, send, event):
    said = send.message
    true = (book.lease or book.at) if said.incarnation == book.incarnation else None
    if (said.stream, said.cursor) != (true or (None, 0)):
      self.fail(book, said, f'it is at {true}')

  @invariant.on(LEARNER, actions.UseStream)
  def uses(self, book, now_ns, use, event):
    if book.running or (use.stream, use.cursor) != book.lease:
      self.fail(book, use, f'it was given {book.lease}')

  @invariant.on(LEARNER, actions.Step, actions.Encode)
  def works(self, book, now_ns, work, event):
    if book.lease is not None:
      self.fail(book, work, f'it was given {book.lease}')
