"""Liveness: no step waits, the syncer waits for no dead learner, and a healed run continues."""

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.syncer import verdicts
from diloco_jax.verification.checks.books import room
from diloco_jax.verification.checks.books import run as run_book
from diloco_jax.verification.checks.books.learner import LearnerBook
from diloco_jax.verification.checks.books.syncer import Peer, Sync, SyncerBook
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Out, Send

EVERY, LEARNER, SYNCER = invariant.EVERY, invariant.LEARNER, invariant.SYNCER


class NoStepWaits(invariant.Invariant):
  id = 'L1'
  sentence = (
    'A learner takes every step that it can, in every phase and during faults: a step runs '
    'whenever the settings allow one, and none runs when they do not.'
  )

  @invariant.on(LEARNER, actions.Step)
  def step(self, book: LearnerBook, now_ns: int, step: actions.Step, event: Event) -> None:
    if book.running or not book.may_step or book.ending:
      self.fail(book, step, f'its clock is {book.clock}, its limit {book.limit}')

  @invariant.after(LEARNER, EVERY)
  def turn(self, book: LearnerBook, now_ns: int, event: Event, out: Out) -> None:
    if not book.running and book.may_step and not book.ending and not book.exited:
      self.fail(book, event, f'no step runs at {book.clock}')


