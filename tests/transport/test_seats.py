"""Places, time and rates of the syncer's end: processes that occupy, flood or do not speak."""

import contextlib
import dataclasses
import itertools
import multiprocessing
import pathlib
import queue
import re
import resource
import selectors
import socket
import threading
import time

import grpc
import pytest

from diloco_jax.protocol import events, messages
from diloco_jax.transport import control_crc, grpc_server, grpc_session, link, translate
from diloco_jax.transport import payloads as payloads_lib
from tests.transport import ends, samples

LIMITS = link.Limits(
  contribution_bytes=(8,),
  publish_bytes=(8,),
  max_members=2,
  max_strangers=3,
  stay_s=0.3,
  drain_s=1.0,
)


class Rig:
  """Makes both ends. `lines`: what the syncer has printed."""

  def __init__(self, closing):
    self._closing = closing
    self.lines = queue.Queue()

  def syncer(self, **changes):
    return self._close_later(
      ends.syncer(dataclasses.replace(LIMITS, **changes), said=self.lines.put)
    )

  def learner(self, syncer):
    """A learner that dials session 1."""
    return self._close_later(ends.learner(syncer.transport.address, LIMITS))

  def _close_later(self, end):
    self._closing.callback(end.transport.shutdown, 0.0)
    return end


@pytest.fixture
def rig():
  with contextlib.ExitStack() as closing:
    yield Rig(closing)


# --- Places ---------------------------------------------------------------------------------------


def test_a_syncer_without_a_free_seat_prints_it_and_the_learner_gets_the_reason(rig):
  syncer = rig.syncer()
  for _ in range(LIMITS.max_members):
    first = rig.learner(syncer)
    ends.join(syncer, first)
  for _ in range(3):
    end = rig.learner(syncer).hears()
    assert isinstance(end, events.Disconnected)
    assert end.reason.startswith('resource exhausted: 2 learners are connected, as many as')
  line = rig.lines.get(timeout=ends.DEADLINE_S)
  assert 'refused sessions: 1, the last one: 2 learners are connected' in line
  assert rig.lines.empty()  # once a minute
  first.transport.close(1, 'done')
  assert isinstance(syncer.hears(), events.Disconnected)
  ends.join(syncer, rig.learner(syncer))


def test_an_arrival_displaces_the_stranger_that_has_come_least_far(rig):
  syncer = rig.syncer(stay_s=0.0)
  learners = []
  for greets in (True, False, False):
    learners.append(rig.learner(syncer))
    ends.open_session(syncer, learners[-1])
    if greets:
      learners[-1].transport.send(1, samples.join())
      syncer.hears()
  newest = rig.learner(syncer)
  assert 'displaced by a newer session' in learners[1].hears().reason
  assert isinstance(newest.hears(), events.Connected)
  assert 'displaced sessions: 1, ' in rig.lines.get(timeout=ends.DEADLINE_S)
  assert all(learners[k].inbox.empty() for k in (0, 2))


def test_a_stranger_has_some_time_to_join_before_an_arrival_displaces_it(rig):
  syncer = rig.syncer()
  start_s = time.monotonic()
  strangers = [rig.learner(syncer) for _ in range(LIMITS.max_strangers)]
  for stranger in strangers:
    ends.open_session(syncer, stranger)
  newest = rig.learner(syncer)
  assert isinstance(newest.hears(), events.Connected)
  assert time.monotonic() - start_s > LIMITS.stay_s


def test_members_are_never_displaced(rig):
  syncer = rig.syncer()
  first = rig.learner(syncer)
  number = ends.join(syncer, first)
  for _ in range(LIMITS.max_strangers + 3):
    assert isinstance(rig.learner(syncer).hears(), events.Connected)
  syncer.transport.send(number, messages.Heartbeat())
  assert first.hears().message == messages.Heartbeat()


@pytest.mark.parametrize(
  'joins, reason', [(False, 'no Join within 5 s'), (True, 'not admitted as a learner within 15 s')]
)
def test_a_session_that_becomes_no_learners_frees_its_seat(rig, monkeypatch, joins, reason):
  timers = []  # they end when the test says so
  later = lambda *timer: timers.append(timer) or threading.Timer(ends.DEADLINE_S, print)
  monkeypatch.setattr(grpc_session, 'start_timer', later)
  syncer = rig.syncer()
  learner = rig.learner(syncer)
  number = ends.open_session(syncer, learner)
  if joins:
    learner.transport.send(1, samples.join())
    syncer.hears()
    syncer.transport.send(number, messages.Offer(run='r0', incarnation=1))
    assert learner.hears().message == messages.Offer(run='r0', incarnation=1)
  ((_, expire, _),) = [timer for timer in timers if timer[2:] == (reason,)]
  expire(reason)
  assert reason in learner.hears().reason
  assert syncer.hears() == events.Disconnected(session=number, reason=reason)
  line = rig.lines.get(timeout=ends.DEADLINE_S)
  assert f"sessions that became no learner's: 1, the last one: {reason}" in line


