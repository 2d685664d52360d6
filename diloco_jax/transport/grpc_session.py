"""One learner-syncer session over two gRPC streams; both ends run this file.

A session lives through four states::

  CONNECTING --open()--> OPEN --close()--> DRAINING --> OVER
       |                  |                                ^
       +------------------+---- fail(), streams ended -----+

Only an OPEN session delivers and accepts messages. The session posts `Disconnected` when it leaves
OPEN: exactly once, and as its last event. In DRAINING it sends the queued messages for at most
`drain_s`. OVER ends both streams. Four threads serve a session, one per stream and direction: gRPC
runs two writers (the generators `control_frames`, `bulk_frames`), the session two readers
(`read_control`, `read_bulk`). Each thread ends with its stream, and each stream with the session.

A session never retries: a retried stream can lose messages silently. The machines recover the
messages that a broken session loses.
"""

import enum
import ipaddress
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

# gRPC reads this at import. The session itself reports a lost peer, so gRPC need not log it.
os.environ.setdefault('GRPC_VERBOSITY', 'ERROR')

import grpc

from diloco_jax.node import ports
from diloco_jax.protocol import events, messages
from diloco_jax.transport import chunks, errors, flow, link, stream_crc, translate

SERVICE = 'diloco.v1.SyncerService'
TOKEN = 'diloco-session'
REASON = 'diloco-reason-bin'  # why the syncer closed the session, in its trailing metadata
LOST = 'connection lost'

COMMON_OPTIONS = (
  ('grpc.enable_retries', 0),
  ('grpc.keepalive_time_ms', 10_000),
  ('grpc.keepalive_timeout_ms', 10_000),
  # Without this line gRPC detects a frozen peer only after a minute, despite the two lines above.
  ('grpc.http2.ping_timeout_ms', 10_000),
  ('grpc.keepalive_permit_without_calls', 1),
  ('grpc.http2.max_pings_without_data', 0),
)


class _State(enum.Enum):
  CONNECTING = 'connecting'
  OPEN = 'open'
  DRAINING = 'draining'
  OVER = 'over'


