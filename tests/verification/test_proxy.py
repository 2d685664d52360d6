"""The faulty proxy, over plain sockets and with our gRPC transports on both sides of it.

Nobody waits for a time to pass: a test waits for bytes, for an end, or for a number that the proxy
counts, each with a deadline.
"""

import asyncio
import contextlib
import queue
import threading
import time

import pytest

from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, grpc_client, grpc_server, link, payloads
from diloco_jax.verification.faults import proxy as proxy_lib
from tests.transport import answers

DEADLINE_S = 20.0
MIB = 1 << 20


class Peers:
  """A learner and a syncer of plain sockets with a proxy between them."""

  def __init__(self):
    self.accepted: asyncio.Queue = asyncio.Queue()
    self._writers: list[asyncio.StreamWriter] = []
    self.proxy = proxy_lib.Proxy(lambda: self.address)
    self.address = ''

  async def __aenter__(self):
    self._server = await asyncio.start_server(self._accept, '127.0.0.1', 0)
    self.address = f'127.0.0.1:{self._server.sockets[0].getsockname()[1]}'
    await self.proxy.start()
    return self

  async def __aexit__(self, *error):
    await self.proxy.close()
    self._server.close()
    for writer in self._writers:
      writer.transport.abort()
      with contextlib.suppress(OSError):
        await soon(writer.wait_closed())

  async def _accept(self, reader, writer):
    self._writers.append(writer)
    await self.accepted.put((reader, writer))

  async def dial(self):
    host, port = self.proxy.address.split(':')
    reader, writer = await asyncio.open_connection(host, int(port))
    self._writers.append(writer)
    return reader, writer

  async def connect(self):
    """((reader, writer) of the learner, the same of the syncer)."""
    learner = await self.dial()
    return learner, await soon(self.accepted.get())


async def soon(awaitable):
  return await asyncio.wait_for(awaitable, DEADLINE_S)


async def true(condition):
  """Waits until a condition about the event loop's own work holds."""
  async with asyncio.timeout(DEADLINE_S):
    while not condition():
      await asyncio.sleep(0.001)


@contextlib.contextmanager
def _ended():
  """A connection ends, in order or with a reset: both tell the peer that it is over."""
  with contextlib.suppress(ConnectionError):
    yield


def run(scenario):
  """Runs `scenario(peers)` in a loop of its own."""

  async def main():
    async with Peers() as peers:
      await scenario(peers)

  asyncio.run(main())


async def ask(learner, syncer, up: bytes, down: bytes) -> None:
  """Both directions carry these bytes."""
  learner[1].write(up)
  assert await soon(syncer[0].readexactly(len(up))) == up
  syncer[1].write(down)
  assert await soon(learner[0].readexactly(len(down))) == down


def test_the_proxy_is_transparent_and_ends_in_order():
  async def scenario(peers):
    learner, syncer = await peers.connect()
    big = bytes(range(256)) * 4096
    learner[1].write(big)
    assert await soon(syncer[0].readexactly(len(big))) == big
    learner[1].write_eof()
    assert await soon(syncer[0].read()) == b''
    syncer[1].write(b'after the end of the other direction')
    syncer[1].close()
    assert await soon(learner[0].read()) == b'after the end of the other direction'
    learner[1].close()

  run(scenario)


@pytest.mark.parametrize('direction', ['up', 'down'])
def test_a_cut_direction_stalls_only_that_direction(direction):
  async def scenario(peers):
    learner, syncer = await peers.connect()
    cut, other = (learner, syncer) if direction == 'up' else (syncer, learner)
    lane = getattr(peers.proxy, direction)
    lane.set(proxy_lib.Toxics(cut=True))
    cut[1].write(b'held')
    other[1].write(b'passes')
    assert await soon(cut[0].readexactly(6)) == b'passes'
    assert lane.passed_bytes == 0
    lane.set(proxy_lib.Toxics())
    assert await soon(other[0].readexactly(4)) == b'held'

  run(scenario)


def test_a_cut_keeps_the_end_of_a_stream_and_its_reset():
  async def scenario(peers):
    learner, syncer = await peers.connect()
    other, _ = await peers.connect()
    peers.proxy.up.set(proxy_lib.Toxics(cut=True))
    learner[1].close()
    other[1].transport.abort()
    syncer[1].write(b'nobody has told me')
    await soon(syncer[1].drain())
    reading = asyncio.create_task(syncer[0].read())
    await true(lambda: peers.proxy.down.passed_bytes)  # the other direction still works
    assert not reading.done()
    peers.proxy.heal()
    with _ended():
      await soon(reading)

  run(scenario)