def test_a_line_of_a_kind_is_said_once_a_minute_with_its_count():
  lines, clock = [], iter([0.0, 0.0, 1.0, 59.0, 61.0, 61.0]).__next__
  troubles = grpc_server.Troubles(lines.append, clock)
  for text in ('a', 'b', 'c', 'd'):
    troubles.add('sessions', text)
  assert lines == ['sessions: 1, the last one: a', 'sessions: 3, the last one: d']


def test_too_few_descriptors_for_the_seats_are_one_clear_line():
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  seats = 1 << 40
  if hard != resource.RLIM_INFINITY:
    with pytest.raises(OSError, match=f'may open {hard} files.*ulimit -n.*sync.learners') as caught:
      grpc_server.reserve_descriptors(seats)
    assert '\n' not in str(caught.value)
  resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  grpc_server.reserve_descriptors(1)
  assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
  resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- Rates ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def hostile(syncer, controls):
  """A peer that opens a session and sends these messages as fast as the syncer reads them."""
  seal = control_crc.Seal()
  sealed = (seal.close(translate.LEARNER_TO_SYNCER.encode(message)) for message in controls)
  over = threading.Event()
  silence = lambda: iter(over.wait, True)  # until the end of the test
  with ends.plain_channel(syncer.transport.address) as channel:
    control = ends.call(channel, 'Control', itertools.chain(sealed, silence()))
    bulk = ends.call(channel, 'Bulk', silence(), ends.token_of(control))
    bulk.initial_metadata()
    event = syncer.hears()
    assert isinstance(event, events.Connected), event
    yield event.session
    over.set()


def progress(clock):
  return messages.Progress(clock=clock, steps=clock, tokens=clock, step_ns=1, finished=False)


