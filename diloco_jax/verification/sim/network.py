"""The network between learners and syncer: sessions that are slow, stalled, broken or duplicated.

A *session* is one connection. As on the wire it has two lanes per direction: control is first in,
first out; payloads are first in, first out and may be overtaken by control that was sent later.
But both lanes share the link: control waits behind the payload bytes that the sender has handed to
it already, and these are as many as the link carries in `queue_ns` (transport/flow_control.py). A
*link* connects a learner to the syncer, with its times and faults. Either a payload has a fixed
time on it, or each direction is a *pipe* of so many bytes per second, its own or one that it shares
with other learners:

* the network resends a lost packet, so its lane is late (an open session loses no message);
* the network delivers a duplicated message a second time, late and out of order: more than a real
  session would ever do, so the machines must tolerate it;
* a cut direction delivers nothing and tells neither end; stalled messages arrive after healing, if
  the session still exists;
* a reset breaks the sessions: messages in flight are lost, and each end hears of it in its time;
* the checksum finds a corrupt byte and closes the session.

The network discards a message for an end that has closed.
"""

import collections
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from diloco_jax.protocol import events
from diloco_jax.verification import random_streams
from diloco_jax.verification.sim import engine as engine_lib

MS = engine_lib.MS
RESEND_NS = 200 * MS  # delay of a lost packet
ECHO_NS = 400 * MS  # longest time from a message to its duplicate
PAYLOAD_BYTES = 64  # of an encoded fragment here
CONTROL_BYTES = 8  # small beside it, as on the wire: a throttled link still carries heartbeats

# On a pipe. An Ethernet frame of 1514 bytes carries 1448 of TCP; every 16 KiB have 34 bytes of TLS,
# HTTP/2, gRPC and chunk headers. A control message is about 60 bytes in a packet of its own.
FRAME_BYTES = 1 << 18
CONTROL_WIRE_BYTES = 180
QUEUE_S, SPARE_S = 1.0, 0.2  # as in transport/flow_control.py

Deliver = Callable[[], None]


