"""A sync: its state, the learners that it waits for, its payloads, and when it may end.

The syncer announces a sync before it opens, so that learners send their payloads when these are
due. The grace window begins at the opening; the sync merges all payloads that have arrived when the
window is over and there are K. A closing sync merges the remaining steps: it waits for every asked
learner, one lease long, and needs no quorum. docs/protocol.md draws the states from SYNC_STATES.
"""

import dataclasses
from typing import Any

from diloco_jax.protocol import actions, messages
from diloco_jax.protocol import states as protocol_states

SYNC_STATES = (
  ('due', 'announced', 'K live learners are within max(1, tau + ahead) steps of t'),
  (
    'announced',
    'open',
    'K live learners have reached t and fewer than max(1, tau) syncs are in flight',
  ),
  ('open', 'merging', 'K payloads and the grace window is over, or all have answered'),
  ('announced', 'cancelled', 'its period is skipped'),
  ('open', 'cancelled', 'all have answered and the quorum cannot be reached'),
  ('merging', 'published', 'the outer step is done'),
  ('merging', 'cancelled', 'every payload is refused, or the result is not finite'),
)


@dataclasses.dataclass(slots=True)
class Sync:
  """One sync."""

  t: int
  fragment: int
  opened_ns: int = 0
  state: str = 'due'
  asked: set[str] = dataclasses.field(default_factory=set)
  waiting: set[str] = dataclasses.field(default_factory=set)
  payloads: dict[str, tuple[messages.Contribution, int]] = dataclasses.field(default_factory=dict)
  grace_ns: int = 0  # from the opening
  for_all: bool = False  # the first of its fragment after a stall: waits for all, for all steps
  participants: tuple[actions.Participant, ...] = ()
  live: tuple[str, ...] = ()  # learners when its outer step was decided
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # of its outer step, for reports

  def move(self, state: str) -> None:
    self.state = protocol_states.move(SYNC_STATES, self.state, state)

  @property
  def merging(self) -> bool:
    """Whether its outer step is in progress."""
    return self.state == 'merging'

  @property
  def close_ns(self) -> int:
    """The end of the grace window."""
    return self.opened_ns + self.grace_ns

  def deadline_ns(self, needed: int) -> int | None:
    """When the sync ends without the missing learners."""
    waits = self.state == 'open' and len(self.payloads) >= needed
    return self.close_ns if waits else None

  def given_for(self, learner: str) -> int:
    """The sync for which a learner gave its payload: this one, or the one before."""
    message, _ = self.payloads.get(learner, (None, 0))
    return message.sync if message else self.t

  def withdraw(self, learner: str) -> int | None:
    """Removes a learner's payload and returns its id; None: there is none, or it is being
    merged."""
    if self.merging or learner not in self.payloads:
      return None
    _, payload_id = self.payloads.pop(learner)
    return payload_id

  def abandon(self) -> list[int]:
    """Removes all payloads and returns their ids; while merging the shell owns them: none."""
    if self.merging:
      return []
    payload_ids = [payload_id for _, payload_id in self.payloads.values()]
    self.payloads.clear()
    return payload_ids

  def set_facts(self, now_ns: int, base: int, why: str) -> None:
    """Its outer step begins, on version `base`."""
    names = tuple(participant.learner for participant in self.participants)
    self.facts = {
      'sync': self.t,
      'fragment': self.fragment,
      'version': base + 1,
      'participants': names,
      'late': tuple(name for name in names if self.given_for(name) != self.t),
      'waited_ns': now_ns - self.opened_ns,
      'grace_ns': self.grace_ns,
      'tokens': sum(participant.tokens for participant in self.participants),
      'why': why,
      'staleness': max(base - message.version for message, _ in self.payloads.values()),
    }

  def check(self, live: set[str], needed: int) -> None:
    """Asserts that a merge has its quorum, and that the sync waits for live learners only."""
    if self.merging:
      assert len(self.participants) >= max(1, needed), self
    else:
      assert self.payloads.keys() | self.waiting <= live, (self, live)


def decide(sync: Sync, now_ns: int, needed: int, live: int) -> tuple[str, str]:
  """('wait' | 'merge' | 'cancel', why) for one sync.

  Args:
    sync: the sync.
    now_ns: the present time.
    needed: how many payloads it waits for (ProtocolConfig.needed).
    live: how many learners could contribute.
  """
  count = len(sync.payloads)
  if sync.merging:
    return 'wait', 'merging'
  if count >= needed:
    ends = 'merge' if count else 'cancel'
    if not sync.waiting:
      return ends, f'all {count} have answered' if count else 'all have answered, without payloads'
    if now_ns >= sync.close_ns:
      return ends, f'grace is over: {count} payloads, {len(sync.waiting)} learners missing'
    return 'wait', f'quorum {count} >= {needed}, grace runs'
  # No asked learner can still answer. With fewer live learners than K another may join (and a
  # lock-step run waits for it); otherwise the sync can never reach its quorum.
  if not sync.waiting and live >= needed:
    return 'cancel', f'all have answered, {count} payloads of {needed}'
  return 'wait', f'{count} payloads of {needed}'
