"""The norm of a payload: right for every codec and size, also after a flipped bit.

A flipped bit of one parameter shows in the pseudo-gradient anchor - local as a displacement of that
parameter. With a limit of ten times the usual norm, exactly the displacements beyond it are caught:
those by the upper exponent bits. What passes is no longer than ten honest steps; so passing are all
mantissa and sign bits of ordinary weights (`python -m pytest -s` prints the table).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.numerics import codecs, fragments
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.syncer import global_model, outer_step
from tests.numerics import codecs_numpy

N = 1 << 18  # a fragment of the demo has about as many values
SCALE = 1e-3  # of a displacement after one period
WEIGHTS = (0.02, -0.3, 1.5, 2.4)


def _norm(name: str, data: np.ndarray, n: int = N) -> float:
  """NaN if the syncer takes it for not finite. Two tensors, in several tiles."""
  tree = {key: jax.ShapeDtypeStruct((n // 2,), jnp.float32) for key in 'ab'}
  layout = fragments.make_layout(tree, 1, lambda path: 'rda')
  codec = codecs.get(name)
  lib = _tiles(layout, codec)
  norm = global_model.norm(lib.lengths(0, np.frombuffer(data, np.uint8)))
  return math.nan if norm == screening_lib.NOT_FINITE else norm / screening_lib.UNIT


@functools.cache
def _tiles(layout, codec):
  devices = jax.local_devices(backend='cpu')[:1]
  return outer_step.Tiles(layout, codec, codec, codec, optax.sgd(1.0), devices, tile=3 << 14)


def _measured(name: str, values: np.ndarray) -> float:
  """NaN also if the encoder refuses."""
  data, ok = codecs_numpy.TWINS[name].encode(values)
  return _norm(name, data, len(values)) if ok else math.nan


def _displacements(n: int = N, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).normal(scale=SCALE, size=n).astype(np.float32)


@pytest.mark.parametrize(
  'name, tolerance',
  [('float32', 1e-5), ('bfloat16', 1e-3), ('int8', 1e-2), ('int4', 0.1), ('int2', 0.3)],
)
def test_the_norm_is_that_of_the_values(name, tolerance):
  values = _displacements()
  expected = float(np.linalg.norm(values.astype(np.float64)))
  assert math.isclose(_measured(name, values), expected, rel_tol=tolerance)


def test_no_addend_is_lost_in_a_long_sum():
  """In one float32 sum equal addends stop to count after 2^24 of them."""
  n = 1 << 26
  ones = np.concatenate([np.full(n // 32, 127, np.uint8), np.full(n, 64, np.uint8)])
  assert math.isclose(_norm('int8', ones, n), math.sqrt(n), rel_tol=1e-4)


def test_zeros_have_no_norm():
  assert _measured('int8', np.zeros(N, np.float32)) == 0.0


def _float32(index: int | slice, value: float) -> np.ndarray:
  values = _displacements()
  values[index] = value
  return values.view(np.uint8)


def _scale_of_nan() -> np.ndarray:
  data = np.array(codecs_numpy.TWINS['int8'].encode(_displacements())[0])
  data[7] = 255
  return data


@pytest.mark.parametrize(
  'name, data',
  [
    *(('float32', _float32(N // 3, bad)) for bad in (math.nan, math.inf, -math.inf)),
    ('float32', _float32(N // 3, 1e30)),  # it is finite, its square is not
    ('float32', _float32(slice(None), 1e18)),  # nor is the sum of 2^18 squares
    ('int8', _scale_of_nan()),
  ],
)
def test_what_is_not_finite_behind_the_encoder_makes_the_norm_not_finite(name, data):
  assert math.isnan(_norm(name, data))


def _flipped(weight: float, bit: int) -> float:
  bits = np.float32(weight).view(np.uint32) ^ np.uint32(1 << bit)
  return float(bits.view(np.float32))


@pytest.mark.parametrize('name', ['float32', 'int8'])
@pytest.mark.parametrize('weight', WEIGHTS)
def test_every_flipped_bit_that_matters_is_caught(weight, name):
  limit = 10 * float(np.median([_measured(name, _displacements(seed=s)) for s in range(1, 9)]))
  caught, passed = [], []
  for bit in range(32):
    values = _displacements()
    moved = weight - _flipped(weight, bit)  # anchor - local
    values[12_345] += np.float32(moved)
    norm = _measured(name, values)
    refused = not math.isfinite(norm) or norm > limit
    (caught if refused else passed).append(bit)
    assert refused == (not abs(moved) < limit), (bit, moved, norm, limit)
  print(f'{name} {weight:5}: limit {limit:.2f}, caught bits {caught}, passed {passed}')
  assert set(range(24)) <= set(passed)  # no mantissa bit moves a weight by more than half of it
  assert 31 in passed  # nor does the sign
  exponents = [bit for bit in range(23, 31) if not abs(_flipped(weight, bit)) < limit]
  assert caught == exponents and caught  # all that make it huge, and at least one does
