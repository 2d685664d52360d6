"""Tests that need real sockets and processes: killed, frozen and hostile peers, and refused
addresses."""

import dataclasses
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import zlib
from concurrent import futures

import grpc
import pytest

from diloco_jax.protocol import events, messages
from diloco_jax.transport import (
  addresses,
  chunks,
  control_crc,
  grpc_client,
  grpc_server,
  grpc_session,
  link,
  payloads,
  sync_pb2,
  translate,
)
from tests.transport import answers

DEADLINE_S = 20
MIB = 1 << 20
LIMITS = link.Limits(
  contribution_bytes=(3, 11),
  publish_bytes=(4 * MIB, 4 * MIB),
  max_members=3,
  max_strangers=6,
  handshake_s=20.0,
  drain_s=1.0,
)
ACCESS = addresses.Access(plaintext_loopback=True)
JOIN = messages.Join(
  protocol=1, run='', learner='l0', nonce=1, incarnation=0, agreement='', host='', pid=1
)

LEARNER = """
import sys, queue, zlib
from diloco_jax.transport import addresses, link
from diloco_jax.transport import grpc_client
from diloco_jax.transport import payloads
inbox = queue.Queue()
limits = link.Limits(contribution_bytes=(0,), publish_bytes=(1 << 22,))
ACCESS = addresses.Access(plaintext_loopback=True)
transport = grpc_client.GrpcLearnerTransport(
  lambda: sys.argv[1], inbox.put, payloads.PayloadStore(), limits, access=ACCESS)
transport.dial(1)
while True:
  print(type(inbox.get()).__name__, flush=True)
"""

SYNCER = """
import queue
from diloco_jax.transport import addresses, link
from diloco_jax.transport import grpc_server
from diloco_jax.transport import payloads
inbox = queue.Queue()
limits = link.Limits(contribution_bytes=(0,), publish_bytes=(1 << 22,))
ACCESS = addresses.Access(plaintext_loopback=True)
transport = grpc_server.GrpcSyncerTransport(
  '127.0.0.1:0', inbox.put, payloads.PayloadStore(), limits, access=ACCESS)
print(transport.port, flush=True)
inbox.get()
while True:
  inbox.get()
"""


@pytest.fixture
def syncer():
  inbox = queue.Queue()
  transport = grpc_server.GrpcSyncerTransport(
    '127.0.0.1:0', inbox.put, payloads.PayloadStore(), LIMITS, access=ACCESS
  )
  transport.inbox = inbox
  yield transport
  transport.shutdown(0.0)


@pytest.fixture
def dial():
  """Makes a learner that dials session 1."""
  made = []

  def make(port, limits=LIMITS):
    inbox = queue.Queue()
    transport = grpc_client.GrpcLearnerTransport(
      lambda: f'127.0.0.1:{port}', inbox.put, payloads.PayloadStore(), limits, access=ACCESS
    )
    transport.inbox = inbox
    transport.dial(1)
    made.append(transport)
    return transport

  yield make
  for transport in made:
    transport.shutdown(0.0)


@pytest.fixture
def child():
  """Starts a Python program that prints lines; killed at the end of the test."""
  started = []

  def start(source, *args):
    process = subprocess.Popen(
      [sys.executable, '-c', source, *args],
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, 'PYTHONPATH': os.getcwd()},
    )
    started.append(process)
    return process

  yield start
  for process in started:
    process.kill()
    process.wait(DEADLINE_S)
    process.stdout.close()


def connected(transport):
  event = event_of(transport)
  assert isinstance(event, events.Connected), event
  return event.session


def joined(syncer, learner, *asked):
  """The syncer's number of a new session, which is a member's and has been asked for this."""
  assert isinstance(event_of(learner), events.Connected)
  number = connected(syncer)
  learner.send(1, JOIN)
  assert isinstance(event_of(syncer).message, messages.Join)
  for message in asked or (messages.Heartbeat(),):
    syncer.send(number, message)
    assert event_of(learner).message == message
  return number


def contribution(data, **changes):
  """`changes` are of the announced payload."""
  return answers.contribution(answers.payload(data, **changes))


def event_of(transport):
  return transport.inbox.get(timeout=DEADLINE_S)


def raw_streams(port, control=(), bulk=None, token=None):
  """A peer that sends arbitrary bytes; returns its channel and the two calls."""
  channel = grpc.insecure_channel(f'127.0.0.1:{port}', (('grpc.use_local_subchannel_pool', 1),))
  first = channel.stream_stream(f'/{grpc_session.SERVICE}/Control')(iter(control))
  if token is None:
    token = dict(first.initial_metadata())[grpc_session.TOKEN]
  second = channel.stream_stream(f'/{grpc_session.SERVICE}/Bulk')(
    iter(bulk or ()), metadata=((grpc_session.TOKEN, token),)
  )
  return channel, first, second


def status_of(call):
  with pytest.raises(grpc.RpcError):
    for _ in call:
      pass
  return call.code(), call.details()


# --- Peers that die or freeze ---------------------------------------------------------------------


