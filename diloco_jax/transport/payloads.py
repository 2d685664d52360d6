"""Holds payloads (node/payload.py) between transport and work, each under an integer id.

Machines see payload ids only. The store copies nothing: the owner must not change the bytes later.
"""

import collections
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
from isal import isal_zlib

from diloco_jax.node import payload as payload_lib
from diloco_jax.node import ports
from diloco_jax.protocol import messages

ALIGNMENT = 64  # of payloads in memory, in bytes: XLA then uses them as they are, without a copy
SMALL_BYTES = 1 << 20  # such memory costs less from malloc
KEPT_TAKES = 256  # memory that so many calls of `take` had no use for is freed


class Memory:
  """Memory for payloads, used again when nothing refers to it any more: the first touch of a page
  costs more than receiving or merging what goes into it. Never holds more bytes than were in use at
  once, and frees what later payloads have no use for. Thread-safe.

  Attributes:
    make: makes a new block of so many bytes.
  """

  def __init__(self):
    self.make: Callable[[int], np.ndarray] = _aligned
    self._lock = threading.Lock()
    # With the number of takes when each was found unused, the longest unused first.
    self._unused: list[tuple[int, np.ndarray]] = []
    self._takes = 0
    self._in_use_bytes = self._most_bytes = 0
    # A destructor may run in any thread, also in one that holds the lock: it only appends.
    self._returned: collections.deque[np.ndarray] = collections.deque()

  def take(self, size: int) -> np.ndarray:
    """Memory for `size` bytes, uint8[size], with any contents."""
    if size < SMALL_BYTES:
      return _aligned(size)
    with self._lock:
      self._takes += 1
      while self._returned:
        block = self._returned.popleft()
        self._unused.append((self._takes, block))
        self._in_use_bytes -= block.nbytes
      # The smallest block of size to 2 * size; on a tie the one used last.
      fits = [entry for entry in self._unused if size <= entry[1].nbytes <= 2 * size]
      fit = min(reversed(fits), key=lambda entry: entry[1].nbytes, default=None)
      block = self.make(size) if fit is None else fit[1]
      self._unused = [entry for entry in self._unused if entry is not fit]
      self._in_use_bytes += block.nbytes
      self._most_bytes = max(self._most_bytes, self._in_use_bytes)
      while self._unused and (
        self._unused[0][0] <= self._takes - KEPT_TAKES
        or self._in_use_bytes + self.unused_bytes > self._most_bytes
      ):
        del self._unused[0]
    return np.asarray(_Lease(block, self._returned))[:size]

  @property
  def unused_bytes(self) -> int:
    return sum(block.nbytes for _, block in self._unused)


class _Lease:
  """What arrays in the memory refer to; it ends with the last of them."""

  def __init__(self, block: np.ndarray, returned: collections.deque[np.ndarray]):
    self.__array_interface__ = block.__array_interface__
    self._block, self._returned = block, returned

  def __del__(self):
    self._returned.append(self._block)


def _aligned(size: int) -> np.ndarray:
  """New memory. Not a bytearray: Python would zero all of it at once while it holds the GIL."""
  memory = np.empty(size + ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % ALIGNMENT
  return memory[start : start + size]


MEMORY = Memory()  # of this process
# glibc's settings of malloc, for every process of a run. By default it returns freed pages to the
# kernel and takes new ones, one page fault for each 4 KiB: for buffers that live as long as one
# fragment, also of gRPC and XLA, this costs more than the arithmetic. So it keeps them (the
# largest mmap_threshold that it accepts is 32 MiB), and asks for pages of 2 MiB.
MALLOC = {'hugetlb': 1, 'mmap_threshold': 32 << 20, 'trim_threshold': 1 << 30, 'top_pad': 16 << 20}
GLIBC_TUNABLES = ':'.join(f'glibc.malloc.{name}={value}' for name, value in MALLOC.items())
_MALLOPT = {'trim_threshold': -1, 'top_pad': -2, 'mmap_threshold': -3}  # what a call can still set


@functools.cache
def keep_freed_memory() -> None:
  """Makes glibc keep freed memory, as MALLOC sets it, also in a process that was started without
  it; a value in the environment wins. Other C libraries are left alone."""
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  tunables = os.environ.get('GLIBC_TUNABLES', '')
  for name, option in _MALLOPT.items() if mallopt else ():
    if f'glibc.malloc.{name}=' not in tunables and f'MALLOC_{name.upper()}_' not in os.environ:
      mallopt(option, MALLOC[name])


class PayloadStore:
  """The port `node.ports.Payloads` as a dictionary. Thread-safe."""

  def __init__(self):
    self._lock = threading.Lock()
    self._kept: dict[int, payload_lib.Payload] = {}
    self._last = 0

  def put(self, data: payload_lib.Payload) -> int:
    """Keeps `data` (no copy) and returns a new payload id."""
    with self._lock:
      self._last += 1
      self._kept[self._last] = data
      return self._last

  def get(self, payload_id: int) -> payload_lib.Payload:
    with self._lock:
      self._check(payload_id)
      return self._kept[payload_id]

  def drop(self, payload_id: int) -> None:
    with self._lock:
      self._check(payload_id)
      del self._kept[payload_id]

  def __len__(self) -> int:
    with self._lock:
      return len(self._kept)

  def _check(self, payload_id: int) -> None:
    # A second drop is a bug of the caller; this check reports it at once.
    if payload_id not in self._kept:
      raise KeyError(
        f'no payload has id {payload_id}: of {self._last} put, {len(self._kept)} '
        'are kept; it was dropped already or never put'
      )


STEP_BYTES = 1 << 18
_checksums: dict[int, tuple[weakref.ref, list[int]]] = {}  # of kept payloads, by id()


def keep(payloads: ports.Payloads, data: payload_lib.Payload) -> tuple[int, messages.Payload]:
  """Keeps a payload to send; returns its payload id and what announces it. Bytes have a checksum,
  for which they are read once, also for their frames; what stays on devices needs none."""
  if payload_lib.is_on_devices(data):
    return payloads.put(data), messages.Payload(size_bytes=data.nbytes, crc32=0)
  view = memoryview(data).cast('B')
  crc32s = [isal_zlib.crc32(view[:STEP_BYTES])]
  for start in range(STEP_BYTES, view.nbytes, STEP_BYTES):
    crc32s.append(isal_zlib.crc32(view[start : start + STEP_BYTES], crc32s[-1]))
  key = id(view)
  _checksums[key] = weakref.ref(view, lambda _: _checksums.pop(key, None)), crc32s
  return payloads.put(view), messages.Payload(size_bytes=view.nbytes, crc32=crc32s[-1])


def checksum(payload: payload_lib.Payload, size: int) -> int | None:
  """The CRC-32 of the first `size` bytes of a payload, all or a multiple of STEP_BYTES, if `keep`
  has read them."""
  reference, crc32s = _checksums.get(id(payload), (None, []))
  # Another payload may have had this id: the reference shows which one it is of.
  is_same = reference is not None and reference() is payload
  return crc32s[max(0, size - 1) // STEP_BYTES] if is_same else None


def to_host(payload: payload_lib.Payload) -> memoryview:
  """The bytes of a payload. Waits for an array on devices without holding the GIL."""
  view = np.asarray(payload) if payload_lib.is_on_devices(payload) else payload
  return memoryview(view).cast('B')
