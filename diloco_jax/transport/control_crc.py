"""What all streams share: the error of wrong bytes, and the checksum of a Control stream.

HTTP/2 and protobuf have no checksum, and a flipped bit turns one valid token count into another. So
every envelope ends with the field `check` (tag 15, fixed32): the CRC-32 (zlib) of all envelopes of
the stream from its first byte to the end of this one, without their checks. Because it runs over
the stream, the next message reveals a missing one. CRC-32 guards against accidents, not against an
attacker.
"""

import struct
import zlib

_CHECK = struct.Struct('<BI')
_TAG = 15 << 3 | 5


class WireError(ValueError):
  """Bytes or fields from a peer (or for one) break the format.

  `clause` names the rule that is broken, one word per rule (docs/wire_format.md lists them); the
  text gives what came and what is allowed. The link it came over cannot be trusted any further.
  """

  def __init__(self, clause: str, text: str):
    super().__init__(f'{clause}: {text}')
    self.clause = clause


class Seal:
  """The checksum of one direction of a stream, at either end."""

  def __init__(self):
    self._crc32 = 0

  def close(self, envelope: bytes) -> bytes:
    """Returns the envelope with its check."""
    self._crc32 = zlib.crc32(envelope, self._crc32)
    return envelope + _CHECK.pack(_TAG, self._crc32)

  def open(self, data: bytes) -> bytes:
    """Returns the envelope without its check. Raises WireError if the stream differs from the one
    sent."""
    envelope = data[: -_CHECK.size]
    self._crc32 = zlib.crc32(envelope, self._crc32)
    check = data[-_CHECK.size :]
    if check != _CHECK.pack(_TAG, self._crc32):
      raise WireError(
        'checksum',
        f'the stream has CRC-32 {self._crc32:#010x} up to this message of '
        f'{len(envelope)} bytes, but the message ends with {check.hex()}',
      )
    return envelope
