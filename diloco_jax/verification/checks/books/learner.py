"""One learner's process: its steps, tokens, captures and adoptions."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import schedule as schedule_lib
from diloco_jax.protocol.tape import observers

Range = tuple[int, int]
Batches = tuple[int, int, int]  # data shard, first batch, the one after the last


@dataclasses.dataclass(slots=True)
class Anchor:
  """The value of a fragment that a process holds, and the counts of the process up to which its own
  value has nothing that the anchor lacks."""

  version: int
  digest: int
  tokens: int = 0
  steps: int = 0
  sound: bool = True  # it has the published bits
  contributed: 'Capture | None' = None  # it may have been merged, or may be
  ended: int = 0  # the last due time for which this learner need not wait


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
  """The range of an Encode: `true` in tokens of the process, `reported` in those of its
  incarnation."""

  sync: int
  fragment: int
  version: int
  session: int
  steps: int
  steps_to: int  # of the process
  true: Range
  reported: Range
  reads: tuple[Batches, ...]


def add_batch(reads: list[Batches], shard: int, batch: int) -> None:
  """Adds a batch to the ranges that a process has read."""
  last_shard, first, end = reads[-1] if reads else (-1, 0, 0)
  if (last_shard, end) == (shard, batch):
    reads[-1] = shard, first, batch + 1
  else:
    reads.append((shard, batch, batch + 1))


def last_batches(reads: list[Batches], steps: int) -> tuple[Batches, ...]:
  """The batches of the last `steps` steps."""
  spans: list[Batches] = []
  for shard, first, end in reversed(reads):
    if steps <= 0:
      break
    spans.append((shard, max(first, end - steps), end))
    steps -= end - first
  return tuple(reversed(spans))


class LearnerBook:
  """One learner's process. Counts are of the whole process; `base_*` are those at the start of its
  incarnation (a syncer that was rolled back may give a process a second incarnation)."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    schedule: schedule_lib.Schedule,
    process: observers.ObservedProcess,
  ):
    digests = process.start.digests if process.start.state is None else None
    self.process, self.config, self.schedule = process, config, schedule
    self.learner, self.nonce = process.start.identity.learner, process.start.identity.nonce
    self.tokens = self.steps = self.base_tokens = self.base_steps = 0
    self.untimed = 0  # counted steps of which no StepDone has told how long they took
    self.clock = self.incarnation = self.session = 0
    self.joined = self.ever_joined = self.training = self.running = False
    self.ending = self.exited = self.dead = False
    self.refused: messages.Refused | None = None
    self.due: set[int] = set()
    self.anchors = [
      Anchor(-1, 0) if digests is None else Anchor(0, digests[p]) for p in range(config.fragments)
    ]
    self.pulls: dict[int, int] = {}  # fragment: sync, on this session
    self.urgent: set[int] = set()  # fragments pulled for an open sync
    self.pulled_to: dict[int, int] = {}  # the newest pull, answered or not
    self.encoding: collections.deque[Capture] = collections.deque()
    self.adopting: collections.deque[Anchor] = collections.deque()
    self.payload_ids: dict[int, Any] = {}  # of a Publish or a Capture
    self.last_encoded: Capture | None = None
    self.last_adopted: Anchor | None = None
    self.reads: list[Batches] = []  # all batches of its steps, range after range
    self.at: Range | None = None  # data shard and next batch
    self.claim: Range | None = None  # the position that it reported
    self.next_position: Range | None = None  # where it must read next
    self.limit = 0
    self._set_limit()

  def __repr__(self) -> str:
    return f'{self.learner} (process {self.process.number})'

  @property
  def reported_tokens(self) -> int:
    return self.tokens - self.base_tokens

  def reported(self, anchor: Anchor) -> int:
    """The token count of an adoption, counted from the start of the incarnation."""
    return max(0, anchor.tokens - self.base_tokens)

  def trained_on(self, anchor: Anchor) -> int:
    """Steps of this incarnation since an adoption."""
    return self.steps - max(anchor.steps, self.base_steps)

  def is_due(self, fragment: int) -> bool:
    """Whether a pulled fragment is to be given at this boundary."""
    ahead = self.config.ahead if self.config.lag is None else 0
    due_at = min(self.pulls[fragment] - ahead, self.config.total_steps)
    ends = self.ending or not self.training or self.clock >= self.config.total_steps
    return fragment in self.urgent or ends or self.clock >= due_at

  @property
  def may_step(self) -> bool:
    """Whether the settings allow a step and no one asked the process to end."""
    if not self.training or self.ending or self.clock >= self.config.total_steps:
      return False
    return self.config.lag is None or self.clock < self.limit

  def _set_limit(self) -> None:
    """Lock-step modes: the clock at which the learner waits."""
    if self.config.lag is not None:
      nexts = [self.schedule.due(p, anchor.ended) for p, anchor in enumerate(self.anchors)]
      self.limit = min(nexts) + self.config.lag

  # --- Events -------------------------------------------------------------------------------------

  def step_done(self, now_ns: int, done: events.StepDone, out: Sequence) -> None:
    self.running = False
    shard, batch = self.at
    add_batch(self.reads, shard, batch)
    self.at = shard, batch + 1
    self.steps, self.clock, self.tokens = self.steps + 1, self.clock + 1, self.tokens + done.tokens
    self.untimed += bool(done.tokens and not done.step_ns)

  def disconnected(self, now_ns: int, event: events.Disconnected, out: Sequence) -> None:
    if event.session == self.session:
      self.joined = False
      self._forget_pulls()

  def _forget_pulls(self) -> None:
    self.pulls.clear()
    self.urgent.clear()
    self.pulled_to.clear()

  def welcomed(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    message = event.message
    if event.session != self.session or self.joined:
      return  # of an old session, or a duplicate
    self.joined = self.ever_joined = True
    if (message.shard, message.cursor) != self.claim:
      self.next_position = message.shard, message.cursor
    if message.incarnation != self.incarnation:
      self.incarnation = message.incarnation
      for anchor in self.anchors:
        anchor.contributed = None
      self.base_tokens, self.base_steps = self.tokens, self.steps
    self.clock, self.due = max(self.clock, message.clock), set(message.due)
    for p, anchor in enumerate(self.anchors):
      capture = anchor.contributed
      if capture is not None and capture.reported[1] != message.settled[p]:
        anchor.contributed = None
      anchor.ended = message.clock if p in self.due else max(anchor.ended, message.clock)
    self._set_limit()
    self.begin()

  def begin(self) -> None:
    """The learner trains once it holds all fragments."""
    self.training = self.training or not self.due

  def pulled(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    sync, p = event.message.sync, event.message.fragment
    if event.session != self.session:
      return
    if sync > self.pulled_to.get(p, 0):  # else a duplicate
      self.pulls[p] = self.pulled_to[p] = sync
      self.urgent.discard(p)
    if event.message.now and self.pulls.get(p) == sync:
      self.urgent.add(p)

  def published(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    self.payload_ids[event.payload_id] = event.message

  def settled(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    message = event.message
    if event.session != self.session or message.merged:
      return
    anchor = self.anchors[message.fragment]
    if message.reason in messages.kept(self.config.rebases):
      if anchor.contributed is not None and anchor.contributed.sync == message.sync:
        anchor.contributed = None
    if message.reason != messages.CANCELLED:
      return
    anchor.ended = max(anchor.ended, message.sync)
    self._set_limit()
    if self.pulls.get(message.fragment, message.sync + 1) <= message.sync:
      del self.pulls[message.fragment]  # also of a sync before it: its Publish is still on its way

  def finish(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    if event.session == self.session:
      self.ending = True

  def stopped(self, now_ns: int, event: events.Stop, out: Sequence) -> None:
    self.ending = True

  def was_refused(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    if event.session == self.session:
      self.refused = event.message

  def encoded(self, now_ns: int, event: events.Encoded, out: Sequence) -> None:
    capture = self.last_encoded = self.encoding.popleft()
    if event.payload_id is not None:
      self.payload_ids[event.payload_id] = capture

  def adopt_done(self, now_ns: int, done: events.AdoptDone, out: Sequence) -> None:
    anchor = self.last_adopted = self.adopting.popleft()
    anchor.sound = anchor.digest == done.digest

  # --- Actions ------------------------------------------------------------------------------------

  def dials(self, now_ns: int, dial: actions.Dial, event: Any) -> None:
    self.session, self.joined = dial.session, False
    self._forget_pulls()

  def begins_step(self, now_ns: int, step: actions.Step, event: Any) -> None:
    self.running = True

  def confirms(self, now_ns: int, send: actions.Send, event: Any) -> None:
    shard, cursor = send.message.shard, send.message.cursor
    self.claim = None if shard is None else (shard, cursor)

  def uses(self, now_ns: int, use: actions.UseShard, event: Any) -> None:
    self.at, self.next_position = (use.shard, use.cursor), None
    for anchor in self.anchors if use.rewind else ():
      anchor.tokens, anchor.steps = self.tokens, self.steps
      anchor.contributed = None

  def encodes(self, now_ns: int, encode: actions.Encode, event: Any) -> None:
    p, anchor = encode.fragment, self.anchors[encode.fragment]
    self.pulls.pop(p, None)
    self.urgent.discard(p)
    anchor.contributed = Capture(
      encode.sync,
      p,
      anchor.version,
      self.session,
      self.trained_on(anchor),
      self.steps,
      (anchor.tokens, self.tokens),
      (self.reported(anchor), self.reported_tokens),
      last_batches(self.reads, self.steps - anchor.steps),
    )
    self.encoding.append(anchor.contributed)

  def declines(self, now_ns: int, send: actions.Send, event: Any) -> None:
    if self.pulls.get(send.message.fragment) == send.message.sync:
      del self.pulls[send.message.fragment]
      self.urgent.discard(send.message.fragment)

  def adopts(self, now_ns: int, adopt: actions.Adopt, event: Any) -> None:
    publish, p = self.payload_ids.pop(adopt.payload_id), adopt.fragment
    old = self.anchors[p]
    new = Anchor(publish.version, publish.digest, self.tokens, self.steps)
    new.ended = max(old.ended, publish.sync)
    if adopt.merged:
      new.tokens, new.steps = old.contributed.true[1], old.contributed.steps_to
    elif adopt.keep:
      new.tokens, new.steps, new.contributed = old.tokens, old.steps, old.contributed
    self.anchors[p] = new
    self.adopting.append(new)
    self._set_limit()
    if p in self.pulls and self.pulls[p] <= publish.sync:
      del self.pulls[p]
    self.clock = max(self.clock, publish.sync)
    self.due.discard(p)
    self.begin()

  def drops(self, now_ns: int, drop: actions.Drop, event: Any) -> None:
    self.payload_ids.pop(drop.payload_id, None)

  def exits(self, now_ns: int, action: actions.Exit, event: Any) -> None:
    self.exited, self.running = True, False


LEARNER_UPDATES: dict[type, Callable] = {
  events.StepDone: LearnerBook.step_done,
  events.Disconnected: LearnerBook.disconnected,
  events.Encoded: LearnerBook.encoded,
  events.AdoptDone: LearnerBook.adopt_done,
  events.Stop: LearnerBook.stopped,
  messages.Joined: LearnerBook.welcomed,
  messages.Pull: LearnerBook.pulled,
  messages.Publish: LearnerBook.published,
  messages.Settled: LearnerBook.settled,
  messages.Refused: LearnerBook.was_refused,
  messages.Finish: LearnerBook.finish,
  actions.Dial: LearnerBook.dials,
  actions.Step: LearnerBook.begins_step,
  actions.Encode: LearnerBook.encodes,
  actions.UseShard: LearnerBook.uses,
  actions.Adopt: LearnerBook.adopts,
  actions.Drop: LearnerBook.drops,
  actions.Exit: LearnerBook.exits,
  messages.Confirm: LearnerBook.confirms,
  messages.Decline: LearnerBook.declines,
}
