"""The processes of the small world (world.py): scripted work around one machine, and true books.

A process believes nothing that its machine says. It records what was really trained, snapshot,
merged and adopted (`Oracle`), calls `check()` after every event, and tracks payload handles, so
that a leak or a double drop fails.
"""

import dataclasses
import itertools
import json
from typing import Any, Callable

from diloco_jax.protocol import actions, connection, events, learner, messages

MS = 1_000_000
PAYLOAD_BYTES = 64


@dataclasses.dataclass
class Oracle:
  """What the syncer's state holds according to the world; goes back with it on a restart.

  `ranges` are the token ranges merged per (process, fragment), in the process's own tokens."""

  values: list[int]
  versions: list[int]
  merged: dict[str, int] = dataclasses.field(default_factory=dict)
  ranges: dict[tuple[int, int], list[tuple[int, int]]] = dataclasses.field(default_factory=dict)

  def copy(self) -> 'Oracle':
    ranges = {key: list(value) for key, value in self.ranges.items()}
    return Oracle(list(self.values), list(self.versions), dict(self.merged), ranges)

  def merge(self, grad: 'Gradient', fragment: int, tokens: int) -> None:
    """Counts a payload as `tokens`. No token of a process may count twice for a fragment."""
    ranges = self.ranges.setdefault((grad.nonce, fragment), [])
    assert all(grad.end <= start or end <= grad.start for start, end in ranges), (grad, ranges)
    ranges.append((grad.start, grad.end))
    self.merged[grad.learner] = self.merged.get(grad.learner, 0) + tokens


@dataclasses.dataclass(frozen=True)
class Gradient:
  """What a pseudo-gradient's bytes are: whose, and which of its tokens they really cover."""

  learner: str
  nonce: int
  start: int
  end: int
  steps: int


@dataclasses.dataclass(frozen=True)
class Published:
  """What a published payload's bytes are: the value, and the one it is a delta to (None: whole)."""

  base: int | None
  value: int


class Process:
  """One machine with its inbox, wake timer, handles and work lane."""

  def __init__(self, world: Any, name: str, machine: Any):
    self.world, self.name, self.machine = world, name, machine
    self.alive, self.frozen, self.exit = True, False, None
    self.contents: dict[int, Any] = {}
    self.reports: dict[str, dict] = {}  # the newest of every name
    self._handles = itertools.count(1)
    self._held: list[Callable[[], None]] = []
    self._wake = 0
    self._work_until = self._egress_until = 0

  def put(self, content: Any) -> int:
    handle = next(self._handles)
    self.contents[handle] = content
    return handle

  def post(self, event: Any, content: Any = None) -> None:
    """Delivers an event now, or when the process thaws; a dead process hears nothing."""
    if self.frozen:
      self._held.append(lambda: self.post(event, content))
    elif self.alive:
      if content is not None:
        event = dataclasses.replace(event, handle=self.put(content))
      self._handle(event)

  def _handle(self, event: Any) -> None:
    out = self.machine.handle(self.world.now, event)
    self.machine.check()
    for action in out:
      if not self.alive:
        raise AssertionError(f'{self.name} acts after its exit: {action}')
      self.world.watch(self.name, action)
      self._perform(action)
    self._set_timer(isinstance(event, events.Wake))

  def _set_timer(self, after_wake: bool) -> None:
    self._wake += 1
    generation, deadline_ns = self._wake, self.machine.deadline_ns
    if not self.alive or deadline_ns is None:
      return
    assert not after_wake or deadline_ns > self.world.now, f'{self.name} wakes without end'
    self.world.at(deadline_ns, lambda: self._timer(generation))

  def _timer(self, generation: int) -> None:
    if self.frozen:
      self._held.append(lambda: self._timer(generation))
    elif generation == self._wake:
      self.post(events.Wake())

  def _perform(self, action: Any) -> None:
    match action:
      case actions.Send(session=session, message=message, handle=handle):
        self.world.send(self, session, message, None if handle is None else self.contents[handle])
      case actions.Close(session=session):
        self.world.close(self, session)
      case actions.Dial(session=session):
        self.world.dial(self, session)
      case actions.Drop(handle=handle):
        del self.contents[handle]
      case actions.Exit():
        self.exit = action
        assert not self.contents, f'{self.name} leaks {self.contents}'
        self.world.end(self)
      case actions.Report(name=name, values=values):
        self.reports[name] = values
      case actions.Say():
        pass
      case _:
        self.work(action)

  def work(self, action: actions.Work) -> None:
    raise NotImplementedError

  def answer(self, delay_ns: int, event: Any, content: Any = None, lane: str = 'work') -> None:
    """Answers work first in, first out: on the lane that steps, or on the one beside it."""
    start = max(self.world.now, self._work_until)
    if lane == 'work':
      self._work_until = done = start + delay_ns
    else:
      self._egress_until = done = max(start, self._egress_until) + delay_ns
    self.world.at(done, lambda: self.post(event, content))

  def stop(self, reason: str) -> None:
    self.post(events.Stop(reason=reason))

  def later(self, call: Callable[[], None]) -> None:
    """Keeps a call for the thaw."""
    self._held.append(call)

  def freeze(self) -> None:
    self.frozen = True

  def thaw(self) -> None:
    self.frozen, held, self._held = False, self._held, []
    for deliver in held:
      deliver()


