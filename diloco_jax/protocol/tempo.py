"""The tempo of the run: its period and its overlap at present.

The settings name a period H and an overlap tau. Where most links do not carry a payload in the
time between two syncs, or a version and its answer are on the way for longer than a period, few
payloads would come in time to be merged. Then the syncer lengthens both for all learners, and
shortens them again when the links allow it::

    period    q H steps, with the *period factor* q of the run: 1 to `sync.longest_period` / H
    overlap   q tau steps; a sync waits longer by the delay
    delay     of a message to a learner and of its answer, in inner steps

Only most learners together change it: one with a thin link is asked less itself
(protocol/syncer/links.py). The learners need not know: they answer pulls. A new process of the
syncer begins with the settings, and measures again.
"""

import dataclasses
from collections.abc import Sequence

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import facts

# Shares of the time between two syncs, in 1/1000: a factor of 1 stays up to the first, and comes
# back from the second on. If most links are slow, every payload has to be in time; where only one
# is slow, one that is late is merged one period later.
MOST_LINKS, ONE_LINK = (900, 700), (1_400, 1_150)
# A factor stays while it is TIGHT to WIDE times the share (in 1/1000), else it becomes RIGHT times
# the share.
TIGHT, WIDE, RIGHT = 1_100, 1_600, 1_250
LEAST_BYTES = 1 << 15  # smaller payloads measure encoding and busy cores
LEAST_DELAY_NS = config_lib.SECOND_NS // 10  # a shorter one may be that of busy cores


def factor(share: int, now: int, most: int, limits: tuple[int, int] = MOST_LINKS) -> int:
  """The period factor for payloads that take this share of the time between two syncs, in 1/1000,
  where it is `now`.

  >>> [factor(share, 1, 16) for share in (900, 1_000, 1_500, 4_000, 99_000)]
  [1, 2, 2, 5, 16]
  >>> [factor(share, 5, 16) for share in (5_000, 4_500, 3_200, 2_400, 700)]
  [7, 5, 5, 3, 1]
  """
  if share <= limits[now > 1]:
    return 1
  if _fits(share, TIGHT) <= now <= _fits(share, WIDE):
    return min(most, now)
  return min(most, max(2, _fits(share, RIGHT)))


def _fits(share: int, margin: int) -> int:
  return -(-share * margin // 1_000_000)


def are_measured(payload_bytes: Sequence[int]) -> bool:
  """Whether a payload of mean size is large enough to measure its link."""
  return sum(payload_bytes) >= LEAST_BYTES * len(payload_bytes)


@dataclasses.dataclass(slots=True)
class Tempo:
  """The period factor and the delay, and what follows from them."""

  config: config_lib.ProtocolConfig
  factor: int = 1
  delay: int = 0

  @property
  def period(self) -> int:
    """Inner steps between two syncs of one fragment."""
    return self.config.period * self.factor

  @property
  def overlap(self) -> int:
    """The latency budget of one sync, in inner steps, from its last payload on."""
    return self.config.overlap * self.factor

  @property
  def lead(self) -> int:
    """How many inner steps before it opens a sync may be announced, and how many at once."""
    return max(1, self.overlap + self.config.steps_ahead)

  @property
  def in_flight(self) -> int:
    """How many syncs may be open at once."""
    return max(1, self.config.overlap + -(-self.delay // self.factor))

  def fact(self, sync: int) -> facts.Tempo:
    """The fact for the records; `sync`: the next one."""
    return facts.Tempo(factor=self.factor, delay=self.delay, period=self.period, sync=sync)

  def adapt(self, share: int, delay: int) -> bool:
    """Whether the period or the overlap changes.

    Args:
      share: of the time between two syncs of the settings, that payloads of most learners take, in
        1/1000.
      delay: of a message to most learners and of the answer, in inner steps.
    """
    before = self.factor, self.delay
    most = max(1, self.config.longest_period // self.config.period)
    if delay > self.delay or 2 * delay < self.delay:
      self.delay = delay
    long = self.delay and self.delay + self.config.overlap + 2
    self.factor = min(most, max(factor(share, self.factor, most), -(-long // self.config.period)))
    return before != (self.factor, self.delay)
