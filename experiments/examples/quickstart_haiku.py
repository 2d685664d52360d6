"""Haiku: parameters and the state of BatchNorm, exchanged; the optimizer's state, kept.

diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/start
python quickstart_haiku.py l0    # in a terminal of its own
python quickstart_haiku.py l1    # in another one; if it is killed, start it again
"""

import sys

import haiku as hk
import jax
import numpy as np
import optax

import diloco_jax

TX = optax.adam(1e-2)


@hk.transform_with_state
def net(x_Bx8):
  hidden_BxD = hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x_Bx8), is_training=True)
  return hk.Linear(1)(jax.nn.gelu(hidden_BxD))[:, 0]


def init() -> dict:
  params, norms = net.init(jax.random.key(0), np.zeros((64, 8), np.float32))
  return {'params': params, 'norms': norms, 'adam': TX.init(params)}


def read(shard: int, index: int) -> tuple[np.ndarray, np.ndarray]:
  x_Bx8 = np.random.default_rng([shard, index]).standard_normal((64, 8), np.float32)
  return x_Bx8, np.sin(x_Bx8).sum(axis=1)


@jax.jit
def step(state, x_Bx8, y_B):
  def loss_of(params):
    found_B, norms = net.apply(params, state['norms'], None, x_Bx8)
    return ((found_B - y_B) ** 2).mean(), norms

  (loss, norms), grads = jax.value_and_grad(loss_of, has_aux=True)(state['params'])
  updates, adam = TX.update(grads, state['adam'])
  params = optax.apply_updates(state['params'], updates)
  return {'params': params, 'norms': norms, 'adam': adam}, loss


def train(**run: str | None) -> None:
  own = lambda state: {'params': state['params'], 'norms': state['norms']}  # floats alone leave
  label = lambda name: 'statistic' if name.startswith('norms/') else 'body'
  with diloco_jax.join(init(), exchange=own, label=label, **run) as peer:
    state = peer.params
    for _, batch in peer.steps(read):
      state, loss = step(state, *batch)
      state = peer.sync(state, tokens=64, metrics={'loss': loss})


if __name__ == '__main__':
  train(learner=sys.argv[1], syncer='file:runs/start/syncer/address', workdir='runs/start')
