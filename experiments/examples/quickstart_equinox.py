"""Equinox: a State with MultiSteps, the scale of the loss and an average of the weights.

diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/start
python quickstart_equinox.py l0    # in a terminal of its own
python quickstart_equinox.py l1    # in another one; if it is killed, start it again
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco_jax

TX = optax.MultiSteps(optax.adam(1e-2), 2)


class State(eqx.Module):
  model: eqx.nn.MLP
  opt_state: optax.MultiStepsState
  ema: eqx.nn.MLP
  scale: jax.Array


def init() -> State:
  model = eqx.nn.MLP(8, 1, 16, 2, key=jax.random.key(0))
  return State(model, TX.init(eqx.filter(model, eqx.is_inexact_array)), model, jnp.float32(2**15))


def read(shard: int, index: int) -> tuple[np.ndarray, np.ndarray]:
  x_Bx8 = np.random.default_rng([shard, index]).standard_normal((64, 8), np.float32)
  return x_Bx8, np.sin(x_Bx8).sum(axis=1)


@eqx.filter_jit
def step(state, x_Bx8, y_B):
  loss_of = lambda model: jnp.mean((jax.vmap(model)(x_Bx8)[:, 0] - y_B) ** 2)
  loss, grads = eqx.filter_value_and_grad(lambda m: loss_of(m) * state.scale)(state.model)
  grads = jax.tree.map(lambda g: g / state.scale, grads)
  params = eqx.filter(state.model, eqx.is_inexact_array)
  updates, opt_state = TX.update(grads, state.opt_state, params)
  model = eqx.apply_updates(state.model, updates)
  mean = lambda old, new: 0.99 * old + 0.01 * new if eqx.is_inexact_array(old) else old
  scale = jnp.where(jnp.isfinite(loss), state.scale, state.scale / 2)
  return State(model, opt_state, jax.tree.map(mean, state.ema, model), scale), loss / state.scale


def train(**run: str | None) -> None:
  with diloco_jax.join(init(), exchange=lambda state: state.model, **run) as peer:
    state = peer.params
    for _, batch in peer.steps(read):
      state, loss = step(state, *batch)
      state = peer.sync(state, tokens=64, metrics={'loss': loss})


if __name__ == '__main__':
  train(learner=sys.argv[1], syncer='file:runs/start/syncer/address', workdir='runs/start')