def test_a_killed_learner_is_disconnected_once(syncer, child):
  process = child(LEARNER, f'127.0.0.1:{syncer.port}')
  number = connected(syncer)
  assert process.stdout.readline() == 'Connected\n'
  process.send_signal(signal.SIGKILL)
  lost = event_of(syncer)
  assert isinstance(lost, events.Disconnected) and lost.session == number
  again = child(LEARNER, f'127.0.0.1:{syncer.port}')
  connected(syncer)  # no other event came before
  again.kill()
  assert isinstance(event_of(syncer), events.Disconnected)


def test_a_killed_syncer_is_disconnected_once_and_redialed(child, dial):
  process = child(SYNCER)
  learner = dial(int(process.stdout.readline()))
  connected(learner)
  process.send_signal(signal.SIGKILL)
  lost = event_of(learner)
  assert isinstance(lost, events.Disconnected) and lost.reason
  learner.dial(2)
  refused = event_of(learner)
  assert refused.session == 2 and refused.reason.startswith('unavailable: ')


def test_closing_the_session_of_a_frozen_learner_does_not_wait(syncer, child):
  process = child(LEARNER, f'127.0.0.1:{syncer.port}')
  number = connected(syncer)
  assert process.stdout.readline() == 'Connected\n'
  process.send_signal(signal.SIGSTOP)
  data = bytes(4 * MIB)
  publish = messages.Publish(
    sync=1,
    fragment=0,
    version=1,
    base_version=0,
    digest=0,
    settled_to=0,
    keep=True,
    payload=messages.Payload(size_bytes=len(data), crc32=zlib.crc32(data)),
  )
  for _ in range(16):  # more than flow control lets pass
    syncer.send(number, publish, data)
  session = syncer._find(number)
  syncer.close(number, 'its lease is over')
  assert event_of(syncer) == events.Disconnected(session=number, reason='its lease is over')
  assert session.finished.wait(DEADLINE_S)  # the session cancels its streams after drain_s
  assert syncer._find(number) is None


def test_a_dial_without_an_answer_fails_in_time(dial):
  with socket.create_server(('127.0.0.1', 0)) as silent:
    learner = dial(silent.getsockname()[1], dataclasses.replace(LIMITS, handshake_s=0.3))
    lost = event_of(learner)
  assert lost.reason.startswith('unavailable: ')


def test_another_grpc_server_is_no_syncer(dial):
  def control(requests, context):
    yield from ()

  handler = grpc.method_handlers_generic_handler(
    grpc_session.SERVICE, {'Control': grpc.stream_stream_rpc_method_handler(control)}
  )
  with futures.ThreadPoolExecutor(2) as pool:
    server = grpc.server(pool)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port('127.0.0.1:0')
    server.start()
    assert 'is no syncer' in event_of(dial(port)).reason
    server.stop(None).wait()


# --- Addresses ------------------------------------------------------------------------------------


def test_an_unknown_address_ends_the_dial():
  def address():
    raise FileNotFoundError('no address file yet')

  inbox = queue.Queue()
  learner = grpc_client.GrpcLearnerTransport(
    address, inbox.put, payloads.PayloadStore(), LIMITS, access=ACCESS
  )
  learner.dial(1)
  assert inbox.get(timeout=DEADLINE_S).reason == 'no address file yet'
  learner.shutdown(0.0)


def test_a_port_in_use_is_one_clear_line(syncer):
  with pytest.raises(OSError, match='in use') as caught:
    grpc_server.GrpcSyncerTransport(
      f'127.0.0.1:{syncer.port}', print, payloads.PayloadStore(), LIMITS, access=ACCESS
    )
  assert '\n' not in str(caught.value)


# --- Hostile peers --------------------------------------------------------------------------------


def frame_of(data):
  return next(chunks.split(data))


def oversized_frame():
  fields = chunks._FIELDS.pack(
    chunks.MAGIC, chunks.VERSION, chunks.HEADER_BYTES, 2**63, 0, 2**32 - 1, 0
  )
  return fields + chunks._CHECK.pack(zlib.crc32(fields)) + bytes(MIB)


HEARTBEAT = sync_pb2.ControlRequest(heartbeat=sync_pb2.Heartbeat())
NEGATIVE_STEP = sync_pb2.ControlRequest(progress=sync_pb2.Progress(clock=-1))


@pytest.mark.parametrize(
  'control, bulk, clause',
  [
    ((), (b'garbage' * 10,), 'magic'),
    ((), (b'',), 'truncated'),
    ((), (frame_of(b'abc')[:-1],), 'size'),
    ((), (oversized_frame(),), 'count'),
    ((), (frame_of(b'abc'),), 'not asked for'),
    ((), (frame_of(b''),), 'not asked for'),
    ((control_crc.Seal().close(HEARTBEAT.SerializeToString()),), (), 'Heartbeat before Join'),
    ((control_crc.Seal().close(b'\xff\xff'),), (), 'protobuf'),
    ((control_crc.Seal().close(b''),), (), 'body'),
    ((control_crc.Seal().close(NEGATIVE_STEP.SerializeToString()),), (), 'range'),
    ((NEGATIVE_STEP.SerializeToString(),), (), 'checksum'),
  ],
)
def test_garbage_ends_its_own_session_only(syncer, dial, control, bulk, clause):
  good = dial(syncer.port)
  number = joined(syncer, good)
  channel, first, second = raw_streams(syncer.port, control, bulk)
  with channel:
    code, details = status_of(first)
    assert code is grpc.StatusCode.ABORTED and clause in details
    bad = event_of(syncer)
    assert isinstance(bad, events.Connected)
    assert clause in event_of(syncer).reason
  good.send(1, messages.Heartbeat())
  assert event_of(syncer) == events.Received(session=number, message=messages.Heartbeat())


