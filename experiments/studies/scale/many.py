"""Many learners: the gap to data-parallel training by M, and what closes it with 8 learners, one
factor at a time, with 4 learners and data-parallel training likewise (many.md)."""

import collections
import dataclasses
import pathlib
import statistics
from typing import Any

from experiments.studies import scale
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib
from experiments.studies.scale import closing

NAME = 'scale.many'
BASE = 1  # data-parallel training, which M = 1 stands for
FEW, MANY = 4, 8
# The best inner rates of `scale`; more and fewer learners have those of their neighbours.
RATES = {
  '13k': {BASE: 0.024, FEW: 0.024, MANY: 0.024},
  scale.SMALL: {BASE: 0.048, 2: 0.048, FEW: 0.048, MANY: 0.048, 16: 0.048},
  scale.MIDDLE: {BASE: 0.024, FEW: 0.024, MANY: 0.012},
  '0.9M': {BASE: 0.012, FEW: 0.012, MANY: 0.006},
}
SEEDS = {'13k': 1, scale.SMALL: 3, scale.MIDDLE: 3, '0.9M': 1}


def _nesterov(rate: float, momentum: float) -> dict[str, Any]:
  return {'sync.outer': f'nesterov(learning_rate={rate}, momentum={momentum})'}


def _exchange(codec: str, period: int) -> dict[str, Any]:
  both = {'sync.codec_up': codec, 'sync.codec_down': codec}
  overlap = min(3, period - 1)
  return both | {'sync.fragments': period, 'sync.period': period, 'sync.overlap': overlap}


FACTORS: dict[str, dict[str, Any]] = {
  'int8': _exchange('int8', 12),
  'int4, P=H=6': _exchange('int4', 6),
  'embedding by rda': {'sync.embedding_merge': 'rda'},
  'outer rate 0.7, momentum 0.3': _nesterov(0.7, 0.3),
  'outer rate 0.3, momentum 0.3': _nesterov(0.3, 0.3),
  'outer rate 0.5, momentum 0.5': _nesterov(0.5, 0.5),
  'outer rate 1, no momentum': _nesterov(1.0, 0.0),
  'avg': {'sync.merge': 'avg'},
  'b2 0.975': {'optimizer.b2': 0.975},
  'Muon momentum 0.975': {'optimizer.momentum': 0.975},
  'no clipping': {'optimizer.clip_norm': 0.0},
}
WON = ('int8', 'int4, P=H=6')


def _factors(size: str) -> dict[str, dict[str, Any]]:
  """All at the small size, at the others what has won there; '' is the run without one."""
  names = FACTORS if size == scale.SMALL else WON
  return {'': {}} | {name: FACTORS[name] for name in names}


def _sizes(quick: bool) -> tuple[str, ...]:
  return ('13k',) if quick else (scale.SMALL, scale.MIDDLE, '0.9M')


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Few tokens for each parameter, and Muon."""
  del book
  return [
    _arm(size, learners, name, settings, seed)
    for size in _sizes(quick)
    for name, settings in _factors(size).items()
    for learners in RATES[size]
    if not name or _changes(learners, settings)
    for seed in range(SEEDS[size])
  ]


def _changes(learners: int, settings: dict[str, Any]) -> bool:
  """Whether the factor is measured there: one of the exchange does not touch the baseline."""
  inner = all(setting.startswith('optimizer') for setting in settings)
  return learners in (FEW, MANY) or (learners == BASE and inner)


def _arm(size: str, learners: int, name: str, settings: dict[str, Any], seed: int) -> arms.Arm:
  method = 'data-parallel' if learners == BASE else 'decoupled'
  ratio = scale.QUICK if size == '13k' else scale.SHORT
  case = scale.Case(size, ratio, 'muon', method, learners)
  arm = scale.arm(case, RATES[size][learners], seed, '' if learners == BASE else _name(size, BASE))
  for setting, value in settings.items():
    part, field = setting.split('.')
    setattr(getattr(arm.config, part), field, value)
  return dataclasses.replace(arm, study=NAME, name=_name(size, learners, name))


def _name(size: str, learners: int, factor: str = '') -> str:
  return ', '.join(filter(None, (size, f'M={learners}', factor)))


def conclude(quick: bool, book: study_lib.Book, out: pathlib.Path) -> str:
  """The gap of each M, what each factor changes, and the traffic of a learner."""
  del out
  rows: dict[str, dict[int, study_lib.Row]] = collections.defaultdict(dict)
  for arm in plan(quick, book):
    if row := book.row(arm):
      rows[arm.name][arm.seed] = row
  lines = [
    '| arm | loss | against the same M | gap to data-parallel | times M=4 | MB |',
    '|---|---|---|---|---|---|',
  ]
  for size in _sizes(quick):
    for factor in _factors(size):
      lines += [
        _line(rows, size, learners, factor)
        for learners in RATES[size]
        if rows[_name(size, learners, factor)]
      ]
  return '\n'.join([*lines, ''])


def _line(rows: dict[str, dict[int, study_lib.Row]], size: str, learners: int, factor: str) -> str:
  """An arm; its gap is compared with that of M=4 without a factor, over the seeds of both."""
  found = lambda *name: rows[_name(size, *name)]
  losses = lambda *name: {seed: row['loss'] for seed, row in found(*name).items()}
  loss, plain, few, base = (
    losses(*name) for name in ((learners, factor), (learners,), (FEW,), (BASE,))
  )
  other = losses(BASE, factor) or base
  cells = [_name(size, learners, factor), f'{statistics.mean(loss.values()):.4f}']
  cells += [closing.changes(loss, plain), closing.changes(loss, other)]
  shared = sorted(loss.keys() & few.keys() & other.keys())
  gap = lambda of, to: statistics.mean(of[seed] / to[seed] - 1 for seed in shared)
  apart = shared and learners != BASE
  cells.append(f'{gap(loss, other) / gap(few, base):.2f}' if apart else '')
  sent = [row['up_bytes'] + row['down_bytes'] for row in found(learners, factor).values() if apart]
  cells.append(f'{statistics.mean(sent) / learners / 1e6:.1f}' if sent else '')
  return '| ' + ' | '.join(cells) + ' |'


STUDY = study_lib.Study(name=NAME, title='Many learners', plan=plan, conclude=conclude)
