"""One run of the comparison: a system under the supervisor, its kills, and the row of its facts."""

import asyncio
import dataclasses
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from diloco_jax.api import load_params
from diloco_jax.config import build, run_config
from diloco_jax.process import run_folder
from diloco_jax.report import records as records_lib
from diloco_jax.train import island as island_lib
from diloco_jax.verification import plans
from diloco_jax.verification.faults import conductor as conductor_lib
from experiments.side_by_side import accounts, data_parallel, systems

READY_STEPS = 10  # of every learner before the measurement begins
READY_S = 240.0  # for all processes to start, compile and make them
END_S = 20.0  # for the learners to end
_SECOND_NS = 1_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """One run: a system and a seed, and how long it is measured without and with kills."""

  system: str
  seed: int
  clean_s: float
  kills_s: float
  floor_s: float = systems.FLOOR_S
  learners: int = systems.LEARNERS

  @property
  def config(self) -> run_config.Config:
    return systems.config_of(self.system, self.seed, self.learners)

  @property
  def names(self) -> list[str]:
    return run_config.learner_ids(self.learners)

  @property
  def plan(self) -> list[plans.Fault]:
    return systems.kills(self.seed, self.names, self.kills_s)

  @property
  def key(self) -> str:
    """Changes with every setting of the run."""
    spec = [dataclasses.asdict(self), self.config.to_dict(), list(map(str, self.plan))]
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


class Side(conductor_lib.Conductor):
  """A run of a cell. `window` is there once all has been measured. `rehearse`: a learner is killed
  before, so that the functions of a restart are in the compilation cache."""

  def __init__(
    self,
    workdir: pathlib.Path,
    recorder: records_lib.Recorder,
    cell: Cell,
    rehearse: bool,
    shown: Callable[[float], None],
  ):
    change = functools.partial(systems.program, cell.system, cell.floor_s)
    super().__init__(workdir, recorder, cell.config, [], change)
    self._cell, self._rehearse, self._shown = cell, rehearse, shown
    self._began_s = time.monotonic()
    self._restarts_all = cell.system == systems.RESTART_ALL
    self.window: accounts.Window | None = None
    self._new_cluster()

  async def carry_out(self) -> None:
    cell = self._cell
    await self._all_train()
    if self._rehearse:
      self._kill(cell.names[0], 0.0)
      await self._all_train()
    begin_ns = time.monotonic_ns()
    kills_ns = begin_ns + round(cell.clean_s * _SECOND_NS)
    killed = []
    for fault in cell.plan:
      await _until_ns(kills_ns + fault.at_ns)
      if self._kill(fault.node, fault.for_ns / _SECOND_NS):
        killed.append((time.monotonic_ns(), fault.node))
    end_ns = kills_ns + round(cell.kills_s * _SECOND_NS)
    await _until_ns(end_ns)
    self.window = accounts.Window(
      begin_ns=begin_ns, kills_ns=kills_ns, end_ns=end_ns, kills=tuple(killed)
    )
    self.supervisor.retire()
    asyncio.get_running_loop().call_later(END_S, self._end)

  def _end(self) -> None:
    """Ends the processes of a cluster that a kill has left incomplete."""
    for name in self._cell.names:
      if child := self.supervisor.child(name):
        child.kill()

  def look(self) -> None:
    super().look()
    self._shown(time.monotonic() - self._began_s)

  async def _all_train(self) -> None:
    """Waits until every learner has made READY_STEPS from now on."""
    at = len(self.facts)
    steps = lambda name: len(self.since(name, 'step', at))
    if not await self.until(lambda: min(map(steps, self._cell.names)) >= READY_STEPS, READY_S):
      raise TimeoutError(f'{self._cell.system} does not train: see {self.workdir}/logs')

  def _kill(self, node: str, down_s: float) -> bool:
    killed = self.nemesis.kill(node, down_s)
    if killed and self._restarts_all:
      self._new_cluster()
      for other in self._cell.names:
        if other != node:
          self.supervisor.bring_down(other, 0.0, 'its cluster has lost a process')
    return killed

  def _new_cluster(self) -> None:
    """The next processes of restart-all meet at another address."""
    if self._restarts_all:
      (self.workdir / data_parallel.ADDRESS).write_text(systems.free_address(), 'utf-8')


async def _until_ns(at_ns: int) -> None:
  await asyncio.sleep(max(0, at_ns - time.monotonic_ns()) / _SECOND_NS)


def measure(
  cell: Cell,
  workdir: pathlib.Path,
  rehearse: bool = True,
  shown: Callable[[float], None] = lambda seconds: None,
) -> dict[str, Any]:
  """Runs a cell in a new folder; returns its row. `rehearse`: see Side; `shown` gets the seconds
  since it began.

  Raises:
    EndedEarly: the run was interrupted, or ended otherwise before it was measured.
    TimeoutError: its processes do not train, or do not end.
  """
  began_s = time.monotonic()
  config = cell.config
  config.validate()
  workdir = run_folder.open_workdir(config, workdir, resume=False)
  longest_s = READY_S + cell.clean_s + cell.kills_s + 2 * END_S
  make = functools.partial(Side, cell=cell, rehearse=rehearse, shown=shown)
  side, run = conductor_lib.play(workdir, make, longest_s)
  window = side.window
  account = accounts.account(run.facts, cell.names, window)
  tokens_per_step = config.data.batch_size * config.data.seq_len
  island = _island(config)
  if cell.system == systems.RESTART_ALL:
    clock = data_parallel.restore(_checkpoints(workdir), island)
    clocks = clock - accounts.clock_at(run.facts, window.kills_ns)
    tokens = clocks * cell.learners * tokens_per_step
  else:
    island.params = jax.device_put(load_params.load_params(workdir), island.shardings.params)
    tokens = accounts.merged(run.facts, config.sync.fragments, window)
  return {
    'key': cell.key,
    'system': cell.system,
    'seed': cell.seed,
    'learners': cell.learners,
    'clean_s': cell.clean_s,
    'kills_s': cell.kills_s,
    'floor_s': cell.floor_s,
    'kills': len(window.kills),
    **dataclasses.asdict(account),
    'token_goodput': tokens / (account.rate * tokens_per_step * cell.kills_s),
    'loss': island.evaluate(),
    'seconds': time.monotonic() - began_s,
  }


def _island(config: run_config.Config) -> island_lib.Island:
  """An island for the evaluation of a run's model."""
  return island_lib.Island(
    task=build.assemble(config).task,
    optimizer=config.optimizer,
    mesh=config.mesh,
    total_steps=config.train.steps,
    devices=jax.local_devices()[:1],
  )


def _checkpoints(workdir: pathlib.Path) -> ocp.training.Checkpointer:
  return ocp.training.Checkpointer(workdir / data_parallel.CHECKPOINTS)
