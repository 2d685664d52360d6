"""Checks of a merge rule or an outer optimizer of your own, for a test of yours:

    from diloco_jax import testing

    def test_my_rule():
      testing.check_merge_rule('my_package.rules:mine(a=1)')  # or a MergeRule

They raise AssertionError, with the sentence that does not hold. A rule that does not pass may still
be right, but the syncer's screening, its log and its tiles expect what they check.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.numerics import merge, outer

_SHAPES = {'embed': (16, 4), 'w': (8, 24), 'scale': (5,), 'bias': ()}
_SMALL = 2.0**-20


def check_merge_rule(rule: str | merge.MergeRule) -> None:
  """Raises AssertionError, or ValueError for a wrong spec."""
  rule = merge.make(rule) if isinstance(rule, str) else rule
  rng = np.random.default_rng(1)
  deltas = {name: rng.standard_normal((4, *shape)) for name, shape in _SHAPES.items()}
  weights = rng.uniform(1, 1000, 4)
  usual = merge_deltas(rule, deltas, weights)
  part = lambda function: {name: function(x) for name, x in deltas.items()}
  for what, other, its_weights, scale in (
    ('a lone learner merges to its own delta', part(lambda x: x[:1]), weights[:1], None),
    ('equal deltas merge to themselves', part(lambda x: np.stack([x[0]] * 4)), weights, None),
    ('only ratios of weights matter', deltas, 1024 * weights, 1.0),
    ('the scale of deltas is that of the result', part(lambda x: _SMALL * x), weights, _SMALL),
    ('deltas of zeros merge to zeros', part(np.zeros_like), weights, 0.0),
  ):
    for name, value in merge_deltas(rule, other, its_weights).items():
      expected = deltas[name][0].reshape(-1) if scale is None else scale * usual[name]
      assert np.allclose(value, expected, rtol=1e-9, atol=1e-12 * (scale or 1)), f'{what}: {name}'


def merge_deltas(
  rule: merge.MergeRule, deltas: dict[str, np.ndarray], weights: np.ndarray
) -> dict[str, np.ndarray]:
  """The outer gradient of deltas, whose first axis is that of the learners, tensor by tensor."""
  rows = {name: np.reshape(x, (len(x), -1)) for name, x in deltas.items()}
  lengths_MxT = np.stack([np.linalg.norm(x, axis=1) for x in rows.values()], axis=1)
  units = [x / np.where(r > 0, r, 1)[:, None] for x, r in zip(rows.values(), lengths_MxT.T)]
  cosines = np.stack([unit @ unit.T for unit in units], axis=2) if rule.cosines else None
  seen = merge.Rows(merge.shares(weights), lengths_MxT, cosines)
  factors_MxT = rule.factors(seen)
  assert factors_MxT.shape == lengths_MxT.shape, 'factors are [M, T]'
  totals = [factors_MxT[:, t] @ x for t, x in enumerate(rows.values())]
  stretch_T = rule.stretch(seen, np.array([np.linalg.norm(total) for total in totals]))
  assert stretch_T.shape == lengths_MxT.shape[1:], 'the stretch is [T]'
  return {name: factor * total for name, factor, total in zip(rows, stretch_T, totals)}


def check_outer(optimizer: str | optax.GradientTransformation) -> None:
  """Raises AssertionError, or ValueError for a wrong spec."""
  tx = outer.make(optimizer) if isinstance(optimizer, str) else optimizer
  draw = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
  update = jax.jit(tx.update)

  def train(gradients_n: np.ndarray, params_n: jax.Array, state: object) -> tuple:
    for gradient_n in gradients_n:
      updates_n, state = update(jnp.asarray(gradient_n), state, params_n)
      params_n = optax.apply_updates(params_n, updates_n)
    return params_n, state

  begin = lambda size: (jnp.ones(size), tx.init(jnp.ones(size)))
  for scale in (0.0, 1e-30, 1.0, 1e15):
    for leaf in jax.tree.leaves(train(scale * draw, *begin(64))):
      assert np.isfinite(leaf).all(), f'gradients of {scale:g} have a finite result'
  whole, half = train(draw, *begin(64)), train(draw[:3], *begin(64))
  again = train(draw[3:], *jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), half))
  same = jax.tree.map(lambda a, b: np.array_equal(a, b), whole, again)
  assert all(jax.tree.leaves(same)), 'a restart from saved arrays changes no bit'
  assert train(draw, *begin(64))[0] @ draw.sum(axis=0) < jnp.ones(64) @ draw.sum(axis=0), (
    'it descends along the gradients'
  )
  if outer.elementwise(tx):
    tile = train(draw[:, :32], *begin(32))[0]
    assert np.array_equal(tile, whole[0][:32]), 'a tile of an elementwise one is that of the whole'
