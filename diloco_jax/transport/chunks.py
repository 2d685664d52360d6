"""Payload chunks: the bytes of the Bulk stream. This docstring is the format.

A *transfer* carries one payload of S bytes from one end of a session to the other. It is cut into
N = max(1, ceil(S / C)) chunks, with C = 2^18 or, on a fast link, 2^20: a larger chunk costs less
CPU time, and delays the messages behind it. Chunk i begins at byte i * C and ends where the next
begins, so all but the last have exactly C bytes and an empty payload is one empty chunk. Each chunk
is one *frame* (one gRPC message): 40 bytes of header, then the chunk's raw bytes, nothing after.
Numbers are little endian::

  offset bytes field
       0     4 magic    "DLCB"
       4     2 version  3
       6     2 header   40, the size of this header in bytes
       8     8 transfer number of the transfer, > 0, growing within a session; 0: see below
      16     8 total    S, the size of the whole payload in bytes
      24     4 index    i, the number of this chunk
      28     4 count    N, the number of chunks; with S it says what C is
      32     4 crc32    CRC-32 (zlib) of the payload from its first byte to the end of this chunk
      36     4 check    CRC-32 (zlib) of the header bytes 0 to 35
      40       data

The chunks of a transfer arrive in the order of their index (a stream is ordered); transfers may
interleave. Because `crc32` runs over the payload, each end reads every byte once, detects a wrong
bit with the chunk that has it, and ends with the value in the announcing message
(`protocol.messages.Payload`; compared in link.py). `check` detects a chunk with a wrong header.

A frame with transfer 0 and without data is an *acknowledgement*: `total` counts the bytes of all
frames of chunks, headers too, that its sender has received in this session (flow_control.py); the
other numbers are 0.

This module checks neither the sender (see the session token) nor the meaning of the bytes (see the
codecs). CRC-32 guards against accidents, not against an attacker.
"""

import dataclasses
import struct
from collections.abc import Callable, Iterator

import numpy as np
from isal import isal_zlib

from diloco_jax.transport import control_crc, payloads

CHUNK_BYTES = 1 << 18
LARGE_CHUNK_BYTES = 1 << 20
MAGIC = b'DLCB'
VERSION = 3

_FIELDS = struct.Struct('<4sHHQQIII')
_CHECK = struct.Struct('<I')
HEADER_BYTES = _FIELDS.size + _CHECK.size
_NO_TRANSFER = 0