def test_while_cut_no_new_connection_reaches_the_other_side():
  async def scenario(peers):
    peers.proxy.down.set(proxy_lib.Toxics(cut=True))
    learner = await peers.dial()  # the kernel accepts it, as it accepts a SYN into its backlog
    learner[1].write(b'hello')
    await true(lambda: peers.proxy.connections == 1)
    assert peers.accepted.empty()
    peers.proxy.heal()
    syncer = await soon(peers.accepted.get())
    assert await soon(syncer[0].readexactly(5)) == b'hello'

  run(scenario)


def test_a_throttled_lane_keeps_its_rate_until_it_is_healed():
  async def scenario(peers):
    learner, syncer = await peers.connect()
    peers.proxy.up.set(proxy_lib.Toxics(rate=200_000))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    learner[1].write(bytes(20 * MIB))
    await soon(syncer[0].readexactly(60_000))
    assert loop.time() - began_s >= 0.2  # 0.3 s less the first piece, which waits for nothing
    peers.proxy.heal()  # at the old rate the rest would take 100 s
    await soon(syncer[0].readexactly(20 * MIB - 60_000))

  run(scenario)


def test_a_cut_lane_holds_a_bounded_amount_and_stops_the_sender():
  async def scenario(peers):
    learner, syncer = await peers.connect()
    peers.proxy.up.set(proxy_lib.Toxics(cut=True))
    total = 64 * MIB
    sending = asyncio.create_task(_send(learner[1], total))
    held = proxy_lib.HELD_PIECES * proxy_lib.PIECE_BYTES
    await true(lambda: peers.proxy.up.came_bytes >= held)
    # The sender cannot be done: the kernel's buffers are far smaller than the total.
    assert not sending.done()
    # One more piece waits to enter, and one to leave.
    assert peers.proxy.up.came_bytes <= held + 2 * proxy_lib.PIECE_BYTES
    peers.proxy.heal()
    assert len(await soon(syncer[0].readexactly(total))) == total
    await soon(sending)

  run(scenario)


