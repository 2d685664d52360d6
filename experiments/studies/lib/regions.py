"""The reference task on text that differs between learners: each has one region of the corpus.

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


def task(
  config: run_config.Config, windows: tuple[int, ...] = (), of: int | None = None
) -> task_lib.Task:
  """The decoder on regions of the text.

  Args:
    config: of the run.
    windows: how many windows each region has, of equally many parts of the corpus, from the
      beginning of each; (): the parts are data.shards, and whole.
    of: the region that every learner reads; -1: all of them, mixed. None: learner number v of a run
      with data.local, or shard v, reads region v.
  """
  corpus = functools.cache(
    lambda: data_lib.load_corpus(config.data.corpus, field=config.data.field)
  )

  def batches(number: int) -> 'Region':
    text = data_lib.Windows(corpus().train_ids, config.data.seq_len)
    parts = len(windows) or config.data.shards
    starts = len(text) // parts * np.arange(parts)
    sizes = np.array(windows or [len(text) // parts] * parts)
    wanted = number if of is None else of
    which = [*range(parts)] if wanted < 0 else [wanted]
    places = np.concatenate([starts[v] + np.arange(sizes[v]) for v in which])
    return Region(text, places, config.data, number)

  return dataclasses.replace(decoder.task(config.model, config.data), batches=batches)


class Region:
  """The endless batches uint8[batch_size, seq_len + 1] of the windows at these places, in an order
  of their own for each pass."""

  def __init__(
    self,
    windows: data_lib.Windows,
    places: np.ndarray,
    config: train_config.DataConfig,
    number: int,
  ):
    self._windows, self._places, self._size = windows, places, config.batch_size
    self._seed, self._pass = (config.seed, number), (-1, places)

  def __getitem__(self, index: int) -> np.ndarray:
    number, place = divmod(index, len(self._places) // self._size)
    if self._pass[0] != number:
      order = np.random.default_rng([*self._seed, number]).permutation(self._places)
      self._pass = number, order
    return np.stack(
      [self._windows[i] for i in self._pass[1][place * self._size : (place + 1) * self._size]]
    )
