"""An own model in one file: a flax.linen classifier of ten patterns under noise.

    diloco train --config=experiments/examples/digits_linen.py

`task` returns what a run trains; `get_config` names it. Everything else (learners, syncer, faults,
checkpoints, the report) is that of every other run.
"""

import jax
import numpy as np
import optax
from flax import linen as nn

from diloco_jax.config import run_config
from diloco_jax.train import task as task_lib

SIDE, CLASSES, BATCH = 8, 10, 64
EVAL_BATCHES = 4


class Classifier(nn.Module):
  """Two hidden layers over the pixels of an image."""

  width: int

  @nn.compact
  def __call__(self, images_BxP: jax.Array) -> jax.Array:
    hidden_BxW = nn.relu(nn.Dense(self.width)(images_BxP))
    hidden_BxW = nn.relu(nn.Dense(self.width)(hidden_BxW))
    return nn.Dense(CLASSES, name='head')(hidden_BxW)


class Digits:
  """Batch i of a shard: ten fixed patterns under noise, drawn from (shard, i)."""

  def __init__(self, shard: int):
    self._shard = shard
    self._patterns_CxP = np.random.default_rng(0).standard_normal((CLASSES, SIDE * SIDE))

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([self._shard, index])
    labels_B = rng.integers(0, CLASSES, BATCH).astype(np.int32)
    noise_BxP = 2.0 * rng.standard_normal((BATCH, SIDE * SIDE))
    images_BxP = (self._patterns_CxP[labels_B] + noise_BxP).astype(np.float32)
    return {'images': images_BxP, 'labels': labels_B}


def task(config: run_config.Config, width: int = 64) -> task_lib.Task:
  """The classifier and its data."""
  held_out = Digits(config.data.shards)  # beyond the shards that learners read
  model = Classifier(width)

  def init(seed: int) -> dict:
    return model.init(jax.random.key(seed), np.zeros((1, SIDE * SIDE), np.float32))['params']

  def loss(params: dict, batch: dict, sharding: jax.sharding.Sharding) -> jax.Array:
    del sharding  # the model is small
    logits_BxC = model.apply({'params': params}, batch['images'])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxC, batch['labels']).mean()

  return task_lib.Task(
    init=init,
    loss=loss,
    batches=Digits,
    tokens_per_batch=BATCH,
    eval_batches=lambda: [held_out[index] for index in range(EVAL_BATCHES)],
  )


def get_config() -> run_config.Config:
  """Two learners, a few seconds on a CPU."""
  config = run_config.Config(name='digits_linen', task=f'{__file__}:task(width=64)')
  config.optimizer.warmup_steps = 5
  config.sync.learners, config.sync.fragments, config.sync.period = 2, 3, 3
  config.sync.overlap = 1
  config.train.steps, config.train.eval_every = 120, 40
  return config
