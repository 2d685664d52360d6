"""Which rate and momentum of the outer optimizer are best (outer.md)."""

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

DEFAULT = (0.5, 0.3)
OTHERS = ((0.7, 0.0), (0.3, 0.6), (0.5, 0.5), (0.7, 0.5), (0.7, 0.9), (1.0, 0.0), (0.5, 0.0))


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """One schedule, so that the arms differ in the outer optimizer only."""
  del book
  default = 'rate {}, momentum {}'.format(*DEFAULT)
  return [
    arms.decoupled(
      'outer',
      f'rate {rate}, momentum {momentum}',
      quick,
      outer=f'nesterov(learning_rate={rate}, momentum={momentum})',
      against=default,
    )
    for rate, momentum in (DEFAULT, *(((0.7, 0.5),) if quick else OTHERS))
  ]


STUDY = study_lib.Study(name='outer', title='Rate and momentum of the outer optimizer', plan=plan)
