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


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Every method at its best inner rate."""
  planned = []
  for optimizer in ('muon',) if quick else RATES:

    def make(method, rate, seed, against, optimizer=optimizer):
      return arms.Arm(
        study='parity',
        name=f'{method}, {optimizer} {rate:g}',
        config=config(method, optimizer, rate, seed, quick),
        kind='alone' if method in ('data-parallel', 'lone') else 'train',
        against=against,
      )

    methods = METHODS[:3] if quick else METHODS
    seeds = study_lib.seeds(quick)
    planned += study_lib.at_best_rates(make, methods, RATES[optimizer], quick, book, seeds)
  return planned


STUDY = study_lib.Study(
  name='parity', title='Against data-parallel training at equal trained tokens', plan=plan
)
