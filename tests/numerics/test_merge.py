"""One battery for every merge rule and every outer optimizer, then the properties of each one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.numerics import merge, outer

_SHAPES = {'embed': (16, 4), 'w': (8, 24), 'scale': (5,), 'bias': ()}
_LABELS = {'embed': 'avg', 'w': 'rda', 'scale': 'rda', 'bias': 'avg'}
_MIXED = lambda: merge.by_label({'avg': merge.avg(), 'rda': merge.rda()}, _LABELS)

RULES = merge.RULES | {'by_label': _MIXED}
OUTERS = (*outer.OUTERS, 'sgd(learning_rate=1.0)', 'rmsprop(learning_rate=0.05)')


def _params(seed=0):
  rng = np.random.default_rng(seed)
  return {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in _SHAPES.items()}


def _deltas(learners, seed=1):
  rng = np.random.default_rng(seed)
  return {k: rng.standard_normal((learners, *s)).astype(np.float32) for k, s in _SHAPES.items()}


def _weights(learners, seed=2):
  return np.random.default_rng(seed).uniform(1, 1000, learners).astype(np.float32)


def _with_absent(deltas, weights, present, learners):
  """The same learners at the rows `present` of `learners` rows, zeros elsewhere."""
  place = lambda x: np.zeros((learners, *x.shape[1:]), x.dtype)
  out = {k: place(x) for k, x in deltas.items()}
  padded = place(weights)
  for k, x in deltas.items():
    out[k][present] = x
  padded[present] = weights
  return out, padded


def _assert_bits_equal(a, b):
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(
      np.asarray(x).reshape(-1).view(np.uint32), np.asarray(y).reshape(-1).view(np.uint32)
    ),
    a,
    b,
  )


rules = pytest.mark.parametrize('rule', [f() for f in RULES.values()], ids=RULES.keys())


# --- every merge rule ----------------------------------------------------------------------------


@rules
def test_structure_shapes_and_dtypes_are_those_of_the_parameters(rule):
  params = _params()
  merged, state = rule.merge(_deltas(3), _weights(3), rule.init(params))
  want = jax.tree.map(lambda x: (x.shape, x.dtype), params)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), merged) == want
  assert jax.tree.structure(state) == jax.tree.structure(rule.init(params))


@rules
@pytest.mark.parametrize('present', [[0, 1, 2], [1, 3, 4], [3]])
def test_absent_learners_leave_every_bit_as_it_is(rule, present):
  deltas, weights = _deltas(len(present)), _weights(len(present))
  deltas['embed'][:, 0] = -0.0
  step = jax.jit(lambda d, w: rule.merge(d, w, rule.init(_params()))[0])
  _assert_bits_equal(step(deltas, weights), step(*_with_absent(deltas, weights, present, 5)))


def test_absent_learners_change_no_bit_of_a_large_tensor_either():
  """Large reductions may be cut into parts for threads; the cut must not depend on M."""
  v = np.random.default_rng(3).standard_normal((2, 300_001)).astype(np.float32)
  step = jax.jit(lambda d, w: merge.rda().merge(d, w, ())[0])
  padded = np.zeros((5, v.shape[1]), np.float32)
  padded[[1, 4]] = v
  _assert_bits_equal(step(v, np.float32([3, 2])), step(padded, np.float32([0, 3, 0, 0, 2])))


@rules
def test_a_lone_learner_merges_to_its_own_delta(rule):
  deltas = _deltas(1)
  merged, _ = rule.merge(deltas, _weights(1), rule.init(_params()))
  jax.tree.map(lambda x, d: np.testing.assert_allclose(x, d[0], rtol=1e-6), merged, deltas)


@rules
def test_equal_deltas_merge_to_themselves(rule):
  deltas = {k: np.stack([x[0]] * 4) for k, x in _deltas(1).items()}
  merged, _ = rule.merge(deltas, _weights(4), rule.init(_params()))
  jax.tree.map(lambda x, d: np.testing.assert_allclose(x, d[0], rtol=1e-5), merged, deltas)


@rules
def test_only_ratios_of_weights_matter(rule):
  deltas, weights, state = _deltas(4), _weights(4), rule.init(_params())
  _assert_bits_equal(
    rule.merge(deltas, weights, state)[0], rule.merge(deltas, 1024 * weights, state)[0]
  )


@rules
def test_the_scale_of_the_deltas_is_the_scale_of_the_result(rule):
  deltas, weights, state = _deltas(4), _weights(4), rule.init(_params())
  scaled = {k: np.float32(2.0**-20) * x for k, x in deltas.items()}
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, 2.0**20 * y, rtol=1e-6),
    rule.merge(deltas, weights, state)[0],
    rule.merge(scaled, weights, state)[0],
  )


@rules
def test_absent_learners_and_zero_deltas_merge_to_zero(rule):
  state = rule.init(_params())
  nothing = {k: np.zeros_like(x) for k, x in _deltas(3).items()}
  for deltas, weights in [(_deltas(3), np.zeros(3, np.float32)), (nothing, _weights(3))]:
    merged, _ = jax.jit(rule.merge)(deltas, weights, state)
    assert all(not np.any(x) for x in merged.values())


# --- each rule -----------------------------------------------------------------------------------


def test_avg_is_the_weighted_mean():
  deltas, weights = _deltas(4), _weights(4)
  merged, _ = jax.jit(merge.avg().merge)(deltas, weights, ())
  for k, x in deltas.items():
    want = np.average(x.astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(merged[k], want, rtol=1e-5, atol=1e-6)


def test_rda_is_the_equation_of_section_4():
  deltas, weights = _deltas(4), _weights(4)
  merged, _ = jax.jit(merge.rda().merge)(deltas, weights, ())
  for k, x in deltas.items():
    v = x.reshape(4, -1).astype(np.float64)
    norms = np.linalg.norm(v, axis=1, keepdims=True)
    u = np.average(v / norms, axis=0, weights=weights)
    want = np.average(norms[:, 0], weights=weights) * u / np.linalg.norm(u)
    np.testing.assert_allclose(merged[k].reshape(-1), want, rtol=1e-4, atol=1e-6)


def test_rda_keeps_the_norm_where_avg_shrinks_it_by_the_root_of_m():
  """Section 4: outer gradients of learners are nearly orthogonal; RDA keeps R for every M."""
  for learners in (2, 4, 16):
    v = np.random.default_rng(learners).standard_normal((learners, 20_000)).astype(np.float32)
    v *= 3.0 / np.linalg.norm(v, axis=1, keepdims=True)
    ones = np.ones(learners, np.float32)
    norm = lambda rule: float(jnp.linalg.norm(rule.merge(v, ones, ())[0]))
    assert norm(merge.rda()) == pytest.approx(3.0, rel=1e-4)
    assert norm(merge.avg()) == pytest.approx(3.0 / learners**0.5, rel=0.05)


def test_rda_ignores_a_learner_that_did_not_move_in_direction_but_not_in_length():
  """phi(0) = 0: a zero delta adds nothing to the direction and weight 0 * w to the radius."""
  v = np.float32([[2.0, 0.0], [0.0, 0.0]])
  merged, _ = merge.rda().merge(v, np.float32([1, 1]), ())
  np.testing.assert_allclose(merged, [1.0, 0.0], rtol=1e-6)


def test_rda_of_cancelling_learners_goes_to_zero_continuously():
  v = lambda eps: np.float32([[1.0, eps], [-1.0, eps]])
  ones = np.ones(2, np.float32)
  norm = lambda eps: float(jnp.linalg.norm(merge.rda().merge(v(eps), ones, ())[0]))
  assert norm(0.0) == 0.0
  assert norm(1e-4) == pytest.approx(1e-2, rel=1e-3)  # u = 1e-4, divided by the floor 1e-2
  assert norm(1e-2) == pytest.approx(1.0, rel=1e-3)


def test_by_label_applies_each_rule_to_its_leaves():
  deltas, weights = _deltas(3), _weights(3)
  rule = _MIXED()
  mixed, _ = rule.merge(deltas, weights, rule.init(_params()))
  for k, label in _LABELS.items():
    alone, _ = RULES[label]().merge({k: deltas[k]}, weights, ())
    _assert_bits_equal(mixed[k], alone[k])


def test_by_label_serves_a_part_of_the_tree_and_names_what_is_missing():
  rule = _MIXED()
  part = {'w': _deltas(2)['w']}
  assert rule.merge(part, _weights(2), rule.init({'w': _params()['w']}))[0].keys() == {'w'}
  with pytest.raises(ValueError, match=r"no label for \['x'\]; labels are given for"):
    rule.init({'x': jnp.zeros(2)})
  with pytest.raises(ValueError, match=r"no rule for labels \['rda'\]; rules are given for \['avg"):
    merge.by_label({'avg': merge.avg()}, _LABELS)


# --- weights -------------------------------------------------------------------------------------


def test_weights_are_quantity_times_quality():
  """Section 4: w = c_tokens * (c_tokens / c_steps)."""
  got = merge.token_weights([1000, 1000, 500], [10, 20, 10])
  assert got.dtype == np.float32 and got.tolist() == [1.0, 0.5, 0.25]


def test_absent_learners_weigh_nothing():
  assert merge.token_weights([0, 5, 0, 7], [0, 0, 3, 7]).tolist() == [0.0, 0.0, 0.0, 1.0]
  assert merge.token_weights([0, 0], [0, 0]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize('tokens', [2**31, 2**53, 2**62])
def test_many_tokens_do_not_overflow(tokens):
  assert merge.token_weights([tokens, tokens // 2], [8, 4]).tolist() == [1.0, 0.5]


# --- every outer optimizer -----------------------------------------------------------------------


@rules
@pytest.mark.parametrize('tx', [outer.make(text) for text in OUTERS], ids=OUTERS)
class TestEveryOuterOptimizer:
  def test_it_is_the_rule_then_the_transform(self, rule, tx):
    outer_opt, params, deltas, weights = (
      outer.outer_optimizer(rule, tx),
      _params(),
      _deltas(3),
      _weights(3),
    )
    new, state, merged = outer_opt.update(deltas, weights, outer_opt.init(params), params)
    want, _ = rule.merge(deltas, weights, rule.init(params))
    _assert_bits_equal(merged, want)
    updates, tx_state = tx.update(want, tx.init(params), params)
    _assert_bits_equal(new, optax.apply_updates(params, updates))
    assert jax.tree.structure(state.tx) == jax.tree.structure(tx_state)

  def test_it_descends_a_parabola_when_learners_do(self, rule, tx):
    """Learners move towards 0 by a tenth each; so must the outer parameters (the sign)."""
    outer_opt, params = outer.outer_optimizer(rule, tx), _params()
    size = lambda tree: float(optax.tree.norm(tree))
    start, state = size(params), outer_opt.init(params)
    step = jax.jit(outer_opt.update)
    for _ in range(60):
      deltas = jax.tree.map(lambda x: jnp.stack([0.1 * x, 0.1 * x]), params)  # anchor - local
      params, state, _ = step(deltas, jnp.ones(2), state, params)
    assert size(params) < 0.2 * start


def test_averaging_with_rate_one_is_the_mean_of_the_learners():
  params = _params()
  locals_M = jax.tree.map(lambda x, d: x[None] - d if x.ndim else x - d, params, _deltas(4))
  deltas = jax.tree.map(lambda x, y: (x[None] if x.ndim else x) - y, params, locals_M)
  outer_opt = outer.outer_optimizer(merge.avg(), optax.sgd(1.0))
  new, _, _ = outer_opt.update(deltas, jnp.ones(4), outer_opt.init(params), params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, jnp.mean(y, 0), rtol=1e-5, atol=1e-6), new, locals_M
  )


def test_nesterov_is_the_equation_of_section_4():
  """b <- mu b + D; Theta <- Theta - lr (D + mu b), with DiLoCo's 0.7 and 0.9."""
  outer_opt = outer.outer_optimizer(merge.avg(), outer.nesterov())
  theta, b = 1.0, 0.0
  params = jnp.float32([theta])
  state = outer_opt.init(params)
  for delta in (0.5, -0.25, 0.125):
    params, state, _ = outer_opt.update(jnp.float32([[delta]]), jnp.ones(1), state, params)
    b = 0.9 * b + delta
    theta -= 0.7 * (delta + 0.9 * b)
    assert float(params[0]) == pytest.approx(theta, rel=1e-6)
