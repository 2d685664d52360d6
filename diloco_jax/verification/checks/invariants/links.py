"""What the syncer asks of learners with slow links (protocol/syncer/links.py)."""

import collections

from diloco_jax.protocol import actions, facts, messages
from diloco_jax.protocol.syncer import grace
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Out, Send
from diloco_jax.verification.checks.model import run as run_book
from diloco_jax.verification.checks.model.learner import LearnerBook
from diloco_jax.verification.checks.model.syncer import SyncerBook

EVERY, LEARNER, SYNCER = invariant.EVERY, invariant.LEARNER, invariant.SYNCER


class PulledInTurn(invariant.Invariant):
  id = 'L12'
  sentence = (
    'A learner with period factor r is pulled for a fragment in its turn, in one of r periods, or '
    'once all its payloads have arrived and a period has passed, and for closing syncs, and a '
    'sparse one never; otherwise only where a sync has no quorum without it. A merge marks the '
    'payloads of learners with r > 1.'
  )

  def __init__(self, run: run_book.Run) -> None:
    super().__init__(run)
    self._others: set[int] = set()  # syncs for which learners were pulled that have no turn

  @invariant.on(SYNCER, messages.Pull)
  def pull(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    sync, peer = send.message.sync, book.peers[send.session]
    asked = sync in book.gathers and send.session in book.gathers[sync].asked
    if not (asked or book.turns_of(peer).includes(self.config, sync, book.tempo.factor)):
      self._others.add(sync)

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    for one in merge.participants:
      peer, _ = book.gathers[merge.sync].payloads[one.payload_id]
      if one.slow != (book.turns_of(peer).r > 1):
        self.fail(one, book.turns_of(peer))

  @invariant.after(SYNCER, EVERY)
  def turn(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    for sync in self._others & book.gathers.keys():
      gather = book.gathers[sync]
      gave = {peer.join.learner for peer, _ in (*gather.payloads.values(), *gather.merged)}
      in_turn = 0
      for peer in book.members.values():
        pulled = peer.session in gather.asked and sync not in book.turns_of(peer).extra
        in_turn += peer.caught_up and (pulled or peer.join.learner in gave)
      if in_turn >= self.config.quorum:
        self.fail(gather, f'{book.turns}')
    self._others.clear()


class Recovers(invariant.Invariant):
  id = 'L13'
  sentence = (
    'A learner that still trains is pulled in every period once three payloads in a row took at '
    'most 0.8 of the time between two syncs, of those that came in the order of their syncs.'
  )

  def __init__(self, run: run_book.Run) -> None:
    super().__init__(run)
    self._captured: dict[tuple[int, int, int], int] = {}
    self._syncer: SyncerBook | None = None

  def _begin(self, book: SyncerBook) -> None:
    """Another process of the syncer measures anew."""
    self._syncer, self._opened_ns, self._slot_ns = book, None, grace.Average()
    # By learner: of which process, its newest measures, and the time of its last payload.
    self._took: dict[str, tuple[int, collections.deque[int], int]] = {}
    self._answered: dict[str, tuple[int, int]] = {}  # on which session, the newest sync

  @invariant.on(LEARNER, actions.Encode)
  def encode(self, book: LearnerBook, now_ns: int, encode: actions.Encode, event: Event) -> None:
    self._captured[book.nonce, encode.sync, encode.fragment] = now_ns

  @invariant.on(SYNCER, facts.Opened)
  def opened(self, book: SyncerBook, now_ns: int, opened: facts.Opened, event: Event) -> None:
    if book is not self._syncer:
      self._begin(book)
    if self.config.closing(opened.sync):
      return
    if self._opened_ns is not None:
      passed_ns = (now_ns - self._opened_ns) // book.tempo.factor
      usual_ns = self._slot_ns.value
      self._slot_ns.add(min(passed_ns, 4 * usual_ns) if usual_ns else passed_ns)
    self._opened_ns = now_ns

  def _newest(self, book: SyncerBook, sync: int) -> bool:
    """Whether no answer for this sync or a later one came before on this session."""
    learner, session = book.peer.join.learner, book.peer.session
    known = self._answered.get(learner, (session, 0))
    before = known[1] if known[0] == session else 0
    self._answered[learner] = session, max(before, sync)
    return sync > before

  @invariant.after(SYNCER, messages.Decline)
  def declined(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    if book is self._syncer and book.peer.joined and book.peer.member:
      self._newest(book, event.message.sync)

  @invariant.after(SYNCER, messages.Contribution)
  def arrived(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    if book is not self._syncer:
      self._begin(book)
    peer, message = book.peer, event.message
    if not peer.joined or not peer.member or book.implausible or book.exiting:
      return
    nonce = peer.join.nonce
    captured_ns = self._captured.pop((nonce, message.sync, message.fragment), None)
    process, took, last_ns = self._took.get(peer.join.learner, (nonce, None, 0))
    if took is None or process != nonce:
      took, last_ns = collections.deque(maxlen=3), 0
    self._took[peer.join.learner] = nonce, took, now_ns
    newest = self._newest(book, message.sync)
    if captured_ns is None or not newest or self.config.closing(message.sync):
      return
    if book.lineage.holders[peer.join.learner].claimed >= self.config.total_steps:
      return  # no step says when it captures, so the syncer cannot know what its link took
    took.append(now_ns - max(captured_ns, last_ns))
    fits = len(took) == 3 and 10 * max(took) <= 8 * self._slot_ns.value
    if fits and book.turns_of(peer).r > 1:
      self.fail(peer.join.learner, f'{took}, {self._slot_ns}, {book.turns_of(peer)}')