async def _send(writer, total: int) -> None:
  for _ in range(total // MIB):
    writer.write(bytes(MIB))
    await writer.drain()


def test_flip_changes_one_bit_of_a_long_enough_piece():
  async def scenario(peers):
    learner, syncer = await peers.connect()
    peers.proxy.up.flip(least_bytes=1000)
    await ask(learner, syncer, b'short', b'pieces pass')
    assert peers.proxy.up.flipped == 0
    sent = bytes(5000)
    learner[1].write(sent)
    got = await soon(syncer[0].readexactly(5000))
    assert sum(byte.bit_count() for byte in got) == 1
    assert peers.proxy.up.flipped == 1
    await ask(learner, syncer, sent, sent)

  run(scenario)


def test_reset_breaks_all_connections_and_new_ones_work():
  async def scenario(peers):
    both = [await peers.connect(), await peers.connect()]
    peers.proxy.reset()
    for sides in both:
      for reader, _ in sides:
        with pytest.raises(ConnectionResetError):
          await soon(reader.read())
    learner, syncer = await peers.connect()
    await ask(learner, syncer, b'again', b'welcome')

  run(scenario)


def test_every_connection_looks_up_the_address_again():
  async def scenario(peers):
    good, peers.address = peers.address, '127.0.0.1:nowhere'
    learner = await peers.dial()
    with pytest.raises(ConnectionResetError):
      await soon(learner[0].read())
    peers.address = good
    await ask(*await peers.connect(), b'there', b'here')

  run(scenario)


def test_a_learner_is_told_of_a_dead_syncer():
  async def scenario(peers):
    learner, syncer = await peers.connect()
    await ask(learner, syncer, b'a', b'b')
    syncer[1].transport.abort()
    with _ended():
      assert await soon(learner[0].read()) == b''

  run(scenario)


# --- With our transports on both sides ------------------------------------------------------------

_LIMITS = link.Limits(
  contribution_bytes=(MIB,), publish_bytes=(MIB,), handshake_s=DEADLINE_S, drain_s=1.0
)
_ACCESS = addresses.Access(plaintext_loopback=True)
_JOIN = messages.Join(
  protocol=1, run='', learner='l0', nonce=1, incarnation=0, agreement='', host='', pid=1
)


class Behind:
  """A proxy on an event loop of its own thread, before a syncer's port."""

  def __init__(self, port: int):
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever)
    self._thread.start()
    self.proxy = proxy_lib.Proxy(lambda: f'127.0.0.1:{port}')
    self._wait(self.proxy.start())

  def _wait(self, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

  def do(self, function, *args) -> None:
    self._loop.call_soon_threadsafe(function, *args)

  def close(self) -> None:
    self._wait(self.proxy.close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()


@pytest.fixture(name='ends')
def _ends():
  """(events of the syncer, its transport, events of the learner, its transport, the proxy)."""
  syncer_events, learner_events = queue.Queue(), queue.Queue()
  syncer = grpc_server.GrpcSyncerTransport(
    '127.0.0.1:0', syncer_events.put, payloads.PayloadStore(), _LIMITS, access=_ACCESS
  )
  behind = Behind(syncer.port)
  learner = grpc_client.GrpcLearnerTransport(
    lambda: behind.proxy.address,
    learner_events.put,
    payloads.PayloadStore(),
    _LIMITS,
    access=_ACCESS,
  )
  yield syncer_events, syncer, learner_events, learner, behind
  learner.shutdown(0.0)
  syncer.shutdown(0.0)
  behind.close()


def test_a_flipped_byte_of_a_payload_ends_the_session_and_is_never_delivered(ends):
  syncer_events, syncer, learner_events, learner, behind = ends
  data = bytes(range(256)) * 4096
  for session in (1, 2):
    learner.dial(session)
    assert learner_events.get(timeout=DEADLINE_S) == events.Connected(session=session)
    number = syncer_events.get(timeout=DEADLINE_S).session
    learner.send(session, _JOIN)
    assert isinstance(syncer_events.get(timeout=DEADLINE_S).message, messages.Join)
    syncer.send(number, messages.Pull(sync=1, fragment=0, now=True))
    assert isinstance(learner_events.get(timeout=DEADLINE_S), events.Received)
    if session == 1:
      behind.do(behind.proxy.up.flip, 16384)
    said = answers.contribution(answers.payload(data))
    learner.send(session, said, data)
    event = syncer_events.get(timeout=DEADLINE_S)
    if session == 1:
      assert isinstance(event, events.Disconnected), event
      assert behind.proxy.up.flipped == 1
      lost = learner_events.get(timeout=DEADLINE_S)
      assert isinstance(lost, events.Disconnected) and lost.session == 1
    else:
      assert isinstance(event, events.Received) and event.message == said


def test_half_open_for_both_ends_and_then_healed(ends):
  syncer_events, syncer, learner_events, learner, behind = ends
  learner.dial(1)
  assert isinstance(learner_events.get(timeout=DEADLINE_S), events.Connected)
  number = syncer_events.get(timeout=DEADLINE_S).session
  learner.send(1, _JOIN)
  assert isinstance(syncer_events.get(timeout=DEADLINE_S).message, messages.Join)
  behind.do(behind.proxy.up.set, proxy_lib.Toxics(cut=True))
  learner.send(1, messages.Heartbeat())
  syncer.send(number, messages.Heartbeat())
  assert isinstance(learner_events.get(timeout=DEADLINE_S), events.Received)
  assert syncer_events.empty()
  behind.do(behind.proxy.heal)
  assert isinstance(syncer_events.get(timeout=DEADLINE_S), events.Received)


def test_a_heartbeat_does_not_wait_behind_a_payload_on_a_slow_link(ends):
  syncer_events, syncer, learner_events, learner, behind = ends
  learner.dial(1)
  assert isinstance(learner_events.get(timeout=DEADLINE_S), events.Connected)
  number = syncer_events.get(timeout=DEADLINE_S).session
  learner.send(1, _JOIN)
  assert isinstance(syncer_events.get(timeout=DEADLINE_S).message, messages.Join)
  syncer.send(number, messages.Pull(sync=1, fragment=0, now=True))
  assert isinstance(learner_events.get(timeout=DEADLINE_S), events.Received)
  behind.do(behind.proxy.up.set, proxy_lib.Toxics(rate=MIB // 4))
  data = bytes(MIB)
  before = behind.proxy.up.came_bytes
  learner.send(1, answers.contribution(answers.payload(data)), data)
  began = time.monotonic()
  while behind.proxy.up.came_bytes < before + MIB // 8:
    assert time.monotonic() < began + DEADLINE_S
    time.sleep(0.001)
  learner.send(1, messages.Heartbeat())
  first, last = (syncer_events.get(timeout=DEADLINE_S).message for _ in range(2))
  assert (first, last) == (messages.Heartbeat(), answers.contribution(answers.payload(data)))
