"""The processes of the simulated world: each runs a production machine with its work and disk.

A process does for its machine what node/loop.py and the shell do in production: it feeds events,
wakes the machine at its deadline, carries out its actions, and answers its work after a while. What
the work does to arrays is that of the world's *model*: simulated values (arrays.py), none
(no_arrays.py), or the real arrays (verification/virtual/arrays.py). It also tracks payload ids, to
notice a leak or a double drop.
"""

import abc
import collections
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.tape import observers
from diloco_jax.storage import outer_log, wal
from diloco_jax.verification.sim import arrays, simulated_log
from diloco_jax.verification.sim import disk as disk_lib
from diloco_jax.verification.sim import engine as engine_lib

MS = engine_lib.MS
RETRY_NS = 500 * MS  # between two attempts to append to a full disk


class Work(Protocol):
  """The arrays of one process."""

  def perform(self, action: actions.Work) -> list[tuple[events.Event, Any]]:
    """Carries out an action at once; returns the events that answer it, which the process posts
    later, and the content of each one's payload (None: it has none)."""


class Arrays(Protocol):
  """The arrays of a run.

  Attributes:
    agreement, payload_bytes, digests: of the run (protocol/tape/tape.py, Start).
    durable: whether the syncer has a log and checkpoints; if not, it dies between two outer steps
      only, and saves take no time.
  """

  agreement: str
  payload_bytes: tuple[int, ...]
  digests: tuple[int, ...]
  durable: bool

  def learner(self, process: 'Learner') -> Work: ...

  def syncer(self, process: 'Syncer') -> Work: ...

  def forget(self, name: str) -> None:
    """The host of a learner is lost."""


class MachineCrash(Exception):
  """A machine raised on an event, or as it started."""


class Process(abc.ABC):
  """One machine with its event queue, wake timer, payload ids and work lane."""

  def __init__(self, world: Any, name: str, process: observers.ObservedProcess):
    self.world, self.name, self.observed = world, name, process
    try:
      self.machine = process.start.make()
    except Exception as error:
      raise MachineCrash(f'{name}: {type(error).__name__}: {error}, as it started') from error
    self.disk = world.disk(name)
    self.checkpoints = disk_lib.Checkpoints(self.disk)
    self.alive, self.frozen, self.exit = True, False, None
    self.contents: dict[int, Any] = {}
    self.reports: dict[type, facts.Fact] = {}  # the newest of every kind
    self.save_ns = 5 * MS if world.arrays.durable else 0
    self._payload_ids = itertools.count(1)
    self._deferred: list[Callable[[], None]] = []
    self._wake = 0
    self._unchecked = 0
    self._work_until = self._egress_until = 0

  def put(self, content: Any) -> int:
    payload_id = next(self._payload_ids)
    self.contents[payload_id] = content
    return payload_id

  # --- Events and actions -------------------------------------------------------------------------

  def post(self, event: Any, content: Any = None) -> None:
    """Delivers an event now, or when the process thaws; a dead process gets none."""
    if self.frozen:
      self.defer(lambda: self.post(event, content))
    elif self.alive:
      if content is not None:
        event = dataclasses.replace(event, payload_id=self.put(content))
      self._handle(event)

  def _handle(self, event: Any) -> None:
    now_ns = self.world.engine.now_ns
    try:
      out = self.machine.handle(now_ns, event)
    except Exception as error:
      self.world.crashed(self.observed, now_ns, event, error)
      raise MachineCrash(f'{self.name}: {type(error).__name__}: {error}') from error
    self.world.saw(self.observed, now_ns, event, out)
    self._check()
    for action in out:
      arrays.require(
        self.alive, 'A process carries out no action after its exit.', self.name, action
      )
      self._perform(action)
    self._set_timer(isinstance(event, events.Wake))

  def _check(self) -> None:
    """check() costs more with more learners, so a big world does not run it after every event."""
    self._unchecked += 1
    if self._unchecked >= self.world.check_every:
      self._unchecked = 0
      self.machine.check()

  def _set_timer(self, after_wake: bool) -> None:
    self._wake += 1
    generation, deadline_ns = self._wake, self.machine.deadline_ns
    if not self.alive or deadline_ns is None:
      return
    arrays.require(
      not after_wake or deadline_ns > self.world.engine.now_ns,
      'A machine moves its deadline when it wakes.',
      self.name,
    )
    self.world.engine.at(deadline_ns, lambda: self._timer(generation))

  def _timer(self, generation: int) -> None:
    if self.frozen:
      self.defer(lambda: self._timer(generation))
    elif generation == self._wake:
      self.post(events.Wake())

  def _perform(self, action: Any) -> None:
    match action:
      case actions.Send(session=session, message=message, payload_id=payload_id):
        content = None if payload_id is None else self.contents[payload_id]
        self.world.network.send(self, session, message, content)
      case actions.Close(session=session):
        self.world.network.close(self, session)
      case actions.Dial(session=session):
        self.world.network.dial(self, self.world.link(self.name), session)
      case actions.Drop(payload_id=payload_id):
        del self.contents[payload_id]
      case actions.Exit():
        self.exit = action
        arrays.require(not self.contents, 'Every payload id is dropped.', self.name, self.contents)
        self.world.end(self, killed=False)
      case actions.Report(fact=fact):
        self.reports[type(fact)] = fact
      case actions.Examine():
        self.world.engine.after(0, lambda: self.post(events.Examined(doing='stepping', where='')))
      case actions.Say() | actions.Admit():
        pass
      case _:
        self.work(action)

  # --- Work ---------------------------------------------------------------------------------------

  @abc.abstractmethod
  def work(self, action: actions.Work) -> None:
    """Begins a work action; an event answers it after a while."""

  def answer(self, delay_ns: int, event: Any, content: Any = None, lane: str = 'work') -> None:
    """Answers work other than steps first in, first out, on the work lane or the egress lane."""
    start = max(self.world.engine.now_ns, self._work_until)
    if lane == 'work':
      self._work_until = done = start + delay_ns
    else:
      self._egress_until = done = max(start, self._egress_until) + delay_ns
    self.world.engine.at(done, lambda: self.post(event, content))

  def save(self, save: actions.Save, state: dict) -> Generator[int, None, events.SaveDone]:
    """Writes a checkpoint in stages, between which the process may die; yields the duration of each
    stage and returns the answer to the action."""
    try:
      for _ in self.checkpoints.save(state):
        yield self.save_ns // 3
    except OSError as error:
      return events.SaveDone(clock=save.clock, error=error.strerror)
    return events.SaveDone(clock=save.clock)

  # --- Faults -------------------------------------------------------------------------------------

  def stop(self, reason: str) -> None:
    self.post(events.Stop(reason=reason))

  def defer(self, call: Callable[[], None]) -> None:
    """Defers a call until the thaw."""
    self._deferred.append(call)

  def freeze(self) -> None:
    self.frozen = True

  def thaw(self) -> None:
    self.frozen, deferred, self._deferred = False, self._deferred, []
    for call in deferred:
      call()


