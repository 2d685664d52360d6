"""A loop of a user that does what its first argument says: go, block (its loader, at batch 30),
spoil (NaN from clock 60 on), or go with a clock that is two hours behind."""

import sys
import threading
import time
import types

import jax.numpy as jnp
import numpy as np

import diloco_jax
from diloco_jax.report import records as records_lib

mode, learner, syncer, workdir = sys.argv[1:]
if mode == 'behind':
  behind = {'time': lambda: time.time() - 7200}
  records_lib.time = types.SimpleNamespace(**vars(time) | behind)


def read(shard: int, index: int) -> np.ndarray:
  if mode == 'block' and index >= 30:
    threading.Event().wait()
  return np.full((8,), index, np.float32)


if __name__ == '__main__':
  params = {f'w{index}': jnp.zeros((64,)) for index in range(4)}
  with diloco_jax.join(
    params, syncer=syncer, learner=learner, workdir=workdir or None, wait_s=400
  ) as peer:
    for clock, batch in peer.steps(read):
      bad = np.nan if mode == 'spoil' and clock >= 60 else 1.0
      params = {name: (array + 0.01 * batch.mean() / (1 + batch.mean())) * bad
                for name, array in params.items()}  # fmt: skip
      time.sleep(0.05)
      loss = float(params['w0'][0])
      params = peer.sync(params, tokens=batch.size, metrics={'loss': loss})
