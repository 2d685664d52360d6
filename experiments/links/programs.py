"""The processes of a cell with JAX: a loop of one's own under the syncer, data-parallel steps.

A process yields at its barriers: after its warm-up, and once its steps are measured (data-parallel:
after each). The bench answers when all processes have come to it. Those of PyTorch are in
scripts/torch_peers.py.
"""

import argparse
import json
import time
from collections.abc import Iterator
from multiprocessing import connection

WIDTH, ARRAYS = 1024, 24
VALUES = ARRAYS * WIDTH * WIDTH
TOKENS = 1_000  # of an inner step
WAIT_S = 600
TAIL = 4  # steps after those that are measured

Barriers = Iterator[int]  # the steps so far


def own_loop(flags: argparse.Namespace) -> Barriers:
  """Steps of `floor_s` that change all values, and `peer.sync`. A few steps more than are measured:
  after the last one a learner waits for the end of the run."""
  import jax
  import jax.numpy as jnp

  import diloco_jax
  from diloco_jax.configs import own_loop

  sync = own_loop.get_config().sync
  for name, value in json.loads(flags.settings).items():
    setattr(sync, name, value)
  params = {f'w{k:02}': jnp.zeros((WIDTH, WIDTH)) for k in range(ARRAYS)}
  step = jax.jit(
    lambda params, clock: {
      name: leaf + 1e-3 * jnp.sin(clock + float(place))
      for place, (name, leaf) in enumerate(params.items())
    }
  )
  join = diloco_jax.join(
    params,
    learner=f'l{flags.index}',
    syncer=flags.address,
    tls=flags.tls,
    total_steps=flags.warm + flags.steps + TAIL,
    sync=sync,
    wait_s=WAIT_S,
  )
  with join as peer:
    params, done, ahead = peer.params, 0, [flags.warm, flags.warm + flags.steps]
    for clock in peer.steps():
      if ahead and clock >= ahead[0]:  # one that joins late begins at a later clock
        ahead.pop(0)
        yield done
      began_s = time.monotonic()
      params = jax.block_until_ready(step(params, jnp.float32(clock)))
      time.sleep(max(0.0, began_s + flags.floor_s - time.monotonic()))
      params = jax.block_until_ready(peer.sync(params, tokens=TOKENS))
      done += 1


def data_parallel(flags: argparse.Namespace) -> Barriers:
  """Steps of `floor_s`, each with an all-reduce of all values in float32 over gloo."""
  import jax
  import numpy as np

  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(flags.address, flags.learners, flags.index)
  mesh = jax.make_mesh((flags.learners,), ('m',))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('m'))
  whole = jax.sharding.PartitionSpec()
  total = jax.jit(
    jax.shard_map(lambda x: jax.lax.psum(x[0], 'm'), mesh=mesh, in_specs=rows.spec, out_specs=whole)
  )
  mine = np.full((1, VALUES), flags.index, np.float32)
  values = jax.make_array_from_process_local_data(rows, mine, (flags.learners, VALUES))
  for done in range(1, flags.warm + flags.steps + 1):
    time.sleep(flags.floor_s)
    jax.block_until_ready(total(values))
    yield done


def main() -> None:
  parser = argparse.ArgumentParser()
  for name in ('way', 'address', 'settings', 'tls'):
    parser.add_argument(f'--{name}', default='')
  for name in ('index', 'learners', 'warm', 'steps', 'pipe'):
    parser.add_argument(f'--{name}', type=int, default=0)
  parser.add_argument('--floor_s', type=float, default=0.0)
  flags = parser.parse_args()
  pipe = connection.Connection(flags.pipe)
  run = {'own_loop': own_loop, 'data_parallel': data_parallel}[flags.way]
  for done in run(flags):
    pipe.send((done, time.monotonic()))
    pipe.recv()


if __name__ == '__main__':
  main()
