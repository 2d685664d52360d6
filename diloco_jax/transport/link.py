"""One peer's link without its sockets: what goes out next, and what has come in whole.

A link has two lanes. *Control* carries messages in the order in which they were sent and waits for
nothing. *Bulk* carries payloads, one *transfer* after the other, each cut into chunks on demand.
A message with a payload is an *announcement*: it enters the control lane when its transfer begins.
So a heartbeat is never behind a gigabyte, and what has not begun can still be replaced.
A *donation* (a donor's moments, larger than anything else, and nobody but its joiner waits for it)
goes out in the background of the bulk lane: one chunk at a time when no other payload waits, and no
faster than it is granted.

Rules of the outgoing half (`Outbox`):

* transfers leave in the order in which they were sent, but for donations, which any other payload
  overtakes; transfer numbers grow and are never reused;
* donations leave one after the other; more than MAX_DONATIONS do not wait, and a closing link does
  not finish them;
* a whole Publish (`base_version` None) of a fragment replaces the older Publishes of that fragment
  whose transfer has not begun: they would be overwritten on arrival. A delta replaces nothing, its
  base may be the very version that waits;
* what waits is bounded; a peer too slow to empty its outbox is not worth the memory: `LinkError`.

Rules of the incoming half (`Inbox`): the lanes are separate streams, so announcement and transfer
may come in either order. A message is delivered when it is complete, messages in the order in which
they became complete. Announced and received size and checksum must agree, else `LinkError`.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.protocol import messages

Buffer = memoryview | bytes
Split = Callable[[int, Buffer], Iterator[bytes]]
"""Cuts the payload of a transfer into frames, lazily."""

MAX_DONATIONS = 2  # the machines ask for one at a time; the one before may just be ending
NO_TRANSFER = 0  # the transfer number of a message without payload


class LinkError(Exception):
  """The link cannot go on: the peer broke a rule above, or is too slow. Both values, in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What one side grants one peer. Sizes come from the layout that both agreed on, not from it."""

  max_payload_bytes: int  # the largest payload accepted
  max_queued_bytes: int = 8 << 30  # payloads waiting to go out (by reference, often shared)
  max_queued_messages: int = 1 << 14  # control messages waiting to go out
  donation_bytes_per_s: int = 0  # of the donations that go out; 0: as fast as it goes
  max_open_transfers: int = 4  # incoming, incomplete or not yet announced
  max_sessions: int = 64  # peers at a time (syncer)
  handshake_s: float = 5.0  # for both streams of a session to be up
  drain_s: float = 5.0  # for what was queued to go out after a close


def size_bytes(payload: Buffer) -> int:
  return memoryview(payload).nbytes


def check_payload(message: messages.Message, payload: Buffer | None) -> None:
  """Refuses (ValueError) to send a message whose payload is not the one that it announces."""
  announced = announced_payload(message)
  name = type(message).__name__
  if (announced is None) != (payload is None):
    raise ValueError(f'{name} announces {announced} but comes with {_words(payload)}')
  if announced is not None and announced.size_bytes != size_bytes(payload):
    raise ValueError(
      f'{name} announces {announced.size_bytes} bytes but comes with {_words(payload)}'
    )


def announced_payload(message: messages.Message) -> messages.Payload | None:
  return getattr(message, 'payload', None)


def _words(payload: Buffer | None) -> str:
  return 'no payload' if payload is None else f'{size_bytes(payload)} bytes'


@dataclasses.dataclass
class _Background:
  """A donation on its way out: its frames (None before the first), and when the next may go."""

  message: messages.Message
  payload: Buffer
  frames: Iterator[bytes] | None = None
  next_s: float = 0.0


class Outbox:
  """What is to go out to one peer. Not thread-safe: its owner holds a lock. Frames are made outside
  of it, by one thread."""

  def __init__(self, split: Split, max_bytes: int, max_messages: int, bytes_per_s: int = 0):
    self._split = split
    self._max_bytes = max_bytes
    self._max_messages = max_messages
    self._control: collections.deque[tuple[messages.Message, int]] = collections.deque()
    self._bulk: collections.deque[tuple[messages.Message, Buffer]] = collections.deque()
    self._bytes_per_s = bytes_per_s
    self._donations: collections.deque[_Background] = collections.deque()
    self._under_way_bytes = 0
    self._last_transfer = NO_TRANSFER

  @property
  def queued_bytes(self) -> int:
    """Payload bytes that wait, with those of the transfer under way; donations do not count."""
    return self._under_way_bytes + sum(size_bytes(payload) for _, payload in self._bulk)

  def push(self, message: messages.Message, payload: Buffer | None = None) -> None:
    """Queues a message. Raises LinkError if more would wait than this peer is granted."""
    check_payload(message, payload)
    if payload is None:
      self._push_control(message, NO_TRANSFER)
    elif isinstance(message, messages.Donation):
      self._push_background(message, payload)
    else:
      self._supersede(message)
      self._push_bulk(message, payload)

  def next_control(self) -> tuple[messages.Message, int] | None:
    """The next message and the number of its transfer (`NO_TRANSFER` without payload)."""
    return self._control.popleft() if self._control else None

  def next_transfer(self) -> Iterator[bytes] | None:
    """Begins the next transfer: its announcement joins the control lane; its frames, lazily.

    Asking for the next transfer says that the one before has gone out.
    """
    self._under_way_bytes = 0
    if not self._bulk:
      return None
    message, payload = self._bulk.popleft()
    self._under_way_bytes = size_bytes(payload)
    return self._begin(message, payload)

  def next_donated(self, now_s: float) -> Iterator[bytes] | None:
    """The next frame of the donation, lazily, if there is one and its time has come. To be asked
    for when no other transfer is there; the first one announces it."""
    if not self._donations or now_s < self._donations[0].next_s:
      return None
    background = self._donations[0]
    if background.frames is None:
      background.frames = self._begin(background.message, background.payload)
    return self._one_frame(background, now_s)

  def donation_wait_s(self, now_s: float) -> float | None:
    """How long until `next_donated` has something; None: there is no donation."""
    return max(0.0, self._donations[0].next_s - now_s) if self._donations else None

  def _begin(self, message: messages.Message, payload: Buffer) -> Iterator[bytes]:
    self._last_transfer += 1
    self._control.append((message, self._last_transfer))
    return self._split(self._last_transfer, payload)

  def _one_frame(self, background: _Background, now_s: float) -> Iterator[bytes]:
    frame = next(background.frames, None)
    if frame is None:
      if self._donations and self._donations[0] is background:  # else it was cleared meanwhile
        self._donations.popleft()
      return
    if self._bytes_per_s:
      background.next_s = max(background.next_s, now_s) + len(frame) / self._bytes_per_s
    yield frame

  def clear(self) -> None:
    """Forgets everything that waits, and its bytes."""
    self._control.clear()
    self._bulk.clear()
    self._donations.clear()

  def _push_control(self, message: messages.Message, transfer: int) -> None:
    if len(self._control) >= self._max_messages:
      raise LinkError(
        f'too slow: {len(self._control)} messages wait to go out, at most {self._max_messages} may'
      )
    self._control.append((message, transfer))

  def _push_bulk(self, message: messages.Message, payload: Buffer) -> None:
    queued = self.queued_bytes
    if queued + size_bytes(payload) > self._max_bytes:
      raise LinkError(
        f'too slow: {queued} payload bytes wait to go out and '
        f'{size_bytes(payload)} more would be over the {self._max_bytes} granted'
      )
    self._bulk.append((message, payload))

  def _push_background(self, message: messages.Message, payload: Buffer) -> None:
    if len(self._donations) >= MAX_DONATIONS:
      raise LinkError(
        f'too slow: {len(self._donations)} donations wait to go out, at most {MAX_DONATIONS} may'
      )
    self._donations.append(_Background(message, payload))

  def _supersede(self, message: messages.Message) -> None:
    if not isinstance(message, messages.Publish) or message.base_version is not None:
      return
    kept = [one for one in self._bulk if not _is_older_publish(one[0], message)]
    self._bulk = collections.deque(kept)


def _is_older_publish(waiting: messages.Message, whole: messages.Publish) -> bool:
  return (
    isinstance(waiting, messages.Publish)
    and waiting.fragment == whole.fragment
    and waiting.version <= whole.version
  )


Delivery = tuple[messages.Message, Any]
"""A complete message and its payload (None without one)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrived:
  data: Buffer
  payload: messages.Payload


