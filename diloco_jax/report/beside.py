"""Runs beside each other: their losses at the end, after equal tokens and at equal clocks."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco_jax.report import folder as folder_lib
from diloco_jax.report import live, page, summary
from diloco_jax.report.state import state


def names(workdirs: Sequence[pathlib.Path]) -> list[str]:
  """A short name of each folder, none twice."""
  last = [workdir.absolute().name for workdir in workdirs]
  return last if len(set(last)) == len(last) else [str(workdir) for workdir in workdirs]


def text(found: Mapping[str, folder_lib.Read]) -> str:
  """A table with a column for each run."""
  runs = [summary.summarize(one, one.statuses) for one in found.values()]
  rows = {'held-out loss at its end': [_number(run['eval_loss_end'], '.3f') for run in runs]}
  curves = [run['evaluations'] for run in runs]
  if all(curves):
    for by, what in (('tokens', 'after {:,} tokens'), ('step', 'at clock {:,}')):
      common = min(curve[-1][by] for curve in curves)
      rows[f'  {what.format(common)}'] = [f'{_at(curve, by, common):.3f}' for curve in curves]
  rows |= {
    'training loss at its end': [_number(_mean(run, 'loss'), '.3f') for run in runs],
    'learners': [str(sum(row['steps'] > 0 for row in run['learners'].values())) for run in runs],
    'tokens trained': [f'{run["tokens_trained"]:,}' for run in runs],
    'outer steps': [f'{run["outer_steps"]:,}' for run in runs],
    'on the wire': [live.size(run['wire_bytes_up'] + run['wire_bytes_down']) for run in runs],
    'time': [folder_lib.duration(run['wall_seconds']) for run in runs],
    'kills': [str(len(run['kills'])) for run in runs],
    'goodput since joined': [_number(_of(run, 'training_since_joined'), '.1%') for run in runs],
    'token goodput': [_number(_of(run, 'token'), '.1%') for run in runs],
  }
  units = {one.loss_unit for one in found.values()} - {''}
  head = f'loss in {" and ".join(sorted(units))}' if units else ''
  wide = max(len(name) for name in rows) + 2
  width = 2 + max(len(cell) for cells in (found, *rows.values()) for cell in cells)
  lines = [head.ljust(wide) + ''.join(f'{name:>{width}}' for name in found)]
  lines += [f'{name:{wide}}' + ''.join(f'{cell:>{width}}' for cell in rows[name]) for name in rows]
  return '\n'.join(lines) + '\n'


def write(found: Mapping[str, folder_lib.Read], out: pathlib.Path, plot: bool) -> str:
  """Writes table, page and picture; returns why the table could not be written."""
  if plot:
    from diloco_jax.report import picture  # pylint: disable=g-import-not-at-top  # 1 s

    drawn = picture.draw_beside(found)
    summary.write_file(out / 'beside.png', lambda path: drawn.savefig(path, dpi=picture.DPI))
  states = [{**state(one.run, one.config), 'name': name} for name, one in found.items()]
  summary.write_file(out / 'beside.html', page.inline(states))
  return summary.write_file(out / 'beside.txt', text(found))


def _at(curve: Sequence[Mapping[str, Any]], by: str, where: float) -> float:
  """The loss between two evaluations."""
  return float(np.interp(where, [one[by] for one in curve], [one['loss'] for one in curve]))


def _mean(run: Mapping[str, Any], what: str) -> float | None:
  values = [row[what] for row in run['learners'].values() if row[what] is not None]
  return float(np.mean(values)) if values else None


def _of(run: Mapping[str, Any], figure: str) -> float | None:
  return run['goodput'] and run['goodput'][figure]


def _number(value: float | None, form: str) -> str:
  return '-' if value is None else format(value, form)
