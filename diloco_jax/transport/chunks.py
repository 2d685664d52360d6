"""Payload chunks: the bytes of the Bulk stream. This docstring is the format.

A *transfer* carries one payload of S bytes from one end of a session to the other. It is cut into
N = max(1, ceil(S / C)) chunks, with C = 2^18 or, on a fast link, 2^20: a larger chunk costs less
CPU time, and delays the messages behind it. Chunk i begins at byte i * C and ends where the next
begins, so all but the last have exactly C bytes and an empty payload is one empty chunk. Each chunk
is one *frame* (one gRPC message): 32 bytes of header, then the chunk's raw bytes, nothing after.
Numbers are little endian::

  offset bytes field
       0     4 magic    "DLCB"
       4     2 version  4
       6     2 header   32, the size of this header in bytes
       8     8 total    S, the size of the whole payload in bytes
      16     4 index    i, the number of this chunk
      20     4 count    N, the number of chunks; with S it determines C; 0: see below
      24     4 crc32    CRC-32 (zlib) of the payload from its first byte to the end of this chunk
      28     4 check    CRC-32 (zlib) of the header bytes 0 to 27
      32       data

The transfers of a stream come one after the other and the chunks of each in the order of their
index, so both ends count the transfers: 1, 2, 3 ... Nothing in a frame belongs to a session, so a
frame that goes to several learners is made once (`Shared`). Because `crc32` runs over the payload,
the receiver reads every byte once, detects a wrong bit with the chunk that has it, and ends with
the value in the announcing message (`protocol.messages.Payload`; compared in link.py). `check`
detects a chunk with a wrong header.

A frame with count 0 and without data is an *acknowledgement*: `total` counts the bytes of all
frames of chunks, headers too, that its sender has received in this session (flow_control.py); the
other numbers are 0.

This module checks neither the sender (see the session token) nor the meaning of the bytes (see the
codecs). CRC-32 guards against accidents, not against an attacker.
"""

import collections
import dataclasses
import struct
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
from isal import isal_zlib

from diloco_jax.protocol import formats
from diloco_jax.transport import control_crc
from diloco_jax.transport import payloads as payloads_lib

CHUNK_BYTES = payloads_lib.STEP_BYTES
LARGE_CHUNK_BYTES = 1 << 20
MAGIC = b'DLCB'
VERSION = formats.NUMBERS['frame']
SHARED_BYTES = 1 << 26  # of frames that are kept for further learners

_FIELDS = struct.Struct('<4sHHQIII')
_CHECK = struct.Struct('<I')
HEADER_BYTES = _FIELDS.size + _CHECK.size
_CRC32 = slice(_FIELDS.size - 4, _FIELDS.size)


