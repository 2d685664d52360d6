"""Islands and their failures, under learners, alone, and as formulas.

Without processes an island is always able to train, so it shows what learners that never wait would
get: months of millions of chips, in seconds. Learners of Decoupled DiLoCo never wait (invariant
L1), so both agree; machines.py measures that on the same failures.
"""

import math
from collections.abc import Sequence

from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import hardware

SECOND = engine_lib.SECOND


class Fleet:
  """What islands did since `begin`, weighted by chips (all have the same number)."""

  def __init__(self, engine: engine_lib.Engine, islands: Sequence[hardware.Island]):
    self._engine, self._islands = engine, tuple(islands)
    for island in self._islands:
      island.changed = self._changed
    self.begin()

  def begin(self) -> None:
    self._begun_ns = self._since_ns = self._engine.now_ns
    self._running = sum(island.running for island in self._islands)
    self._times_ns = [0] * (len(self._islands) + 1)  # by the number of islands that run
    for island in self._islands:
      island.settle()
      island.able = island.busy = 0

  def _changed(self, running: bool) -> None:
    self._times_ns[self._running] += self._engine.now_ns - self._since_ns
    self._since_ns = self._engine.now_ns
    self._running += 1 if running else -1

  @property
  def goodput(self) -> float:
    """The share of the chips' time in which they could train."""
    return self._share('able')

  @property
  def busy(self) -> float:
    """The share of the chips' time in which they trained."""
    return self._share('busy')

  def _share(self, name: str) -> float:
    for island in self._islands:
      island.settle()
    shares = [getattr(island, name) / island.count for island in self._islands]
    return sum(shares) / len(shares) / (self._engine.now_ns - self._begun_ns)

  def uptime(self, quorum: int = 1) -> float:
    """The share of time in which at least `quorum` islands ran."""
    times_ns = self._all_times_ns()
    return sum(times_ns[quorum:]) / sum(times_ns)

  @property
  def paused(self) -> float:
    """The share of time in which an island did not run, in the mean."""
    times_ns = self._all_times_ns()
    running = sum(count * time_ns for count, time_ns in enumerate(times_ns))
    return 1 - running / len(self._islands) / sum(times_ns)

  def _all_times_ns(self) -> list[int]:
    times_ns = list(self._times_ns)
    times_ns[self._running] += self._engine.now_ns - self._since_ns
    return times_ns


def alone(
  slices: hardware.Slices,
  learners: int,
  hours: float,
  seed: int = 0,
  warm_up_s: int = 0,
) -> Fleet:
  """Equal islands without processes, for so many hours.

  Args:
    slices: of each island.
    warm_up_s: passes before.
  """
  engine = engine_lib.Engine()
  fleet = Fleet(
    engine, [hardware.island(engine, seed, f'l{which}', slices) for which in range(learners)]
  )
  engine.run(warm_up_s * SECOND)
  fleet.begin()
  engine.run(engine.now_ns + round(hours * 3_600 * SECOND))
  return fleet


def elastic_goodput(slices: hardware.Slices) -> float:
  """Goodput of an island that goes on without its failed slices (verification/sim/hardware.py).

  With failures at rate `n / MTBI` while the island runs, 1 / (share of time it runs) is 1 plus the
  pauses per second of running: a downscale per failure, and an upscale per group of healthy slices
  that no other pause takes in before their hold-off ends. It assumes independent failures, an
  exponential recovery, and few missing slices.
  """
  rate = slices.chips / slices.mtbi_s
  down, mean = slices.downscale_s, slices.recovery_s
  early = 1 - math.exp(-down / mean)  # healthy before its own downscale ends
  alone = math.exp(-rate * slices.hold_off_s)
  runs = 1.0
  for _ in range(200):
    share = (1 - early) * runs
    pauses = rate * down + rate * slices.upscale_s * share * alone / (1 + share * (1 - alone))
    runs = (runs + 1 / (1 + pauses)) / 2
  missing = slices.chips / slices.count / slices.mtbi_s * (mean - early * down)
  return runs * (1 - missing)


def rigid_goodput(slices: hardware.Slices) -> float:
  """Goodput of a job that any failure stops for a recovery and a restart."""
  trains = slices.mtbi_s / slices.chips + slices.spared_s
  return trains / (trains + slices.recovery_s + slices.upscale_s)
