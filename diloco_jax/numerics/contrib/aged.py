r"""Age-aware weights: a learner whose link is too slow for every period counts less, the older the
anchor of its pseudo-gradient is (docs/studies/links.md).

A pseudo-gradient of s inner steps was begun at the anchor s steps ago. At most H of them are due to
the schedule; more say that the learner has missed syncs, and that the model has moved on while it
trained. With the period H, and for slow links:

  age_m = max(0, s_m / H - 1)        periods
  w_m <- w_m DECAY^age_m

All others have the weights of the paper. Only ratios of weights matter, so the youngest
pseudo-gradient of a merge keeps its weight, and one without company counts in full at any age. The
age is counted in the learner's own steps, which the ledger has checked. Staleness-aware rates are
from Zhang et al., arXiv 1511.05950, which divides by the age.
"""

from collections.abc import Sequence

import numpy as np

DECAY = 0.5


def factors(steps: Sequence[int], period: int, slow: Sequence[bool]) -> np.ndarray:
  """The factors float64[M] of the weights; learners without steps are absent.

  Args:
    steps: inner steps of each pseudo-gradient.
    period: H.
    slow: of each, whether the link of its learner is too slow for every period.

  >>> factors([12, 24, 36, 0], period=12, slow=[True] * 4).tolist()
  [1.0, 0.5, 0.25, 1.0]
  >>> factors([24, 36, 48], period=12, slow=[False, False, True]).tolist()
  [1.0, 1.0, 0.25]
  """
  steps_M = np.asarray(steps, np.float64)
  age_M = np.maximum(steps_M / period - 1, 0)
  youngest = age_M.min(where=steps_M > 0, initial=age_M.max(initial=0.0))
  return np.where(slow, DECAY, 1.0) ** np.maximum(age_M - youngest, 0)
