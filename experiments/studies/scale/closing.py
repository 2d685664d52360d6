"""What closes the gap to data-parallel training: one factor at a time (closing.md)."""

import collections
import dataclasses
import pathlib
import statistics
from typing import Any

from experiments.studies import scale
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

NAME = 'scale.closing'
BASE, PLAIN = 'data-parallel', 'decoupled'
WON = ('P=H=6',)
FACTORS: dict[str, dict[str, Any]] = {  # settings, the most promising first
  'b2 0.99, no clipping': {'optimizer.b2': 0.99, 'optimizer.clip_norm': 0.0},
  'delayed Nesterov': {'sync.outer': 'delayed_nesterov(learning_rate=0.5, momentum=0.3)'},
  'Muon momentum 0.98': {'optimizer.momentum': 0.98},
  'P=H=6': {'sync.fragments': 6, 'sync.period': 6},
  'outer rate 0.7, no momentum': {'sync.outer': 'nesterov(learning_rate=0.7, momentum=0.0)'},
  'outer rate 0.7, momentum 0.3': {'sync.outer': 'nesterov(learning_rate=0.7, momentum=0.3)'},
  'decay to zero': {'optimizer.end_lr_ratio': 0.0},
  'aligned with the momentum': {'sync.outer': 'aligned_nesterov(learning_rate=0.5, momentum=0.3)'},
  'avg, outer rate 1, no momentum': {
    'sync.merge': 'avg',
    'sync.outer': 'nesterov(learning_rate=1.0, momentum=0.0)',
  },
  'outer rate 0.7, momentum 0.5': {'sync.outer': 'nesterov(learning_rate=0.7, momentum=0.5)'},
  'b2 0.99': {'optimizer.b2': 0.99},
  'no clipping': {'optimizer.clip_norm': 0.0},
  'outer rate 0.5, momentum 0.5': {'sync.outer': 'nesterov(learning_rate=0.5, momentum=0.5)'},
  'twice the warm-up': {'optimizer.warmup_steps': 54},
  'H=24': {'sync.period': 24},
  'overwrite': {'sync.adopt': 'overwrite'},
  'weight decay 0.05': {'optimizer.weight_decay': 0.05},
  'weight decay 0.2': {'optimizer.weight_decay': 0.2},
}


def _factors(quick: bool) -> dict[str, dict[str, dict[str, Any]]]:
  """By size. All factors at the middle size, what has closed a part there at the others."""
  if quick:
    return {'13k': dict(list(FACTORS.items())[:2])}
  won = {name: FACTORS[name] for name in WON}
  return {scale.SMALL: won, scale.MIDDLE: FACTORS, '0.9M': won}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Few tokens and Muon, at the rates of `scale`, which come first if they are unknown. Each factor
  against Decoupled DiLoCo without it, and a factor of the inner optimizer against data-parallel
  training without it, too."""
  planned = []
  for size, factors in _factors(quick).items():
    ratio = scale.QUICK if quick else scale.SHORT
    cases = [scale.Case(size, ratio, 'muon', *method) for method in scale.PAIR]
    searches = [scale.rates(case, book) for case in cases]
    found = [arm for search, _ in searches for arm in search]
    planned += [dataclasses.replace(arm, study=NAME) for arm in found]
    rates = [rate for _, rate in searches]
    if None in rates:
      continue
    methods = list(zip((BASE, PLAIN), cases, rates, strict=True))
    for name, settings in {'': {}, **factors}.items():
      inner = all(setting.startswith('optimizer') for setting in settings)
      for method, case, rate in methods if inner else methods[1:]:
        against = method if settings else BASE if method == PLAIN else ''
        for seed in range(1 if quick else 3):
          arm = scale.arm(case, rate, seed, against and f'{size}, {against}')
          for setting, value in settings.items():
            part, field = setting.split('.')
            setattr(getattr(arm.config, part), field, value)
          named = ', '.join(filter(None, (size, method, name)))
          planned.append(dataclasses.replace(arm, study=NAME, name=named))
  return planned


def conclude(quick: bool, book: study_lib.Book, out: pathlib.Path) -> str:
  """What each factor changes: of Decoupled DiLoCo, of data-parallel training, and of the gap."""
  del out
  losses: dict[str, dict[int, float]] = collections.defaultdict(dict)
  for arm in plan(quick, book):
    if row := book.row(arm):
      losses[arm.name][arm.seed] = row['loss']
  lines = ['| factor | loss | against plain | data-parallel, likewise | gap to data-parallel |']
  lines += ['|---|---|---|---|---|']
  for size, factors in _factors(quick).items():
    plain, base = losses[f'{size}, {PLAIN}'], losses[f'{size}, {BASE}']
    for name in ('', *factors):
      after = f', {name}' * bool(name)
      mine, other = losses[f'{size}, {PLAIN}{after}'], losses[f'{size}, {BASE}{after}']
      if mine:
        cells = [f'{size}{after}', f'{statistics.mean(mine.values()):.4f}']
        cells += [changes(*pair) for pair in ((mine, plain), (other, base), (mine, other or base))]
        lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join([*lines, ''])


def changes(losses: dict[int, float], others: dict[int, float]) -> str:
  """The mean of the seeds, its standard error, and each."""
  gains = [losses[seed] / others[seed] - 1 for seed in sorted(losses) if seed in others]
  if not any(gains):
    return ''
  error = f' ± {statistics.stdev(gains) / len(gains) ** 0.5:.2%}' if gains[1:] else ''
  return f'{statistics.mean(gains):+.2%}{error} ({", ".join(f"{gain:+.2%}" for gain in gains)})'


STUDY = study_lib.Study(name=NAME, title='What closes the gap', plan=plan, conclude=conclude)
