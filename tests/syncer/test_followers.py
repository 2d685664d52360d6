"""Followers over real gRPC: what they receive, what they cost at most, and that no event of theirs
reaches the machine, whatever they do."""

import contextlib
import itertools
import queue
import threading
import time
from concurrent import futures

import grpc
import jax
import numpy as np
import pytest

from diloco_jax.numerics import fragments
from diloco_jax.protocol import events, messages
from diloco_jax.syncer import followers as followers_lib
from diloco_jax.transport import (
  chunks,
  control_crc,
  grpc_client,
  grpc_server,
  grpc_session,
  link,
  listen,
  translate,
)
from diloco_jax.transport import payloads as payloads_lib
from tests.transport import ends

VALUES = 1 << 18  # of each fragment: 1 MiB whole


def layout_of(values, count=2):
  shapes = {name: jax.ShapeDtypeStruct((values,), np.float32) for name in 'ab'}
  return fragments.make_layout(shapes, count, lambda path: 'body')


LAYOUT = layout_of(VALUES)
LIMITS = link.Limits(contribution_bytes=(8,), publish_bytes=(8,))
NOTHING = [followers_lib.NOTHING] * 2
FAST = 1 << 40  # bytes a second
MOST = 4 << 20  # bytes of a payload
NARROW = ('grpc.http2.bdp_probe', 0), ('grpc.http2.lookahead_bytes', 1 << 16)


class Counted(followers_lib.Followers):
  """Counts the bytes that it sends to each call and its requests, in the order of the calls."""

  def __init__(self, *args):
    super().__init__(*args)
    self.sent, self.requests = [], []
    self.most_wholes = 0

  def serve(self, requests, *call):
    index = len(self.sent)
    self.sent.append(0)
    self.requests.append(0)

    def counted():
      for request in requests:
        self.requests[index] += 1
        yield request

    for frame in super().serve(counted(), *call):
      self.sent[index] += len(frame)
      yield frame

  def _ask(self, *missing):
    super()._ask(*missing)
    self.most_wholes = max(self.most_wholes, self._wholes())


class Rig:
  """A syncer without a machine: the events that one would get are in `inbox`."""

  def __init__(self, cleanup, bytes_per_s=FAST, layout=LAYOUT):
    self._layout, self._whole_bytes = layout, 4 * layout.size(0)
    self.followers, self.inbox = Counted(bytes_per_s, layout), queue.Queue()
    self.versions, self.reads, self._cleanup = [0] * layout.num_fragments, [], cleanup
    door = grpc_server.Door('127.0.0.1:0', LIMITS.seats + followers_lib.SEATS, access=ends.PLAIN)
    self.transport = grpc_server.GrpcSyncerTransport(
      door, self.inbox.put, payloads_lib.PayloadStore(), LIMITS, followers=self.followers
    )
    cleanup.callback(self.transport.shutdown, 0.0)
    self._work = cleanup.enter_context(futures.ThreadPoolExecutor(1))
    self.followers.begin(self._read)

  def _read(self, p):
    self.reads.append(p)
    self._work.submit(lambda: self.followers.add_whole(*self._version(p, None, self._whole_bytes)))

  def publish(self, p, size=1000):
    self._work.submit(self._publish, p, size).result()

  def _publish(self, p, size):
    self.versions[p] += 1
    self.followers.add_delta(*self._version(p, self.versions[p] - 1, size))

  def held(self, p):
    return self.versions[p], 100 * self.versions[p] + p

  def _version(self, p, base, size):
    data = memoryview(np.full(size, self.versions[p] % 256, np.uint8))
    _, payload = payloads_lib.keep(payloads_lib.PayloadStore(), data)
    version, digest = self.held(p)
    publish = messages.Publish(
      sync=1,
      fragment=p,
      version=version,
      base_version=base,
      digest=digest,
      settled_to=0,
      keep=True,
      payload=payload,
    )
    return publish, data

  def follow(self, *options):
    """FOLLOW, on a connection of its own."""
    channel = listen.dial(self.transport.address, ends.PLAIN, (*grpc_client.OPTIONS, *options))
    self._cleanup.callback(channel.close)
    return channel.stream_stream(f'/{grpc_session.SERVICE}/{grpc_session.FOLLOW}')

  def calls(self, held=None, requests=(), layout=None, options=()):
    held = [followers_lib.NOTHING] * self._layout.num_fragments if held is None else held
    first = followers_lib.request((layout or self._layout).digest(), held)
    call = self.follow(*options)(itertools.chain([first], requests), timeout=ends.DEADLINE_S)
    self._cleanup.callback(call.cancel)
    return call


@pytest.fixture(name='cleanup')
def _cleanup():
  with contextlib.ExitStack() as cleanup:
    yield cleanup


@pytest.fixture(name='rig')
def _rig(cleanup):
  return Rig(cleanup)


