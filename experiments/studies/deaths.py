"""What deaths of learners cost, and what donated moments buy (deaths.md)."""

from typing import Any

from diloco_jax.config import run_config
from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

ALIVE = 'no deaths'
DEATHS = {'death_every': 100.0, 'down': 24.0}


def _donated(config: run_config.Config) -> dict[str, Any]:
  del config  # the default: a donor's moments
  return DEATHS


def _own(config: run_config.Config) -> dict[str, Any]:
  config.sync.donor_wait_s = 0.0
  config.train.checkpoint_every_steps = 25
  return DEATHS


def _fresh(config: run_config.Config) -> dict[str, Any]:
  config.sync.donor_wait_s = 0.0
  return DEATHS | {'host_lost': 1.0}


ARMS = {
  'donated moments': _donated,
  'own moments, 0 to 25 steps old': _own,
  'fresh moments': _fresh,
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """One death per learner per 100 steps, 24 steps away each time; equal tokens, one seed for the
  steps of all arms."""
  del book
  planned = []
  for seed in study_lib.seeds(quick):
    planned.append(arms.decoupled('deaths', ALIVE, quick, seed=seed))
    for name in list(ARMS)[: 1 if quick else None]:
      arm = arms.decoupled('deaths', f'deaths, {name}', quick, seed=seed, against=ALIVE)
      arm.where['faults'] = conditions.Faults(**ARMS[name](arm.config))
      planned.append(arm)
  return planned


STUDY = study_lib.Study(name='deaths', title='Deaths of learners, and their moments', plan=plan)
