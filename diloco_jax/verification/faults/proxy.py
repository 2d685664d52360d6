"""A bad network on loopback: a TCP proxy that throttles, holds, breaks and flips.

Each learner has a proxy: the learner dials the proxy, the proxy dials the syncer. The proxy does
not parse gRPC; it sees the bytes of two *lanes*, `up` (from the learner) and `down`. The caller
sets the faults of a lane while it runs (`Toxics`); they apply to all connections, open and future
ones::

    socket --read--> held, in order --not cut, within the rate--> socket

* rate: at most so many bytes a second.
* cut: no byte passes and neither end gets an error (half-open). The proxy keeps the bytes, as TCP
  would send them again, and also the end of a direction and its reset. While either lane is cut no
  new connection reaches the other side: its first packet or the answer would be lost.
* flip: one bit of one byte of the next read is inverted; TCP itself notices nothing.
* reset: all connections break at once, with RST.

Held data is bounded: beyond HELD_READS the proxy stops reading from the socket, so that the sender
notices it as it would notice a slow link.
"""

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import Callable

from diloco_jax.storage import files as files_lib

READ_BYTES = 1 << 16
HELD_READS = 16
_WRITES_PER_S = 20  # to a throttled lane
_LATE_S = 0.5  # waits that took too long by no more than this do not lower the rate
_RESET_ON_CLOSE = struct.pack('ii', 1, 0)  # SO_LINGER of 0 s: close() sends RST

_END = b''  # the sender has ended its direction
_RESET = None  # the sender's socket has failed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toxics:
  """The faults of one lane. `rate`: bytes per second, None: no limit."""

  rate: float | None = None
  cut: bool = False


class Lane:
  """One direction of a proxy, for all its connections."""

  def __init__(self):
    self._toxics = Toxics()
    self._changed = asyncio.Event()
    self._free_s = 0.0  # when the rate allows more bytes
    self._flip_bytes = 0  # flip a byte of the next read with so many, 0: of none
    self.flipped = 0  # bytes
    self.came_bytes = 0  # read from a socket, whether or not they have passed since
    self.passed_bytes = 0

  @property
  def toxics(self) -> Toxics:
    return self._toxics

  def set(self, toxics: Toxics) -> None:
    """Applies at once, also to held data."""
    self._toxics = toxics
    self._changed.set()
    self._changed = asyncio.Event()

  def flip(self, least_bytes: int = 1) -> None:
    """Flips a byte in the middle of the next read that has at least so many."""
    self._flip_bytes = max(1, least_bytes)

  async def until_open(self) -> None:
    while self._toxics.cut:
      await self._changed.wait()

  async def after(self, sent_bytes: int) -> None:
    """Waits until the rate allows more bytes after these."""
    self.passed_bytes += sent_bytes
    if self._toxics.rate:
      now_s = asyncio.get_running_loop().time()
      if now_s > self._free_s + _LATE_S:  # it was idle
        self._free_s = now_s
      self._free_s += sent_bytes / self._toxics.rate
      if self._free_s > now_s:
        await self._wait(self._free_s - now_s)

  async def _wait(self, seconds: float) -> None:
    """Waits so long, or until the toxics change."""
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._changed.wait(), seconds)

  def cut_up(self, data: bytes) -> list[bytes]:
    """Cuts what was read into parts that the rate allows, with one flipped bit if `flip` asked for
    it."""
    if self._flip_bytes and len(data) >= self._flip_bytes:
      middle = len(data) // 2
      data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
      self._flip_bytes = 0
      self.flipped += 1
    if not self._toxics.rate:
      return [data]
    size = max(1, int(self._toxics.rate / _WRITES_PER_S))
    return [data[start : start + size] for start in range(0, len(data), size)]


class _Over(Exception):
  """A connection has ended, in order or not."""


@dataclasses.dataclass(slots=True)
class _Side:
  """One socket of a connection, the lane that leads to it, and its held data."""

  reader: asyncio.StreamReader
  writer: asyncio.StreamWriter
  lane: Lane
  held: asyncio.Queue = dataclasses.field(default_factory=lambda: asyncio.Queue(maxsize=HELD_READS))
  ended: bool = False  # it has been sent the end of its direction

  def close(self) -> None:
    """Sends what was written, then closes; sends RST if the end was not sent before."""
    connection = self.writer.get_extra_info('socket')
    if self.ended:
      self.writer.close()
    elif connection is not None and connection.fileno() >= 0:
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
      self.writer.transport.abort()


