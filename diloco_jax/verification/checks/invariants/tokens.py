"""Safety: every report about values and tokens is true, and the ledger adds up."""

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.verification.checks.books import room
from diloco_jax.verification.checks.books import run as run_book
from diloco_jax.verification.checks.books.learner import LearnerBook
from diloco_jax.verification.checks.books.syncer import Sync, SyncerBook
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Out, Send

Reason = messages.Reason
EVERY, LEARNER, SYNCER = invariant.EVERY, invariant.LEARNER, invariant.SYNCER


class HonestDigests(invariant.Invariant):
  id = 'I7b'
  sentence = (
    'A learner reports that it holds the published bits if and only if it does, and says so again '
    'on its next session as long as it does not.'
  )

  @invariant.on(LEARNER, messages.Adopted)
  def adopted(self, book: LearnerBook, now_ns: int, send: Send, event: Event) -> None:
    said = send.message
    if isinstance(event, events.AdoptDone):
      anchor = book.last_adopted
      true = anchor.version, book.reported(anchor), anchor.sound
      if (said.version, said.tokens, said.matched) != true:
        self.fail(book, said, anchor)
    elif said.matched:
      self.fail(book, said, 'nothing was adopted')

  @invariant.after(LEARNER, events.AdoptDone)
  def adopt_done(self, book: LearnerBook, now_ns: int, done: events.AdoptDone, out: Out) -> None:
    anchor = book.last_adopted
    if anchor.sound or not book.joined or anchor is not book.anchors[done.fragment]:
      return
    if not any(
      type(action) is actions.Send and type(action.message) is messages.Adopted for action in out
    ):
      self.fail(book, done, anchor)

  @invariant.on(LEARNER, messages.Joined)
  def joined(self, book: LearnerBook, now_ns: int, event: Event, out: Out) -> None:
    """The syncer may not have heard it on the session before."""
    if event.session != book.session or book.joined:
      return  # of an old session, or a duplicate
    discarded = {
      action.message.fragment
      for action in out
      if type(action) is actions.Send
      and type(action.message) is messages.Adopted
      and not action.message.matched
    }
    for p, anchor in enumerate(book.anchors):
      if not anchor.sound and p not in {*event.message.due, *discarded}:
        self.fail(book, event, anchor)


