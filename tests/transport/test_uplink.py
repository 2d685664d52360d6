"""A capped uplink over gRPC: chunks leave evenly, whatever is due at once, and messages between
them."""

import queue
import time

import pytest

from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, chunks, grpc_client, grpc_server, link
from diloco_jax.transport import payloads as payloads_lib
from tests.transport import answers

DEADLINE_S = 60
MIB = 1 << 20
PAYLOAD = bytes(MIB)
FRAGMENTS = 4
STEP_S = 0.2  # one payload is due in each
RATE = round(1.25 * MIB / STEP_S)  # less than 4/3: chunks do not end with the windows
ACCESS = addresses.Access(plaintext_loopback=True)
LIMITS = link.Limits(
  contribution_bytes=(MIB,) * FRAGMENTS,
  publish_bytes=(MIB,) * FRAGMENTS,
  uplink_bytes_per_s=RATE,
)
JOIN = messages.Join(protocol=1, learner='l0', nonce=1, agreement='', host='', pid=1)


@pytest.fixture(name='ends')
def _ends():
  """The syncer and a learner that was asked for all fragments, and their inboxes."""
  inboxes, store = (queue.Queue(), queue.Queue()), payloads_lib.PayloadStore
  syncer = grpc_server.GrpcSyncerTransport(
    '127.0.0.1:0', inboxes[0].put, store(), LIMITS, access=ACCESS
  )
  learner = grpc_client.GrpcLearnerTransport(
    lambda: f'127.0.0.1:{syncer.port}', inboxes[1].put, store(), LIMITS, access=ACCESS
  )
  learner.dial(1)
  assert isinstance(inboxes[1].get(timeout=DEADLINE_S), events.Connected)
  session = inboxes[0].get(timeout=DEADLINE_S).session
  learner.send(1, JOIN)
  assert isinstance(inboxes[0].get(timeout=DEADLINE_S).message, messages.Join)
  for p in range(FRAGMENTS):
    syncer.send(session, messages.Pull(sync=p + 1, fragment=p, now=True))
    inboxes[1].get(timeout=DEADLINE_S)
  yield syncer, learner, *inboxes
  learner.shutdown(0.0)
  syncer.shutdown(0.0)


def test_payloads_that_are_due_at_once_leave_evenly_and_messages_between_them(ends, monkeypatch):
  _, learner, at_syncer, _ = ends
  left: list[tuple[float, int]] = []  # of each chunk, when and how many bytes
  count = learner.traffic.add

  def add(sent_bytes: int = 0, received_bytes: int = 0) -> None:
    if sent_bytes > chunks.HEADER_BYTES:
      left.append((time.monotonic(), sent_bytes))
    count(sent_bytes, received_bytes)

  monkeypatch.setattr(learner.traffic, 'add', add)
  announced = answers.payload(PAYLOAD)
  for p in range(FRAGMENTS):
    learner.send(1, answers.contribution(announced, sync=p + 1, fragment=p), PAYLOAD)
  learner.send(1, messages.Heartbeat())
  heard = [type(at_syncer.get(timeout=DEADLINE_S).message) for _ in range(FRAGMENTS + 1)]
  assert heard[-1] is messages.Contribution and heard.count(messages.Heartbeat) == 1
  sizes = [size for _, size in left if size > chunks.CHUNK_BYTES // 2]
  assert len(sizes) == FRAGMENTS * MIB // chunks.CHUNK_BYTES
  peak = max(
    sum(size for at_s, size in left if begin_s <= at_s < begin_s + STEP_S) for begin_s, _ in left
  )
  assert peak <= 4 / 3 * MIB * 1.01  # headers and messages
