"""Safety: each payload counts once, against the right version, in one order, unless it is bad."""

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.verification.checks.books import room
from diloco_jax.verification.checks.books.learner import LearnerBook
from diloco_jax.verification.checks.books.syncer import SyncerBook
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Out, Send

LEARNER, SYNCER = invariant.LEARNER, invariant.SYNCER


class OneAnswer(invariant.Invariant):
  id = 'I1b'
  sentence = (
    'A learner answers only pulls of its current session that are due, and makes no second capture '
    'of a fragment while the first may still be merged.'
  )

  @invariant.on(LEARNER, actions.Encode)
  def encode(self, book: LearnerBook, now_ns: int, encode: actions.Encode, event: Event) -> None:
    anchor = book.anchors[encode.fragment]
    pulled = book.joined and book.pulls.get(encode.fragment) == encode.sync
    if not pulled or anchor.contributed or not book.is_due(encode.fragment):
      self.fail(book, encode, book.pulls, anchor)

  @invariant.on(LEARNER, messages.Contribution)
  def contribute(self, book: LearnerBook, now_ns: int, send: Send, event: Event) -> None:
    capture = book.payload_ids.get(send.payload_id)
    if capture is None or capture.session != send.session or not book.joined:
      self.fail(book, send, capture)

  @invariant.on(LEARNER, messages.Decline)
  def decline(self, book: LearnerBook, now_ns: int, send: Send, event: Event) -> None:
    """The reason of an answer without a payload is true."""
    message, anchor = send.message, book.anchors[send.message.fragment]
    trained = book.trained_on(anchor)
    match message.reason:
      case 'empty':
        holds = not trained and not anchor.contributed and not book.may_step
      case _:
        holds = isinstance(event, events.Encoded) and event.payload_id is None
    pulled = book.pulls.get(message.fragment) == message.sync or isinstance(event, events.Encoded)
    if not holds or not pulled or not book.joined:
      self.fail(book, message, anchor, f'{trained} steps since')


class AtBoundaries(invariant.Invariant):
  id = 'I26'
  sentence = (
    'A learner encodes, adopts, moves to another data shard and saves only between two inner '
    'steps; of the steps that it counts at most one is not complete.'
  )

  @invariant.on(LEARNER, actions.Encode, actions.Adopt, actions.UseShard, actions.Save)
  def between(self, book: LearnerBook, now_ns: int, work: actions.Work, event: Event) -> None:
    if book.running:
      self.fail(book, work, f'the step at clock {book.clock} has no StepDone yet')

  @invariant.after(LEARNER, events.StepDone)
  def counts(self, book: LearnerBook, now_ns: int, done: events.StepDone, out: Out) -> None:
    if book.untimed > 1:
      self.fail(book, done, f'{book.untimed} of its steps have no time yet')


