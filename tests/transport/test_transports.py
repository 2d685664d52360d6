"""The guarantees of the port `node.ports.Transport`, tested over every transport.

After each test all ends shut down, and the fixture checks the history of every end: the events of a
session are Connected (or none), messages, one Disconnected, and no event after it.
"""

import os
import threading

import pytest

from diloco_jax.protocol import events, messages
from diloco_jax.transport import in_process, link
from diloco_jax.transport.processes import parent
from tests.transport import ends, samples

DEADLINE_S = ends.DEADLINE_S
MIB = 1 << 20
SIZES = (0, 1, 3, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 3 * MIB, 5 * MIB)  # by fragment
LIMITS = link.Limits(
  contribution_bytes=SIZES, publish_bytes=(8 * MIB,) * len(SIZES), max_members=8, drain_s=2.0
)


def check_history(history):
  for session in {event.session for event in history}:
    kinds = [type(e) for e in history if e.session == session]
    assert kinds.count(events.Disconnected) == 1 and kinds[-1] is events.Disconnected, kinds
    assert kinds[0] is events.Connected or kinds == [events.Disconnected], kinds


class InProcessWorld:
  def __init__(self):
    self.hub = in_process.InProcessHub()
    self.ends = []

  def syncer(self):
    return self.add(ends.End(self.hub.syncer_transport))

  def learner(self):
    return self.add(ends.End(self.hub.learner_transport))

  def cut(self, learner):
    learner.transport.shutdown(0.0)

  def add(self, end):
    self.ends.append(end)
    return end

  def finish(self):
    for end in reversed(self.ends):
      end.transport.shutdown(1.0)
      while not end.inbox.empty():
        end.hears()
      check_history(end.history)


class GrpcWorld(InProcessWorld):
  def __init__(self):
    self.ends = []
    self.port = 0

  def syncer(self):
    end = ends.syncer(LIMITS)
    self.port = end.port
    return self.add(end)

  def learner(self):
    def address():
      return f'127.0.0.1:{self.port or 1}'  # no process listens on port 1

    return self.add(ends.idle_learner(address, LIMITS))

  def cut(self, learner):
    for session in list(learner.transport._sessions.values()):
      session.cancel()

  def finish(self):
    super().finish()
    for thread in threading.enumerate():
      if thread.name.startswith(('session-', 'control-', 'bulk-', 'gone-', 'syncer-grpc')):
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread


class ProcessesWorld(GrpcWorld):
  """The syncer's sessions are served by processes of their own."""

  def syncer(self):
    end = ends.End(
      lambda *ports: parent.ProcessesTransport(2, '127.0.0.1:0', *ports, LIMITS, access=ends.PLAIN)
    )
    self.port = end.port
    return self.add(end)


@pytest.fixture(
  params=[
    pytest.param(InProcessWorld, id='inprocess'),
    pytest.param(GrpcWorld, id='grpc'),
    pytest.param(ProcessesWorld, id='processes', marks=pytest.mark.long),  # test_processes.py
  ]
)
def world(request):
  world = request.param()
  yield world
  world.finish()


def connect(syncer, learner, session=1):
  """Dials, sends the Join and returns the syncer's number of the session."""
  learner.transport.dial(session)
  number = ends.open_session(syncer, learner)
  learner.transport.send(session, samples.join(), None)
  assert isinstance(syncer.message(), messages.Join)
  syncer.transport.admit(number)
  return number


def pull(syncer, number, learner, *blobs):
  """Asks the learner for contributions of these sizes."""
  for blob in blobs:
    asked = messages.Pull(sync=1, fragment=SIZES.index(len(blob)), now=True)
    syncer.transport.send(number, asked, None)
    assert learner.message() == asked


def contribution(data):
  return samples.contribution(samples.payload(data), fragment=SIZES.index(len(data)), tokens_to=8)


def publish(data):
  return samples.publish(samples.payload(data))


def adopted(version):
  return messages.Adopted(fragment=0, version=version, tokens=0, matched=True)


def received_bytes(end, message):
  event = end.hears()
  assert event.message == message
  return bytes(end.payloads.get(event.payload_id))


def test_messages_arrive_in_order_both_ways(world):
  syncer, learner = world.syncer(), world.learner()
  number = connect(syncer, learner)
  for step in range(200):
    learner.transport.send(1, adopted(step), None)
    syncer.transport.send(number, messages.Pull(sync=step, fragment=0, now=True), None)
  assert [syncer.message().version for _ in range(200)] == list(range(200))
  assert [learner.message().sync for _ in range(200)] == list(range(200))


def test_payloads_cross_whole_both_ways(world):
  syncer, learner = world.syncer(), world.learner()
  number = connect(syncer, learner)
  sizes = 0, 1, MIB, MIB + 1, 5 * MIB
  for size in sizes:
    data = os.urandom(size)
    pull(syncer, number, learner, data)
    learner.transport.send(1, contribution(data), memoryview(data))
    syncer.transport.send(number, publish(data), data)
    assert received_bytes(syncer, contribution(data)) == data
    assert received_bytes(learner, publish(data)) == data
  for end in (syncer, learner):
    for counted in (end.transport.traffic.sent_bytes, end.transport.traffic.received_bytes):
      assert 0 <= counted - sum(sizes) <= 2_000  # headers and messages are small


