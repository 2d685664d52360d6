"""The processes of the simulated world: a production machine each, with its work, disk and death.

A process does to its machine what node/loop.py and the shell do in production: feeds it events,
wakes it at its deadline, carries out its actions, and answers its work after a while. It believes
nothing that its machine says: what was really trained, snapshot, merged and adopted is in arrays.py
and here. Payload ids are tracked, so that a leak or a double drop is noticed.
"""

import abc
import collections
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

from diloco_jax.proof import random_streams
from diloco_jax.proof.checks import observers
from diloco_jax.proof.checks.model import learner as learner_book
from diloco_jax.proof.sim import arrays, hardware, network, snapshots
from diloco_jax.proof.sim import disk as disk_lib
from diloco_jax.proof.sim import engine as engine_lib
from diloco_jax.proof.sim import simulated_log as simulated_log_lib
from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.storage import outer_log, wal_format

MS = engine_lib.MS
RETRY_NS = 500 * MS  # a full disk is tried again
PAYLOAD = messages.Payload(size_bytes=network.PAYLOAD_BYTES, crc32=0)


class MachineCrash(Exception):
  """A machine raised on an event."""


class Process(abc.ABC):
  """One machine with its event queue, wake timer, payload ids and work lane."""

  def __init__(self, world: Any, name: str, life: observers.ObservedProcess, disk: disk_lib.Disk):
    self.world, self.name, self.life = world, name, life
    self.machine = life.start.make()
    self.disk, self.checkpoints = disk, disk_lib.Checkpoints(disk)
    self.alive, self.frozen, self.exit = True, False, None
    self.contents: dict[int, Any] = {}
    self.reports: dict[type, facts.Fact] = {}  # the newest of every kind
    self.save_ns = 5 * MS
    self._payload_ids = itertools.count(1)
    self._held: list[Callable[[], None]] = []
    self._wake = 0
    self._unchecked = 0
    self._work_until = self._egress_until = 0

  def put(self, content: Any) -> int:
    payload_id = next(self._payload_ids)
    self.contents[payload_id] = content
    return payload_id

  # --- Events and actions -------------------------------------------------------------------------

  def post(self, event: Any, content: Any = None) -> None:
    """Delivers an event now, or when the process thaws; a dead process hears nothing."""
    if self.frozen:
      self._held.append(lambda: self.post(event, content))
    elif self.alive:
      if content is not None:
        event = dataclasses.replace(event, payload_id=self.put(content))
      self._handle(event)

  def _handle(self, event: Any) -> None:
    now_ns = self.world.engine.now_ns
    try:
      out = self.machine.handle(now_ns, event)
    except Exception as error:
      self.world.crashed(self.life, now_ns, event, error)
      raise MachineCrash(f'{self.name}: {type(error).__name__}: {error}') from error
    self.world.saw(self.life, now_ns, event, out)
    self._check()
    for action in out:
      arrays.claim(self.alive, 'Nothing is done after the exit.', self.name, action)
      self._perform(action)
    self._set_timer(isinstance(event, events.Wake))

  def _check(self) -> None:
    """check() looks at everybody, so in a big world not every event pays for it."""
    self._unchecked += 1
    if self._unchecked >= self.world.check_every:
      self._unchecked = 0
      self.machine.check()

  def _set_timer(self, after_wake: bool) -> None:
    self._wake += 1
    generation, deadline_ns = self._wake, self.machine.deadline_ns
    if not self.alive or deadline_ns is None:
      return
    arrays.claim(
      not after_wake or deadline_ns > self.world.engine.now_ns,
      'A wake moves the deadline.',
      self.name,
    )
    self.world.engine.at(deadline_ns, lambda: self._timer(generation))

  def _timer(self, generation: int) -> None:
    if self.frozen:
      self._held.append(lambda: self._timer(generation))
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
        arrays.claim(not self.contents, 'Every payload id is dropped.', self.name, self.contents)
        self.world.end(self, killed=False)
      case actions.Report(fact=fact):
        self.reports[type(fact)] = fact
      case actions.Say():
        pass
      case _:
        self.work(action)

  # --- Work ---------------------------------------------------------------------------------------

  @abc.abstractmethod
  def work(self, action: actions.Work) -> None:
    """Begins a work action; an event answers it after a while."""

  def answer(self, delay_ns: int, event: Any, content: Any = None, lane: str = 'work') -> None:
    """Answers work first in, first out: on the lane that steps, or on the one beside it."""
    start = max(self.world.engine.now_ns, self._work_until)
    if lane == 'work':
      self._work_until = done = start + delay_ns
    else:
      self._egress_until = done = max(start, self._egress_until) + delay_ns
    self.world.engine.at(done, lambda: self.post(event, content))

  def save(self, save: actions.Save, state: dict) -> Generator[int, None, events.SaveDone]:
    """Writes a checkpoint in stages, between which the process may die; it says how long each takes,
    and at last what answers the action."""
    number, digest, stages = self.checkpoints.save(state, save.snapshot, save.keep)
    try:
      for _ in stages:
        yield self.save_ns // 3
    except OSError as error:
      return events.SaveDone(clock=save.clock, error=error.strerror)
    self.world.saved[digest] = self.disk
    return events.SaveDone(clock=save.clock, checkpoint=number, record_sha256=digest)

  # --- What happens to it -------------------------------------------------------------------------

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


