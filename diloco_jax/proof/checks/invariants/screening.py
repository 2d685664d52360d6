"""Safety: no learner's bad update reaches the model, nor costs the others theirs."""

from diloco_jax.proof.checks.invariants import invariant
from diloco_jax.proof.checks.model import lineage as lineage_book
from diloco_jax.protocol import actions, events, messages

SYNCER = invariant.SYNCER


class Screened(invariant.Invariant):
  id = 'I9b'
  sentence = (
    'Each payload is judged by itself: what is not finite, or too long for what was '
    'merged of its fragment before, is left out of the outer step, and nothing else.'
  )

  @invariant.on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    for one in merge.participants:
      true = self._limit(book.lineage.norms.get(merge.fragment, ()), one.steps)
      if one.limit != true:
        self.fail(one, f'its limit should be {true}')

  def _limit(self, commits, steps):
    """By the sentence of screening.py, in its own words."""
    config = self.config
    if not config.norm_factor or len(commits) < config.norm_warmup:
      return None
    norm, usual = lineage_book.medians(commits)
    longer = max(steps, usual)
    return config.norm_factor * norm * longer // usual if norm else None

  @invariant.on(SYNCER, events.MergeDone)
  def merge_done(self, book, now_ns, done, out):
    participants = book.gathers[done.sync].merging.participants
    if len(done.norms) != len(participants):
      self.fail(done, participants)
    true = tuple(
      one.learner
      for one, norm in zip(participants, done.norms)
      if norm < 0 or (one.limit is not None and norm > one.limit)
    )
    if done.refused != true or (len(true) == len(participants) and not done.failed):
      self.fail(done, f'refused should be {true}')


class Quarantine(invariant.Invariant):
  id = 'I9c'
  sentence = (
    'Who sends as many bad updates in a row as the settings say is put into quarantine '
    'at once, and that process takes part no more.'
  )

  def _out(self, book, peer):
    worst = book.lineage.holders[peer.join.learner].worst
    return 0 < self.config.strikes <= worst

  def _nobody(self, book):
    for peer in book.members.values():
      if self._out(book, peer) and not book.exiting:
        self.fail(peer, book.lineage.holders[peer.join.learner])

  @invariant.after(SYNCER, events.MergeDone)
  def merge_done(self, book, now_ns, event, out):
    self._nobody(book)

  @invariant.after(SYNCER, messages.Decline)
  def declined(self, book, now_ns, event, out):
    self._nobody(book)

  @invariant.after(SYNCER, messages.Confirm)
  def confirmed(self, book, now_ns, event, out):
    self._nobody(book)
