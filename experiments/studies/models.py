"""A Mixture of Experts, and a vision-language model, against data-parallel training (models.md)."""

from collections.abc import Callable

from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from experiments.examples import digits_vlm
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

MODELS: dict[str, Callable[[], run_config.Config]] = {
  'experts': lambda: stdlib_lm.get_config('moe'),
  'vision': digits_vlm.get_config,
}
SEEDS = (0, 1)


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The small model's settings with another model, its data and fragmentation; one rate."""
  del book
  planned = []
  for name, make in MODELS.items():
    for seed in SEEDS[: 1 if quick else None]:
      baseline, model = f'{name}, data-parallel', make()
      arm = arms.decoupled(
        'models',
        f'{name}, decoupled',
        quick,
        seed=seed,
        steps=model.train.steps,
        against=baseline,
        fragmentation=model.sync.fragmentation,
      )
      config = arm.config
      config.task, config.model, config.data = model.task, model.model, model.data
      config.data.seed = seed
      planned += [arms.data_parallel(arm, baseline), arm]
  return planned


STUDY = study_lib.Study(name='models', title='Experts and vision', plan=plan)