class Learner(Process):
  """A learner's process."""

  def __init__(
    self,
    world: Any,
    name: str,
    life: observers.ObservedProcess,
    disk: disk_lib.Disk,
    island: hardware.Island,
  ):
    super().__init__(world, name, life, disk)
    identity, restored = life.start.identity, life.start.state is not None
    self.learner, self.nonce = identity.learner, identity.nonce
    self.island = island
    self.nan: set[int] = set()  # fragments whose next snapshot holds a NaN
    self.spoiled: dict[int, tuple[str, int]] = {}  # fragment: how, and for how many snapshots yet
    self.flips: set[int] = set()  # fragments whose next adoption goes wrong by a bit
    self.steps = self.tokens = 0
    self.values = [-1] * len(world.initial) if restored else list(world.initial)
    self.adopted = [(0, 0)] * len(world.initial)  # (tokens, steps) at adoption
    self.reads: list[arrays.Batches] = []  # all that it ever trained on, one row after the other
    self.at = (-1, 0)  # shard and next batch
    self.moments = arrays.value('moments', self.nonce)
    self._training = False
    self._incarnation, self._exact = 0, True

  def work(self, action: actions.Work) -> None:
    match action:
      case actions.Step():
        self._boundary()
        self._training = True
        self._read()
        step_ns, tokens = self.island.next_step()
        self.answer(step_ns, events.StepDone(tokens=tokens, step_ns=step_ns))
      case actions.Encode(sync=sync, fragment=fragment):
        self._encode(sync, fragment)
      case actions.Adopt():
        self._adopt(action)
      case actions.UseShard(shard=shard, cursor=cursor, rewind=rewind):
        self._boundary()
        self.at = shard, cursor
        if rewind:  # its parameters are the anchors
          self.adopted = [(self.tokens, self.steps)] * len(self.adopted)
      case actions.ReadMoments(transfer=transfer):
        self._read_moments(transfer)
      case actions.TakeMoments():
        self._take_moments(action)
      case actions.Save():
        self._boundary()
        stages = self.save(action, action.machine_state)
        self.world.engine.after(0, lambda: self._save_on(stages))

  def _save_on(self, stages: Generator[int, None, events.SaveDone]) -> None:
    if self.frozen:
      self._held.append(lambda: self._save_on(stages))
      return
    if not self.alive:
      return
    try:
      delay_ns = next(stages)
    except StopIteration as end:
      self.post(end.value)
    else:
      self.world.engine.after(delay_ns, lambda: self._save_on(stages))

  @property
  def done(self) -> bool:
    """It has ended because it heard that the run is over."""
    return self.exit is not None and self.exit.code == 0 and self.machine._ending == 'done'

  def _read(self) -> None:
    """Takes the next batch."""
    shard, batch = self.at
    arrays.claim(shard >= 0, 'A learner that trains has a data shard.', self.name)
    learner_book.add_batch(self.reads, shard, batch)
    self.at = shard, batch + 1

  def _boundary(self) -> None:
    arrays.claim(not self._training, 'Parameters are touched between two steps only.', self.name)

  def _handle(self, event: Any) -> None:
    if isinstance(event, events.StepDone):
      self._training = False
      self.steps += 1
      self.tokens += event.tokens
      self.moments = arrays.value('moments', self.moments, event.tokens)
    if isinstance(event, events.Received) and isinstance(event.message, messages.Joined):
      self._exact = self._exact and self._incarnation in (0, event.message.incarnation)
      self._incarnation = event.message.incarnation
    super()._handle(event)

  def _encode(self, sync: int, fragment: int) -> None:
    self._boundary()
    (start, steps), content = self.adopted[fragment], None
    if fragment not in self.nan:
      content = arrays.Gradient(
        self.learner,
        self.nonce,
        start,
        self.tokens,
        self.steps - steps,
        self._exact,
        learner_book.last_batches(self.reads, self.steps - steps),
        self._spoils(fragment),
      )
    self.nan.discard(fragment)
    self.answer(
      self.island.encode_ns,
      events.Encoded(
        sync=sync,
        fragment=fragment,
        payload_id=None,
        payload=content and PAYLOAD,
      ),
      content,
      lane='egress',
    )

  def _spoils(self, fragment: int) -> str:
    """What becomes of the next snapshot behind the encoder."""
    how, more = self.spoiled.pop(fragment, ('', 0))
    if more > 1:
      self.spoiled[fragment] = how, more - 1
    return how

  def _adopt(self, adopt: actions.Adopt) -> None:
    self._boundary()
    published, fragment = self.contents.pop(adopt.payload_id), adopt.fragment
    arrays.claim(adopt.whole == (published.base is None), 'A delta is no whole value.', adopt)
    held = self.values[fragment]
    fits = published.base in (None, held)
    arrays.claim(
      fits or held < 0,
      'A delta is applied to the value it was measured from.',
      self.name,
      adopt,
      published,
      held,
    )
    self.values[fragment] = published.value if fits else -1
    if fragment in self.flips:
      self.flips.discard(fragment)
      self.world.flipped += 1
      self.values[fragment] = -1
    self.adopted[fragment] = (self.tokens, self.steps)
    self.answer(
      self.island.adopt_ns,
      events.AdoptDone(
        fragment=fragment,
        version=adopt.version,
        digest=abs(self.values[fragment]),
      ),
      lane='egress',
    )

  def _read_moments(self, transfer: int) -> None:
    """A snapshot that is brought to the host beside the steps, on a lane of its own."""
    self._boundary()
    content = None if self.nan else arrays.Moments(self.learner, self.steps, self.moments)
    event = events.MomentsRead(
      transfer=transfer, payload_id=None, payload=content and PAYLOAD, digest=self.moments
    )
    self.world.engine.after(self.island.donate_ns, lambda: self.post(event, content))

  def _take_moments(self, take: actions.TakeMoments) -> None:
    self._boundary()
    arrays.claim(not self.steps, 'Moments are taken before the first step.', self.name)
    moments = self.contents.pop(take.payload_id)
    garbled = random_streams.chance(self.island.draw, self.island.garble)
    matched = moments.value == take.digest and not garbled
    if matched:
      self.moments = moments.value
    self.answer(self.island.adopt_ns, events.MomentsTaken(transfer=take.transfer, matched=matched))