def test_a_flood_of_messages_costs_the_flooder_and_nobody_else(rig):
  syncer = rig.syncer()
  honest = rig.learner(syncer)
  number = ends.join(syncer, honest)
  flood = itertools.chain([samples.join('l9')], map(progress, itertools.count()))
  with hostile(syncer, flood) as flooder:
    rate, start_s, count, overtaken = LIMITS.messages_per_s, time.monotonic(), 0, []
    while count <= rate:
      before = count
      honest.transport.send(1, messages.Heartbeat())
      while (event := syncer.hears()).session != number:
        assert event.session == flooder
        count += isinstance(event, events.Received)
      overtaken.append(count - before)
    took_s = time.monotonic() - start_s
    assert count <= rate * (took_s + 2) + 10, (count, took_s)
    # The messages of the flood that came before the honest one: no more than what waits anyhow.
    assert sorted(overtaken)[len(overtaken) // 2] <= 2 * grpc_session.MAX_UNHANDLED, overtaken


def test_closing_the_session_of_a_learner_that_reads_nothing_does_not_wait(rig):
  """As one whose process is frozen."""
  data = bytes(4 << 20)
  syncer = rig.syncer(publish_bytes=(len(data),))
  with hostile(syncer, [samples.join()]) as number:
    assert isinstance(syncer.hears().message, messages.Join)
    for _ in range(16):  # more than flow control lets pass
      syncer.transport.send(number, samples.publish(samples.payload(data)), data)
    session = syncer.transport._find(number)
    syncer.transport.close(number, 'its lease is over')
    assert syncer.hears() == events.Disconnected(session=number, reason='its lease is over')
    assert session.finished.wait(ends.DEADLINE_S)  # it cancels its streams after drain_s
    assert syncer.transport._find(number) is None


def test_a_session_waits_for_the_machine(rig):
  syncer = rig.syncer()
  flood = itertools.chain([samples.join('l9')], map(progress, itertools.count()))
  with hostile(syncer, flood):
    unhandled = grpc_session.MAX_UNHANDLED
    first, *_ = [syncer.inbox.get(timeout=ends.DEADLINE_S) for _ in range(unhandled)]
    with pytest.raises(queue.Empty):
      syncer.inbox.get(timeout=0.3)
    syncer.transport.handled(first.session)
    assert syncer.inbox.get(timeout=ends.DEADLINE_S).message == progress(unhandled - 1)


def test_a_learner_of_very_short_steps_reports_less_often(rig):
  syncer = rig.syncer()
  learner = rig.learner(syncer)
  ends.join(syncer, learner)
  steps, count, clock = 5_000, 0, 0
  for step in range(steps):
    learner.transport.send(1, progress(step))
  while clock < steps - 1:
    event = syncer.hears()
    assert event.message.clock >= clock
    clock, count = event.message.clock, count + 1
  assert count < steps / 2


# --- A crowd --------------------------------------------------------------------------------------


def serve(pipe, limits):
  """A syncer that admits every learner, in a process of its own."""
  inbox = queue.Queue()
  door = grpc_server.Door('127.0.0.1:0', limits.seats, lambda line: None, access=ends.PLAIN)
  transport = grpc_server.GrpcSyncerTransport(door, inbox.put, payloads_lib.PayloadStore(), limits)
  pipe.send(transport.address)
  while not pipe.poll():
    with contextlib.suppress(queue.Empty):
      match inbox.get(timeout=0.1):
        case events.Received(session=session, message=message):
          if isinstance(message, messages.Join):
            transport.send(session, messages.Offer(run='r0', incarnation=1))
          elif isinstance(message, messages.Confirm):
            transport.admit(session)
            transport.send(session, samples.JOINED)
          transport.handled(session)
  transport.shutdown(0.0)


class Crowd:
  """Idle sockets and idle sessions, opened again as soon as the syncer ends them."""

  def __init__(self, address, sockets, streams):
    self._address = address
    self._over = threading.Event()
    self._threads = [threading.Thread(target=self._idle_sockets, args=(sockets,))]
    self._threads += [
      threading.Thread(target=self._idle_streams, args=(greets, bulk))
      for greets, bulk in itertools.islice(
        itertools.cycle([(False, False), (False, True), (True, True)]), streams
      )
    ]

  def __enter__(self):
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(self, *error):
    self._over.set()
    for thread in self._threads:
      thread.join(ends.DEADLINE_S)
      assert not thread.is_alive()

  def _idle_sockets(self, count):
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as ended:
      add = lambda: ended.register(
        stack.enter_context(socket.create_connection(self._address.split(':'))),
        selectors.EVENT_READ,
      )
      for _ in range(count):
        add()
      while not self._over.is_set():
        for key, _ in ended.select(timeout=0.1):
          try:
            data = key.fileobj.recv(1 << 16)
          except ConnectionError:
            data = b''
          if not data:
            ended.unregister(key.fileobj)
            key.fileobj.close()
            add()

  def _idle_streams(self, greets, with_bulk):
    """Sessions without Bulk, without a Join, or without a Confirm."""
    hello = control_crc.Seal().close(translate.LEARNER_TO_SYNCER.encode(samples.join('made-up')))
    while not self._over.is_set():
      ended = threading.Event()
      frames = lambda first: itertools.chain(first, iter(lambda: ended.wait() and None, None))
      with ends.plain_channel(self._address) as channel:
        control = ends.call(channel, 'Control', frames([hello] if greets else []))
        control.add_done_callback(lambda call, ended=ended: ended.set())
        with contextlib.suppress(grpc.RpcError, KeyError):
          token = ends.token_of(control)
          if with_bulk:
            ends.call(channel, 'Bulk', frames([]), token)
        while not ended.wait(0.1) and not self._over.is_set():
          pass
        ended.set()


def usage(pid):
  """Descriptors and threads of a process."""
  process = pathlib.Path(f'/proc/{pid}')
  threads = re.search(r'Threads:\s+(\d+)', (process / 'status').read_text())[1]
  return len(list((process / 'fd').iterdir())), int(threads)


def test_a_crowd_keeps_no_learner_out(counts):
  lasts_s, sockets, streams = (120, 500, 60) if counts.full else (6, 100, 20)
  limits = dataclasses.replace(LIMITS, max_members=8, max_strangers=24, stay_s=0.5)
  spawn = multiprocessing.get_context('spawn')
  pipe, theirs = spawn.Pipe()
  process = spawn.Process(target=serve, args=(theirs, limits))
  process.start()
  address = pipe.recv()
  learner = ends.idle_learner(lambda: address, limits)
  sessions = itertools.count(1)

  def joins():
    """Joins as a learner would that dials again when it is sent away; returns the seconds."""
    start_s = time.monotonic()
    while time.monotonic() < start_s + ends.DEADLINE_S:
      session = next(sessions)
      learner.transport.dial(session)
      while not isinstance(event := learner.hears(), events.Disconnected):
        match event:
          case events.Connected():
            learner.transport.send(session, samples.join())
          case events.Received(message=messages.Offer()):
            learner.transport.send(session, samples.CONFIRM)
          case events.Received(message=messages.Joined()):
            took_s = time.monotonic() - start_s
            learner.transport.close(session, 'restarts')
            assert isinstance(learner.hears(), events.Disconnected)
            return took_s
    raise AssertionError('not in')

  try:
    joins()
    with Crowd(address, sockets, streams):
      end_s, took_s, used = time.monotonic() + lasts_s, [], []
      while time.monotonic() < end_s:
        took_s.append(joins())
        used.append(usage(process.pid))
      assert max(took_s) < 10, took_s
      descriptors, threads = zip(*used)
      assert max(descriptors) <= sockets + 2 * streams + 100, max(descriptors)
      # A session has two threads of the pool and two readers; gRPC has some of its own.
      seats = limits.max_members + limits.max_strangers
      assert max(threads) <= 4 * seats + grpc_server._LINE + 100, max(threads)
  finally:
    learner.transport.shutdown(0.0)
    pipe.send('end')
    process.join(ends.DEADLINE_S)
  assert process.exitcode == 0
