"""The adaptive grace window: how long a sync waits for more learners than its quorum.

A sync must end within tau inner steps of its opening, or its result reaches the learners later than
planned. The part of that time which the sync itself does not need is *slack*, and the syncer may
spend a fraction gamma of the slack on waiting (paper section 4)::

    xi_slack = tau * xi_step - (xi_quorum + xi_sync)        0 <= xi_grace <= gamma * xi_slack

    xi_step    time of one inner step
    xi_quorum  from opening a sync to its K-th payload
    xi_sync    from the decision to merge to the first learner that has adopted the result, of
               syncs during which a learner was always there

The paper counts the window from the K-th payload, with averages. Here the syncer counts it from the
opening, so that xi_quorum is this sync's own and an early quorum does not shorten the wait::

    the sync closes at    opening + gamma * (tau * xi_step - xi_sync)    and not before its quorum

Averages are in integers, so that every host computes the same. Without slack the sync merges at its
quorum. The paper does not say whose step time counts: we take the median of the live learners',
each near the time that the syncer measures (members.py), so that no learner alone ends the waiting
for the others. A closing sync waits up to a lease: all learners have finished, so waiting costs
nothing, and a payload that it leaves out is lost. So does the first sync of a fragment after an
outage, as all bring what they have trained in it. Until xi_sync has been measured once, by the
first sync, there is no other grace window, also for K = 1.
"""

import dataclasses

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import tempo as tempo_lib

SHIFT = 3  # a new sample has weight 1/8


@dataclasses.dataclass(slots=True)
class Average:
  """Integer exponential moving average: value += (sample - value) / 8; the first sample is the
  first value, so that the average does not start at zero."""

  value: int = 0
  samples: int = 0

  def add(self, sample: int) -> None:
    if self.samples == 0:
      self.value = sample
    else:
      self.value += (sample - self.value) >> SHIFT
    self.samples += 1


@dataclasses.dataclass(slots=True)
class Grace:
  """The averages of a syncer and the grace window from them (members keep their own xi_step)."""

  sync_ns: Average = dataclasses.field(default_factory=Average)
  _merging: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

  def merge_began(self, fragment: int, version: int, now_ns: int) -> None:
    self._merging[fragment] = (version, now_ns)

  def all_lost(self) -> None:
    """No learner is left: the next adoption would measure how long the learners were away."""
    self._merging.clear()

  def adopted(self, fragment: int, version: int, now_ns: int) -> None:
    """A learner has adopted this version; the first adoption ends the measured time of its sync."""
    merging, began_ns = self._merging.get(fragment, (None, 0))
    if merging == version:
      self.sync_ns.add(now_ns - began_ns)
      del self._merging[fragment]

  def window_ns(self, tempo: tempo_lib.Tempo, step_ns: int) -> int:
    """How long after its opening a sync waits for more than K learners, for a usual step of
    `step_ns`."""
    if not self.sync_ns.samples:
      return 0
    delay_ns = tempo.delay * step_ns
    slack_ns = tempo.overlap * step_ns - max(0, self.sync_ns.value - delay_ns)
    return delay_ns + max(0, slack_ns) * tempo.config.grace_permille // config_lib.PERMILLE
