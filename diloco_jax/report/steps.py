"""The steps of a learner as columns, and the pace of steps."""

import array
import bisect
import dataclasses
from collections.abc import Iterator, Sequence

_WINDOW = 16  # steps of a process, or outer steps, before their pace foretells the end


@dataclasses.dataclass(slots=True)
class Step:
  """One inner step: when it ended, tokens of all learners by then, the learner's clock and loss."""

  at_s: float
  tokens: int
  step: int
  loss: float
  seconds: float


class Steps(Sequence[Step]):
  """Steps in the order of time, in 40 bytes each: a run has millions."""

  def __init__(self):
    self._columns = tuple(array.array(code) for code in 'dqqdd')

  def append(self, step: Step) -> None:
    for column, name in zip(self._columns, Step.__slots__):
      column.append(getattr(step, name))

  def __len__(self) -> int:
    return len(self._columns[0])

  def __getitem__(self, index: int) -> Step:  # type: ignore[override]  # no slices
    return Step(*(column[index] for column in self._columns))

  def losses(self, begin: int, end: int) -> array.array:
    return self._columns[3][begin:end]

  def pace(self, since_s: float | None) -> tuple[int, float]:
    at_s, _, clocks, *_ = self._columns
    return pace(at_s, clocks, since_s)

  def __iter__(self) -> Iterator[Step]:
    return map(Step, *self._columns)


def pace(at_s: array.array, clocks: array.array, since_s: float | None) -> tuple[int, float]:
  """The newer half of the steps since then, and the clocks a second in them; 0.0: the pace is not
  known, as there are too few."""
  count = 0 if since_s is None else (len(at_s) - bisect.bisect_left(at_s, since_s)) // 2
  if 2 * count < _WINDOW:
    return 0, 0.0
  moved, took_s = (column[-1] - column[-count - 1] for column in (clocks, at_s))
  return count, moved / max(took_s, 1e-9)