def check_moves(table: Any, before: str, after: str) -> None:
  """The table (of which the documents are drawn) leads from one state to the other, if need be
  over others: one event may cause several moves."""
  reached = {before}
  for _ in table:
    reached |= {target for source, target, _ in table if source in reached}
  assert after in reached, (before, after)


class Learner(Process):
  """A learner's process; times in ns may be changed while it runs."""

  tokens_per_step = 10

  def __init__(self, world: Any, name: str, machine: Any, nonce: int, restored: bool):
    super().__init__(world, name, machine)
    self.learner, self.nonce = name.rstrip('*'), nonce
    self.step_ns, self.encode_ns, self.adopt_ns, self.save_ns = 100 * MS, 2 * MS, MS, 5 * MS
    self.up_ns, self.down_ns, self.bulk_ns = 5 * MS, 5 * MS, 5 * MS
    self.nan: set[int] = set()  # fragments whose next snapshot holds a NaN
    self.flips: set[int] = set()  # fragments whose next adoption goes wrong by a bit
    self.stalled: list[Callable[[], None]] | None = None  # a partition keeps what is under way
    self.steps = self.tokens = 0
    self.values = list(world.initial) if not restored else [-1] * world.config.fragments
    self.adopted = [(0, 0)] * world.config.fragments  # (tokens, steps) at adoption
    self._training = False

  def work(self, action: actions.Work) -> None:
    match action:
      case actions.Step():
        self._boundary()
        self._training = True
        self.answer(self.step_ns, events.StepDone(
          tokens=self.tokens_per_step, step_ns=self.step_ns))
      case actions.Encode(sync=sync, fragment=fragment):
        self._encode(sync, fragment)
      case actions.Adopt():
        self._adopt(action)
      case actions.Save(step=step, snapshot=snapshot):
        self._boundary()
        self.world.checkpoints[self.learner] = json.loads(json.dumps(snapshot))
        saved = events.SaveDone(step=step)
        self.world.at(self.world.now + self.save_ns, lambda: self.post(saved))

  def _boundary(self) -> None:
    assert not self._training, f'{self.name} is in the middle of a step'

  def _handle(self, event: Any) -> None:
    if isinstance(event, events.StepDone):
      self._training = False
      self.steps += 1
      self.tokens += event.tokens
    before = self.machine._connection.state, self.machine._training
    super()._handle(event)
    check_moves(connection.CONNECTION_STATES, before[0], self.machine._connection.state)
    check_moves(learner.TRAINING_STATES, before[1], self.machine._training)

  def _encode(self, sync: int, fragment: int) -> None:
    self._boundary()
    (start, steps), content = self.adopted[fragment], None
    if fragment not in self.nan:
      content = Gradient(self.learner, self.nonce, start, self.tokens, self.steps - steps)
    self.nan.discard(fragment)
    payload = messages.Payload(size_bytes=PAYLOAD_BYTES, crc32=0)
    self.answer(self.encode_ns, events.Encoded(
      sync=sync, fragment=fragment, handle=None, payload=content and payload,
    ), content, lane='egress')

  def _adopt(self, adopt: actions.Adopt) -> None:
    self._boundary()
    published, fragment = self.contents.pop(adopt.handle), adopt.fragment
    assert adopt.whole == (published.base is None), (adopt, published)
    held = self.values[fragment]
    fits = published.base in (None, held)
    assert fits or held < 0, f'{self.name}: a delta to another value: {adopt}, {published}, {held}'
    self.values[fragment] = published.value if fits else -1
    if fragment in self.flips:
      self.flips.discard(fragment)
      self.world.flipped += 1
      self.values[fragment] = -1
    self.adopted[fragment] = (self.tokens, self.steps)
    self.answer(self.adopt_ns, events.AdoptDone(
      fragment=fragment, version=adopt.version, digest=abs(self.values[fragment]),
    ), lane='egress')


