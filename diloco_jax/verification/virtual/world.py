"""The simulated world with processes that have no disks, and the work that it is given."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers, tape
from diloco_jax.verification.sim import hardware, processes, world

NEVER = 1 << 62


class Work(Protocol):
  """The work of one process. It is done at once; the world decides when its events arrive."""

  def perform(self, action: actions.Work) -> list[events.Event]:
    """Carries out an action, but no Step; returns the events that answer it."""


class LearnerWork(Work, Protocol):
  def step(self, clock: int) -> None:
    """Carries out the inner step that begins at `clock`."""


class Model(Protocol):
  """What the processes of a run work on, with arrays (arrays.py) or without (no_arrays.py).

  Attributes:
    agreement, payload_bytes, digests: of the run (protocol/tape/tape.py, Start).
  """

  agreement: str
  payload_bytes: tuple[int, ...]
  digests: tuple[int, ...]

  def syncer(self, payloads: 'Contents') -> Work: ...

  def learner(self, name: str, restored: bool, payloads: 'Contents') -> LearnerWork: ...

  def checkpoint(self, name: str) -> dict[str, Any] | None:
    """The machine state of a learner's newest checkpoint; None: it has none."""

  def forget(self, name: str) -> None:
    """The host of a learner is lost, and its checkpoints with it."""


class Contents:
  """The payloads of a process (node.ports.Payloads)."""

  def __init__(self, process: processes.Process):
    self.put, self._contents = process.put, process.contents

  def get(self, payload_id: int) -> Any:
    return self._contents[payload_id]

  def drop(self, payload_id: int) -> None:
    del self._contents[payload_id]


class Learner(processes.Learner):
  """A learner's process. Arithmetic is done when it begins, and its event comes when it ends: what
  it reads cannot change meanwhile, since parameters change at step boundaries only."""

  def __init__(self, world: 'World', name: str, life: observers.ObservedProcess):
    super().__init__(world, name, life, world.disk(name), world.island(name))
    self._model_work = world.model.learner(name, life.start.state is not None, Contents(self))

  def work(self, action: actions.Work) -> None:
    self._claim_boundary()
    if isinstance(action, actions.Step):
      self._model_work.step(action.clock)
      self.begin_step()
      return
    for event in self._model_work.perform(action):
      content = self.contents.pop(getattr(event, 'payload_id', None), None)
      match event:
        case events.Encoded():
          self.answer(self.island.encode_ns, event, content, lane='egress')
        case events.AdoptDone():
          self.answer(self.island.adopt_ns, event, content, lane='egress')
        case events.SaveDone():
          self._after(0, event)

  def _after(self, delay_ns: int, event: events.Event, content: Any = None) -> None:
    self.world.engine.after(delay_ns, lambda: self.post(event, content))


class Syncer(processes.Process):
  """The syncer's process, without a log: it never dies. `merge_ns`: an outer step and commit."""

  def __init__(self, world: 'World', life: observers.ObservedProcess):
    super().__init__(world, 'syncer', life, world.disk('syncer'))
    self.merge_ns = self.read_ns = 0
    self._model_work = world.model.syncer(Contents(self))

  def takes_ns(self, action: actions.Work) -> int:
    """The time of a work action."""
    return {actions.Merge: self.merge_ns, actions.ReadFragment: self.read_ns}.get(type(action), 0)

  def work(self, action: actions.Work) -> None:
    for event in self._model_work.perform(action):
      content = self.contents.pop(getattr(event, 'payload_id', None), None)
      self.answer(self.takes_ns(action), event, content)


class World(world.World):
  """Hosts and processes that work on a model."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    model: Model,
    seed: int,
    watchers: Sequence[observers.Observer],
    slices: Mapping[str, hardware.Slices] = types.MappingProxyType({}),
  ):
    self.model = model
    super().__init__(config, seed, watchers, model.agreement, model.digests, slices)
    self.check_every = NEVER  # the seeds of the simulator check the machines

  def start_syncer(self) -> bool:
    start = tape.Start(
      role='syncer',
      node='syncer',
      config=self.config,
      agreement=self.agreement,
      run=world.RUN,
      payload_bytes=self.model.payload_bytes,
      digests=self.initial,
    )
    self.syncer = self.make_syncer(self._life(start))
    self._begin(self.syncer)
    return True

  def make_syncer(self, life: observers.ObservedProcess) -> Syncer:
    return Syncer(self, life)

  def newest_checkpoint(self, key: str) -> dict[str, Any] | None:
    return self.model.checkpoint(key)

  def make_learner(self, key: str, life: observers.ObservedProcess) -> Learner:
    return Learner(self, key, life)

  def lose_disk(self, name: str) -> None:
    self.model.forget(name)

  def run_to_the_end(self, limit_ns: int) -> None:
    """Runs until the syncer has ended. Raises RuntimeError: it has not within `limit_ns`."""
    self.run(limit_ns, done=lambda: self.finished)
    if not self.finished:
      raise RuntimeError(f'the virtual run has not ended in {limit_ns / 1e9} s:\n{self.stuck()}')
