"""What an outer step makes of learners that have trained apart for many periods (outage.md).

    python -m experiments.studies.outage.apart --seed=0

One learner trains for some steps; then it and three copies of it train on, each on its own shard.
After so many periods the outer step of a run merges all four, one fragment after the other.
"""

import argparse
from collections.abc import Sequence

import jax
import numpy as np

from diloco_jax.config import build
from diloco_jax.numerics import fragments
from diloco_jax.train import island as island_lib
from diloco_jax.verification.virtual import arrays
from experiments.studies import outage
from experiments.studies.lib import arms, in_step

BEFORE = 600  # steps of the one learner
STEPS = 55_800  # of the run, for the learning rate, which is near its peak all the time
PERIODS = (16, 50, 150, 500)
TITLES = ('periods', 'learners', 'parameters averaged', 'merged', 'highest while merging')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seed', type=int, default=0)
  seed = parser.parse_args().seed
  arms.get_ready()
  config = outage.arm('', STEPS, seed).config
  config.data.batch_size, config.optimizer.warmup_steps = 4, 60
  assembled = build.assemble(config)
  first = arrays.fresh_island(assembled)
  for clock in range(BEFORE):
    first.step(clock)
  anchor = jax.device_get(first.params)
  learners = [first, *(first.twin() for _ in range(3))]
  print(f'before: {first.evaluate():.4f}')
  for shard, learner in enumerate(learners):
    learner.read_from(4 * shard, BEFORE)
  show(TITLES)
  show(['---'] * len(TITLES))
  clock = BEFORE
  for periods in PERIODS:
    while clock < BEFORE + periods * outage.PERIOD:
      for learner in learners:
        learner.step(clock)
      clock += 1
    show([str(periods), *measure(assembled, anchor, learners, clock)])


def show(cells: Sequence[str]) -> None:
  print('|', ' | '.join(cells), '|', flush=True)


def measure(
  assembled: build.Assembly, anchor: dict, learners: list[island_lib.Island], clock: int
) -> list[str]:
  """The losses after so many steps."""
  held_out, layout = learners[0], assembled.layout
  alone = [one.evaluate() for one in learners]
  mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *(one.params for one in learners))
  theta = arrays.fresh_theta(assembled)
  flat = lambda params: [
    np.asarray(fragments.gather(layout, p, params)) for p in range(layout.num_fragments)
  ]
  anchors, locals_ = flat(anchor), [flat(one.params) for one in learners]
  theta.restore(theta.arrays() | {'masters': anchors, 'published': anchors}, theta.versions)
  steps = clock - BEFORE
  tokens, seen = steps * held_out.tokens_per_step, []
  for p, anchor_N in enumerate(anchors):
    in_step.merge(assembled, theta, p, anchor_N, [one[p] for one in locals_], tokens, steps)
    seen.append(held_out.evaluate(theta.params()))
  losses = [held_out.evaluate(mean), seen[-1], max(seen)]
  return [f'{min(alone):.4f} to {max(alone):.4f}', *(f'{one:.4f}' for one in losses)]


if __name__ == '__main__':
  main()
