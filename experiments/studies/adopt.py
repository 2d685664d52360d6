"""What becomes of a learner's own steps when it adopts a version (adopt.md)."""

from typing import Any

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

ARMS: dict[str, dict[str, Any]] = {
  'rebase': {},
  'overwrite': {'adopt': 'overwrite'},
  'overwrite, tau=2, ahead=0, as in the paper': {
    'adopt': 'overwrite',
    'overlap': 2,
    'ahead': 0,
  },
  'overwrite, rate 0.6': {  # a longer outer step for fewer inner steps
    'adopt': 'overwrite',
    'outer': 'nesterov(learning_rate=0.6, momentum=0.3)',
  },
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The same conditions for all."""
  del book
  return [
    arms.decoupled('adopt', name, quick, against='rebase', **sync)
    for name, sync in list(ARMS.items())[: 2 if quick else None]
  ]


STUDY = study_lib.Study(name='adopt', title='Rebase, overwrite', plan=plan)