class Inbox:
  """What has come in from one peer. Not thread-safe: its owner holds a lock."""

  def __init__(self, max_payload_bytes: int, max_waiting: int):
    self._max_payload_bytes = max_payload_bytes
    self._max_waiting = max_waiting
    self._announced: dict[int, messages.Message] = {}
    self._arrived: dict[int, _Arrived] = {}
    self._last_transfer = NO_TRANSFER

  def on_message(self, message: messages.Message, transfer: int) -> Delivery | None:
    """Takes a message; returns it (with its payload) if it is complete by that."""
    payload = announced_payload(message)
    if (payload is None) != (transfer == NO_TRANSFER):
      raise LinkError(f'{type(message).__name__} with payload {payload} names transfer {transfer}')
    if payload is None:
      return message, None
    self._check_announcement(payload, transfer)
    self._last_transfer = transfer
    self._announced[transfer] = message
    return self._pair(transfer)

  def takes(self, transfer: int) -> bool:
    """Whether there is room for this transfer, or its announcement is there already."""
    return transfer in self._announced or len(self._arrived) < self._max_waiting

  def on_transfer(self, transfer: int, data: Buffer, crc32: int) -> Delivery | None:
    """Takes a whole transfer; returns its message and payload if that has been announced."""
    known = transfer <= self._last_transfer and transfer not in self._announced
    if known or transfer in self._arrived:
      raise LinkError(
        f'transfer {transfer} came twice; the last announced is {self._last_transfer}'
      )
    if not self.takes(transfer):
      raise LinkError(
        f'transfer {transfer} came unannounced beside {len(self._arrived)} others, '
        f'at most {self._max_waiting} may wait'
      )
    payload = messages.Payload(size_bytes=size_bytes(data), crc32=crc32)
    self._arrived[transfer] = _Arrived(data, payload)
    return self._pair(transfer)

  def _check_announcement(self, payload: messages.Payload, transfer: int) -> None:
    if transfer <= self._last_transfer:
      raise LinkError(f'transfer {transfer} is announced after transfer {self._last_transfer}')
    if payload.size_bytes > self._max_payload_bytes:
      raise LinkError(
        f'a payload of {payload.size_bytes} bytes is announced, at most '
        f'{self._max_payload_bytes} are granted'
      )
    if len(self._announced) >= self._max_waiting:
      raise LinkError(
        f'{len(self._announced)} announced payloads have not come, at most '
        f'{self._max_waiting} may be missing'
      )

  def _pair(self, transfer: int) -> Delivery | None:
    if transfer not in self._announced or transfer not in self._arrived:
      return None
    message, arrived = self._announced.pop(transfer), self._arrived.pop(transfer)
    announced = announced_payload(message)
    if announced != arrived.payload:
      raise LinkError(
        f'{type(message).__name__} announces {announced} but transfer {transfer} '
        f'has {arrived.payload}'
      )
    return message, arrived.data


class Traffic:
  """Bytes that have crossed one end of a transport, over all its sessions: messages, chunk headers
  and payloads, both lanes. Thread-safe."""

  def __init__(self):
    self._lock = threading.Lock()
    self.sent_bytes = 0
    self.received_bytes = 0

  def add(self, sent_bytes: int = 0, received_bytes: int = 0) -> None:
    with self._lock:
      self.sent_bytes += sent_bytes
      self.received_bytes += received_bytes
