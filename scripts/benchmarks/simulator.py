"""The speed of virtual time: of the simulator, of months of failures, of training with real arrays.

    python scripts/benchmarks/simulator.py [--quick] [--json=FILE]     # about five minutes

Medians of rounds in which the two sides of each ratio take turns:

  seeds/s              of one core, with all checkers, as in the tests
  events/s             with 512 learners, and of them to those with 8, without faults
  events/s, old world  in the last minute of a simulated hour with all checkers, and to the first
  outer step, us       of the syncer's machine after many deaths, and to those after 10
  month, s             of CPU: a month of 2.4 million chips with 8 learners
  steps/s, virtual     inner steps of all learners in virtual time with real arrays, for a CPU
                       second, and to those of an island alone: what the protocol costs there
"""

import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import hardware, no_arrays, seeds
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import arrays, conditions, virtual
from scripts import calm as calm_run
from scripts.benchmarks import measured

SECOND = hardware.SECOND
STEPS = {8: 600, 512: 10}  # by learners: about as many events in both
FEW_DEATHS, SAMPLES = 10, 100  # SAMPLES: outer steps
CHIPS, HOURS = 2_400_000, 30 * 24


def rate(work: Callable[[], int]) -> float:
  """Units of work for a CPU second."""
  began_s = time.process_time()
  units = work()
  return units / (time.process_time() - began_s)


def settings(learners: int, **more: int) -> config_lib.ProtocolConfig:
  """Of a run without an end that saves by its outer steps, if at all."""
  return config_lib.ProtocolConfig(learners=learners, total_steps=10**6, save_steps=0, **more)


def many_seeds(count: int) -> int:
  for seed in range(count):
    assert seeds.run_seed(seed).violation is None, seed
  return count


def calm(learners: int) -> int:
  """Runs without faults under all checkers; returns the number of events."""
  return calm_run.run(
    config_lib.ProtocolConfig(
      learners=learners,
      fragments=6,
      period=6,
      overlap=2,
      quorum=learners // 2,
      total_steps=STEPS[learners],
    )
  )


class OldWorld:
  """A world with all checkers; `minute` runs the next one and returns its events."""

  def __init__(self):
    config = settings(4, fragments=6, period=6, save_syncs=100)
    self._count = observers.Count()
    watchers = (self._count, checkers_lib.Checkers(config))
    self._world = world_lib.World(config, 0, watchers)
    for which in range(config.learners):
      island = self._world.island(f'l{which}')
      island.step_ns, island.noise = SECOND, 200
      self._world.start(f'l{which}')

  def minute(self) -> int:
    before = self._count.events
    self._world.run(self._world.now_ns + 60 * SECOND)
    return self._count.events - before


def deaths(count: int) -> tuple[float, float]:
  """CPU time of the syncer's machine for an outer step in us, after few deaths and after `count`:
  of two learners, one dies again and again."""
  times_ns = []
  config = settings(2, fragments=4, period=4)
  world = world_lib.World(config, model=no_arrays.equal(config.fragments))
  handle = world.syncer.machine.handle

  def timed(now_ns: int, event: events.Event) -> list[actions.Action]:
    began_ns = time.process_time_ns()
    out = handle(now_ns, event)
    took_ns = time.process_time_ns() - began_ns
    if isinstance(event, events.MergeDone) or any(isinstance(one, actions.Merge) for one in out):
      times_ns.append(took_ns)
    return out

  world.syncer.machine.handle = timed
  world.start('l0')
  found = {}
  for number in range(1, count + 1):
    world.start('l1')
    world.run(world.now_ns + SECOND)
    world.end(world.learners['l1'])
    world.run(world.now_ns + SECOND // 10)
    if number in (FEW_DEATHS, count):
      world.run(world.now_ns + SAMPLES * SECOND // 10)
      found[number] = statistics.median(times_ns[-SAMPLES:]) / 1e3
  return found[FEW_DEATHS], found[count]


def month() -> float:
  engine, slices = engine_lib.Engine(), hardware.of_chips(CHIPS / 8)
  for which in range(8):
    hardware.island(engine, 0, f'l{which}', slices)
  began_s = time.process_time()
  engine.run(HOURS * 3_600 * SECOND)
  return time.process_time() - began_s


class Training:
  """The demo's model with four learners in virtual time, and one island of it alone."""

  def __init__(self, steps: int):
    self._config = stdlib_lm.get_config('decoupled')
    self._config.train.steps, self._config.train.eval_every = steps, 0
    self._config.mesh.data = 1
    self._island = arrays.fresh_island(build.assemble(self._config))

  def virtual(self) -> int:
    result = virtual.train(self._config, **conditions.delays('wan', lognormal=0.3))
    return sum(result.steps.values())

  def alone(self) -> int:
    steps = self._config.train.steps * self._config.sync.learners
    for clock in range(steps):
      self._island.step(clock)
    return steps


def main() -> None:
  flags = measured.flags(__doc__)
  rounds, count, many, minutes, steps = (
    (2, 50, 1_000, 10, 48) if flags.quick else (5, 200, 10_000, 60, 240)
  )
  found: dict[str, dict[str, float]] = {}
  ratios: dict[str, dict[str, float]] = {}

  def compare(name: str, sides: list[tuple[float, float]]) -> None:
    """Of (other, this) in every round."""
    found[name] = measured.spread([this for _, this in sides])
    ratios[name] = measured.spread([this / other for other, this in sides])
    _print(name, found[name], ratios[name])

  found['seeds/s'] = measured.spread([rate(lambda: many_seeds(count)) for _ in range(rounds)])
  _print('seeds/s', found['seeds/s'])
  sides = [(rate(lambda: calm(8)), rate(lambda: calm(512))) for _ in range(rounds)]
  compare('events/s', sides)
  old = OldWorld()
  for _ in range(minutes - 1):
    old.minute()
  compare(
    'events/s, old world', [(rate(OldWorld().minute), rate(old.minute)) for _ in range(rounds)]
  )
  compare('outer step, us', [deaths(many)])
  found['month, s'] = measured.spread([month()])
  _print('month, s', found['month, s'])
  training = Training(steps)
  training.virtual(), training.alone()  # compile
  sides = [(rate(training.alone), rate(training.virtual)) for _ in range(rounds)]
  compare('steps/s, virtual', sides)
  measured.write(flags.json, {'figures': found, 'ratios': ratios})


def _print(name: str, one: dict[str, float], ratio: dict[str, Any] | None = None) -> None:
  beside = f', ratio {measured.text(ratio)}' if ratio else ''
  print(f'{name:20} {measured.text(one)}{beside}', flush=True)


if __name__ == '__main__':
  main()
