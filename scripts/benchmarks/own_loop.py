"""The time that `peer.sync` takes in a training loop of one's own, on an idle network.

    JAX_PLATFORMS=cpu python scripts/benchmarks/own_loop.py [--quick] [--json=FILE]     # a minute

One learner beside a syncer process, a model of a million parameters. A line for each length of the
step, which is a sleep here: the median and the 99th percentile of `peer.sync` over all boundaries,
and over those that adopt a fragment. The first period is left out: it compiles. The loop passes its
loss.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp

import diloco_jax
from diloco_jax.configs import own_loop
from scripts.benchmarks import measured

ARRAYS, WIDTH = 16, 256  # 1,048,576 parameters
STEP_MS = (0, 5, 20)


def main() -> None:
  flags = measured.flags(__doc__)
  steps, cells = 100 if flags.quick else 400, []
  sync = own_loop.get_config().sync
  sync.learners = 1
  for step_ms in STEP_MS:
    with tempfile.TemporaryDirectory() as workdir:
      syncer = subprocess.Popen(
        [
          *(sys.executable, '-m', 'diloco_jax', 'syncer', '--config=own_loop'),
          *(f'--workdir={workdir}', '--config.sync.learners=1', f'--config.train.steps={steps}'),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
      )
      seconds, changed = measure(f'file:{workdir}/syncer/address', sync, step_ms / 1e3, steps)
      syncer.wait()
    skip = 2 * sync.period
    for name, chosen in (('all', np.ones_like(changed)), ('that adopt', changed)):
      times = 1e3 * seconds[skip:][chosen[skip:]]
      figure = measured.spread(times.tolist()) | {'p99': float(np.percentile(times, 99))}
      cells.append({'step_ms': step_ms, 'boundaries': name, 'sync_ms': figure})
      print(
        f'step {step_ms:2} ms, {len(times):3} boundaries {name}: median '
        f'{figure["median"]:.2f} ms, 99th percentile {figure["p99"]:.2f} ms',
        flush=True,
      )
  measured.write(flags.json, {'cells': cells})


def measure(
  syncer: str, sync: diloco_jax.SyncConfig, step_s: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
  """Seconds of each boundary but the last, and whether it adopted a fragment."""
  params = {f'w{k:02}': jnp.zeros((WIDTH, WIDTH)) for k in range(ARRAYS)}
  step = jax.jit(lambda params: (jax.tree.map(lambda leaf: leaf + 1e-3, params), jnp.float32(1)))
  seconds, changed = [], []
  with diloco_jax.join(params, learner='l0', syncer=syncer, total_steps=steps, sync=sync) as peer:
    params = peer.params
    for _ in peer.steps():
      time.sleep(step_s)
      params, loss = jax.block_until_ready(step(params))
      before = {id(leaf) for leaf in params.values()}
      began = time.perf_counter()
      params = peer.sync(params, tokens=1, metrics={'loss': loss})
      seconds.append(time.perf_counter() - began)
      changed.append(any(id(leaf) not in before for leaf in params.values()))
  return np.array(seconds[:-1]), np.array(changed[:-1])


if __name__ == '__main__':
  main()
