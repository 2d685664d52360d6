"""Carries out a chaos plan in the simulated world, heals the world, and restarts dead processes.

It also replaces the supervisor: it restarts a killed process when its fault is over, from its
checkpoint, or, if the host was lost with its disk, from nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from diloco_jax.verification import plans, random_streams
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import processes as sim_processes
from diloco_jax.verification.sim import world as world_lib

SYNCER = plans.SYNCER
SUPERVISED_NS = 200 * engine_lib.MS
KILLS = ('now', 'in commit', 'in call')  # when the syncer dies: the last two wait for its disk
CALLS = 15  # most calls to the disk until a kill 'in call': a save, or five outer steps


class Odds(NamedTuple):
  """What comes with a kill, per mille of the kills: the host loses power (bytes that were not
  fsynced are lost, and no peer is told); a bit rots on its disk meanwhile; a learner's host and its
  disk never return."""

  power_lost: int = 500
  rotten: int = 150
  host_lost: int = 250


class Nemesis:
  """Carries out a plan. Each fault ends `for_ns` after it began, or with `heal`."""

  def __init__(
    self,
    world: world_lib.World,
    plan: Sequence[plans.Fault],
    note: Callable[[int, str], None] = lambda now_ns, text: None,
    odds: Odds = Odds(),  # noqa: B008, immutable
  ):
    self._world, self._note, self._odds = world, note, odds
    self._draw = random_streams.random_stream(world.seed, 'nemesis')
    self.healing = False
    self.done: list[plans.Fault] = []  # faults that found their target
    world.on_syncer_lost = self._supervise_syncer
    for fault in plan:
      world.engine.at(fault.at_ns, lambda f=fault: self._begin(f))

  def _begin(self, fault: plans.Fault) -> None:
    if self.healing:
      return
    if fault.node == SYNCER:
      begun = self._to_syncer(fault)
    elif fault.node in self._world.learners:
      begun = self._to_learner(fault, self._world.learners[fault.node])
    else:
      begun = False
    if begun:
      self.done.append(fault)
      self._note(self._world.now_ns, plans.describe(fault))
      self._world.engine.after(fault.for_ns, lambda: self._undo(fault))

  def _undo(self, fault: plans.Fault) -> None:
    """Ends a fault, unless healing has ended it already."""
    if self.healing:
      return
    world, name = self._world, fault.node
    match fault.kind:
      case 'kill' | 'preempt':
        self.start(name)
      case 'freeze' | 'replace':
        process = world.syncer if name == SYNCER else world.learners.get(name)
        if process is not None:
          process.thaw()
      case 'slow' | 'shrink':
        world.island(name).fault(fault.kind, 1)
      case 'cut_up' | 'cut_down' | 'partition':
        for link in self._links(name):
          world.network.heal(link, *_lanes(fault.kind))
      case 'delay':
        for link in self._links(name):
          link.delay_ns = 0
      case 'throttle':
        for link in self._links(name):
          link.bytes_per_s = 0
      case 'disk_full':
        world.disk(name).full = False

  # --- Faults -------------------------------------------------------------------------------------

  def _to_syncer(self, fault: plans.Fault) -> bool:
    syncer = self._world.syncer
    if not syncer.alive:
      return False
    match fault.kind:
      case 'kill' if not self._world.arrays.durable:
        self._kill_between(syncer)
      case 'kill':
        self._kill_syncer(syncer, self._draw.choice(KILLS))
      case 'preempt':
        syncer.stop('preempted')
        self._kill_later(syncer, fault)
      case 'freeze':
        syncer.freeze()
      case 'nan':
        syncer.not_finite = True
      case _:
        return self._to_host(fault)
    return True

  def _to_learner(self, fault: plans.Fault, learner: sim_processes.Learner) -> bool:
    match fault.kind:
      case 'kill':
        self._kill(learner)
      case 'preempt':
        learner.stop('preempted')
        self._kill_later(learner, fault)
      case 'freeze':
        learner.freeze()
      case 'replace':
        if f'{fault.node}*' in self._world.learners:
          return False
        learner.freeze()
        self._world.start(fault.node, second=True)
      case 'slow' | 'shrink':
        learner.island.fault(fault.kind, fault.amount)
      case 'huge' | 'poison':
        spoiled = (fault.kind, fault.amount)
        learner.spoiled = dict.fromkeys(range(self._world.config.fragments), spoiled)
      case 'nan' | 'flip':
        fragment = fault.amount % self._world.config.fragments
        (learner.nan if fault.kind == 'nan' else learner.flips).add(fragment)
      case _:
        return self._to_host(fault)
    return True

  def _to_host(self, fault: plans.Fault) -> bool:
    """Faults of a node's disk, and of its link (the syncer's: all links)."""
    world, disk = self._world, self._world.disk(fault.node)
    match fault.kind:
      case 'disk_full':
        disk.full = True
      case 'fsync_fails':
        disk.failing_fsyncs = fault.amount
      case 'rot':
        return disk.flip()
      case 'cut_up' | 'cut_down' | 'partition':
        for link in self._links(fault.node):
          link.cut.update(_lanes(fault.kind))
      case 'delay':
        for link in self._links(fault.node):
          link.delay_ns = fault.amount
      case 'throttle':
        for link in self._links(fault.node):
          link.bytes_per_s = fault.amount
      case 'corrupt':
        for link in self._links(fault.node):
          link.corrupt = True
      case 'reset':
        resets = [world.network.reset(world.learners[name]) for name in self._names(fault.node)]
        return any(resets)
      case _:
        return False
    return True

  def _kill_later(self, process: sim_processes.Process, fault: plans.Fault) -> None:
    """Kills a process that has not ended when its notice is over, and restarts it later."""

    def expire() -> None:
      self._kill(process)
      self._world.engine.after(fault.for_ns, lambda: self._undo(fault))

    self._world.engine.after(fault.amount, expire)

  def _kill(self, process: sim_processes.Process) -> None:
    if not process.alive or self.healing:
      return
    powerless = random_streams.chance(self._draw, self._odds.power_lost)
    if powerless:
      process.disk.crash()
    if random_streams.chance(self._draw, self._odds.rotten):
      process.disk.flip()
    self._world.end(process, silent=powerless)

  def _kill_syncer(self, syncer: sim_processes.Syncer, when: str) -> None:
    match when:
      case 'now':
        self._kill(syncer)
      case 'in commit':
        syncer.ambush = lambda fsync_ns: self._kill_within(syncer, fsync_ns)
      case 'in call':
        syncer.disk.fuse = self._draw.randrange(CALLS)
        syncer.disk.fuse_power = random_streams.chance(self._draw, self._odds.power_lost)

  def _kill_between(self, syncer: sim_processes.Syncer) -> None:
    """Kills a syncer that has no log once no outer step is in progress: nothing is half done."""
    if syncer.machine.state()['merging']:
      self._world.engine.after(engine_lib.MS, lambda: self._kill_between(syncer))
    else:
      self._kill(syncer)

  def _kill_within(self, syncer: sim_processes.Syncer, fsync_ns: int) -> None:
    """Kills the syncer while it waits for its disk, and restarts it."""
    syncer.ambush, engine = None, self._world.engine
    delay_ns = self._draw.randrange(fsync_ns + 1)

    def kill() -> None:
      if not self.healing:
        self._kill(syncer)
        self._supervise_syncer()

    engine.after(delay_ns, kill)

  def _supervise_syncer(self) -> None:
    self._world.engine.after(SUPERVISED_NS, lambda: self.start(SYNCER))

  def _names(self, node: str) -> list[str]:
    return sorted(self._world.learners) if node == SYNCER else [node]

  def _links(self, node: str) -> list[network_lib.Link]:
    return [self._world.link(name) for name in self._names(node)]

  # --- Repair -------------------------------------------------------------------------------------

  def start(self, node: str) -> None:
    """Restarts a node's process if it has none and the run is not over for it."""
    world = self._world
    if world.finished:
      return
    if node == SYNCER:
      if not world.syncer.alive and not world.start_syncer():
        self._supervise_syncer()
      return
    # A syncer whose disk has lost the end of the run needs the learners again that have left.
    done = node in world.done and world.syncer.machine.closed
    if not done and not any(name.rstrip('*') == node for name in world.learners):
      if random_streams.chance(self._draw, self._odds.host_lost):
        world.lose_disk(node)
      world.start(node, restored=True)

  def supervise(self) -> None:
    """Restarts, now and periodically, every process that ended before the run."""
    for node in (SYNCER, *(f'l{which}' for which in range(self._world.config.learners))):
      self.start(node)
    if not self._world.finished:
      self._world.engine.after(SUPERVISED_NS, self.supervise)

  def heal(self) -> None:
    """Ends all faults: restarts dead processes, repairs links, frees disks."""
    self.healing = True
    world = self._world
    world.restore_hosts()
    self.start(SYNCER)
    world.syncer.thaw()
    world.syncer.not_finite, world.syncer.ambush = False, None
    for process in list(world.learners.values()):
      process.thaw()
      process.nan.clear()
      process.flips.clear()
      process.spoiled.clear()


def _lanes(kind: str) -> tuple[str, ...]:
  return {'cut_up': ('up',), 'cut_down': ('down',), 'partition': ('up', 'down')}[kind]
