"""Safety: when syncs open, and how a run ends."""

from typing import Any

from diloco_jax.protocol import actions, facts, messages
from diloco_jax.verification.checks.books import run as run_book
from diloco_jax.verification.checks.books.syncer import SyncerBook
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Out, Send

EVERY, SYNCER = invariant.EVERY, invariant.SYNCER


class Pace(invariant.Invariant):
  id = 'P1'
  sentence = (
    'Sync t opens once K live learners have reached step t, a closing sync once all have done '
    'their last step or one lease later, in the order of the schedule; the syncer announces it at '
    'most max(1, tau + ahead) steps before. '
    'A sync that is two periods late waits a lease and a redial, at most, for learners that were '
    'lost. '
    'No two syncs in hand have the same fragment. '
    'With a longer period of the run each fragment has its turn once in it.'
  )

  def __init__(self, run: run_book.Run) -> None:
    super().__init__(run)
    self._look_ns = 0
    self._announced: tuple[object, int] = None, 0  # a syncer's book, and the last sync announced
    # A syncer's book, its next sync, and since when that could be open.
    self._late: tuple[object, int, int] = None, -1, 0
    self._waits_to: tuple[object, int] | None = None  # a syncer's book, and a time

  @invariant.on(SYNCER, messages.Pull)
  def pull(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    t, p = send.message.sync, send.message.fragment
    sync = book.syncs.get(t)
    if sync is not None:
      if sync.fragment != p or sync.merging:
        self.fail(send, sync)
      return
    if t < book.lineage.next or book.schedule.fragment(t) != p:
      self.fail(send, f'the next sync is {book.lineage.next}')
    self._announced = book, t
    self._alone(book, t, p, send)
    lead = 0 if send.message.now else book.lead
    self._reached(book, t, lead)

  @invariant.on(SYNCER, facts.Tempo)
  def retimed(self, book: SyncerBook, now_ns: int, tempo: facts.Tempo, event: Event) -> None:
    """The first sync after the change has a turn, and comes within a period and the lead of the
    last that was opened or announced: what was announced is cancelled, and has no turn again."""
    longest = self.config.period * max(book.tempo.factor, tempo.factor) + self.config.period
    turn = book.schedule.turn(tempo.sync, tempo.factor) is not None
    changed = tempo.factor != book.tempo.factor
    announced = self._announced[1] if self._announced[0] is book else 0
    late = tempo.sync - max(book.lineage.opened, announced) - book.lead
    if changed and not (turn or self.config.closing(tempo.sync)) or late > longest:
      self.fail(tempo, book.lineage.opened)
    if tempo.period != tempo.factor * self.config.period or tempo.period > max(
      self.config.period, self.config.longest_period
    ):
      self.fail(tempo)

  @invariant.on(SYNCER, facts.Opened)
  def opened(self, book: SyncerBook, now_ns: int, opened: facts.Opened, event: Event) -> None:
    t, p = opened.sync, opened.fragment
    late, rest = divmod(t - book.lineage.next, book.tempo.period)
    if late < 0 or rest or book.schedule.fragment(t) != p:
      self.fail(opened, f'the next sync is {book.lineage.next}')
    self._alone(book, t, p, opened)
    self._reached(book, t, 0)
    if self.config.closing(t):
      self._all_have_finished(book, now_ns, t)

  @invariant.after(SYNCER, EVERY)
  def closes(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    """From now on closing syncs wait one lease, at most, for learners that train on."""
    known = self._waits_to is not None and self._waits_to[0] is book
    if not known and self.config.closing(book.lineage.next) and not book.over:
      ready = sum(step >= self.config.total_steps for step in self._steps(book))
      if ready >= self.config.quorum:
        self._waits_to = book, now_ns + self.config.lease_ns

  def _all_have_finished(self, book: SyncerBook, now_ns: int, t: int) -> None:
    waits = self._waits_to is None or self._waits_to[0] is not book or now_ns < self._waits_to[1]
    if waits and any(step < self.config.total_steps for step in self._steps(book)):
      self.fail(f'sync {t}', self._steps(book), self._waits_to)

  def _steps(self, book: SyncerBook) -> list[int]:
    """The steps that the learners which contribute have reached."""
    ready = []
    for peer in book.members.values():
      holder, learner = book.lineage.holders[peer.join.learner], book.learner(peer)
      if peer.caught_up:
        ready.append(holder.claimed if learner is None else max(holder.claimed, learner.clock))
    return ready

  def _alone(self, book: SyncerBook, t: int, p: int, said: Any) -> None:
    others = (sync for sync in book.syncs.values() if sync.t != t)
    skipped = lambda sync: sync.opened_ns is None and sync.t < t
    if any(other.fragment == p and not skipped(other) for other in others) or book.stopping:
      self.fail(said, book.syncs)

  @invariant.after(SYNCER, EVERY)
  def opens(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    """Checked once per heartbeat: the next sync waits for a slot, for learners, and as long as the
    syncer comes to believe their clocks: a lease after they joined, and a heartbeat."""
    if now_ns < self._look_ns or book.stopping or book.exiting or book.over:
      return
    self._look_ns = now_ns + self.config.heartbeat_ns
    t = book.lineage.next
    if self._late[:2] != (book, t) or not self._could_open(book, now_ns, t):
      self._late = book, t, now_ns
    elif now_ns - self._late[2] >= self._longest_wait_ns(book, t):
      self.fail(f'sync {t} is not open', book.members)

  def _could_open(self, book: SyncerBook, now_ns: int, t: int) -> bool:
    p = book.schedule.fragment(t)
    flying = [sync.fragment for sync in book.open]
    if len(flying) >= book.most_open or p in flying:
      return False
    ready = 0
    for peer in book.members.values():
      holder = book.lineage.holders[peer.join.learner]
      believed = min(holder.claimed, book.lineage.opened + self.config.period)  # more only later
      long_here = now_ns - peer.entered_ns > self.config.lease_ns
      ready += peer.caught_up and long_here and (believed >= t or holder.done)
    caught_up = sum(peer.caught_up for peer in book.members.values())
    needed = self.config.quorum
    if t > self.config.total_steps:
      needed = max(needed, caught_up)
    return ready >= needed

  def _longest_wait_ns(self, book: SyncerBook, t: int) -> int:
    """A sync that is late may wait for learners that were lost."""
    peers = [peer for peer in book.members.values() if peer.caught_up]
    claimed = max(book.lineage.holders[peer.join.learner].claimed for peer in peers)
    late = claimed >= t + 2 * book.tempo.period
    waits_ns = self.config.lease_ns + self.config.longest_redial_ns if late else 0
    return self.config.heartbeat_ns + waits_ns

  def _reached(self, book: SyncerBook, t: int, lead: int) -> None:
    steps = self._steps(book)
    ready = sum(step + lead >= t or step >= self.config.total_steps for step in steps)
    if ready < self.config.quorum:
      self.fail(f'sync {t}, {ready} learners are ready')

  @invariant.on(SYNCER, messages.Finish)
  def finish(self, book: SyncerBook, now_ns: int, send: Send, event: Event) -> None:
    if not book.over or book.open:
      self.fail(send, book.syncs, f'sync {book.lineage.next} is next')


class LastWord(invariant.Invariant):
  id = 'P2'
  sentence = 'A syncer exits only when it was asked to, or when every fragment is closed.'

  @invariant.on(SYNCER, actions.Exit)
  def exit(self, book: SyncerBook, now_ns: int, action: actions.Exit, event: Event) -> None:
    if not book.exiting or book.pending or book.saving:
      self.fail(action, book.pending)