class TokensConserved(invariant.Invariant):
  id = 'I7'
  sentence = (
    "Every fragment-token is merged, discarded with a reason or unsettled: the syncer's ledger "
    "agrees with the learners' own counts and with its verdicts. A merge marks the payloads of "
    'learners that are pulled in few periods, and goes on from one participant if and only if '
    'more than half of them have trained apart for too long.'
  )

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    sync = book.syncs[merge.sync]
    for participant in merge.participants:
      peer, said = sync.payloads[participant.payload_id]
      slow = book.is_pulled_less(peer)
      true = peer.join.learner, said.tokens_to - said.tokens_from, said.steps, slow
      if (participant.learner, participant.tokens, participant.steps, participant.slow) != true:
        self.fail(participant, said)
    far = screening_lib.too_far(
      [participant.steps for participant in merge.participants], self.config.period
    )
    left = far * (len(merge.participants) - 1)
    if sum(participant.apart for participant in merge.participants) != left:
      self.fail(merge)

  @invariant.on(SYNCER, facts.Ledger)
  def ledger(self, book: SyncerBook, now_ns: int, ledger: facts.Ledger, event: Event) -> None:
    if self._differs(book, ledger) and not ledger.unsettled and book.can_end(now_ns):
      book.lineage.close_all()
    difference = self._differs(book, ledger)
    if difference:
      self.fail(difference)

  def _differs(self, book: SyncerBook, ledger: facts.Ledger) -> str:
    true = book.lineage.totals()
    for name, count in true.items():
      said = getattr(ledger, name)
      if said != count:
        return f'{name} is {said}, it should be {count}'
    rows = {
      name: (row['incarnations'], row['tokens'], row['merged'], row['discarded'])
      for name, row in ledger.learners.items()
    }
    true = book.lineage.learners()
    return '' if rows == true else f'learners are {rows}, it should be {true}'

  @invariant.on(SYNCER, facts.Ledger)
  def counts(self, book: SyncerBook, now_ns: int, ledger: facts.Ledger, event: Event) -> None:
    lineage = book.lineage
    true = (
      sum(lineage.versions),
      sum(lineage.cancelled),
      lineage.repaired,
      lineage.skipped * self.config.fragments,
      lineage.opened,
    )
    said = (ledger.synced, ledger.cancelled, ledger.repaired, ledger.skipped, ledger.sync)
    if said != true:
      self.fail(f'synced, cancelled, repaired, skipped, sync are {said}, they should be {true}')

  @invariant.on(SYNCER, messages.Leave)
  def leave(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    """A learner that leaves has reported all its tokens."""
    peer = book.peer
    learner = book.learner(peer) if peer.member and peer.joined and not book.exiting else None
    if learner is not None and book.account(peer).trained != learner.reported_tokens:
      self.fail(learner, book.account(peer), f'it trained {learner.reported_tokens}')

  def finished(self, now_ns: int) -> None:
    syncer = self.run.syncer
    if syncer is None or not syncer.over or not syncer.exited:
      return
    totals = syncer.lineage.totals()
    settled = totals['merged'] + sum(totals['discarded'].values())
    trained = self.run.trained.copy()
    for book in self.run.learners.values():
      trained[book.learner] += book.tokens
    if totals['unsettled'] or settled != self.config.fragments * totals['trained']:
      self.fail(totals)
    for name, (_, tokens, _, _) in syncer.lineage.learners().items():
      if name in trained and tokens > trained[name]:
        self.fail(f'{name} trained {trained[name]} tokens, the ledger has {tokens}')


class Rebased(invariant.Invariant):
  id = 'I25'
  sentence = (
    'When learners rebase, a learner that adopts a version carries on nothing that the ledger has '
    'settled; the syncer asks it to drop the rest only after a refused update or a repair.'
  )

  @invariant.on(LEARNER, actions.Adopt)
  def adopt(self, book: LearnerBook, now_ns: int, adopt: actions.Adopt, event: Event) -> None:
    anchor, publish = book.anchors[adopt.fragment], book.payload_ids[adopt.payload_id]
    capture, may = anchor.contributed, self.config.rebases and publish.keep
    settled = capture is not None and capture.reported[1] == publish.settled_to
    if (adopt.keep and not may) or adopt.merged != (adopt.keep and settled):
      self.fail(book, adopt, anchor, publish)

  @invariant.on(SYNCER, messages.Publish)
  def publish(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    said, peer = send.message, book.peers[send.session]
    holder = book.lineage.holders[peer.join.learner]
    if said.settled_to != book.contained(peer, said.fragment):
      self.fail(send, book.account(peer))
    must = said.fragment in holder.refused
    may = said.fragment in holder.spoiled
    if said.keep and must or not (said.keep or must or may):
      self.fail(send, holder)

  @invariant.on(SYNCER, messages.Joined)
  def joined(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    cursors = book.account(book.peers[send.session]).cursors
    if send.message.settled != tuple(cursors):
      self.fail(send, cursors)

  @invariant.on(SYNCER, facts.Ledger)
  def ledger(self, book: SyncerBook, now_ns: int, ledger: facts.Ledger, event: Event) -> None:
    if self.config.rebases and {Reason.OVERWRITTEN, Reason.STALE} & ledger.discarded.keys():
      self.fail(ledger)


class Verdicts(invariant.Invariant):
  id = 'I7c'
  sentence = (
    'Every contribution gets exactly one verdict, which the syncer tells to the learner: merged or '
    'refused by its outer step, cancelled with its sync, or discarded as it came.'
  )

  def __init__(self, run: run_book.Run) -> None:
    super().__init__(run)
    self._told: dict[int, set[int]] = {}  # in this turn: sessions, by cancelled sync

  @invariant.on(SYNCER, messages.Settled)
  def settled(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    said = send.message
    if said.merged:
      ended = book.ended
      merged = isinstance(event, events.MergeDone) and not event.failed
      nonce = book.peers[send.session].join.nonce  # on its current session
      if not merged or (nonce, said.sync) not in self._given(ended, event, refused=False):
        self.fail(send, event, ended.merged)
    elif type(event) is events.MergeDone and said.reason in (Reason.BAD_VALUE, Reason.APART):
      nonce = book.peers[send.session].join.nonce
      if event.failed or (nonce, said.sync) not in self._given(book.ended, event, refused=True):
        self.fail(send, event, book.ended.merged)
    elif said.reason == messages.CANCELLED:
      sync = book.syncs.get(said.sync)
      # A closing sync that is open again (protocol/syncer/pace.py) may find nothing left to merge.
      over = sync.merging if sync else said.sync <= book.lineage.last_sync[said.fragment]
      if over and not self._was_late(book, send, event):
        self.fail(send, f'sync {said.sync} made a version or may make one')
      if sync or isinstance(event, events.MergeDone):
        self._told.setdefault(said.sync, set()).add(send.session)
    else:
      self._discarded(book, send, event)

  def _given(self, ended: Sync, done: events.MergeDone, refused: bool) -> set[tuple[int, int]]:
    """The payloads that an outer step refused, or did not refuse: processes, and the syncs that
    they answered."""
    return {
      (peer.join.nonce, message.sync)
      for peer, message in ended.merged
      if (peer.join.learner in done.refused) == refused
    }

  def _was_late(self, book: SyncerBook, send: Send, event: Event) -> bool:
    """Whether a payload that was late for the sync is in a later one."""
    later = [*book.syncs.values(), *book.next.values()]
    payloads = [payload for sync in later for payload in sync.payloads.values()]
    payloads += book.ended.merged if isinstance(event, events.MergeDone) else ()
    given = (
      peer.session == send.session and message.sync == send.message.sync
      for peer, message in payloads
    )
    return self.config.rebases and any(given)

  @invariant.after(SYNCER, EVERY)
  def turn(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    self._told.clear()

  def _discarded(self, book: SyncerBook, send: Send, event: Event) -> None:
    said = send.message
    if said.reason == Reason.LATE and self._was_late(book, send, event):
      return
    heard = type(event) is events.Received and type(event.message) is messages.Contribution
    if not heard or event.session != send.session or event.message.sync != said.sync:
      self.fail(send, event)

  @invariant.on(SYNCER, facts.Cancelled)
  def cancelled(self, book: SyncerBook, now_ns: int, fact: facts.Cancelled, event: Event) -> None:
    """Every learner is told, asked or not: a lock-step learner may wait for it."""
    discarded = self._told.pop(fact.sync, set())
    for peer in book.members.values():
      if peer.joined and peer.session not in discarded:
        self.fail(fact, f'{peer.join.learner} was not told')

  @invariant.after(SYNCER, messages.Contribution)
  def answered(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    peer, message = book.peer, event.message
    if event.payload_id in book.pending or not peer.joined or not peer.member or book.exiting:
      return
    syncs = book.syncs.get(message.sync), book.next_of(message.fragment)
    held = [payload for sync in syncs if sync for payload in sync.payloads.values()]
    settled = message.tokens_to <= book.account(peer).cursors[message.fragment]
    if settled or any(
      other is peer and held_message.sync >= message.sync for other, held_message in held
    ):
      return  # a duplicate
    for action in out:
      if (
        type(action) is actions.Send
        and action.session == peer.session
        and (type(action.message) is messages.Settled and action.message.sync == message.sync)
      ):
        return
    self.fail(event, 'the syncer did not answer')

  @invariant.after(SYNCER, events.MergeDone)
  def merge_done(self, book: SyncerBook, now_ns: int, done: events.MergeDone, out: Out) -> None:
    published = {
      (action.session, action.message.sync, action.message.merged)
      for action in out
      if type(action) is actions.Send and type(action.message) is messages.Settled
    }
    for peer, message in book.ended.merged:
      merged = not done.failed and peer.join.learner not in done.refused
      if peer.member and (peer.session, message.sync, merged) not in published:
        self.fail(done, f'{peer.join.learner} was not told')


class Finite(invariant.Invariant):
  id = 'I9'
  sentence = (
    'No value that is not finite is sent: a learner declines for it, and the syncer publishes none.'
  )

  @invariant.after(LEARNER, events.Encoded)
  def encoded(self, book: LearnerBook, now_ns: int, event: events.Encoded, out: Out) -> None:
    """A learner declines a refused capture on the session that asked for it."""
    if event.payload_id is None and book.joined and book.last_encoded.session == book.session:
      for action in out:
        if (
          type(action) is actions.Send
          and type(action.message) is messages.Decline
          and (action.message.reason == Reason.BAD_VALUE)
        ):
          return
      self.fail(book, event, 'it was not declined')

  @invariant.on(SYNCER, messages.Publish)
  def publish(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    if isinstance(event, events.MergeDone) and event.failed:
      self.fail(send, event)


class Bounded(invariant.Invariant):
  id = 'I11'
  sentence = (
    'Memory is bounded: a syncer keeps one payload per learner and sync, of tau open ones and '
    'max(1, tau + ahead) announced ones, and P that were late for syncs that are not announced; at '
    'most two fragments are in flight to a learner whole; a learner keeps a few versions that it '
    'has not adopted yet; neither keeps any at the end.'
  )

  @invariant.on(SYNCER, messages.Publish)
  def publish(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    message, peer = send.message, book.peers[send.session]
    if message.base_version is not None and not room.for_delta(book, peer, message.fragment):
      self.fail(send, peer.versions_in_flight)
    wholes = peer.wholes.keys() | {message.fragment}
    if message.base_version is None and len(wholes) > messages.MAX_WHOLES:
      self.fail(send, peer.wholes)

  @invariant.after(SYNCER, EVERY)
  def syncer(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    if len(book.payload_ids) != len(book.pending):
      self.fail(f'payloads {book.payload_ids - book.pending.keys()} belong to no sync')
    announced = len(book.syncs) - len(book.open)
    opened = any(type(a) is actions.Report and type(a.fact) is facts.Opened for a in out)
    full = opened and len(book.open) > book.most_open
    if full or announced > book.lead:
      self.fail(book.syncs)
    for sync in book.next.values():
      gave = {peer.join.learner for peer, _ in sync.payloads.values()}
      asked = (member for member in book.members.values() if member.caught_up)
      sync.complete |= bool(gave) and all(peer.join.learner in gave for peer in asked)
    late = sum(len(sync.payloads) for sync in book.next.values() if not sync.complete)
    if late > self.config.fragments:
      self.fail(book.next)

  @invariant.after(SYNCER, messages.Contribution)
  def contribution(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    sync = book.pending.get(event.payload_id)
    if sync is not None and len(sync.payloads) > len(
      {peer.join.learner for peer, _ in sync.payloads.values()}
    ):
      self.fail(sync)

  @invariant.after(LEARNER, EVERY)
  def learner(self, book: LearnerBook, now_ns: int, event: Event, out: Out) -> None:
    if book.payload_ids and not book.running:
      self.fail(book, book.payload_ids)

  @invariant.on(LEARNER, actions.Encode)
  def encode(self, book: LearnerBook, now_ns: int, encode: actions.Encode, event: Event) -> None:
    if len(book.encoding) >= self.config.in_flight:
      self.fail(book, encode, book.encoding)
