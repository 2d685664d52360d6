"""When a sync opens and when it has waited enough: pure decisions, each with its reason in words.

*Pace*: sync t opens once K live learners have reported a step >= t, so the K-th fastest learner sets
the pace: a fast network cannot shrink H, and when the fastest learner dies the next one carries on.

*Gather*: with K payloads there, the grace window runs; what has arrived when it ends is merged.
"""

import dataclasses

from diloco_jax.protocol import actions
from diloco_jax.protocol import messages


@dataclasses.dataclass(slots=True)
class Gather:
  """One open sync: whom it still waits for, and what it has."""

  sync: int
  fragment: int
  opened_ns: int
  asked: set[str] = dataclasses.field(default_factory=set)
  waiting: set[str] = dataclasses.field(default_factory=set)
  payloads: dict[str, tuple[messages.Contribution, int]] = dataclasses.field(default_factory=dict)
  quorum_at_ns: int | None = None
  grace_ns: int = 0
  merging: bool = False
  participants: tuple[actions.Participant, ...] = ()

  @property
  def deadline_ns(self) -> int | None:
    """The end of the grace window."""
    if self.merging or self.quorum_at_ns is None:
      return None
    return self.quorum_at_ns + self.grace_ns


def kth_step(steps: list[int], quorum: int) -> int:
  """The step that K of these learners have reached (0 if there are fewer than K)."""
  return sorted(steps, reverse=True)[quorum - 1] if len(steps) >= quorum else 0


def decide(gather: Gather, now_ns: int, quorum: int, live: int, closing: bool) -> tuple[str, str]:
  """('wait' | 'merge' | 'cancel', why) for one gather.

  Args:
    gather: the sync.
    now_ns: now.
    quorum: K.
    live: how many learners could contribute.
    closing: the sync comes after the last inner step.
  """
  count = len(gather.payloads)
  if gather.merging:
    return 'wait', 'merging'
  if count >= quorum:
    if not gather.waiting:
      return 'merge', f'all {count} have answered'
    if gather.deadline_ns is not None and now_ns >= gather.deadline_ns:
      return 'merge', f'grace is over: {count} payloads, {len(gather.waiting)} learners missing'
    return 'wait', f'quorum {count} >= {quorum}, grace runs'
  # Nobody is left who could still answer: with fewer live learners than K one may yet come (and a
  # lock-step run waits for it), otherwise the sync can never have its quorum.
  if not gather.waiting and (closing or live >= quorum):
    return 'cancel', f'all have answered, {count} payloads of {quorum}'
  return 'wait', f'{count} payloads of {quorum}'
