"""The pace: which sync opens next, and when.

Sync t opens once K live learners have reported a step >= t, so the K-th fastest learner sets the
pace: a fast network cannot shrink H, and when the fastest learner dies the next one carries on.

Only a *contributor* counts: a live learner that is caught up, which is to say that it trains on
published values only. A contributor is *ready* once its step has reached the next sync. Both sets
are kept up to date by events, so that a report costs the same with any number of learners.

Syncs that are a whole period late are left out: catching up would sync a fragment again after a few
inner steps, so H would shrink. Whole periods keep each fragment's turn.
"""

from collections.abc import Sequence

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import schedule as schedule_lib
from diloco_jax.protocol.syncer import members as members_lib


def kth_step(steps: list[int], quorum: int) -> int:
  """The step that K of these learners have reached (0 if there are fewer than K)."""
  return sorted(steps, reverse=True)[quorum - 1] if len(steps) >= quorum else 0


class Pace:
  """Where the run is on its schedule, and who is ready for the next sync."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    schedule: schedule_lib.Schedule,
    members: members_lib.Members,
  ):
    self._config = config
    self._schedule = schedule
    self._members = members
    self.opened = 0  # the last sync that was opened
    self.next = schedule.next(0)
    self.contributors: set[str] = set()
    self._ready: set[str] = set()

  def load(self, next_sync: int, opened: int) -> None:
    """Where the last process was."""
    self.next, self.opened = next_sync, opened

  def reopen(self, undecided: Sequence[int]) -> None:
    """Goes on after the last process; `undecided`: the syncs that it had opened, no more.

    What a fragment misses by that is in its next sync. Behind a closing sync there is none, so the
    run goes back to the first of them; later ones that were decided find nothing left to merge.
    """
    closing = [sync for sync in undecided if sync > self._config.total_steps]
    self.next = min([self.next, *closing])
    self.opened = min(self.opened, self.next - 1)

  @property
  def over(self) -> bool:
    """Every sync has been opened."""
    return self.next > self._schedule.last

  @property
  def reached(self) -> bool:
    """K contributors are ready for the next sync."""
    return not self.over and len(self._ready) >= self._config.quorum

  def enter(self, member: members_lib.Member) -> None:
    """The learner has caught up."""
    self.contributors.add(member.learner)
    self.mark(member)

  def leave(self, learner: str) -> None:
    self.contributors.discard(learner)
    self._ready.discard(learner)

  def mark(self, member: members_lib.Member) -> None:
    """The learner's step may have grown. One that has done its last step holds up none of the
    closing syncs."""
    step = self._schedule.last if member.finished else member.step
    if member.caught_up and step >= self.next:
      self._ready.add(member.learner)

  def last_due(self, fragment: int) -> int:
    """The last sync of a fragment that was opened or left out (not positive: none was)."""
    return self._schedule.last_due(fragment, self.opened)

  def skip_overdue(self) -> int:
    """Leaves out what is whole periods late; how many periods that was."""
    steps = [m.step for m in self._members.by_session.values() if m.caught_up]
    late = kth_step(steps, self._config.quorum) - self.next
    periods = max(0, late // self._config.period)
    self.next += periods * self._config.period
    return periods

  def open(self) -> int:
    """The sync that opens now."""
    self.opened, self.next = self.next, self._schedule.next(self.next)
    self._ready.clear()
    for member in self._members.by_session.values():
      self.mark(member)
    return self.opened

  def check(self) -> None:
    live = {member.learner for member in self._members.by_session.values()}
    assert self._ready <= self.contributors <= live, (self._ready, self.contributors, live)
