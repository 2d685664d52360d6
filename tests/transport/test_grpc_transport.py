"""Tests that need real sockets: silent and hostile peers, and refused addresses."""

import contextlib
import dataclasses
import socket
from concurrent import futures

import grpc
import pytest

from diloco_jax.protocol import events, messages
from diloco_jax.transport import chunks, control_crc, grpc_session, link, sync_pb2, translate
from tests.transport import ends, samples

MIB = 1 << 20
LIMITS = link.Limits(
  contribution_bytes=(3, 11),
  publish_bytes=(4 * MIB, 4 * MIB),
  max_members=3,
  max_strangers=6,
  handshake_s=20.0,
  drain_s=1.0,
)


@pytest.fixture
def syncer():
  end = ends.syncer(LIMITS)
  yield end
  end.transport.shutdown(0.0)


@pytest.fixture
def dial():
  """Makes a learner that dials session 1."""
  with contextlib.ExitStack() as closing:

    def make(port, limits=LIMITS):
      end = ends.learner(f'127.0.0.1:{port}', limits)
      closing.callback(end.transport.shutdown, 0.0)
      return end

    yield make


def status_of(call):
  with pytest.raises(grpc.RpcError):
    for _ in call:
      pass
  return call.code(), call.details()


# --- Peers that say nothing -----------------------------------------------------------------------


def test_a_dial_without_an_answer_fails_in_time(dial):
  with socket.create_server(('127.0.0.1', 0)) as silent:
    learner = dial(silent.getsockname()[1], dataclasses.replace(LIMITS, handshake_s=0.3))
    lost = learner.hears()
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
    assert 'is no syncer' in dial(port).hears().reason
    server.stop(None).wait()


# --- Addresses ------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_clear_line(syncer):
  with pytest.raises(OSError, match='in use') as caught:
    ends.syncer(LIMITS, address=syncer.transport.address)
  assert '\n' not in str(caught.value)


# --- Hostile peers --------------------------------------------------------------------------------


HEARTBEAT = sync_pb2.ControlRequest(heartbeat=sync_pb2.Heartbeat())
NEGATIVE_STEP = sync_pb2.ControlRequest(progress=sync_pb2.Progress(clock=-1))


@pytest.mark.parametrize(
  'control, bulk, clause',
  [
    ((), (b'garbage' * 10,), 'magic'),
    ((), chunks.split(b'abc'), 'not asked for'),
    ((), (chunks.acknowledgement(0),), 'acknowledges 0 bytes'),
    ((control_crc.Seal().close(HEARTBEAT.SerializeToString()),), (), 'Heartbeat before Join'),
    ((control_crc.Seal().close(NEGATIVE_STEP.SerializeToString()),), (), 'range'),
    ((NEGATIVE_STEP.SerializeToString(),), (), 'checksum'),
  ],
)
def test_garbage_ends_its_own_session_only(syncer, dial, control, bulk, clause):
  good = dial(syncer.port)
  number = ends.join(syncer, good)
  with ends.plain_channel(syncer.transport.address) as channel:
    first = ends.call(channel, 'Control', control)
    second = ends.call(channel, 'Bulk', bulk, ends.token_of(first))
    code, details = status_of(first)
    assert code is grpc.StatusCode.ABORTED and clause in details
    assert clause in status_of(second)[1]
    assert isinstance(syncer.hears(), events.Connected)
    assert clause in syncer.hears().reason
  good.transport.send(1, messages.Heartbeat())
  assert syncer.hears() == events.Received(session=number, message=messages.Heartbeat())


def test_a_session_token_serves_once(syncer):
  with ends.plain_channel(syncer.transport.address) as channel:
    control = ends.call(channel, 'Control')
    token = ends.token_of(control)
    bulk = ends.call(channel, 'Bulk', token=token)
    assert isinstance(syncer.hears(), events.Connected) and bulk.is_active()
    code, details = status_of(ends.call(channel, 'Bulk', token=token))
    assert code is grpc.StatusCode.FAILED_PRECONDITION and 'unknown session token' in details


def test_control_without_bulk_is_closed():
  syncer = ends.syncer(dataclasses.replace(LIMITS, handshake_s=0.2))
  with ends.plain_channel(syncer.transport.address) as channel:
    code, details = status_of(ends.call(channel, 'Control'))
  syncer.transport.shutdown(0.0)
  assert code is grpc.StatusCode.ABORTED and 'no Bulk stream within 0.2 s' in details
  assert syncer.inbox.empty()


def test_a_learner_refuses_a_size_that_the_layout_does_not_have(syncer, dial):
  learner = dial(syncer.port, dataclasses.replace(LIMITS, publish_bytes=(2, 4)))
  number = ends.join(syncer, learner)
  publish = samples.publish(samples.payload(b'abc'), base_version=None)
  syncer.transport.send(number, publish, b'abc')
  assert 'announces 3 bytes, the layout allows 2' in learner.hears().reason


@pytest.mark.parametrize(
  'message, data, reason',
  [
    (
      samples.contribution(samples.payload(bytes(11))),
      bytes(11),
      'too slow: 0 payload bytes wait to go out and 11 more would be over the 10 granted',
    ),
    (messages.Leave(reason='x' * 1000), None, 'Leave.reason has length 1000, at most 255'),
  ],
  ids=['too slow', 'not encodable'],
)
def test_a_message_that_cannot_be_sent_ends_the_session_with_the_reason(
  syncer, dial, message, data, reason
):
  learner = dial(syncer.port, dataclasses.replace(LIMITS, max_queued_bytes=10))
  assert isinstance(learner.hears(), events.Connected)
  learner.transport.send(1, message, data)
  assert reason in learner.hears().reason


def test_the_wire_constants_agree_with_the_schema():
  service = sync_pb2.DESCRIPTOR.services_by_name['SyncerService']
  assert service.full_name == grpc_session.SERVICE
  assert [m.name for m in service.methods] == ['Control', 'Bulk']
  assert translate.LEARNER_TO_SYNCER.envelope.DESCRIPTOR.name == 'ControlRequest'
