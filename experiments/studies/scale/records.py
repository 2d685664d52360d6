"""The smallest gap to data-parallel training that is known for each size (docs/records.md).

To try for one, add it to RECORDS, and run

    python -m experiments.studies.run --study=scale.records
"""

import pathlib
import statistics
from typing import Any, NamedTuple

from experiments.studies import scale
from experiments.studies.lib import arms, report
from experiments.studies.lib import study as study_lib

NAME = 'scale.records'


class Record(NamedTuple):
  """A run, as its row on the page: learners (1: data-parallel training), inner rate, and the fields
  of its config that are not those of `scale`. `batch`: so many times the windows of `scale`."""

  size: str
  learners: int
  rate: float
  fields: dict[str, Any]
  seeds: int = 3


def exchange(codec: str, period: int, overlap: int) -> dict[str, Any]:
  """As many fragments as steps in a period, with payloads of one codec."""
  both = {'sync.codec_up': codec, 'sync.codec_down': codec}
  return both | {'sync.fragments': period, 'sync.period': period, 'sync.overlap': overlap}


WEIGHT, SLOW = {'optimizer.momentum_weight': 0.7}, {'optimizer.b2': 0.99}
# The best data-parallel training of each size, then what is compared with it.
BASELINES = {
  '13k': Record('13k', 1, 2.4e-2, WEIGHT, 1),
  '63k': Record('63k', 1, 1.7e-2, WEIGHT | SLOW | {'batch': 0.25}),
  '230k': Record('230k', 1, 2.4e-2, WEIGHT | {'batch': 0.5}),
  '0.9M': Record('0.9M', 1, 1.2e-2, WEIGHT),
}
RECORDS = (
  Record('63k', 4, 1.2e-2, WEIGHT | SLOW | {'batch': 0.25} | exchange('int4', 3, 2)),
  Record('63k', 8, 3.4e-2, WEIGHT | SLOW | {'batch': 0.5} | exchange('int4', 3, 2)),
  Record('230k', 4, 1.7e-2, WEIGHT | {'batch': 0.5} | exchange('int4', 3, 2)),
  Record('230k', 8, 1.2e-2, WEIGHT | {'batch': 0.5} | exchange('int4', 3, 2)),
  Record('63k', 4, 1.7e-2, WEIGHT | SLOW | {'batch': 0.25} | exchange('int2', 3, 2)),
  Record('63k', 8, 3.4e-2, WEIGHT | SLOW | {'batch': 0.5} | exchange('int2', 3, 2)),
  Record('230k', 4, 1.2e-2, WEIGHT | {'batch': 0.5} | exchange('int2', 3, 2)),
  Record('230k', 8, 1.2e-2, WEIGHT | {'batch': 0.5} | exchange('int2', 3, 2)),
  Record('63k', 4, 1.2e-2, WEIGHT | SLOW | {'batch': 0.25} | exchange('int4', 6, 3)),
  Record('63k', 4, 2.4e-2, WEIGHT | {'batch': 0.5} | exchange('int4', 6, 3)),
  Record('63k', 8, 2.4e-2, WEIGHT | SLOW | {'batch': 0.5} | exchange('int4', 6, 3)),
  Record('230k', 4, 1.2e-2, WEIGHT | {'batch': 0.5} | exchange('int4', 6, 3)),
  Record('230k', 4, 2.4e-2, WEIGHT | exchange('int4', 6, 3)),
  Record('230k', 8, 1.2e-2, WEIGHT | {'batch': 0.5} | exchange('int4', 6, 3)),
  Record('230k', 8, 2.4e-2, WEIGHT | exchange('int4', 6, 3)),
  Record('0.9M', 4, 1.2e-2, WEIGHT | exchange('int4', 3, 2), 1),
  Record('0.9M', 8, 1.2e-2, WEIGHT | exchange('int4', 3, 2), 1),
  Record('0.9M', 4, 1.2e-2, WEIGHT | exchange('int4', 6, 3)),
  Record('0.9M', 8, 1.2e-2, WEIGHT | exchange('int4', 6, 3), 1),
)


def _arm(record: Record, seed: int, quick: bool) -> arms.Arm:
  method = scale.BASE[0] if record.learners == 1 else 'decoupled'
  size, ratio = ('13k', scale.QUICK) if quick else (record.size, scale.SHORT)
  case = scale.Case(size, ratio, 'muon', method, record.learners)
  return scale.changed(scale.arm(case, record.rate, seed), NAME, _name(record), record.fields)


def _name(record: Record) -> str:
  """Its first two and last cells on the page."""
  words = [f'{name.split(".")[-1]} {value}' for name, value in record.fields.items()]
  method = f'M={record.learners}' if record.learners > 1 else 'baseline'
  return ', '.join([record.size, method, f'rate {record.rate:g}', *words])


def _records(quick: bool) -> list[Record]:
  if quick:  # the smallest size: that it works
    return [BASELINES['13k'], Record('13k', 4, 2.4e-2, WEIGHT | exchange('int2', 3, 2), 1)]
  return [*list(BASELINES.values())[1:], *RECORDS]


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The baselines, and each record with its seeds."""
  del book
  return [
    _arm(record, seed, quick)
    for seed in range(1 if quick else 3)
    for record in _records(quick)
    if seed < record.seeds
  ]


def conclude(quick: bool, book: study_lib.Book, out: pathlib.Path) -> str:
  """The rows of the page."""
  del out
  lines = ['| size, learners | gap | settings | MB | seeds | hash |', '|---|---|---|---|---|---|']
  for record in _records(quick):
    rows, base = (
      {seed: row for seed in range(3) if (row := book.row(_arm(either, seed, quick)))}
      for either in (record, BASELINES[record.size])
    )
    if record.learners == 1 or 0 not in rows:
      continue
    losses = [{seed: row['loss'] for seed, row in by_seed.items()} for by_seed in (rows, base)]
    sent = [row['up_bytes'] + row['down_bytes'] for row in rows.values()]
    size, learners, settings = _name(record).split(', ', 2)
    cells = [f'{size}, {learners}', report.changes(*losses), settings]
    cells += [f'{statistics.mean(sent) / record.learners / 1e6:.1f}', str(len(rows))]
    lines.append('| ' + ' | '.join([*cells, f'`{rows[0]["theta_sha256"][:12]}`']) + ' |')
  return '\n'.join([*lines, ''])


STUDY = study_lib.Study(name=NAME, title='Records', plan=plan, conclude=conclude)
