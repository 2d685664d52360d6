"""The paper's tables about goodput, from simulated machines, from islands alone, from formulas.

    python experiments/goodput.py --table=failures       # minutes on two cores
    python experiments/goodput.py --quick                # all tables, shorter times

Prints the published figures beside ours, and writes OUT/TABLE.csv, .png and .txt. What each figure
was made of stands with it: *machines* (the production machines in virtual time), *islands*
(failures alone) or *formula*.
"""

import concurrent.futures
import csv
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import matplotlib.figure
from absl import app, flags
from rich import progress

from diloco_jax.proof.goodput import tables as tables_lib

_TABLE = flags.DEFINE_list('table', list(tables_lib.TABLES), 'which tables')
_QUICK = flags.DEFINE_bool('quick', False, 'shorter simulated times')
_OUT = flags.DEFINE_string('out', 'runs/goodput', 'folder of the CSV files and plots')
_JOBS = flags.DEFINE_integer('jobs', 0, 'processes; 0: one per core', lower_bound=0)


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise app.UsageError(f'unexpected words: {" ".join(argv[1:])}')
  unknown = sorted(set(_TABLE.value) - set(tables_lib.TABLES))
  if unknown:
    raise app.UsageError(
      f'there is no table {unknown[0]!r}; use some of: {", ".join(tables_lib.TABLES)}'
    )
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(_JOBS.value or os.cpu_count(), context) as pool:
    for name in _TABLE.value:
      table, began = tables_lib.TABLES[name](_QUICK.value), time.monotonic()
      figures = run(table, pool)
      text = f'{text_of(table, figures)}\n{time.monotonic() - began:.0f} s\n'
      write_csv(figures, out / f'{name}.csv')
      plot(table, figures, out / f'{name}.png')
      (out / f'{name}.txt').write_text(text, 'utf-8')
      print(text)


def run(table: tables_lib.Table, pool: concurrent.futures.Executor) -> list[tables_lib.Figure]:
  """Runs all jobs of a table, the longest first; returns their figures in the table's order."""
  bar = progress.Progress(disable=not sys.stderr.isatty(), transient=True)
  with bar:
    task = bar.add_task(table.title, total=sum(job.cost for job in table.jobs))
    began = sorted(table.jobs, key=lambda job: -job.cost)
    futures = {pool.submit(job.make): job for job in began}
    try:
      for future in concurrent.futures.as_completed(futures):
        future.result()
        bar.advance(task, futures[future].cost)
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise
  made = {job.name: future.result() for future, job in futures.items()}
  return [figure for job in table.jobs for figure in made[job.name]]


# --- Reports --------------------------------------------------------------------------------------


def _parts(
  figures: Sequence[tables_lib.Figure],
) -> dict[tuple[str, str], list[tables_lib.Figure]]:
  """By (what, made), in the order of the figures."""
  parts: dict[tuple[str, str], list[tables_lib.Figure]] = {}
  for one in figures:
    parts.setdefault((one.what, one.made), []).append(one)
  return parts


def text_of(table: tables_lib.Table, figures: Sequence[tables_lib.Figure]) -> str:
  """The figures as text: ours, or paper / ours / difference."""
  return '\n'.join([table.title, table.notes, *_texts(figures), *table.verdicts(figures), ''])


def _texts(figures: Sequence[tables_lib.Figure]) -> Iterator[str]:
  for (what, made), part in _parts(figures).items():
    cells = {(one.row, one.column): _cell(one) for one in part}
    rows, columns = (list(dict.fromkeys(key[which] for key in cells)) for which in (0, 1))
    published = any(one.paper is not None for one in part)
    yield f'\n{what} ({made}{"; paper / ours, difference" if published else ""})'
    width = max(map(len, [*cells.values(), *columns])) + 2
    first = max(map(len, rows))
    yield ' ' * first + ''.join(column.rjust(width) for column in columns)
    for row in rows:
      yield row.ljust(first) + ''.join(cells.get((row, c), '').rjust(width) for c in columns)


def _cell(one: tables_lib.Figure) -> str:
  if one.paper is None:
    return f'{one.ours:.2f}'
  return f'{one.paper:g} / {one.ours:.2f}, {one.difference:+.2f}'


def write_csv(figures: Sequence[tables_lib.Figure], path: pathlib.Path) -> None:
  with path.open('w', newline='', encoding='utf-8') as file:
    writer = csv.writer(file)
    writer.writerow(('what', 'made', 'row', 'column', 'ours', 'paper', 'difference'))
    for one in figures:
      writer.writerow(
        (one.what, one.made, one.row, one.column, one.ours, one.paper, one.difference)
      )


def plot(table: tables_lib.Table, figures: Sequence[tables_lib.Figure], path: pathlib.Path) -> None:
  """One chart for each kind of figure: ours as lines, the paper's as crosses."""
  parts = _parts(figures)
  figure = matplotlib.figure.Figure(figsize=(7, 4 * len(parts) + 0.6), layout='constrained')
  figure.suptitle(table.title)
  charts = figure.subplots(len(parts), squeeze=False).flat
  for axes, ((what, made), part) in zip(charts, parts.items()):
    for row in dict.fromkeys(one.row for one in part):
      line = [one for one in part if one.row == row]
      drawn = axes.plot([o.column for o in line], [o.ours for o in line], marker='o', label=row)
      known = [one for one in line if one.paper is not None]
      axes.plot(
        [o.column for o in known], [o.paper for o in known], 'x', color=drawn[0].get_color()
      )
    axes.set(ylabel=what, title=f'{made}; crosses: the paper' if known else made)
    axes.legend(fontsize=7)
  figure.savefig(path, dpi=120)


if __name__ == '__main__':
  app.run(main)
