"""The paper's regime: large batches (batch.md)."""

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

BATCH, STEPS = 64, 300
RATES = {'adamw': (6e-3, 1.2e-2), 'muon': (6e-3, 1.2e-2)}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """64 windows per learner and step, each arm at its best inner rate."""
  planned = []
  for optimizer, rates in RATES.items():
    baseline = ''
    for method in ('data-parallel', 'decoupled'):

      def make(rate, method=method, optimizer=optimizer, against=baseline):
        arm = arms.decoupled(
          'batch',
          f'{method}, {optimizer} {rate:g}',
          False,
          steps=30 if quick else STEPS,
          batch=BATCH,
          rate=rate,
          optimizer=optimizer,
          against=against,
        )
        return arms.data_parallel(arm, arm.name) if method == 'data-parallel' else arm

      if quick:
        found, best = [make(rates[-1])], rates[-1]
      else:
        found, best = study_lib.best_rate(make, rates, book)
      planned += found
      baseline = make(best).name if best else ''
    if quick:
      break
  return planned


STUDY = study_lib.Study(name='batch', title='Batches of 64 windows per learner', plan=plan)
