"""How far DiLoCo, Streaming and Decoupled DiLoCo are behind data-parallel training (parity.md)."""

from diloco_jax.config import run_config
from diloco_jax.proof.virtual import virtual
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

RATES = {'muon': (1.2e-2, 2.4e-2), 'adamw': (6e-3, 1.2e-2)}
METHODS = ('data-parallel', 'decoupled', 'lone', 'streaming', 'diloco')


def config(method: str, optimizer: str, rate: float, seed: int, quick: bool) -> run_config.Config:
  """The config of a method with the tokens of four learners; a lone learner has a quarter."""
  made = arms.small(optimizer, rate, steps=300 if quick else 1000, seed=seed)
  sync = made.sync
  match method:
    case 'data-parallel':
      made = virtual.data_parallel(made)
    case 'lone':
      sync.learners = made.data.shards = 1
    case 'streaming':
      sync.quorum, sync.max_lag = sync.learners, sync.overlap
    case 'diloco':
      sync.quorum, sync.fragments, sync.overlap = sync.learners, 1, 0
  return made


def arm(method: str, optimizer: str, rate: float, seed: int, quick: bool, best: float) -> arms.Arm:
  """`best`: the rate of the data-parallel arm to compare with; 0: none."""
  return arms.Arm(
    study='parity',
    name=name(method, optimizer, rate),
    config=config(method, optimizer, rate, seed, quick),
    kind='alone' if method in ('data-parallel', 'lone') else 'train',
    against=name('data-parallel', optimizer, best) if best else '',
  )


def name(method: str, optimizer: str, rate: float) -> str:
  """
  >>> name('decoupled', 'muon', 0.006)
  'decoupled, muon 0.006'
  """
  return f'{method}, {optimizer} {rate:g}'


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Every method at its best inner rate: found with seed 0, then the other seeds."""
  planned = []
  for optimizer in ('muon',) if quick else RATES:
    baseline = 0.0
    for method in METHODS[:3] if quick else METHODS:
      rates = RATES[optimizer]
      make = lambda rate, m=method, o=optimizer, b=baseline: arm(m, o, rate, 0, quick, b)
      if quick:
        found, best = [make(rates[-1])], rates[-1]
      else:
        found, best = study_lib.best_rate(make, rates, book)
      planned += found
      if best and method == 'data-parallel':
        baseline = best
      if best:
        others = study_lib.seeds(quick)[1:]
        planned += [arm(method, optimizer, best, seed, quick, baseline) for seed in others]
  return planned


STUDY = study_lib.Study(
  name='parity', title='Against data-parallel training at equal trained tokens', plan=plan
)
