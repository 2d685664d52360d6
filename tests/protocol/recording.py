"""A record of all actions in a simulated world."""

from typing import Any

from diloco_jax.protocol import actions, events, facts
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import transcript

MS = engine_lib.MS


class Recording(observers.Observer):
  """All actions in a world: (time, name of the node, action)."""

  def __init__(self, **settings: Any):
    self.entries: list[tuple[int, str, Any]] = []
    self.world = world_lib.World(transcript.make_config(**settings), watchers=[self])

  def saw(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    self.entries += [(now_ns, life.start.node, action) for action in out]

  def start(self, *names: str, step_ms: int = 100, **how: Any) -> 'Recording':
    for name in names:
      self.world.start(name, **how).island.step_ns = step_ms * MS
    return self

  def run(self, until_ms: int) -> 'Recording':
    self.world.run(until_ms * MS)
    return self

  def of(self, kind: type) -> list[tuple[int, str, Any]]:
    return [entry for entry in self.entries if isinstance(entry[2], kind)]

  def sent(self, kind: type, sender: str | None = None) -> list[tuple[int, Any]]:
    return [
      (time, action.message)
      for time, name, action in self.of(actions.Send)
      if isinstance(action.message, kind) and sender in (None, name)
    ]

  def facts(self, kind: type) -> list[tuple[int, Any]]:
    return [
      (time, action.fact)
      for time, _, action in self.of(actions.Report)
      if isinstance(action.fact, kind)
    ]

  def opened(self) -> dict[int, int]:
    """By sync: the time of its opening."""
    return {fact.sync: time for time, fact in self.facts(facts.Opened)}


def discarded(recording: Recording) -> dict[str, int]:
  return recording.world.ledger().discarded
