"""The demo's model against data-parallel training at equal trained tokens (headline.md)."""

from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.train import config as train_config
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

RATES = (1.2e-2, 2.4e-2)
METHODS = ('data-parallel', 'decoupled')


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Muon, and the outer optimizer that the studies recommend; the rest as in the demo without its
  kill."""

  def make(method: str, rate: float, seed: int, against: str) -> arms.Arm:
    config = stdlib_lm.get_config('decoupled')
    steps = 100 if quick else config.train.steps
    config.optimizer = train_config.OptimizerConfig(
      name='muon', learning_rate=rate, warmup_steps=steps // 20
    )
    config.mesh.data = 1  # a core
    config.data.seed = config.train.seed = seed
    config.data.eval_batches = 16
    config.sync.outer = run_config.SyncConfig().outer
    config.train.steps, config.train.eval_every = steps, steps // 10
    config.train.checkpoint_every_steps = 0
    name = f'{method}, muon {rate:g}'
    arm = arms.Arm(study='headline', name=name, config=config, against=against)
    return arms.data_parallel(arm, name) if method == METHODS[0] else arm

  return study_lib.at_best_rates(make, METHODS, RATES, quick, book, study_lib.seeds(quick))


STUDY = study_lib.Study(
  name='headline', title="The demo's model against data-parallel training", plan=plan
)
