"""Safety: a bad update of one learner neither reaches the model nor discards the others'
updates."""

from diloco_jax.protocol import events
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.invariants.invariant import Out
from diloco_jax.verification.checks.model.syncer import SyncerBook

SYNCER = invariant.SYNCER


class Screened(invariant.Invariant):
  id = 'I9b'
  sentence = (
    'The syncer leaves out of the outer step exactly the payloads that are not finite or whose '
    'norm is beyond the limits of the decision; too large is none that is common among the live '
    'learners.'
  )

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
