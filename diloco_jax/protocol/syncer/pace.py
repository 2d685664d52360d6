"""The pace: which sync opens next, and when.

Sync t opens once K live learners have reported a step >= t, so the K-th fastest learner sets the
pace: a fast network cannot shrink H, and when the fastest learner dies the next one takes over.
A *closing* sync, after the last inner step, opens once all live learners have done their last step,
so that no step is left out, or one lease after K of them: a learner may live and make no steps.

The syncer announces a sync before it opens: `lead` steps before, which is the time that a request
and its answer may take, so that a learner knows of it when its payload is due.

Only a *contributor* counts: a live learner that is caught up, which means that it trains on
published values only. A contributor is *ready* once its step has reached the next sync. Events
update both sets, so a report costs the same with any number of learners.

A learner's clock counts for the pace at SPEED times the usual speed at most, measured by the syncer
as the median over the learners of the time between two reports: a learner whose clock is wrong, or
a lie, does not carry the others to the end of the run. A process of an earlier syncer has made
steps that this one could not measure. Its clock counts as far as the lower median of the returned
processes allows, and until a second one has returned, or a lease has passed, by one period.

No measure bounds the steps that a process may report at all (plausible.py): load, compiling and
pauses make steps slower, so none says how fast the next step is. Only time does, at a step every
FASTEST_NS. A lie within that gains little: the clock counts as above, a weight and a norm up to a
few times those of the others (numerics/merge.py, screening.py).

The syncer skips syncs that are a whole period late: opening them would sync a fragment again after
a few inner steps, so H would shrink. Skipping whole periods keeps each fragment's turn. If it has
been away itself, it waits for the learners that were lost, once and for a limited time: what they
bring is as long as what the first of them brings, and has to be merged with it.
"""

import dataclasses
from collections.abc import Sequence

from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import members as members_lib

SPEED = 16
FASTEST_NS = 100_000  # of an inner step: the turn of a learner's machine after it takes longer