def test_payloads_keep_their_order_among_control_messages(world):
  syncer, learner = world.syncer(), world.learner()
  number = connect(syncer, learner)
  blobs = [os.urandom(size) for size in (5 * MIB, 3 * MIB, 2 * MIB + 1, 1)]
  pull(syncer, number, learner, *blobs)
  for k, blob in enumerate(blobs):
    learner.transport.send(1, contribution(blob), blob)
    learner.transport.send(1, adopted(k), None)
  received = [syncer.message() for _ in range(8)]
  assert [m.version for m in received if isinstance(m, messages.Adopted)] == [0, 1, 2, 3]
  contributions = [m for m in received if isinstance(m, messages.Contribution)]
  assert contributions == [*map(contribution, blobs)]


def test_messages_before_a_close_arrive_before_it(world):
  syncer, learner = world.syncer(), world.learner()
  number = connect(syncer, learner)
  data = os.urandom(5 * MIB)
  pull(syncer, number, learner, data)
  learner.transport.send(1, contribution(data), data)
  learner.transport.send(1, messages.Leave(reason='done'), None)
  learner.transport.close(1, 'the run is over')
  assert learner.hears() == events.Disconnected(session=1, reason='the run is over')
  kinds = {type(syncer.message()), type(syncer.message())}
  assert kinds == {messages.Contribution, messages.Leave}
  assert isinstance(syncer.hears(), events.Disconnected)
  assert number == syncer.history[-1].session


def test_the_learner_gets_the_reason_of_the_syncers_close(world):
  syncer, learner = world.syncer(), world.learner()
  number = connect(syncer, learner)
  data = os.urandom(3 * MIB)
  syncer.transport.send(number, publish(data), data)
  reason = 'fenced: another process, größer'
  syncer.transport.close(number, reason)
  assert syncer.hears() == events.Disconnected(session=number, reason=reason)
  assert received_bytes(learner, publish(data)) == data
  assert learner.hears() == events.Disconnected(session=1, reason=reason)


def test_both_ends_close_at_once_and_sending_to_a_closed_session_has_no_effect(world):
  syncer, learner = world.syncer(), world.learner()
  number = connect(syncer, learner)
  learner.transport.close(1, 'mine')
  syncer.transport.close(number, 'yours')
  assert isinstance(learner.hears(), events.Disconnected)
  assert isinstance(syncer.hears(), events.Disconnected)
  learner.transport.close(1, 'again')
  syncer.transport.close(number, 'again')
  learner.transport.send(1, adopted(1), None)
  syncer.transport.send(number, publish(b'x'), b'x')
  syncer.transport.send(77, messages.Finish(), None)
  learner.transport.close(77, 'never dialed')


def test_both_ends_report_a_lost_connection_and_the_learner_dials_again(world):
  syncer, learner = world.syncer(), world.learner()
  first = connect(syncer, learner)
  world.cut(learner)
  assert isinstance(learner.hears(), events.Disconnected)
  assert isinstance(syncer.hears(), events.Disconnected)
  second = connect(syncer, learner, session=2)
  assert second != first
  learner.transport.send(2, adopted(5), None)
  assert syncer.hears() == events.Received(session=second, message=adopted(5))


def test_a_failed_dial_is_reported_once(world):
  learner = world.learner()
  for session in (1, 2, 3):
    learner.transport.dial(session)
    event = learner.hears()
    assert isinstance(event, events.Disconnected) and event.session == session
    assert event.reason.startswith('unavailable: ')


def test_a_restarted_syncer_accepts_sessions(world):
  syncer, learner = world.syncer(), world.learner()
  connect(syncer, learner)
  syncer.transport.shutdown(1.0)
  assert isinstance(syncer.hears(), events.Disconnected)
  assert isinstance(learner.hears(), events.Disconnected)
  learner.transport.dial(2)
  assert learner.hears().reason.startswith('unavailable: ')
  connect(world.syncer(), learner, session=3)


def test_shutdown_sends_the_queued_messages(world):
  syncer, learner = world.syncer(), world.learner()
  number = connect(syncer, learner)
  data = os.urandom(5 * MIB)
  syncer.transport.send(number, publish(data), data)
  syncer.transport.send(number, messages.Finish(), None)
  syncer.transport.shutdown(DEADLINE_S)
  assert {type(learner.message()), type(learner.message())} == {messages.Publish, messages.Finish}
  assert isinstance(learner.hears(), events.Disconnected)


def test_two_learners_at_once_do_not_mix(world):
  syncer, learners = world.syncer(), [world.learner(), world.learner()]
  numbers = [connect(syncer, learner) for learner in learners]
  blobs = [os.urandom(3 * MIB), os.urandom(3 * MIB)]
  for learner, number, blob in zip(learners, numbers, blobs):
    pull(syncer, number, learner, blob)
    learner.transport.send(1, contribution(blob), blob)
    syncer.transport.send(number, publish(blob), blob)
  received = [syncer.hears(), syncer.hears()]
  payloads = {event.session: bytes(syncer.payloads.get(event.payload_id)) for event in received}
  assert payloads == dict(zip(numbers, blobs))
  for learner, blob in zip(learners, blobs):
    assert received_bytes(learner, publish(blob)) == blob


@pytest.mark.parametrize(
  'message, payload',
  [
    (adopted(1), b'stray'),
    (contribution(b'abc'), None),
    (contribution(b'abc'), b'ab'),
  ],
)
def test_a_payload_other_than_the_announced_one_is_refused(world, message, payload):
  syncer, learner = world.syncer(), world.learner()
  connect(syncer, learner)
  with pytest.raises(ValueError, match='announces'):
    learner.transport.send(1, message, payload)
