"""The link to one peer without its sockets: the order of sending, and the assembly of received
messages with their payloads.

A link has two lanes. *Control* carries messages in the order of sending and never waits for bulk.
*Bulk* carries payloads, one *transfer* after the other, each cut into chunks on demand. A message
with a payload is an *announcement*: it enters the control lane when its transfer begins. So a
heartbeat never waits behind a gigabyte, and the link can still replace a transfer that has not
begun.

Rules of the outgoing half (`SendQueue`):

* transfers leave in the order of sending; transfer numbers grow and are never reused;
* a whole Publish (`base_version` None) of a fragment replaces the older Publishes of that fragment
  whose transfer has not begun: the learner would overwrite them on arrival. A delta replaces
  nothing, since its base may be a version that still waits;
* a Progress replaces the last message if that is a Progress that still waits: its counts are
  totals. So a learner of very short steps sends fewer reports, not a longer queue;
* the queue is bounded; for a peer that empties it too slowly the link raises `LinkError`.

Rules of the incoming half (`ReceiveBuffer`): the lanes are separate gRPC streams, so announcement
and transfer may arrive in either order. The link delivers a message when it is complete, in the
order of completion. Announced and received size and checksum must agree, else `LinkError`.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, MutableSequence
from typing import Any

from diloco_jax.node import payload as payload_lib
from diloco_jax.protocol import messages

Buffer = memoryview | bytes
Split = Callable[[Buffer], Iterator[bytes]]
"""Cuts a payload into frames, lazily."""

NO_TRANSFER = 0  # the transfer number of a message without payload


class LinkError(Exception):
  """The peer broke a rule above or is too slow; the text has both values. The session must end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """The limits of one end for one peer. Sizes come from the agreed layout, not from the peer."""

  contribution_bytes: tuple[int, ...]  # by fragment: an encoded pseudo-gradient
  publish_bytes: tuple[int, ...]  # by fragment: the largest published value
  max_queued_bytes: int = 8 << 30  # payloads that wait to be sent (by reference, often shared)
  max_queued_messages: int = 1 << 14  # control messages that wait to be sent
  max_announced: int = 64  # incoming payloads whose announcement is ahead of their bytes
  max_members: int = 64  # sessions of members at the same time (syncer)
  max_strangers: int = 24  # sessions beside them that are no member's yet (syncer)
  stay_s: float = 1.0  # for which a new session does not displace one that is no member's (syncer)
  handshake_s: float = 5.0  # until both gRPC streams of a session are open; then until its Join
  member_s: float = 15.0  # from its Join until a session is a member's (syncer)
  drain_s: float = 5.0  # for sending the queued messages after a close
  messages_per_s: int = 200  # of a learner; more have to wait
  message_bytes_per_s: int = 1 << 20  # the same for their bytes, without payloads

  @property
  def max_payload_bytes(self) -> int:
    return max(*self.contribution_bytes, *self.publish_bytes)

  @property
  def seats(self) -> int:
    return self.max_members + self.max_strangers


def check_payload(message: messages.Message, payload: payload_lib.Payload | None) -> None:
  """Raises ValueError if the payload differs from the one that the message announces."""
  announced = announced_payload(message)
  due = 'no payload' if announced is None else f'{announced.size_bytes} bytes'
  given = 'no payload' if payload is None else f'{payload_lib.size_bytes(payload)} bytes'
  if given != due:
    raise ValueError(f'{type(message).__name__} announces {due} but comes with {given}')


def announced_payload(message: messages.Message) -> messages.Payload | None:
  return getattr(message, 'payload', None)


class SendQueue:
  """The messages and payloads to send to one peer. Not thread-safe: the owner holds a lock. One
  thread makes the frames, outside the lock."""

  def __init__(self, split: Split, max_bytes: int, max_messages: int):
    self._split = split
    self._max_bytes = max_bytes
    self._max_messages = max_messages
    self._control: collections.deque[tuple[messages.Message, int]] = collections.deque()
    self._bulk: collections.deque[tuple[messages.Message, Buffer]] = collections.deque()
    self._under_way_bytes = 0
    self._last_transfer = NO_TRANSFER

  @property
  def queued_bytes(self) -> int:
    """Waiting payload bytes, with those of the current transfer."""
    return self._under_way_bytes + sum(payload_lib.size_bytes(payload) for _, payload in self._bulk)

  def push(self, message: messages.Message, payload: Buffer | None = None) -> None:
    """Queues a message. Raises LinkError if the queue would exceed this peer's limits."""
    check_payload(message, payload)
    if payload is None:
      self._push_control(message)
    else:
      self._push_bulk(message, payload)

  def next_control(self) -> tuple[messages.Message, int] | None:
    """Returns the next message and the number of its transfer (`NO_TRANSFER` without payload)."""
    return self._control.popleft() if self._control else None

  def next_transfer(self) -> Iterator[bytes] | None:
    """Begins the next transfer: queues its announcement as control, returns its frames, lazily.

    The call says that the transfer before has been sent.
    """
    self._under_way_bytes = 0
    if not self._bulk:
      return None
    message, payload = self._bulk.popleft()
    self._under_way_bytes = payload_lib.size_bytes(payload)
    self._last_transfer += 1
    self._control.append((message, self._last_transfer))
    return self._split(payload)

  def clear(self) -> None:
    """Drops all waiting messages and payloads."""
    self._control.clear()
    self._bulk.clear()

  @property
  def has_control(self) -> bool:
    return bool(self._control)

  def _push_control(self, message: messages.Message) -> None:
    if isinstance(message, messages.Progress) and self._control:
      if isinstance(self._control[-1][0], messages.Progress):
        self._control.pop()
    if len(self._control) >= self._max_messages:
      raise LinkError(
        f'too slow: {len(self._control)} messages wait to go out, at most {self._max_messages} may'
      )
    self._control.append((message, NO_TRANSFER))

  def _push_bulk(self, message: messages.Message, payload: Buffer) -> None:
    if isinstance(message, messages.Publish) and message.base_version is None:
      is_older = lambda waiting: (
        isinstance(waiting, messages.Publish)
        and waiting.fragment == message.fragment
        and waiting.version <= message.version
      )
      self._bulk = collections.deque(entry for entry in self._bulk if not is_older(entry[0]))
    queued = self.queued_bytes
    size = payload_lib.size_bytes(payload)
    if queued + size > self._max_bytes:
      raise LinkError(
        f'too slow: {queued} payload bytes wait to go out and {size} more would be over the '
        f'{self._max_bytes} granted'
      )
    self._bulk.append((message, payload))