def lower_median(values: list[int]) -> int:
  """The median, of two in the middle the lower one; 0 of none.

  >>> lower_median([9, 1, 5, 7]), lower_median([])
  (5, 0)
  """
  return sorted(values)[(len(values) - 1) // 2] if values else 0


def step_ns(members: members_lib.Members) -> int:
  """The usual time of an inner step, over the live members; 0: unknown."""
  times = (member.inner_step_ns for member in members.by_session.values())
  return lower_median([time_ns for time_ns in times if time_ns])


def kth_step(steps: list[int], quorum: int) -> int:
  """The step that K of these learners have reached (0 with fewer than K learners)."""
  return sorted(steps, reverse=True)[quorum - 1] if len(steps) >= quorum else 0


@dataclasses.dataclass(slots=True)
class Front:
  """One of two: the sync that opens next, and the one that is announced next, `lead` steps before.

  Attributes:
    t: the next sync here.
    last: the newest one that was opened, or announced; 0: none was.
    ready: the contributors whose clock, with the lead, has reached `t`.
  """

  t: int
  last: int = 0
  ready: set[str] = dataclasses.field(default_factory=set)


class Pace:
  """The position of the run on its schedule, and the learners that are ready for the next sync.

  Attributes:
    last: the last sync of the run.
    opening, announcing: where the run is.
    contributors: live learners that are caught up.
    retimed: the last sync that opened before the period of the run changed.
    usual_ns: between two reports of a learner; 0: not measured yet.
  """

  def __init__(self, books: books_lib.Books):
    self._config = books.config
    self._tempo = books.tempo
    self._schedule = books.schedule
    self._members = books.members
    self.last = books.schedule.last
    first = books.schedule.next(0)
    self.opening, self.announcing = Front(first), Front(first)
    self.contributors: set[str] = set()
    self.retimed = -1
    self._wait_to_ns: int | None = None  # when closing syncs wait for K learners only
    self._waited = False
    self.usual_ns = 0
    # Learners that were lost since the last sync opened. If the last contributor is among them, an
    # overdue sync waits for them until a certain time.
    self._lost: set[str] = set()
    self._reunites = False
    self._return_ns: int | None = None

  def load(self, next_sync: int, opened: int) -> None:
    """Where the last process was."""
    self.opening.t = self.announcing.t = next_sync
    self.opening.last = opened
    self._lost, self._reunites = set(self._members.by_id), True

  def reopen(self, undecided: Sequence[int]) -> None:
    """Goes on after the last process; `undecided`: the syncs that it had opened, no more.

    What a fragment misses by that is in its next sync. Behind a closing sync there is none, so the
    run goes back to the first of them; later ones that were decided find nothing left to merge.
    """
    closing = [sync for sync in undecided if self._config.closing(sync)]
    self.opening.t = self.announcing.t = min([self.opening.t, *closing])
    self.opening.last = min(self.opening.last, self.opening.t - 1)

  @property
  def over(self) -> bool:
    """Whether every sync has been opened."""
    return self.opening.t > self.last

  def is_reached(self, front: Front) -> bool:
    """Whether enough contributors are ready for the next sync there."""
    return front.t <= self.last and len(front.ready) >= self._needed(front.t)

  def _needed(self, t: int) -> int:
    waits = self._config.closing(t) and not self._waited
    return max(self._config.quorum, len(self.contributors) if waits else 0)

  @property
  def deadline_ns(self) -> int | None:
    """When the closing syncs need not wait any longer for all contributors."""
    return None if self._waited or self.over else self._wait_to_ns

  def limit_wait(self, now_ns: int) -> None:
    """Ends the wait of closing syncs for learners that live and do not finish."""
    if self._wait_to_ns is not None:
      self._waited = self._waited or now_ns >= self._wait_to_ns
    elif self._config.closing(self.opening.t) and len(self.opening.ready) >= self._config.quorum:
      self._wait_to_ns = now_ns + self._config.lease_ns

  def enter(self, member: members_lib.Member) -> None:
    """The learner has caught up."""
    self.contributors.add(member.learner)
    self._lost.discard(member.learner)
    self.mark(member)

  def drop_learner(self, learner: str) -> None:
    if learner in self.contributors:
      self._lost.add(learner)
      self.contributors.discard(learner)
      self._reunites = self._reunites or not self.contributors
    self.opening.ready.discard(learner)
    self.announcing.ready.discard(learner)

  def claim(self, member: members_lib.Member, clock: int) -> None:
    """A process that continues its incarnation reports its clock."""
    member.claimed = max(member.claimed, clock)

  def report(
    self, now_ns: int, member: members_lib.Member, clock: int, steps: int, new_steps: int
  ) -> None:
    """The learner reports its clock and its steps, of which so many are new."""
    if new_steps:
      member.report_ns.add((now_ns - member.reported_ns) // new_steps)
      member.reported_ns = now_ns
      self.mark_steps(now_ns, member, steps)
    self.claim(member, clock)
    self.advance(now_ns, member)

  def advance(self, now_ns: int, member: members_lib.Member) -> None:
    """Counts as much of the learner's clock as the time allows."""
    free = max(self._limit(now_ns, member), self.opening.last)
    member.clock = max(member.clock, min(member.claimed, free))
    self.mark(member)

  def mark_steps(self, now_ns: int, member: members_lib.Member, steps: int) -> None:
    """The process has reported so many steps: the bound of the next ones begins at the report
    before the last lease, since a stalled network delivers the reports of a lease at once."""
    if not member.steps_marks or now_ns - member.steps_marks[-1][1] >= self._config.lease_ns:
      member.steps_marks = [*member.steps_marks[-1:], (steps, now_ns)]

  def most_steps(self, now_ns: int, member: members_lib.Member) -> int | None:
    """How many steps the process can have made since it began, by the time since its reports and a
    lease, as the clock of a machine that was suspended stands; None: not known, the process is of
    an earlier syncer."""
    if not member.steps_marks:
      return None
    steps, since_ns = member.steps_marks[0]
    return steps + (now_ns - since_ns + self._config.lease_ns) // FASTEST_NS

  def _limit(self, now_ns: int, member: members_lib.Member) -> int:
    """How far the clock may have come at SPEED times the usual speed."""
    if member.since is None:
      return self._returned(now_ns)
    if not self.usual_ns:
      return self.opening.last + self._config.period
    clock, since_ns = member.since
    return clock + SPEED * (now_ns - since_ns) // self.usual_ns

  def _returned(self, now_ns: int) -> int:
    """How far the clocks of processes of an earlier syncer count."""
    opened = self.opening.last
    live = self._members.by_session.values()
    clocks = [member.claimed for member in live if member.since is None]
    others = sum(not member.left for member in self._members.by_id.values()) > 1
    waits = now_ns < (self._members.began_ns or 0) + self._config.lease_ns
    if len(clocks) < 2 and others and waits:
      return opened + self._config.period
    return opened + SPEED * max(0, lower_median(clocks) - opened) + self._config.period

  def measure(self, now_ns: int) -> None:
    """Updates the usual speed, and what counts by it; once per heartbeat."""
    live = self._members.by_session.values()
    measured = [member.report_ns.value for member in live if member.report_ns.samples]
    self.usual_ns = lower_median(measured) or self.usual_ns
    for member in live:
      self.advance(now_ns, member)

  def mark(self, member: members_lib.Member) -> None:
    """Updates the two sets after a report of a learner. A learner that has done its last step is
    ready for every closing sync."""
    if member.learner not in self.contributors:
      return
    finished = member.clock >= self._config.total_steps
    clock = self.last if finished else member.clock
    if clock >= self.opening.t:
      self.opening.ready.add(member.learner)
    if clock + self._tempo.lead >= self.announcing.t:
      self.announcing.ready.add(member.learner)

  def awaits(self, now_ns: int) -> bool:
    """Whether the next sync, two periods late, waits for the learners that were lost with the
    syncer or its network. They bring as many steps as the first one that has returned: merged one
    after the other, their displacements would add up instead of having a mean."""
    known = self._members.by_id
    lost = any(name in known and not known[name].left for name in self._lost)
    clocks = [m.claimed for m in self._members.by_session.values() if m.caught_up]
    late = max(clocks, default=0) >= self.opening.t + 2 * self._tempo.period
    if not (self._reunites and lost and late):
      return False
    if self._return_ns is None:
      self._return_ns = now_ns + self._config.lease_ns + self._config.longest_redial_ns
    return now_ns < self._return_ns

  def skip_overdue(self) -> int:
    """Skips the periods by which the next sync is late; returns their number."""
    steps = [m.clock for m in self._members.by_session.values() if m.caught_up]
    # Never past T: behind the last inner step no later sync makes up for a skipped one.
    t = self.opening.t
    late = min(kth_step(steps, self._needed(t)), self._config.total_steps) - t
    periods = max(0, late // self._tempo.period)
    self.opening.t += periods * self._tempo.period
    return periods

  def retime(self) -> None:
    """The period of the run has changed, and the announced syncs are cancelled: no learner answers
    a pull of them any more."""
    self.retimed = self.opening.last
    t = self._after(max(self.opening.last, self.announcing.last))
    self._move(self.opening, t)
    self._move(self.announcing, t)
    self._mark_all()

  def _after(self, t: int) -> int:
    return self._schedule.next(t, self._tempo.factor)

  def _move(self, front: Front, t: int) -> None:
    front.t = t
    front.ready.clear()

  def announce(self) -> int:
    """Announces the next sync and returns it."""
    front = self.announcing
    front.last = front.t
    self._move(front, self._after(front.t))
    self._mark_all()
    return front.last

  def open(self) -> int:
    """Opens the next sync and returns it."""
    front = self.opening
    front.last = front.t
    self._move(front, self._after(front.t))
    if self.announcing.t < front.t:
      self._move(self.announcing, front.t)
    self._lost.clear()
    self._reunites, self._return_ns = False, None
    self._mark_all()
    return front.last

  def _mark_all(self) -> None:
    for member in self._members.by_session.values():
      self.mark(member)

  def check(self) -> None:
    live = {member.learner for member in self._members.by_session.values()}
    assert self.contributors <= live, (self.contributors, live)
    for front in (self.opening, self.announcing):
      assert front.ready <= self.contributors, (front, self.contributors)