class Learner(Process):
  """A learner's process. The arithmetic of its work is done when it begins, and its event comes
  when it ends: what it reads cannot change meanwhile, since parameters change between steps only.
  """

  def __init__(self, world: Any, name: str, process: observers.ObservedProcess):
    super().__init__(world, name, process)
    self.learner, self.nonce = process.start.identity.learner, process.start.identity.nonce
    self.island = world.island(name)
    self.nan: set[int] = set()  # fragments whose next capture holds a NaN
    self.spoiled: dict[int, tuple[str, int]] = {}  # fragment: how, and how many captures more
    self.flips: set[int] = set()  # fragments whose next adoption has a wrong bit
    self.steps = self.tokens = 0
    self.exact = True  # it has had one incarnation only
    self._training = False
    self._incarnation = 0
    self._arrays = world.arrays.learner(self)

  def work(self, action: actions.Work) -> None:
    arrays.require(not self._training, 'Parameters are used only between two steps.', self.name)
    answers = self._arrays.perform(action)
    match action:
      case actions.Step():
        self.begin_step()
      case actions.Save():
        stages = self.save(action, action.machine_state)
        self.world.engine.after(0, lambda: self._continue_save(stages))
    for event, content in answers:
      match event:
        case events.Encoded():
          self.answer(self.island.encode_ns, event, content, lane='egress')
        case events.AdoptDone():
          self.answer(self.island.adopt_ns, event, lane='egress')

  def begin_step(self) -> None:
    self._training = True
    work_ns, tokens = self.island.draw_step()
    begun_ns = self.world.now_ns

    def end() -> None:
      self.post(events.StepDone(tokens=tokens, step_ns=self.world.now_ns - begun_ns))

    self.island.begin(work_ns, end)

  def _continue_save(self, stages: Generator[int, None, events.SaveDone]) -> None:
    if self.frozen:
      self.defer(lambda: self._continue_save(stages))
      return
    if not self.alive:
      return
    try:
      delay_ns = next(stages)
    except StopIteration as end:
      self.post(end.value)
    else:
      self.world.engine.after(delay_ns, lambda: self._continue_save(stages))

  @property
  def done(self) -> bool:
    """Whether it ended because the syncer sent Finish."""
    return self.exit is not None and self.exit.code == 0 and self.machine._ending == 'done'

  def _handle(self, event: Any) -> None:
    if isinstance(event, events.StepDone):
      self._training = False
      self.steps += 1
      self.tokens += event.tokens
    if isinstance(event, events.Received) and isinstance(event.message, messages.Joined):
      self.exact = self.exact and self._incarnation in (0, event.message.incarnation)
      self._incarnation = event.message.incarnation
    super()._handle(event)


