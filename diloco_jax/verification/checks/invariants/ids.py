"""Safety: which process holds a learner id, and which messages a peer may receive."""

from collections.abc import Sequence

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Out, Send
from diloco_jax.verification.checks.model.learner import LearnerBook
from diloco_jax.verification.checks.model.syncer import Peer, SyncerBook

LEARNER, SYNCER = invariant.LEARNER, invariant.SYNCER


class Incarnations(invariant.Invariant):
  id = 'I12'
  sentence = (
    'The incarnations of a learner id grow, one process each; a process that the syncer does not '
    'know continues none; each merged payload carries the incarnation that holds the id; a '
    'replaced process never rejoins.'
  )

  @invariant.on(SYNCER, messages.Confirm)
  def confirm(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    peer, confirm = book.peer, event.message
    if peer.member or peer.join is None or book.exiting or not _stays(peer, out):
      return
    holder = book.lineage.holders.get(peer.join.learner)
    known = holder is not None and holder.nonce == peer.join.nonce
    last = 0 if holder is None else holder.incarnation
    if not known and 0 < peer.join.incarnation < last:
      self.fail(event, f'it was replaced: {holder}')
    due = last if known else last + 1 + (peer.join.incarnation == last + 1)
    if not known and (confirm.steps or confirm.tokens):
      self.fail(event, 'nothing is known of its past')
    if confirm.incarnation != due or confirm.nonce != peer.join.nonce or peer.offered != due:
      self.fail(event, peer, holder)

  @invariant.on(SYNCER, messages.Joined)
  def joined(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    peer = book.peers[send.session]
    holder = book.lineage.holders[peer.join.learner]
    if not peer.member or (holder.nonce, holder.incarnation) != (
      peer.join.nonce,
      send.message.incarnation,
    ):
      self.fail(send, peer, holder)

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    gather = book.gathers[merge.sync]
    for one in merge.participants:
      peer, _ = gather.payloads[one.payload_id]
      holder = book.lineage.holders[one.learner]
      if (one.incarnation, peer.join.nonce) != (holder.incarnation, holder.nonce):
        self.fail(one, peer, holder)


def _stays(peer: Peer, out: Sequence[actions.Action]) -> bool:
  """Whether this session is open and is not closed in this turn."""
  return peer.open and not any(
    type(one) is actions.Close and one.session == peer.session for one in out
  )


class HolderStays(invariant.Invariant):
  id = 'I13'
  sentence = (
    'The syncer never displaces or disconnects a process that holds an id and that it has heard '
    'within the lease, unless it has contributed nothing for a lease and a learner that did needs '
    'its shard, or a process without a tape sends what no learner would.'
  )

  @invariant.on(SYNCER, messages.Confirm)
  def confirm(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    peer = book.peer
    if peer.join is None or book.exiting or not _stays(peer, out):
      return
    holder = book.members.get(peer.join.learner)
    if holder is not None and holder.join.nonce != peer.join.nonce:
      self.fail(event, f'{holder} holds the id')

  @invariant.on(SYNCER, actions.Close)
  def close(self, book: SyncerBook, now_ns: int, close: actions.Close, event: Event) -> None:
    peer = book.peers.get(close.session)
    if peer is None or not peer.member or book.exiting:
      return
    if type(event) is events.Received:
      if type(event.message) is messages.Leave and event.session == close.session:
        return
      if type(event.message) is messages.Confirm and book.peer.join.nonce == peer.join.nonce:
        return
      if book.implausible and book.peer is peer:
        if book.learner(peer) is not None:
          self.fail(close, peer, event, 'its tape shows an honest learner')
        return
    worst = book.lineage.holders[peer.join.learner].max_strikes
    if 0 < self.config.strikes <= worst:
      return  # quarantined
    merged = book.lineage.learners()
    idle = not peer.contributed and now_ns - peer.entered_ns >= self.config.lease_ns
    if close.reason == 'no free shard' and idle and not merged[peer.join.learner][2]:
      return
    if now_ns - peer.heard_ns < self.config.lease_ns:
      self.fail(close, peer, f'heard {now_ns - peer.heard_ns} ns ago')


class LeaseEnds(invariant.Invariant):
  id = 'L8'
  sentence = (
    'The syncer stops waiting for a learner that it has not heard for the length of a lease.'
  )

  @invariant.on(SYNCER, facts.Ledger)
  def ledger(self, book: SyncerBook, now_ns: int, ledger: facts.Ledger, event: Event) -> None:
    if book.exiting:
      return
    for peer in book.members.values():
      if now_ns - peer.heard_ns > self.config.lease_ns + self.config.heartbeat_ns:
        self.fail(peer, now_ns)


class RefusedWithReason(invariant.Invariant):
  id = 'I13b'
  sentence = 'The syncer refuses a process only for a reason that is true.'

  @invariant.on(SYNCER, messages.Refused)
  def refused(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    peer, said = book.peers[send.session], send.message
    holder = book.lineage.holders.get(peer.join.learner)
    live = book.members.get(peer.join.learner)
    match said.code:
      case 'FENCED':
        true = (
          holder is not None
          and peer.join.nonce != holder.nonce
          and 0 < peer.join.incarnation < holder.incarnation
        )
      case 'QUARANTINED':
        true = (
          holder is not None
          and peer.join.nonce == holder.nonce
          and (0 < self.config.strikes <= holder.max_strikes)
        )
      case 'ID_IN_QUARANTINE':
        true = (
          holder is not None
          and peer.join.nonce != holder.nonce
          and (0 < self.config.strikes <= holder.max_strikes)
        )
      case 'ID_IN_USE' | 'YOUR_ID_IN_USE':
        true = live is not None and live.join.nonce != peer.join.nonce
      case 'OFFER_PASSED':
        due = holder and holder.incarnation + (holder.nonce != peer.join.nonce)
        true = holder is not None and peer.offered != due
      case 'NOT_YOURS':
        true = peer.proved not in ('', peer.join.learner)
      case 'MISMATCH':
        true = peer.join.agreement != book.life.start.agreement
      case 'PROTOCOL':
        true = peer.join.protocol != messages.PROTOCOL_VERSION
      case 'FULL':
        true = len(book.members) > self.config.learners
      case 'OTHER_RUN':
        true = peer.join.run not in ('', book.life.start.run)
      case _:
        true = said.code == 'BAD_ID'
    if not true:
      self.fail(send, peer.join, holder)

  @invariant.on(LEARNER, actions.Exit)
  def exit(self, book: LearnerBook, now_ns: int, action: actions.Exit, event: Event) -> None:
    true = book.ending if action.code == 0 else book.refused is not None
    if not true or book.exited:
      self.fail(book, action)


class OnlyMembers(invariant.Invariant):
  id = 'I19'
  sentence = (
    'A node says nothing about the run to a peer before the join, and nothing at all on a closed '
    'session.'
  )

  @invariant.on(SYNCER, messages.Pull, messages.Publish, messages.Settled, messages.Finish)
  def member(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    peer = book.peers.get(send.session)
    if peer is None or not peer.open or not peer.joined:
      self.fail(send, peer)

  @invariant.on(SYNCER, messages.Offer, messages.Joined, messages.Refused)
  def handshake(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    peer = book.peers.get(send.session)
    if peer is None or not peer.open:
      self.fail(send, peer)

  @invariant.on(
    LEARNER, messages.Progress, messages.Contribution, messages.Decline, messages.Adopted
  )
  def learner(self, book: LearnerBook, now_ns: int, send: Send, event: Event) -> None:
    if not book.joined or send.session != book.session:
      self.fail(book, send)
