"""Codecs turn a flat fragment into bytes. This docstring is the byte format.

The values are v[0..n), float32, n a multiple of 32. All numbers are little endian. The bytes have
no frame: the message's header has name and n, so a payload of any other length is an error.

  float32    4n bytes: the IEEE bits of each value.
  bfloat16   2n bytes: the upper 16 of the 32 bits, rounded to nearest, ties to even.
  int8       n/32 exponent bytes, then n element bytes (1.03 bytes per value).
  int4, int2 n/32 exponent bytes, then n/2 or n/4 element bytes (0.53 and 0.28 bytes per value).
             Four bytes hold 8 or 16 elements: byte k, from its low bits on, elements k, k+4, ...

float32 and bfloat16: zeros and subnormals are written as +0 (`canonical`), before rounding.

The integers follow the OCP Microscaling layout (MX v1.0; int8 is its MXINT8, int4 and int2 the same
idea with fewer bits). Block b = v[32b .. 32b+32) shares the scale 2^(E[b] - 127); its exponent byte
E[b] is the biased exponent field of the block's largest |v|, so that max|v| / scale is in [1, 2).
An element is a two's complement integer q with f fraction bits, f = 6 for int8, 2 for int4, 0 for
int2:

  q = min(max(rint(v / 2^(E - 127) * 2^f), -Q), Q)      Q = 2^(f+1) - 1: 127, 7 and 1
  v' = q * 2^(E - 127 - f)

rint rounds ties to even. Hence |v' - v| <= 2^(E - 127 - f), half of that where q is not at +-Q.
A block whose E would be <= f + 1 (max|v| < 2^-119, 2^-123 and 2^-125) has E = 0 and q = 0.
A decoder reads any E <= f + 1 as zeros and E = 255 as NaN; no encoder writes 1..f+1, 255 or q < -Q.

Reasons. A product with a power of two is exact as long as nothing is subnormal, and the bound
f + 1 guarantees that (a subnormal v beside a normal E rounds to q = 0 whether or not the machine
flushes it). So XLA on any backend and numpy give the same bytes and the same values, and it does
not matter whether a compiler fuses `anchor + q * scale` into a multiply-add: learners and syncer
hold the same bits of a published value. (Scales of max/127 differed between XLA and numpy in 5 % of
the blocks.)

The encoder also returns `ok`: false iff a value is NaN or Inf, or, for bfloat16, would round to
Inf (|v| >= 2^128 - 2^119). The bytes are then unspecified and must not be sent.

A new codec is a record in CODECS, with two limits: the size of a payload follows from n alone (the
syncer stacks the payloads of a fragment), and the encoder has no state. So top-k does not fit, nor
do signs with error feedback on the learner.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 32

_NAN_BITS = 0x7FC00000
_INF_BITS = 0x7F800000
_BFLOAT16_INF_BITS = 0x7F7F8000  # the least magnitude that rounds to Inf
_ROUNDING_BITS = 0x4BC00000  # of 1.5 * 2^24; beside it the last bit of a float32 is 2


class Codec(NamedTuple):
  """A pair of pure functions between values and bytes; hashable, a static argument for jit.

  Attributes:
    name: one of CODECS.
    sections: a payload is so many sections, one after the other; the bytes of a block in each.
    encoded_size: n -> the number of bytes of n values.
    to_sections: float32[n] -> (the sections, uint8 each, ok).
    decode: (uint8[encoded_size(n)], n) -> float32[n].
    squares: (uint8[encoded_size(n)], n) -> float32[n/32], the sum of squares of each block; it is
      not finite if one of the values is not, or if a square overflows.
  """

  name: str
  sections: tuple[int, ...]
  encoded_size: Callable[[int], int]
  to_sections: Callable[[Any], tuple[tuple[Any, ...], Any]]
  decode: Callable[[Any, int], Any]
  squares: Callable[[Any, int], Any]

  def encode(self, values: Any) -> tuple[Any, Any]:
    """float32[n] -> (uint8[encoded_size(n)], ok). XLA's CPU backend computes the values one by one
    inside the concatenation, 8 times slower: what is to be fast uses sections."""
    sections, ok = self.to_sections(values)
    return jnp.concatenate(sections), ok

  def encode_into(self, data: Any, n: int, start: int | jax.Array, values: Any) -> tuple[Any, Any]:
    """Encodes values [start, start + len(values)) of a payload of n values where they are in
    `data`, uint8[encoded_size(n)]; returns it and ok. All three are multiples of BLOCK."""
    sections, ok = self.to_sections(values)
    section = 0
    for width, elements in zip(self.sections, sections):
      at = section + start // BLOCK * width
      data = jax.lax.dynamic_update_slice(data, elements, (at,))
      section += n // BLOCK * width
    return data, ok

  def decode_sections(self, sections: Sequence[Any], n: int) -> Any:
    """As `decode`; inside jit nothing is copied to join them."""
    return self.decode(jnp.concatenate(sections), n)

  def decode_range(self, data: Any, n: int, start: int, stop: int) -> Any:
    """Values [start, stop) of a payload of n values."""
    parts = [part(data, at.start, at.stop - at.start) for at in ranges(self, n, start, stop)]
    return self.decode_sections(parts, stop - start)


def get(name: str) -> Codec:
  """The codec of that name, for use inside jit. Raises ValueError.

  >>> codec = get('int8')
  >>> data, ok = codec.encode(jnp.linspace(-1, 1, 32, dtype=jnp.float32))
  >>> data.shape, bool(ok), codec.encoded_size(32)
  ((33,), True, 33)
  >>> float(codec.decode(data, 32)[-1])
  1.0
  """
  if name not in CODECS:
    raise ValueError(f'{name!r} is unknown; use one of: {", ".join(CODECS)}')
  return CODECS[name]


def ranges(codec: Codec, n: int, start: int, stop: int) -> list[slice]:
  """The bytes of values [start, stop) in a payload of n values, one slice of each section. In this
  order they are the payload of these values alone. All three are multiples of BLOCK.

  >>> ranges(get('int8'), n=320, start=64, stop=128)
  [slice(2, 4, None), slice(74, 138, None)]
  """
  slices, section = [], 0
  for width in codec.sections:
    first, last = start // BLOCK * width, stop // BLOCK * width
    slices.append(slice(section + first, section + last))
    section += n // BLOCK * width
  return slices


def part(values_n: jax.Array, start: int | jax.Array, size: int) -> jax.Array:
  """`values_n[start:start + size]`, of which the compiler does not know the start.

  Else XLA's TPU backend turns the reshape of a slice into a slice of the whole vector, reshaped and
  padded up to 256 times: adopt compiled for minutes at 0.2M values, and at 27M without an end.
  """
  at = jax.lax.optimization_barrier(jnp.int32(start))
  return jax.lax.dynamic_slice_in_dim(values_n, at, size)


def spread(blocks_B: jax.Array) -> jax.Array:
  """The number of each block for each of its values: [n/32] -> [n]. The flat result, not one of two
  axes, is what a compiler turns into vector instructions."""
  return jnp.broadcast_to(blocks_B[:, None], (blocks_B.shape[0], BLOCK)).reshape(-1)


def canonical(values: jax.Array) -> jax.Array:
  """Float32 values with every zero and subnormal replaced by +0.

  Some backends flush subnormals and some do not; a published value is canonical so that learners
  and syncer hold the same bits. The test is on the bits, because a flushing backend sees no
  difference.
  """
  bits = _bits(values)
  return jnp.where(bits & 0x7FFFFFFF < 0x00800000, jnp.float32(0), values)


def mask_bits(values: jax.Array, mask: jax.Array) -> jax.Array:
  """Float32 values with these of their bits."""
  return _from_bits(_bits(values) & mask)


# --- float32, bfloat16 ---------------------------------------------------------------------------


def _encode_float32(values: jax.Array) -> tuple[tuple[jax.Array], jax.Array]:
  values = canonical(values)
  data = jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(-1)
  return (data,), jnp.all(_magnitude(values) < _INF_BITS)


def _decode_float32(data: jax.Array, n: int) -> jax.Array:
  return jax.lax.bitcast_convert_type(data.reshape(n, 4), jnp.float32)


def _encode_bfloat16(values: jax.Array) -> tuple[tuple[jax.Array], jax.Array]:
  values = canonical(values)
  bits = _bits(values)
  # Adding just under half of the dropped part, or half if the kept part is odd: ties to even.
  upper = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
  data = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.uint8).reshape(-1)
  return (data,), jnp.all(_magnitude(values) < _BFLOAT16_INF_BITS)


def _decode_bfloat16(data: jax.Array, n: int) -> jax.Array:
  upper = jax.lax.bitcast_convert_type(data.reshape(n, 2), jnp.uint16)
  return jax.lax.bitcast_convert_type(upper.astype(jnp.uint32) << 16, jnp.float32)


# --- int8, int4, int2 ----------------------------------------------------------------------------


def _encode_int(
  bits: int, fraction_bits: int, values: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
  exponents = jnp.max(_magnitude(values).reshape(-1, BLOCK), axis=1) >> 23
  is_normal = exponents > fraction_bits + 1
  twice = jnp.where(is_normal, (255 + fraction_bits - exponents) << 23, jnp.uint32(0))
  # The sum has no bit for less than 2, so it rounds, ties to even, to where q is in its last bits.
  # XLA's CPU backend needs half as long for that as for a rounding and a conversion.
  sums = _bits(values * spread(_from_bits(twice)) + _from_bits(jnp.uint32(_ROUNDING_BITS)))
  q = jax.lax.bitcast_convert_type(sums, jnp.int32) - _ROUNDING_BITS
  largest = 2 ** (fraction_bits + 1) - 1
  elements = _pack(bits, jnp.clip(q, -largest, largest))
  return (jnp.where(is_normal, exponents, 0).astype(jnp.uint8), elements), jnp.all(exponents < 255)


def _pack(bits: int, q: jax.Array) -> jax.Array:
  """int32[n] -> the element bytes. A sum of lanes is what XLA's CPU backend turns into vector
  instructions; slices of lanes take it 5 times as long."""
  if bits == 8:
    return jax.lax.bitcast_convert_type(q.astype(jnp.int8), jnp.uint8)
  lanes = jax.lax.bitcast_convert_type(q, jnp.uint32).reshape(-1, 8 // bits, 4)
  shifts = bits * jax.lax.broadcasted_iota(jnp.uint32, (1, 8 // bits, 1), 1)
  lanes = (lanes & (2**bits - 1)) << shifts
  return jnp.sum(lanes, axis=1, dtype=jnp.uint32).astype(jnp.uint8).reshape(-1)


def _unpack(bits: int, elements: jax.Array) -> jax.Array:
  """The inverse: int32[n]. Shifting right keeps the signs."""
  if bits == 8:
    return jax.lax.bitcast_convert_type(elements, jnp.int8).astype(jnp.int32)
  words = jax.lax.bitcast_convert_type(elements.reshape(-1, 4), jnp.int32)
  i = jax.lax.iota(jnp.int32, 32 // bits)
  shifts = 32 - bits - bits * (i // 4) - 8 * (i % 4)
  return (words[:, None] << shifts[None] >> 32 - bits).reshape(-1)


def _decode_int(bits: int, fraction_bits: int, data: jax.Array, n: int) -> jax.Array:
  q = _unpack(bits, data[n // BLOCK :])
  return q.astype(jnp.float32) * spread(_scales(fraction_bits, data, n))


def _squares_int(bits: int, fraction_bits: int, data: jax.Array, n: int) -> jax.Array:
  # In whatever order they are in a block, which is two axes here: XLA's CPU backend turns that into
  # vector instructions, 3 times faster.
  read = jax.lax.bitcast_convert_type(data[n // BLOCK :], jnp.int8).astype(jnp.int32)
  squares = sum(jnp.square(read << 32 - top >> 32 - bits) for top in range(bits, 9, bits))
  sums_B = jnp.sum(squares.reshape(-1, 2 * bits, 2), axis=(1, 2)).astype(jnp.float32)
  scale_B = _scales(fraction_bits, data, n)
  return sums_B * scale_B * scale_B


def _scales(fraction_bits: int, data: jax.Array, n: int) -> jax.Array:
  """The scale of the last bit of each block, float32[n/32]."""
  exponents = data[: n // BLOCK].astype(jnp.uint32)
  scale = jnp.where(exponents > fraction_bits + 1, (exponents - fraction_bits) << 23, jnp.uint32(0))
  return _from_bits(jnp.where(exponents == 255, jnp.uint32(_NAN_BITS), scale))


def squares_of(values_N: jax.Array) -> jax.Array:
  """The sum of squares of each block, float32[n/32]."""
  return products_of(values_N, values_N)


def products_of(a_N: jax.Array, b_N: jax.Array) -> jax.Array:
  """The sum of the products of each block, float32[n/32].

  Halves are added to halves, because a compiler chooses the order of a reduction, and its choice
  changes with n. Behind a bitcast a reduction is 8 times slower on XLA's CPU backend, too.
  """
  sums = (a_N * b_N).reshape(-1, BLOCK)
  while half := sums.shape[1] // 2:
    sums = sums[:, :half] + sums[:, half:]
  return sums[:, 0]


def _bits(values: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(values, jnp.uint32)


def _magnitude(values: jax.Array) -> jax.Array:
  """The bits of |v|: as integers they are ordered like the magnitudes, Inf and NaN on top."""
  return _bits(values) & 0x7FFFFFFF


def _from_bits(bits: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


# --- checked, by name ----------------------------------------------------------------------------


def _checked(
  name: str,
  sections: tuple[int, ...],
  encode: Callable[..., Any],
  decode: Callable[..., Any],
  squares: Callable[..., Any] | None = None,
) -> Codec:
  """A codec that refuses arrays of the wrong size."""

  def size(n: int) -> int:
    if n % BLOCK or n < 0:
      raise ValueError(f'codec {name}: n is {n}, not a multiple of {BLOCK}; pad the values with 0')
    return n // BLOCK * sum(sections)

  def checked_encode(values_N: Any) -> tuple[Any, Any]:
    if values_N.ndim != 1 or values_N.dtype != 'float32':
      raise ValueError(
        f'codec {name}: encode takes float32[n], got {values_N.dtype}{list(values_N.shape)}'
      )
    size(values_N.shape[0])
    return encode(values_N)

  def checked(read: Callable[..., Any], data: Any, n: int) -> Any:
    if data.shape != (size(n),) or data.dtype != 'uint8':
      raise ValueError(
        f'codec {name}: {n} values are uint8[{size(n)}], got {data.dtype}{list(data.shape)}; '
        'the payload is truncated or of another codec or fragment'
      )
    return read(data, n)

  squares = squares or (lambda data, n: squares_of(decode(data, n)))
  reads = (functools.partial(checked, read) for read in (decode, squares))
  return Codec(name, sections, size, checked_encode, *reads)


def _integers(name: str, bits: int, fraction_bits: int) -> Codec:
  parts = (_encode_int, _decode_int, _squares_int)
  return _checked(
    name, (1, BLOCK * bits // 8), *(functools.partial(part, bits, fraction_bits) for part in parts)
  )


CODECS = {
  codec.name: codec
  for codec in (
    _checked('float32', (4 * BLOCK,), _encode_float32, _decode_float32),
    _checked('bfloat16', (2 * BLOCK,), _encode_bfloat16, _decode_bfloat16),
    _integers('int8', 8, fraction_bits=6),
    _integers('int4', 4, fraction_bits=2),
    _integers('int2', 2, fraction_bits=0),
  )
}
