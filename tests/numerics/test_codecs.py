"""The byte format: golden bytes, two implementations that agree, bounds, and refusals."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from diloco_jax.numerics import codecs
from tests.numerics import codecs_numpy

_N = 64
_QUICK = hypothesis.settings(deadline=None, max_examples=150, derandomize=True)
_FRACTION_BITS = {'int8': 6, 'int4': 2, 'int2': 0}


@functools.cache
def _jitted(name):
  codec = codecs.get(name)
  return jax.jit(codec.encode), jax.jit(codec.decode, static_argnums=1)


def _interesting():
  """Values as bit patterns around every boundary of the format, subnormal to huge."""
  edges = [0, 1, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F7F8000]
  powers = [e << 23 | m for e in range(1, 255) for m in (0, 1, 0x3FFFFF, 0x400000, 0x7FFFFF)]
  bits = np.array(edges + powers, np.uint32)
  return np.concatenate([bits, bits | 0x80000000]).view(np.float32)


def _cases():
  rng = np.random.default_rng(0)
  yield 'normal', rng.standard_normal(4096).astype(np.float32)
  yield 'tiny', (rng.standard_normal(4096) * 1e-6).astype(np.float32)
  yield 'any bits', _finite(rng.integers(0, 2**32, 65536, dtype=np.uint32).view(np.float32))
  yield 'zeros', np.zeros(32, np.float32)
  yield 'minus zeros', -np.zeros(32, np.float32)
  mixed = _interesting()
  yield 'edges together', _padded(mixed)
  yield 'edges, one per block', _padded(np.stack([mixed] + [mixed * 0] * 31, 1).reshape(-1))
  for e in (-126, -124, -123, -122, -120, -119, -118, 0, 127):
    steps = np.arange(-256, 256, dtype=np.float32) / 256  # ties of both integer formats
    yield (
      f'ties at 2^{e}',
      np.concatenate([steps, [1.0], np.zeros(31)]).astype(np.float32) * np.float32(2.0**e),
    )


def _finite(values):
  return np.where(np.isfinite(values), values, np.float32(0))


def _padded(values):
  return np.pad(values, (0, -values.size % 32)).astype(np.float32)


@pytest.mark.parametrize('name', codecs.CODECS)
def test_numpy_and_xla_write_the_same_bytes_and_read_the_same_values(name):
  encode, decode = _jitted(name)
  twin = codecs_numpy.TWINS[name]
  for what, values in _cases():
    data, ok = encode(values)
    want, want_ok = twin.encode(values)
    assert bool(ok) == want_ok, what
    if ok:
      np.testing.assert_array_equal(np.asarray(data), want, err_msg=what)
      assert data.shape == (codecs.get(name).encoded_size(values.size),)
      read, twin_read = np.asarray(decode(data, values.size)), twin.decode(want, values.size)
      np.testing.assert_array_equal(read.view(np.uint32), twin_read.view(np.uint32), err_msg=what)


@pytest.mark.parametrize('name', _FRACTION_BITS)
def test_numpy_and_xla_read_any_bytes_alike(name):
  twin = codecs_numpy.TWINS[name]
  n = 32 * 512
  size = codecs.get(name).encoded_size(n)
  data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
  data[:256] = np.arange(256)  # every exponent byte
  read = np.asarray(_jitted(name)[1](data, n))
  np.testing.assert_array_equal(read, twin.decode(data, n))
  assert np.isnan(read[255 * 32 : 256 * 32]).all() and not np.isnan(read[: 254 * 32]).any()


@_QUICK
@hypothesis.given(
  npst.arrays(np.float32, _N, elements=st.floats(-(2.0**100), 2.0**100, width=32)),
  st.integers(-20, 20),
  st.sampled_from(list(_FRACTION_BITS)),
)
def test_integer_codecs_keep_their_error_bound(values, exponent, name):
  values = codecs_numpy.canonical((values * np.float32(2.0**exponent)).astype(np.float32))
  hypothesis.assume(np.isfinite(values).all())
  f = _FRACTION_BITS[name]
  data, ok = _jitted(name)[0](values)
  read = np.asarray(_jitted(name)[1](data, _N), np.float64)
  assert ok
  for block, got in zip(values.reshape(-1, 32).astype(np.float64), read.reshape(-1, 32)):
    top = np.abs(block).max()
    if top < 2.0 ** (f - 125):
      assert not got.any()
      continue
    step = 2.0 ** (np.floor(np.log2(top)) - f)
    saturated = np.abs(block) > (2 ** (f + 1) - 1) * step
    assert (np.abs(got - block) <= np.where(saturated, step, step / 2)).all()


@pytest.mark.parametrize('name', codecs.CODECS)
def test_decoded_values_encode_to_the_same_bytes(name):
  encode, decode = _jitted(name)
  values = np.random.default_rng(2).standard_normal(_N).astype(np.float32)
  data, _ = encode(values)
  again, ok = encode(decode(data, _N))
  assert ok
  np.testing.assert_array_equal(again, data)


def _golden_values():
  values = np.zeros(64, np.float32)
  values[:8] = [1.0, -1.0, 0.5, 1.999, 1 / 128, 3 / 128, -0.25, 1e-30]
  values[32:35] = [3.0, -3.5, 0.25]
  return values


_READ = {0: [1.0, -1.0, 0.5], 32: [3.0, -3.5]}  # by index, of the golden values


@pytest.mark.parametrize(
  'name, data, read',
  [
    # Exponents 127 (2^0) and 128 (2^1); 1.999 saturates at 127; 1/128 = 0.5 steps -> 0 and
    # 3/128 = 1.5 steps -> 2, both ties to even; -0.25 -> -16 = 0xf0.
    (
      'int8',
      '7f80' + '40c0207f0002f000' + '00' * 24 + '609008' + '00' * 29,
      {**_READ, 3: [1.984375, 0.0, 0.03125, -0.25], 34: [0.25]},
    ),
    # 4, -4, 2, 7 are low nibbles and 0, 0, -1, 0 high ones; then 3.0 / 2 * 4 = 6, -7; 0.5 -> 0.
    (
      'int4',
      '7f80' + '040cf207' + '00' * 12 + '06090000' + '00' * 12,
      {**_READ, 3: [1.75, 0.0, 0.0, -0.25]},
    ),
    # Bytes of elements 0, 4, 8, 12: 1, 0, 1, -1; then -1, 0, -1, 0; 0.5 -> 0, 0, -1, 1; 1, 0, 0, 0.
    (
      'int2',
      '7f80' + 'd1337001' + '00' * 4 + '01030000' + '00' * 4,
      {0: [1, -1, 0, 1, 0, 0, 0, 0, 1, -1, -1, 0, -1, 0, 1], 32: [2, -2, 0]},
    ),
  ],
)
def test_golden_bytes_of_integers(name, data, read):
  values = np.zeros(64, np.float32)
  values[:8] = [1.0, -1.0, 0.5, 1.999, 1 / 128, 3 / 128, -0.25, 1e-30]
  values[32:35] = [3.0, -3.5, 0.25]
  if name == 'int2':
    values[8:15] = [0.51, -0.51, -1.5, 0.0, -1.9, 0.0, 1.0]
  encoded, ok = _jitted(name)[0](values)
  assert bytes(np.asarray(encoded)).hex() == data and ok
  decoded = _jitted(name)[1](encoded, 64)
  for start, expected in read.items():
    assert decoded[start : start + len(expected)].tolist() == expected


def test_golden_bytes_float32_and_bfloat16():
  values = np.zeros(32, np.float32)
  values[:4] = [1.0, -2.5, 1 + 2**-8, -1e-40]  # a tie to even; a subnormal
  for name, expected in (
    ('float32', '0000803f000020c00080803f' + '00' * 116),
    ('bfloat16', '803f20c0803f' + '00' * 58),
  ):
    data, ok = _jitted(name)[0](values)
    assert bytes(np.asarray(data)).hex() == expected and ok


@pytest.mark.parametrize('name', codecs.CODECS)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused_wherever_they_are(name, bad):
  for i in (0, 31, 32, _N - 1):
    values = np.ones(_N, np.float32)
    values[i] = bad
    assert not _jitted(name)[0](values)[1]
    assert not codecs_numpy.TWINS[name].encode(values)[1]


def test_bfloat16_refuses_exactly_what_rounds_to_infinity():
  for value, want in [(0x7F7F7FFF, True), (0x7F7F8000, False)]:
    values = np.zeros(32, np.float32)
    values[5] = np.array([value], np.uint32).view(np.float32)[0]
    for encode in (_jitted('bfloat16')[0], codecs_numpy.TWINS['bfloat16'].encode):
      assert bool(encode(values)[1]) is want
  assert jnp.isinf(jnp.array(values).astype(jnp.bfloat16)).any()


@pytest.mark.parametrize('name', codecs.CODECS)
def test_truncation_at_any_length_is_an_error_with_both_values(name):
  codec = codecs.get(name)
  size = codec.encoded_size(_N)
  for length in [*range(size), size + 1]:
    with pytest.raises(ValueError, match=rf'uint8\[{size}\], got uint8\[{length}\]'):
      codec.decode(np.zeros(length, np.uint8), _N)


def test_wrong_arguments_are_refused():
  codec = codecs.get('int8')
  with pytest.raises(ValueError, match='n is 33, not a multiple of 32'):
    codec.encoded_size(33)
  with pytest.raises(ValueError, match=r'float16\[32\]'):
    codec.encode(jnp.zeros(32, jnp.float16))
  with pytest.raises(ValueError, match=r'float32\[1, 32\]'):
    codec.encode(jnp.zeros((1, 32)))
  with pytest.raises(ValueError, match='int8'):
    codec.decode(jnp.zeros(33, jnp.int8), 32)
  with pytest.raises(
    ValueError, match="'int3' is unknown; use one of: float32, bfloat16, int8, int4, int2"
  ):
    codecs.get('int3')


def test_sizes_in_bytes_per_value():
  sizes = {name: codec.encoded_size(3200) for name, codec in codecs.CODECS.items()}
  assert sizes == {'float32': 12800, 'bfloat16': 6400, 'int8': 3300, 'int4': 1700, 'int2': 900}
  assert codecs.get('int8') is codecs.get('int8')  # static arguments must be equal


def test_canonical_keeps_normal_values_and_removes_the_rest():
  values = np.array([0.0, -0.0, 1e-40, -1e-40, 2.0**-126, -(2.0**-126), 3.5], np.float32)
  want = np.array([0.0, 0.0, 0.0, 0.0, 2.0**-126, -(2.0**-126), 3.5], np.float32)
  for read in (jax.jit(codecs.canonical)(values), codecs_numpy.canonical(values)):
    np.testing.assert_array_equal(np.asarray(read).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize('name', codecs.CODECS)
def test_the_squares_of_a_block_have_the_same_bits_among_any_number_of_blocks(name):
  codec = codecs.get(name)
  squares = jax.jit(codec.squares, static_argnums=1)
  data, _ = _jitted(name)[0](np.random.default_rng(1).standard_normal(1 << 17, np.float32))
  squares_B = np.asarray(squares(data, 1 << 17))
  for n in (32, 7 * 32, 100 * 32, 1 << 14):
    sections = [data[at] for at in codecs.ranges(codec, 1 << 17, 0, n)]
    found_B = np.asarray(squares(jnp.concatenate(sections), n))
    np.testing.assert_array_equal(found_B.view(np.uint32), squares_B[: n // 32].view(np.uint32))
