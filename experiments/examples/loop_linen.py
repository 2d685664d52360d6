"""A training loop of one's own as a learner: flax.linen, and a TrainState.

    python experiments/examples/loop_linen.py     # alone

    diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/linen
    python experiments/examples/loop_linen.py --learner=l0 --workdir=runs/linen
    python experiments/examples/loop_linen.py --learner=l1 --workdir=runs/linen

`train_alone` is a plain loop, `train` the same loop as a learner: three lines differ. The model is
a decoder in the manner of nanodo. A learner that was killed and is started again with the same
--workdir takes the parameters of the run, which went on without it, and its own optimizer state.

On two cores, measured 2026-11-22: alone 300 steps, mean loss of the last 20 0.82, in 8 s; together
0.83 and 0.84, in 22 s, of which most is compilation by three processes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from flax import linen as nn
from flax.training import train_state

import diloco_jax

STEPS = 300
VOCABULARY, LENGTH, WIDTH, HEADS, BATCH = 64, 16, 32, 2, 16
AFTER = np.random.default_rng(0).permutation(VOCABULARY)


class Decoder(nn.Module):
  """One block of a transformer: logits of the next token at each position."""

  @nn.compact
  def __call__(self, tokens_BxL):
    x_BxLxD = nn.Embed(VOCABULARY, WIDTH, name='embed')(tokens_BxL)
    x_BxLxD += nn.Embed(LENGTH, WIDTH, name='embed_position')(jnp.arange(LENGTH))[None]
    mask = nn.make_causal_mask(tokens_BxL)
    attend = nn.MultiHeadDotProductAttention(HEADS)
    x_BxLxD += attend(nn.LayerNorm()(x_BxLxD), mask=mask)
    hidden_BxLxF = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x_BxLxD)))
    x_BxLxD += nn.Dense(WIDTH)(hidden_BxLxF)
    return nn.Dense(VOCABULARY, name='head')(nn.LayerNorm()(x_BxLxD))


def init() -> train_state.TrainState:
  model = Decoder()
  params = model.init(jax.random.key(0), np.zeros((1, LENGTH), np.int32))['params']
  return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3))


def read(shard: int, index: int) -> np.ndarray:
  """Batch `index` of a shard: walks along AFTER, one in ten steps to a random token."""
  rng = np.random.default_rng([shard, index])
  tokens_BxL = rng.integers(0, VOCABULARY, (BATCH, LENGTH + 1), np.int32)
  for i in range(LENGTH):
    random_B = rng.random(BATCH) < 0.1
    tokens_BxL[:, i + 1] = np.where(random_B, tokens_BxL[:, i + 1], AFTER[tokens_BxL[:, i]])
  return tokens_BxL


@jax.jit
def step(state, batch_BxL):
  def loss_of(params):
    logits_BxLxV = state.apply_fn({'params': params}, batch_BxL[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, batch_BxL[:, 1:]).mean()

  loss, grads = jax.value_and_grad(loss_of)(state.params)
  return state.apply_gradients(grads=grads), loss


def train_alone() -> list[float]:
  state, losses = init(), []
  for clock in range(STEPS):
    batch = read(0, clock)
    state, loss = step(state, batch)
    losses.append(float(loss))
  return losses


def train(**run: str | None) -> list[float]:
  state, losses = init(), []
  with diloco_jax.join(state, **run) as peer:
    for _, batch in peer.steps(read):
      state, loss = step(state, batch)
      state = peer.sync(state, tokens=batch.size, metrics={'loss': loss})
      losses.append(float(loss))
  return losses


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)  # Orbax logs each step of a save
  run = {name: flags.FLAGS[name].value for name in ('learner', 'syncer', 'workdir')}
  losses = train(**run) if flags.FLAGS.learner else train_alone()
  print(f'{len(losses)} steps, the mean loss of the last 20 is {np.mean(losses[-20:]):.2f}')


if __name__ == '__main__':
  flags.DEFINE_string('learner', '', 'Id of this learner; without it the loop is alone.')
  flags.DEFINE_string(
    'syncer', 'file:runs/linen/syncer/address', 'Where the syncer listens, as for diloco_jax.join.'
  )
  flags.DEFINE_string('workdir', None, 'As for diloco_jax.join.')
  app.run(main)
