"""Flax nnx: a model and its Optimizer, which are updated in place.

diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/start
python quickstart_nnx.py l0    # in a terminal of its own
python quickstart_nnx.py l1    # in another one; if it is killed, start it again
"""

import sys

import numpy as np
import optax
from flax import nnx

import diloco_jax


def init() -> tuple[nnx.Module, nnx.Optimizer]:
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, 1, rngs=rngs))
  return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def read(shard: int, index: int) -> tuple[np.ndarray, np.ndarray]:
  x_Bx8 = np.random.default_rng([shard, index]).standard_normal((64, 8), np.float32)
  return x_Bx8, np.sin(x_Bx8).sum(axis=1)


@nnx.jit
def step(model, optimizer, x_Bx8, y_B):
  loss, grads = nnx.value_and_grad(lambda model: ((model(x_Bx8)[:, 0] - y_B) ** 2).mean())(model)
  optimizer.update(model, grads)
  return loss


def train(**run: str | None) -> None:
  state = init()
  with diloco_jax.join(state, **run) as peer:
    for _, batch in peer.steps(read):
      loss = step(*state, *batch)
      peer.sync(state, tokens=64, metrics={'loss': loss})


if __name__ == '__main__':
  train(learner=sys.argv[1], syncer='file:runs/start/syncer/address', workdir='runs/start')
