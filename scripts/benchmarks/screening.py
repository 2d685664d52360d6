"""The cost of screening every payload before an outer step (protocol/syncer/screening.py).

    JAX_PLATFORMS=cpu python scripts/benchmarks/screening.py     # about a minute on one core

Prints the time of an outer step of one fragment (int8, RDA, Nesterov) with and without the norms of
its participants, measured alternately in one run, and their ratio: medians of several rounds.
"""

import functools
import pathlib
import statistics
import sys
import time

from absl import app

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import codecs, exchange, fragments, merge, outer

ROUNDS = 15
PARTICIPANTS = 4
WIDTH = 1024
TENSORS = 4


def main(argv: list[str]) -> None:
  del argv
  codec = codecs.get('int8')
  tree = {f'w{k}': jnp.zeros((WIDTH, WIDTH)) for k in range(TENSORS)}
  layout = fragments.make_layout('balanced', tree, 1, lambda path: 'rda')
  optimizer = outer.outer_optimizer(merge.rda(), outer.nesterov())
  n = layout.size(0)
  step = jax.jit(functools.partial(exchange.outer_step, layout, 0, optimizer, codec, codec))
  norm = jax.jit(functools.partial(exchange.payload_norm, codec, n))
  draw = np.random.default_rng(0)
  payloads = [
    np.asarray(jax.jit(codec.encode)(draw.normal(scale=1e-3, size=n).astype(np.float32))[0])
    for _ in range(PARTICIPANTS)
  ]
  state = (jnp.zeros(n), jnp.zeros(n), exchange.init_outer(layout, 0, optimizer, jnp.zeros(n)))

  def seconds(looked_at: bool) -> tuple[float, float]:
    began = time.perf_counter()
    if looked_at:
      assert all(np.isfinite(float(norm(payload))) for payload in payloads)
    looked = time.perf_counter()
    jax.block_until_ready(step(*state, np.stack(payloads), jnp.ones(PARTICIPANTS)))
    return looked - began, time.perf_counter() - began

  seconds(True)
  rounds = [(seconds(False)[1], *seconds(True)) for _ in range(ROUNDS)]
  plain, looking, both = (statistics.median(column) for column in zip(*rounds))
  print(
    f'{n:,} values, {PARTICIPANTS} participants: outer step {1e3 * plain:.1f} ms, with norms '
    f'{1e3 * both:.1f} ms (norms {1e3 * looking:.1f} ms): ratio {both / plain:.2f}'
  )


if __name__ == '__main__':
  app.run(main)
