"""The demo's model against data-parallel training at equal trained tokens (headline.md)."""

import copy

from diloco_jax.configs import stdlib_lm
from diloco_jax.proof.virtual import virtual
from diloco_jax.train import config as train_config
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

RATES = (1.2e-2, 2.4e-2)
METHODS = ('data-parallel', 'decoupled')


def arm(method: str, rate: float, seed: int, quick: bool, best: float) -> arms.Arm:
  """Muon, and the outer optimizer that the studies recommend; the rest as in the demo without its
  kill. `best`: the rate of the data-parallel arm to compare with; 0: none."""
  config = copy.deepcopy(stdlib_lm.get_config('decoupled'))
  steps = 100 if quick else config.train.steps
  config.optimizer = train_config.OptimizerConfig(
    name='muon', learning_rate=rate, warmup_steps=steps // 20
  )
  config.mesh.data = 1  # a core
  config.data.seed = config.train.seed = seed
  config.data.eval_batches = 16
  config.sync.outer = type(config.sync)().outer
  config.train.steps, config.train.eval_every = steps, steps // 10
  config.train.checkpoint_every_steps = 0
  alone = method == 'data-parallel'
  return arms.Arm(
    study='headline',
    name=name(method, rate),
    config=virtual.data_parallel(config) if alone else config,
    kind='alone' if alone else 'train',
    against=name(METHODS[0], best) if best else '',
  )


def name(method: str, rate: float) -> str:
  """
  >>> name('decoupled', 0.012)
  'decoupled, muon 0.012'
  """
  return f'{method}, muon {rate:g}'


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Each method at its best inner rate: found with seed 0, then the other seeds."""
  planned, baseline = [], 0.0
  for method in METHODS:
    make = lambda rate, m=method, b=baseline: arm(m, rate, 0, quick, b)
    if quick:
      found, best = [make(RATES[0])], RATES[0]
    else:
      found, best = study_lib.best_rate(make, RATES, book)
    planned += found
    if best and method == METHODS[0]:
      baseline = best
    if best:
      planned += [arm(method, best, seed, quick, baseline) for seed in study_lib.seeds(quick)[1:]]
  return planned


STUDY = study_lib.Study(
  name='headline', title="The demo's model against data-parallel training", plan=plan
)
