"""What each setting of the exchange changes by itself (results.md): one factor at a time."""

from typing import Any

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

DEFAULT = 'H=12, tau=3, ahead=1, gamma=0.9, nesterov(0.5, 0.3), float32'
ARMS: dict[str, dict[str, Any]] = {
  DEFAULT: {},
  'tau=2': {'overlap': 2},
  'tau=4': {'overlap': 4},
  'ahead=0': {'ahead': 0},
  'ahead=3': {'ahead': 3},
  'tau=4, ahead=3': {'overlap': 4, 'ahead': 3},
  'gamma=0.5': {'gamma': 0.5},
  'gamma=0': {'gamma': 0.0},
  'P=H=6': {'fragments': 6, 'period': 6},
  'P=12, H=24': {'period': 24},
  'P=12, H=48': {'period': 48},
  'avg': {'merge': 'avg'},
  "overwrite, tau=2, ahead=0, the paper's rule": {'adopt': 'overwrite', 'overlap': 2, 'ahead': 0},
  **{codec: {'codec_up': codec, 'codec_down': codec} for codec in ('bfloat16', 'int8', 'int4')},
  **{
    f'outer rate {rate}, momentum {momentum}': {
      'outer': f'nesterov(learning_rate={rate}, momentum={momentum})'
    }
    for rate, momentum in ((0.3, 0.6), (0.5, 0.5), (0.7, 0.0), (0.7, 0.5), (0.7, 0.9), (1.0, 0.0))
  },
}
QUICK = (DEFAULT, 'tau=2', 'gamma=0', 'P=12, H=24', 'int4')


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Arms that differ from the first in the codec or the outer optimizer have its schedule."""
  del book
  return [
    arms.decoupled('settings', name, quick, seed=seed, against=DEFAULT, **ARMS[name])
    for seed in study_lib.seeds(quick)
    for name in (QUICK if quick else ARMS)
  ]


STUDY = study_lib.Study(name='settings', title='One setting of the exchange at a time', plan=plan)
