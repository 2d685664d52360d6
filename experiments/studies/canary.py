"""Parity and a thin link, each in a minute: CI runs them and compares (README.md)."""

import dataclasses

from experiments.studies import links
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

SEEDS = (0, 1)


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Two seeds of each; the small model at twice the best rate, where a wrong merge shows most."""
  del quick, book
  planned = []
  for seed in SEEDS:
    ours = arms.decoupled(
      'canary', 'decoupled', False, seed=seed, steps=300, rate=2 * arms.RATE, against='baseline'
    )
    planned += [arms.data_parallel(ours, 'baseline'), ours]
    for name, more in ((links.WITHOUT, {'learners': 3}), ('up 4 steps', {'up': 4.0})):
      planned.append(dataclasses.replace(links._arm(True, seed, name, **more), study='canary'))
  return planned


STUDY = study_lib.Study(name='canary', title='Parity and a thin link, in short', plan=plan)