def wire_bytes(payload_bytes: int) -> int:
  """The bytes of a payload on the wire, with the headers of all layers.

  >>> wire_bytes(1_000_000)
  1047750
  """
  return -(-payload_bytes * 1514 * (16_384 + 34) // (1448 * 16_384))


class Pipe:
  """One direction of a link of `bytes_per_s`. Sessions that send at the same time have equal shares
  of it. Those of one session leave first in, first out, except that control overtakes the payload
  bytes that were not handed to the connection yet (flow control keeps them back)."""

  def __init__(self, engine: engine_lib.Engine, bytes_per_s: float, scale: int = 1):
    self.scale = scale
    self._engine, self._bytes_per_s = engine, max(1, round(bytes_per_s))
    # By session: what waits, as [bytes left in units of 1e-9, what to call, whether it is control].
    self._queues: dict[int, list[list[Any]]] = {}
    self._since_ns = self._plan = 0

  def send(self, session: int, size: int, control: bool, done: Deliver) -> None:
    """Queues so many bytes; calls `done` when the last of them has left."""
    self._settle()
    queue = self._queues.setdefault(session, [])
    share = self._bytes_per_s / len(self._queues)
    window = min(share * QUEUE_S, FRAME_BYTES + share * SPARE_S)  # was handed over, in whole frames
    index, room = 0, FRAME_BYTES * engine_lib.SECOND * math.ceil(window / FRAME_BYTES)
    last = max((n for n, item in enumerate(queue) if item[2]), default=-1)
    while index < len(queue) and (not control or index <= last or queue[index][0] <= room):
      room -= queue[index][0]
      index += 1
    if index < len(queue) and room > 0:  # a part of a payload
      queue[index][0] -= room
      queue.insert(index, [room, lambda: None, False])
      index += 1
    queue.insert(index, [size * engine_lib.SECOND, done, control])
    self._plan_next()

  def forget(self, session: int) -> None:
    """The session is broken: what it has queued is lost."""
    self._settle()
    self._queues.pop(session, None)
    self._plan_next()

  def _settle(self) -> None:
    """Brings the queues up to the present."""
    elapsed_ns, self._since_ns = self._engine.now_ns - self._since_ns, self._engine.now_ns
    share = elapsed_ns * self._bytes_per_s // max(1, len(self._queues))
    for session, queue in list(self._queues.items()):
      queue[0][0] -= share
      while queue[0][0] <= 0:
        left, done, _ = queue.pop(0)
        done()
        if not queue:
          del self._queues[session]
          break
        queue[0][0] += left

  def _plan_next(self) -> None:
    self._plan += 1
    if self._queues:
      left = min(queue[0][0] for queue in self._queues.values()) * len(self._queues)
      self._engine.after(-(-left // self._bytes_per_s), functools.partial(self._next, self._plan))

  def _next(self, plan: int) -> None:
    if plan == self._plan:
      self._settle()
      self._plan_next()


@dataclasses.dataclass
class Link:
  """The link of one learner process to the syncer. Rates are per mille of the messages.

  Attributes:
    up_ns, down_ns: time of flight to the syncer, and from it.
    bulk_up_ns, bulk_down_ns: additional time of a payload.
    queue_ns: how much of the link's time the payloads may take that were handed to it.
    jitter_ns: largest random addition per message.
    loss, duplicate: how often a message is lost (and sent again), delivered twice.
    delay_ns, bytes_per_s: a slow phase.
    cut: directions that deliver nothing, of 'up' and 'down'.
    pipes: by direction; where there is one, `bulk_up_ns` or `bulk_down_ns` does not count.
    carried: bytes of this learner that have left through a pipe, by direction.
  """

  draw: random.Random
  up_ns: int = 5 * MS
  down_ns: int = 5 * MS
  bulk_up_ns: int = 5 * MS
  bulk_down_ns: int = 5 * MS
  queue_ns: int = 100 * MS
  jitter_ns: int = 0
  loss: int = 0
  duplicate: int = 0
  delay_ns: int = 0
  bytes_per_s: int = 0
  cut: set[str] = dataclasses.field(default_factory=set)
  held: list[tuple[str, Deliver]] = dataclasses.field(default_factory=list)
  pipes: dict[str, Pipe] = dataclasses.field(default_factory=dict)
  carried: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  corrupt: bool = False  # the next message is damaged

  def flight_ns(self, lane: str) -> int:
    """Time from end to end, including lost packets that are sent again."""
    time_ns = (self.up_ns if lane == 'up' else self.down_ns) + self.delay_ns
    if self.jitter_ns:
      time_ns += self.draw.randrange(self.jitter_ns)
    while random_streams.chance(self.draw, self.loss):
      time_ns += RESEND_NS
    return time_ns

  def transfer_ns(self, lane: str, payloads: int) -> int:
    """How long a message occupies the lane: one as large as so many payloads, or none (0)."""
    time_ns = (self.bulk_up_ns if lane == 'up' else self.bulk_down_ns) * payloads
    if self.bytes_per_s:
      size_bytes = PAYLOAD_BYTES * payloads or CONTROL_BYTES
      time_ns += size_bytes * engine_lib.SECOND // self.bytes_per_s
    return time_ns


@dataclasses.dataclass
class Session:
  """One connection: its two ends, and per direction the arrival time of the last control message
  and of the last payload sent so far."""

  number: int
  link: Link
  learner: Any
  learner_session: int
  syncer: Any
  open: dict[str, bool]
  control: dict[str, int]
  bulk: dict[str, int]
  broken: bool = False
  # By direction whose sender's host has lost power: when the last that had left it arrives.
  last_ns: dict[str, int] = dataclasses.field(default_factory=dict)

  def end(self, side: str) -> tuple[Any, int]:
    """The process at this end and the number that it uses for the session."""
    if side == 'learner':
      return self.learner, self.learner_session
    return self.syncer, self.number


class Network:
  """All sessions. `syncer()` is the process that listens at present."""

  def __init__(self, engine: engine_lib.Engine, syncer: Callable[[], Any]):
    self._engine = engine
    self._syncer = syncer
    self._numbers = itertools.count(1)
    self._sessions: dict[tuple[Any, int], Session] = {}  # by process and its number for it

  def of(self, process: Any) -> list[Session]:
    return [session for (owner, _), session in self._sessions.items() if owner is process]

  # --- Requests of a process ----------------------------------------------------------------------

  def dial(self, process: Any, link: Link, number: int) -> None:
    now = self._engine.now_ns
    session = Session(
      next(self._numbers),
      link,
      process,
      number,
      None,
      {'learner': True, 'syncer': False},
      *({'up': now, 'down': now} for _ in range(2)),
    )
    self._sessions[process, number] = session
    self._carry(session, 'up', now + link.flight_ns('up'), lambda: self._answer(session))

  def _answer(self, session: Session) -> None:
    """The dial has reached the syncer's host, whether or not a syncer runs there."""
    server = self._syncer()
    if not session.open['learner']:
      return
    if not server.alive:
      self._close_end(session, 'learner')
      return
    if server.frozen:
      server.defer(lambda: self._answer(session))
      return
    session.syncer, session.open['syncer'] = server, True
    self._sessions[server, session.number] = session
    server.post(events.Connected(session=session.number))
    time_ns = self._engine.now_ns + session.link.flight_ns('down')
    session.control['down'] = time_ns
    self._carry(
      session,
      'down',
      time_ns,
      lambda: self._post(session, 'learner', events.Connected(session=session.learner_session)),
    )

  def send(self, process: Any, number: int, message: Any, content: Any) -> None:
    """Sends a message with its payload; does nothing if the session no longer exists."""
    session = self._sessions.get((process, number))
    if session is None:
      return
    link, up = session.link, process is session.learner
    lane, end = ('up', 'syncer') if up else ('down', 'learner')
    if link.corrupt:
      link.corrupt = False
      self.reset(session.learner, 'checksum mismatch')
      return
    event = events.Received(
      session=session.number if up else session.learner_session, message=message
    )

    def deliver() -> None:
      self._post(session, end, event, content)

    def arrive(time_ns: int) -> None:
      self._carry(session, lane, time_ns, deliver)
      if random_streams.chance(link.draw, link.duplicate):
        self._carry(session, lane, time_ns + link.draw.randrange(ECHO_NS), deliver)

    if pipe := link.pipes.get(lane):
      payload_bytes = 0 if content is None else message.payload.size_bytes * pipe.scale
      size = CONTROL_WIRE_BYTES + wire_bytes(payload_bytes)

      def sent() -> None:
        link.carried[lane] += size
        lanes = session.control if content is None else session.bulk
        lanes[lane] = max(lanes[lane], self._engine.now_ns + link.flight_ns(lane))
        arrive(lanes[lane])

      pipe.send(session.number, size, content is None, sent)
      return
    free_ns = self._engine.now_ns + link.flight_ns(lane)
    before_ns = max(free_ns, session.control[lane])
    if content is None:
      lanes, payloads = session.control, 0
      arrives_ns = max(before_ns, min(session.bulk[lane], free_ns + link.queue_ns))
    else:
      lanes, payloads = session.bulk, 1
      arrives_ns = max(before_ns, session.bulk[lane])
    lanes[lane] = arrives_ns + link.transfer_ns(lane, payloads)
    arrive(lanes[lane])

  def close(self, process: Any, number: int) -> None:
    session = self._sessions.get((process, number))
    if session is not None:
      self._close_end(session, 'learner' if process is session.learner else 'syncer')

  # --- Faults -------------------------------------------------------------------------------------

  def gone(self, process: Any, silent: bool = False) -> None:
    """The process has ended: messages that it had sent still arrive, then its peers are told,
    unless its host has lost power too (`silent`): what is in flight arrives, nothing else."""
    for session in self.of(process):
      side, lane = ('learner', 'up') if process is session.learner else ('syncer', 'down')
      if silent:
        link = session.link
        flight_ns = (link.up_ns if lane == 'up' else link.down_ns) + link.delay_ns + link.jitter_ns
        session.last_ns[lane] = self._engine.now_ns + flight_ns
        self._forget(session, side)
      else:
        self._close_end(session, side, dead=True)

  def reset(self, process: Any, reason: str = 'connection reset') -> bool:
    """Breaks a learner's sessions; messages in flight are lost, each end hears of it in its time.
    False: it has no session."""
    sessions = self.of(process)
    for session in sessions:
      session.broken = True
      for pipe in session.link.pipes.values():
        pipe.forget(session.number)
      self._engine.after(0, lambda s=session: self._hang_up(s, 'learner', reason))
      self._engine.after(session.link.up_ns, lambda s=session: self._hang_up(s, 'syncer', reason))
    return bool(sessions)

  def heal(self, link: Link, *lanes: str) -> None:
    """Ends the cuts of these directions (none: of both); stalled messages arrive."""
    link.cut.difference_update(lanes or ('up', 'down'))
    held, link.held = link.held, []
    for lane, deliver in held:
      if lane in link.cut:
        link.held.append((lane, deliver))
      else:
        deliver()

  def _carry(self, session: Session, lane: str, time_ns: int, deliver: Deliver) -> None:
    def arrive() -> None:
      if session.broken or self._engine.now_ns > session.last_ns.get(lane, math.inf):
        return
      if lane in session.link.cut:
        session.link.held.append((lane, arrive))
      else:
        deliver()

    self._engine.at(time_ns, arrive)

  def _post(self, session: Session, side: str, event: Any, content: Any = None) -> None:
    if session.open[side]:
      session.end(side)[0].post(event, content)

  def _close_end(self, session: Session, side: str, dead: bool = False) -> None:
    """One end closes: it is told at once (unless it is dead), the other after all sent messages."""
    up = side == 'learner'
    lane, other = ('up', 'syncer') if up else ('down', 'learner')
    if dead:
      self._forget(session, side)
    else:
      self._engine.after(0, lambda: self._hang_up(session, side, 'closed'))

    def tell_other() -> None:
      flight_ns = session.link.flight_ns(lane)
      time_ns = max(self._engine.now_ns + flight_ns, session.control[lane], session.bulk[lane])
      self._carry(session, lane, time_ns, lambda: self._hang_up(session, other, 'peer closed'))

    if pipe := session.link.pipes.get(lane):
      pipe.send(session.number, 0, False, tell_other)
    else:
      tell_other()

  def _hang_up(self, session: Session, side: str, reason: str) -> None:
    """Posts Disconnected, once per end."""
    if session.open[side]:
      self._forget(session, side)
      process, number = session.end(side)
      process.post(events.Disconnected(session=number, reason=reason))

  def _forget(self, session: Session, side: str) -> None:
    session.open[side] = False
    self._sessions.pop(session.end(side), None)
