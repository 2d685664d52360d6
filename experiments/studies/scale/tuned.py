"""Each method with its best inner optimizer, data-parallel training included (tuned.md).

The momentum of Muon and its weight beside the newest gradient (`optimizer.momentum_weight`), each
with its best inner rate: searched at each size.
"""

import pathlib
from typing import Any, NamedTuple

from experiments.studies import scale
from experiments.studies.lib import arms, report
from experiments.studies.lib import study as study_lib
from experiments.studies.scale import records

NAME = 'scale.tuned'
METHODS = {
  'data-parallel': scale.BASE,
  'M=4': ('decoupled', 4),
  'M=8': ('decoupled', 8),
  'with an outer step': ('diloco', 1),  # of one learner, every 12 steps; at the small size
}
BASE = next(iter(METHODS))
SETTINGS: dict[str, dict[str, Any]] = {
  'as set': {},
  'momentum 0.9': {'optimizer.momentum': 0.9},
  'weight 0.7': {'optimizer.momentum_weight': 0.7},
  'weight 0.5': {'optimizer.momentum_weight': 0.5},
  'weight 0.7, int4, P=H=6': {'optimizer.momentum_weight': 0.7} | records.exchange('int4', 6, 3),
}
# What else may matter, beside the best of these, at its rate. `batch`: so many times the windows,
# at equal tokens; its rate is searched.
BESIDE: dict[str, dict[str, Any]] = {
  'b2 0.99': {'optimizer.b2': 0.99},
  'warm-up 2 %': {'warm_up': 0.02},
  'warm-up 10 %': {'warm_up': 0.1},
  'decay 0.03': {'optimizer.weight_decay': 0.03},
  'decay 0.3': {'optimizer.weight_decay': 0.3},
  'no clipping': {'optimizer.clip_norm': 0.0},
  'end 0.02': {'optimizer.end_lr_ratio': 0.02},
  'batch x0.5': {'batch': 0.5},
  'batch x0.25': {'batch': 0.25},
  'batch x2': {'batch': 2.0},
  'batch x0.5, b2 0.99': {'batch': 0.5, 'optimizer.b2': 0.99},
  'batch x0.25, b2 0.99': {'batch': 0.25, 'optimizer.b2': 0.99},
  'batch x0.125, b2 0.99': {'batch': 0.125, 'optimizer.b2': 0.99},
  'batch x0.5, P=H=12': {'batch': 0.5, 'sync.fragments': 12, 'sync.period': 12},  # as few bytes
}
NEAR = {BASE: 'weight 0.7', 'M=4': 'weight 0.7, int4, P=H=6', 'M=8': 'weight 0.7, int4, P=H=6'}
SETTINGS |= {
  f'{best}, {name}': SETTINGS[best] | fields
  for best in dict.fromkeys(NEAR.values())
  for name, fields in BESIDE.items()
}
MIDDLE_SETTINGS = {  # beside what is set
  BASE: ('weight 0.7', 'weight 0.7, b2 0.99', 'weight 0.7, batch x0.5'),
  'M=4': (
    'weight 0.7',
    NEAR['M=4'],
    *(f'{NEAR["M=4"]}, batch {setting}' for setting in ('x0.5', 'x0.5, P=H=12', 'x0.25')),
  ),
  'M=8': (
    'weight 0.7',
    NEAR['M=8'],
    *(f'{NEAR["M=8"]}, batch {setting}' for setting in ('x0.5', 'x0.5, P=H=12')),
  ),
}
LARGE = '0.9M'  # where a run takes minutes: the best settings of the middle size, not searched
LARGE_RATES = {  # half of those of the middle size
  (BASE, 'weight 0.7'): 1.2e-2,
  (BASE, 'weight 0.7, batch x0.5'): 1.2e-2,
  ('M=4', NEAR['M=4']): 1.2e-2,
  ('M=4', f'{NEAR["M=4"]}, batch x0.5'): 6e-3,
  ('M=8', NEAR['M=8']): 1.2e-2,
}
SEEDS = (0, 1, 2)


class Choice(NamedTuple):
  """The inner optimizer of a method at a size."""

  setting: str
  rate: float
  loss: float  # of the first seed


def _arm(size: str, method: str, setting: str, rate: float, seed: int, quick: bool) -> arms.Arm:
  ratio = scale.QUICK if quick else scale.SHORT
  arm = scale.arm(scale.Case(size, ratio, 'muon', *METHODS[method]), rate, seed)
  return scale.changed(arm, NAME, f'{size}, {method}, {setting}, {rate:g}', SETTINGS[setting])


def _search(
  size: str, method: str, setting: str, quick: bool, book: study_lib.Book
) -> tuple[list[arms.Arm], Choice | None]:
  """The arms of the search for the best rate, and the choice, None while it is unknown."""
  make = lambda rate: _arm(size, method, setting, rate, 0, quick)
  if setting not in _settings(size, method):
    planned, rate = [], None
  elif quick:
    planned, rate = [make(scale.RATES[1])], scale.RATES[1]
  elif size == LARGE:
    rate = LARGE_RATES[method, setting]
    planned = [make(rate)]
  elif _beside(setting) and 'batch' not in SETTINGS[setting]:
    near = _search(size, method, NEAR[method], quick, book)[1]
    planned, rate = ([make(near.rate)], near.rate) if near else ([], None)
  else:
    first = (2.4e-2, 4.8e-2) if size == scale.SMALL else (1.2e-2, 2.4e-2)
    planned, rate = study_lib.best_rate(make, first, book)
  row = book.row(make(rate)) if rate else None
  return planned, Choice(setting, rate, row['loss']) if rate and row else None


