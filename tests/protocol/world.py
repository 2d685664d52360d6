"""A small world for the two machines: virtual time, sessions with delays, scripted work.

It drives the production machines unchanged and believes nothing that they say. Its own books
(`Oracle`) record what every process really trained, encoded, merged and adopted; `check()` runs after
every event; handles are tracked per process, so a leak or a double drop fails. Everything is ordered
by (virtual time, order of posting): a run repeats exactly.

A session has two lanes per direction, like the wire: control messages are first in, first out and
never wait for payloads; payloads are first in, first out and may be overtaken by later control.
"""

import dataclasses
import heapq
import itertools
import json
from typing import Any, Callable

from diloco_jax.protocol import actions, events, learner, messages, syncer
from diloco_jax.protocol import config as config_lib

MS = 1_000_000
PAYLOAD_BYTES = 64
AGREEMENT = '{"model.width":8}'
Watch = Callable[[str, Any], None]


def protocol_config(**changes: Any) -> config_lib.ProtocolConfig:
  """A config with short times; `*_ms` may be given instead of `*_ns`."""
  settings = {'lease_ms': 1000, 'heartbeat_ms': 200, **changes}
  for name in [name for name in settings if name.endswith('_ms')]:
    settings[name[:-3] + '_ns'] = settings.pop(name) * MS
  return config_lib.ProtocolConfig(redial_ns=(50 * MS, 500 * MS), **settings)


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

  def merge(self, grad: 'Gradient', fragment: int) -> None:
    """Counts a payload. No token of a process may count twice for a fragment."""
    ranges = self.ranges.setdefault((grad.nonce, fragment), [])
    assert all(grad.end <= start or end <= grad.start for start, end in ranges), (grad, ranges)
    ranges.append((grad.start, grad.end))
    self.merged[grad.learner] = self.merged.get(grad.learner, 0) + grad.end - grad.start


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

  def __init__(self, world: 'World', name: str, machine: Any):
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

  def __init__(self, world: 'World', name: str, machine: Any, nonce: int, restored: bool):
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
        self.answer(self.save_ns, events.SaveDone(step=step), lane='egress')

  def _boundary(self) -> None:
    assert not self._training, f'{self.name} is in the middle of a step'

  def _handle(self, event: Any) -> None:
    if isinstance(event, events.StepDone):
      self._training = False
      self.steps += 1
      self.tokens += event.tokens
    before = self.machine._state, self.machine._training
    super()._handle(event)
    check_moves(learner.CONNECTION_STATES, before[0], self.machine._state)
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

  def __init__(self, world: 'World', machine: Any):
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
      if not self.world.rolled_back:  # a new life in an old process counts anew
        assert (one.tokens, one.steps) == (grad.end - grad.start, grad.steps), (one, grad)
    base = oracle.values[p]
    done = events.MergeDone(
      sync=merge.sync, fragment=p, handle=None, payload=None, digest=base, failed='not finite')
    if self.fail:
      self.fail = False
      self.answer(self.merge_ns, done)
      return
    for grad in grads:
      oracle.merge(grad, p)
    oracle.versions[p] += 1
    oracle.values[p] = value = self.world.new_value(p, oracle.versions[p])
    payload = messages.Payload(size_bytes=PAYLOAD_BYTES, crc32=0)
    self.answer(self.merge_ns, dataclasses.replace(
      done, failed='', digest=value, payload=payload), Published(base, value))


@dataclasses.dataclass
class Session:
  """One stream: its two ends, and per direction when control and payloads sent so far are in."""

  number: int
  learner: Learner
  learner_session: int
  syncer: Syncer
  open: dict[str, bool]
  control: dict[str, int]
  bulk: dict[str, int]


