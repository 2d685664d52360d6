"""The length that a grace window should have, from the times that a syncer could know."""

import collections
from collections.abc import Iterable

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import facts
from diloco_jax.protocol.syncer import grace


class Window:
  """The times that determine the grace window (paper section 4): of steps, of gathering K payloads,
  and from the decision to merge to the first adoption."""

  def __init__(self, config: config_lib.ProtocolConfig):
    self._config = config
    self._sync_ns = grace.Average()
    # By nonce: step times as reported, times between reports, the last report and its steps.
    self._steps_ns: dict[int, grace.Average] = collections.defaultdict(grace.Average)
    self._reports_ns: dict[int, grace.Average] = collections.defaultdict(grace.Average)
    self._last: dict[int, tuple[int, int]] = {}
    self._merging: dict[int, tuple[int, int]] = {}  # fragment: version, since when

  def begins_life(self, now_ns: int, nonce: int, steps: int) -> None:
    self._last[nonce] = now_ns, max(steps, self._last.get(nonce, (0, 0))[1])

  def ends_life(self, nonce: int) -> None:
    """Another process has its learner id."""
    for times in (self._steps_ns, self._reports_ns, self._last):
      times.pop(nonce, None)

  def step(self, now_ns: int, nonce: int, steps: int, step_ns: int) -> None:
    if step_ns:
      self._steps_ns[nonce].add(step_ns)
    last_ns, before = self._last[nonce]
    if steps > before:
      self._reports_ns[nonce].add((now_ns - last_ns) // (steps - before))
      self._last[nonce] = now_ns, steps

  def usual_report_ns(self, nonces: Iterable[int]) -> int:
    """The lower median of the times between two reports; 0: unknown."""
    known = (self._reports_ns[one] for one in nonces)
    times = sorted(one.value for one in known if one.samples)
    return times[(len(times) - 1) // 2] if times else 0

  def usual_step_ns(self, nonces: Iterable[int]) -> int:
    """The lower median of the learners' step times; 0: unknown."""
    times = sorted(filter(None, map(self._step_ns, nonces)))
    return times[(len(times) - 1) // 2] if times else 0

  def _step_ns(self, nonce: int) -> int:
    measured = self._reports_ns[nonce]
    if not (measured.samples and self._steps_ns[nonce].samples):
      return 0
    low, high = measured.value // 4, 4 * measured.value
    return min(high, max(low, self._steps_ns[nonce].value))

  def merges(self, now_ns: int, fragment: int, version: int) -> None:
    self._merging[fragment] = version, now_ns

  def refused(self, fragment: int) -> None:
    self._merging.pop(fragment, None)

  def all_lost(self) -> None:
    self._merging.clear()

  def adopted(self, now_ns: int, fragment: int, version: int) -> None:
    expected, since_ns = self._merging.get(fragment, (None, 0))
    if version == expected:
      self._sync_ns.add(now_ns - since_ns)
      del self._merging[fragment]

  def begins(self, nonces: Iterable[int], tempo: facts.Tempo) -> int:
    """A sync opens; returns its grace window for these live learners."""
    if not self._sync_ns.samples:
      return 0
    usual_ns = self.usual_step_ns(nonces)
    way_ns = tempo.delay * usual_ns
    own_ns = max(0, self._sync_ns.value - way_ns)
    slack_ns = max(0, self._config.overlap * tempo.factor * usual_ns - own_ns)
    return way_ns + slack_ns * self._config.grace_permille // 1000
