"""The task of `tiny` with slow data, for tests of commands that start a run.

Its learners wait for their batches, so they leave the CPU to processes that start, as the paced
ones of conductor.py do. Those of the task `gated` wait long, until the file $GATE exists: the test
says when the run goes on to its end.
"""

import dataclasses
import os
import pathlib
import time

from diloco_jax.config import run_config
from diloco_jax.train import decoder
from diloco_jax.train import task as task_lib

STEP_S = 0.04
GATED_S = 0.5
FLAG = f'--config.task={pathlib.Path(__file__).resolve()}:task'
GATED = f'{FLAG.removesuffix("task")}gated'


@dataclasses.dataclass
class Slow:
  """Batches that take `step_s` each; without the file `gate` GATED_S."""

  batches: task_lib.Batches
  step_s: float
  gate: pathlib.Path = pathlib.Path('/')

  def __getitem__(self, index: int) -> task_lib.Batch:
    time.sleep(self.step_s if self.gate.exists() else GATED_S)
    return self.batches[index]


def task(
  config: run_config.Config, step_s: float = STEP_S, gate: pathlib.Path = pathlib.Path('/')
) -> task_lib.Task:
  base = decoder.task(config.model, config.data)
  return dataclasses.replace(base, batches=lambda shard: Slow(base.batches(shard), step_s, gate))


def gated(config: run_config.Config) -> task_lib.Task:
  return task(config, gate=pathlib.Path(os.environ['GATE']))
