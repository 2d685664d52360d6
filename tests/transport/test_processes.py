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


def _transport(address: str = '127.0.0.1:0', access: addresses.Access = ACCESS):
  """A transport with one process."""
  store, limits = payloads_lib.PayloadStore(), test_transports.LIMITS
  return parent.ProcessesTransport(1, address, print, store, limits, access=access)


@pytest.fixture(name='ends')
def _ends():
  ends = [channel_lib.Channel(pipe) for pipe in multiprocessing.Pipe()]
  yield ends
  for end in ends:
    end.close()


def _block(fill: int) -> memoryview:
  memory = blocks.BLOCKS.make(SIZE)
  memory[:] = fill
  return memoryview(memory)


def test_objects_and_payloads_arrive_in_order(ends):
  sender, receiver = ends
  sent = [('one', None), ('two', b'short'), ('three', _block(3)), ('four', bytes([4]) * SIZE)]
  for thing, payload in sent:
    sender.send(thing, payload)
  for thing, payload in sent:
    received, data = receiver.receive()
    assert received == thing
    assert (data is None) == (payload is None)
    assert data is None or bytes(data) == bytes(payload)


def test_a_payload_in_a_block_is_not_copied_and_is_the_same_object_while_in_use(ends):
  sender, receiver = ends
  payload = _block(1)
  for _ in range(2):
    sender.send('', payload)
  (_, data), (_, again) = receiver.receive(), receiver.receive()
  assert data is again
  np.frombuffer(payload, np.uint8)[:] = 7  # no sender does that: it shows that this is one memory
  assert bytes(data[:1]) == b'\x07'


def test_the_sender_keeps_a_payload_exactly_as_long_as_it_is_in_use(ends):
  sender, receiver = ends
  payload = _block(1)
  block = blocks.BLOCKS.find(payload)
  sender.send('', payload)
  sender.send('', payload)
  _, data = receiver.receive()
  del payload
  part = np.frombuffer(data, np.uint8)[5:]
  receiver.receive()
  del data
  _synchronize(sender, receiver)
  assert os.fstat(block.descriptor) and part[0] == 1  # it is in use
  del part
  _synchronize(sender, receiver)
  with pytest.raises(OSError):
    os.fstat(block.descriptor)


def _synchronize(sender: channel_lib.Channel, receiver: channel_lib.Channel) -> None:
  """Waits until the sender knows what the receiver has no use for any more."""
  gc.collect()
  receiver.send('done')
  assert sender.receive() == ('done', None)
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
  """The shutdown did not send its call to the new process."""
  transport = _transport()
  begin, starts, closing = transport._begin, threading.Event(), threading.Event()

  def begin_late(*where):
    starts.set()
    assert closing.wait(test_transports.DEADLINE_S)
    return begin(*where)

  monkeypatch.setattr(transport, '_begin', begin_late)
  os.kill(transport._processes[0]._popen.pid, signal.SIGKILL)
  assert starts.wait(test_transports.DEADLINE_S)
  shutdown = threading.Thread(target=transport.shutdown, args=(0.0,), daemon=True)
  shutdown.start()
  assert transport._closing.wait(test_transports.DEADLINE_S)
  closing.set()
  shutdown.join(test_transports.DEADLINE_S)
  assert not shutdown.is_alive()


def test_a_second_syncer_cannot_share_the_port():
  first = _transport()
  try:
    with pytest.raises(OSError):
      grpc_server.Door(first.address, 1, access=ACCESS)
    with pytest.raises(OSError):
      _transport(first.address)
  finally:
    first.shutdown(0.0)


def test_an_address_that_no_process_can_serve_is_refused_where_the_syncer_starts():
  with pytest.raises(ValueError, match='need HOST:PORT'):
    _transport('unix:/nowhere/socket', addresses.LOCAL)
  with pytest.raises(ValueError, match='needs certificates'):
    _transport(access=addresses.LOCAL)
