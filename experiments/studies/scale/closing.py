"""What closes the gap to data-parallel training: one factor at a time (closing.md)."""

import dataclasses
from typing import Any

from experiments.studies import scale
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

NAME = 'scale.closing'
FACTORS: dict[str, dict[str, Any]] = {  # settings, the most promising first
  'b2 0.99, no clipping': {'optimizer.b2': 0.99, 'optimizer.clip_norm': 0.0},
  'delayed Nesterov': {'sync.outer': 'delayed_nesterov(learning_rate=0.5, momentum=0.3)'},
  'P=H=6': {'sync.fragments': 6, 'sync.period': 6},
  'outer rate 0.7, no momentum': {'sync.outer': 'nesterov(learning_rate=0.7, momentum=0.0)'},
  'outer rate 0.7, momentum 0.3': {'sync.outer': 'nesterov(learning_rate=0.7, momentum=0.3)'},
  'b2 0.99': {'optimizer.b2': 0.99},
  'no clipping': {'optimizer.clip_norm': 0.0},
  'decay to zero': {'optimizer.end_lr_ratio': 0.0},
  'twice the warm-up': {'optimizer.warmup_steps': 54},
  'outer rate 0.5, momentum 0.5': {'sync.outer': 'nesterov(learning_rate=0.5, momentum=0.5)'},
  'H=24': {'sync.period': 24},
  'weight decay 0.05': {'optimizer.weight_decay': 0.05},
  'weight decay 0.2': {'optimizer.weight_decay': 0.2},
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The middle size with few tokens and Muon; each factor against Decoupled DiLoCo without it."""
  del book
  size, ratio = ('13k', scale.QUICK) if quick else (scale.MIDDLE, scale.SHORT)
  seeds = range(1 if quick else 3)
  base, plain = ((scale.Case(size, ratio, 'muon', *method)) for method in scale.PAIR)
  planned = [_arm(base, seed, str(base), '', {}) for seed in seeds]
  planned += [_arm(plain, seed, str(plain), str(base), {}) for seed in seeds]
  for name, settings in list(FACTORS.items())[: 2 if quick else None]:
    planned += [_arm(plain, seed, name, str(plain), settings) for seed in seeds]
  return planned


def _arm(
  case: scale.Case, seed: int, name: str, against: str, settings: dict[str, Any]
) -> arms.Arm:
  arm = scale.arm(case, arms.RATE, seed, against)
  for setting, value in settings.items():
    part, field = setting.split('.')
    setattr(getattr(arm.config, part), field, value)
  return dataclasses.replace(arm, study=NAME, name=name)


STUDY = study_lib.Study(name=NAME, title='What closes the gap', plan=plan)
