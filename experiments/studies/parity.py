"""How far DiLoCo, Streaming and Decoupled DiLoCo are behind data-parallel training (parity.md)."""

from diloco_jax.config import run_config
from diloco_jax.verification.virtual import virtual
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

RATES = {'muon': (1.2e-2, 2.4e-2), 'adamw': (6e-3, 1.2e-2)}
# Settings of the optimizer and of the exchange for a learner's small batch, and a baseline with its
# own: all with Muon at the best rate.
SMALL_BATCH = {'b2': 0.99, 'clip_norm': 0.0}
SETTINGS = {
  'data-parallel, momentum 0.9': ('data-parallel', {'momentum': 0.9}, {}),
  'decoupled, b2 0.99, no clipping': ('decoupled', SMALL_BATCH, {}),
  'decoupled, b2 0.99, no clipping, P=H=4': (
    'decoupled',
    SMALL_BATCH,
    {'fragments': 4, 'period': 4},
  ),
}
METHODS = ('data-parallel', 'decoupled', 'lone', 'streaming', 'diloco')


def config(method: str, optimizer: str, rate: float, seed: int, quick: bool) -> run_config.Config:
  """The config of a method with the tokens of four learners; a lone learner has a quarter."""
  arm = arms.small(optimizer, rate, steps=300 if quick else 1000, seed=seed)
  if method == 'data-parallel':
    return virtual.data_parallel(arm)
  if method == 'lone':
    arm.sync.learners = arm.data.shards = 1
  return arms.with_method(arm, method)


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
        unequal='a quarter of its tokens' if method == 'lone' else '',
      )

    methods = METHODS[:3] if quick else METHODS
    seeds = study_lib.seeds(quick)
    planned += study_lib.at_best_rates(make, methods, RATES[optimizer], quick, book, seeds)
  names = {(arm.name, arm.seed) for arm in planned}
  return planned + [arm for arm in with_settings(quick) if (arm.against, arm.seed) in names]


def with_settings(quick: bool) -> list[arms.Arm]:
  """The arms of SETTINGS, with all seeds."""
  planned = []
  for seed in study_lib.seeds(quick):
    for name, (method, optimizer, sync) in SETTINGS.items():
      changed = config(method, 'muon', arms.RATE, seed, quick)
      for part, values in ((changed.optimizer, optimizer), (changed.sync, sync)):
        for field, value in values.items():
          setattr(part, field, value)
      planned.append(
        arms.Arm(
          study='parity',
          name=name,
          config=changed,
          kind='alone' if method == 'data-parallel' else 'train',
          against=f'data-parallel, muon {arms.RATE:g}',
        )
      )
  return planned


STUDY = study_lib.Study(
  name='parity', title='Against data-parallel training at equal trained tokens', plan=plan
)
