"""The faulty proxy, over plain sockets; tests/runs/test_chaos_processes.py has it before a syncer.

Nobody waits for a time to pass: a test waits for bytes, for an end, or for a number that the proxy
counts, each with a deadline.
"""

import asyncio
import contextlib

import pytest

from diloco_jax.verification.faults import proxy as proxy_lib

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
    assert loop.time() - began_s >= 0.2  # 0.3 s less the first part, which waits for nothing
    peers.proxy.heal()  # at the old rate the rest would take 100 s
    await soon(syncer[0].readexactly(20 * MIB - 60_000))

  run(scenario)


def test_a_cut_lane_holds_a_bounded_amount_and_stops_the_sender():
  async def scenario(peers):
    learner, syncer = await peers.connect()
    peers.proxy.up.set(proxy_lib.Toxics(cut=True))
    total = 64 * MIB
    sending = asyncio.create_task(_send(learner[1], total))
    held = proxy_lib.HELD_READS * proxy_lib.READ_BYTES
    await true(lambda: peers.proxy.up.came_bytes >= held)
    # The sender cannot be done: the kernel's buffers are far smaller than the total.
    assert not sending.done()
    # One more read waits to enter, and one to leave.
    assert peers.proxy.up.came_bytes <= held + 2 * proxy_lib.READ_BYTES
    peers.proxy.heal()
    assert len(await soon(syncer[0].readexactly(total))) == total
    await soon(sending)

  run(scenario)


async def _send(writer, total: int) -> None:
  for _ in range(total // MIB):
    writer.write(bytes(MIB))
    await writer.drain()


def test_flip_changes_one_bit_of_a_long_enough_read():
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