def test_an_unknown_session_token_is_refused(syncer, dial):
  channel, first, second = raw_streams(syncer.port, token='0' * 32)
  with channel:
    code, details = status_of(second)
  assert code is grpc.StatusCode.FAILED_PRECONDITION and 'unknown session token' in details
  dial(syncer.port)
  event = event_of(syncer)
  assert isinstance(event, events.Connected) and event.session == 2  # session 1 never opened


def test_a_session_token_serves_once(syncer):
  channel, first, second = raw_streams(syncer.port)
  with channel:
    connected(syncer)
    token = dict(first.initial_metadata())[grpc_session.TOKEN]
    third = channel.stream_stream(f'/{grpc_session.SERVICE}/Bulk')(
      iter(()), metadata=((grpc_session.TOKEN, token),)
    )
    assert status_of(third)[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_control_without_bulk_is_closed(dial):
  inbox = queue.Queue()
  hasty = dataclasses.replace(LIMITS, handshake_s=0.2)
  transport = grpc_server.GrpcSyncerTransport(
    '127.0.0.1:0', inbox.put, payloads.PayloadStore(), hasty, access=ACCESS
  )
  with grpc.insecure_channel(f'127.0.0.1:{transport.port}') as channel:
    control = channel.stream_stream(f'/{grpc_session.SERVICE}/Control')(iter(()))
    code, details = status_of(control)
  transport.shutdown(0.0)
  assert code is grpc.StatusCode.ABORTED and 'no Bulk stream within 0.2 s' in details
  assert inbox.empty()


PULL = messages.Pull(sync=1, fragment=0, now=True)


@pytest.mark.parametrize(
  'asked, message, data, why',
  [
    ((), contribution(b'abc'), b'abc', 'not asked'),
    ((PULL,), contribution(b'abcd'), b'abcd', 'not asked for|4 bytes, 3 were asked for'),
    ((PULL,), contribution(b'abc', crc32=1), b'abc', 'announces'),
    (
      (PULL,),
      messages.Decline(sync=2, fragment=0, reason='empty', tokens_to=0),
      None,
      r'Decline for \(2, 0\), for which',
    ),
    ((PULL,), JOIN, None, 'a second Join'),
  ],
)
def test_a_member_sends_only_what_it_was_asked_for(syncer, dial, asked, message, data, why):
  learner = dial(syncer.port, dataclasses.replace(LIMITS, publish_bytes=(16 * MIB,)))
  joined(syncer, learner, *asked)
  learner.send(1, message, data)
  lost = event_of(syncer)
  assert isinstance(lost, events.Disconnected) and re.search(why, lost.reason), lost


def test_a_learner_believes_no_size_that_the_layout_does_not_have(syncer, dial):
  learner = dial(syncer.port, dataclasses.replace(LIMITS, publish_bytes=(2, 4)))
  number = joined(syncer, learner)
  publish = messages.Publish(
    sync=1,
    fragment=0,
    version=1,
    base_version=None,
    digest=0,
    settled_to=0,
    keep=True,
    payload=messages.Payload(size_bytes=3, crc32=zlib.crc32(b'abc')),
  )
  syncer.send(number, publish, b'abc')
  assert 'announces 3 bytes, the layout allows 2' in event_of(learner).reason


def test_a_peer_that_is_too_slow_is_disconnected(syncer, dial):
  learner = dial(syncer.port, dataclasses.replace(LIMITS, max_queued_bytes=10))
  connected(learner)
  learner.send(1, contribution(bytes(11)), bytes(11))
  lost = event_of(learner)
  assert lost.reason == (
    'too slow: 0 payload bytes wait to go out and 11 more would be over the 10 granted'
  )


def test_an_unencodable_message_ends_the_session_with_the_reason(syncer, dial):
  learner = dial(syncer.port)
  connected(learner)
  learner.send(1, messages.Leave(reason='x' * 1000))
  assert 'Leave.reason has length 1000, at most 255' in event_of(learner).reason


def test_the_wire_constants_agree_with_the_schema():
  service = sync_pb2.DESCRIPTOR.services_by_name['SyncerService']
  assert service.full_name == grpc_session.SERVICE
  assert [m.name for m in service.methods] == ['Control', 'Bulk']
  assert translate.LEARNER_TO_SYNCER.envelope.DESCRIPTOR.name == 'ControlRequest'