def receive(call):
  """(the Publish, the payload) of each version, in the order of their arrival."""
  seal, assembler = control_crc.Seal(), chunks.Assembler(max_payload_bytes=MOST)
  buffer = link.ReceiveBuffer(MOST, 1)
  for frame in call:
    if not buffer.waits:
      decoded = translate.SYNCER_TO_LEARNER.decode(seal.open(frame), 3)
      assert buffer.on_message(*decoded) is None
    elif (transfer := assembler.add(frame)) is not None:
      publish, payload = buffer.on_transfer(transfer.number, transfer.data, transfer.crc32)
      assert set(payload) == {publish.version % 256}
      yield publish


def catch_up(rig, follower):
  """Receives until every fragment is the newest; returns the base of the first of each."""
  newest, bases = {}, {}
  while newest != dict(enumerate(rig.versions)):
    publish = next(follower)
    newest[publish.fragment] = publish.version
    bases.setdefault(publish.fragment, publish.base_version)
  return bases


def receive_all(rig):
  """The calls of a follower that has received both fragments whole."""
  follower = receive(rig.calls())
  assert len([next(follower), next(follower)]) == 2
  return follower


def ends_with(call):
  with pytest.raises(grpc.RpcError):
    list(call)
  return call.code(), call.details()


def until(condition):
  deadline_s = time.monotonic() + ends.DEADLINE_S
  while not condition():
    assert time.monotonic() < deadline_s
    threading.Event().wait(0.005)


# --- What it receives -----------------------------------------------------------------------------


def test_a_follower_gets_every_fragment_whole_and_then_deltas(rig):
  follower = receive(rig.calls())
  wholes = [next(follower) for _ in range(2)]
  assert [(whole.fragment, whole.base_version) for whole in wholes] == [(0, None), (1, None)]
  for p in (1, 0, 1):
    rig.publish(p)
    delta = next(follower)
    assert (delta.fragment, delta.base_version) == (p, rig.versions[p] - 1)
  assert rig.reads == [0, 1]
  assert rig.inbox.empty()


def test_one_that_dials_again_gets_only_what_it_lacks(rig):
  receive_all(rig)
  held = [rig.held(0), rig.held(1)]
  rig.publish(1)
  again = receive(rig.calls(held))
  assert (delta := next(again)).base_version == 0 and delta.fragment == 1
  rig.publish(0)
  assert next(again).fragment == 0
  assert rig.reads == [0, 1]