class Proxy:
  """See the top of this file. All methods belong to the event loop that `start` runs in.

  Args:
    resolve: returns the 'host:port' to dial, for each connection, because a restarted syncer may
      listen elsewhere. Its OSError or ValueError resets the connection.
  """

  def __init__(self, resolve: Callable[[], str]):
    self._resolve = resolve
    self._server: asyncio.Server | None = None
    self._connections: set[asyncio.Task] = set()
    self.up, self.down = Lane(), Lane()

  @property
  def address(self) -> str:
    """Where the proxy listens, 'host:port'."""
    host, port, *_ = self._server.sockets[0].getsockname()
    return f'{f"[{host}]" if ":" in host else host}:{port}'

  async def start(self) -> None:
    """Listens on a port of the kernel's choice."""
    host = files_lib.loopback().rpartition(':')[0].strip('[]')
    self._server = await asyncio.start_server(self._accept, host, 0, limit=READ_BYTES)

  @property
  def connections(self) -> int:
    """The number of connections that are open, or wait for a cut to end."""
    return len(self._connections)

  def heal(self) -> None:
    """Ends all faults; held data passes."""
    self.up.set(Toxics())
    self.down.set(Toxics())

  def reset(self) -> None:
    """Breaks every connection; new ones are accepted."""
    for connection in self._connections:
      connection.cancel()

  async def close(self) -> None:
    """Stops listening and breaks every connection. Returns when they are closed."""
    self._server.close()
    self.reset()
    await asyncio.gather(*self._connections, return_exceptions=True)

  async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    task = asyncio.current_task()
    self._connections.add(task)
    learner = _Side(reader, writer, self.down)
    try:
      await self._serve(learner)
    except asyncio.CancelledError:
      pass  # broken by reset or close, and asyncio would log it
    finally:
      self._connections.discard(task)
      learner.close()

  async def _serve(self, learner: _Side) -> None:
    """Serves one connection to the end of both its directions."""
    await self._until_both_open()
    try:
      host, _, port = self._resolve().rpartition(':')
      streams = await asyncio.open_connection(host, int(port), limit=READ_BYTES)
    except (OSError, ValueError):
      return  # no process listens there: the learner's side is reset
    syncer = _Side(*streams, self.up)
    try:
      async with asyncio.TaskGroup() as tasks:
        for source, sink in ((learner, syncer), (syncer, learner)):
          tasks.create_task(_read(source, sink))
          tasks.create_task(_write(source, sink))
    except* _Over:
      pass
    finally:
      syncer.close()

  async def _until_both_open(self) -> None:
    while self.up.toxics.cut or self.down.toxics.cut:
      await self.up.until_open()
      await self.down.until_open()


async def _read(source: _Side, sink: _Side) -> None:
  """Holds the data of `source` for `sink`."""
  data = None
  while data != _END:
    try:
      data = await source.reader.read(READ_BYTES)
    except OSError:
      await sink.held.put(_RESET)
      return
    sink.lane.came_bytes += len(data)
    await sink.held.put(data)


async def _write(source: _Side, sink: _Side) -> None:
  """Sends held data to `sink` when it may pass, until the connection is over."""
  while True:
    data = await sink.held.get()
    await sink.lane.until_open()
    if data is _RESET:
      raise _Over
    try:
      await _pass_on(data, sink)
    except OSError:  # `sink` has failed; `source` gets a reset, as TCP would send it
      await source.held.put(_RESET)
    if source.ended and sink.ended:
      raise _Over


async def _pass_on(data: bytes, sink: _Side) -> None:
  if data == _END:
    sink.writer.write_eof()
    sink.ended = True
    return
  for part in sink.lane.cut_up(data):
    await sink.lane.until_open()
    sink.writer.write(part)
    await sink.writer.drain()
    await sink.lane.after(len(part))