class VersionsInOrder(invariant.Invariant):
  id = 'I3'
  sentence = 'The versions of a fragment are 0, 1, 2, ...; the syncer publishes only the newest.'

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    if merge.version != book.lineage.versions[merge.fragment] + 1:
      self.fail(merge, book.lineage.versions)

  @invariant.on(SYNCER, messages.Publish)
  def publish(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    message, lineage = send.message, book.lineage
    newest = lineage.versions[message.fragment], lineage.digests[message.fragment]
    base = message.version - 1 if isinstance(event, events.MergeDone) else None
    if (message.version, message.digest) != newest or message.base_version != base:
      self.fail(message, f'(version, digest) is {newest}')
    if message.sync != lineage.last_sync[message.fragment]:
      self.fail(message, f'made by sync {lineage.last_sync[message.fragment]}')


class NeverBack(invariant.Invariant):
  id = 'I4'
  sentence = (
    "A learner's fragment never goes back to an older version, unless the syncer lost the newer "
    'one.'
  )

  @invariant.on(LEARNER, actions.Adopt)
  def adopt(self, book: LearnerBook, now_ns: int, adopt: actions.Adopt, event: Event) -> None:
    held, p = book.anchors[adopt.fragment], adopt.fragment
    if adopt.version < held.version and (p, held.version, held.digest) not in self.run.lost:
      self.fail(book, adopt, held)


class DeltasFit(invariant.Invariant):
  id = 'I4b'
  sentence = (
    'The syncer sends a delta to exactly the learners that hold its base and have room for it, and '
    'they apply it to that base; the others are sent the newest values whole, two at a time, once '
    'they have room.'
  )

  @invariant.on(SYNCER, messages.Publish)
  def publish(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    message, peer = send.message, book.peers[send.session]
    base = message.base_version
    if base is not None and peer.sent.get(message.fragment) != base:
      self.fail(send, f'it was sent {peer.sent}')

  @invariant.after(SYNCER, events.MergeDone)
  def published(self, book: SyncerBook, now_ns: int, done: events.MergeDone, out: Out) -> None:
    if done.failed or done.fragment in book.reads:
      return
    version = book.lineage.versions[done.fragment]
    for peer in book.members.values():
      apart = peer.differs | peer.owed
      holds = peer.sent.get(done.fragment) == version - 1 and done.fragment not in apart
      if peer.joined and holds and room.for_delta(book, peer, done.fragment):
        self.fail(f'{peer.join.learner} was not sent version {version} of {done.fragment}')

  @invariant.after(SYNCER, messages.Adopted)
  def catches_up(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    p, peer = event.message.fragment, book.peer
    if not peer.joined or not peer.member or book.exiting:
      return
    if not event.message.matched:
      repaired_ns = peer.repaired_ns.get(p, -self.config.heartbeat_ns)
      due = now_ns - repaired_ns >= self.config.heartbeat_ns and room.for_whole(book, peer)
      if p not in book.reads and due:
        self.fail(event, 'it differs, and no whole fragment is read for it')
      return
    self._left_behind(book, now_ns, event)

  def _left_behind(self, book: SyncerBook, now_ns: int, event: Event) -> None:
    peer, newest = book.peer, book.lineage.versions
    lately_ns = now_ns - self.config.heartbeat_ns  # in a heartbeat a fragment is repaired once
    differs = {p for p in peer.differs if peer.repaired_ns.get(p, lately_ns) <= lately_ns}
    behind = {p for p, version in peer.sent.items() if version != newest[p] or p in differs}
    behind = {p for p in behind if not peer.versions_in_flight[p]}
    if behind - book.reads and room.for_whole(book, peer):
      self.fail(event, f'it is left at {peer.sent}, the newest are {newest}')

  @invariant.on(LEARNER, actions.Adopt)
  def adopt(self, book: LearnerBook, now_ns: int, adopt: actions.Adopt, event: Event) -> None:
    publish, held = book.payload_ids[adopt.payload_id], book.anchors[adopt.fragment]
    if adopt.whole != (publish.base_version is None) or adopt.version != publish.version:
      self.fail(adopt, publish)
    key = adopt.fragment, publish.version, publish.digest
    if not adopt.whole and self.run.bases.get(key, held.digest) != held.digest:
      self.fail(book, publish, held)

  @invariant.on(LEARNER, messages.Adopted)
  def adopted(self, book: LearnerBook, now_ns: int, send: Send, event: Event) -> None:
    """The syncer never sends a delta that does not fit what the learner holds."""
    welcomed = type(event) is events.Received and type(event.message) is messages.Joined
    if not send.message.matched and not welcomed and type(event) is not events.AdoptDone:
      self.fail(book, send, book.anchors[send.message.fragment])


class Quorum(invariant.Invariant):
  id = 'I5'
  sentence = (
    'An outer step merges payloads of at least K different learners (of a closing sync, of any), '
    'all live and joined; it begins when every asked learner has answered or when the grace '
    'window (of a closing sync a lease) is over.'
  )

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    names = [participant.learner for participant in merge.participants]
    if len(set(names)) != len(names) or len(names) < max(1, self.config.needed(merge.sync)):
      self.fail(merge)
    sync = book.syncs.get(merge.sync)
    if sync is None or sync.merging:
      self.fail(merge, 'this sync is not open')
    if {participant.payload_id for participant in merge.participants} != sync.payloads.keys():
      self.fail(merge, sync.payloads)
    silence_ns = self.config.lease_ns + self.config.heartbeat_ns
    for peer, _message in sync.payloads.values():
      if not peer.member or not peer.joined or now_ns - peer.heard_ns > silence_ns:
        self.fail(merge, peer)

  @invariant.on(SYNCER, facts.Merging)
  def merging(self, book: SyncerBook, now_ns: int, merging: facts.Merging, event: Event) -> None:
    """The reason that is recorded holds."""
    sync = book.syncs[merging.sync]
    if self.config.closing(merging.sync) and merging.grace_ns != self.config.lease_ns:
      self.fail(merging)
    if sync.waiting and now_ns < sync.opened_ns + merging.grace_ns:
      self.fail(merging, f'{sync.waiting} have not answered')
    if merging.waited_ns != now_ns - sync.opened_ns:
      self.fail(merging, f'it opened at {sync.opened_ns}')
    if merging.tokens != sum(participant.tokens for participant in sync.merging.participants):
      self.fail(merging, sync.merging)


class Fresh(invariant.Invariant):
  id = 'I6'
  sentence = (
    'The syncer merges no payload whose anchor is more than max_staleness versions old, except in '
    'a closing sync.'
  )

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    version = book.lineage.versions[merge.fragment]
    for _peer, message in book.syncs[merge.sync].payloads.values():
      oldest = 0 if self.config.closing(merge.sync) else version - self.config.max_staleness
      if not oldest <= message.version <= version:
        self.fail(merge, message, f'the newest version is {version}')


class InOrder(invariant.Invariant):
  id = 'I15'
  sentence = (
    'The syncer merges payloads and serves learners in the order of learner ids, whatever order '
    'they arrive in.'
  )

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    names = [participant.learner for participant in merge.participants]
    if names != sorted(names):
      self.fail(merge)

  @invariant.after(SYNCER, events.MergeDone, events.FragmentRead)
  def published(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    names = [
      book.peers[action.session].join.learner
      for action in out
      if type(action) is actions.Send and type(action.message) is messages.Publish
    ]
    if names != sorted(names):
      self.fail(event, names)
