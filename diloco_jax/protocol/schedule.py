"""Which fragment is due at which step of the clock.

Sync t handles the fragment p with (t - t_p) mod H == 0 (paper section 4). The offsets are spread
evenly, t_p = floor((p + 1) H / P), so that P = H gives one fragment a step (p = (t - 1) mod P) and
P = 1 gives DiLoCo: all fragments at once, every H steps.

After the last inner step T every fragment is due once more, at T < t <= T + H: these *closing*
syncs merge the steps since its last sync, so that the run ends without unmerged steps.

Another schedule must keep two assumptions of other files: `Pace.skip_overdue` skips whole periods,
and invariant P1 (docs/simulator.md) states when a sync opens.
"""

import bisect

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

  def next(self, t: int) -> int:
    """The first due time after t (t >= 0)."""
    whole, rest = divmod(t, self.period)
    place = bisect.bisect_right(self.offsets, rest)
    if place == len(self.offsets):
      return (whole + 1) * self.period + self.offsets[0]
    return whole * self.period + self.offsets[place]

  def due(self, fragment: int, after: int) -> int:
    """The first due time of `fragment` after step `after`."""
    offset = self.offsets[fragment]
    if after < offset:
      return offset
    return after + self.period - (after - offset) % self.period

  def last_due(self, fragment: int, upto: int) -> int:
    """The last due time of `fragment` up to step `upto` (not positive: there was none)."""
    return self.due(fragment, upto) - self.period
