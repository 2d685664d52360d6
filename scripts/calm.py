"""A run without faults in the simulator, whose cost is measured and tested."""

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import arrays, seeds
from diloco_jax.verification.sim import world as world_lib


def run(config: config_lib.ProtocolConfig) -> int:
  """Runs without faults, with unequal steps and all checkers; returns the number of events."""
  count, checkers = observers.Count(), checkers_lib.Checkers(config)
  world = world_lib.World(config, watchers=(count, checkers))
  for which in range(config.learners):
    world.island(f'l{which}').noise = 200
    world.start(f'l{which}')
  world.run(seeds.CALM_NS, done=lambda: world.finished)
  arrays.claim(world.finished, 'A run ends.', world.stuck())
  checkers.finished(world.now_ns)
  return count.events