class DecidedInTime(invariant.Invariant):
  id = 'L2a'
  sentence = (
    'The syncer decides an open sync once every asked learner has answered or the grace window is '
    'over, and never cancels it earlier.'
  )

  @invariant.after(SYNCER, EVERY)
  def turn(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    if book.merges or book.exiting:
      return  # a save may defer the others until the merge is done
    for sync in book.open:
      enough = len(sync.payloads) >= self.config.needed(sync.t)
      if sync.waiting:
        sync.left_ns = now_ns if enough else sync.left_ns
      elif enough or self._cannot_reach_quorum(book, sync):
        self.fail(sync, 'every asked learner has answered')

  def _cannot_reach_quorum(self, book: SyncerBook, sync: Sync) -> bool:
    return sum(peer.caught_up for peer in book.members.values()) >= self.config.quorum

  @invariant.on(SYNCER, facts.Merging)
  def merging(self, book: SyncerBook, now_ns: int, merging: facts.Merging, event: Event) -> None:
    sync = book.syncs[merging.sync]
    if sync.left_ns > sync.opened_ns + merging.grace_ns:
      self.fail(sync, 'the grace window was over')

  @invariant.on(SYNCER, facts.Cancelled)
  def cancelled(self, book: SyncerBook, now_ns: int, fact: facts.Cancelled, event: Event) -> None:
    sync = book.syncs.get(fact.sync)
    if sync is None:
      return  # its outer step was refused
    if self.config.closing(sync.t):
      waits = sync.waiting and now_ns < sync.opened_ns + self.config.lease_ns
      if sync.payloads or waits:
        self.fail(fact, sync)
    elif (
      sync.waiting
      or len(sync.payloads) >= self.config.quorum
      or (not self._cannot_reach_quorum(book, sync))
    ):
      self.fail(fact, sync)


class EveryPullIsAnswered(invariant.Invariant):
  id = 'L4a'
  sentence = (
    'At a step boundary a learner answers every pull that is due or of an open sync, unless it has '
    'heard that a sync of the fragment, this one or a later one, is over, the fragment is due to '
    'it, its last capture may still be merged, or it has not trained on the fragment yet.'
  )

  @invariant.after(LEARNER, EVERY)
  def turn(self, book: LearnerBook, now_ns: int, event: Event, out: Out) -> None:
    if not book.pulls or book.exited or len(book.encoding) >= self.config.in_flight:
      return
    boundary = not book.running or any(type(action) is actions.Step for action in out)
    for p in book.pulls if boundary else ():
      comes = not book.trained_on(book.anchors[p]) and (book.running or book.ending)
      waits = comes or book.anchors[p].contributed
      if p not in book.due and not waits and book.is_due(p):
        self.fail(book, book.pulls, book.anchors[p])


class MergesAgain(invariant.Invariant):
  id = 'L2'
  sentence = 'After healing, the syncer merges every fragment again.'

  LEASES = 4  # by then every learner has noticed, redialled and joined
  PERIODS = 4

  def __init__(self, run: run_book.Run) -> None:
    super().__init__(run)
    self._before: tuple[int, list[int]] | None = None

  @invariant.on(SYNCER, facts.Ledger)
  def ledger(self, book: SyncerBook, now_ns: int, ledger: facts.Ledger, event: Event) -> None:
    if self._before is None and self.run.healed_for(now_ns, self.LEASES):
      self._before = self._clock(), list(book.lineage.versions)

  def _clock(self) -> int:
    steps = [book.clock for book in self.run.learners.values()]
    return max([self.run.syncer.lineage.opened, self.run.clock, *steps])

  def finished(self, now_ns: int) -> None:
    if self._before is None:
      return
    clock, before = self._before
    after = self.run.syncer.lineage.versions
    long = self._end() - clock >= self.PERIODS * self.config.period
    if long and not all(a > b for a, b in zip(after, before)):
      self.fail(f'versions at step {clock} {before}, at the end {after}')

  def _end(self) -> int:
    """The clock at the end; a run that is over did all its steps."""
    return self.config.total_steps if self.run.syncer.over else self._clock()


class Joins(invariant.Invariant):
  id = 'L3'
  sentence = (
    'After healing, the only live process of an id ends up joined, not refused, once no process '
    'before it is in quarantine.'
  )

  LEASES = 4

  def __init__(self, run: run_book.Run) -> None:
    super().__init__(run)
    self._alive: dict[int, LearnerBook] = {}  # by the process's number
    self._changed_ns: dict[str, int] = {}  # when a process of an id began or ended last

  def born(self, now_ns: int, book: LearnerBook) -> None:
    self._alive[book.process.number] = book
    self._changed_ns[book.learner] = now_ns

  def died(self, now_ns: int, book: run_book.Book, killed: bool) -> None:
    if book.process.start.role != LEARNER:
      return
    busy = book.refused is not None and book.refused.code in ('ID_IN_USE', 'OFFER_PASSED')
    if busy and not killed and self._waits_in_vain(now_ns, book):
      self.fail(book, book.refused)
    del self._alive[book.process.number]
    self._changed_ns[book.learner] = now_ns

  def _waits_in_vain(self, now_ns: int, book: LearnerBook) -> bool:
    """Whether a process that has not joined has been the only one of its id for `LEASES` leases."""
    alone = sum(other.learner == book.learner for other in self._alive.values()) == 1
    if not alone or book.ever_joined or book.ending:
      return False
    leases = self.LEASES
    if book.refused is not None and book.refused.code == 'ID_IN_QUARANTINE':
      leases += verdicts.QUARANTINE_LEASES
    long = now_ns - self._changed_ns[book.learner] > leases * self.config.lease_ns
    return long and self.run.healed_for(now_ns, self.LEASES)

  @invariant.on(SYNCER, actions.Exit)
  def ends(self, syncer: SyncerBook, now_ns: int, action: actions.Exit, event: Event) -> None:
    self._check(now_ns)

  def finished(self, now_ns: int) -> None:
    if not self.run.syncer.exited:
      self._check(now_ns)

  def _check(self, now_ns: int) -> None:
    for book in self._alive.values():
      if self._waits_in_vain(now_ns, book):
        self.fail(book, 'it has not joined')


class Contributes(invariant.Invariant):
  id = 'L5'
  sentence = (
    'A joiner becomes a contributor: the syncer sends it every fragment that is due to it, the '
    'next as soon as fewer than two are read or in flight whole, and once it has caught up, every '
    'open sync and every new one pulls from it or has its payload, or has its quorum without it '
    'while its link is slow.'
  )

  def __init__(self, run: run_book.Run) -> None:
    super().__init__(run)
    self._opened: list[int] = []
    self._welcomed: list[Peer] = []
    self._was_behind = False

  @invariant.on(SYNCER, messages.Joined)
  def joined(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    self._welcomed.append(book.peers[send.session])

  @invariant.on(SYNCER, facts.Opened)
  def opened(self, book: SyncerBook, now_ns: int, opened: facts.Opened, event: Event) -> None:
    self._opened.append(opened.sync)

  @invariant.after(SYNCER, EVERY)
  def turn(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    while self._opened:
      sync = book.syncs.get(self._opened.pop())
      if sync is not None:
        self._asks(book, sync, [peer for peer in book.members.values() if peer.caught_up])
    while self._welcomed:
      self._sends(book, self._welcomed.pop())

  def _sends(self, book: SyncerBook, peer: Peer) -> None:
    waits = peer.due - peer.wholes.keys() - book.reads
    if waits and peer.joined and room.for_whole(book, peer) and not book.exiting:
      self.fail(peer, f'{book.reads} are read')

  def _asks(self, book: SyncerBook, sync: Sync, peers: list[Peer]) -> None:
    payloads = [*sync.payloads.values(), *sync.merged]  # some were late for the sync before
    gave = {peer.join.learner for peer, _ in payloads}

    def takes_part(peer: Peer) -> bool:
      return peer.session in sync.asked or peer.join.learner in gave

    able = [peer for peer in book.members.values() if peer.caught_up]
    all_needed = sum(map(takes_part, able)) < self.config.quorum
    for peer in peers:
      slow = book.is_pulled_less(peer)
      if (all_needed or not slow) and not takes_part(peer):
        self.fail(sync, f'{peer.join.learner} was not asked')

  @invariant.on(SYNCER, messages.Adopted)
  def adopts(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    self._was_behind = not book.peer.caught_up

  @invariant.after(SYNCER, messages.Adopted)
  def adopted(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    if self._was_behind and book.peer.caught_up and not book.exiting:
      for sync in book.syncs.values():
        if not sync.merging:
          self._asks(book, sync, [book.peer])
    if book.peer.member:
      self._sends(book, book.peer)

  @invariant.after(SYNCER, events.FragmentRead)
  def read(self, book: SyncerBook, now_ns: int, event: events.FragmentRead, out: Out) -> None:
    for peer in book.members.values():
      self._sends(book, peer)


class Heard(invariant.Invariant):
  id = 'L11'
  sentence = (
    'Once the last fault is over for two leases, no session ends for silence while the syncer '
    'runs, but for the other end of one that has: heartbeats do not wait behind payloads.'
  )

  def __init__(self, run: run_book.Run) -> None:
    super().__init__(run)
    self._left_ns: dict[int, int] = {}  # when a process has last left a silent syncer, by nonce

  @invariant.on(SYNCER, actions.Close)
  def syncer(self, book: SyncerBook, now_ns: int, close: actions.Close, event: Event) -> None:
    peer = book.peers[close.session]
    left_ns = self._left_ns.get(peer.join.nonce, 0) if peer.join else 0
    if close.reason == 'lease expired' and left_ns <= peer.entered_ns:
      self._silent(book, now_ns, close)

  @invariant.on(LEARNER, actions.Close)
  def learner(self, book: LearnerBook, now_ns: int, close: actions.Close, event: Event) -> None:
    syncer = self.run.syncer
    joins = () if syncer is None or syncer.exited else [peer.join for peer in syncer.peers.values()]
    heard = any(join and join.nonce == book.nonce for join in joins)  # else by a syncer before it
    if close.reason != 'the syncer fell silent':
      return
    self._left_ns[book.nonce] = now_ns
    if heard:
      self._silent(book, now_ns, close)

  def _silent(self, book: SyncerBook, now_ns: int, close: actions.Close) -> None:
    if self.run.healed_for(now_ns, leases=2):
      self.fail(book, close)
