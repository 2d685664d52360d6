"""The conductor of the tests: a run of `tiny`, or of another variant, with some fields changed."""

import pathlib
from typing import Any, Callable

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.proof.faults import conductor
from diloco_jax.report import records
from experiments.configs import stdlib_lm

Run, play = conductor.Run, conductor.play
# Of runs that are ended from outside, with as little else to do as possible.
ENDLESS = {'train.steps': 1_000_000, 'train.log_every': 1_000, 'train.eval_every': 0}


def flags(overrides: dict[str, Any], variant: str = 'tiny') -> list[str]:
  """Of every program of such a run."""
  return [f'--config=experiments/configs/stdlib_lm.py:{variant}',
          *(f'--config.{name}={value}' for name, value in overrides.items())]


class Conductor(conductor.Conductor):
  """Starts a run of a variant; `overrides`: fields of its config."""

  def __init__(
    self, workdir: pathlib.Path, recorder: records.Recorder, overrides: dict[str, Any],
    change: Callable[[supervisor_lib.Program], supervisor_lib.Program] = lambda program: program,
    variant: str = 'tiny', standby: bool = False,
  ):
    config = stdlib_lm.get_config(variant)
    config.sync.learners = overrides.get('sync.learners', config.sync.learners)
    super().__init__(workdir, recorder, config, flags(overrides, variant), change, standby)