class Syncer(Process):
  """The syncer's process; Theta and its log are the world's oracle."""

  def __init__(self, world: Any, machine: Any):
    super().__init__(world, 'syncer', machine)
    self.merge_ns, self.read_ns, self.save_ns = 10 * MS, 5 * MS, 20 * MS
    self.fail = False  # the next outer step is not finite

  def work(self, action: actions.Work) -> None:
    oracle = self.world.oracle
    match action:
      case actions.Merge():
        self._merge(action, oracle)
      case actions.ReadFragment(fragment=p):
        self.answer(self.read_ns, events.FragmentRead(
          fragment=p, version=oracle.versions[p], handle=0, digest=oracle.values[p],
          payload=messages.Payload(size_bytes=PAYLOAD_BYTES, crc32=0),
        ), Published(None, oracle.values[p]))
      case actions.Save(step=step, snapshot=snapshot):
        saved = json.loads(json.dumps(snapshot)), oracle.copy()
        assert saved[0]['versions'] == oracle.versions, 'a snapshot in the middle of a merge'
        self.world.at(self.world.now + self.save_ns, lambda: self._durable(saved))
        self.answer(self.save_ns, events.SaveDone(step=step))

  def _durable(self, saved: tuple[dict, Oracle]) -> None:
    if self.alive:
      self.world.saved = saved

  def _merge(self, merge: actions.Merge, oracle: Oracle) -> None:
    p, names = merge.fragment, [one.learner for one in merge.participants]
    assert names == sorted(set(names)) and len(names) >= self.world.config.quorum, names
    assert merge.version == oracle.versions[p] + 1, (merge, oracle.versions)
    grads = [self.contents.pop(one.handle) for one in merge.participants]
    for one, grad in zip(merge.participants, grads):
      assert one.learner == grad.learner, (one, grad)
      real = grad.end - grad.start, grad.steps
      assert one.tokens <= real[0] and one.steps <= real[1], (one, grad)
      # A syncer that went back may not know a process's life: it begins another and counts anew.
      assert self.world.rolled_back or (one.tokens, one.steps) == real, (one, grad)
    base = oracle.values[p]
    done = events.MergeDone(
      sync=merge.sync, fragment=p, handle=None, payload=None, digest=base, failed='not finite')
    if self.fail:
      self.fail = False
      self.answer(self.merge_ns, done)
      return
    for one, grad in zip(merge.participants, grads):
      oracle.merge(grad, p, one.tokens)
    oracle.versions[p] += 1
    oracle.values[p] = value = self.world.new_value(p, oracle.versions[p])
    payload = messages.Payload(size_bytes=PAYLOAD_BYTES, crc32=0)
    self.answer(self.merge_ns, dataclasses.replace(
      done, failed='', digest=value, payload=payload), Published(base, value))
