"""What deaths of learners cost, by where their moments come from (deaths.md)."""

from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

ALIVE = 'no deaths'
DEATHS = {'death_every': 100.0, 'down': 24.0}


ARMS = {
  'moments of its own checkpoint': DEATHS,
  "moments of another's checkpoint": DEATHS | {'host_lost': 1.0},
  'fresh moments': DEATHS | {'host_lost': 1.0, 'shared': False},
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """One death per learner per 100 steps, 24 steps away each time; equal tokens, one seed for the
  steps of all arms."""
  del book
  planned = []
  for seed in study_lib.seeds(quick):
    planned.append(arms.decoupled('deaths', ALIVE, quick, seed=seed))
    for name, faults in list(ARMS.items())[: 1 if quick else None]:
      arm = arms.decoupled('deaths', f'deaths, {name}', quick, seed=seed, against=ALIVE)
      arm.config.train.checkpoint_every_steps = 25
      arm.where['faults'] = conditions.Faults(**faults)
      planned.append(arm)
  return planned


STUDY = study_lib.Study(name='deaths', title='Deaths of learners, and their moments', plan=plan)
