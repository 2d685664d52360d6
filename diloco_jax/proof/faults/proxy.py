"""A bad network on loopback: a TCP proxy that delays, throttles, holds back, breaks and flips.

One proxy stands before one learner: the learner dials the proxy, the proxy dials the syncer. It
knows nothing of gRPC, only bytes of two *lanes*, `up` (what the learner sends) and `down`. What
goes wrong on a lane is set while it runs (`Toxics`) and holds for all connections, those that are
open and those to come::

    socket --read--> held back, in order --due, not cut, within the rate--> socket

* delay: every piece waits so long after it came; the rate is not lowered by it.
* rate: so many bytes a second at most.
* cut: nothing gets through and nobody is told (half-open). Bytes are kept, as TCP would send them
  again, and so are the end of a stream and its reset. While either lane is cut no new connection
  reaches the other side: the first packet or the answer to it would be lost.
* flip: one bit of one byte of the next piece is inverted; TCP itself notices nothing.
* reset: all connections break at once, with RST.

What is held back is bounded: beyond HELD_PIECES nobody reads from the socket any more, so that the
sender feels it as it would feel a slow link.
"""

import asyncio
import dataclasses
import socket
import struct
from collections.abc import Callable

PIECE_BYTES = 1 << 16
HELD_PIECES = 16
_RATE_PIECES_PER_S = 20  # a throttled lane moves so often, in small pieces
_RESET_ON_CLOSE = struct.pack('ii', 1, 0)  # SO_LINGER of 0 s: close() sends RST

_END = b''  # the sender has ended its direction
_RESET = None  # the sender is gone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toxics:
  """What is wrong with one lane. `rate`: bytes per second, None: as fast as it goes."""

  delay_s: float = 0.0
  rate: float | None = None
  cut: bool = False


class Lane:
  """One direction of a proxy, for all its connections."""

  def __init__(self):
    self._toxics = Toxics()
    self._changed = asyncio.Event()
    self._flip_bytes = 0  # flip a byte of the next piece with so many, 0: of none
    self.flipped = 0  # bytes
    self.came_bytes = 0  # read from a socket, whether or not they went on since
    self.passed_bytes = 0

  @property
  def toxics(self) -> Toxics:
    return self._toxics

  def set(self, toxics: Toxics) -> None:
    """Holds at once, also for what is held back already."""
    self._toxics = toxics
    self._changed.set()
    self._changed = asyncio.Event()

  def flip(self, least_bytes: int = 1) -> None:
    """Flips a byte in the middle of the next piece that has at least so many."""
    self._flip_bytes = max(1, least_bytes)

  async def until_open(self) -> None:
    while self._toxics.cut:
      await self._changed.wait()

  async def until_due(self, came_s: float) -> None:
    """Until what came then may go on."""
    loop = asyncio.get_running_loop()
    while True:
      await self.until_open()
      left_s = came_s + self._toxics.delay_s - loop.time()
      if left_s <= 0:
        return
      await self._wait(left_s)

  async def after(self, sent_bytes: int) -> None:
    """Until the rate allows more, after so many."""
    self.passed_bytes += sent_bytes
    if self._toxics.rate:
      await self._wait(sent_bytes / self._toxics.rate)

  async def _wait(self, seconds: float) -> None:
    """So long, or until the toxics change."""
    try:
      await asyncio.wait_for(self._changed.wait(), seconds)
    except TimeoutError:
      pass

  def cut_up(self, data: bytes) -> list[bytes]:
    """A piece in the sizes in which the rate lets it pass, one byte wrong if that was asked for."""
    if self._flip_bytes and len(data) >= self._flip_bytes:
      middle = len(data) // 2
      data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
      self._flip_bytes = 0
      self.flipped += 1
    if not self._toxics.rate:
      return [data]
    size = max(1, int(self._toxics.rate / _RATE_PIECES_PER_S))
    return [data[start : start + size] for start in range(0, len(data), size)]


class _Over(Exception):
  """A connection has ended, in order or not."""


@dataclasses.dataclass(slots=True)
class _Side:
  """One socket of a connection, the lane that leads to it, and what is held back before it."""

  reader: asyncio.StreamReader
  writer: asyncio.StreamWriter
  lane: Lane
  held: asyncio.Queue = dataclasses.field(
    default_factory=lambda: asyncio.Queue(maxsize=HELD_PIECES)
  )
  ended: bool = False  # the end of its stream has gone out to it

  def close(self) -> None:
    """What was written goes out; RST if the end of the stream has not gone out before."""
    connection = self.writer.get_extra_info('socket')
    if self.ended:
      self.writer.close()
    elif connection is not None and connection.fileno() >= 0:
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
      self.writer.transport.abort()


class Proxy:
  """See the top of this file. All methods belong to the event loop that `start` runs in.

  Args:
    resolve: tells the 'host:port' to go to; asked for every connection, because a restarted syncer
      may listen elsewhere. Its OSError or ValueError resets the connection.
  """

  def __init__(self, resolve: Callable[[], str]):
    self._resolve = resolve
    self._server: asyncio.Server | None = None
    self._connections: set[asyncio.Task] = set()
    self.up, self.down = Lane(), Lane()

  @property
  def address(self) -> str:
    """Where it listens, 'host:port'."""
    host, port = self._server.sockets[0].getsockname()
    return f'{host}:{port}'

  async def start(self) -> None:
    """Listens on a port of the kernel's choice."""
    self._server = await asyncio.start_server(
      self._accept, '127.0.0.1', 0, limit=PIECE_BYTES, family=socket.AF_INET
    )

  @property
  def connections(self) -> int:
    """How many are open, or wait for a cut to end."""
    return len(self._connections)

  def heal(self) -> None:
    """Nothing is wrong any more; what was held back goes out."""
    self.up.set(Toxics())
    self.down.set(Toxics())

  def reset(self) -> None:
    """Breaks every connection; new ones are accepted."""
    for connection in self._connections:
      connection.cancel()

  async def close(self) -> None:
    """Stops listening and breaks every connection. Returns when they are gone."""
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
    """One connection, to the end of both its directions."""
    await self._until_both_open()
    try:
      host, _, port = self._resolve().rpartition(':')
      streams = await asyncio.open_connection(host, int(port), limit=PIECE_BYTES)
    except (OSError, ValueError):
      return  # nobody listens there: the learner's side is reset
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
  """What comes from `source` is held back for `sink`, with the time at which it came."""
  loop = asyncio.get_running_loop()
  data = None
  while data != _END:
    try:
      data = await source.reader.read(PIECE_BYTES)
    except OSError:
      await sink.held.put((loop.time(), _RESET))
      return
    sink.lane.came_bytes += len(data)
    await sink.held.put((loop.time(), data))


async def _write(source: _Side, sink: _Side) -> None:
  """What is held back goes out when it may, until the connection is over."""
  while True:
    came_s, data = await sink.held.get()
    await sink.lane.until_due(came_s)
    if data is _RESET:
      raise _Over
    try:
      await _pass_on(data, sink)
    except OSError:  # `sink` is dead; `source` hears of it as it would from TCP
      await source.held.put((asyncio.get_running_loop().time(), _RESET))
    if source.ended and sink.ended:
      raise _Over


async def _pass_on(data: bytes, sink: _Side) -> None:
  if data == _END:
    sink.writer.write_eof()
    sink.ended = True
    return
  for piece in sink.lane.cut_up(data):
    await sink.lane.until_open()
    sink.writer.write(piece)
    await sink.writer.drain()
    await sink.lane.after(len(piece))