def chunk_count(total_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
  return max(1, -(-total_bytes // chunk_bytes))


def split(
  transfer: int, payload: memoryview | bytes, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
  """Yields the frames of a transfer, each made on demand (one copy of at most `chunk_bytes`)."""
  data = memoryview(payload).cast('B')
  count = chunk_count(data.nbytes, chunk_bytes)
  crc32 = 0
  for index in range(count):
    chunk = data[index * chunk_bytes : (index + 1) * chunk_bytes]
    crc32 = isal_zlib.crc32(chunk, crc32)
    yield b''.join((_header(transfer, data.nbytes, index, count, crc32), chunk))


def acknowledgement(received_bytes: int) -> bytes:
  return _header(_NO_TRANSFER, received_bytes, 0, 0, 0)


def _header(transfer: int, total: int, index: int, count: int, crc32: int) -> bytes:
  fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, transfer, total, index, count, crc32)
  return fields + _CHECK.pack(isal_zlib.crc32(fields))


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
  """A whole payload: read-only bytes and their CRC-32."""

  number: int
  data: memoryview
  crc32: int


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
  """The fields of a frame."""

  transfer: int
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
    self.buffer_S = payloads.MEMORY.take(total)
    self.count = count
    self.next_index = 0
    self.crc32 = 0

  def add(self, chunk: Chunk) -> None:
    crc32 = isal_zlib.crc32(chunk.data, self.crc32)
    if crc32 != chunk.crc32:
      raise control_crc.WireError(
        'checksum',
        f'CRC-32 {crc32:#010x} after chunk {chunk.index} of transfer '
        f'{chunk.transfer}, the frame says {chunk.crc32:#010x}',
      )
    # numpy copies without the GIL, as checksums are computed.
    start = chunk.index * chunk.chunk_bytes
    self.buffer_S[start : start + chunk.data.nbytes] = np.frombuffer(chunk.data, np.uint8)
    self.crc32 = crc32
    self.next_index += 1


class Assembler:
  """Assembles transfers from frames. Not thread-safe; one per stream.

  Args:
    max_payload_bytes: the largest payload accepted; nothing is allocated for a larger one.
    max_open: how many transfers may be incomplete at the same time.
    begins: told the size of every new transfer before any memory is taken; raises to refuse it.
  """

  def __init__(
    self,
    *,
    max_payload_bytes: int,
    max_open: int,
    begins: Callable[[int], None] = lambda size: None,
  ):
    self._max_payload_bytes = max_payload_bytes
    self._begins = begins
    self._max_open = max_open
    self._open: dict[int, _Partial] = {}

  def add(self, frame: bytes) -> Transfer | None:
    """Takes one frame; returns its transfer if it is now complete.

    Raises:
      WireError: the frame breaks the format or a limit (`clause` names it). The caller must close
        the stream.
    """
    chunk = parse(frame)
    self._check_limits(chunk)
    partial = self._partial(chunk)
    self._check_order(chunk, partial)
    partial.add(chunk)
    if partial.next_index < chunk.count:
      return None
    del self._open[chunk.transfer]
    data = memoryview(partial.buffer_S).toreadonly()
    return Transfer(chunk.transfer, data, partial.crc32)

  def _check_limits(self, chunk: Chunk) -> None:
    if chunk.total > self._max_payload_bytes:
      raise control_crc.WireError(
        'too_large',
        f'transfer {chunk.transfer} has {chunk.total} bytes, at most '
        f'{self._max_payload_bytes} are granted',
      )
    if chunk.transfer not in self._open and len(self._open) >= self._max_open:
      raise control_crc.WireError(
        'too_many',
        f'transfer {chunk.transfer} begins beside {len(self._open)} '
        f'incomplete ones, at most {self._max_open} are granted',
      )

  def _partial(self, chunk: Chunk) -> _Partial:
    if chunk.transfer in self._open:
      return self._open[chunk.transfer]
    # Only a first chunk opens a transfer, so a misplaced chunk allocates nothing.
    if chunk.index != 0:
      raise control_crc.WireError(
        'order',
        f'transfer {chunk.transfer} begins with chunk {chunk.index}, not 0',
      )
    self._begins(chunk.total)
    return self._open.setdefault(chunk.transfer, _Partial(chunk.total, chunk.count))

  def _check_order(self, chunk: Chunk, partial: _Partial) -> None:
    if (chunk.total, chunk.count) != (partial.buffer_S.nbytes, partial.count):
      raise control_crc.WireError(
        'size',
        f'transfer {chunk.transfer} had {partial.buffer_S.nbytes} bytes in {partial.count} chunks, '
        f'its chunk {chunk.index} says {chunk.total} in {chunk.count}',
      )
    if chunk.index < partial.next_index:
      raise control_crc.WireError(
        'duplicate',
        f'chunk {chunk.index} of transfer {chunk.transfer} came again',
      )
    if chunk.index > partial.next_index:
      raise control_crc.WireError(
        'order',
        f'chunk {chunk.index} of transfer {chunk.transfer} came when {partial.next_index} was due',
      )


def parse(frame: bytes) -> Chunk:
  """A frame's chunk. Raises WireError if the frame is not sound in itself."""
  view = memoryview(frame)
  chunk = Chunk(*_checked(view), data=view[HEADER_BYTES:])
  _check_sizes(chunk)
  return chunk


def acknowledged(frame: bytes) -> int | None:
  """The number of bytes that a frame acknowledges; None: it is no acknowledgement. Raises WireError
  if its header is not sound."""
  if len(frame) != HEADER_BYTES:
    return None
  transfer, total, *rest = _checked(memoryview(frame))
  return total if (transfer, *rest) == (_NO_TRANSFER, 0, 0, 0) else None


def _checked(view: memoryview) -> list[int]:
  """The numbers of a frame's header, from `transfer` to `crc32`."""
  if view.nbytes < HEADER_BYTES:
    raise control_crc.WireError('truncated', f'{view.nbytes} bytes are no header of {HEADER_BYTES}')
  magic, version, header_bytes, *fields = _FIELDS.unpack_from(view)
  if magic != MAGIC:
    raise control_crc.WireError('magic', f'the frame begins with {magic!r}, not {MAGIC!r}')
  if (version, header_bytes) != (VERSION, HEADER_BYTES):
    raise control_crc.WireError(
      'version',
      f'version {version} with a header of {header_bytes} bytes; this '
      f'build reads version {VERSION} with {HEADER_BYTES}',
    )
  _check_header(view)
  return fields


def _check_header(frame: memoryview) -> None:
  (stored,) = _CHECK.unpack_from(frame, _FIELDS.size)
  found = isal_zlib.crc32(frame[: _FIELDS.size])
  if stored != found:
    raise control_crc.WireError(
      'header',
      f'CRC-32 {found:#010x} over the header, it says {stored:#010x}',
    )


def _check_sizes(chunk: Chunk) -> None:
  if chunk.transfer == _NO_TRANSFER:
    raise control_crc.WireError('transfer', 'transfer number 0 stands for no transfer')
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
