"""The byte format of the write-ahead log, and its errors. All numbers are little-endian.

A segment is a file that begins with a header of 128 bytes:

| bytes | what |
|---|---|
| 0-7 | `DJAXWAL\\n` |
| 8-11 | format version, 2 |
| 12-15 | CRC-32 of bytes 0-11: these 16 bytes mean the same in every version |
| 16-23 | number of the segment's first record |
| 24-55 | chain hash before that record |
| 56-119 | the run, UTF-8, filled up with zeros |
| 120-123 | zeros |
| 124-127 | CRC-32 of bytes 0-123 |

Then entries follow without gaps, each a header of 72 bytes and its payload:

| bytes | what |
|---|---|
| 0-3 | `D1 57 EC 0A`, by which recovery finds an entry after a damaged one |
| 4-7 | kind: 0 is a mark, all others belong to the caller |
| 8-15 | number of the record; of a mark: of the record before it |
| 16-23 | proven: the newest record that was durable when this entry was written |
| 24-31 | payload bytes; of a mark: 0 |
| 32-63 | chain hash; of a mark: that of the record before it |
| 64-67 | CRC-32 of the payload's hashes |
| 68-71 | CRC-32 of bytes 0-67 |

The payload's hashes are the SHA-256 of each MiB of it, so that several cores can compute them.
Chain hash of a record = SHA-256(chain hash before, bytes 4-15 and 24-31 of its header, the
payload's hashes); in a log with a key (seals.py), HMAC-SHA256 with that key of the same bytes. It
covers the content of the record and nothing of the way to the disk (segments, groups of a commit,
marks), so a syncer that crashed and one that did not have the same hash after the same records, and
one hash names a whole history. The CRCs are needed, too: they tell a damaged record from a whole
record of another history, and reveal a header without its payload. The first hash is the SHA-256
(or HMAC) of the run's name.
"""

import functools
import hashlib
import hmac
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

from diloco_jax.protocol import safe_json
from diloco_jax.protocol.tape import codec

VERSION = 2
COMMIT_MARK = 0
PIECE_BYTES = 1 << 20  # payloads are read, hashed and copied in pieces of this size
RUN_BYTES = 64

_MAGIC = b'DJAXWAL\n'
_SYNC = b'\xd1\x57\xec\x0a'
_PREAMBLE = struct.Struct('<8sI')
_SEGMENT = struct.Struct('<8sIIQ32s64s4x')
_ENTRY = struct.Struct('<4sIQQQ32sI')
_CHAINED = struct.Struct('<IQQ')
_CRC = struct.Struct('<I')
SEGMENT_HEADER_BYTES = _SEGMENT.size + _CRC.size
ENTRY_HEADER_BYTES = _ENTRY.size + _CRC.size

_NAME = re.compile(r'(\d{20})\.wal')
NEW = '.new'  # a file that is being written; it counts once it has its right name


class WalError(Exception):
  """What happened, what is safe, what to do."""


class WalFull(WalError):
  """The disk has no space for this record. The log is whole: append the record again later."""


class WalDamaged(WalError):
  """The log differs from the committed one. Nothing was changed."""


class WalBroken(WalError):
  """The disk failed. The log writes nothing more: end the process (exit code 74)."""


class WalUnsupported(WalError):
  """A whole log, but of another format version or of another run. Nothing was changed."""


class Header(NamedTuple):
  """The header of a segment."""

  first: int
  chain: bytes  # before the first record
  run: str


class Entry(NamedTuple):
  """The header of an entry."""

  kind: int
  number: int
  proven: int
  length: int
  chain: bytes
  crc: int


class Corrupt(Exception):
  """Bytes that break the format; the text says how."""


def segment_name(first: int) -> str:
  return f'{first:020}.wal'


def first_of(name: str) -> int | None:
  """The number in a segment's name; None if the file is not a segment."""
  match = _NAME.fullmatch(name)
  return int(match[1]) if match else None


def pack_segment(header: Header) -> bytes:
  run = header.run.encode()
  if not 1 <= len(run) <= RUN_BYTES:
    raise ValueError(f'the run {header.run!r} needs 1 to {RUN_BYTES} bytes, has {len(run)}')
  preamble = zlib.crc32(_PREAMBLE.pack(_MAGIC, VERSION))
  data = _SEGMENT.pack(_MAGIC, VERSION, preamble, header.first, header.chain, run)
  return data + _CRC.pack(zlib.crc32(data))


