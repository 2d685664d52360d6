"""For which syncs a learner is to be pulled: the rule of protocol/syncer/links.py, implemented a
second time. The period factors, r of a learner and `factor` of the run, are known from the
records."""

import dataclasses
import functools
import math

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import facts


@dataclasses.dataclass(slots=True)
class Turns:
  """Of one process of a learner, at one process of the syncer.

  Attributes:
    r: its period factor.
    sparse: whether it is sent whole fragments only.
    unanswered: the places of the syncs for which it was pulled on this session.
    newest: the greatest place of one for which it was pulled.
    extra: syncs for which it was pulled although it had no turn.
  """

  r: int = 1
  sparse: bool = False
  unanswered: set[int] = dataclasses.field(default_factory=set)
  newest: int = 0
  extra: set[int] = dataclasses.field(default_factory=set)

  def begins_session(self) -> None:
    self.unanswered.clear()
    self.extra.clear()

  def asked(self, config: config_lib.ProtocolConfig, sync: int, factor: int) -> None:
    self.extra = {one for one in self.extra if one > sync - 2 * factor * config.period}
    if not self.includes(config, sync, factor):
      self.extra.add(sync)
    self.newest = place(config, sync)
    oldest = self.newest - 4 * factor * max(config.fragments, 16)
    self.unanswered = {one for one in self.unanswered if one > oldest}
    self.unanswered.add(self.newest)

  def answered(self, config: config_lib.ProtocolConfig, sync: int) -> None:
    self.unanswered = {one for one in self.unanswered if one > place(config, sync)}

  def awaited(self, config: config_lib.ProtocolConfig, sync: int, factor: int) -> set[int]:
    """The pulls whose answers count as under way when a sync is announced or opens."""
    oldest = place(config, sync) - factor * max(2 * config.fragments, 4 * self.r)
    return {one for one in self.unanswered if one > oldest}

  def includes(self, config: config_lib.ProtocolConfig, sync: int, factor: int) -> bool:
    """Whether the learner is pulled for a sync that would have its quorum without it."""
    if self.sparse or self.r == 1:
      return not self.sparse
    if config.closing(sync):
      return True
    at, awaited = place(config, sync), self.awaited(config, sync, factor)
    if not awaited and at >= self.newest + factor * config.fragments:
      return True
    turns = sorted(cycle(config.fragments, factor))
    cycles, rest = divmod(at, config.fragments * factor)
    if rest not in turns:
      return False  # of a period factor that has changed
    own = (cycles * config.fragments + turns.index(rest)) % (config.fragments * self.r)
    return own in cycle(config.fragments, self.r) and (len(awaited) - 2 < config.lead // self.r)


def lead(config: config_lib.ProtocolConfig, tempo: facts.Tempo) -> int:
  """How many steps before it opens a sync may be announced, and how many at once."""
  return max(1, config.overlap * tempo.factor + config.steps_ahead)


def in_flight(config: config_lib.ProtocolConfig, tempo: facts.Tempo) -> int:
  """How many syncs may be open at once."""
  return max(1, config.overlap + math.ceil(tempo.delay / tempo.factor))


def place(config: config_lib.ProtocolConfig, sync: int) -> int:
  """How many syncs of the schedule are due before this one."""
  period, step = divmod(sync - 1, config.period)
  dues = [(p + 1) * config.period // config.fragments for p in range(config.fragments)]
  return period * config.fragments + sum(due < step + 1 for due in dues)


@functools.lru_cache(64)
def cycle(fragments: int, r: int) -> frozenset[int]:
  """The places among the first r * P at which a learner is pulled: each r-th one, and one earlier
  from where on the fragments would repeat."""
  places: list[int] = []
  early = 0
  while len(places) < fragments:
    place = len(places) * r - early
    early += place % fragments in {one % fragments for one in places}
    places.append(len(places) * r - early)
  return frozenset(places)
