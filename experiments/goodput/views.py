"""A table of goodput as text, CSV and plot."""

import csv
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import matplotlib.figure

from experiments.goodput import tables as tables_lib


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
    columns = list(dict.fromkeys(one.column for one in part))
    places = range(len(columns))
    for row in dict.fromkeys(one.row for one in part):
      line = {one.column: one for one in part if one.row == row}
      ours = [line[column].ours if column in line else None for column in columns]
      paper = [line[column].paper if column in line else None for column in columns]
      (drawn,) = axes.plot(places, _or_nan(ours), marker='o', label=row)
      axes.plot(places, _or_nan(paper), 'x', color=drawn.get_color())
    known = any(one.paper is not None for one in part)
    axes.set_xticks(places, columns)
    if max(one.ours for one in part) > 30 * min(one.ours for one in part) > 0:
      axes.set_yscale('log')
    axes.set(ylabel=what, title=f'{made}; crosses: the paper' if known else made)
    axes.legend(fontsize=7)
  figure.savefig(path, dpi=120)


def _or_nan(values: Iterable[float | None]) -> list[float]:
  return [math.nan if value is None else value for value in values]