class World:
  """The pump, the network, and the hand that starts, kills, freezes and cuts."""

  def __init__(self, config: config_lib.ProtocolConfig, watch: Watch = lambda name, action: None):
    self.config, self.watch = config, watch
    self.now = 0
    self._queue: list[tuple[int, int, Callable[[], None]]] = []
    self._order, self._numbers, self._nonces = (itertools.count(1) for _ in range(3))
    self._values = itertools.count(1)
    self.initial = tuple(self.new_value(p, 0) for p in range(config.fragments))
    self.oracle = Oracle(list(self.initial), [0] * config.fragments)
    self.saved: tuple[dict, Oracle] | None = None
    self.checkpoints: dict[str, dict] = {}
    self.rolled_back = False
    self.flipped = 0  # adoptions that went wrong
    self.learners: dict[str, Learner] = {}
    self.ended: list[Process] = []
    self.sessions: dict[tuple[str, int], Session] = {}  # by (process name, its session number)
    self.syncer: Syncer | None = None
    self.start_syncer()

  def new_value(self, fragment: int, version: int) -> int:
    return 1_000_000 * (version + 1) + 1_000 * fragment + next(self._values) % 1_000

  # --- Time ---------------------------------------------------------------------------------------

  def at(self, time_ns: int, call: Callable[[], None]) -> None:
    heapq.heappush(self._queue, (max(time_ns, self.now), next(self._order), call))

  def run(self, until_ns: int, done: Callable[[], bool] = lambda: False) -> None:
    """Runs until a time, or until `done()`."""
    while self._queue and self._queue[0][0] <= until_ns and not done():
      self.now, _, call = heapq.heappop(self._queue)
      call()
    if not done():
      self.now = max(self.now, until_ns)

  # --- Processes ----------------------------------------------------------------------------------

  def ledger(self) -> dict:
    """As last reported."""
    return self.syncer.reports['ledger']

  def stuck(self) -> str:
    """Every machine's private state, for the message of a failed test."""
    processes = (self.syncer, *self.learners.values())
    return '\n'.join(f'{p.name}: {vars(p.machine)}' for p in processes)

  def start_syncer(self) -> None:
    """Starts the syncer, from its last durable snapshot if there is one."""
    sizes = (PAYLOAD_BYTES,) * self.config.fragments
    if self.saved is None:
      self.oracle = Oracle(list(self.initial), [0] * self.config.fragments)
      machine = syncer.SyncerMachine(self.config, AGREEMENT, self.initial, sizes)
    else:
      snapshot, self.oracle = self.saved[0], self.saved[1].copy()
      machine = syncer.SyncerMachine.restore(self.config, AGREEMENT, sizes, snapshot)
    self.rolled_back = self.syncer is not None
    self.syncer = Syncer(self, machine)
    self.at(self.now, lambda: self.syncer.post(events.Wake()))

  def start(
    self, name: str, agreement: str = AGREEMENT, restored: bool = False, second: bool = False,
  ) -> Learner:
    """Starts a learner's process, from its checkpoint if asked; `second`: beside the first."""
    nonce = next(self._nonces)
    identity = learner.Identity(
      learner=name, nonce=nonce, agreement=agreement, host=f'host{nonce}', pid=nonce, seed=nonce)
    if restored and name in self.checkpoints:
      machine = learner.LearnerMachine.restore(self.config, identity, self.checkpoints[name])
    else:
      machine = learner.LearnerMachine(self.config, identity, None if restored else self.initial)
    key = f'{name}*' if second else name
    process = self.learners[key] = Learner(self, key, machine, nonce, restored)
    self.at(self.now, lambda: process.post(events.Wake()))
    return process

  def end(self, process: Process) -> None:
    """A process is gone (killed or exited); its streams break, what it had sent still arrives."""
    process.alive = False
    self.ended.append(process)
    for session in [s for (name, _), s in self.sessions.items() if name == process.name]:
      self._close_end(session, process, silent=True)
    if self.learners.get(process.name) is process:
      del self.learners[process.name]

  # --- Network ------------------------------------------------------------------------------------

  def dial(self, process: Learner, number: int) -> None:
    session = Session(
      next(self._numbers), process, number, self.syncer, {'learner': True, 'syncer': False},
      dict.fromkeys(('up', 'down'), self.now), dict.fromkeys(('up', 'down'), self.now))
    self.sessions[process.name, number] = session
    self._carry(session, 'up', self.now + process.up_ns, lambda: self._answer_dial(session))

  def _answer_dial(self, session: Session) -> None:
    server = self.syncer
    if not session.open['learner']:
      return
    if server.frozen:
      server.later(lambda: self._answer_dial(session))
      return
    if not server.alive:
      self._close_end(session, session.learner)
      return
    session.syncer, session.open['syncer'] = server, True
    self.sessions['syncer', session.number] = session
    server.post(events.Connected(session=session.number))
    self._carry(session, 'down', self.now + session.learner.down_ns, lambda: self._to(
      session, 'learner', events.Connected(session=session.learner_session)))

  def send(self, process: Process, number: int, message: Any, content: Any) -> None:
    session = self.sessions.get(('syncer' if process is self.syncer else process.name, number))
    if session is None or not session.open[self._side(process)]:
      return
    up = process is session.learner
    lane, end = ('up', 'syncer') if up else ('down', 'learner')
    delay_ns = session.learner.up_ns if up else session.learner.down_ns
    time_ns = max(self.now + delay_ns, session.control[lane])
    if content is None:
      session.control[lane] = time_ns
    else:
      time_ns = session.bulk[lane] = max(time_ns, session.bulk[lane]) + session.learner.bulk_ns
    event = events.Received(
      session=session.number if up else session.learner_session, message=message)
    self._carry(session, lane, time_ns, lambda: self._to(session, end, event, content))

  def close(self, process: Process, number: int) -> None:
    session = self.sessions.get((process.name, number))
    if session is not None:
      self._close_end(session, process)

  def cut(self, name: str) -> None:
    """Breaks a learner's streams; what is under way is lost, each end hears of it in its time."""
    for session in [s for (who, _), s in self.sessions.items() if who == name]:
      lost = 'connection reset'
      self.at(self.now, lambda s=session: self._hang_up(s, 'learner', lost))
      self.at(self.now + session.learner.up_ns, lambda s=session: self._hang_up(s, 'syncer', lost))
      session.control = dict.fromkeys(session.control, -1)

  def partition(self, name: str) -> None:
    """Nothing passes, and nobody is told."""
    self.learners[name].stalled = []

  def heal(self, name: str) -> None:
    process = self.learners[name]
    waiting, process.stalled = process.stalled or [], None
    for deliver in waiting:
      deliver()

  def _carry(
    self, session: Session, lane: str, time_ns: int, deliver: Callable[[], None]
  ) -> None:
    def arrive() -> None:
      if session.control[lane] < 0:
        return  # the stream was cut while this was under way
      if session.learner.stalled is not None:
        session.learner.stalled.append(deliver)
      else:
        deliver()
    self.at(time_ns, arrive)

  def _to(self, session: Session, end: str, event: Any, content: Any = None) -> None:
    if session.open[end]:
      (session.learner if end == 'learner' else session.syncer).post(event, content)

  def _side(self, process: Process) -> str:
    return 'syncer' if isinstance(process, Syncer) else 'learner'

  def _close_end(self, session: Session, process: Process, silent: bool = False) -> None:
    """One end closes: it hears at once, the other after everything that was sent."""
    up = process is session.learner
    lane, other = ('up', 'syncer') if up else ('down', 'learner')
    delay_ns = session.learner.up_ns if up else session.learner.down_ns
    time_ns = max(self.now + delay_ns, session.control[lane], session.bulk[lane])
    side = self._side(process)
    if silent:
      self._forget(session, side)
    else:
      self.at(self.now, lambda: self._hang_up(session, side, 'closed'))
    self._carry(session, lane, time_ns, lambda: self._hang_up(session, other, 'peer closed'))

  def _hang_up(self, session: Session, end: str, reason: str) -> None:
    """Disconnected, once per end."""
    if session.open[end]:
      self._forget(session, end)
      process = session.learner if end == 'learner' else session.syncer
      number = session.learner_session if end == 'learner' else session.number
      process.post(events.Disconnected(session=number, reason=reason))

  def _forget(self, session: Session, end: str) -> None:
    session.open[end] = False
    key = (session.learner.name, session.learner_session) if end == 'learner' else (
      'syncer', session.number)
    self.sessions.pop(key, None)
