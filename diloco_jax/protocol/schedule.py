"""Which fragment is due at which step of the clock.

Sync t handles the fragment p with (t - t_p) mod H == 0 (paper section 4). The offsets are spread
evenly, t_p = floor((p + 1) H / P), so that P = H gives one fragment a step (p = (t - 1) mod P) and
P = 1 gives DiLoCo: all fragments at once, every H steps.

If the links do not carry that, the syncer lengthens the period of the run (tempo.py): with a
*period factor* q each fragment has its turn in one of q periods, and of the syncs about one in q,
so that the payloads stay evenly spread. Learners need not know q: they answer pulls.

After the last inner step T every fragment is due once more, at T < t <= T + H: these *closing*
syncs merge the steps since its last sync, so that the run ends without unmerged steps.

Another schedule must keep two assumptions of other files: `Pace.skip_overdue` skips whole periods,
and invariant P1 (docs/simulator.md) states when a sync opens.
"""

import bisect
import math

from diloco_jax.protocol import config as config_lib


class Schedule:
  """The due times of a run: pure arithmetic on (P, H, T)."""

  def __init__(self, config: config_lib.ProtocolConfig):
    count, self.period = config.fragments, config.period
    self.total_steps = config.total_steps
    self.offsets = tuple((p + 1) * self.period // count for p in range(count))
    self._fragments = {offset % self.period: p for p, offset in enumerate(self.offsets)}

  @property
  def last(self) -> int:
    """The last due time, of the last closing sync."""
    return self.total_steps + self.period

  def fragment(self, t: int) -> int | None:
    """The fragment that is due at t, or None."""
    return self._fragments.get(t % self.period) if t > 0 else None

  def next(self, t: int, factor: int = 1) -> int:
    """The first due time after t (t >= 0) that has a turn with this period factor of the run."""
    whole, rest = divmod(t, self.period)
    index = bisect.bisect_right(self.offsets, rest)
    if index == len(self.offsets):
      whole, index = whole + 1, 0
    due = whole * self.period + self.offsets[index]
    while factor > 1 and due <= self.total_steps and self.turn(due, factor) is None:
      due = self.next(due)
    return due

  def number(self, sync: int) -> int:
    """The index of a sync among all syncs of the schedule."""
    return -(-sync * len(self.offsets) // self.period) - 1

  def turn(self, sync: int, factor: int) -> int | None:
    """The index of a sync among those that have a turn with this period factor; None: it has
    none."""
    return turn(self.number(sync), len(self.offsets), factor)

  def due(self, fragment: int, after: int) -> int:
    """The first due time of `fragment` after step `after`."""
    offset = self.offsets[fragment]
    if after < offset:
      return offset
    return after + self.period - (after - offset) % self.period

  def last_due(self, fragment: int, upto: int) -> int:
    """The last due time of `fragment` up to step `upto` (not positive: there was none)."""
    return self.due(fragment, upto) - self.period


def turn(number: int, fragments: int, factor: int) -> int | None:
  """The index of sync `number`, of which `number % fragments` is the fragment, among those that
  have a turn: each fragment in one of `factor` periods, and one sync of about `factor`.

  >>> [n for n in range(48) if turn(n, 12, 5) is not None]
  [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
  >>> [(n % 4, n // 4) for n in range(32) if turn(n, 4, 4) is not None]  # fragment, period
  [(0, 0), (3, 0), (2, 1), (1, 2), (0, 4), (3, 4), (2, 5), (1, 6)]
  >>> turn(45, 12, 5), turn(46, 12, 5), turn(60, 12, 5)
  (9, None, 12)
  """
  cycle, rest = divmod(number, factor * fragments)
  index = -(-rest // factor)
  first = index * factor - index * math.gcd(factor, fragments) // fragments
  return cycle * fragments + index if index < fragments and rest == first else None
