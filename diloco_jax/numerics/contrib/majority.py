r"""Trust by majority: how far the row of a learner points where more than half of all rows point.

With the cosines C_mk between the rows of one tensor, of the n rows that are not zero,

  a_m = the (floor(n / 2) + 1)-th largest of C_m1, ..., C_mn      (C_mm = 1)
  g_m = min(1, max(0, a_m / agree))

So more than half of all rows, m among them, have at least the cosine a_m with row m, and a row is
trusted in full if that is `agree` or more. Fewer than half of the learners cannot make a row
trusted, and cannot keep the trust from a row that agrees with the others. Each learner has one
vote, whatever its weight. With `learners` above n, n is that number, and absent rows agree with
none: otherwise liars could be the majority of an outer step to which few learners contribute.

The score of a row by its closest majority is Krum's (Blanchard et al., NeurIPS 2017, arXiv
1703.02757), with cosines for distances: pseudo-gradients are nearly orthogonal, so a flipped one is
hardly farther away than an honest one, and only the sign of the cosine tells them apart. The
clipped cosine is the trust score of FLTrust (Cao et al., NDSS 2021, arXiv 2012.13995), which takes
the direction of a data set of its own for the reference.
"""

import numpy as np


def trust(
  cosines_MxMxT: np.ndarray, there_MxT: np.ndarray, agree: float, learners: int = 0
) -> np.ndarray:
  """The trust g float64[M, T], from 0 to 1.

  Args:
    cosines_MxMxT: between the rows.
    there_MxT: whether the row is not zero; one that is zero has no vote and no trust.
    agree: the least cosine that is trusted in full.
    learners: the least number of rows to be the majority of.

  >>> one, two = [1.0, 0.1, -0.1], [0.1, 1.0, -0.1]
  >>> trust(np.float64([one, two, [-0.1, -0.1, 1.0]])[..., None], np.ones((3, 1), bool), 0.05).T
  array([[1., 1., 0.]])
  """
  votes_MxMxT = np.where(there_MxT, cosines_MxMxT, -1.0)  # of the rows in the second axis
  absent = max(0, learners - len(votes_MxMxT))
  votes_MxMxT = np.pad(votes_MxMxT, ((0, 0), (0, absent), (0, 0)), constant_values=-1.0)
  majority_T = np.maximum(there_MxT.sum(axis=0), learners) // 2
  at_MxT = np.broadcast_to(majority_T, there_MxT.shape)
  ranked_MxMxT = -np.sort(-votes_MxMxT, axis=1)
  found_MxT = np.take_along_axis(ranked_MxMxT, at_MxT[:, None], axis=1)[:, 0]
  return np.where(there_MxT, np.clip(found_MxT / agree, 0.0, 1.0), 0.0)


def clip_lengths(lengths_MxT: np.ndarray) -> np.ndarray:
  """The lengths, none above the median of those that are not zero; of an even number the lower one.

  >>> clip_lengths(np.float64([[1.0], [9.0], [0.0], [2.0], [3.0]])).T
  array([[1., 2., 0., 2., 2.]])
  """
  ranked_MxT = np.sort(np.where(lengths_MxT > 0, lengths_MxT, np.inf), axis=0)
  middle_T = np.maximum(np.sum(lengths_MxT > 0, axis=0) - 1, 0) // 2
  return np.minimum(lengths_MxT, np.take_along_axis(ranked_MxT, middle_T[None], axis=0))
