"""The steps of a learner as columns, the pace of steps, and their times with the robust ideal."""

import array
import bisect
import dataclasses
import math
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


# --- The times of many steps, in little memory ----------------------------------------------------

BINS = 64  # for each factor of two: a bin is 1.1 % wide


class StepTimes:
  """A histogram of durations.

  The ideal step is that of ml-goodput-measurement: the mean of the steps that take at most the
  median plus three times the median absolute deviation. Its floor of one second is left out.
  """

  def __init__(self):
    self.count = self.total_ns = 0
    self._bins: dict[int, list[int]] = {}  # by logarithm: how many, their sum

  def add(self, time_ns: int) -> None:
    self.count += 1
    self.total_ns += time_ns
    times = self._bins.setdefault(round(math.log2(max(1, time_ns)) * BINS), [0, 0])
    times[0] += 1
    times[1] += time_ns

  @property
  def median_ns(self) -> float:
    """0 without steps; within the width of a bin."""
    return _median([(total / count, count) for count, total in self._bins.values()])

  @property
  def ideal_ns(self) -> float:
    """0 without steps.

    >>> times = StepTimes()
    >>> for time_ns in (100, 101, 99, 100, 900):
    ...   times.add(time_ns)
    >>> times.ideal_ns
    100.0
    """
    if not self.count:
      return 0.0
    median = self.median_ns
    spread = _median([(abs(total / count - median), count) for count, total in self._bins.values()])
    limit = median + 3 * spread
    near = [times for times in self._bins.values() if times[1] / times[0] <= limit]
    return sum(total for _, total in near) / sum(count for count, _ in near)

  def beyond_ns(self, limit_ns: float) -> int:
    """The sum of the durations above a limit."""
    return sum(total for count, total in self._bins.values() if total / count > limit_ns)


def _median(counted: list[tuple[float, int]]) -> float:
  """The median of values that occur so many times."""
  left = sum(count for _, count in counted) / 2
  for value, count in sorted(counted):
    left -= count
    if left <= 0:
      return value
  return 0.0
