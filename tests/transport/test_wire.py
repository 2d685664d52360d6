"""The checksum detects every error of a Control stream."""

import zlib

import pytest

from diloco_jax.transport import wire

ENVELOPES = (b'first', b'2', b'third envelope')


def sealed() -> list[bytes]:
  seal = wire.Seal()
  return [seal.close(envelope) for envelope in ENVELOPES]


def opened(stream: list[bytes]) -> list[bytes]:
  seal = wire.Seal()
  return [seal.open(data) for data in stream]


def test_a_correct_stream_opens():
  assert tuple(opened(sealed())) == ENVELOPES


def test_golden_bytes():
  crc32 = zlib.crc32(b'first').to_bytes(4, 'little')
  assert sealed()[0] == b'first' + bytes([15 << 3 | 5]) + crc32


def test_every_flipped_bit_is_detected():
  stream = sealed()
  for which, data in enumerate(stream):
    for bit in range(8 * len(data)):
      flipped = bytearray(data)
      flipped[bit // 8] ^= 1 << bit % 8
      with pytest.raises(wire.WireError) as caught:
        opened([*stream[:which], bytes(flipped), *stream[which + 1 :]])
      assert caught.value.clause == 'checksum'


@pytest.mark.parametrize('order', [(1, 2), (0, 2), (0, 0, 1), (1, 0), (2,)])
def test_a_missing_repeated_or_moved_message_is_detected(order):
  stream = sealed()
  with pytest.raises(wire.WireError):
    opened([stream[which] for which in order])
