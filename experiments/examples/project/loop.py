"""A training loop as a learner of the run.

    ./run.sh                                             # the run, with two of these
    python loop.py file:runs/DATE-TIME/syncer/address    # one more, while it trains

Put your own `init`, `read` and `step` in the place of these. Three lines make a loop a learner:
`with`, `for` and `peer.sync`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco_jax

TX = optax.adamw(2e-3)


def init():
  """The first parameters. The first learner brings them to the syncer."""
  draw = np.random.default_rng(0).standard_normal
  return {
    'hidden': jnp.asarray(draw((8, 512)) / 3, jnp.float32),
    'middle': jnp.asarray(draw((512, 512)) / 23, jnp.float32),
    'last': jnp.asarray(draw((512, 1)) / 23, jnp.float32),
  }


def read(shard, index):
  """Batch `index` of a shard. The syncer deals the shards, so no two learners read one batch."""
  x = np.random.default_rng([shard, index]).standard_normal((1024, 8), np.float32)
  return {'x': x, 'y': np.sin(3 * x).sum(axis=1)}


@jax.jit
def step(params, opt_state, batch):
  def loss_of(params):
    hidden = jnp.tanh(jnp.tanh(batch['x'] @ params['hidden']) @ params['middle'])
    return jnp.mean((hidden @ params['last'] - batch['y'][:, None]) ** 2)

  loss, grads = jax.value_and_grad(loss_of)(params)
  updates, opt_state = TX.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main(address):
  params = init()
  opt_state = TX.init(params)
  with diloco_jax.join(params, syncer=address) as peer:
    for _clock, batch in peer.steps(read):
      params, opt_state, loss = step(params, opt_state, batch)
      params = peer.sync(params, tokens=len(batch['y']), metrics={'loss': loss})


if __name__ == '__main__':
  main(sys.argv[1])
