"""Safety: a bad update of one learner neither reaches the model nor discards the others'
updates."""

from diloco_jax.protocol import actions, events, messages
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Event, Out
from diloco_jax.verification.checks.model import lineage as lineage_book
from diloco_jax.verification.checks.model.syncer import Peer, SyncerBook

SYNCER = invariant.SYNCER


class Screened(invariant.Invariant):
  id = 'I9b'
  sentence = (
    'The syncer leaves out of the outer step exactly the payloads that are not finite or whose '
    'norm is too large or too small compared with earlier merges of the fragment; too large is '
    'none that is common among the live learners.'
  )

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book: SyncerBook, now_ns: int, merge: actions.Merge, event: Event) -> None:
    for one in merge.participants:
      norms = book.lineage.norms.get(merge.fragment, lineage_book.Norms())
      true = self._limits(norms, merge, one)
      if (one.least, one.limit) != true:
        self.fail(one, f'its limits should be {true}')

  def _limits(self, norms: lineage_book.Norms, merge: actions.Merge, one: actions.Participant):
    """The rule of syncer/screening.py, implemented a second time."""
    config, usual, steps = self.config, norms.usual(), one.steps
    voters = [learner for learner, pairs in norms.last.items() if len(pairs) > 1]
    if not config.norm_factor or norms.commits < config.norm_warmup or usual is None:
      return 0, None
    (small, few_steps), (norm, usual_steps) = usual
    least = small * min(steps, few_steps) // few_steps // 2**20
    if len(voters) == 1:
      least = 0
    all_steps = sorted(other.steps for other in merge.participants)
    shared = all_steps[(len(all_steps) - 1) // 2]
    if len(all_steps) == 1 and len(merge.live) > 1:
      shared = 0
    growth = max(usual_steps, min(steps, 32 * usual_steps, 4 * max(usual_steps, shared)))
    return least, config.norm_factor * norm * growth // usual_steps

  @invariant.on(SYNCER, events.MergeDone)
  def merge_done(self, book: SyncerBook, now_ns: int, done: events.MergeDone, out: Out) -> None:
    merge = book.gathers[done.sync].merging
    participants = merge.participants
    if len(done.norms) != len(participants):
      self.fail(done, participants)
    # A norm is common if as many others are no less as a half of the live learners, one at least.
    others = max(1, len(merge.live) // 2)
    common = [n for n in done.norms if sum(n <= other for other in done.norms) > others]
    usual = self.config.norm_factor * max(common, default=0)
    true = tuple(
      one.learner
      for one, norm in zip(participants, done.norms)
      if norm < one.least or norm < 0 or (one.limit is not None and norm > max(one.limit, usual))
    )
    if done.refused != true or (len(true) == len(participants) and not done.failed):
      self.fail(done, f'refused should be {true}')


class Quarantine(invariant.Invariant):
  id = 'I9c'
  sentence = (
    'A learner that sends as many bad updates in a row as the settings allow is quarantined at '
    'once, and that process takes no further part.'
  )

  def _is_quarantined(self, book: SyncerBook, peer: Peer) -> bool:
    worst = book.lineage.holders[peer.join.learner].max_strikes
    return 0 < self.config.strikes <= worst

  def _check_members(self, book: SyncerBook) -> None:
    for peer in book.members.values():
      if self._is_quarantined(book, peer) and not book.exiting:
        self.fail(peer, book.lineage.holders[peer.join.learner])

  @invariant.after(SYNCER, events.MergeDone)
  def merge_done(self, book: SyncerBook, now_ns: int, event: events.MergeDone, out: Out) -> None:
    self._check_members(book)

  @invariant.after(SYNCER, messages.Decline)
  def declined(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    self._check_members(book)

  @invariant.after(SYNCER, messages.Confirm)
  def confirmed(self, book: SyncerBook, now_ns: int, event: Event, out: Out) -> None:
    self._check_members(book)
