"""The task of `tiny` with slow data, for tests of commands that start a run.

Its learners wait for their batches, so they leave the CPU to processes that start, as the paced
ones of conductor.py do.
"""

import dataclasses
import pathlib
import time

from diloco_jax.config import run_config
from diloco_jax.train import decoder
from diloco_jax.train import task as task_lib

STEP_S = 0.04
FLAG = f'--config.task={pathlib.Path(__file__).resolve()}:task'


@dataclasses.dataclass
class Slow:
  """Batches that take `step_s` each."""

  batches: task_lib.Batches
  step_s: float

  def __getitem__(self, index: int) -> task_lib.Batch:
    time.sleep(self.step_s)
    return self.batches[index]


def task(config: run_config.Config, step_s: float = STEP_S) -> task_lib.Task:
  made = decoder.task(config.model, config.data)
  return dataclasses.replace(made, batches=lambda shard: Slow(made.batches(shard), step_s))
