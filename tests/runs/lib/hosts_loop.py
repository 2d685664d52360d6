"""The loop of experiments/examples/loop_optax.py on the devices of several hosts, split over them.

python -m tests.runs.lib.hosts_loop LEARNER SYNCER WORKDIR BUG HOST COORDINATOR

It is one of two hosts; after BUG steps, if it is not 0, the second one raises an exception.
"""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import diloco_jax
from diloco_jax.config import run_config
from diloco_jax.configs import own_loop
from diloco_jax.train import mesh as mesh_lib
from tests.runs.lib import examples

HOSTS, DEVICES = 2, 2  # DEVICES on each
SPLIT = {'table': PartitionSpec('all'), 'hidden': PartitionSpec(None, 'all')}


def sync(bug: int) -> run_config.SyncConfig:
  """Without a bug the run begins once a second learner is there."""
  config = own_loop.get_config().sync
  config.learners = config.quorum = 1 if bug else 2
  return config


def main(learner: str, syncer: str, workdir: str, bug: str, host: str, coordinator: str) -> None:
  jax.config.update('jax_num_cpu_devices', DEVICES)
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(coordinator, HOSTS, int(host), heartbeat_timeout_seconds=20)
  loop = examples.load('loop_optax')
  mesh = jax.make_mesh((HOSTS * DEVICES,), ('all',), axis_types=(jax.sharding.AxisType.Auto,))
  at = lambda name: NamedSharding(mesh, SPLIT.get(name, PartitionSpec()))
  params = {name: mesh_lib.put(np.asarray(leaf), at(name)) for name, leaf in loop.init().items()}
  opt_state, losses = loop.TX.init(params), []
  with diloco_jax.join(
    params,
    learner=learner,
    syncer=syncer,
    label=loop.LABEL,
    opt_state=opt_state,
    workdir=workdir,
    checkpoint_every_steps=20,
  ) as peer:
    params, opt_state = peer.params, peer.opt_state
    for clock, batch in peer.steps(loop.read):
      batch = mesh_lib.put(batch, NamedSharding(mesh, PartitionSpec('all')))
      rate = np.float32(loop.RATE(clock))
      params, opt_state, loss = loop.step(params, opt_state, batch, rate)
      params = peer.sync(params, tokens=loop.BATCH, opt_state=opt_state)
      losses.append(float(loss))
      if host != '0' and len(losses) == int(bug):
        raise RuntimeError('a bug of the loop')
  print(f'{len(losses)} steps, the mean loss of the last 20 is {sum(losses[-20:]) / 20:.2f}')


if __name__ == '__main__':
  main(*sys.argv[1:])
