"""Sites that train one model and keep their data: digits, of which each site has other ones.

    python experiments/examples/federated.py runs/digits
    diloco train --config=experiments/examples/federated.py

The first command writes one file for each site, runs/digits/l0.npz to l3.npz, and one for the
syncer, with images of all digits that nobody trains on. Each process reads the file of its own name
only: `data.local` says so, and `{node}` in `data.corpus` is that name. On machines of their own the
sites have only their own file, at any path:

    diloco learner --config=federated.py --learner=l2 --config.data.corpus=/private/l2.npz ...

The images are scikit-learn's 1,797 of 8 x 8 pixels. Site m gets a share of the images of each digit
that is drawn from a Dirichlet distribution (arXiv 1909.06335): the smaller ALPHA, the more a site
has of few digits and little of the others. docs/howto/private_data.md has what others may learn
from updates all the same.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from diloco_jax.config import run_config
from diloco_jax.train import task as task_lib

SITES, CLASSES, BATCH, ALPHA = 4, 10, 32, 0.3


def split(folder: pathlib.Path, seed: int = 0) -> None:
  """Writes the files of the sites and of the syncer: `images` float32[N, 64], `labels` int32[N]."""
  from sklearn import datasets

  digits, rng = datasets.load_digits(), np.random.default_rng(seed)
  images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
  held_out = np.arange(len(labels)) % 5 == 0
  owner = np.empty(len(labels), int)
  for digit in range(CLASSES):
    (which,) = np.nonzero(labels == digit)
    owner[which] = rng.choice(SITES, len(which), p=rng.dirichlet([ALPHA] * SITES))
  folder.mkdir(parents=True, exist_ok=True)
  for site, name in enumerate(run_config.learner_ids(SITES)):
    own = ~held_out & (owner == site)
    print(f'{name}: {np.bincount(labels[own], minlength=CLASSES)} images of 0 to 9')
    np.savez(folder / f'{name}.npz', images=images[own], labels=labels[own])
  np.savez(folder / 'syncer.npz', images=images[held_out], labels=labels[held_out])


class Own:
  """Batch i of this node's images, drawn from (number of the learner, i)."""

  def __init__(self, file: pathlib.Path, number: int):
    with np.load(file) as arrays:
      self._images, self._labels = arrays['images'], arrays['labels']
    self._number = number

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    which = np.random.default_rng([self._number, index]).integers(len(self._labels), size=BATCH)
    return {'images': self._images[which], 'labels': self._labels[which]}


class Classifier(nn.Module):
  """One hidden layer over the pixels of an image."""

  @nn.compact
  def __call__(self, images_BxP: jax.Array) -> jax.Array:
    return nn.Dense(CLASSES, name='head')(nn.relu(nn.Dense(64)(images_BxP)))


def task(config: run_config.Config) -> task_lib.Task:
  """The classifier, and the images of this node."""
  model, file = Classifier(), pathlib.Path(config.data.corpus)

  def init(seed: int) -> dict:
    return model.init(jax.random.key(seed), np.zeros((1, 64), np.float32))['params']

  def loss(params: dict, batch: dict, sharding: jax.sharding.Sharding) -> task_lib.Measured:
    del sharding  # the model is small
    logits_BxC = model.apply({'params': params}, batch['images'])
    right_B = logits_BxC.argmax(1) == batch['labels']
    cross_entropy_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxC, batch['labels'])
    return cross_entropy_B.mean(), {'accuracy': right_B.mean(dtype=jnp.float32)}

  def held_out() -> list[dict[str, np.ndarray]]:
    if not file.exists():  # a syncer may have no images: then it evaluates nothing
      return []
    with np.load(file) as arrays:
      return [{name: arrays[name] for name in ('images', 'labels')}]

  return task_lib.Task(
    init=init,
    loss=loss,
    batches=functools.partial(Own, file),
    tokens_per_batch=BATCH,
    eval_batches=held_out,
  )


def get_config() -> run_config.Config:
  """Four sites, about half a minute on two CPU cores. An outer step needs two of them, since one
  has few of the digits, and none runs far ahead: here a step takes less time than a message."""
  config = run_config.Config(name='federated', task=f'{__file__}:task')
  config.data.corpus, config.data.local = 'runs/digits/{node}.npz', True
  config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-2, 10
  config.sync.learners, config.sync.quorum, config.sync.max_lag = SITES, 2, 1
  config.sync.fragments, config.sync.period, config.sync.overlap = 2, 4, 1
  config.train.steps, config.train.eval_every = 400, 100
  return config


if __name__ == '__main__':
  split(pathlib.Path(sys.argv[1]))
