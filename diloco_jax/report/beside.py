"""Runs beside each other: their losses at the end, after equal tokens and at equal clocks."""

import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_jax.report import folder as folder_lib
from diloco_jax.report import header, page
from diloco_jax.report import summary as summary_lib
from diloco_jax.report.state import state

_NEAR = 0.02  # evaluations whose tokens differ by less, as a share, are compared
_NONE = {'tokens': 'after equal tokens: not measured', 'step': 'at equal clocks: not measured'}


def read(workdirs: Sequence[pathlib.Path]) -> dict[str, folder_lib.Read]:
  """The runs by the names of their folders. Raises ValueError."""
  names = [workdir.absolute().name for workdir in workdirs]
  names = names if len(set(names)) == len(names) else list(map(str, workdirs))
  return dict(zip(names, map(folder_lib.read, workdirs)))


def write(runs: Mapping[str, folder_lib.Read], out: pathlib.Path) -> list[str]:
  """Writes table and page; returns the names of those that could not be written."""
  states = lambda: [state(read.run, read.config, name) for name, read in runs.items()]
  views = {'beside.txt': lambda: text(runs), 'beside.html': lambda: page.inline(states())}
  folders = shlex.join(str(read.workdir) for read in runs.values())
  return summary_lib.write_views(out, views, f'diloco report {folders}')


def text(read_runs: Mapping[str, folder_lib.Read]) -> str:
  """A table with a column for each run."""
  runs = list(map(summary_lib.summarize, read_runs.values()))
  units = sorted({run['loss_unit'] for run in runs} - {''})
  rows = {f'loss in {" and ".join(units)}' if units else '': list(read_runs)}

  def add(name: str, form: str, values: Sequence[Any]) -> None:
    rows[name] = ['-' if value is None else form.format(value) for value in values]

  add('held-out loss at its end', '{:.3f}', [run['eval_loss_end'] for run in runs])
  add('  bits per byte', '{:.3f}', [run['bits_per_byte_end'] for run in runs])
  curves = [run['evaluations'] for run in runs]
  bits = len(units) > 1
  for by, what in (('tokens', 'after {:,} tokens'), ('step', 'at clock {:,}')):
    if all(curves):
      points = _points(curves, by)
      what = what.format(points[0][by]) if points else _NONE[by]
      losses = [point['bits_per_byte'] if bits else point['loss'] for point in points]
      add('  ' + what + ', bits per byte' * bits, '{:.3f}', losses or [None] * len(curves))
  add('training loss at its end', '{:.3f}', list(map(_training_loss, runs)))
  add('tokens trained', '{:,}', [run['tokens_trained'] for run in runs])
  add('outer steps', '{:,}', [run['outer_steps'] for run in runs])
  bytes_both = [run['wire_bytes_up'] + run['wire_bytes_down'] for run in runs]
  add('on the wire', '{}', list(map(header.size, bytes_both)))
  add('time', '{}', [header.duration(run['wall_seconds']) for run in runs])
  add('kills', '{}', [len(run['kills']) for run in runs])
  figures = [run['goodput'] or {} for run in runs]
  add('goodput since joined', '{:.1%}', [figure.get('training_since_joined') for figure in figures])
  add('token goodput', '{:.1%}', [figure.get('token') for figure in figures])
  wide = max(map(len, rows)) + 2
  width = 2 + max(len(cell) for cells in rows.values() for cell in cells)
  lines = (name.ljust(wide) + ''.join(cell.rjust(width) for cell in rows[name]) for name in rows)
  return '\n'.join(lines) + '\n'


def _points(curves: Sequence[Sequence[Mapping[str, Any]]], by: str) -> list[Mapping[str, Any]]:
  """The last evaluation of the first run beside which each other run has one of about as many
  tokens, or of the same clock, with those; []: there is none. Nothing between two is made up."""
  near = _NEAR if by == 'tokens' else 0
  for point in reversed(curves[0]):
    nearest = [min(curve, key=lambda other: abs(other[by] - point[by])) for curve in curves]
    if point[by] and all(abs(other[by] - point[by]) <= near * point[by] for other in nearest):
      return nearest
  return []


def _training_loss(run: Mapping[str, Any]) -> float | None:
  losses = [row['loss'] for row in run['learners'].values() if row['loss'] is not None]
  return statistics.fmean(losses) if losses else None
