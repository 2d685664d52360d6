"""Runs beside each other: their losses at the end, after equal tokens and at equal clocks."""

import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco_jax.report import folder as folder_lib
from diloco_jax.report import header, page, summary
from diloco_jax.report.state import state


def read(workdirs: Sequence[pathlib.Path]) -> dict[str, folder_lib.Read]:
  """The runs by the names of their folders. Raises ValueError."""
  names = [workdir.absolute().name for workdir in workdirs]
  names = names if len(set(names)) == len(names) else list(map(str, workdirs))
  return dict(zip(names, map(folder_lib.read, workdirs)))


def write(found: Mapping[str, folder_lib.Read], out: pathlib.Path) -> list[str]:
  """Writes table and page; returns the names of those that could not be written."""
  states = lambda: [{**state(one.run, one.config), 'name': name} for name, one in found.items()]
  views: dict[str, Any] = {'beside.txt': lambda: text(found)}
  views['beside.html'] = lambda: page.inline(states())
  folders = shlex.join(str(one.workdir) for one in found.values())
  return summary.write_views(out, views, f'diloco report {folders}')


def text(found: Mapping[str, folder_lib.Read]) -> str:
  """A table with a column for each run."""
  runs = [summary.summarize(one) for one in found.values()]
  units = sorted({run['loss_unit'] for run in runs} - {''})
  rows = {f'loss in {" and ".join(units)}' if units else '': list(found)}

  def add(name: str, form: str, values: Sequence[Any]) -> None:
    rows[name] = ['-' if value is None else form.format(value) for value in values]

  add('held-out loss at its end', '{:.3f}', [run['eval_loss_end'] for run in runs])
  add('  bits per byte', '{:.3f}', [run['bits_per_byte_end'] for run in runs])
  curves = [run['evaluations'] for run in runs]
  for by, what in (('tokens', 'after {:,} tokens'), ('step', 'at clock {:,}')):
    if all(curves):
      where = min(curve[-1][by] for curve in curves)
      what = '  ' + what.format(where) + ', bits per byte' * (len(units) > 1)
      add(what, '{:.3f}', [_at(curve, by, where, len(units) > 1) for curve in curves])
  add('training loss at its end', '{:.3f}', list(map(_training_loss, runs)))
  add('tokens trained', '{:,}', [run['tokens_trained'] for run in runs])
  add('outer steps', '{:,}', [run['outer_steps'] for run in runs])
  bytes_both = [run['wire_bytes_up'] + run['wire_bytes_down'] for run in runs]
  add('on the wire', '{}', list(map(header.size, bytes_both)))
  add('time', '{}', [header.duration(run['wall_seconds']) for run in runs])
  add('kills', '{}', [len(run['kills']) for run in runs])
  figures = [run['goodput'] or {} for run in runs]
  add('goodput since joined', '{:.1%}', [one.get('training_since_joined') for one in figures])
  add('token goodput', '{:.1%}', [one.get('token') for one in figures])
  wide = max(map(len, rows)) + 2
  width = 2 + max(len(cell) for cells in rows.values() for cell in cells)
  lines = (name.ljust(wide) + ''.join(cell.rjust(width) for cell in rows[name]) for name in rows)
  return '\n'.join(lines) + '\n'


def _at(curve: Sequence[Mapping[str, Any]], by: str, where: float, bits: bool) -> float:
  """The loss between two evaluations; in bits per byte where nats are of other units."""
  losses = [(one['bits_per_byte'] or np.nan) if bits else one['loss'] for one in curve]
  return float(np.interp(where, [one[by] for one in curve], losses))


def _training_loss(run: Mapping[str, Any]) -> float | None:
  losses = [row['loss'] for row in run['learners'].values() if row['loss'] is not None]
  return float(np.mean(losses)) if losses else None
