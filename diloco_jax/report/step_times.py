"""The times of many steps in little memory, and the robust ideal of them."""

import math

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
    found = self._bins.setdefault(round(math.log2(max(1, time_ns)) * BINS), [0, 0])
    found[0] += 1
    found[1] += time_ns

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
    near = [one for one in self._bins.values() if one[1] / one[0] <= limit]
    return sum(total for _, total in near) / sum(count for count, _ in near)

  def beyond_ns(self, limit_ns: float) -> int:
    """The sum of the durations above a limit."""
    return sum(total for count, total in self._bins.values() if total / count > limit_ns)


def _median(counted: list[tuple[float, int]]) -> float:
  """Of values that occur so many times."""
  left = sum(count for _, count in counted) / 2
  for value, count in sorted(counted):
    left -= count
    if left <= 0:
      return value
  return 0.0
