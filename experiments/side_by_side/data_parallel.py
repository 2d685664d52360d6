"""One process of data-parallel training that shares the fate of all others: restart-all.

M processes with one device each form a `jax.distributed` cluster (its collectives on CPUs: gloo)
and train one island over all devices, with the step of every learner (train/step.py). When one of
them dies, the step of the others fails or hangs, so the cluster starts again as a whole: it waits
until the missing process is there, loads the last checkpoint, and trains the steps since then
again.

WORKDIR/cluster holds the address of the present cluster's coordinator, its process 0.
WORKDIR/checkpoints holds the checkpoints, which all processes write together (Orbax).
"""

import pathlib
import signal
from unittest import mock

import jax
import numpy as np
from absl import flags
from jax._src import compiler, distributed
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from diloco_jax.config import build, run_config
from diloco_jax.launch import cli
from diloco_jax.learner import work as learner_work
from diloco_jax.process import lifecycle
from diloco_jax.report import records as records_lib
from diloco_jax.train import island as island_lib
from experiments.side_by_side import floor

ADDRESS = 'cluster'
CHECKPOINTS = 'checkpoints'
DEAD_S = 10  # a process of the cluster that is silent for this long is dead
START_S = 600


def run(config: run_config.Config, workdir: pathlib.Path, name: str, floor_s: float) -> int:
  """Trains until SIGTERM reaches process 0, saves, and returns the exit code. `config` is that of
  the learners with which it is compared: the batch is all of theirs together."""
  names = run_config.learner_ids(config.sync.learners)
  every = config.train.checkpoint_every_steps
  config.mesh.data = len(names)
  config.data.batch_size *= len(names)
  jax.distributed.initialize(
    (workdir / ADDRESS).read_text('utf-8'),
    len(names),
    names.index(name),
    initialization_timeout=START_S,
    heartbeat_timeout_seconds=DEAD_S,
    shutdown_timeout_seconds=DEAD_S,
  )
  lifecycle.prepare_jax(1)  # not before: it asks for the devices
  _every_process_caches()
  asked_to_end: list[int] = []  # before this a signal ends the process at once
  signal.signal(signal.SIGTERM, lambda number, frame: asked_to_end.append(number))
  island = island_lib.Island(
    task=build.assemble(config).task,
    optimizer=config.optimizer,
    mesh=config.mesh,
    total_steps=config.train.steps,
    devices=jax.devices(),
    seed=config.train.seed,
  )
  island.warm_up()
  floor.put(island, floor_s)
  records = records_lib.Recorder(workdir, name)
  checkpoints = ocp.training.Checkpointer(
    workdir / CHECKPOINTS, preservation_policy=ocp.training.preservation_policies.LatestN(2)
  )
  start = step = restore(checkpoints, island)
  tokens = island.tokens_per_step // len(names)
  while not multihost_utils.broadcast_one_to_all(np.bool_(bool(asked_to_end))):
    result = island.step(step)
    step += 1
    steps = step - start
    learner_work.record_step(records, config, island, steps, steps * tokens, result)
    if step % every == 0:
      checkpoints.save_async(step, island.state)
  checkpoints.save(step, island.state, overwrite=True)
  checkpoints.close()
  records.close()
  jax.distributed.shutdown()
  return 0


def restore(checkpoints: ocp.training.Checkpointer, island: island_lib.Island) -> int:
  """Loads the last checkpoint, if there is one; returns its step."""
  latest = checkpoints.latest
  if latest is None:
    return 0
  like = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    island.state,
    island.shardings,
  )
  island.state = checkpoints.load(latest.step, like)
  island.data_state = latest.step
  return latest.step


def _every_process_caches() -> None:
  """Lets every process of the cluster write to the cache of compiled functions.

  JAX lets process 0 alone do so, since the processes of an accelerator have the same functions. On
  CPUs the key of a function differs by process, so all others would compile at every restart.
  """
  write = compiler._cache_write

  def write_as_first(*arguments) -> None:
    with mock.patch.object(distributed.global_state, 'process_id', 0):
      write(*arguments)

  compiler._cache_write = write_as_first


def main(argv: list[str]) -> int:
  del argv
  values = flags.FLAGS
  return run(cli.config(), pathlib.Path(values.workdir), values.learner, values.floor_s)


if __name__ == '__main__':
  floor.define_flags()
  cli.run_main(main)
