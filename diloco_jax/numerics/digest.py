"""Digest: 64 bits that show whether learner and syncer hold the same published value.

For a vector v of n float32 values with bit patterns b_i, all arithmetic modulo 2^32:

  digest[0] = sum_i  b_i * (2 i + 1)
  digest[1] = sum_i  mix(b_i + 0x9E3779B9 * (i + 1))

with mix the finalizer of MurmurHash3 (a bijection). Both terms are bijections of b_i, so changing
one value always changes both words; the position enters both, so a swap changes them too. Integer
sums do not depend on their order: any sharding, backend or loop gives the same numbers. The digest
guards against mistakes and faults, not against an adversary.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = 0x9E3779B9
_INFINITY = 0x7F800000  # bits


def digest(
  values_n: jax.Array, first: jax.Array | int = 0, count: jax.Array | int | None = None
) -> jax.Array:
  """The digest of float32[n] as uint32[2]; for use inside jit.

  Of a vector that is cut into tiles it is the sum, modulo 2^32, of the digests of the tiles.
  `first` is the index of a tile's first value; from `count` values on, the tile is padding.

  >>> digest(jnp.float32([1.0, -2.5])).tolist()
  [2145386496, 4274141047]
  """
  return _sums(_terms(values_n, first, count))


def at(values: jax.Array, indices: jax.Array) -> jax.Array:
  """The share of some values, float32 of any shape, in the digest of their vector, in which they
  have these indices, uint32 of the same shape."""
  return _sums(_pair(_bits(values), indices))


def digest_and_check(
  values_n: jax.Array,
  first: jax.Array | int,
  count: jax.Array | int | None,
  others: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """(the digest, whether these n values and all n of each of `others` are finite), in one
  reduction; otherwise as `digest`."""
  magnitudes = [_bits(one_n) & 0x7FFFFFFF for one_n in (values_n, *others)]
  terms = *_terms(values_n, first, count), functools.reduce(jnp.maximum, magnitudes)
  add = lambda a, b: (a[0] + b[0], a[1] + b[1], jnp.maximum(a[2], b[2]))
  zero = jnp.uint32(0)
  low, high, largest = jax.lax.reduce(terms, (zero, zero, zero), add, (0,))
  return jnp.stack([low, high]), largest < _INFINITY


def _sums(terms: tuple[jax.Array, jax.Array]) -> jax.Array:
  # One reduction of a pair: XLA's CPU backend turns two sums into scalar loops, 20 times slower.
  add = lambda a, b: (a[0] + b[0], a[1] + b[1])
  zero = jnp.uint32(0)
  axes = tuple(range(terms[0].ndim))
  return jnp.stack(jax.lax.reduce(terms, (zero, zero), add, axes))


def _terms(
  values_n: jax.Array, first: jax.Array | int, count: jax.Array | int | None
) -> tuple[jax.Array, jax.Array]:
  bits, index = _bits(values_n), jax.lax.iota(jnp.uint32, values_n.shape[0])
  terms = _pair(bits, index + jnp.asarray(first, jnp.uint32))
  if count is None:
    return terms
  return tuple(jnp.where(index < count, term, jnp.uint32(0)) for term in terms)


def _pair(bits: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
  return bits * (2 * i + 1), mixed(bits, i)


def _bits(values: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(values, jnp.uint32)


def mixed(bits: Any, i: Any) -> Any:
  """The terms of the second word for the indices i; both uint32, of jax or of numpy."""
  h = bits + np.uint32(_GOLDEN) * (i + np.uint32(1))
  h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
  return h ^ (h >> 16)


def as_int(digest: jax.Array) -> int:
  """The digest's two uint32 as one integer."""
  low, high = (int(word) for word in np.asarray(digest))
  return high << 32 | low
