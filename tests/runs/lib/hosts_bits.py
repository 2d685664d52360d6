"""What an exchange makes of given parameters on four devices, of one host or of several.

python -m tests.runs.lib.hosts_bits HOSTS HOST COORDINATOR

The lead prints a line of JSON: for each fragment the checksum of its payload and the digests of
what was adopted; at the end those of the parameters. Several hosts also print the CPU time of an
agreement.
"""

import json
import sys
import time
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import hosts as hosts_lib
from diloco_jax.learner import on_device
from diloco_jax.process import lifecycle
from diloco_jax.train import island as island_lib
from diloco_jax.train import mesh as mesh_lib

AGREEMENTS = 200


def main(hosts: str, host: str, coordinator: str) -> None:
  if int(hosts) > 1:
    hosts_lib.connect(hosts_lib.Cluster(int(hosts), int(host), coordinator))
  config = stdlib_lm.get_config('tiny')
  config.mesh.data = config.mesh.fsdp = 2
  lifecycle.prepare_jax(config.mesh.num_devices // int(hosts))
  assembled = build.assemble(config)
  island = island_lib.Island(
    task=assembled.task,
    optimizer=config.optimizer,
    mesh=config.mesh,
    total_steps=10,
    devices=jax.devices(),
  )
  exchange = on_device.Exchange(assembled, island).begin()
  rng = np.random.default_rng(0)

  def moved(leaf: jax.Array) -> jax.Array:
    values = np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    more = rng.normal(0, 0.01, values.shape).astype(values.dtype)
    return mesh_lib.put(values + more, leaf.sharding)

  island.params = jax.tree.map(moved, island.params)
  facts = []
  for p in range(assembled.layout.num_fragments):
    size = assembled.layout.size(p)
    data, ok = exchange.encode(p)
    payload = bytes(exchange.wire(p, data))
    digest = exchange.adopt(p, payload, whole=False, keep=True, merged=bool(p % 2))
    value = rng.normal(0, 0.1, size).astype(np.float32).tobytes()
    whole_digest = exchange.adopt(p, value, whole=True, keep=bool(p // 2), merged=False)
    facts.append([bool(ok), zlib.crc32(payload), np.asarray(digest).tolist()])
    facts[-1].append(np.asarray(whole_digest).tolist())
  whole = multihost_utils.process_allgather(island.params, tiled=True)
  facts.append([zlib.crc32(np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(whole)])
  if hosts_lib.leads():
    print(json.dumps(facts), flush=True)
  if int(hosts) > 1:
    hosts_lib.wait_until_ready()
    begun_s = time.process_time()
    for _ in range(AGREEMENTS):
      hosts_lib.broadcast_text('x' * 200)
    spent_s = time.process_time() - begun_s
    print(f'host {host}: {spent_s / AGREEMENTS * 1e3:.3f} ms of CPU for an agreement', flush=True)
    hosts_lib.wait_until_ready()
    jax.distributed.shutdown()


if __name__ == '__main__':
  main(*sys.argv[1:])
