"""An event costs the same with many learners as with few: counted in calls, not in seconds.

How fast it is: scripts/benchmarks/simulator.py.
"""

import sys

from diloco_jax.proof.sim import seeds
from diloco_jax.protocol import config as config_lib


def calls_per_event(learners: int, steps: int) -> float:
  """Python and built-in calls of a whole run, including the checkers, per event."""
  config = config_lib.ProtocolConfig(
    learners=learners, fragments=4, period=4, overlap=2, quorum=learners // 2, total_steps=steps
  )
  calls = 0

  def profile(frame, event, argument):
    nonlocal calls
    calls += event in ('call', 'c_call')

  sys.setprofile(profile)
  try:
    events = seeds.run_calm(config)
  finally:
    sys.setprofile(None)
  return calls / events


def test_128_learners_cost_at_most_twice_the_calls_of_8():
  few, many = calls_per_event(8, steps=20), calls_per_event(128, steps=4)
  assert many < 2 * few, (few, many)