def chunk_count(total_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
  return max(1, -(-total_bytes // chunk_bytes))


class Shared:
  """The newest frames of payloads that live, so that one that goes to several learners is read and
  copied once, as long as they are about equally fast. Thread-safe: of two threads one makes a
  frame."""

  def __init__(self):
    self._lock = threading.Lock()
    self._frames = collections.OrderedDict[tuple, tuple[weakref.ref, bytes]]()
    self._bytes = 0
    # A destructor may run in any thread, also in one that holds the lock: it only appends.
    self._gone: collections.deque[tuple[tuple, weakref.ref]] = collections.deque()

  def frame(self, payload: memoryview, at: tuple[int, int], make: Callable[[], bytes]) -> bytes:
    """The frame of this very payload with this chunk size and index."""
    key = id(payload), *at  # another payload may have had this id: see the reference
    with self._lock:
      while self._gone:
        gone, reference = self._gone.popleft()
        if self._frames.get(gone, (None,))[0] is reference:
          self._bytes -= len(self._frames.pop(gone)[1])
      reference, frame = self._frames.get(key, (None, b''))
      if reference is None or reference() is not payload:
        replaced_bytes = len(frame)
        frame = make()
        reference = weakref.ref(payload, lambda ended: self._gone.append((key, ended)))
        self._frames[key] = reference, frame
        self._bytes += len(frame) - replaced_bytes
        while self._bytes > SHARED_BYTES:
          self._bytes -= len(self._frames.popitem(last=False)[1][1])
    return frame


def split(
  payload: memoryview | bytes, chunk_bytes: int = CHUNK_BYTES, shared: Shared | None = None
) -> Iterator[bytes]:
  """Yields the frames of a transfer, each made on demand (one copy of at most `chunk_bytes`)."""
  data = memoryview(payload).cast('B')
  count, crc32 = chunk_count(data.nbytes, chunk_bytes), 0
  for index in range(count):

    def make(index: int = index, crc32: int = crc32) -> bytes:
      stop = min((index + 1) * chunk_bytes, data.nbytes)
      chunk = data[index * chunk_bytes : stop]
      known = payloads_lib.checksum(payload, stop)
      crc32 = isal_zlib.crc32(chunk, crc32) if known is None else known
      return b''.join((_header(data.nbytes, index, count, crc32), chunk))

    share = shared is not None and isinstance(payload, memoryview)
    frame = shared.frame(payload, (chunk_bytes, index), make) if share else make()
    crc32 = int.from_bytes(frame[_CRC32], 'little')
    yield frame


def acknowledgement(received_bytes: int) -> bytes:
  return _header(received_bytes, 0, 0, 0)


def _header(total: int, index: int, count: int, crc32: int) -> bytes:
  fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, total, index, count, crc32)
  return fields + _CHECK.pack(isal_zlib.crc32(fields))


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
  """A whole payload: its number in the stream, read-only bytes and their CRC-32."""

  number: int
  data: memoryview
  crc32: int


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
  """The fields of a frame."""

  total: int
  index: int
  count: int
  crc32: int
  data: memoryview

  @property
  def chunk_bytes(self) -> int | None:
    """C; None: the number of chunks does not fit the total."""
    for size in (CHUNK_BYTES, LARGE_CHUNK_BYTES):
      if self.count == chunk_count(self.total, size):
        return size
    return None


class _Partial:
  """An incomplete transfer."""

  def __init__(self, total: int, count: int):
    self.buffer_S = payloads_lib.MEMORY.take(total)
    self.count = count
    self.next_index = 0
    self.crc32 = 0

  def add(self, chunk: Chunk) -> None:
    crc32 = isal_zlib.crc32(chunk.data, self.crc32)
    if crc32 != chunk.crc32:
      text = f'CRC-32 {crc32:#010x} after chunk {chunk.index}, the frame says {chunk.crc32:#010x}'
      raise control_crc.WireError('checksum', text)
    # numpy copies without the GIL, as checksums are computed.
    start = chunk.index * chunk.chunk_bytes
    self.buffer_S[start : start + chunk.data.nbytes] = np.frombuffer(chunk.data, np.uint8)
    self.crc32 = crc32
    self.next_index += 1


class Assembler:
  """Assembles transfers from the frames of one stream. Not thread-safe.

  Args:
    max_payload_bytes: the largest payload accepted; nothing is allocated for a larger one.
    on_begin: called with the size of every new transfer before any memory is allocated; raises to
      refuse it.
  """

  def __init__(
    self, *, max_payload_bytes: int, on_begin: Callable[[int], None] = lambda size: None
  ):
    self._max_payload_bytes = max_payload_bytes
    self._on_begin = on_begin
    self._number = 0  # of the transfers before
    self._partial: _Partial | None = None

  def add(self, frame: bytes) -> Transfer | None:
    """Takes one frame; returns its transfer if it is now complete.

    Raises:
      WireError: the frame breaks the format or a limit (`clause` names it). The caller must close
        the stream.
    """
    chunk = parse(frame)
    if chunk.total > self._max_payload_bytes:
      text = f'a transfer has {chunk.total} bytes, at most {self._max_payload_bytes} are granted'
      raise control_crc.WireError('too_large', text)
    if self._partial is None:
      # Only a first chunk begins a transfer, so a misplaced chunk allocates nothing.
      if chunk.index != 0:
        raise control_crc.WireError('order', f'a transfer begins with chunk {chunk.index}, not 0')
      self._on_begin(chunk.total)
      self._partial = _Partial(chunk.total, chunk.count)
    partial = self._partial
    _check_order(chunk, partial)
    partial.add(chunk)
    if partial.next_index < chunk.count:
      return None
    self._partial = None
    self._number += 1
    return Transfer(self._number, memoryview(partial.buffer_S).toreadonly(), partial.crc32)


def _check_order(chunk: Chunk, partial: _Partial) -> None:
  if (chunk.total, chunk.count) != (partial.buffer_S.nbytes, partial.count):
    raise control_crc.WireError(
      'size',
      f'a transfer had {partial.buffer_S.nbytes} bytes in {partial.count} chunks, its chunk '
      f'{chunk.index} says {chunk.total} in {chunk.count}',
    )
  if chunk.index < partial.next_index:
    raise control_crc.WireError('duplicate', f'chunk {chunk.index} came again')
  if chunk.index > partial.next_index:
    raise control_crc.WireError(
      'order', f'chunk {chunk.index} came when {partial.next_index} was due'
    )


def parse(frame: bytes) -> Chunk:
  """A frame's chunk. Raises WireError if the frame is not sound in itself."""
  view = memoryview(frame)
  chunk = Chunk(*_read_header(view), data=view[HEADER_BYTES:])
  if (chunk_bytes := chunk.chunk_bytes) is None:
    counts = [chunk_count(chunk.total, size) for size in (CHUNK_BYTES, LARGE_CHUNK_BYTES)]
    raise control_crc.WireError(
      'count', f'{chunk.total} bytes in {chunk.count} chunks, not {counts[0]} or {counts[1]}'
    )
  if chunk.index >= chunk.count:
    raise control_crc.WireError('index', f'chunk {chunk.index} of {chunk.count}')
  expected = min(chunk_bytes, chunk.total - chunk.index * chunk_bytes)
  if chunk.data.nbytes != expected:
    raise control_crc.WireError(
      'size',
      f'chunk {chunk.index} of {chunk.total} bytes has {chunk.data.nbytes} bytes, not {expected}',
    )
  return chunk


def parse_acknowledgement(frame: bytes) -> int | None:
  """The number of bytes that a frame acknowledges; None: it is no acknowledgement. Raises WireError
  if its header is not sound."""
  if len(frame) != HEADER_BYTES:
    return None
  total, *rest = _read_header(memoryview(frame))
  return None if any(rest) else total


def _read_header(view: memoryview) -> list[int]:
  """The numbers of a frame's header, from `total` to `crc32`."""
  if view.nbytes < HEADER_BYTES:
    raise control_crc.WireError('truncated', f'{view.nbytes} bytes are no header of {HEADER_BYTES}')
  magic, version, header_bytes, *fields = _FIELDS.unpack_from(view)
  if magic != MAGIC:
    raise control_crc.WireError('magic', f'the frame begins with {magic!r}, not {MAGIC!r}')
  if other := formats.refusal('frame', version, 'a payload of the peer'):
    raise control_crc.WireError('version', other)
  if header_bytes != HEADER_BYTES:
    raise control_crc.WireError('version', f'a header of {header_bytes} bytes, not {HEADER_BYTES}')
  (check,) = _CHECK.unpack_from(view, _FIELDS.size)
  crc32 = isal_zlib.crc32(view[: _FIELDS.size])
  if check != crc32:
    raise control_crc.WireError(
      'header', f'CRC-32 {crc32:#010x} over the header, it says {check:#010x}'
    )
  return fields
