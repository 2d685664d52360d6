"""Safety: which process holds a learner id, and which messages a peer may receive."""

from collections.abc import Sequence

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.verification.checks.books.syncer import Peer, SyncerBook
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Out, Send

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

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    for participant in merge.participants:
      holder = book.lineage.holders[participant.learner]
      if participant.incarnation != holder.incarnation:
        self.fail(participant, holder)


def _stays(peer: Peer, out: Sequence[actions.Action]) -> bool:
  """Whether this session is open and is not closed in this turn."""
  return peer.open and not any(
    type(action) is actions.Close and action.session == peer.session for action in out
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
    refusals = book.lineage.holders[peer.join.learner].refusals
    if close.reason == 'QUARANTINED' and 0 < self.config.strikes <= refusals:
      return
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


class OnlyMembers(invariant.Invariant):
  id = 'I19'
  sentence = (
    'The syncer says nothing about the run to a peer before the join, and nothing at all on a '
    'closed session. Its transport takes each member for one, at its Confirm, and nobody else.'
  )

  @invariant.on(SYNCER, messages.Confirm)
  def confirm(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    peer = book.peer
    new = not (peer.member or peer.join is None or book.exiting) and _stays(peer, out)
    if [action.session for action in out if type(action) is actions.Admit] != [peer.session] * new:
      self.fail(event, out)

  @invariant.on(SYNCER, actions.Admit)
  def admit(self, book: SyncerBook, now_ns: int, admit: actions.Admit, event: Event) -> None:
    if type(event) is not events.Received or type(event.message) is not messages.Confirm:
      self.fail(admit, event)

  @invariant.on(SYNCER, messages.Pull, messages.Publish, messages.Settled, messages.Finish)
  def member(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    peer = book.peers.get(send.session)
    if peer is None or not peer.open or not peer.joined:
      self.fail(send, peer)
