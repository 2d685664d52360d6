"""The reference task with shards that differ: each is one region of the corpus.

A corpus is its files in the order of their names, so a region is a few packages of the standard
library. A regular shard is a random sample of all windows.
"""

import dataclasses
import functools

import numpy as np

from diloco_jax.config import run_config
from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import decoder
from diloco_jax.train import task as task_lib


def task(config: run_config.Config) -> task_lib.Task:
  """The decoder; shard v of V reads the v-th part of the corpus."""
  corpus = functools.cache(lambda: data_lib.load_corpus(config.data.corpus))
  return dataclasses.replace(
    decoder.task(config.model, config.data),
    batches=lambda shard: Region(
      data_lib.Windows(corpus().train_ids, config.data.seq_len), config.data, shard
    ),
  )


class Region:
  """The endless batches uint8[batch_size, seq_len + 1] of a region, in an order of its own."""

  def __init__(self, windows: data_lib.Windows, config: train_config.DataConfig, shard: int):
    per_shard = len(windows) // config.shards
    self._windows, self._size = windows, config.batch_size
    self._order = np.random.default_rng([config.seed, shard]).permutation(per_shard)
    self._first = shard * per_shard

  def __getitem__(self, index: int) -> np.ndarray:
    places = np.arange(index * self._size, (index + 1) * self._size) % len(self._order)
    return np.stack([self._windows[self._first + i] for i in self._order[places]])