class Syncer(Process):
  """The syncer's process: Theta, and the log on which every outer step is before it is spoken of.

  Work is carried out one after the other, each in stages between which the process may die.
  """

  def __init__(
    self,
    world: Any,
    life: observers.ObservedProcess,
    disk: disk_lib.Disk,
    journal: simulated_log_lib.Journal,
    theta: arrays.Theta,
  ):
    super().__init__(world, 'syncer', life, disk)
    self.theta, self.journal = theta, journal
    self.merge_ns, self.read_ns, self.save_ns = 10 * MS, 5 * MS, 20 * MS
    self.fsync_ns = world.fsync_ns
    self.not_finite = False  # the next outer step is not
    self.ambush: Callable[[int], None] | None = None  # called while the next record is committed
    self._jobs: collections.deque[Iterator[int]] = collections.deque()
    self._working = False
    self.durable = -1  # the newest record that no power loss takes

  def _handle(self, event: Any) -> None:
    self.look()
    super()._handle(event)

  def look(self) -> None:
    """Tells observers which records have become durable."""
    durable = self.journal.durable()
    if durable != self.durable:
      self.durable = durable
      self.world.logged('durable', durable)

  def work(self, action: actions.Work) -> None:
    match action:
      case actions.Merge():
        job = self._merge(action)
      case actions.ReadFragment(fragment=fragment):
        job = self._read(fragment)
      case actions.Save():
        job = self._checkpoint(action)
      case actions.WriteManifest():
        job = self._write_manifest(action)
    self._jobs.append(job)
    if not self._working:
      self._working = True
      self._work_on()

  def _work_on(self) -> None:
    """Goes on with the first job; it says for how long."""
    if self.frozen:
      self._held.append(self._work_on)
      return
    while self.alive and self._jobs:
      try:
        delay_ns = next(self._jobs[0])
      except StopIteration:
        self._jobs.popleft()
      except wal_format.WalBroken as broken:
        self.world.fell(self, str(broken))
      except disk_lib.Cut:
        self.world.fell(self)
      else:
        self.world.engine.after(delay_ns, self._work_on)
        return
    self._working = False

  def _read(self, p: int) -> Iterator[int]:
    yield self.read_ns
    theta = self.theta
    self.post(
      events.FragmentRead(
        fragment=p,
        version=theta.versions[p],
        payload_id=0,
        digest=theta.values[p],
        payload=PAYLOAD,
      ),
      arrays.Published(None, theta.values[p]),
    )

  def _merge(self, merge: actions.Merge) -> Iterator[int]:
    """The outer step; MergeDone once it is committed."""
    p = merge.fragment
    grads = [self.contents.pop(one.payload_id) for one in merge.participants]
    yield self.merge_ns
    norms, refused = arrays.screened(merge.participants, grads)
    payloads = [dataclasses.replace(grad, overflows=self.not_finite).encode() for grad in grads]
    self.not_finite, base = False, self.theta.values[p]
    merged = self.theta.merge(p, merge.participants, payloads, refused, len(payloads))
    done = events.MergeDone(
      sync=merge.sync,
      fragment=p,
      payload_id=None,
      payload=None,
      digest=merged.digest,
      failed=merged.failed,
      norms=norms,
      refused=refused,
    )
    yield from self._commit(outer_log.OuterStep(merge, done, len(payloads), payloads))
    if merged.failed:
      self.post(done)
    else:
      self.post(dataclasses.replace(done, payload=PAYLOAD), arrays.Published(base, merged.digest))

  def _commit(self, step: outer_log.OuterStep) -> Iterator[int]:
    """Until it is durable."""
    while True:
      try:
        number = self.journal.append(step)
        break
      except wal_format.WalFull:
        self.world.logged('full')
      yield RETRY_NS
    self.world.logged(
      'appended',
      number,
      step.done.digest,
      step.done.failed,
      norms=step.done.norms,
      refused=step.done.refused,
    )
    if self.ambush is not None:
      self.ambush(self.fsync_ns)
    yield self.fsync_ns
    self.journal.commit()

  def _write_manifest(self, write: actions.WriteManifest) -> Iterator[int]:
    manifest = {
      'snapshot': write.snapshot,
      'pinned': [
        (write.checkpoint, write.record_sha256),
        *((part.checkpoint, part.record_sha256) for part in write.parts),
      ],
    }
    error = ''
    yield MS
    try:
      for _ in snapshots.write(self.disk, manifest):
        yield MS
    except OSError as failed:
      error = failed.strerror
    self.post(events.ManifestWritten(snapshot=write.snapshot, error=error))

  def _checkpoint(self, save: actions.Save) -> Iterator[int]:
    """A checkpoint, and what it makes superfluous is dropped from the log."""
    yield 0  # whatever was decided with it is done before it can fail
    theta = self.theta
    arrays.claim(
      save.machine_state['versions'] == theta.versions,
      'A checkpoint is of no half-done merge.',
      save.machine_state['versions'],
      theta.versions,
    )
    state = {'snapshot': save.machine_state, 'theta': theta.saved(), **self.journal.position}
    done = yield from self.save(save, state)
    self.post(done)
    if done.error:
      return
    yield MS
    try:
      kept = self.checkpoints.last_two()
      if kept[0] is not None:
        self.journal.compact(kept)
    except wal_format.WalFull:
      self.world.logged('full')  # the next save tries again
    self.world.logged('compacted', self.journal.first)
