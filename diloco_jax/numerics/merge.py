"""Merge rules: from the pseudo-gradients of M learners to one outer gradient.

Let w be the weights divided by their sum. With v_m the delta of one tensor and phi(x) = x / ||x||,
phi(0) = 0 (paper, section 4):

  avg   sum_m w_m v_m
  rda   R * phi(u),   R = sum_m w_m ||v_m||,   u = sum_m w_m phi(v_m)

Radial-directional averaging keeps the mean length R for every M, where avg shrinks near-orthogonal
deltas by sqrt(M). The paper leaves two points open. Granularity: here one tensor (a piece of a
fragment). A vanishing mean direction: u has length 1 / sqrt(M) for orthogonal deltas and 0 only
when learners cancel; then its direction is rounding noise, which R / ||u|| would blow up to full
length. Here `floor` = 0.01 bounds ||u|| from below, so the result goes to 0 continuously, as
phi(0) = 0 demands, and up to 10,000 orthogonal learners are not affected.

The weight of a learner is "quantity times quality": the tokens trained on since it last adopted the
fragment, times the tokens per step (a pseudo-gradient of large batches is less noisy than one of
many small ones). w_m = c_tokens[m] * (c_tokens[m] / c_steps[m]), at most MOST times the lower
median of the participants, and of M > 2 at most M - 1 times: a learner reports its counts itself,
and no report may make it outweigh all others. For the same reason no delta of M > 2 moves a tensor
as if it were longer than LONGEST times the lower median of those that have trained about as long: a
longer one is shortened (centered clipping, arXiv 2012.10333). Of honest payloads that is one tensor
in a thousand.

A rule sees the deltas through their lengths only, and the cosines between them if it asks for
them: it says by which factor each row enters the sum u, and, once the length of u is known, by
which factor the sum is stretched. So the syncer never holds the M float32 rows
(syncer/outer_step.py), and all else is a few numbers for each tensor, in float64 on the host. A new
rule is a function here that returns a MergeRule, and its entry in RULES, from which the battery of
tests/numerics/test_merge.py takes it. `majority` is not of the paper.

The order of summation must not depend on the order of arrival: the rows are folded one after the
other in the order of learner ids, also here, and an absent learner is no row at all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diloco_jax.numerics import spec
from diloco_jax.numerics.contrib import aged
from diloco_jax.numerics.contrib import majority as majority_lib


class Rows(NamedTuple):
  """The deltas of M learners, T tensors each, as a rule sees them.

  Attributes:
    shares_M: the weights, which add up to 1.
    lengths_MxT: of the rows.
    cosines_MxMxT: between the rows, 0 where one of them is zero; None: the rule does not ask.
  """

  shares_M: np.ndarray
  lengths_MxT: np.ndarray
  cosines_MxMxT: np.ndarray | None = None

  def tensors(self, at: Sequence[int]) -> 'Rows':
    """The rows with these tensors alone."""
    cosines = None if self.cosines_MxMxT is None else self.cosines_MxMxT[:, :, at]
    return Rows(self.shares_M, self.lengths_MxT[:, at], cosines)


MOST = 8.0  # times the lower median weight
LONGEST = 2.0  # times the lower median length


class MergeRule(NamedTuple):
  """Turns pseudo-gradients into one outer gradient, tensor by tensor:

    merged = stretch * u,   u = sum_m factor_m v_m

  Attributes:
    factors: (the rows) -> float64[M, T].
    stretch: (the rows, lengths of the sums u float64[T]) -> float64[T].
    cosines: whether it asks for the cosines of the rows. They cost about M^2 / 2 more readings of
      a payload in each outer step.
  """

  factors: Callable[[Rows], np.ndarray]
  stretch: Callable[[Rows, np.ndarray], np.ndarray]
  cosines: bool = False


def avg() -> MergeRule:
  """The weighted mean sum w v / sum w.

  >>> avg().factors(Rows(np.float64([0.75, 0.25]), np.ones((2, 1)))).tolist()
  [[0.75], [0.25]]
  """
  return MergeRule(
    lambda rows: np.broadcast_to(rows.shares_M[:, None], rows.lengths_MxT.shape),
    lambda rows, sums_T: np.ones_like(sums_T),
  )


def rda(floor: float = 0.01) -> MergeRule:
  """Radial-directional averaging per tensor (the equation is at the top of this file).

  Squares are summed in float32 in blocks of 32: a delta whose norm is below about 1e-19 counts as
  zero.

  Args:
    floor: the least length of a mean direction u that the rule stretches to full length.

  Raises:
    ValueError: the floor is not above 0, so that a tensor of zeros would become NaN.

  >>> rda().stretch(Rows(np.float64([0.5, 0.5]), np.full((2, 1), 3.0)), np.float64([0.5])).tolist()
  [6.0]
  """

  if not 0 < floor <= 1:
    raise ValueError('floor must be above 0 and at most 1, usually 0.01')

  def factors(rows: Rows) -> np.ndarray:
    nonzero = rows.lengths_MxT > 0
    return np.where(nonzero, rows.shares_M[:, None] / np.where(nonzero, rows.lengths_MxT, 1.0), 0.0)

  def stretch(rows: Rows, sums_T: np.ndarray) -> np.ndarray:
    radius_T = np.add.reduce(rows.shares_M[:, None] * rows.lengths_MxT, axis=0)
    return radius_T / np.maximum(sums_T, floor)

  return MergeRule(factors, stretch)


def majority(learners: int = 0, agree: float = 0.05, floor: float = 0.01) -> MergeRule:
  """RDA of the rows that a majority agrees with, per tensor; not of the paper.

  With the trust g_m of numerics/contrib/majority.py, and the median l of the lengths (of an even
  number of rows the lower one):

    W = sum_m w_m g_m      u = sum_m w_m g_m phi(v_m)      R = sum_m w_m g_m min(||v_m||, l) / W

    merged = min(1, 2 W) R phi(u)

  Of M rows fewer than M / 2 that lie cannot turn the direction or stretch the length. If half of
  the rows or more are against the others, no row is trusted and the tensor stands still: no rule
  can know which half is right. Lengths are clipped to the median as in centered clipping
  (Karimireddy et al., ICML 2021, arXiv 2012.10333). min(1, 2 W) makes the result go to 0
  continuously with the trust.

  Without `learners` a lone row is a majority of itself, and two liars are one of three rows. With
  it an outer step to which only half of them or fewer contribute leaves the model as it was, and
  what they have trained is lost. Honest rows whose cosine is below `agree` (tiny tensors, learners
  whose data differ) count less.

  Args:
    learners: the majority is one of at least so many learners: those of the run. 0: of the rows of
      the outer step.
    agree: the cosine from which on a row is trusted in full.
    floor: as for `rda`, for u / W.

  Raises:
    ValueError: an argument is outside its range.
  """
  if not 0 < agree <= 1:
    raise ValueError('agree must be above 0 and at most 1, usually 0.05')
  if type(learners) is not int or learners < 0:
    raise ValueError('learners must be a whole number, and 0 or more: those of the run')
  radial = rda(floor)

  def trust(rows: Rows) -> np.ndarray:
    return majority_lib.trust(rows.cosines_MxMxT, rows.lengths_MxT > 0, agree, learners)

  def factors(rows: Rows) -> np.ndarray:
    return trust(rows) * radial.factors(rows)

  def stretch(rows: Rows, sums_T: np.ndarray) -> np.ndarray:
    trusted_MxT = trust(rows) * rows.shares_M[:, None]
    all_T = np.add.reduce(trusted_MxT, axis=0)
    long_T = np.add.reduce(trusted_MxT * majority_lib.clip_lengths(rows.lengths_MxT), axis=0)
    safe_T = np.where(all_T > 0, all_T, 1.0)
    return np.minimum(1.0, 2 * all_T) * (long_T / safe_T) / np.maximum(sums_T, floor * safe_T)

  return MergeRule(factors, stretch, cosines=True)


RULES: dict[str, Callable[..., MergeRule]] = {'avg': avg, 'rda': rda, 'majority': majority}


def make(text: str) -> MergeRule:
  """The rule of a spec. Raises ValueError, also for arguments with which it cannot compute."""
  rows = Rows(np.ones(1), np.ones((1, 1)), np.ones((1, 1, 1)))
  use = lambda rule: (rule.factors(rows), rule.stretch(rows, np.ones(1)))
  return spec.make(text, RULES, use=use)


def token_weights(
  tokens: Sequence[int], steps: Sequence[int], factors_M: np.ndarray | float = 1.0
) -> np.ndarray:
  """The weights float32[M], times `factors_M`; a learner without tokens or steps is absent and
  weighs 0.

  None counts more than MOST times the lower median of those present (an honest pause makes all of
  them long), and of more than two none more than the others together have, if these are equal. Only
  ratios matter to a merge rule, so the largest weight is 1. They are computed on the host in
  float64: counts may be larger than an int32, and their weights larger than a float32.

  >>> token_weights([800, 400, 0], [8, 8, 0]).tolist()
  [1.0, 0.25, 0.0]
  >>> token_weights([8_000_000, 400, 400], [80_000, 4, 4]).tolist()
  [1.0, 0.5, 0.5]
  >>> token_weights([8_000_000, 400], [80_000, 4]).tolist()
  [1.0, 0.125]
  """
  tokens_M, steps_M = np.asarray(tokens, np.float64), np.asarray(steps, np.float64)
  present = (tokens_M > 0) & (steps_M > 0)
  weights_M = np.where(present, tokens_M * (tokens_M / np.where(present, steps_M, 1.0)), 0.0)
  weights_M *= factors_M
  ordered = np.sort(weights_M[weights_M > 0])
  if len(ordered):
    most = MOST if len(ordered) < 3 else min(MOST, len(ordered) - 1)
    weights_M = np.minimum(weights_M, most * ordered[(len(ordered) - 1) // 2])
  return (weights_M / (weights_M.max(initial=0.0) or 1.0)).astype(np.float32)


def shortening(lengths_MxT: np.ndarray, steps: Sequence[int], period: int) -> np.ndarray:
  """By which factors float64[M, T] the rows are shortened: none counts as longer than LONGEST times
  the lower median of those that have trained at least half as long as it, and are not zero, if
  there are three such rows or more. More steps than the period and the lower median count as these:
  a learner reports them itself.

  >>> row = np.float64([[1.0], [8.0], [1.5]])
  >>> shortening(row, [9, 9, 9], 9).T.tolist(), shortening(row, [1, 9, 1], 9).T.tolist()
  ([[1.0, 0.375, 1.0]], [[1.0, 1.0, 1.0]])
  """
  middle = sorted(steps)[(len(steps) - 1) // 2]
  steps_M = np.minimum(steps, max(period, middle))
  factors_MxT = np.ones_like(lengths_MxT)
  for count in set(steps_M.tolist()):
    alike_MxT = lengths_MxT[2 * steps_M >= count]
    if len(alike_MxT) > 2:
      most_T, is_count_M = (
        LONGEST * majority_lib.clip_lengths(alike_MxT).max(axis=0),
        steps_M == count,
      )
      lengths = np.where(lengths_MxT[is_count_M] > 0, lengths_MxT[is_count_M], 1.0)
      factors_MxT[is_count_M] = np.minimum(1.0, most_T / lengths)
  return factors_MxT


def mean_cosines(
  parts_MxT: np.ndarray, sums_T: np.ndarray, labels: Sequence[str]
) -> dict[str, float]:
  """The mean cosine between two rows that are added up, by label the mean of its tensors: 1 if all
  point the same way, about 0 if each learns something else. A pair of rows counts by the product of
  their lengths; a tensor in which fewer than two are not zero does not count.

  Args:
    parts_MxT: the lengths of the rows, as they are added.
    sums_T: the lengths of the sums.
    labels: of the T tensors.

  >>> parts_MxT = np.float64([[3.0, 1.0, 2.0], [4.0, 1.0, 0.0]])
  >>> mean_cosines(parts_MxT, np.float64([5.0, 2.0, 2.0]), ['body', 'router', 'head'])
  {'body': 0.0, 'router': 1.0}
  """
  squares_T = np.sum(parts_MxT**2, axis=0)
  pairs_T = np.sum(parts_MxT, axis=0) ** 2 - squares_T
  cosines_by_label: dict[str, list[float]] = {}
  for label, pairs, rest in zip(labels, pairs_T, sums_T**2 - squares_T, strict=True):
    if pairs > 0:
      cosine = float(np.clip(rest / pairs, -1, 1))  # sums in float32 may exceed it
      cosines_by_label.setdefault(label, []).append(cosine)
  return {label: sum(cosines) / len(cosines) for label, cosines in cosines_by_label.items()}


def shares(weights_M: np.ndarray) -> np.ndarray:
  """The weights divided by their sum, float64[M]. One of them is not 0."""
  weights_M = np.asarray(weights_M, np.float64)
  return weights_M / sum(weights_M.tolist())


class Weighed(NamedTuple):
  """An outer step before its sums.

  Attributes:
    rows: as the rule sees them: none is longer than `shortening` allows.
    factors_MxT: by which each row, as it was sent, enters the sum.
  """

  rows: Rows
  factors_MxT: np.ndarray


def weigh(
  rule: MergeRule,
  tokens: Sequence[int],
  steps: Sequence[int],
  slow: Sequence[bool],
  lengths_MxT: np.ndarray,
  period: int,
  cosines_MxMxT: np.ndarray | None = None,
) -> Weighed:
  """How much of each row an outer step merges: the whole policy of weights, ages and lengths.

  Args:
    rule: of the fragment.
    tokens, steps, slow: of each row; slow: its link is too slow for every period (aged.py).
    lengths_MxT: of the rows as they were sent.
    period: H, inner steps.
    cosines_MxMxT: between the rows, if the rule asks for them.

  >>> lengths_MxT = np.float64([[4.0], [2.0]])
  >>> weigh(rda(), [80, 40], [8, 8], [False, False], lengths_MxT, 8).factors_MxT.tolist()
  [[0.2], [0.1]]
  """
  weights_M = token_weights(tokens, steps, aged.factors(steps, period, slow))
  shortened_MxT = shortening(lengths_MxT, steps, period)
  rows = Rows(shares(weights_M), lengths_MxT * shortened_MxT, cosines_MxMxT)
  return Weighed(rows, rule.factors(rows) * shortened_MxT)


def by_label(rules: Mapping[str, MergeRule], labels: Sequence[str]) -> MergeRule:
  """A rule per label: the paper merges embeddings by avg and everything else by rda.

  Args:
    rules: label -> rule.
    labels: of the T tensors.

  Raises:
    ValueError: a label without a rule.

  >>> rule = by_label({'avg': avg(), 'rda': rda()}, ['avg', 'rda'])
  >>> rule.factors(Rows(np.float64([0.5, 0.5]), np.full((2, 2), 4.0))).tolist()
  [[0.5, 0.125], [0.5, 0.125]]
  """
  unknown = sorted(set(labels) - set(rules))
  if unknown:
    raise ValueError(f'merge: no rule for labels {unknown}; rules are given for {sorted(rules)}')
  columns = {
    label: [t for t, other in enumerate(labels) if other == label] for label in sorted(set(labels))
  }

  def factors(rows: Rows) -> np.ndarray:
    factors_MxT = np.empty(rows.lengths_MxT.shape)
    for label, at in columns.items():
      factors_MxT[:, at] = rules[label].factors(rows.tensors(at))
    return factors_MxT

  def stretch(rows: Rows, sums_T: np.ndarray) -> np.ndarray:
    stretches_T = np.empty(sums_T.shape)
    for label, at in columns.items():
      stretches_T[at] = rules[label].stretch(rows.tensors(at), sums_T[at])
    return stretches_T

  return MergeRule(factors, stretch, any(rules[label].cosines for label in columns))