class Session:
  """One end of a session.

  Args:
    number: the session's number in events.
    dialed: whether this end (a learner's) dialed; it also reports a session that never opens.
    traffic: counts the bytes of all sessions of a transport.
  """

  def __init__(
    self,
    number: int,
    post: ports.Post,
    payloads: ports.Payloads,
    limits: link.Limits,
    dialed: bool,
    traffic: link.Traffic,
  ):
    self._traffic = traffic
    self.number = number
    self.reason = ''
    self.finished = threading.Event()  # both streams have ended
    self._post = post
    self._payloads = payloads
    self._limits = limits
    directions = (translate.LEARNER_TO_SYNCER, translate.SYNCER_TO_LEARNER)
    self._outgoing, self._incoming = directions if dialed else reversed(directions)
    self._dialed = dialed
    self._send_queue = link.SendQueue(
      chunks.split, limits.max_queued_bytes, limits.max_queued_messages, limits.donation_bytes_per_s
    )
    self._receive_buffer = link.ReceiveBuffer(limits.max_payload_bytes, limits.max_open_transfers)
    self._assembler = chunks.Assembler(
      max_payload_bytes=limits.max_payload_bytes, max_open=limits.max_open_transfers
    )
    self._sent, self._received = stream_crc.Seal(), stream_crc.Seal()
    self._window, self._receipts = flow.Window(), flow.Receipts()
    self._changed = threading.Condition()
    self._state = _State.CONNECTING
    self._failed = False
    self._bulk_done = False
    self._cancels: list[Callable[[], None]] = []  # one per stream
    self._streams_up = 0
    self._streams_read = 0  # streams that the peer ended in order
    self._timer: threading.Timer | None = None

  # --- Interface of the transport -----------------------------------------------------------------

  def open(self) -> None:
    """Opens the session; both streams are up."""
    with self._changed:
      if self._state is _State.CONNECTING:
        self._state = _State.OPEN
        self._post(events.Connected(session=self.number))
        self._changed.notify_all()

  def wait_open(self, timeout_s: float) -> bool:
    with self._changed:
      self._changed.wait_for(lambda: self._state is not _State.CONNECTING, timeout_s)
      return self._state is not _State.CONNECTING

  def send(self, message: messages.Message, payload: link.Buffer | None) -> None:
    with self._changed:
      if self._state is not _State.OPEN:
        return
      try:
        self._send_queue.push(message, payload)
        self._changed.notify_all()
      except link.LinkError as error:
        self._change_state(_State.OVER, str(error), failed=True)

  def close(self, reason: str) -> None:
    """Ends the session after it has sent the queued messages, at most `drain_s` from now."""
    with self._changed:
      if self._state is _State.OPEN:
        self._change_state(_State.DRAINING, reason, failed=False)
      elif self._state is _State.CONNECTING:
        self._change_state(_State.OVER, reason, failed=False)

  def fail(self, reason: str) -> None:
    """Ends the session now."""
    with self._changed:
      self._change_state(_State.OVER, reason, failed=True)

  def add_stream(self, cancel: Callable[[], None]) -> None:
    with self._changed:
      self._cancels.append(cancel)
      self._streams_up += 1

  def cancel(self) -> None:
    """Cancels both streams without a reason, for a peer that has stopped reading."""
    with self._changed:
      cancels = list(self._cancels)
    for cancel in cancels:
      cancel()

  def stream_gone(self) -> bool:
    """Counts an ended stream; returns True if it was the last."""
    with self._changed:
      self._streams_up -= 1
      if self._streams_up:
        return False
    self.finish()
    return True

  def finish(self) -> None:
    """Ends the session after its last stream."""
    self.fail(LOST)
    with self._changed:
      if self._timer is not None:
        self._timer.cancel()
    self.finished.set()

  @property
  def failed(self) -> bool:
    """Whether the session broke, rather than being closed by either side."""
    return self._failed

  # --- Writers: gRPC's threads iterate over these ------------------------------------------------

  def control_frames(self) -> Iterator[bytes]:
    """Control messages of this end, serialised, until the session is over."""
    while (entry := self._next_control()) is not None:
      try:
        data = self._sent.close(self._outgoing.encode(*entry))
      except errors.WireError as error:
        self.fail(f'this end cannot encode a message: {error}')
        return
      self._traffic.add(sent_bytes=len(data))
      yield data

  def bulk_frames(self) -> Iterator[bytes]:
    """Chunks of this end's payloads, made outside the lock, and acknowledgements of the peer's,
    until the session is over."""
    frames: Iterator[bytes] = iter(())
    while self._state is not _State.OVER:
      if (frame := next(frames, None)) is not None:
        while (acknowledgement := self._wait_for_room(len(frame))) is not None:
          yield acknowledgement
        self._traffic.add(sent_bytes=len(frame))
        yield frame
      elif isinstance(found := self._next_bulk(), bytes):
        yield found
      elif found is None:
        return
      else:
        frames = found

  def _wait_for_room(self, size: int) -> bytes | None:
    """Waits until a frame may leave; returns an acknowledgement that leaves before it."""
    with self._changed:
      while self._state is not _State.OVER:
        now_s = time.monotonic()
        if (received := self._receipts.due(now_s)) is not None:
          return chunks.acknowledgement(received)
        if self._window.takes(size):
          self._window.add(size, now_s)
          return None
        self._changed.wait(self._receipts.wait_s(now_s))
      return None

  def _next_control(self) -> tuple[messages.Message, int] | None:
    with self._changed:
      while self._state is not _State.OVER:
        if (entry := self._send_queue.next_control()) is not None:
          return entry
        if self._state is _State.DRAINING and self._bulk_done:
          return None
        self._changed.wait()
      return None

  def _next_bulk(self) -> Iterator[bytes] | bytes | None:
    """The frames of the next transfer, or an acknowledgement."""
    with self._changed:
      while self._state is not _State.OVER:
        if (frames := self._send_queue.next_transfer()) is not None:
          self._changed.notify_all()  # the announcement waits in the control lane
          return frames
        if self._state is _State.DRAINING:
          self._bulk_done = True
          self._changed.notify_all()
          return None
        now_s = time.monotonic()
        if (received := self._receipts.due(now_s)) is not None:
          return chunks.acknowledgement(received)
        if (frames := self._send_queue.next_donated(now_s)) is not None:
          self._changed.notify_all()
          return frames
        waits_s = (self._send_queue.donation_wait_s(now_s), self._receipts.wait_s(now_s))
        self._changed.wait(min((one for one in waits_s if one is not None), default=None))
      return None

  # --- Readers: one thread each -------------------------------------------------------------------

  def read_control(self, stream: Iterable[bytes]) -> None:
    self._read(stream, self._on_control)

  def read_bulk(self, stream: Iterable[bytes]) -> None:
    self._read(stream, self._on_frame)

  def _read(self, stream: Iterable[bytes], take: Callable[[bytes], None]) -> None:
    try:
      for data in stream:
        self._traffic.add(received_bytes=len(data))
        take(data)
    except (errors.WireError, link.LinkError) as error:
      self.fail(f'the peer broke the protocol: {error}')
    except grpc.RpcError as error:
      self.fail(describe(error))
    except Exception as error:  # a reader that dies silently would leave a session deaf
      self.fail(f'{type(error).__name__}: {error}')
      raise
    else:
      self._on_end(stream)

  def _on_end(self, stream: Iterable[bytes]) -> None:
    """Counts a stream that the peer ended in order; after both, the peer has closed the session."""
    trailer = dict(stream.trailing_metadata() or ()) if isinstance(stream, grpc.Call) else {}
    reason = trailer.get(REASON, b'closed by the peer').decode(errors='replace')
    with self._changed:
      self._streams_read += 1
      if self._streams_read == 2:
        self._change_state(_State.OVER, reason, failed=False)

  def _on_control(self, data: bytes) -> None:
    message, transfer = self._incoming.decode(self._received.open(data))
    with self._changed:
      self._deliver(self._receive_buffer.on_message(message, transfer))
      self._changed.notify_all()  # a transfer may wait for this announcement

  def _on_frame(self, frame: bytes) -> None:
    acknowledged = chunks.acknowledged(frame)
    with self._changed:
      if acknowledged is not None:
        self._acknowledged(acknowledged)
        return
      if self._receipts.add(len(frame)):
        self._changed.notify_all()
    transfer = self._assembler.add(frame)
    if transfer is not None:
      with self._changed:
        # After a stall this thread may be far ahead of the Control reader. It then waits, and
        # gRPC's flow control makes the peer wait, too.
        self._changed.wait_for(
          lambda: self._state is _State.OVER or self._receive_buffer.takes(transfer.number),
          self._limits.handshake_s,
        )
        self._deliver(
          self._receive_buffer.on_transfer(transfer.number, transfer.data, transfer.crc32)
        )

  def _acknowledged(self, received: int) -> None:
    if not self._window.acknowledge(received, time.monotonic()):
      raise link.LinkError(f'the peer has {received} bytes of payloads, more than were sent')
    self._changed.notify_all()

  def _deliver(self, delivery: link.Delivery | None) -> None:
    if delivery is None or self._state is not _State.OPEN:
      return
    message, payload = delivery
    payload_id = None if payload is None else self._payloads.put(payload)
    self._post(events.Received(session=self.number, message=message, payload_id=payload_id))

  # --- The only place where a session ends --------------------------------------------------------

  def _change_state(self, state: _State, reason: str, failed: bool) -> None:
    if self._state is _State.OVER:
      return
    if self._state is not _State.DRAINING:
      self._stop(reason, failed)
    self._state = state
    if state is _State.OVER:
      self._send_queue.clear()
    self._changed.notify_all()

  def _stop(self, reason: str, failed: bool) -> None:
    self.reason, self._failed = reason, failed
    if self._dialed or self._state is _State.OPEN:
      self._post(events.Disconnected(session=self.number, reason=reason))
    # Writers see the state and end their streams, unless a peer that reads nothing blocks them.
    self._timer = threading.Timer(self._limits.drain_s, self._end_undrained)
    self._timer.daemon = True
    self._timer.start()

  def _end_undrained(self) -> None:
    self.fail(f'not drained within {self._limits.drain_s} s')
    self.cancel()


