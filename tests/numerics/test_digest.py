"""The digest: equal on both twins, different for different values."""

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import digest as digest_lib
from tests.numerics import codecs_numpy


def _values(n=1000):
  return np.random.default_rng(0).standard_normal(n).astype(np.float32)


def test_numpy_and_xla_agree():
  rng = np.random.default_rng(1)
  for values in (_values(), _values(0), rng.integers(0, 2**32, 4096, np.uint32).view(np.float32)):
    got = jax.jit(digest_lib.digest)(values)
    assert got.shape == (2,) and got.dtype == jnp.uint32
    np.testing.assert_array_equal(got, codecs_numpy.digest(values))


def test_the_checked_digest_finds_each_value_that_is_not_finite():
  checked = jax.jit(digest_lib.digest_and_check)
  values, others = _values(96), [_values(96), _values(96)]
  got, finite = checked(values, 5, 90, others)
  np.testing.assert_array_equal(got, jax.jit(digest_lib.digest)(values, 5, 90))
  assert finite
  for which, place in ((0, 0), (1, 95), (2, 40)):
    for wrong in (np.inf, -np.inf, np.nan, -np.float32(np.nan)):
      vectors = [values.copy(), *map(np.copy, others)]
      vectors[which][place] = wrong
      assert not checked(vectors[0], 5, 90, vectors[1:])[1]


def test_every_changed_bit_and_every_swap_changes_both_words():
  values = _values(64)
  base = codecs_numpy.digest(values)
  for bit in range(32):
    changed = values.copy()
    changed.view(np.uint32)[17] ^= np.uint32(1 << bit)
    assert (codecs_numpy.digest(changed) != base).all()
  for i in range(63):
    swapped = values.copy()
    swapped[[i, i + 1]] = swapped[[i + 1, i]]
    assert (codecs_numpy.digest(swapped) != base).all()


def test_padding_is_not_invisible():
  """Two vectors of different length but equal values do not share a digest."""
  short, long = _values(32), np.pad(_values(32), (0, 32))
  assert (codecs_numpy.digest(short) != codecs_numpy.digest(long)).any()


def test_the_sharding_does_not_matter():
  values = _values(64 * len(jax.devices()))
  mesh = jax.make_mesh((len(jax.devices()),), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.device_put(values, jax.sharding.NamedSharding(mesh, jax.P('x')))
  np.testing.assert_array_equal(jax.jit(digest_lib.digest)(sharded), codecs_numpy.digest(values))
