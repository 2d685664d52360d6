"""Virtual time: calls run in the order of (time, order of scheduling), so a run repeats exactly."""

import heapq
import itertools
from collections.abc import Callable

MS = 1_000_000
SECOND = 1_000 * MS
AT_ONCE = 100_000


class Circle(AssertionError):
  """Calls keep running while time stands still."""


class Engine:
  """The clock of the simulated world and its scheduled calls."""

  def __init__(self):
    self.now_ns = 0
    self._at_once = 0  # calls so far at the present time
    self._queue: list[tuple[int, int, Callable[[], None]]] = []
    self._order = itertools.count()

  def at(self, time_ns: int, call: Callable[[], None]) -> None:
    """Schedules a call at a time, now if that time has passed."""
    heapq.heappush(self._queue, (max(time_ns, self.now_ns), next(self._order), call))

  def after(self, delay_ns: int, call: Callable[[], None]) -> None:
    self.at(self.now_ns + delay_ns, call)

  def run(self, until_ns: int, done: Callable[[], bool] = lambda: False) -> None:
    """Runs until a time, or until `done()`."""
    queue = self._queue
    while queue and queue[0][0] <= until_ns and not done():
      time_ns, _, call = heapq.heappop(queue)
      self._count(time_ns)
      call()
    if not done():
      self.now_ns = max(self.now_ns, until_ns)

  def _count(self, time_ns: int) -> None:
    """Advances time. Raises Circle if the run is caught in a loop at one time."""
    self._at_once = self._at_once + 1 if time_ns == self.now_ns else 0
    self.now_ns = time_ns
    if self._at_once > AT_ONCE:
      raise Circle(f'{AT_ONCE} calls have run at {time_ns / SECOND:.6f} s: time stands still')
