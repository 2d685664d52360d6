"""A study: its arms, and the book of those that have run."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from experiments.studies.lib import arms

Row = dict[str, Any]


class Book:
  """The rows of finished arms, in a file of one JSON object per line. A torn last line, of a
  process that was killed, is dropped: its arm runs again."""

  def __init__(self, path: pathlib.Path | None = None):
    self._path, self._rows = path, {}
    if path is None or not path.exists():
      return
    lines = path.read_text('utf-8').splitlines(keepends=True)
    whole = [line for line in lines if line.endswith('\n')]
    if len(whole) < len(lines):
      path.write_text(''.join(whole), 'utf-8')
    for row in map(json.loads, whole):
      self._rows[row['key']] = row

  def add(self, row: Row) -> None:
    self._rows[row['key']] = row
    if self._path is not None:
      with self._path.open('a', encoding='utf-8') as file:
        file.write(json.dumps(row) + '\n')

  def __len__(self) -> int:
    return len(self._rows)

  def row(self, arm: arms.Arm) -> Row | None:
    """Of this arm with these settings; None: it has not run."""
    return self._rows.get(arm.key)

  def best(self, candidates: Sequence[arms.Arm]) -> arms.Arm | None:
    """The one with the least loss; None: not all have run."""
    rows = [self.row(arm) for arm in candidates]
    if None in rows:
      return None
    return min(zip(rows, candidates, strict=True), key=lambda pair: pair[0]['loss'])[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """A question and its arms.

  Attributes:
    name: of the study and its files.
    title: the question, in a line.
    plan: (quick, book) -> the arms that are known now. More may follow from the rows of these, for
      example other seeds of the best rate.
    conclude: (quick, book, folder) -> a text below the table; it draws the study's plot itself.
  """

  name: str
  title: str
  plan: Callable[[bool, Book], list[arms.Arm]]
  conclude: Callable[[bool, Book, pathlib.Path], str] | None = None

  def missing(self, quick: bool, book: Book) -> list[arms.Arm]:
    """The arms that are known now and have not run, each once."""
    planned = {arm.key: arm for arm in self.plan(quick, book)}
    return [arm for arm in planned.values() if book.row(arm) is None]


def best_rate(
  make: Callable[[float], arms.Arm], rates: Sequence[float], book: Book
) -> tuple[list[arms.Arm], float | None]:
  """The arms of a search for the best inner rate, and the rate, None while it is unknown. If the
  best rate is the last on a side, the search goes on there: a best rate has a worse one on each
  side."""
  rates = sorted(rates)
  while True:
    planned = [make(rate) for rate in rates]
    best = book.best(planned)
    if best is None:
      return planned, None
    rate = rates[planned.index(best)]
    if rate == rates[-1]:
      rates.append(round(2 * rate, 6))
    elif rate == rates[0]:
      rates.insert(0, round(rate / 2, 6))
    else:
      return planned, rate


def at_best_rates(
  make: Callable[[str, float, int, str], arms.Arm],
  methods: Sequence[str],
  rates: Sequence[float],
  quick: bool,
  book: Book,
  seeds: Sequence[int] = (0,),
) -> list[arms.Arm]:
  """Each method at its best inner rate, found with the first seed, and then with the others; quick:
  at the last rate. `make(method, rate, seed, against)`; the others are compared with the first
  method at its best rate."""
  planned, baseline = [], ''
  for method in methods:

    def arm_of(
      rate: float, seed: int = seeds[0], method: str = method, against: str = baseline
    ) -> arms.Arm:
      return make(method, rate, seed, against)

    if quick:
      tried, best = [arm_of(rates[-1])], rates[-1]
    else:
      tried, best = best_rate(arm_of, rates, book)
    planned += tried
    if best is not None:
      planned += [arm_of(best, seed) for seed in seeds[1:]]
      if method == methods[0]:
        baseline = arm_of(best).name
  return planned


def seeds(quick: bool) -> Sequence[int]:
  """Those of a study."""
  return (0,) if quick else (0, 1, 2)
