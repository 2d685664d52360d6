"""The numpy twins of numerics/codecs.py and digest.py: a second implementation of their formats.

Where codecs.py works on exponent bits, this file uses frexp and ldexp, so that the test of equal
bytes compares two readings of the specification and not one with itself. A new codec has its twin
in TWINS.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_BLOCK = 32
_TINY = np.float32(2.0**-126)  # the least normal float


def canonical(values: np.ndarray) -> np.ndarray:
  """Zeros and subnormals as +0."""
  return np.where(np.abs(values) < _TINY, np.float32(0), values)


def digest(values_N: np.ndarray) -> np.ndarray:
  """The digest of numerics/digest.py."""
  bits = np.ascontiguousarray(values_N, np.float32).view(np.uint32)
  i = np.arange(bits.size, dtype=np.uint32)
  mixed = bits + np.uint32(0x9E3779B9) * (i + 1)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
    mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
  return np.stack([np.sum(bits * (2 * i + 1), dtype=np.uint32), np.sum(mixed, dtype=np.uint32)])


def _encode_float32(values: np.ndarray) -> tuple[np.ndarray, bool]:
  return canonical(values).astype('<f4').view(np.uint8), bool(np.isfinite(values).all())


def _decode_float32(data: np.ndarray, n: int) -> np.ndarray:
  return data.view('<f4').astype(np.float32).reshape(n)


def _encode_bfloat16(values: np.ndarray) -> tuple[np.ndarray, bool]:
  bits = canonical(values).view(np.uint32)
  upper, dropped = bits >> 16, bits & 0xFFFF
  up = (dropped > 0x8000) | ((dropped == 0x8000) & (upper % 2 == 1))
  rounded = (upper + up).astype(np.uint32)
  ok = np.isfinite((rounded << 16).view(np.float32)) & np.isfinite(values)
  return rounded.astype('<u2').view(np.uint8), bool(ok.all())


def _decode_bfloat16(data: np.ndarray, n: int) -> np.ndarray:
  return (data.view('<u2').astype(np.uint32) << 16).view(np.float32).reshape(n)


def _encode_int(bits: int, fraction_bits: int, values: np.ndarray) -> tuple[np.ndarray, bool]:
  ok = bool(np.isfinite(values).all())
  blocks = np.where(np.isfinite(values), values, np.float32(0)).reshape(-1, _BLOCK)
  largest_v = np.abs(blocks).max(axis=1)
  exponents = np.frexp(largest_v)[1] + 126  # frexp's mantissa is in [1/2, 1)
  exponents = np.where((exponents > fraction_bits + 1) & (largest_v > 0), exponents, 0)
  shifts = (127 + fraction_bits - exponents)[:, None].astype(np.int32)
  live = exponents[:, None] > 0
  scaled = np.ldexp(np.where(live, blocks, np.float32(0)), shifts)
  largest = 2 ** (fraction_bits + 1) - 1
  q = np.clip(np.rint(scaled), -largest, largest).astype(np.int32)
  digits = (q % 2**bits).reshape(-1, 8 // bits, 4 if bits < 8 else 1).astype(np.uint8)
  elements = sum(digits[:, k] * 2 ** (bits * k) for k in range(8 // bits)).astype(np.uint8)
  return np.concatenate([exponents.astype(np.uint8), elements.reshape(-1)]), ok


def _decode_int(bits: int, fraction_bits: int, data: np.ndarray, n: int) -> np.ndarray:
  exponents = data[: n // _BLOCK].astype(np.int32)
  lanes = data[n // _BLOCK :].reshape(-1, 1, 4 if bits < 8 else 1)
  digits = lanes // 2 ** (bits * np.arange(8 // bits)[:, None]) % 2**bits
  q = digits - 2**bits * (digits >= 2 ** (bits - 1))
  blocks = q.reshape(-1, _BLOCK).astype(np.float32)
  live = (exponents > fraction_bits + 1)[:, None]
  shifts = (exponents - 127 - fraction_bits)[:, None]
  with np.errstate(over='ignore'):  # -2^128: an element below -Q, which no encoder writes
    values = np.ldexp(np.where(live, blocks, np.float32(0)), np.where(live, shifts, 0))
  return np.where((exponents == 255)[:, None], np.float32(np.nan), values).reshape(n)


class Twin(NamedTuple):
  """float32[n] -> (uint8[...], ok), and back."""

  encode: Callable[[np.ndarray], tuple[np.ndarray, bool]]
  decode: Callable[[np.ndarray, int], np.ndarray]


TWINS = {
  'float32': Twin(_encode_float32, _decode_float32),
  'bfloat16': Twin(_encode_bfloat16, _decode_bfloat16),
  'int8': Twin(functools.partial(_encode_int, 8, 6), functools.partial(_decode_int, 8, 6)),
  'int4': Twin(functools.partial(_encode_int, 4, 2), functools.partial(_decode_int, 4, 2)),
  'int2': Twin(functools.partial(_encode_int, 2, 0), functools.partial(_decode_int, 2, 0)),
}
