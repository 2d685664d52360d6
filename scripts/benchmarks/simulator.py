"""The speed of the simulator, and the cost of an event with many learners.

    python scripts/benchmarks/simulator.py        # about a minute on one core

Prints seeds per second on one core (with checkers, as in the tests), and events per second with 8
and with 512 learners in a run without faults: medians of several runs, and their ratio on this
host.
"""

import pathlib
import statistics
import sys
import time

from absl import app

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.proof.sim import seeds
from diloco_jax.protocol import config as config_lib

SEEDS = 200
ROUNDS = 5
STEPS = {8: 600, 512: 10}  # about as many events in both


def run_world(learners: int) -> int:
  """Runs without faults under all checkers; returns the number of events."""
  return seeds.run_calm(
    config_lib.ProtocolConfig(
      learners=learners,
      fragments=6,
      period=6,
      overlap=2,
      quorum=learners // 2,
      total_steps=STEPS[learners],
    )
  )


def rate(work) -> float:
  """Units of work per second."""
  began = time.perf_counter()
  units = work()
  return units / (time.perf_counter() - began)


def main(argv: list[str]) -> None:
  del argv

  def many_seeds() -> int:
    for seed in range(SEEDS):
      assert seeds.run_seed(seed).violation is None, seed
    return SEEDS

  print(f'{rate(many_seeds):.0f} seeds/s on one core')
  few, many = [], []
  for _ in range(ROUNDS):
    few.append(rate(lambda: run_world(8)))
    many.append(rate(lambda: run_world(512)))
  few, many = statistics.median(few), statistics.median(many)
  print(f'{few:,.0f} events/s with 8 learners, {many:,.0f} with 512: ratio {many / few:.2f}')


if __name__ == '__main__':
  app.run(main)
