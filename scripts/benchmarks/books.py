"""The cost of the books of a long run: an outer step after many deaths, an event after an hour.

    python scripts/benchmarks/books.py              # 10,000 deaths, 60 simulated minutes
    python scripts/benchmarks/books.py --quick      # 500 deaths, 3 minutes

Both are ratios of CPU time in one process, in turns: of a world that has run for long and of young
ones. The first is of the syncer's machine alone (eight learners, P = H = 24, a death every second);
the second of the world with its disks and all checkers, over a wide-area network. It saves every
100 outer steps, which also shortens its log, as the configs of real runs do.
"""

import gc
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.protocol import actions
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine, no_arrays
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import conditions
from scripts.benchmarks import measured

LEARNERS = 8
SECOND = engine.SECOND
OUTER_STEPS = 240  # of a turn
SLICE_S = 6  # of a turn


class Deaths:
  """A world without disks in which learners die; the time in its syncer's machine is measured."""

  def __init__(self):
    config = config_lib.ProtocolConfig(
      learners=LEARNERS, fragments=24, period=24, quorum=1, total_steps=10**6, save_steps=0
    )
    self.world = world_lib.World(config, model=no_arrays.equal(config.fragments))
    where = conditions.delays('lan', step_s=1.0, gaussian=0.02)
    names = [f'l{which}' for which in range(LEARNERS)]
    conditions.furnish(self.world, names, where['hardware'], where['network'], 1_000)
    for name in names:
      self.world.start(name)
    self.world.run(60 * SECOND)
    machine = self.world.syncer.machine
    self._spent_s, self._steps, handle = 0.0, 0, machine.handle

    def timed(now_ns, event):
      began = time.thread_time()
      out = handle(now_ns, event)
      self._spent_s += time.thread_time() - began
      self._steps += any(type(action) is actions.Merge for action in out)
      return out

    machine.handle = timed

  def die(self, deaths: int) -> None:
    for which in range(deaths):
      name = f'l{which % LEARNERS}'
      self.world.end(self.world.learners[name])
      self.world.start(name)
      self.world.run(self.world.now_ns + SECOND)
    self.world.run(self.world.now_ns + 60 * SECOND)

  def outer_step_s(self) -> float:
    """CPU time of the machine for an outer step."""
    self._spent_s, self._steps = 0.0, 0
    gc.collect()
    while self._steps < OUTER_STEPS:
      self.world.run(self.world.now_ns + SECOND)
    return self._spent_s / self._steps


class Long:
  """The world with disks and all checkers, without faults."""

  def __init__(self):
    config = config_lib.ProtocolConfig(
      learners=LEARNERS, fragments=24, period=24, quorum=1, total_steps=10**6, save_syncs=100
    )
    self._count, self._checkers = observers.Count(), checkers_lib.Checkers(config)
    self._world = world_lib.World(config, watchers=(self._count, self._checkers))
    for which in range(LEARNERS):
      island, link = self._world.island(f'l{which}'), self._world.link(f'l{which}')
      island.step_ns, island.gaussian = SECOND, 0.02
      link.up_ns = link.down_ns = 25 * engine.MS
      link.bulk_up_ns = link.bulk_down_ns = 400 * engine.MS
      self._world.start(f'l{which}')

  def run(self, seconds: int) -> tuple[int, float]:
    """Runs so long; returns events and CPU seconds."""
    events, began = self._count.events, time.thread_time()
    self._world.run(self._world.now_ns + seconds * SECOND)
    return self._count.events - events, time.thread_time() - began


def deaths(count: int, turns: int) -> dict[str, float]:
  """An outer step after so many deaths, times one after 10."""
  few, many = Deaths(), Deaths()
  few.die(10)
  many.die(count)
  pairs = [(few.outer_step_s(), many.outer_step_s()) for _ in range(turns)]
  young, old = (statistics.median(times) for times in zip(*pairs))
  ratio = measured.spread([b / a for a, b in pairs])
  print(
    f'an outer step of the machine: {1e6 * young:.0f} us after 10 deaths, {1e6 * old:.0f} us after '
    f'{count:,}: {measured.text(ratio)} times',
    flush=True,
  )
  return ratio


def minutes(last: int, turns: int) -> dict[str, float]:
  """Events/s from minute `last` on, divided by those of the first minute."""
  old = Long()
  for minute in range(1, last):
    events, spent_s = old.run(60)
    if minute % 10 == 0 or minute == 1:
      print(f'  minute {minute}: {events / spent_s:,.0f} events/s', flush=True)
  pairs = []
  for _ in range(turns):
    young = Long()
    totals = [[0, 0.0], [0, 0.0]]
    for _ in range(60 // SLICE_S):
      for one, total in zip((young, old), totals):
        events, spent_s = one.run(SLICE_S)
        total[0] += events
        total[1] += spent_s
    pairs.append([events / spent_s for events, spent_s in totals])
  rates = [statistics.median(one) for one in zip(*pairs)]
  ratio = measured.spread([b / a for a, b in pairs])
  print(
    f'the world with all checkers: {rates[0]:,.0f} events/s in the first minute, {rates[1]:,.0f} '
    f'from minute {last} on: {measured.text(ratio)}'
  )
  return ratio


def main() -> None:
  flags = measured.flags(__doc__)
  count, last, turns = (500, 3, 3) if flags.quick else (10_000, 60, 10)
  measured.write(flags.json, {'deaths': deaths(count, turns), 'minutes': minutes(last, turns)})


if __name__ == '__main__':
  main()
