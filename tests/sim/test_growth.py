"""An event costs the same with many learners as with few: counted in calls, not in seconds.

How fast it is: scripts/benchmarks/simulator.py.
"""

import sys

from diloco_jax.protocol import config as config_lib
from diloco_jax.sim import checkers as checkers_lib
from diloco_jax.sim import observers
from diloco_jax.sim import world as world_lib


class Count(observers.Observer):
  """Turns of machines."""

  def __init__(self):
    self.events = 0

  def saw(self, life, now_ns, event, out) -> None:
    self.events += 1


def calls_per_event(learners: int, steps: int) -> float:
  """Python and built-in calls of a whole run, checkers included, for each event."""
  config = config_lib.ProtocolConfig(
    learners=learners, fragments=4, period=4, overlap=2, quorum=learners // 2, total_steps=steps)
  count, checkers = Count(), checkers_lib.Checkers(config)
  world = world_lib.World(config, watchers=[count, checkers])
  for which in range(learners):
    world.island(f'l{which}').noise = 200
    world.start(f'l{which}')
  calls = 0

  def profile(frame, event, argument):
    nonlocal calls
    calls += event in ('call', 'c_call')

  sys.setprofile(profile)
  try:
    world.run(1_000 * config_lib.SECOND_NS, done=lambda: world.finished)
  finally:
    sys.setprofile(None)
  assert world.finished
  checkers.finished(world.now_ns)
  return calls / count.events


def test_512_learners_cost_at_most_twice_the_calls_of_8():
  few, many = calls_per_event(8, steps=40), calls_per_event(512, steps=4)
  assert many < 2 * few, (few, many)
