"""A training loop of one's own as a learner: flax.nnx.

    python experiments/examples/loop_nnx.py     # alone

    diloco syncer --config=own_loop --config.train.steps=200 --workdir=runs/nnx
    python experiments/examples/loop_nnx.py --learner=l0 --workdir=runs/nnx
    python experiments/examples/loop_nnx.py --learner=l1 --workdir=runs/nnx

`train_alone` is a plain loop, `train` the same loop as a learner: three lines differ. The model
predicts the token after a token; its embedding is merged by averaging, since its path says `embed`,
and so are the statistics of BatchNorm. The keys of dropout come from the batch and the rate from
the clock, so that neither depends on how often this learner was away.

Measured 2026-11-25: alone 200 steps, mean loss of the last 20 0.83; together 0.84 and 0.85.
"""

import jax
import numpy as np
import optax
from absl import app, flags
from flax import nnx

import diloco_jax

STEPS = 200
VOCABULARY, WIDTH, BATCH = 64, 32, 1024
AFTER = np.random.default_rng(0).permutation(VOCABULARY)
TX = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0)
RATE = optax.cosine_decay_schedule(6e-3, STEPS)


class Model(nnx.Module):
  """Logits of the token after each token."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.1)
    self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

  def __call__(self, tokens_B, key):
    x_BxD = nnx.gelu(self.norm(self.hidden(self.embed(tokens_B))))
    return self.head(self.dropout(x_BxD, rngs=key))


def read(shard: int, index: int) -> dict[str, np.ndarray]:
  """Batch `index` of a shard: pairs of tokens, one in ten of them random."""
  rng = np.random.default_rng([shard, index])
  tokens_B, noise_B = rng.integers(0, VOCABULARY, (2, BATCH), np.int32)
  after_B = np.where(rng.random(BATCH) < 0.1, noise_B, AFTER[tokens_B])
  return {'tokens': tokens_B, 'after': after_B, 'seed': np.uint32(1_000_003 * shard + index)}


@nnx.jit
def step(model, optimizer, batch, rate):
  def loss_of(model):
    logits_BxV = model(batch['tokens'], jax.random.key(batch['seed']))
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxV, batch['after']).mean()

  optimizer.opt_state.hyperparams['learning_rate'][...] = rate
  loss, grads = nnx.value_and_grad(loss_of)(model)
  optimizer.update(model, grads)
  return loss


def train_alone() -> list[float]:
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  losses = []
  for clock in range(STEPS):
    batch = read(0, clock)
    loss = step(model, optimizer, batch, RATE(clock))
    losses.append(float(loss))
  return losses


def train(**run: str | None) -> list[float]:
  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  losses = []
  with diloco_jax.join((model, optimizer), total_steps=STEPS, **run) as peer:
    for clock, batch in peer.steps(read):
      loss = step(model, optimizer, batch, RATE(clock))
      peer.sync((model, optimizer), tokens=BATCH, metrics={'loss': loss})
      losses.append(float(loss))
  return losses


def main(argv: list[str]) -> None:
  del argv
  run = {name: flags.FLAGS[name].value for name in ('learner', 'syncer', 'workdir')}
  losses = train(**run) if flags.FLAGS.learner else train_alone()
  print(f'{len(losses)} steps, the mean loss of the last 20 is {np.mean(losses[-20:]):.2f}')


if __name__ == '__main__':
  flags.DEFINE_string('learner', '', 'Id of this learner; without it the loop is alone.')
  flags.DEFINE_string(
    'syncer', 'file:runs/nnx/syncer/address', 'Where the syncer listens, as for diloco_jax.join.'
  )
  flags.DEFINE_string('workdir', None, 'As for diloco_jax.join.')
  app.run(main)