def parse_segment(name: str, data: bytes) -> Header:
  """Raises Corrupt, or WalUnsupported for another version."""
  if len(data) < _PREAMBLE.size + _CRC.size:
    raise Corrupt('its header is cut off')
  magic, version = _PREAMBLE.unpack_from(data)
  if magic != _MAGIC or not _crc_follows(data[: _PREAMBLE.size + _CRC.size]):
    raise Corrupt('its header is damaged')
  if version != VERSION:
    raise WalUnsupported(
      f'WAL {name} has format version {version}, this package reads {VERSION}. Nothing was '
      'changed. Use the release of diloco_jax that wrote it.'
    )
  if len(data) != SEGMENT_HEADER_BYTES or not _crc_follows(data):
    raise Corrupt('its header is damaged')
  _, _, _, first, chain, run = _SEGMENT.unpack_from(data)
  return Header(first, chain, run.rstrip(b'\0').decode(errors='backslashreplace'))


def pack_entry(entry: Entry) -> bytes:
  data = _ENTRY.pack(_SYNC, *entry)
  return data + _CRC.pack(zlib.crc32(data))


def parse_entry(data: bytes) -> Entry:
  """Raises Corrupt."""
  if len(data) != ENTRY_HEADER_BYTES:
    raise Corrupt('the header of an entry is cut off')
  if data[: len(_SYNC)] != _SYNC or not _crc_follows(data):
    raise Corrupt('the header of an entry is damaged')
  return Entry(*_ENTRY.unpack_from(data)[1:])


def entries_in(data: bytes) -> Iterator[tuple[int, Entry]]:
  """Yields (offset, entry) of every whole header in `data`, at any offset."""
  place = data.find(_SYNC)
  while place >= 0:
    try:
      yield place, parse_entry(data[place : place + ENTRY_HEADER_BYTES])
    except Corrupt:
      pass  # the magic bytes by chance, or a damaged header
    place = data.find(_SYNC, place + 1)


def first_chain(run: str, key: bytes = b'') -> bytes:
  """The chain hash before record 1."""
  return _hash(key, run.encode()).digest()


def _hash(key: bytes, data: bytes) -> Any:
  return hmac.new(key, data, hashlib.sha256) if key else hashlib.sha256(data)


def chain_of(
  before: bytes, kind: int, number: int, length: int, hashes: bytes, key: bytes = b''
) -> bytes:
  """The chain hash of a record."""
  return _hash(key, before + _CHAINED.pack(kind, number, length) + hashes).digest()


def crc_of(hashes: bytes) -> int:
  return zlib.crc32(hashes)


def hashes_of(buffers: Iterable[memoryview]) -> bytes:
  """A payload's hashes; those of a large one are computed on several cores."""
  pieces = list(_pieces(buffers))
  return b''.join((_threads().map if len(pieces) > 1 else map)(hash_of, pieces))


def hash_of(piece: Iterable[bytes | memoryview]) -> bytes:
  digest = hashlib.sha256()
  for part in piece:
    digest.update(part)
  return digest.digest()


def _pieces(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
  """The MiBs of the joined buffers, not copied."""
  piece, room = [], PIECE_BYTES
  for view in buffers:
    while view:
      piece.append(view[:room])
      view, room = view[room:], room - len(piece[-1])
      if not room:
        yield piece
        piece, room = [], PIECE_BYTES
  if piece:
    yield piece


@functools.cache
def _threads() -> futures.ThreadPoolExecutor:
  return futures.ThreadPoolExecutor(4, thread_name_prefix='hashes')


def short(chain: bytes) -> str:
  """A hash as shown in messages."""
  return chain.hex()[:16]


def _crc_follows(data: bytes) -> bool:
  return zlib.crc32(data[: -_CRC.size]) == _CRC.unpack(data[-_CRC.size :])[0]


# --- A JSON header and arrays as one payload ------------------------------------------------------


def pack(header: dict[str, Any], *arrays: Any) -> list[Any]:
  """Buffers for `append`: u32 JSON size, JSON padded with spaces to 8 bytes, the arrays' bytes.

  Equal headers (same keys in the same order) have equal bytes; NaN raises ValueError.
  """
  text = codec.encode(header).encode()
  text += b' ' * (-(_CRC.size + len(text)) % 8)  # aligns the arrays for reading
  return [struct.pack('<I', len(text)) + text, *arrays]


def unpack(payload: memoryview | bytes) -> tuple[dict[str, Any], memoryview]:
  """Returns the header and the arrays' bytes, not copied. Raises ValueError."""
  view = memoryview(payload)
  if len(view) < _CRC.size:
    raise ValueError('it has no header')
  (count,) = struct.unpack_from('<I', view)
  return safe_json.parse_object(bytes(view[4 : 4 + count])), view[4 + count :]
