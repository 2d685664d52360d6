"""The checksum of a Control stream: no message is wrong, missing or repeated unnoticed.

HTTP/2 and protobuf have none, and a flipped bit makes a token count another valid token count. So
every envelope ends with the field `check` (tag 15, fixed32): CRC-32 (zlib) of all envelopes of the
stream from its first byte to the end of this one, without their checks. Because it runs over the
stream, a message that went missing is noticed with the next one. CRC-32 guards against accidents,
not against an attacker.
"""

import struct
import zlib

from diloco_jax.transport import errors

_CHECK = struct.Struct('<BI')
_TAG = 15 << 3 | 5


class Seal:
  """One direction of one stream, at either end."""

  def __init__(self):
    self._crc32 = 0

  def close(self, envelope: bytes) -> bytes:
    """The envelope with its check."""
    self._crc32 = zlib.crc32(envelope, self._crc32)
    return envelope + _CHECK.pack(_TAG, self._crc32)

  def open(self, data: bytes) -> bytes:
    """The envelope without its check. Raises WireError if anything on the stream is not as sent."""
    envelope = data[: -_CHECK.size]
    self._crc32 = zlib.crc32(envelope, self._crc32)
    if data[-_CHECK.size :] != _CHECK.pack(_TAG, self._crc32):
      raise errors.WireError(
        'checksum',
        f'CRC-32 {self._crc32:#010x} over the stream up to this message of '
        f'{len(envelope)} bytes, it ends with {data[-_CHECK.size :].hex()}',
      )
    return envelope
