"""One syncer's process: its sessions, the holders of ids, and the state of each open sync."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks.books import learner as learner_book
from diloco_jax.verification.checks.books import lineage as lineage_book
from diloco_jax.verification.checks.books.peer import Peer, Sync

Reason = messages.Reason
Range = tuple[int, int]


class SyncerBook:
  """One syncer's process."""

  def __init__(self, run: Any, process: observers.ObservedProcess, lineage: lineage_book.Lineage):
    self.run, self.process, self.lineage = run, process, lineage
    self.config, self.schedule = run.config, run.schedule
    self.peers: dict[int, Peer] = {}
    self.members: dict[str, Peer] = {}
    self.syncs: dict[int, Sync] = {}
    self.next: dict[int, Sync] = {}  # by fragment: late payloads, for its next sync
    self.pending: dict[int, Sync] = {}  # payload id: the sync that holds it
    self.payload_ids: set[int] = set()
    self.reads: set[int] = set()  # fragments that are being read whole
    self.peer: Peer | None = None  # the sender in this turn
    self.implausible = False  # its message, according to the syncer
    self.ended: Sync | None = None  # the sync whose merge ended last
    self.tempo = facts.Tempo(factor=1, delay=0, period=run.config.period, sync=lineage.next)
    self.slow: dict[str, facts.Link] = {}  # by learner: what is asked of its process
    self.merges = 0
    self.stopping = self.exiting = self.exited = self.dead = False
    self.first = lineage.next  # the sync that it opens first
    self.end_is_durable = self.over  # the disk shows twice that the run is over
    self.ends = 0  # in so many checkpoints of this process
    lineage.holders = dict(sorted(lineage.holders.items()))  # as a machine state lists them
    self.finished_ns: int | None = None
    self.saving: collections.deque[lineage_book.Saved] = collections.deque()

  def __repr__(self) -> str:
    return f'syncer (process {self.process.number})'

  def receives(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    """A message arrives. If the syncer closes the session in this turn because no learner of the
    run would send it, it changes nothing and is a strike of a learner that has joined."""
    session = event.session
    peer = self.peers.get(session)
    if peer is None:
      peer = self.peers[session] = Peer(session, now_ns)
    elif peer.member:
      peer.heard_ns = now_ns
    self.peer = peer
    self.implausible = peer.member and any(
      type(a) is actions.Close and a.session == session and _is_implausible(event.message, a)
      for a in out
    )
    if self.implausible and peer.joined:
      self.lineage.holders[peer.join.learner].refusals += 1

  def learner(self, peer: Peer) -> learner_book.LearnerBook | None:
    return self.run.learners.get(peer.join.nonce)

  def is_pulled_less(self, peer: Peer) -> bool:
    """Whether the learner is pulled in one of several periods only."""
    link = self.slow.get(peer.join.learner)
    return link is not None and link.periods > 1

  @property
  def lead(self) -> int:
    """How many steps before it opens a sync may be announced, and how many at once."""
    return max(1, self.config.overlap * self.tempo.factor + self.config.steps_ahead)

  @property
  def most_open(self) -> int:
    """How many syncs may be open at once."""
    return max(1, self.config.overlap + math.ceil(self.tempo.delay / self.tempo.factor))

  def account(self, peer: Peer) -> lineage_book.Account:
    return self.lineage.account(peer.join.learner, peer.incarnation)

  def contained(self, peer: Peer, fragment: int) -> int:
    """Up to where the tokens of a receiver are settled for the published version of a fragment: an
    outer step in progress has settled its own, and makes the next version."""
    for sync in self.syncs.values():
      for other, said in sync.merged if sync.fragment == fragment else ():
        if (other.join.learner, other.incarnation) == (peer.join.learner, peer.incarnation):
          return said.tokens_from
    return self.account(peer).cursors[fragment]

  @property
  def gap(self) -> str:
    """The reason for tokens of which a learner says nothing."""
    return Reason.UNDONE if self.config.rebases else Reason.OVERWRITTEN

  @property
  def over(self) -> bool:
    return self.lineage.next > self.schedule.last

  # --- Events -------------------------------------------------------------------------------------

  def connected(self, now_ns: int, event: events.Connected, out: Sequence) -> None:
    self.peers[event.session] = Peer(event.session, now_ns)

  def disconnected(self, now_ns: int, event: events.Disconnected, out: Sequence) -> None:
    peer = self.peers.pop(event.session, None)
    if peer is not None:
      self._release(peer)

  def _release(self, peer: Peer) -> None:
    peer.open = False
    if not peer.member:
      return
    peer.member = False
    learner = peer.join.learner
    if self.members.get(learner) is peer:
      del self.members[learner]
      for sync in self.syncs.values():
        sync.waiting.discard(learner)

  def joins(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    if not self.exiting and not self.peer.member:
      self.peer.join = event.message

  def confirms(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    """The process holds the id unless the syncer closes the session in this turn."""
    peer, confirm = self.peer, event.message
    if peer.member or self.exiting or peer.join is None or not peer.open:
      return
    for action in out:
      if type(action) is actions.Close and action.session == peer.session:
        return
    self._admit(now_ns, peer, confirm)

  def _admit(self, now_ns: int, peer: Peer, confirm: messages.Confirm) -> None:
    learner, nonce = peer.join.learner, peer.join.nonce
    holder = self.lineage.holders.get(learner)
    if holder is None or holder.nonce != nonce:
      self.slow.pop(learner, None)
    if holder is None:
      self._forget_strangers()
      holder = self.lineage.holders[learner] = lineage_book.Holder(nonce, confirm.incarnation)
    elif holder.nonce != nonce:
      self.lineage.account(learner, holder.incarnation).close(Reason.LOST_WITH_PROCESS)
      self.lineage.fold(learner, holder.incarnation)
      holder = self.lineage.holders[learner] = lineage_book.Holder(nonce, confirm.incarnation)
      self.run.forget_dead(self.lineage)
    elif learner in self.members:  # the same process on a new session: release the old one first
      self._release(self.members[learner])
    holder.left, holder.claimed = False, max(holder.claimed, confirm.clock)
    peer.member, peer.incarnation, peer.heard_ns = True, confirm.incarnation, now_ns
    peer.held = confirm.held
    peer.claim = None if confirm.shard is None else (confirm.shard, confirm.cursor)
    self.members[learner] = peer
    self.account(peer).train(confirm.tokens)

  def _forget_strangers(self) -> None:
    busy = {peer.join.learner for sync in self.syncs.values() for peer, _ in sync.merged}
    for learner in self.lineage.surplus({*self.members, *busy}, self.config.learners):
      self.lineage.forget(learner)
      self.run.forget_dead(self.lineage)

  def progress(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    peer, message = self.peer, event.message
    if not self._counts(peer):
      return
    holder = self.lineage.holders[peer.join.learner]
    holder.claimed = max(holder.claimed, message.clock)
    holder.done = holder.done or holder.claimed >= self.config.total_steps
    self.account(peer).train(message.tokens)

  def _counts(self, peer: Peer) -> bool:
    return peer.joined and peer.member and not self.exiting and not self.implausible

  def contributed(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    """The payload is held unless the syncer drops it in this turn, with a verdict. One that was
    late is held, too, if the sync for which it counts is cancelled in this turn."""
    payload_id, message, peer = event.payload_id, event.message, self.peer
    self.payload_ids.add(payload_id)
    if not self._counts(peer):
      return
    peer.contributed = True
    sync = self.syncs.get(message.sync)
    if sync is not None:
      sync.waiting.discard(peer.join.learner)
    dropped = any(type(a) is actions.Drop and a.payload_id == payload_id for a in out)
    later = self.next_of(message.fragment) if sync is None or sync.merging else None
    reported = [a.fact for a in out if type(a) is actions.Report]
    cancelled = [fact.sync for fact in reported if type(fact) is facts.Cancelled]
    if dropped and (later is None or later.t not in cancelled):
      return
    if sync is None or sync.merging:
      sync = later or self.next.setdefault(message.fragment, Sync(0, message.fragment))
    sync.waiting.discard(peer.join.learner)
    sync.payloads[payload_id] = peer, message
    self.pending[payload_id] = sync

  def next_of(self, fragment: int) -> Sync | None:
    """The sync of the fragment that merges next, if it is announced or has late payloads."""
    in_hand = (sync for sync in self.syncs.values() if sync.fragment == fragment)
    return next((sync for sync in in_hand if not sync.merging), None) or self.next.get(fragment)

  def declined(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    peer, message = self.peer, event.message
    if not self._counts(peer):
      return
    if message.sync in self.syncs:
      self.syncs[message.sync].waiting.discard(peer.join.learner)
    if message.reason == Reason.BAD_VALUE:
      self.account(peer).move(message.fragment, message.tokens_to, Reason.BAD_VALUE)
      self.lineage.holders[peer.join.learner].refusals += 1
      self._spoil(peer, message.fragment)

  def _spoil(self, peer: Peer, fragment: int) -> None:
    self.lineage.holders[peer.join.learner].spoiled |= {fragment}
    peer.owed.add(fragment)

  def adopted(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    peer, message = self.peer, event.message
    if not self._counts(peer):
      return
    if not message.matched:
      self.lineage.repaired += 1
      self._spoil(peer, message.fragment)
      peer.differs.add(message.fragment)
    else:
      peer.differs.discard(message.fragment)
      if message.reason:
        holder = self.lineage.holders[peer.join.learner]
        holder.refused -= {message.fragment}
      reason = message.reason or self.gap
      self.account(peer).move(message.fragment, message.tokens, reason)
      peer.due.discard(message.fragment)
      if peer.wholes.get(message.fragment, message.version + 1) <= message.version:
        del peer.wholes[message.fragment]
      peer.versions_in_flight[message.fragment] = [
        version
        for version in peer.versions_in_flight[message.fragment]
        if version > message.version
      ]

  def left(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    peer = self.peer
    if peer.member and not self.exiting:
      reason = Reason.LEFT if self.finished_ns is None else Reason.END_OF_RUN
      self.account(peer).close(reason)
      self.lineage.holders[peer.join.learner].left = True
      self._release(peer)

  def merge_done(self, now_ns: int, done: events.MergeDone, out: Sequence) -> None:
    sync = self.syncs.pop(done.sync)
    self.ended, self.merges = sync, self.merges - 1
    record = sync.record
    record.digest, record.failed = done.digest, done.failed
    record.refused = done.refused
    record.end(self.lineage)
    self.run.ended += 1
    if done.failed:
      for peer, _ in sync.merged:
        peer.owed.add(done.fragment)
    else:
      self.payload_ids.add(done.payload_id)
      self.run.publish(done.fragment, self.lineage.versions[done.fragment], done.digest)

  def read(self, now_ns: int, event: events.FragmentRead, out: Sequence) -> None:
    self.reads.discard(event.fragment)
    self.payload_ids.add(event.payload_id)

  def stop(self, now_ns: int, event: events.Stop, out: Sequence) -> None:
    self.stopping = True

  def save_done(self, now_ns: int, event: events.SaveDone, out: Sequence) -> None:
    saved = self.saving.popleft()
    saved.verified = not event.error
    records = self.run.records
    logged = bool(records) and self.run.first_sync_after(records[-1]) > self.schedule.last
    self.ends += saved.closed and saved.verified
    self.end_is_durable |= saved.closed and (logged or self.ends > 1)

  # --- Actions ------------------------------------------------------------------------------------

  def offers(self, now_ns: int, send: actions.Send, event: Any) -> None:
    self.peers[send.session].offered = send.message.incarnation

  def welcomes(self, now_ns: int, send: actions.Send, event: Any) -> None:
    peer = self.peers[send.session]
    peer.joined, peer.due, peer.entered_ns = True, set(send.message.due), now_ns
    holder = self.lineage.holders[peer.join.learner]
    peer.next_position = send.message.shard, send.message.cursor
    holder.claimed = max(holder.claimed, send.message.clock)
    for p, held in enumerate(peer.held):
      if p not in peer.due:
        peer.sent[p] = held.version

  def pulls(self, now_ns: int, send: actions.Send, event: Any) -> None:
    message = send.message
    sync = self._begin(message.sync, message.fragment)
    sync.asked.add(send.session)
    sync.waiting.add(self.peers[send.session].join.learner)

  def links(self, now_ns: int, link: facts.Link, event: Any) -> None:
    self.slow[link.learner] = link

  def retimes(self, now_ns: int, fact: facts.Tempo, event: Any) -> None:
    """Another period, or only another delay. With another period the announced syncs end."""
    if fact.factor != self.tempo.factor:
      self.lineage.next = fact.sync
      self.syncs = {t: sync for t, sync in self.syncs.items() if sync.opened_ns is not None}
    self.tempo = fact

  def opens(self, now_ns: int, opened: facts.Opened, event: Any) -> None:
    lineage = self.lineage
    lineage.skipped += (opened.sync - lineage.next) // self.config.period
    lineage.opened = opened.sync
    lineage.next = self.schedule.next(opened.sync, self.tempo.factor)
    for t in [t for t in self.syncs if t < opened.sync]:
      if self.syncs[t].opened_ns is None:  # its period is skipped
        del self.syncs[t]
    sync = self._begin(opened.sync, opened.fragment)
    sync.opened_ns = now_ns

  def _begin(self, t: int, fragment: int) -> Sync:
    if t not in self.syncs:
      sync = self.syncs[t] = self.next.pop(fragment, None) or Sync(t, fragment)
      sync.t = t
    return self.syncs[t]

  @property
  def open(self) -> list[Sync]:
    """The syncs that have opened."""
    return [sync for sync in self.syncs.values() if sync.opened_ns is not None]

  def settles(self, now_ns: int, send: actions.Send, event: Any) -> None:
    """A verdict on the contribution of this turn."""
    message = send.message
    if message.merged or type(event) is events.MergeDone:
      return  # merged tokens were settled when the merge began, refused ones when it ended
    if message.reason in messages.kept(self.config.rebases):
      return  # the learner keeps them
    peer, settled = self.peers[send.session], event.message
    self._spoil(peer, settled.fragment)
    tokens = settled.tokens_from, settled.tokens_to
    self.account(peer).settle(settled.fragment, tokens, message.reason, self.gap)

  def publishes(self, now_ns: int, send: actions.Send, event: Any) -> None:
    peer, message = self.peers[send.session], send.message
    peer.sent[message.fragment] = message.version
    peer.versions_in_flight[message.fragment].append(message.version)
    if message.base_version is None:
      peer.wholes[message.fragment] = message.version
      peer.repaired_ns[message.fragment] = now_ns
      peer.differs.discard(message.fragment)
      peer.owed.discard(message.fragment)

  def merge(self, now_ns: int, merge: actions.Merge, event: Any) -> None:
    sync = self.syncs[merge.sync]
    sync.merging, self.merges = merge, self.merges + 1
    sync.merged = tuple(sync.payloads[participant.payload_id] for participant in merge.participants)
    for merged, (peer, message) in zip(merge.participants, sync.merged):
      reported = message.tokens_from, message.tokens_to
      self.account(peer).settle(merge.fragment, reported, '', self.gap)
      del self.pending[merged.payload_id]
      self.payload_ids.discard(merged.payload_id)
    sync.payloads.clear()
    decision = dataclasses.replace(merge, machine_state={})  # else hundreds of them are kept
    sync.record = record = lineage_book.Record(decision, self.lineage.copy(), ())
    record.undecided = self._undecided()
    record.batches = tuple(
      (contribution.shard, contribution.cursor - contribution.steps, contribution.cursor)
      for _, contribution in sync.merged
    )
    under_way = (other.record for other in self.syncs.values() if other.record is not None)
    record.number = len(self.run.records) + 1
    record.under_way = tuple(sorted(under_way, key=lambda move: move.number))
    self.run.decided(record)

  def _undecided(self) -> tuple[int, ...]:
    """The syncs that end if this process ends now."""
    return tuple(sync.t for sync in self.open if sync.record is None)

  def cancels(self, now_ns: int, cancelled: facts.Cancelled, event: Any) -> None:
    """A sync is cancelled; after a failed merge it is already counted."""
    if self.syncs.pop(cancelled.sync, None) is not None:
      self.lineage.cancelled[cancelled.fragment] += 1

  def reads_whole(self, now_ns: int, read: actions.ReadFragment, event: Any) -> None:
    self.reads.add(read.fragment)

  def drops(self, now_ns: int, drop: actions.Drop, event: Any) -> None:
    self.payload_ids.discard(drop.payload_id)
    if (sync := self.pending.pop(drop.payload_id, None)) is not None:
      del sync.payloads[drop.payload_id]

  def closes(self, now_ns: int, close: actions.Close, event: Any) -> None:
    peer = self.peers.get(close.session)
    if peer is not None and not self.exiting:
      self._release(peer)

  def save(self, now_ns: int, save: actions.Save, event: Any) -> None:
    saved = lineage_book.Saved(
      save.machine_state,
      self.lineage.copy(),
      self._undecided(),
      len(self.run.records),
      self._closed,
    )
    self.saving.append(saved)
    self.run.saves(saved)

  def exits(self, now_ns: int, action: actions.Exit, event: Any) -> None:
    self.exited = True

  # --- After a turn -------------------------------------------------------------------------------

  def can_end(self, now_ns: int) -> bool:
    """Whether the run may be over now, possibly since this turn."""
    if self.finished_ns is None and not self._finishes:
      return False
    all_left = all(holder.left for holder in self.lineage.holders.values())
    finished_ns = now_ns if self.finished_ns is None else self.finished_ns
    return self.stopping or all_left or now_ns >= finished_ns + self.config.lease_ns

  @property
  def _finishes(self) -> bool:
    """Whether the syncer may send Finish now."""
    return self._closed and self.end_is_durable and not self.stopping

  @property
  def _closed(self) -> bool:
    """Whether every sync is over."""
    return self.over and not self.open and not self.merges

  def after(self, now_ns: int) -> None:
    """Determines whether the run has ended."""
    if self.exiting or self.merges:
      return
    if self.finished_ns is None and self._finishes:
      self.finished_ns = now_ns
    self.exiting = self.stopping or self.can_end(now_ns)


def _is_implausible(message: messages.Message, close: actions.Close) -> bool:
  """A Decline of a bad value is a strike, too."""
  bad_value = type(message) is messages.Decline and message.reason == Reason.BAD_VALUE
  return close.reason.startswith('implausible: ') or close.reason == 'QUARANTINED' and not bad_value


SYNCER_UPDATES: dict[type, Callable] = {
  events.Connected: SyncerBook.connected,
  events.Disconnected: SyncerBook.disconnected,
  events.MergeDone: SyncerBook.merge_done,
  events.FragmentRead: SyncerBook.read,
  events.SaveDone: SyncerBook.save_done,
  events.Stop: SyncerBook.stop,
  messages.Join: SyncerBook.joins,
  messages.Confirm: SyncerBook.confirms,
  messages.Progress: SyncerBook.progress,
  messages.Contribution: SyncerBook.contributed,
  messages.Decline: SyncerBook.declined,
  messages.Adopted: SyncerBook.adopted,
  messages.Leave: SyncerBook.left,
  actions.Merge: SyncerBook.merge,
  actions.Drop: SyncerBook.drops,
  actions.Close: SyncerBook.closes,
  actions.Save: SyncerBook.save,
  actions.Exit: SyncerBook.exits,
  messages.Offer: SyncerBook.offers,
  messages.Joined: SyncerBook.welcomes,
  messages.Pull: SyncerBook.pulls,
  messages.Publish: SyncerBook.publishes,
  messages.Settled: SyncerBook.settles,
  actions.ReadFragment: SyncerBook.reads_whole,
  facts.Opened: SyncerBook.opens,
  facts.Link: SyncerBook.links,
  facts.Tempo: SyncerBook.retimes,
  facts.Cancelled: SyncerBook.cancels,
}
