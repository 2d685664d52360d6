"""Learners whose data differ: each has a region of the corpus (unequal_data.md)."""

from experiments.studies.lib import arms, regions
from experiments.studies.lib import study as study_lib

BASELINE = 'data-parallel'


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Four shards, so that four learners read all of them in both arms."""
  del book
  same = arms.decoupled('unequal_data', 'samples of all text', quick, against=BASELINE)
  other = arms.decoupled('unequal_data', 'a region each', quick, against=BASELINE)
  same.config.data.shards = other.config.data.shards = 4
  other.config.task = f'{regions.__name__}:task'
  return [arms.data_parallel(same, BASELINE), same, other]


STUDY = study_lib.Study(name='unequal_data', title='Learners whose data differ', plan=plan)
