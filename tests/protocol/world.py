"""A small world for the two machines: virtual time, sessions with delays, processes.

It drives the production machines unchanged. Everything is ordered by (virtual time, order of
posting), so a run repeats exactly. A session has two lanes per direction, like the wire: control
messages are first in, first out and never wait for payloads; payloads are first in, first out and
may be overtaken by later control. Work and its books are in processes.py.
"""

import dataclasses
import heapq
import itertools
from typing import Any, Callable

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import events, learner, syncer
from tests.protocol import processes

MS = processes.MS
PAYLOAD_BYTES = processes.PAYLOAD_BYTES
AGREEMENT = '{"model.width":8}'
Watch = Callable[[str, Any], None]


def protocol_config(**changes: Any) -> config_lib.ProtocolConfig:
  """A config with short times; `*_ms` may be given instead of `*_ns`."""
  settings = {'lease_ms': 1000, 'heartbeat_ms': 200, **changes}
  for name in [name for name in settings if name.endswith('_ms')]:
    settings[name[:-3] + '_ns'] = settings.pop(name) * MS
  return config_lib.ProtocolConfig(redial_ns=(50 * MS, 500 * MS), **settings)


@dataclasses.dataclass
class Session:
  """One stream: its two ends, and per direction when control and payloads sent so far are in."""

  number: int
  learner: processes.Learner
  learner_session: int
  syncer: processes.Syncer
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
    self.oracle = processes.Oracle(list(self.initial), [0] * config.fragments)
    self.saved: tuple[dict, processes.Oracle] | None = None
    self.checkpoints: dict[str, dict] = {}
    self.rolled_back = False
    self.flipped = 0  # adoptions that went wrong
    self.learners: dict[str, processes.Learner] = {}
    self.ended: list[processes.Process] = []
    self.sessions: dict[tuple[str, int], Session] = {}  # by (process name, its session number)
    self.syncer: processes.Syncer | None = None
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
      self.oracle = processes.Oracle(list(self.initial), [0] * self.config.fragments)
      machine = syncer.SyncerMachine(self.config, AGREEMENT, self.initial, sizes)
    else:
      snapshot, self.oracle = self.saved[0], self.saved[1].copy()
      machine = syncer.SyncerMachine.restore(self.config, AGREEMENT, sizes, snapshot)
    self.rolled_back = self.syncer is not None
    self.syncer = processes.Syncer(self, machine)
    self.at(self.now, lambda: self.syncer.post(events.Wake()))

  def start(
    self, name: str, agreement: str = AGREEMENT, restored: bool = False, second: bool = False,
  ) -> processes.Learner:
    """Starts a learner's process, from its checkpoint if asked; `second`: beside the first."""
    nonce = next(self._nonces)
    identity = learner.Identity(
      learner=name, nonce=nonce, agreement=agreement, host=f'host{nonce}', pid=nonce, seed=nonce)
    if restored and name in self.checkpoints:
      machine = learner.LearnerMachine.restore(self.config, identity, self.checkpoints[name])
    else:
      machine = learner.LearnerMachine(self.config, identity, None if restored else self.initial)
    key = f'{name}*' if second else name
    process = self.learners[key] = processes.Learner(self, key, machine, nonce, restored)
    self.at(self.now, lambda: process.post(events.Wake()))
    return process

  def end(self, process: processes.Process) -> None:
    """A process is gone (killed or exited); its streams break, what it had sent still arrives."""
    process.alive = False
    self.ended.append(process)
    for session in [s for (name, _), s in self.sessions.items() if name == process.name]:
      self._close_end(session, process, silent=True)
    if self.learners.get(process.name) is process:
      del self.learners[process.name]

  # --- Network ------------------------------------------------------------------------------------

  def dial(self, process: processes.Learner, number: int) -> None:
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

  def send(self, process: processes.Process, number: int, message: Any, content: Any) -> None:
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

  def close(self, process: processes.Process, number: int) -> None:
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

  def _side(self, process: processes.Process) -> str:
    return 'syncer' if isinstance(process, processes.Syncer) else 'learner'

  def _close_end(self, session: Session, process: processes.Process, silent: bool = False) -> None:
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