class Syncer(Process):
  """The syncer's process, and its log, if the model is durable, to which it writes every outer step
  before reporting it.

  The process carries out one work action after the other, each in stages between which it may die.
  """

  def __init__(
    self,
    world: Any,
    process: observers.ObservedProcess,
    log: wal.Wal | None,
    theta: arrays.Theta | None,
  ):
    super().__init__(world, 'syncer', process)
    self.theta, self.log = theta, log
    self.merge_ns, self.read_ns, self.save_ns = (10 * MS, 5 * MS, 20 * MS) if log else (0, 0, 0)
    self.fsync_ns = world.fsync_ns
    self.not_finite = False  # whether the next outer step is not finite
    self.ambush: Callable[[int], None] | None = None  # called during the next commit
    self._arrays = world.arrays.syncer(self)
    self._jobs: collections.deque[Iterator[int]] = collections.deque()
    self._working = False
    self._step: outer_log.OuterStep | None = None
    self.durable = -1  # the newest record that survives a power loss

  def takes_ns(self, action: actions.Work) -> int:
    """The time of a work action, without its commit or the writing of its files."""
    return {actions.Merge: self.merge_ns, actions.ReadFragment: self.read_ns}.get(type(action), 0)

  def write(self, step: outer_log.OuterStep) -> None:
    """Takes the outer step that is to be committed before its event is posted."""
    self._step = step

  def _handle(self, event: Any) -> None:
    self.report_durable()
    super()._handle(event)

  def report_durable(self) -> None:
    """Tells observers which records have become durable."""
    if self.log is None:
      return
    durable = simulated_log.durable(self.disk, max(self.durable, self.log.first))
    if durable != self.durable:
      self.durable = durable
      self.world.logged('durable', durable)

  def work(self, action: actions.Work) -> None:
    match action:
      case actions.Measure(payload_id=payload_id):
        arrays.require(payload_id in self.contents, 'A payload that counts is there.', action)
        self._arrays.perform(action)
        return
      case actions.Save():
        job = self._checkpoint(action)
      case _:
        job = self._change_arrays(action)
    self._jobs.append(job)
    if not self._working:
      self._working = True
      self._continue_work()

  def _continue_work(self) -> None:
    """Runs the next stage of the first job, which yields its duration."""
    if self.frozen:
      self.defer(self._continue_work)
      return
    while self.alive and self._jobs:
      try:
        delay_ns = next(self._jobs[0])
      except StopIteration:
        self._jobs.popleft()
      except wal.WalBroken as broken:
        self.world.lose_syncer(self, str(broken))
      except disk_lib.Cut:
        self.world.lose_syncer(self)
      else:
        self.world.engine.after(delay_ns, self._continue_work)
        return
    self._working = False

  def _change_arrays(self, action: actions.Work) -> Iterator[int]:
    """An outer step, whose MergeDone comes once it is committed; or a whole fragment."""
    answers = self._arrays.perform(action)
    step, self._step = self._step, None
    yield self.takes_ns(action)
    if step is not None:
      yield from self._commit(step)
    for event, content in answers:
      self.post(event, content)

  def _commit(self, step: outer_log.OuterStep) -> Iterator[int]:
    """Appends the record and makes it durable."""
    while True:
      try:
        number = self.log.append(outer_log.OUTER_STEP, *outer_log.encode(step))
        break
      except wal.WalFull:
        self.world.logged('full')
      yield RETRY_NS
    self.world.logged(
      'appended',
      number,
      digest=step.done.digest,
      failed=step.done.failed,
      refused=step.done.refused,
    )
    if self.ambush is not None:
      self.ambush(self.fsync_ns)
    yield self.fsync_ns
    self.log.commit()

  def _checkpoint(self, save: actions.Save) -> Iterator[int]:
    """Writes a checkpoint, then drops the records from the log that it makes superfluous."""
    yield self.takes_ns(save)  # the actions of the same turn are carried out before it can fail
    if self.log is None:
      self.post(events.SaveDone(clock=save.clock))
      return
    theta = self.theta
    arrays.require(
      save.machine_state['versions'] == theta.versions,
      'A checkpoint contains no unfinished merge.',
      save.machine_state['versions'],
      theta.versions,
    )
    state = {'snapshot': save.machine_state, 'theta': theta.saved(), **outer_log.position(self.log)}
    done = yield from self.save(save, state)
    self.post(done)
    if done.error:
      return
    yield MS
    kept = self.checkpoints.last_two()
    if kept[0] is not None:
      outer_log.compact(self.log, kept)
    self.world.logged('compacted', self.log.first + 1)
