"""When an open sync has waited enough: a pure decision with its reason in words.

With K payloads there, the grace window runs; what has arrived when it ends is merged. A payload
that is withdrawn before may take the quorum with it; the window starts anew once K are there again.
"""

import dataclasses
from typing import Any

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
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the outer step, to be told

  @property
  def deadline_ns(self) -> int | None:
    """The end of the grace window."""
    if self.merging or self.quorum_at_ns is None:
      return None
    return self.quorum_at_ns + self.grace_ns

  def withdraw(self, learner: str, quorum: int) -> int | None:
    """Takes a learner's payload out again; its handle, if it was there and is not being merged."""
    if self.merging or learner not in self.payloads:
      return None
    _, handle = self.payloads.pop(learner)
    if len(self.payloads) < quorum:
      self.quorum_at_ns = None
    return handle

  def abandon(self) -> list[int]:
    """Takes all payloads out; their handles. Those being merged are the shell's already."""
    if self.merging:
      return []
    handles = [handle for _, handle in self.payloads.values()]
    self.payloads.clear()
    return handles

  def check(self, live: set[str], quorum: int) -> None:
    """Asserts that a merge has its quorum, and that only the live are waited for."""
    if self.merging:
      assert len(self.participants) >= quorum, self
    else:
      assert self.payloads.keys() | self.waiting <= live, (self, live)


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
