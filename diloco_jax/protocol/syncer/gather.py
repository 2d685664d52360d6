"""An open sync: the learners it waits for, and the payloads it holds."""

import dataclasses
from typing import Any

from diloco_jax.protocol import actions, messages


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
