"""Followers: processes that do not train, and receive the newest global model of a live run.

A follower calls FOLLOW at the port of the learners, with the version of each fragment that it
holds. The answer is a stream: of a fragment whose newest version it lacks a Publish, as on Control,
then the payload, as on Bulk: the delta from the version that it holds, or else the whole fragment.
Then the next fragment, of which it is the most versions behind.

No follower changes the run. Its call has a thread of its own, reads what outer steps have
published, and posts no event: machine, ledger, leases and tapes do not know of it. What all of them
cost together is bounded:

  bytes         `sync.follow_bytes_per_s`, in turns; a Publish counts as PUBLISH_BYTES
  memory        WHOLES whole fragments, and deltas of each fragment, of half its size; with those
                that are under way, of its size
  work thread   copies of whole fragments, as many bytes a second as may be sent
  threads       SEATS, one for each; no more than ARRIVALS_PER_S new ones begin per second

A frame waits in gRPC until the follower reads. One that keeps frames waiting is cut off.
"""

import collections
import dataclasses
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from diloco_jax.certs import proofs
from diloco_jax.numerics import fragments
from diloco_jax.protocol import formats, messages, safe_json
from diloco_jax.transport import (
  addresses,
  chunks,
  control_crc,
  grpc_session,
  link,
  peer_limits,
  translate,
)

SEATS = 32
ARRIVALS_PER_S = 8
WHOLES = 2  # in memory; further followers wait
STALL_S = 10.0  # for which the frames of a payload may wait, and as long as those before them take
LEAST_BYTES_PER_S = 1 << 16  # at this rate
PUBLISH_BYTES = 1 << 17  # it takes as much time of the processor as some of them
ENDING_S = 0.5
_ITEM_BYTES, _REQUEST_BYTES = 64, 1 << 10  # of one fragment in a request, and of the rest

Held = tuple[int, int]
"""The version and the digest of a fragment's published value."""
NOTHING: Held = (-1, 0)


def request(layout: str, held: Sequence[Held]) -> bytes:
  """The request of a follower: the digest of its layout, and by fragment the version it has."""
  return json.dumps({**formats.stamp('protocol'), 'layout': layout, 'held': held}).encode()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Update:
  """A payload from one version of a fragment (`base`; None: from none) to another one."""

  base: Held | None
  publish: messages.Publish
  payload: memoryview

  @property
  def held(self) -> Held:
    return self.publish.version, self.publish.digest


@dataclasses.dataclass(slots=True)
class _Fragment:
  """`newest`: None until something of it was published or read. `deltas` lead to it, in a chain."""

  whole_bytes: int
  newest: Held | None = None
  deltas: collections.deque[Update] = dataclasses.field(default_factory=collections.deque)
  whole: Update | None = None  # as long as a follower needs it, and deltas lead on from it
  reading: bool = False

  def next(self, held: Held) -> Update | None:
    """The update of a version that is not the newest, if it is in memory."""
    deltas = (delta for delta in self.deltas if delta.base == held)
    return next(deltas, self.whole)


class _Follower:
  """A call. `held`: by fragment, with what was sent; empty until it has asked."""

  def __init__(self, cancel: Callable[[], object]):
    self.held: list[Held] = []
    self.sending: Update | None = None
    self.gone = threading.Event()
    self.reason = ''
    self._cancel = cancel
    self._taken_bytes, self._blocked_s, self._since_s = 0, 0.0, None  # of the present payload

  def fail(self, reason: str, trouble: str = '') -> None:
    self.reason = reason
    self.gone.set()
    self._cancel()

  def send(self, frame: bytes) -> Iterator[bytes]:
    """Yields a frame, and measures how long it waits for the follower."""
    self._since_s = time.monotonic()
    yield frame
    self._blocked_s += time.monotonic() - self._since_s
    self._since_s = None
    self._taken_bytes += len(frame)

  def begin(self, update: Update) -> None:
    self.sending, self._taken_bytes, self._blocked_s = update, 0, 0.0

  @property
  def sends_whole(self) -> bool:
    return self.sending is not None and self.sending.base is None

  def stalls(self, now_s: float) -> bool:
    if (since_s := self._since_s) is None:
      return False
    limit_s = STALL_S + self._taken_bytes / LEAST_BYTES_PER_S
    return self._blocked_s + now_s - since_s > limit_s


