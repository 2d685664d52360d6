"""An open sync: its state, the learners it waits for, and the payloads it holds.

docs/protocol.md draws its life from SYNC_STATES."""

import dataclasses
from typing import Any

from diloco_jax.protocol import actions, messages, states

SYNC_STATES = (
  ('due', 'gathering', 'K live learners have reached t and fewer than tau syncs are in flight'),
  ('gathering', 'merging', 'K payloads and the grace window is over, or all have answered'),
  ('gathering', 'cancelled', 'all have answered and the quorum cannot be reached'),
  ('merging', 'published', 'the outer step is done'),
  ('merging', 'cancelled', 'every payload is refused, or the result is not finite'),
)


@dataclasses.dataclass(slots=True)
class Gather:
  """One open sync: whom it still waits for, and what it has."""

  sync: int
  fragment: int
  opened_ns: int
  state: str = 'due'
  asked: set[str] = dataclasses.field(default_factory=set)
  waiting: set[str] = dataclasses.field(default_factory=set)
  payloads: dict[str, tuple[messages.Contribution, int]] = dataclasses.field(default_factory=dict)
  quorum_at_ns: int | None = None
  grace_ns: int = 0
  participants: tuple[actions.Participant, ...] = ()
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the outer step, to be told

  def move(self, state: str) -> None:
    self.state = states.move(SYNC_STATES, self.state, state)

  @property
  def merging(self) -> bool:
    """Its outer step is under way."""
    return self.state == 'merging'

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
    _, payload_id = self.payloads.pop(learner)
    if len(self.payloads) < quorum:
      self.quorum_at_ns = None
    return payload_id

  def abandon(self) -> list[int]:
    """Takes all payloads out; their ids. Those being merged are the shell's already."""
    if self.merging:
      return []
    payload_ids = [payload_id for _, payload_id in self.payloads.values()]
    self.payloads.clear()
    return payload_ids

  def check(self, live: set[str], quorum: int) -> None:
    """Asserts that a merge has its quorum, and that only the live are waited for."""
    if self.merging:
      assert len(self.participants) >= quorum, self
    else:
      assert self.payloads.keys() | self.waiting <= live, (self, live)
