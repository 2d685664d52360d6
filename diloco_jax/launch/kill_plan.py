"""The chaos plan of a local run: the victim, time and duration of each kill. A pure function of the
config and its seed.

Times are fractions of the run's progress, not seconds, so that a plan means the same on a fast and
a slow machine. The supervisor follows the records and carries out the kills that are due.
"""

import dataclasses
import random

from diloco_jax.config import run_config


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
  """SIGKILL `victim` once `at_fraction` of the run is done; start it again `down_s` later."""

  victim: str
  at_fraction: float
  down_s: float


def plan(chaos: run_config.ChaosConfig, learners: list[str]) -> list[Kill]:
  """Returns the kills in order of time; the seed draws each victim that the config leaves open.

  >>> kill = run_config.KillConfig(at_fraction=0.5, down_s=3.0)
  >>> plan(run_config.ChaosConfig(enabled=True, kills=[kill]), ["l0"])
  [Kill(victim='l0', at_fraction=0.5, down_s=3.0)]
  """
  if not chaos.enabled:
    return []
  draw = random.Random(chaos.seed)
  kills = [
    Kill(
      victim=kill.victim or draw.choice(learners), at_fraction=kill.at_fraction, down_s=kill.down_s
    )
    for kill in chaos.kills
  ]
  return sorted(kills, key=lambda kill: kill.at_fraction)


def due(kills: list[Kill], progress: float) -> tuple[list[Kill], list[Kill]]:
  """Splits the kills into (due at this progress, still to come)."""
  return (
    [kill for kill in kills if kill.at_fraction <= progress],
    [kill for kill in kills if kill.at_fraction > progress],
  )
