"""Periods, overlap, steps ahead, and grace: H, tau, ahead and gamma (timing.md)."""

from typing import Any

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

STEPS = 500
DEFAULT = 'H=12, tau=3, ahead=1, gamma=0.9'
ARMS: dict[str, dict[str, Any]] = {
  DEFAULT: {},
  'tau=2': {'overlap': 2},
  'tau=4': {'overlap': 4},
  'tau=5': {'overlap': 5},
  'ahead=0': {'ahead': 0},
  'ahead=2': {'ahead': 2},
  'ahead=3': {'ahead': 3},
  'tau=4, ahead=3': {'overlap': 4, 'ahead': 3},
  'gamma=0.5': {'gamma': 0.5},
  'gamma=0': {'gamma': 0.0},
  'P=H=6': {'fragments': 6, 'period': 6},
  'P=12, H=24': {'period': 24},
  'P=12, H=48': {'period': 48},
}
QUICK = (DEFAULT, 'tau=2', 'gamma=0', 'P=12, H=24')


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """All arms but those of another H differ from the first in one setting."""
  del book
  return [
    arms.decoupled('timing', name, quick, steps=STEPS, against=DEFAULT, **ARMS[name])
    for name in (QUICK if quick else ARMS)
  ]


STUDY = study_lib.Study(name='timing', title='H, tau, steps ahead, and the grace window', plan=plan)