def _settings(size: str, method: str) -> list[str]:
  """Those of the inner optimizer for all methods, of the exchange where learners exchange, and
  those near the best, in which each learner reads whole windows."""
  inner = lambda setting: not any(name.startswith('sync.') for name in SETTINGS[setting])
  near = lambda setting: size in _sizes(quick=False) and setting.startswith(f'{NEAR.get(method)}, ')
  learners = METHODS[method][1]
  windows = scale.arm(scale.Case(size, scale.SHORT, 'muon', *METHODS[method]), 1.0, 0)
  whole = lambda setting: windows.config.data.batch_size * SETTINGS[setting].get('batch', 1.0) >= 1
  known = list(SETTINGS)
  if size == scale.MIDDLE:
    known = ['as set', *MIDDLE_SETTINGS[method]] if method in MIDDLE_SETTINGS else []
  elif size == LARGE:
    known = [setting for of, setting in LARGE_RATES if of == method]
  known = [setting for setting in known if near(setting) or not _beside(setting)]
  return [setting for setting in known if (learners > 1 or inner(setting)) and whole(setting)]


def _beside(setting: str) -> bool:
  """Whether a setting is one of those near the best."""
  return setting.endswith(tuple(f', {name}' for name in BESIDE))


def _sizes(quick: bool) -> tuple[str, ...]:
  return ('13k',) if quick else (scale.SMALL, scale.MIDDLE, LARGE)


def _chosen(size: str, method: str, quick: bool, book: study_lib.Book) -> list[Choice]:
  """As set, and the best setting, of those that have run; of the large size the best one. The first
  seed decides which other seeds run, then all."""
  choices = [_search(size, method, setting, quick, book)[1] for setting in _settings(size, method)]
  known = [choice for choice in choices if choice]
  if not known:
    return []
  best = min(known, key=lambda choice: choice.loss)
  seeds = {choice: _rows(size, method, choice, quick, book) for choice in known}
  if len(seeds[best]) == len(SEEDS):  # then by all seeds, of those that have them
    complete = [choice for choice in known if len(seeds[choice]) == len(SEEDS)]
    best = min(complete, key=lambda choice: sum(seeds[choice].values()))
  return [best] if size == LARGE else list(dict.fromkeys((known[0], best)))


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The searches, then the other seeds of what is set and of what is best."""
  planned: dict[str, arms.Arm] = {}
  for size in _sizes(quick):
    for method in METHODS:
      for setting in _settings(size, method):
        for searched in _search(size, method, setting, quick, book)[0]:
          planned[searched.key] = searched
    for method in METHODS:
      for choice in _chosen(size, method, quick, book):
        for seed in SEEDS[: 1 if quick else None]:
          arm = _arm(size, method, choice.setting, choice.rate, seed, quick)
          planned[arm.key] = arm
  return list(planned.values())


def conclude(quick: bool, book: study_lib.Book, out: pathlib.Path) -> str:
  """The searches, then the gaps to the best data-parallel training."""
  del out
  lines = ['| seed 0 | ' + ' | '.join(METHODS) + ' |', '|---|' + '---|' * len(METHODS)]
  for size in _sizes(quick):
    known = {setting for method in METHODS for setting in _settings(size, method)}
    for setting in filter(known.__contains__, SETTINGS):
      choices = [_search(size, method, setting, quick, book)[1] for method in METHODS]
      cells = [f'{best.loss:.4f} ({best.rate:g})' if best else '' for best in choices]
      lines += [f'| {size}, {setting} | ' + ' | '.join(cells) + ' |'] * any(choices)
  lines += ['', '| all seeds | rate | loss | gap to the best baseline |', '|---|---|---|---|']
  for size in _sizes(quick):
    best = list(_losses(size, BASE, quick, book).values())[-1:]
    for method in METHODS:
      for choice, losses in _losses(size, method, quick, book).items():
        name = f'| {size}, {method}, {choice.setting} | {choice.rate:g} '
        mean = sum(losses.values()) / len(losses)
        lines.append(f'{name}| {mean:.4f} | {report.changes(losses, *best) if best else ""} |')
  return '\n'.join([*lines, ''])


def _losses(
  size: str, method: str, quick: bool, book: study_lib.Book
) -> dict[Choice, dict[int, float]]:
  """By seed, of each choice; the best choice is the last."""
  by_choice: dict[Choice, dict[int, float]] = {}
  for choice in _chosen(size, method, quick, book):
    by_choice[choice] = _rows(size, method, choice, quick, book)
  return by_choice


def _rows(
  size: str, method: str, choice: Choice, quick: bool, book: study_lib.Book
) -> dict[int, float]:
  """The loss of each seed that has run."""
  rows = {
    seed: book.row(_arm(size, method, choice.setting, choice.rate, seed, quick)) for seed in SEEDS
  }
  return {seed: row['loss'] for seed, row in rows.items() if row}


STUDY = study_lib.Study(
  name=NAME, title='Each method with its best inner optimizer', plan=plan, conclude=conclude
)
