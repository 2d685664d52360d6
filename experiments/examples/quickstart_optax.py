"""Plain jax and optax: a dict of parameters, and the optimizer's state beside it.

diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/start
python quickstart_optax.py l0    # in a terminal of its own
python quickstart_optax.py l1    # in another one; if it is killed, start it again
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco_jax

TX = optax.adam(1e-2)


def init() -> dict[str, jax.Array]:
  draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape) * shape[0] ** -0.5
  return {'w0': draw(0, 8, 16), 'b0': jnp.zeros(16), 'w1': draw(1, 16, 1), 'b1': jnp.zeros(1)}


def read(shard: int, index: int) -> tuple[np.ndarray, np.ndarray]:
  x_Bx8 = np.random.default_rng([shard, index]).standard_normal((64, 8), np.float32)
  return x_Bx8, np.sin(x_Bx8).sum(axis=1)


@jax.jit
def step(params, opt_state, x_Bx8, y_B):
  def loss_of(params):
    hidden_BxD = jax.nn.gelu(x_Bx8 @ params['w0'] + params['b0'])
    return (((hidden_BxD @ params['w1'] + params['b1'])[:, 0] - y_B) ** 2).mean()

  loss, grads = jax.value_and_grad(loss_of)(params)
  updates, opt_state = TX.update(grads, opt_state)
  return optax.apply_updates(params, updates), opt_state, loss


def train(**run: str | None) -> None:
  params = init()
  with diloco_jax.join(params, opt_state=TX.init(params), **run) as peer:
    params, opt_state = peer.params, peer.opt_state
    for _, batch in peer.steps(read):
      params, opt_state, loss = step(params, opt_state, *batch)
      params = peer.sync(params, opt_state=opt_state, tokens=64, metrics={'loss': loss})


if __name__ == '__main__':
  train(learner=sys.argv[1], syncer='file:runs/start/syncer/address', workdir='runs/start')
