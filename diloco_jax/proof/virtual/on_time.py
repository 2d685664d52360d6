"""Which tokens were merged in the sync for which they were due."""

import collections
from collections.abc import Iterable

from diloco_jax.protocol import actions


class OnTime:
  """Counts them. Of a learner that missed k syncs of a fragment, 1 token in k + 1 is on time.

  Attributes:
    tokens: fragment-tokens merged on time.
  """

  def __init__(self):
    self.tokens = 0.0
    self._missed: collections.Counter[tuple[str, int]] = collections.Counter()

  def merge(self, merge: actions.Merge, training: Iterable[str]) -> None:
    """An outer step is decided; `training`: the learners that have trained."""
    p = merge.fragment
    for one in merge.participants:
      self.tokens += one.tokens / (self._missed.pop((one.learner, p), 0) + 1)
    present = {one.learner for one in merge.participants}
    for learner in training:
      if learner not in present:
        self._missed[learner, p] += 1

  def gone(self, learner: str) -> None:
    """The process of a learner has ended, and its tokens with it."""
    for key in [key for key in self._missed if key[0] == learner]:
      del self._missed[key]
