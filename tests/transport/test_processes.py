"""Memory and messages between the syncer and its transport processes."""

import gc
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest

from diloco_jax.protocol import events
from diloco_jax.transport import addresses, grpc_server
from diloco_jax.transport import payloads as payloads_lib
from diloco_jax.transport.processes import blocks, parent
from diloco_jax.transport.processes import channel as channel_lib
from tests.transport import test_transports

SIZE = payloads_lib.SMALL_BYTES
ACCESS = addresses.Access(plaintext_loopback=True)


@pytest.fixture(name='ends')
def _ends():
  ends = [channel_lib.Channel(one) for one in multiprocessing.Pipe()]
  yield ends
  for end in ends:
    end.close()


def _block(fill: int) -> memoryview:
  memory = blocks.BLOCKS.make(SIZE)
  memory[:] = fill
  return memoryview(memory)


def test_objects_and_payloads_arrive_in_order(ends):
  here, there = ends
  sent = [('one', None), ('two', b'short'), ('three', _block(3)), ('four', bytes([4]) * SIZE)]
  for thing, payload in sent:
    here.send(thing, payload)
  for thing, payload in sent:
    found, data = there.receive()
    assert found == thing
    assert (data is None) == (payload is None)
    assert data is None or bytes(data) == bytes(payload)


def test_a_payload_in_a_block_is_not_copied_and_is_the_same_object_while_in_use(ends):
  here, there = ends
  payload = _block(1)
  for _ in range(2):
    here.send('', payload)
  (_, first), (_, second) = there.receive(), there.receive()
  assert first is second
  np.frombuffer(payload, np.uint8)[:] = 7  # no sender does that: it shows that this is one memory
  assert bytes(first[:1]) == b'\x07'


def test_the_sender_keeps_a_payload_exactly_as_long_as_it_is_in_use(ends):
  here, there = ends
  payload = _block(1)
  block = blocks.BLOCKS.find(payload)
  here.send('', payload)
  here.send('', payload)
  _, data = there.receive()
  del payload
  part = np.frombuffer(data, np.uint8)[5:]
  there.receive()
  del data
  _synchronize(here, there)
  assert os.fstat(block.descriptor) and part[0] == 1  # it is in use
  del part
  _synchronize(here, there)
  with pytest.raises(OSError):
    os.fstat(block.descriptor)


def _synchronize(here: channel_lib.Channel, there: channel_lib.Channel) -> None:
  """What `there` has no use for any more is known `here`."""
  gc.collect()
  there.send('done')
  assert here.receive() == ('done', None)
  gc.collect()


def test_a_killed_process_ends_its_sessions_and_another_one_answers():
  world = test_transports.ProcessesWorld()
  try:
    syncer, learner = world.syncer(), world.learner()
    number = test_transports.connect(syncer, learner)
    data = os.urandom(3 * SIZE)
    test_transports.pull(syncer, number, learner, data)
    learner.transport.send(1, test_transports.contribution(data), memoryview(data))
    arrived = syncer.hears()
    process = syncer.transport._processes[(number - 1) % 2]
    os.kill(process._popen.pid, signal.SIGKILL)
    assert isinstance(syncer.hears(), events.Disconnected)
    assert isinstance(learner.hears(), events.Disconnected)
    assert bytes(syncer.payloads.get(arrived.payload_id)) == data  # what has arrived is safe
    again = test_transports.connect(syncer, learner, session=2)
    assert again != number
  finally:
    world.finish()


def test_a_shutdown_while_a_process_starts_again_ends(monkeypatch):
  """The new process is not among those that the shutdown has told."""
  transport = parent.ProcessesTransport(
    1, '127.0.0.1:0', print, payloads_lib.PayloadStore(), test_transports.LIMITS, access=ACCESS
  )
  begin, starts, told = transport._begin, threading.Event(), threading.Event()

  def begin_late(*where):
    starts.set()
    assert told.wait(test_transports.DEADLINE_S)
    return begin(*where)

  monkeypatch.setattr(transport, '_begin', begin_late)
  os.kill(transport._processes[0]._popen.pid, signal.SIGKILL)
  assert starts.wait(test_transports.DEADLINE_S)
  ends = threading.Thread(target=transport.shutdown, args=(0.0,), daemon=True)
  ends.start()
  assert transport._closing.wait(test_transports.DEADLINE_S)
  told.set()
  ends.join(test_transports.DEADLINE_S)
  assert not ends.is_alive()


def test_a_second_syncer_cannot_share_the_port():
  first = parent.ProcessesTransport(
    1, '127.0.0.1:0', print, payloads_lib.PayloadStore(), test_transports.LIMITS, access=ACCESS
  )
  try:
    with pytest.raises(OSError):
      grpc_server.Door(first.address, 1, access=ACCESS)
    with pytest.raises(OSError):
      parent.ProcessesTransport(
        1, first.address, print, payloads_lib.PayloadStore(), test_transports.LIMITS, access=ACCESS
      )
  finally:
    first.shutdown(0.0)


def test_what_a_process_cannot_do_is_said_where_the_syncer_starts():
  where = print, payloads_lib.PayloadStore(), test_transports.LIMITS
  with pytest.raises(ValueError, match='need HOST:PORT'):
    parent.ProcessesTransport(1, 'unix:/nowhere/socket', *where)
  with pytest.raises(ValueError, match='needs certificates'):
    parent.ProcessesTransport(1, '127.0.0.1:0', *where)
