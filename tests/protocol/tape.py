"""A record of everything that happens in a small world."""

from typing import Any

from diloco_jax.protocol import actions, messages
from tests.protocol import world as world_lib

MS = world_lib.MS


class Tape:
  """Everything that happened in a world: (time, process name, action)."""

  def __init__(self, **settings: Any):
    self.entries: list[tuple[int, str, Any]] = []
    self.world = world_lib.World(world_lib.protocol_config(**settings), self._watch)

  def _watch(self, name: str, action: Any) -> None:
    self.entries.append((self.world.now, name, action))

  def start(self, *names: str, step_ms: int = 100, **how: Any) -> 'Tape':
    for name in names:
      self.world.start(name, **how).step_ns = step_ms * MS
    return self

  def run(self, until_ms: int) -> 'Tape':
    self.world.run(until_ms * MS)
    return self

  def of(self, kind: type) -> list[tuple[int, str, Any]]:
    return [entry for entry in self.entries if isinstance(entry[2], kind)]

  def sent(self, kind: type, sender: str | None = None) -> list[tuple[int, Any]]:
    return [
      (time, action.message) for time, name, action in self.of(actions.Send)
      if isinstance(action.message, kind) and sender in (None, name)
    ]

  def opened(self) -> dict[int, int]:
    """Sync: when it was opened (first Pull)."""
    times: dict[int, int] = {}
    for time, pull in self.sent(messages.Pull):
      times.setdefault(pull.sync, time)
    return times


def discarded(tape: Tape) -> dict[str, int]:
  return tape.world.ledger()['discarded']