class Sessions:
  """What both ends of `node.ports.Transport` have in common: the sessions, by number."""

  session_class = Session

  def __init__(self, post: ports.Post, payloads: ports.Payloads, limits: link.Limits):
    self._post = post
    self._payloads = payloads
    self._limits = limits
    self.traffic = link.Traffic()
    self._lock = threading.Lock()
    self._sessions: dict[int, Session] = {}

  def send(
    self, session: int, message: messages.Message, payload: link.Buffer | None = None
  ) -> None:
    if (found := self._find(session)) is not None:
      found.send(message, payload)

  def close(self, session: int, reason: str) -> None:
    if (found := self._find(session)) is not None:
      found.close(reason)

  def _find(self, session: int) -> Session | None:
    with self._lock:
      return self._sessions.get(session)

  def _add(self, number: int, dialed: bool) -> Session:
    """A new session; the caller holds the lock."""
    session = self.session_class(
      number, self._post, self._payloads, self._limits, dialed, self.traffic
    )
    self._sessions[number] = session
    return session

  def _close_all(self, reason: str, grace_s: float) -> list[Session]:
    """Closes every session; those that are not finished after `grace_s`."""
    deadline_s = time.monotonic() + grace_s
    with self._lock:
      sessions = list(self._sessions.values())
    for session in sessions:
      session.close(reason)
    wait = lambda session: session.finished.wait(max(0.0, deadline_s - time.monotonic()))
    return [session for session in sessions if not wait(session)]


def describe(error: grpc.RpcError) -> str:
  """Describes a stream's error: status and details (on a server gRPC gives neither)."""
  if not isinstance(error, grpc.Call):
    return LOST
  code = error.code().name.lower().replace('_', ' ')
  return f'{code}: {error.details()}' if error.details() else code


def start_thread(name: str, target: Callable, *args) -> threading.Thread:
  thread = threading.Thread(target=target, args=args, name=name, daemon=True)
  thread.start()
  return thread


def check_loopback(address: str) -> tuple[str, int]:
  """(host, port) of 'host:port'. Raises ValueError unless the host is a loopback address."""
  host, colon, port = address.rpartition(':')
  if not colon or not port.isdecimal() or int(port) > 65535:
    raise ValueError(
      f'address {address!r} is not HOST:PORT with a port from 0 to 65535: use 127.0.0.1:PORT'
    )
  try:
    loopback = ipaddress.ip_address(host.removeprefix('[').removesuffix(']')).is_loopback
  except ValueError:
    loopback = False
  if not loopback:
    raise ValueError(
      f'address {address!r}: {host!r} is not a loopback address, and transport '
      'security does not exist yet: use 127.0.0.1 and, between hosts, a tunnel '
      '(ssh -L)'
    )
  return host, int(port)
