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

A syncer reads no further from a peer that sends more messages than it may (`link.Limits`), and both
ends read no further while the machine has not handled MAX_UNHANDLED messages of the session: gRPC's
flow control then makes the peer wait. A learner keeps to the rate by itself. What a peer may send
at all is in peer_limits.py.

A session never retries: a retried stream can lose messages silently. The machines recover the
messages that a broken session loses.
"""

import enum
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import grpc

from diloco_jax.certs import proofs
from diloco_jax.node import payload as payload_lib
from diloco_jax.node import ports
from diloco_jax.protocol import events, messages, printable
from diloco_jax.transport import chunks, control_crc, flow_control, link, peer_limits, translate

SERVICE = 'diloco.v1.SyncerService'
BRING = 'Bring'  # what a loop calls before it joins
FOLLOW = 'Follow'  # what a follower calls (syncer/followers.py)
TOKEN = 'diloco-session'
FOLLOWS = 'diloco-follows'  # in the first metadata of a follower's call that is accepted
REASON = 'diloco-reason-bin'  # why the syncer closed the session, in its trailing metadata
LOST = 'connection lost'
REASON_CHARS = 600  # of a peer's reason: it may be a sentence with a remedy
MAX_UNHANDLED = 16
UNPROVED = 'refused certificates'
SHARED = chunks.Shared()  # frames of the syncer of this process
UNUSED, BROKEN = "sessions that became no learner's", 'sessions that broke the protocol'

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
    self.token = ''  # with which the learner opens Bulk (syncer)
    self.proof: proofs.Proof | None = None  # of the learner, with its certificate (syncer)
    self.reason = ''
    self.failed = False  # it broke, rather than being closed by either side
    self.finished = threading.Event()  # both streams have ended
    self.since_s = time.monotonic()
    self.trouble = ''  # the kind of fault for which the syncer ended this session
    self._post = post
    self._payloads = payloads
    self._limits = limits
    directions = (translate.LEARNER_TO_SYNCER, translate.SYNCER_TO_LEARNER)
    self._outgoing, self._incoming = directions if dialed else reversed(directions)
    self._dialed = dialed
    self._send_queue = link.SendQueue(
      self._split, limits.max_queued_bytes, limits.max_queued_messages
    )
    self._receive_buffer = link.ReceiveBuffer(limits.max_payload_bytes, limits.max_announced)
    self.rules = peer_limits.SyncerRules(limits) if dialed else peer_limits.LearnerRules(limits)
    self._assembler = chunks.Assembler(
      max_payload_bytes=limits.max_payload_bytes, on_begin=self._on_begin
    )
    self._max_items = translate.MAX_ITEMS if dialed else len(limits.contribution_bytes)
    # A learner spends what it may; the syncer leaves twice the room for what arrives at once.
    room_s = 1 if dialed else 2
    self._message_rate = peer_limits.Rate(limits.messages_per_s, room_s * limits.messages_per_s)
    self._byte_rate = peer_limits.Rate(
      limits.message_bytes_per_s, room_s * limits.message_bytes_per_s
    )
    self._unhandled = 0  # delivered messages that the machine has not handled
    self._sent, self._received = control_crc.Seal(), control_crc.Seal()
    self._window, self._receipts = flow_control.Window(), flow_control.Receipts()
    lock = threading.RLock()
    self._changed = threading.Condition(lock)
    self._bulk_changed = threading.Condition(lock)  # the bulk writer waits here, and no other
    self._state = _State.CONNECTING
    self._bulk_done = False
    self._cancels: list[Callable[[], None]] = []  # one per stream
    self._streams_up = 0
    self._streams_read = 0  # streams that the peer ended in order
    self._deadline: threading.Timer | None = None  # when a stranger's session ends
    self._drained: threading.Timer | None = None  # when a closed session ends

  # --- Interface of the transport -----------------------------------------------------------------

  def open(self) -> None:
    """Opens the session; both streams are up."""
    with self._changed:
      if self._state is _State.CONNECTING:
        self._state = _State.OPEN
        if not self._dialed:
          self._set_deadline(self._limits.handshake_s, 'no Join')
        learner = self.proof.name.id if self.proof else ''
        self._post(events.Connected(session=self.number, learner=learner))
        self._wake_all()

  def wait_open(self, timeout_s: float) -> bool:
    with self._changed:
      self._changed.wait_for(lambda: self._state is not _State.CONNECTING, timeout_s)
      return self._state is not _State.CONNECTING

  def admit(self) -> None:
    """The peer is a member, whose session has no deadline."""
    with self._changed:
      self.rules.member = True
      _cancel(self._deadline)

  def send(self, message: messages.Message, payload: link.Buffer | None) -> None:
    with self._changed:
      if self._state is not _State.OPEN:
        return
      try:
        self._send_queue.push(message, payload)
        self.rules.on_sent(message)
        (self._changed if payload is None else self._bulk_changed).notify_all()
      except link.LinkError as error:
        self._change_state(_State.OVER, str(error), failed=True)

  def handled(self) -> None:
    """The machine has handled a message of this session."""
    with self._changed:
      self._unhandled -= 1
      if self._unhandled == MAX_UNHANDLED - 1:
        self._changed.notify_all()  # the reader waits

  def close(self, reason: str) -> None:
    """Ends the session after it has sent the queued messages, at most `drain_s` from now."""
    with self._changed:
      if self._state is _State.OPEN:
        self._change_state(_State.DRAINING, reason, failed=False)
      elif self._state is _State.CONNECTING:
        self._change_state(_State.OVER, reason, failed=False)

  def fail(self, reason: str, trouble: str = '') -> None:
    """Ends the session now; `trouble`: the kind of fault, for the syncer's operator."""
    with self._changed:
      if self._state is not _State.OVER:
        self.trouble = trouble
      self._change_state(_State.OVER, reason, failed=True)

  def fail_after(self, error: grpc.RpcError, reason: str) -> None:
    """Ends the session after a stream's error; a refused certificate is the learner's reason."""
    with self._changed:
      refused = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED
      if refused and self._dialed and self._state is not _State.OVER:
        self._unhandled += 1
        refusal = messages.unproved(printable.printable(error.details() or '', REASON_CHARS))
        self._post(events.Received(session=self.number, message=refusal))
      self.fail(reason)

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

  def remove_stream(self) -> bool:
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
      _cancel(self._drained)
    self.finished.set()

  @property
  def member(self) -> bool:
    """Whether the session is up and a member's."""
    return self._state is _State.OPEN and self.rules.member

  @property
  def stranger(self) -> bool:
    """Whether the session is up, or about to be, and no member's."""
    return self._state in (_State.CONNECTING, _State.OPEN) and not self.rules.member

  # --- Writers: gRPC's threads iterate over these ------------------------------------------------

  def control_frames(self) -> Iterator[bytes]:
    """Control messages of this end, serialised, until the session is over."""
    while (entry := self._next_control()) is not None:
      try:
        data = self._sent.close(self._outgoing.encode(*entry))
      except control_crc.WireError as error:
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
      elif (bulk := self._next_bulk()) is None:
        return
      elif isinstance(bulk, bytes):
        yield bulk
      else:
        frames = bulk

  def _split(self, payload: link.Buffer) -> Iterator[bytes]:
    """The frames of a transfer, which begins now."""
    size = chunks.LARGE_CHUNK_BYTES if self._window.fast else chunks.CHUNK_BYTES
    return chunks.split(payload, size, None if self._dialed else SHARED)

  def _wait_for_room(self, size: int) -> bytes | None:
    """Waits until a frame may leave; returns an acknowledgement that leaves before it."""
    with self._changed:
      while self._state is not _State.OVER:
        now_s = time.monotonic()
        if (received := self._receipts.due(now_s)) is not None:
          return chunks.acknowledgement(received)
        has_room = self._window.has_room(size)
        pause_s = self._window.wait_s(now_s) if has_room else 0.0
        if has_room and not pause_s:
          self._window.add(size, now_s)
          return None
        waits_s = [pause_s or None, self._receipts.wait_s(now_s)]
        self._bulk_changed.wait(min((s for s in waits_s if s is not None), default=None))
      return None

  def _next_control(self) -> tuple[messages.Message, int] | None:
    with self._changed:
      while self._state is not _State.OVER:
        now_s = time.monotonic()
        pause_s = self._message_rate.wait_s(now_s) if self._dialed else 0.0
        if not pause_s and (entry := self._send_queue.next_control()) is not None:
          if self._dialed:
            self._message_rate.spend(1, now_s)
          return entry
        has_control = self._send_queue.has_control
        if self._state is _State.DRAINING and self._bulk_done and not has_control:
          return None
        self._changed.wait(pause_s if has_control else None)
      return None

  def _set_deadline(self, limit_s: float, missing: str) -> None:
    """Ends the session of a stranger after `limit_s` for what is missing then. No thread of the
    session keeps the time: a peer that reads nothing can block its writers."""
    _cancel(self._deadline)
    self._deadline = start_timer(limit_s, self._fail_unused, f'{missing} within {limit_s:g} s')

  def _fail_unused(self, reason: str) -> None:
    with self._changed:
      if self._state is _State.OPEN and not self.rules.member:
        self.fail(reason, trouble=UNUSED)

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
        self._bulk_changed.wait(self._receipts.wait_s(now_s))
      return None

  # --- Readers: one thread each -------------------------------------------------------------------

  def read_control(self, stream: Iterable[bytes]) -> None:
    self._read(stream, self._on_control)

  def read_bulk(self, stream: Iterable[bytes]) -> None:
    self._read(stream, self._on_frame)

  def _read(self, stream: Iterable[bytes], process: Callable[[bytes], None]) -> None:
    try:
      for data in stream:
        self._traffic.add(received_bytes=len(data))
        process(data)
    except (control_crc.WireError, link.LinkError) as error:
      self.fail(f'the peer broke the protocol: {error}', trouble=BROKEN)
    except grpc.RpcError as error:
      self.fail_after(error, describe(error))
    except Exception as error:  # a reader that dies silently would leave a session deaf
      self.fail(f'{type(error).__name__}: {error}')
      raise
    else:
      self._on_end(stream)

  def _on_end(self, stream: Iterable[bytes]) -> None:
    """Counts a stream that the peer ended in order; after both, the peer has closed the session."""
    trailer = dict(stream.trailing_metadata() or ()) if isinstance(stream, grpc.Call) else {}
    text = trailer.get(REASON, b'closed by the peer').decode(errors='replace')
    reason = printable.printable(text, REASON_CHARS)
    with self._changed:
      self._streams_read += 1
      if self._streams_read == 2:
        self._change_state(_State.OVER, reason, failed=False)

  def _on_control(self, data: bytes) -> None:
    self._wait_turn(len(data))
    message, transfer = self._incoming.decode(self._received.open(data), self._max_items)
    with self._changed:
      self.rules.on_received(message)
      if isinstance(message, messages.Join):
        self._set_deadline(self._limits.member_s, 'not admitted as a learner')
      self._deliver(self._receive_buffer.on_message(message, transfer))
      if isinstance(message, messages.Join) or transfer != link.NO_TRANSFER:
        self._changed.notify_all()  # the transfer may wait for its announcement

  def _wait_turn(self, size: int) -> None:
    """Waits while the machine is behind, and while the learner is ahead of its rate."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._state is not _State.OPEN or self._unhandled < MAX_UNHANDLED
      )
      while not self._dialed and self._state is not _State.OVER:
        now_s = time.monotonic()
        wait_s = max(self._message_rate.wait_s(now_s), self._byte_rate.wait_s(now_s))
        if not wait_s:
          self._message_rate.spend(1, now_s)
          self._byte_rate.spend(size, now_s)
          return
        self._changed.wait(wait_s)

  def _on_begin(self, size: int) -> None:
    with self._changed:
      self.rules.on_transfer(size)

  def _on_frame(self, frame: bytes) -> None:
    acknowledged = chunks.parse_acknowledgement(frame)
    with self._changed:
      if acknowledged is not None:
        if not self._window.acknowledge(acknowledged, time.monotonic()):
          raise link.LinkError(
            f'the peer acknowledges {acknowledged} bytes, where no frame ends that it has not '
            'acknowledged'
          )
        self._bulk_changed.notify_all()
        return
      if self._receipts.add(len(frame), time.monotonic()):
        self._bulk_changed.notify_all()
    transfer = self._assembler.add(frame)
    if transfer is not None:
      with self._changed:
        # This thread may be far ahead of the Control reader. It then waits, and gRPC's flow
        # control makes the peer wait, too.
        size = payload_lib.size_bytes(transfer.data)
        self._changed.wait_for(
          lambda: self._state is _State.OVER or self._receive_buffer.has_room(transfer.number, size)
        )
        if self._state is _State.OVER:
          return
        self._deliver(
          self._receive_buffer.on_transfer(transfer.number, transfer.data, transfer.crc32)
        )

  def _deliver(self, delivery: link.Delivery | None) -> None:
    if delivery is None or self._state is not _State.OPEN:
      return
    message, payload = delivery
    payload_id = None if payload is None else self._payloads.put(payload)
    self._unhandled += 1
    self._post(events.Received(session=self.number, message=message, payload_id=payload_id))

  # --- The only function that ends a session ------------------------------------------------------

  def _change_state(self, state: _State, reason: str, failed: bool) -> None:
    if self._state is _State.OVER:
      return
    before = self._state
    self._state = state
    if state is _State.OVER:
      self._send_queue.clear()
    self._wake_all()
    if before is _State.DRAINING:
      return
    self.reason = reason
    self.failed = failed
    if self._dialed or before is _State.OPEN:
      self._post(events.Disconnected(session=self.number, reason=reason))
    _cancel(self._deadline)
    # Writers see the state and end their streams, unless a peer that reads nothing blocks them.
    self._drained = start_timer(self._limits.drain_s, self._end_undrained)

  def _wake_all(self) -> None:
    self._changed.notify_all()
    self._bulk_changed.notify_all()

  def _end_undrained(self) -> None:
    self.fail(f'not drained within {self._limits.drain_s} s')
    self.cancel()


def describe(error: grpc.RpcError) -> str:
  """Describes a stream's error: status and details (on a server gRPC gives neither)."""
  if not isinstance(error, grpc.Call):
    return LOST
  code = error.code().name.lower().replace('_', ' ')
  details = printable.printable(error.details() or '', REASON_CHARS)
  return f'{code}: {details}' if details else code


def start_thread(name: str, target: Callable, *args) -> threading.Thread:
  thread = threading.Thread(target=target, args=args, name=name, daemon=True)
  thread.start()
  return thread


def start_timer(delay_s: float, act: Callable, *args) -> threading.Timer:
  """Calls `act` after a delay, unless the timer is cancelled or the process ends."""
  timer = threading.Timer(delay_s, act, args)
  timer.daemon = True
  timer.start()
  return timer


def _cancel(timer: threading.Timer | None) -> None:
  if timer is not None:
    timer.cancel()


def public_nonce(secret: int) -> int:
  """The nonce of a process in machines, tapes and logs. Only the process itself has the secret,
  which goes over the wire, so a reader of tapes cannot pose as it."""
  digest = hashlib.sha256(secret.to_bytes(8, 'big')).digest()
  return int.from_bytes(digest[:8], 'big') >> 1  # 63 bits