class Followers:
  """All followers of a syncer. Thread-safe.

  Args:
    bytes_per_s: for all followers together.
    layout: of the run.
  """

  def __init__(self, bytes_per_s: int, layout: fragments.Layout):
    sizes = map(layout.size, range(layout.num_fragments))
    self._fragments, self._layout = [_Fragment(4 * size) for size in sizes], layout.digest()
    self._sends = peer_limits.Rate(bytes_per_s, 0.0)
    self._reads = peer_limits.Rate(bytes_per_s, 0.0)
    self._arrivals = peer_limits.Rate(ARRIVALS_PER_S, SEATS)
    self._changed = threading.Condition()
    self._live: dict[_Follower, proofs.Proof | None] = {}
    self._read: Callable[[int], None] | None = None
    self._over = False

  # --- From the syncer ----------------------------------------------------------------------------

  def begin(self, read: Callable[[int], None]) -> None:
    """From now on fragments can be read: `read` asks for a copy, which `add_whole` gets."""
    with self._changed:
      self._read = read
      self._changed.notify_all()

  def add_delta(self, publish: messages.Publish, payload: memoryview) -> None:
    """An outer step has published a version."""
    with self._changed:
      fragment = self._fragments[publish.fragment]
      before, fragment.newest = fragment.newest, (publish.version, publish.digest)
      if before is not None and self._live:
        fragment.deltas.append(Update(before, publish, payload))
      else:
        fragment.deltas.clear()
      while 2 * sum(delta.payload.nbytes for delta in fragment.deltas) > fragment.whole_bytes:
        fragment.deltas.popleft()
      self._drop_unused()
      self._changed.notify_all()
    self._cut_off()

  def add_whole(self, publish: messages.Publish, payload: memoryview) -> None:
    """A fragment was read: its newest version."""
    with self._changed:
      fragment = self._fragments[publish.fragment]
      whole = Update(None, publish, payload)
      fragment.reading, fragment.newest, fragment.whole = False, whole.held, whole
      self._drop_unused()
      self._changed.notify_all()

  def finish(self) -> None:
    """The run is over, and nothing more can be read: each follower is sent what leads to the newest
    versions, then its call ends."""
    with self._changed:
      self._over, self._read = True, None
      self._changed.notify_all()

  def shutdown(self, grace_s: float) -> None:
    """Ends all calls; once the run is over, those that have not ended after `grace_s`."""
    with self._changed:
      self._changed.wait_for(lambda: not self._live, grace_s if self._over else 0.0)
      for follower in self._live:
        follower.gone.set()
      self._changed.notify_all()
      self._changed.wait_for(lambda: not self._live, ENDING_S)

  def state(self) -> tuple[int, int]:
    """How many followers there are, and how many versions of all fragments the last one is
    behind."""
    with self._changed:
      ps = range(len(self._fragments))
      behind = [sum(self._behind(follower, p) for p in ps) for follower in self._live]
      return len(behind), max(behind, default=0)

  def live(self) -> list[tuple[Callable[..., None], proofs.Proof]]:
    """For each follower that has proved a name, a function that ends its call, and its proof."""
    with self._changed:
      return [(follower.fail, proof) for follower, proof in self._live.items() if proof]

  # --- A call, on its own thread ------------------------------------------------------------------

  def serve(
    self,
    requests: Iterator[bytes],
    context: grpc.ServicerContext,
    proof: proofs.Proof | None = None,
  ) -> Iterator[bytes]:
    follower = self._enter(context, proof)
    follower.held = self._read_request(requests, context)
    context.send_initial_metadata(((grpc_session.FOLLOWS, 'yes'),))
    seal, numbers = control_crc.Seal(), itertools.count(1)
    while (update := self._next(follower)) is not None:
      announced = translate.SYNCER_TO_LEARNER.encode(update.publish, next(numbers))
      frames = chunks.split(update.payload, shared=grpc_session.SHARED)
      for index, frame in enumerate(itertools.chain([seal.close(announced)], frames)):
        self._wait_turn(follower, len(frame) if index else PUBLISH_BYTES)
        if follower.gone.is_set():
          break
        yield from follower.send(frame)
      else:
        with self._changed:
          follower.held[update.publish.fragment] = update.held
    if not self._over:
      why = follower.reason or 'the syncer stops, and may start again'
      context.abort(grpc.StatusCode.UNAVAILABLE, why)
    context.set_trailing_metadata(((grpc_session.REASON, addresses.ENDED.encode()),))

  def _enter(self, context: grpc.ServicerContext, proof: proofs.Proof | None) -> _Follower:
    """Takes a seat, until the call has ended."""
    self._cut_off()
    follower, now_s = _Follower(context.cancel), time.monotonic()
    with self._changed:
      full = len(self._live) >= SEATS or self._arrivals.wait_s(now_s) > 0
      if not full:
        self._arrivals.spend(1, now_s)
        self._live[follower] = proof
    if full:
      context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f'no seat of {SEATS} is free: dial again')
    if not context.add_callback(lambda: self._remove(follower)):  # it has ended meanwhile
      self._remove(follower)
    return follower

  def _remove(self, follower: _Follower) -> None:
    with self._changed:
      follower.gone.set()
      self._live.pop(follower, None)
      self._drop_unused()
      self._changed.notify_all()

  def _read_request(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> list[Held]:
    """The versions that a follower has, by fragment; the call ends if no request comes in time."""
    timer = grpc_session.start_timer(link.Limits.handshake_s, context.cancel)
    try:
      data, count = next(requests, b''), len(self._fragments)
      values = safe_json.parse_object(data, _REQUEST_BYTES + _ITEM_BYTES * count)
      fields = formats.require('protocol', values, 'This follower')
      if fields.get('layout') != self._layout or not _are_held(fields.get('held'), count):
        raise ValueError(
          'the follower has another model or other fragments than this run: give it the '
          'config.json of this run, or for own loops nothing but the address'
        )
    except ValueError as error:
      context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[: grpc_session.REASON_CHARS])
    finally:
      timer.cancel()
    return [(version, digest) for version, digest in fields['held']]

  def _next(self, follower: _Follower) -> Update | None:
    """Waits for what the follower lacks; None: it has gone, or nothing more of an ended run will
    come."""
    with self._changed:
      sent_whole, follower.sending = follower.sends_whole, None
      if sent_whole:  # there may be room for another one
        self._drop_unused()
        self._changed.notify_all()
      while not follower.gone.is_set():
        now_s, behind = time.monotonic(), functools.partial(self._behind, follower)
        lacking = sorted(filter(behind, range(len(self._fragments))), key=behind, reverse=True)
        updates = [self._fragments[p].next(follower.held[p]) for p in lacking]
        self._ask([p for p, update in zip(lacking, updates) if update is None], now_s)
        if (update := next(filter(None, updates), None)) is not None:
          follower.begin(update)
          if follower.sends_whole:  # there may be room that it took before
            self._changed.notify_all()
          return update
        if self._over and not any(self._fragments[p].reading for p in lacking):
          return None
        # Until something changes; or until the next whole fragment may be read.
        self._changed.wait(self._reads.wait_s(now_s) or None if lacking else None)
      return None

  def _behind(self, follower: _Follower, p: int) -> int:
    if not follower.held:
      return 0
    newest, held = self._fragments[p].newest, follower.held[p]
    return 1 if newest is None else newest != held and max(1, newest[0] - held[0])

  def _ask(self, missing: list[int], now_s: float) -> None:
    """Lets the first of these fragments that is not under way be read, if there is room and time
    for it."""
    p = next((p for p in missing if not self._fragments[p].reading), None)
    if p is None or not self._read or self._reads.wait_s(now_s):
      return
    if self._wholes() >= WHOLES:
      self._drop_unused(full=True)
    if self._wholes() < WHOLES:
      self._reads.spend(self._fragments[p].whole_bytes, now_s)
      self._fragments[p].reading = True
      self._read(p)

  def _wholes(self) -> int:
    """How many whole fragments are in memory, or about to be."""
    wholes = {id(fragment.whole) for fragment in self._fragments if fragment.whole}
    wholes |= {id(follower.sending) for follower in self._live if follower.sends_whole}
    return len(wholes) + sum(fragment.reading for fragment in self._fragments)

  def _drop_unused(self, full: bool = False) -> None:
    """Forgets whole fragments that no follower lacks or that lead nowhere, and, without followers,
    all that is kept. `full`: also those that only followers lack that are sent another one, since
    they may be slow."""
    for p, fragment in enumerate(self._fragments):
      if not self._live:
        fragment.deltas.clear()
      if (whole := fragment.whole) is not None:
        leads = whole.held == fragment.newest or any(d.base == whole.held for d in fragment.deltas)
        waiting = [
          follower
          for follower in self._live
          if self._behind(follower, p) and fragment.next(follower.held[p]) is whole
          if not (full and follower.sends_whole and follower.sending is not whole)
        ]
        if not leads or not waiting:
          fragment.whole = None

  def _cut_off(self) -> None:
    with self._changed:
      now_s = time.monotonic()
      slow = [each for each in self._live if each.stalls(now_s) or self._is_late(each)]
    for follower in slow:
      follower.fail('the follower reads too slowly')

  def _is_late(self, follower: _Follower) -> bool:
    """Whether it is sent a delta from whose base on more bytes came than the fragment has."""
    if (update := follower.sending) is None or follower.sends_whole:
      return False
    fragment = self._fragments[update.publish.fragment]
    count = fragment.newest[0] - update.base[0]
    return count * update.payload.nbytes > fragment.whole_bytes

  def _wait_turn(self, follower: _Follower, size: int) -> None:
    """Waits until the bytes that were to be sent before are paid for."""
    with self._changed:
      now_s = time.monotonic()
      wait_s = self._sends.wait_s(now_s)
      self._sends.spend(size, now_s)
    follower.gone.wait(wait_s)


def _are_held(held: Any, count: int) -> bool:
  """Whether that is a list of so many versions and digests."""
  is_number = lambda value: type(value) is int and -1 <= value < 1 << 64
  is_pair = lambda row: isinstance(row, list) and len(row) == 2 and all(map(is_number, row))
  return isinstance(held, list) and len(held) == count and all(map(is_pair, held))
