"""Flax linen: a TrainState, whose parameters are exchanged; the rest of it is saved.

diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/start
python quickstart_linen.py l0    # in a terminal of its own
python quickstart_linen.py l1    # in another one; if it is killed, start it again
"""

import sys

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import diloco_jax


def init() -> train_state.TrainState:
  model = nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(1)])
  params = model.init(jax.random.key(0), np.zeros((1, 8)))['params']
  return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def read(shard: int, index: int) -> tuple[np.ndarray, np.ndarray]:
  x_Bx8 = np.random.default_rng([shard, index]).standard_normal((64, 8), np.float32)
  return x_Bx8, np.sin(x_Bx8).sum(axis=1)


@jax.jit
def step(state, x_Bx8, y_B):
  def loss_of(params):
    return ((state.apply_fn({'params': params}, x_Bx8)[:, 0] - y_B) ** 2).mean()

  loss, grads = jax.value_and_grad(loss_of)(state.params)
  return state.apply_gradients(grads=grads), loss


def train(**run: str | None) -> None:
  with diloco_jax.join(init(), **run) as peer:
    state = peer.params
    for _, batch in peer.steps(read):
      state, loss = step(state, *batch)
      state = peer.sync(state, tokens=64, metrics={'loss': loss})


if __name__ == '__main__':
  train(learner=sys.argv[1], syncer='file:runs/start/syncer/address', workdir='runs/start')
