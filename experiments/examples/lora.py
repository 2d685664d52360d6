"""Fine-tuning a pretrained model by LoRA: learners exchange the small matrices only (flax.nnx).

    python experiments/examples/lora.py     # alone; writes runs/lora/base.safetensors first

    diloco syncer --config=own_loop --config.train.steps=150 --workdir=runs/lora/run
    python experiments/examples/lora.py --learner=l0
    python experiments/examples/lora.py --learner=l1

The base stands for a model of your own: `pretrained` reads it from a file, every learner the same.
`train_alone` is a plain loop, `train` the same loop as a learner: what it gives `join` and `sync`
is what crosses the network, here a tenth of the model. The base predicts the token after a token;
then another third of the tokens get another successor.
"""

import pathlib

import jax
import numpy as np
import optax
from absl import app, flags
from flax import nnx
from safetensors import numpy as safetensors

import diloco_jax

STEPS = 150
VOCABULARY, WIDTH, RANK, BATCH = 64, 128, 2, 512
BEFORE = np.random.default_rng(0).permutation(VOCABULARY)
AFTER = np.where(np.arange(VOCABULARY) % 3, BEFORE, np.roll(BEFORE, 1))
TRAINED = nnx.LoRAParam  # nnx.Param: everything, so everything is exchanged
BASE = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


class Model(nnx.Module):
  """Logits of the token after each token."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.hidden = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)
    self.head = nnx.LoRALinear(WIDTH, VOCABULARY, lora_rank=RANK, rngs=rngs)

  def __call__(self, tokens_B):
    return self.head(nnx.gelu(self.hidden(self.embed(tokens_B))))


def read(shard: int, index: int, after=AFTER) -> np.ndarray:
  """Batch `index` of a shard: pairs of tokens."""
  tokens_B = np.random.default_rng([shard, index]).integers(0, VOCABULARY, BATCH, np.int32)
  return np.stack([tokens_B, after[tokens_B]], axis=1)


def make_step(trained):
  """A step that changes the variables of this kind."""

  @nnx.jit
  def step(model, optimizer, batch_Bx2):
    def loss_of(model):
      logits_BxV = model(batch_Bx2[:, 0])
      return optax.softmax_cross_entropy_with_integer_labels(logits_BxV, batch_Bx2[:, 1]).mean()

    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, trained))(model)
    optimizer.update(model, grads)
    return loss

  return step


def pretrain(path: pathlib.Path) -> None:
  """Trains all but LoRA on BEFORE, and writes it."""
  model, step = Model(nnx.Rngs(0)), make_step(BASE)
  optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=BASE)
  for index in range(100):
    step(model, optimizer, read(0, index, BEFORE))
  path.parent.mkdir(parents=True, exist_ok=True)
  safetensors.save_file(_named(nnx.state(model, BASE)), path)


def pretrained(path: pathlib.Path) -> Model:
  model = Model(nnx.Rngs(0))
  state, arrays = nnx.state(model, BASE), safetensors.load_file(path)
  nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), map(arrays.get, _named(state))))
  return model


def _named(state) -> dict[str, np.ndarray]:
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def train_alone(path: pathlib.Path) -> list[float]:
  model, step = pretrained(path), make_step(TRAINED)
  optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=TRAINED)
  losses = []
  for clock in range(STEPS):
    batch = read(0, clock)
    loss = step(model, optimizer, batch)
    losses.append(float(loss))
  return losses


def train(path: pathlib.Path, **run: str | None) -> list[float]:
  model, step = pretrained(path), make_step(TRAINED)
  optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=TRAINED)
  losses = []
  with diloco_jax.join((model, optimizer), **run) as peer:
    for _, batch in peer.steps(read):
      loss = step(model, optimizer, batch)
      peer.sync((model, optimizer), tokens=BATCH, metrics={'loss': loss})
      losses.append(float(loss))
  return losses


def main(argv: list[str]) -> None:
  del argv
  base = pathlib.Path(flags.FLAGS.base)
  run = {name: flags.FLAGS[name].value for name in ('learner', 'syncer', 'workdir')}
  if not base.exists():
    pretrain(base)
  losses = train(base, **run) if run['learner'] else train_alone(base)
  print(f'{len(losses)} steps: loss {losses[0]:.2f} at first, {np.mean(losses[-20:]):.2f} at last')


if __name__ == '__main__':
  flags.DEFINE_string('base', 'runs/lora/base.safetensors', 'The pretrained model.')
  flags.DEFINE_string('learner', '', 'Id of this learner; without it the loop is alone.')
  flags.DEFINE_string('syncer', 'file:runs/lora/run/syncer/address', 'Where the syncer listens.')
  flags.DEFINE_string('workdir', None, 'As for diloco_jax.join.')
  app.run(main)
