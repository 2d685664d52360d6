"""RDA against Avg, and against data-parallel training, by the number of learners (learners.md)."""

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

STEPS = 500
LEARNERS = (2, 4, 8, 16)


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """T steps of M learners; the baseline has their M batches in each step."""
  del book
  planned = []
  for learners in (8,) if quick else LEARNERS:
    baseline = f'data-parallel, M={learners}'
    made = [
      arms.decoupled(
        'learners',
        f'{merge}, M={learners}',
        quick,
        steps=STEPS // (5 if quick else 1),
        learners=learners,
        merge=merge,
        against=baseline,
      )
      for merge in ('rda', 'avg')
    ]
    planned += [arms.data_parallel(made[0], baseline), *made]
  return planned


STUDY = study_lib.Study(name='learners', title='RDA and Avg by the number of learners', plan=plan)
