"""What a month of failures, an outer step after many deaths, and a simulated hour cost.

    python scripts/benchmarks/goodput.py        # about three minutes on one core

Prints CPU seconds of a month of islands alone; the syncer machine's time for an outer step after 10
and after 10,000 deaths; and events per second of a world with all checkers in its first and in its
sixtieth minute, measured in turns.
"""

import functools
import pathlib
import statistics
import sys
import time

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.proof.checks import checkers as checkers_lib
from diloco_jax.proof.goodput import islands, machines
from diloco_jax.proof.sim import hardware
from diloco_jax.proof.sim import world as world_lib
from diloco_jax.proof.virtual import no_arrays
from diloco_jax.proof.virtual import world as virtual_world
from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import observers

_DEATHS = flags.DEFINE_integer('deaths', 10_000, 'of learners')
_MINUTES = flags.DEFINE_integer('minutes', 60, 'of the world with all checkers')
HOURS = 30 * 24
SECOND = hardware.SECOND
SAMPLES = 100  # outer steps
ROUNDS = 5


def month(chips: int, learners: int) -> None:
  began = time.process_time()
  fleet = islands.alone(hardware.of_chips(chips / learners), learners, HOURS)
  seconds = time.process_time() - began
  print(
    f'a month of {chips:,} chips with {learners} learners: {seconds:.1f} s, '
    f'goodput {fleet.goodput:.1%}, uptime {fleet.uptime():.2%}'
  )


class _OuterSteps(observers.Observer):
  """Times the turns of the syncer that decide and end outer steps."""

  def __init__(self):
    self.times_ns: list[int] = []

  def watch(self, syncer: virtual_world.Syncer) -> None:
    self._handle = syncer.machine.handle
    syncer.machine.handle = self._timed

  def _timed(self, now_ns: int, event: events.Event) -> list[actions.Action]:
    began_ns = time.process_time_ns()
    out = self._handle(now_ns, event)
    took_ns = time.process_time_ns() - began_ns
    if isinstance(event, events.MergeDone) or any(isinstance(a, actions.Merge) for a in out):
      self.times_ns.append(took_ns)
    return out

  def median_us(self) -> float:
    return statistics.median(self.times_ns[-SAMPLES:]) / 1e3


def deaths(count: int) -> None:
  """Two learners, one of which dies again and again."""
  sizes, timed = (64,) * 4, _OuterSteps()
  config = machines.settings(2, fragments=4, period=4, save_syncs=0)
  world = virtual_world.World(config, no_arrays.Model('{}', sizes, sizes, sizes, 64), 0, ())
  timed.watch(world.syncer)
  world.start('l0')
  found = {}
  for number in range(1, count + 1):
    world.start('l1')
    world.run(world.now_ns + SECOND)
    world.end(world.learners['l1'])
    world.run(world.now_ns + SECOND // 10)
    if number in (10, count):
      world.run(world.now_ns + SAMPLES * SECOND // 10)
      found[number] = timed.median_us()
  few, many = found.values()
  print(f'an outer step after {tuple(found)} deaths: {few:.0f} and {many:.0f} us: {many / few:.2f}')


class _World:
  """A world with all checkers; `minute` runs the next and returns its events per second."""

  def __init__(self):
    config = machines.settings(4, fragments=6, period=6, save_syncs=100)
    self._count = observers.Count()
    watchers = (self._count, checkers_lib.Checkers(config))
    self._world = world_lib.World(config, 0, watchers)
    for which in range(config.learners):
      island = self._world.island(f'l{which}')
      island.step_ns, island.noise = SECOND, 200
      self._world.start(f'l{which}')

  def minute(self) -> float:
    before, began = self._count.events, time.process_time()
    self._world.run(self._world.now_ns + 60 * SECOND)
    return (self._count.events - before) / (time.process_time() - began)


def hour(minutes: int) -> None:
  old = _World()
  for _ in range(minutes - 1):
    old.minute()
  rates = [(_World().minute(), old.minute()) for _ in range(ROUNDS)]
  first, last = map(statistics.median, zip(*rates))
  print(
    f'{first:,.0f} events/s in the first minute, {last:,.0f} in minute {minutes}: '
    f'{last / first:.2f}'
  )


def main(argv: list[str]) -> None:
  del argv
  for part in (
    functools.partial(month, 2_400_000, 8),
    functools.partial(month, 10_000_000, 512),
    functools.partial(deaths, _DEATHS.value),
    functools.partial(hour, _MINUTES.value),
  ):
    part()
    sys.stdout.flush()


if __name__ == '__main__':
  app.run(main)
