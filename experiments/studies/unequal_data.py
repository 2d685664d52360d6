"""Learners whose data differ: each has a region of the corpus, much of it or little
(unequal_data.md)."""

import dataclasses

from diloco_jax.verification import plans
from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms, regions
from experiments.studies.lib import study as study_lib

STEPS = 600
SEEDS = (0, 1, 2)
ALL, LITTLE = 'data-parallel, all text', 'data-parallel, the four texts'
WINDOWS = (4800, 2400, 1200, 600)  # of a learner's own text; it trains on 8 in each step
AWAY = 150, 300  # l0, which has most, has no network from here on, for so long


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Of the whole corpus: random samples, or a region for each learner. Then of little text of their
  own, of unequal amounts, also with a learner that is offline for half of the run."""
  del book
  return [arm for seed in SEEDS[: 1 if quick else None] for arm in _of_seed(seed, quick)]


def _of_seed(seed: int, quick: bool) -> list[arms.Arm]:
  def make(name: str, against: str, local: bool = True, task: str = '', faults=None) -> arms.Arm:
    where = arms.USUAL | ({'faults': faults} if faults else {})
    arm = arms.decoupled(
      'unequal_data', name, quick, seed=seed, steps=STEPS, against=against, where=where
    )
    arm.config.data.shards, arm.config.data.local = 4, local
    arm.config.task = f'{regions.__name__}:{task}' if task else arm.config.task
    return arm

  def alone(name: str, arm: arms.Arm, of: int) -> arms.Arm:
    """One learner for as many steps as each of four."""
    config = dataclasses.replace(
      arm.config, task=f'{regions.__name__}:task(windows={WINDOWS}, of={of})'
    )
    return dataclasses.replace(arm, name=name, config=config, kind='alone')

  samples = make('samples of all text', ALL, local=False)
  region = make('a region each', ALL, task='task')
  own = make('a little text each', LITTLE, task=f'task(windows={WINDOWS})')
  step_ns = own.where['hardware'].ns(1)
  quarter = (own.config.train.steps / STEPS) * step_ns
  begins, lasts = (round(steps * quarter) for steps in AWAY)
  gone = plans.Fault(at_ns=begins, kind='partition', node='l0', for_ns=lasts)
  offline = make(
    'the same, l0 offline for half of the run',
    LITTLE,
    task=f'task(windows={WINDOWS})',
    faults=conditions.Faults(plan=(gone,)),
  )
  pooled = alone('', own, -1)
  return [
    arms.data_parallel(samples, ALL),
    samples,
    region,
    arms.data_parallel(pooled, LITTLE),
    own,
    offline,
    *(alone(f'alone, {count} windows', own, which) for which, count in enumerate(WINDOWS)),
  ]


STUDY = study_lib.Study(name='unequal_data', title='Learners whose data differ', plan=plan)