Delivery = tuple[messages.Message, Any]
"""A complete message and its payload (None without one)."""


class ReceiveBuffer:
  """Pairs the messages of one peer with their payloads. Not thread-safe: the owner holds a lock.

  Args:
    max_payload_bytes: the largest payload; as many bytes may wait for their announcements.
    max_announced: how many announcements may wait for their payloads, and payloads for theirs.
  """

  def __init__(self, max_payload_bytes: int, max_announced: int):
    self._max_payload_bytes = max_payload_bytes
    self._max_announced = max_announced
    self._announced: dict[int, messages.Message] = {}
    self._arrived: dict[int, tuple[messages.Payload, Buffer]] = {}
    self._last_transfer = NO_TRANSFER

  def on_message(self, message: messages.Message, transfer: int) -> Delivery | None:
    """Adds a message; returns it with its payload if it is now complete."""
    payload = announced_payload(message)
    if (payload is None) != (transfer == NO_TRANSFER):
      raise LinkError(f'{type(message).__name__} with payload {payload} names transfer {transfer}')
    if payload is None:
      return message, None
    if transfer <= self._last_transfer:
      raise LinkError(f'transfer {transfer} is announced after transfer {self._last_transfer}')
    if payload.size_bytes > self._max_payload_bytes:
      raise LinkError(
        f'a payload of {payload.size_bytes} bytes is announced, at most '
        f'{self._max_payload_bytes} are granted'
      )
    if len(self._announced) >= self._max_announced:
      raise LinkError(
        f'{len(self._announced)} announced payloads have not come, at most '
        f'{self._max_announced} may be missing'
      )
    self._last_transfer = transfer
    self._announced[transfer] = message
    return self._pair(transfer)

  @property
  def waits(self) -> bool:
    """Whether a payload is announced that has not come."""
    return bool(self._announced)

  def has_room(self, transfer: int, size: int) -> bool:
    """Whether there is room for this transfer, or its announcement has arrived."""
    waiting = sum(payload.size_bytes for payload, _ in self._arrived.values())
    room = len(self._arrived) < self._max_announced
    return transfer in self._announced or (room and waiting + size <= self._max_payload_bytes)

  def on_transfer(self, transfer: int, data: Buffer, crc32: int) -> Delivery | None:
    """Adds a whole transfer; returns its message and payload if the message has arrived."""
    known = transfer <= self._last_transfer and transfer not in self._announced
    if known or transfer in self._arrived:
      raise LinkError(
        f'transfer {transfer} came twice; the last announced is {self._last_transfer}'
      )
    payload = messages.Payload(size_bytes=payload_lib.size_bytes(data), crc32=crc32)
    if not self.has_room(transfer, payload.size_bytes):
      raise LinkError(
        f'transfer {transfer} came unannounced beside {len(self._arrived)} others, at most '
        f'{self._max_payload_bytes} bytes may wait'
      )
    self._arrived[transfer] = payload, data
    return self._pair(transfer)

  def _pair(self, transfer: int) -> Delivery | None:
    if transfer not in self._announced or transfer not in self._arrived:
      return None
    message = self._announced.pop(transfer)
    payload, data = self._arrived.pop(transfer)
    announced = announced_payload(message)
    if announced != payload:
      raise LinkError(
        f'{type(message).__name__} announces {announced} but transfer {transfer} has {payload}'
      )
    return message, data


class Traffic:
  """Counts the bytes of all sessions at one end of a transport: messages, chunk headers and
  payloads of both lanes. Thread-safe.

  Args:
    totals: sent, received, and those of further sessions behind them; for example in memory of
      several processes.
  """

  def __init__(self, totals: MutableSequence[int] | memoryview | None = None):
    self._lock = threading.Lock()
    self._totals = [0, 0] if totals is None else totals

  @property
  def sent_bytes(self) -> int:
    return sum(self._totals[::2])

  @property
  def received_bytes(self) -> int:
    return sum(self._totals[1::2])

  def add(self, sent_bytes: int = 0, received_bytes: int = 0) -> None:
    with self._lock:
      self._totals[0] += sent_bytes
      self._totals[1] += received_bytes
