"""Which tokens were merged in the sync for which they were due."""

import collections
from collections.abc import Iterable

from diloco_jax.protocol import actions, facts
from diloco_jax.protocol.tape import observers


class OnTime:
  """Counts them. Of a learner that missed k syncs of a fragment, 1 token in k + 1 is on time.

  Attributes:
    of: by learner, fragment-tokens merged on time.
  """

  def __init__(self):
    self.of: collections.Counter[str] = collections.Counter()
    self._missed: collections.Counter[tuple[str, int]] = collections.Counter()

  def turn(self, out: observers.Actions, training: Iterable[str]) -> None:
    """The syncer may have decided outer steps; `training`: the learners that have trained."""
    reported = [action.fact for action in out if isinstance(action, actions.Report)]
    late = {fact.sync: fact.late for fact in reported if isinstance(fact, facts.Merging)}
    for action in out:
      if isinstance(action, actions.Merge):
        self._merge(action, late[action.sync], training)

  def _merge(self, merge: actions.Merge, late: tuple[str, ...], training: Iterable[str]) -> None:
    p = merge.fragment
    for one in merge.participants:
      missed = self._missed.pop((one.learner, p), 0)
      if one.learner in late:  # nothing of its payload was due for this sync
        self._missed[one.learner, p] = 1
      else:
        self.of[one.learner] += one.tokens / (missed + 1)
    present = {one.learner for one in merge.participants}
    for learner in training:
      if learner not in present:
        self._missed[learner, p] += 1
