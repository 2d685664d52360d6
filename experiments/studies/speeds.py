"""Learners of two speeds: lock-step, no grace, grace; and one that is far ahead (speeds.md)."""

from typing import Any

from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

STEPS = 500
FASTER = 4.0  # than the others
SLOW = 1.18  # v6e and v5p of the paper: the slowest is 18 % behind
ARMS: dict[str, dict[str, Any]] = {
  'K=8, lock-step': {'quorum': 8, 'max_lag': 0},
  'K=1': {'gamma': 0.0},
  'K=1 with grace': {},
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Eight learners, four of them slower, and four, of which one is FASTER; with 10 % noise in every
  step."""
  del book
  where = conditions.delays('lan', slowness=(1.0, SLOW), gaussian=0.1)
  ahead = conditions.delays('lan', slowness=(1.0, FASTER, FASTER, FASTER), gaussian=0.1)
  fast = [
    arms.decoupled(
      'speeds',
      'one of four is fast',
      quick,
      seed=seed,
      steps=400 // (5 if quick else 1),
      learners=4,
      where=ahead,
    )
    for seed in study_lib.seeds(quick)[:2]
  ]
  return fast + [
    arms.decoupled(
      'speeds',
      name,
      quick,
      steps=STEPS // (5 if quick else 1),
      learners=8,
      where=where,
      against='K=1 with grace',
      **sync,
    )
    for name, sync in ARMS.items()
  ]


STUDY = study_lib.Study(name='speeds', title='Learners of two speeds', plan=plan)
