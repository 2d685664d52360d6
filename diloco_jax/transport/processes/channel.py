"""Objects and payloads between two processes of one machine, over a pipe, in order.

An object is pickled; a payload in a block (blocks.py) is only named. The sender keeps it until the
receiver has no use for it any more, and sends a block's descriptor with the first payload in it.
A short payload travels with its object; a long one in other memory is copied into a block first.

The pipe carries tuples: (OBJECT, object, payload, whether a descriptor follows), (UNUSED, key,
times), (FREED, block).
"""

import os
import queue
import threading
import weakref
from multiprocessing import connection, reduction
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.transport import payloads as payloads_lib
from diloco_jax.transport.processes import blocks

OBJECT, UNUSED, FREED = range(3)


class _Location(NamedTuple):
  """Where a payload is: at the start of a block of the sender. `key`: unique among the payloads in
  use."""

  key: int
  block: int
  size: int


class _Use:
  """What the arrays of a received payload refer to; it ends with the last of them."""

  def __init__(self, memory: np.ndarray, key: int, unused: queue.SimpleQueue):
    self.__array_interface__ = memory.__array_interface__
    self.times = 0  # it was sent
    self.view: weakref.ref[memoryview] | None = None
    self._memory, self._key, self._unused = memory, key, unused

  def __del__(self):
    self._unused.put(((UNUSED, self._key, self.times), None))  # SimpleQueue allows this anywhere


class Channel:
  """One end. `send` never blocks and may be called from any thread, `receive` from one."""

  def __init__(self, pipe: connection.Connection):
    self._pipe = pipe
    self._lock = threading.Lock()
    self._queue: queue.SimpleQueue[tuple[tuple, int | None] | None] = queue.SimpleQueue()
    self._known: set[int] = set()  # blocks that the other end has mapped
    # By id, which no other object has while it is kept: payloads in use there, and times sent.
    self._lent: dict[int, list] = {}
    self._mapped: dict[int, np.ndarray] = {}  # blocks of the other end
    self._uses: weakref.WeakValueDictionary[int, _Use] = weakref.WeakValueDictionary()
    blocks.BLOCKS.freed.append(self._report_freed)
    self._writer = threading.Thread(target=self._write, name='channel', daemon=True)
    self._writer.start()

  def send(self, thing: Any, payload: memoryview | bytes | None = None) -> None:
    """Queues an object and its payload, which must not change any more."""
    if isinstance(payload, bytes):
      payload = memoryview(payload)
    if payload is None or payload.nbytes < payloads_lib.SMALL_BYTES:
      data = None if payload is None else bytes(payload)
      self._queue.put(((OBJECT, thing, data, False), None))
      return
    if (block := blocks.BLOCKS.find(payload)) is None:
      copy = blocks.BLOCKS.make(payload.nbytes)
      copy[:] = np.frombuffer(payload, np.uint8)
      payload = memoryview(copy)
      block = blocks.BLOCKS.find(payload)
    location = _Location(id(payload), block.number, payload.nbytes)
    with self._lock:
      new = block.number not in self._known
      self._known.add(block.number)
      self._lent.setdefault(location.key, [payload, 0])[1] += 1
      self._queue.put(((OBJECT, thing, location, new), block.descriptor if new else None))

  def receive(self) -> tuple[Any, memoryview | None]:
    """The next object, and its payload, which is the same memoryview as long as it is in use.
    Raises EOFError or OSError when the other end is gone."""
    while True:
      kind, *rest = self._pipe.recv()
      if kind == OBJECT:
        thing, payload, new = rest
        if new:
          descriptor = reduction.recv_handle(self._pipe)
          self._mapped[payload.block] = blocks.map_block(descriptor)
          os.close(descriptor)
        return thing, self._payload(payload)
      if kind == FREED:
        self._mapped.pop(rest[0])
      else:
        self._count(*rest)

  def close(self) -> None:
    """Stops after what was sent before; what the other end uses may change afterwards."""
    if self._report_freed in blocks.BLOCKS.freed:
      blocks.BLOCKS.freed.remove(self._report_freed)
    self._queue.put(None)
    self._writer.join()
    with self._lock:
      self._lent.clear()

  def _write(self) -> None:
    try:
      while (entry := self._queue.get()) is not None:
        words, descriptor = entry
        self._pipe.send(words)
        if descriptor is not None:
          reduction.send_handle(self._pipe, descriptor, None)
    except OSError:
      pass  # the reader sees the end of the pipe, and raises

  def _report_freed(self, block: int) -> None:
    if block in self._known:
      self._queue.put(((FREED, block), None))

  def _payload(self, payload: _Location | bytes | None) -> memoryview | None:
    if not isinstance(payload, _Location):
      return None if payload is None else memoryview(payload)
    use = self._uses.get(payload.key)
    if use is None:
      use = _Use(self._mapped[payload.block], payload.key, self._queue)
      self._uses[payload.key] = use
    use.times += 1
    view = use.view and use.view()
    if view is None:
      view = memoryview(np.asarray(use)[: payload.size]).toreadonly()
      use.view = weakref.ref(view)
    return view

  def _count(self, key: int, times: int) -> None:
    with self._lock:
      if key in self._lent:  # this end is not closed
        self._lent[key][1] -= times
        if not self._lent[key][1]:
          del self._lent[key]
