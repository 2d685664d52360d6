"""The paper's regime: large batches (batch.md)."""

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

BATCH, STEPS = 64, 1000
RATES = {'adamw': (1.2e-2, 2.4e-2), 'muon': (1.2e-2, 2.4e-2)}
METHODS = ('data-parallel', 'decoupled')


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """64 windows per learner and step, each method at its best inner rate, one seed."""
  planned = []
  for optimizer, rates in list(RATES.items())[: 1 if quick else None]:

    def make(method, rate, seed, against, optimizer=optimizer):
      arm = arms.decoupled(
        'batch',
        f'{method}, {optimizer} {rate:g}',
        False,
        seed=seed,
        steps=30 if quick else STEPS,
        batch=BATCH,
        rate=rate,
        optimizer=optimizer,
        against=against,
      )
      return arms.data_parallel(arm, arm.name) if method == METHODS[0] else arm

    planned += study_lib.at_best_rates(make, METHODS, rates, quick, book)
  return planned


STUDY = study_lib.Study(name='batch', title='Batches of 64 windows per learner', plan=plan)
