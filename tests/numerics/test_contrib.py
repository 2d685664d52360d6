"""One battery for every outer optimizer: some outer steps of learners of which one is old. Then the
equations of numerics/contrib."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.numerics import fragments, merge, outer
from diloco_jax.numerics.contrib import aged
from tests.syncer import one_fragment

_PERIOD, _SYNCS, _LEARNERS = 12, 6, 3
_STEPS = np.array([12, 11, 30])  # the last learner has missed a sync
_TOKENS = 100 * _STEPS
_SHAPES = {'w': (8, 24), 'scale': (5,), 'bias': ()}

names = pytest.mark.parametrize('name', outer.OUTERS)


@functools.cache
def _layout():
  tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in _SHAPES.items()}
  return fragments.make_layout(tree, 1, lambda path: 'rda')


def _fragment(name):
  zeros_N = np.zeros(_layout().size(0), np.float32)
  return one_fragment.Fragment(_layout(), 0, zeros_N, {'rda': merge.rda()}, outer.make(name))


def _deltas(scale=1.0):
  rng = np.random.default_rng(0)
  draw = lambda shape: scale * rng.standard_normal((_LEARNERS, *shape)).astype(np.float32)
  syncs = ({f'{k}[0:{(*s, 1)[0]}]': draw(s) for k, s in _SHAPES.items()} for _ in range(_SYNCS))
  join = lambda deltas, m: fragments.join(_layout(), 0, {k: x[m] for k, x in deltas.items()})
  return [np.stack([join(deltas, m) for m in range(_LEARNERS)]) for deltas in syncs]


def _train(name, syncs, tokens=_TOKENS, steps=_STEPS, start=None):
  """The arrays of the fragment after these syncs."""
  one = _fragment(name)
  if start is not None:
    one.restore(start)
  weights = merge.token_weights(tokens, steps)
  for deltas_MxN in syncs:
    assert one.merge(deltas_MxN, weights) is not None
  return one.whole


def _assert_bits_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _assert_close(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)


# --- every outer optimizer ------------------------------------------------------------------------


@names
def test_the_scale_of_the_deltas_is_the_scale_of_the_way_made(name):
  moved, scaled = _train(name, _deltas()), _train(name, _deltas(2.0**-20))
  _assert_close(moved.master_n, 2.0**20 * scaled.master_n)


@names
def test_a_restart_between_two_syncs_changes_no_bit(name):
  syncs = _deltas()
  again = _train(name, syncs[3:], start=_train(name, syncs[:3]))
  _assert_bits_equal(_train(name, syncs), again)


@names
@pytest.mark.parametrize('scale', [0.0, 1e-30, 1e15])
def test_the_result_is_finite(name, scale):
  ancient = _train(name, _deltas(scale), steps=np.array([1, 10**6, 10**6]))
  for leaf in jax.tree.leaves((_train(name, _deltas(scale)), ancient)):
    assert np.isfinite(leaf).all()


# --- age-aware weights ---------------------------------------------------------------------------


def test_a_learner_counts_less_the_older_its_anchor_is():
  weights = lambda steps, slow: merge.token_weights(
    [100, 100, 0], steps, aged.factors(steps, _PERIOD, [slow] * 3)
  )
  np.testing.assert_array_equal(weights([12, 24, 0], False), np.float32([1, 0.5, 0]))  # the paper's
  np.testing.assert_array_equal(weights([12, 24, 0], True), np.float32([1, 0.25, 0]))
  np.testing.assert_array_equal(weights([6, 12, 0], True), np.float32([1, 0.5, 0]))  # none is old


def test_one_without_company_counts_in_full_at_any_age():
  steps = [0, 10**9, 0]
  assert aged.factors(steps, _PERIOD, [True] * 3).tolist() == [1, 1, 1]
  assert aged.factors([0, 0], _PERIOD, [True] * 2).tolist() == [1, 1]
