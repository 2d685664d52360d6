"""Merge rules: from the pseudo-gradients of M learners to one outer gradient.

A merge rule is a pair of pure functions, like an optax transform:

  init(params) -> state
  merge(deltas, weights_M, state) -> (merged, state)

where `deltas` has the structure of `params` with a leading axis M on every leaf. Let w be the
weights divided by their sum. With v_m the delta of one tensor and phi(x) = x / ||x||, phi(0) = 0
(paper, section 4):

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
many small ones). w_m = c_tokens[m] * (c_tokens[m] / c_steps[m])

A new rule is a function here that returns a MergeRule, and its entry in RULES, from which the
battery of tests/numerics/test_merge.py takes it.

The order of summation must not depend on the order of arrival. So the rows are folded one after the
other in the order of the axis M (learner ids), and an absent learner, a row of zeros with weight 0,
changes no bit of the result. The fold is a loop of the program and not unrolled: unrolled, a
compiler may turn w0 v0 + w1 v1 into a fused multiply-add of either product, and its choice changes
with M. In the loop every addition is accumulator + product, whichever learners are absent, and the
time to compile does not grow with M.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import fragments, spec

PyTree = Any


class MergeRule(NamedTuple):
  """Turns pseudo-gradients into one outer gradient.

  Attributes:
    init: params -> state (any pytree).
    merge: (deltas with leading axis M, weights_M float32, state) -> (merged, state).
  """

  init: Callable[[PyTree], PyTree]
  merge: Callable[[PyTree, jax.Array, PyTree], tuple[PyTree, PyTree]]


def avg() -> MergeRule:
  """The weighted mean sum w v / sum w; zero if all weights are 0.

  >>> merged, _ = avg().merge({'w': jnp.eye(2)}, jnp.float32([3, 1]), ())
  >>> merged['w'].tolist()
  [0.75, 0.25]
  """

  def merge(deltas: PyTree, weights_M: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
    deltas, weights_M = _two_rows(deltas, weights_M)
    shares_M = _shares(weights_M)
    return _fold(deltas, jax.tree.map(lambda _: shares_M, deltas)), state

  return MergeRule(lambda params: (), merge)


def rda(floor: float = 0.01) -> MergeRule:
  """Radial-directional averaging per tensor (the equation is at the top of this file).

  Squares are summed in float32: a delta whose norm is below about 1e-19 counts as zero.

  Args:
    floor: the least length of a mean direction u that the rule stretches to full length.

  >>> merged, _ = rda().merge({'w': jnp.eye(2)}, jnp.float32([1, 1]), ())
  >>> round(float(jnp.linalg.norm(merged['w'])), 6)
  1.0
  """

  def merge(deltas: PyTree, weights_M: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
    deltas, weights_M = _two_rows(deltas, weights_M)
    shares_M = _shares(weights_M)
    norms_M = _norms_of_rows(deltas)
    radius = _fold(norms_M, jax.tree.map(lambda _: shares_M, deltas))
    phi = lambda r_M: jnp.where(r_M > 0, shares_M / jnp.where(r_M > 0, r_M, 1.0), 0.0)
    u = _fold(deltas, jax.tree.map(phi, norms_M))
    stretch = lambda x, r, length: x * (r / jnp.maximum(length, floor))
    return jax.tree.map(stretch, u, radius, _norms(u)), state

  return MergeRule(lambda params: (), merge)


RULES: dict[str, Callable[..., MergeRule]] = {'avg': avg, 'rda': rda}


def make(text: str) -> MergeRule:
  """The rule of a spec. Raises ValueError, also for arguments with which it cannot compute."""
  tensor = jax.ShapeDtypeStruct((2,), jnp.float32)
  merge_one = lambda rule: lambda x: rule.merge(x[None], x[:1], rule.init(x))
  return spec.make(text, RULES, use=lambda rule: jax.eval_shape(merge_one(rule), tensor))


def token_weights(
  tokens: Sequence[int], steps: Sequence[int], factors_M: np.ndarray | float = 1.0
) -> np.ndarray:
  """The weights float32[M], times `factors_M`; a learner without tokens or steps is absent and
  weighs 0.

  Only ratios matter to a merge rule, so the largest weight is 1. They are computed on the host in
  float64: counts may be larger than an int32, and their weights larger than a float32.

  >>> token_weights([800, 400, 0], [8, 8, 0]).tolist()
  [1.0, 0.25, 0.0]
  """
  tokens_M, steps_M = np.asarray(tokens, np.float64), np.asarray(steps, np.float64)
  present = (tokens_M > 0) & (steps_M > 0)
  weights_M = np.where(present, tokens_M * (tokens_M / np.where(present, steps_M, 1.0)), 0.0)
  weights_M *= factors_M
  return (weights_M / (weights_M.max(initial=0.0) or 1.0)).astype(np.float32)


def by_label(rules: Mapping[str, MergeRule], labels: PyTree) -> MergeRule:
  """A rule per label: the paper merges embeddings by avg and everything else by rda.

  Args:
    rules: label -> rule.
    labels: a tree of labels with the structure of the parameters. It may hold more leaves than a
      call passes, so one rule with fragments.labels(layout) serves every fragment.

  Raises:
    ValueError: a label without a rule (at once) or a parameter without a label (in init, merge).

  >>> rule = by_label({'avg': avg(), 'rda': rda()}, {'embed': 'avg', 'w': 'rda'})
  >>> merged, _ = rule.merge({'w': jnp.eye(2)}, jnp.ones(2), rule.init({'w': jnp.ones(2)}))
  >>> round(float(jnp.linalg.norm(merged['w'])), 6)
  1.0
  """
  label_of = fragments.by_path(labels)
  unknown = sorted(set(label_of.values()) - set(rules))
  if unknown:
    raise ValueError(f'merge: no rule for labels {unknown}; rules are given for {sorted(rules)}')

  def group(tree: PyTree) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for path, leaf in fragments.by_path(tree).items():
      if path not in label_of:
        raise ValueError(f'merge: no label for {path}; labels are given for {sorted(label_of)}')
      groups.setdefault(label_of[path], {})[path] = leaf
    return groups

  def init(params: PyTree) -> PyTree:
    return {label: rules[label].init(part) for label, part in group(params).items()}

  def merge(deltas: PyTree, weights_M: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
    merged, new_state = {}, {}
    for label, part in group(deltas).items():
      done, new_state[label] = rules[label].merge(part, weights_M, state[label])
      merged.update(done)
    leaves = [merged[path] for path in fragments.by_path(deltas)]
    return jax.tree.unflatten(jax.tree.structure(deltas), leaves), new_state

  return MergeRule(init, merge)


def _shares(weights_M: jax.Array) -> jax.Array:
  """The weights divided by their sum; all 0 if the sum is."""
  total = _fold(weights_M, jnp.ones_like(weights_M))
  return weights_M / jnp.where(total > 0, total, 1.0)


def _two_rows(deltas: PyTree, weights_M: jax.Array) -> tuple[PyTree, jax.Array]:
  """Adds an absent learner to a lone one: XLA unrolls a loop of one round, and with other fused
  operations the last bits differ (seen with jax 0.12)."""
  if weights_M.shape[0] > 1:
    return deltas, weights_M
  absent = lambda x_Mx: jnp.concatenate([x_Mx, jnp.zeros_like(x_Mx)])
  return jax.tree.map(absent, deltas), absent(weights_M)


@jax.jit
def _fold(terms: PyTree, factors_M: PyTree) -> PyTree:
  """0 + f_0 x_0 + f_1 x_1 + ..., leaf by leaf, in this order; factors are never negative."""

  def add(totals: PyTree, row: tuple[PyTree, PyTree]) -> tuple[PyTree, None]:
    return jax.tree.map(lambda total, x, f: total + f * x, totals, *row), None

  # A zero that the compiler cannot see: else it removes `0 +` from a loop of one round and leaves
  # -0.
  zero = lambda x_Mx, f_M: jnp.full(x_Mx.shape[1:], jnp.minimum(f_M[0], 0.0), x_Mx.dtype)
  return jax.lax.scan(add, jax.tree.map(zero, terms, factors_M), (terms, factors_M))[0]


@jax.jit
def _norms_of_rows(deltas: PyTree) -> PyTree:
  """One row at a time, so that the order of a norm's sum does not depend on the number of rows."""
  return jax.lax.map(_norms, deltas)


def _norms(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.sqrt(jnp.sum(x * x)), tree)
