"""The conductor of the tests: a run of `tiny`, or of another variant, with some fields changed.

Its learners are paced (experiments/side_by_side/floor.py), so that they leave the CPU to processes
that start: a run of kills consists of little else.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import cli
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.report import records as records_lib
from diloco_jax.storage import tapes
from diloco_jax.verification.faults import conductor as conductor_lib
from diloco_jax.verification.replay import tape_files
from experiments.side_by_side import floor
from tests import programs

# For runs that the test ends, with as little other work as possible.
ENDLESS = {'train.steps': 1_000_000, 'train.log_every': 1_000, 'train.eval_every': 0}

STEP_S = 0.06  # a step of a paced learner takes at least this time
PACED = floor.__name__  # the module instead of `diloco_jax learner`
_LEARNER = [*cli.PROGRAM, 'learner']


def pace(
  program: supervisor_lib.LocalProgram, step_s: float = STEP_S
) -> supervisor_lib.LocalProgram:
  """A learner's program with a floor under the time of its steps; another one as it is."""
  if list(program.command[: len(_LEARNER)]) != _LEARNER:
    return program
  words = program.command[len(_LEARNER) :]
  command = [sys.executable, '-X', 'utf8', '-m', PACED, *words, f'--floor_s={step_s}']
  return dataclasses.replace(program, command=command)


def flags(overrides: dict[str, Any], variant: str = 'tiny') -> list[str]:
  """The flags of every program of such a run."""
  return [
    f'--config=stdlib_lm:{variant}',
    *(f'--config.{name}={value}' for name, value in overrides.items()),
  ]


class Run(conductor_lib.Run):
  """A finished run."""

  def tapes(self) -> list[tapes.ProcessTape]:
    return tape_files.find(self.workdir)

  def lost_versions(self) -> list[int]:
    """For each recovery of the syncer: the number of adopted versions that it did not have."""
    seen: dict[int, int] = {}
    lost = []
    for _, fact in self.facts:
      if fact['name'] == 'adopted':
        seen[fact['fragment']] = max(seen.get(fact['fragment'], 0), fact['version'])
      elif fact['name'] == 'recovered':
        lost.append(sum(max(0, version - fact['versions'][p]) for p, version in seen.items()))
    return lost


class Conductor(conductor_lib.Conductor):
  """Starts a run of a variant; `overrides`: fields of its config."""

  def __init__(
    self,
    workdir: pathlib.Path,
    recorder: records_lib.Recorder,
    overrides: dict[str, Any],
    change: Callable[[supervisor_lib.LocalProgram], supervisor_lib.LocalProgram] = pace,
    variant: str = 'tiny',
  ):
    config = stdlib_lm.get_config(variant)
    config.sync.learners = overrides.get('sync.learners', config.sync.learners)
    super().__init__(workdir, recorder, config, flags(overrides, variant), change)
    self._awaited: list[Callable[[], object]] = []

  async def until(self, condition: Callable[[], object], patience_s: float | None = None) -> bool:
    """Also remembers for `unmet` what it waits for."""
    self._awaited.append(condition)
    held = await super().until(condition, patience_s)
    self._awaited.remove(condition)
    return held

  def unmet(self) -> str:
    """What the run still waits for, and the last lines of its processes."""
    waits = '\n'.join(map(programs.source, self._awaited))
    return '\n'.join(['still waits for:', waits, *self.said[-programs.LAST :]])

  def merges(self, learner: str, at: int = 0) -> int:
    """Outer steps in which a learner participated, from the `at`-th of all facts on."""
    return sum(learner in fact['participants'] for fact in self.since('syncer', 'synced', at))


Conducted = TypeVar('Conducted', bound=Conductor)


def play(
  workdir: pathlib.Path,
  make: Callable[[pathlib.Path, records_lib.Recorder], Conducted],
  deadline_s: float,
) -> tuple[Conducted, Run]:
  """Conducts a run in a new folder to its end."""
  conductors: list[Conducted] = []

  def keep(workdir: pathlib.Path, recorder: records_lib.Recorder) -> Conducted:
    conductors.append(make(workdir, recorder))
    return conductors[0]

  try:
    conducted, left = conductor_lib.play(workdir, keep, deadline_s)
  except TimeoutError:
    raise AssertionError(f'not within {deadline_s:g} s: {conductors[0].unmet()}') from None
  return conducted, Run(**vars(left))