def test_one_that_is_far_behind_or_of_another_lineage_gets_the_newest_whole(rig):
  receive_all(rig)
  held = [rig.held(0), (7, 99)]  # before a restore there was a version 7
  for _ in range(9):  # as many bytes as the whole
    rig.publish(0, VALUES // 2)
  assert catch_up(rig, receive(rig.calls(held))) == {0: None, 1: None}


def test_after_the_end_of_the_run_it_gets_the_newest_version_and_the_call_ends_in_order(rig):
  call = rig.calls()
  follower = receive(call)
  assert len([next(follower), next(follower)]) == 2
  rig.publish(0)
  rig.followers.finish()
  assert [publish.version for publish in follower] == [1]
  assert call.code() is grpc.StatusCode.OK
  assert dict(call.trailing_metadata())[grpc_session.REASON] == b'the run has ended'


def test_one_that_comes_after_the_end_of_the_run_delays_nothing(rig):
  rig.followers.finish()
  call = rig.calls()
  assert list(receive(call)) == rig.reads == []
  assert call.code() is grpc.StatusCode.OK
  until(lambda: rig.followers.state() == (0, 0))


def test_a_syncer_that_stops_says_so(rig):
  call = rig.calls()
  next(receive(call))
  rig.followers.shutdown(0.0)
  code, details = ends_with(call)
  assert code is grpc.StatusCode.UNAVAILABLE and 'may start again' in details


OTHER = layout_of(VALUES, 1)


@pytest.mark.parametrize(
  'held, layout', [(NOTHING, OTHER), ([], LAYOUT), ([(0, 1)] * 3, LAYOUT), ([(0, 'x')] * 2, LAYOUT)]
)
def test_a_follower_of_another_model_is_refused(rig, held, layout):
  code, details = ends_with(rig.calls(held, layout=layout))
  assert code is grpc.StatusCode.INVALID_ARGUMENT and 'config.json' in details


# --- What it costs --------------------------------------------------------------------------------


def test_all_followers_together_keep_to_the_budget(cleanup):
  """What is sent, and what is copied for them on the work thread."""
  budget = 4 << 20
  rig, begun_s = Rig(cleanup, bytes_per_s=budget), time.monotonic()
  with futures.ThreadPoolExecutor(2) as pool:
    calls = [receive(rig.calls()) for _ in range(2)]
    list(pool.map(lambda call: [next(call), next(call)], calls))
  allowed = (time.monotonic() - begun_s) * budget
  assert sum(rig.followers.sent) <= allowed + 2 * chunks.CHUNK_BYTES
  assert len(rig.reads) * 4 * VALUES <= allowed + 4 * VALUES


def test_of_one_that_never_reads_little_is_queued_and_it_is_cut_off(cleanup, monkeypatch):
  rig = Rig(cleanup, layout=layout_of(MOST // 4))
  stuck = rig.calls(options=NARROW)
  until(lambda: rig.followers.sent and rig.followers.sent[0])
  follower = receive_all(rig)  # 8 MiB
  assert rig.followers.sent[0] <= MOST // 4
  assert rig.followers.state()[0] == 2
  monkeypatch.setattr(followers_lib, 'STALL_S', 0.0)
  monkeypatch.setattr(followers_lib, 'LEAST_BYTES_PER_S', FAST)
  rig.publish(0)
  assert next(follower).version == 1
  assert ends_with(stuck)[0] is grpc.StatusCode.CANCELLED
  until(lambda: rig.followers.state()[0] == 1)
  assert rig.inbox.empty()


def test_two_that_never_read_do_not_keep_the_memory_for_whole_fragments(cleanup, monkeypatch):
  rig = Rig(cleanup, layout=layout_of(MOST // 4, 3))
  stuck = [rig.calls([followers_lib.NOTHING] * 3, options=NARROW)]
  until(lambda: rig.followers.sent and rig.followers.sent[0])
  stuck.append(rig.calls([rig.held(0), *NOTHING], options=NARROW))
  until(lambda: len(rig.followers.sent) == 2 and rig.followers.sent[1])
  assert rig.reads == [0, 1]
  follower = receive(rig.calls([rig.held(0), rig.held(1), NOTHING[0]]))
  monkeypatch.setattr(followers_lib, 'STALL_S', 0.0)
  monkeypatch.setattr(followers_lib, 'LEAST_BYTES_PER_S', FAST)
  rig.publish(0)
  assert {next(follower).fragment, next(follower).fragment} == {0, 2}
  until(lambda: rig.followers.state()[0] == 1)  # both are cut off


def test_no_more_whole_fragments_are_in_memory_than_two(rig):
  for _ in range(3):
    rig.calls()  # is never read
  follower = receive(rig.calls())
  for _ in range(6):
    next(follower)
    rig.publish(0, 3 * VALUES)  # too long to be kept: the next one is whole, too
    rig.publish(1, 3 * VALUES)
  assert rig.followers.most_wholes <= followers_lib.WHOLES


@pytest.mark.parametrize('asks', [True, False])
def test_one_that_never_reads_or_never_asks_keeps_no_fragment_from_others(cleanup, asks):
  rig, end = Rig(cleanup, layout=layout_of(MOST // 4, 4)), threading.Event()
  if asks:
    stuck = rig.calls(options=NARROW)
    until(lambda: rig.followers.sent and rig.followers.sent[0])
  else:
    stuck = rig.follow()(iter(end.wait, None))
    until(lambda: rig.followers.state()[0])
  follower = receive(rig.calls())
  assert {next(follower).fragment for _ in range(4)} == {0, 1, 2, 3}
  assert rig.followers.most_wholes <= followers_lib.WHOLES and stuck.is_active()
  end.set()
  stuck.cancel()


def test_those_that_never_read_keep_no_more_deltas_than_a_fragment_has_bytes(cleanup):
  rig, size = Rig(cleanup, layout=layout_of(VALUES * 4)), VALUES * 6  # of 16 a fragment has
  first, stuck = receive_all(rig), []
  for count in range(2, 6):
    held = [rig.held(0), rig.held(1)]
    rig.publish(0, size)
    assert next(first).base_version == held[0][0]
    stuck.append(rig.calls(held, options=NARROW))
    until(lambda: len(rig.followers.sent) == count and rig.followers.sent[-1])
  for call in stuck[:-2]:
    assert ends_with(call)[0] is grpc.StatusCode.CANCELLED
  until(lambda: rig.followers.state()[0] == 3)


def test_what_one_says_beyond_its_request_is_not_read(rig):
  rig.calls(requests=itertools.repeat(bytes(1 << 16)))
  follower = receive(rig.calls())
  for _ in range(20):
    rig.publish(0)
    next(follower)
  assert rig.followers.requests == [1, 1]
  assert rig.inbox.empty()


def test_one_that_dials_a_thousand_times_keeps_no_learner_out(rig):
  channel = listen.dial(rig.transport.address, ends.PLAIN, grpc_client.OPTIONS)
  call = channel.stream_stream(f'/{grpc_session.SERVICE}/{grpc_session.FOLLOW}')
  most = 0
  with channel:
    for _ in range(1000):
      call(iter(())).cancel()
      most = max(most, rig.followers.state()[0])
  assert most <= followers_lib.SEATS
  learner = ends.learner(rig.transport.address, LIMITS)
  assert isinstance(learner.hears(), events.Connected)
  assert isinstance(rig.inbox.get(timeout=ends.DEADLINE_S), events.Connected)  # and nothing before
  learner.transport.shutdown(0.0)
  until(lambda: rig.followers.state() == (0, 0))


def test_one_beyond_the_seats_is_told_to_dial_again(rig, monkeypatch):
  monkeypatch.setattr(followers_lib, 'SEATS', 1)
  follower = receive(rig.calls())
  next(follower)
  code, details = ends_with(rig.calls())
  assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and 'dial again' in details
