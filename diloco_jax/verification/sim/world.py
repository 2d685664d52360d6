"""The simulated world: processes, their hosts, and the network between them, in virtual time.

Its machines are the production ones, unchanged. A world belongs to one seed: hardware, network and
disk of every host have their own random streams (random_streams.py), so that a changed policy of
the machines meets the same faults.

Observers see what tapes hold: the start and end of processes, and every turn of a machine.
"""

import dataclasses
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import events, facts
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.tape import observers
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.storage import wal
from diloco_jax.verification import random_streams
from diloco_jax.verification.sim import arrays, hardware, simulated_log
from diloco_jax.verification.sim import disk as disk_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import processes as sim_processes

AGREEMENT, RUN = arrays.AGREEMENT, 'r0'
CHECKED_ALWAYS = 16  # up to this number of learners, check() runs after every event
NEVER = 1 << 62


class World:
  """Hosts and processes, and the functions that start and end them."""

  learner_class, syncer_class = sim_processes.Learner, sim_processes.Syncer

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    seed: int = 0,
    watchers: Sequence[observers.Observer] = (),
    values: sim_processes.Arrays | None = None,
    slices: Mapping[str, hardware.Slices] = types.MappingProxyType({}),
    links_measured: bool = True,
  ):
    """`values`: by default simulated ones. `slices`: of the islands of hosts whose chips fail, by
    name. `links_measured`: as of the syncer."""
    self.config, self.seed, self.links_measured = config, seed, links_measured
    self.arrays = values or arrays.Arrays(config.fragments)
    # A run that is not durable is not checked: seeds check the machines.
    self.check_every = -(-config.learners // CHECKED_ALWAYS) if self.arrays.durable else NEVER
    self.engine = engine_lib.Engine()
    self.network = network_lib.Network(self.engine, lambda: self.syncer)
    self._watchers = tuple(watchers)
    self._started, self._nonces = itertools.count(1), itertools.count(1)
    self._links: dict[str, network_lib.Link] = {}
    self._islands: dict[str, hardware.Island] = {}
    self._slices = slices
    self._disks: dict[str, disk_lib.Disk] = {}
    self.learners: dict[str, sim_processes.Learner] = {}
    self.done: set[str] = set()  # learner ids whose process ended after Finish
    self.fsync_ns = 5 * engine_lib.MS  # of a record of the log
    self.on_syncer_lost: Callable[[], None] = lambda: None
    self.flipped = 0  # adoptions with a wrong bit
    self.syncer: sim_processes.Syncer | None = None
    self.start_syncer()

  # --- Hosts --------------------------------------------------------------------------------------

  def link(self, name: str) -> network_lib.Link:
    """The link of a learner's host to the syncer."""
    if name not in self._links:
      draw = random_streams.random_stream(self.seed, 'network', name)
      # As in production, a tenth of a lease.
      self._links[name] = network_lib.Link(draw, queue_ns=self.config.lease_ns // 10)
    return self._links[name]

  def island(self, name: str) -> hardware.Island:
    if name not in self._islands:
      self._islands[name] = hardware.island(self.engine, self.seed, name, self._slices.get(name))
    return self._islands[name]

  def disk(self, name: str) -> disk_lib.Disk:
    if name not in self._disks:
      self._disks[name] = disk_lib.Disk(random_streams.random_stream(self.seed, 'disk', name))
    return self._disks[name]

  def restore_hosts(self) -> None:
    """Ends all faults of links, islands and disks."""
    for disk in self._disks.values():
      disk.full, disk.failing_fsyncs, disk.fuse = False, 0, None
    for island in self._islands.values():
      island.fault('slow', 1)
      island.fault('shrink', 1)
    for link in self._links.values():
      link.delay_ns = link.bytes_per_s = link.loss = link.duplicate = 0
      link.corrupt = False
      self.network.heal(link)

  def lose_disk(self, name: str) -> None:
    """Replaces the host by another one with an empty disk."""
    self._disks.pop(name, None)
    self.arrays.forget(name)

  # --- Processes ----------------------------------------------------------------------------------

  @property
  def now_ns(self) -> int:
    return self.engine.now_ns

  def run(self, until_ns: int, done: Callable[[], bool] = lambda: False) -> None:
    self.engine.run(until_ns, done)

  def start_syncer(self) -> bool:
    """Starts the syncer from the state on its disk; False: the disk does not allow it now."""
    start = tape_lib.Start(
      role='syncer',
      node='syncer',
      config=self.config,
      agreement=self.arrays.agreement,
      run=RUN,
      payload_bytes=self.arrays.payload_bytes,
      links_measured=self.links_measured,
      digests=self.arrays.digests,
    )
    if not self.arrays.durable:
      self._start_without_log(start)
      return True
    disk = self.disk('syncer')
    try:
      recovered = self._recover(disk, start)
    except (wal.WalFull, wal.WalBroken) as error:
      self.logged('full' if isinstance(error, wal.WalFull) else 'broken', text=str(error))
      return False
    except disk_lib.Cut:
      self.logged('cut', text='during its start')
      return False
    process = self._observe(dataclasses.replace(start, state=recovered.machine_state))
    self.syncer = self.syncer_class(self, process, recovered.log, recovered.theta)
    self.logged('recovered', recovered.log.committed, text=' '.join(recovered.log.words))
    if recovered.torn:
      self.logged('torn')
    self.syncer.report_durable()
    self._begin(self.syncer)
    return True

  def _start_without_log(self, start: tape_lib.Start) -> None:
    """Another process continues with the machine state of the last one (Nemesis kills none while an
    outer step is in progress), on the same host."""
    last = self.syncer
    if last is not None:
      start = dataclasses.replace(start, state=last.machine.state())
    self.syncer = self.syncer_class(self, self._observe(start), None, None)
    if last is not None:
      self.syncer.merge_ns, self.syncer.read_ns = last.merge_ns, last.read_ns
    self._begin(self.syncer)

  def _recover(self, disk: disk_lib.Disk, start: tape_lib.Start) -> simulated_log.Recovered:
    """Recovers as production does, and repairs as an operator does where production refuses."""
    try:
      return simulated_log.recover(disk, start)
    except wal.WalDamaged as damaged:
      self.logged('repaired', len(disk.rot), text=str(damaged))  # also if the repair fails half-way
      try:
        simulated_log.repair(disk, self.arrays.agreement)
      except OSError as error:
        raise wal.WalBroken(f'The repair failed: {error}') from error
    except simulated_log.NotRecovered as error:
      self.logged('not recovered', text=str(error))
      raise
    return self._recover(disk, start)

  def lose_syncer(self, process: sim_processes.Syncer, text: str = '') -> None:
    """Ends the syncer in the middle of its work; `text`: the reason, if its disk has failed."""
    self.logged('broken' if text else 'cut', text=text)
    self.end(process)
    self.on_syncer_lost()

  def start(
    self, name: str, agreement: str = '', restored: bool = False, second: bool = False
  ) -> sim_processes.Learner:
    """Starts a learner's process; `restored`: from its newest whole checkpoint, if any; `second`:
    beside the first process of this id, on its own host."""
    nonce = next(self._nonces)
    key = f'{name}*' if second else name
    machine_state = disk_lib.Checkpoints(self.disk(key)).newest() if restored else None
    identity = learner_machine.Identity(
      learner=name,
      nonce=nonce,
      agreement=agreement or self.arrays.agreement,
      host=f'host{nonce}',
      pid=nonce,
      seed=nonce,
    )
    observed = self._observe(
      tape_lib.Start(
        role='learner',
        node=key,
        config=self.config,
        identity=identity,
        state=machine_state,
        digests=self.arrays.digests if machine_state is None else None,
      )
    )
    process = self.learners[key] = self.learner_class(self, key, observed)
    self._begin(process)
    return process

  def unwatch(self, watcher: observers.Observer) -> None:
    """An observer has seen enough."""
    self._watchers = tuple(other for other in self._watchers if other is not watcher)

  def _observe(self, start: tape_lib.Start) -> observers.ObservedProcess:
    process = observers.ObservedProcess(next(self._started), start)
    for watcher in self._watchers:
      watcher.born(self.now_ns, process)
    return process

  def _begin(self, process: sim_processes.Process) -> None:
    self.engine.after(0, lambda: process.post(events.Wake()))

  def saw(
    self,
    process: observers.ObservedProcess,
    now_ns: int,
    event: events.Event,
    out: observers.Actions,
  ) -> None:
    for watcher in self._watchers:
      watcher.saw(process, now_ns, event, out)

  def logged(self, kind: str, number: int = 0, **fields: Any) -> None:
    """Shows observers a fact about the syncer's log (observers.LogNote)."""
    note = observers.LogNote(kind, number, **fields)
    for watcher in self._watchers:
      watcher.logged(self.now_ns, note)

  def crashed(
    self, process: observers.ObservedProcess, now_ns: int, event: events.Event, error: Exception
  ) -> None:
    for watcher in self._watchers:
      watcher.crashed(process, now_ns, event, error)

  def end(self, process: sim_processes.Process, killed: bool = True, silent: bool = False) -> None:
    """Ends a process; its sessions break, messages in flight still arrive. `silent`: its host has
    lost power, so no peer gets an error."""
    process.alive = False
    for watcher in self._watchers:
      watcher.died(self.now_ns, process.observed, killed)
    if isinstance(process, sim_processes.Learner):
      process.island.stop()
      if process.done:
        self.done.add(process.name.rstrip('*'))
    self.network.gone(process, silent)
    if self.learners.get(process.name) is process:
      del self.learners[process.name]

  # --- State of the run ---------------------------------------------------------------------------

  @property
  def finished(self) -> bool:
    """The syncer has closed every fragment and ended."""
    return self.syncer.exit is not None and self.syncer.machine.finished

  def ledger(self) -> facts.Ledger:
    """The last ledger that the syncer reported."""
    return self.syncer.reports[facts.Ledger]

  def stuck(self) -> str:
    """Every machine's private state, for the error about a run that does not end."""
    alive = (self.syncer, *self.learners.values())
    return '\n'.join(f'{process.name}: {vars(process.machine)}' for process in alive)
