"""The ports of a node: everything the machines may ask of the world.

The same machine runs over gRPC, in one process, or in a simulation: only what is behind these
ports differs.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from diloco_jax.protocol import actions, events, facts, messages

Post = Callable[[events.Event], None]
"""Puts an event into a node's inbox; may be called from any thread."""


class Clock(Protocol):
  """Monotonic time. Only the shell reads it; a machine is told."""

  def now_ns(self) -> int: ...


class Payloads(Protocol):
  """Bytes that cross between transport and work, by handle. Thread-safe."""

  def put(self, data: memoryview | bytes) -> int:
    """Keeps `data` (no copy) and returns a new handle."""

  def get(self, handle: int) -> memoryview | bytes: ...

  def drop(self, handle: int) -> None: ...


class Transport(Protocol):
  """Streams to peers. Never blocks the caller; what happens comes back as events:

  Connected, Disconnected (exactly once per session, also for a Dial that fails), and Received,
  whose payload was put into Payloads once it was complete and its checksum right.
  """

  def dial(self, session: int) -> None: ...

  def send(
    self, session: int, message: messages.Message, payload: memoryview | bytes | None
  ) -> None:
    """Queues a message and its payload; silently nothing if the session is gone."""

  def close(self, session: int, reason: str) -> None: ...

  def shutdown(self, grace_s: float) -> None:
    """Ends every session, giving what was queued at most `grace_s` to go out."""


MakeTransport = Callable[[Post, Payloads], Transport]
SHUTDOWN_S = 2.0  # what a node gives its transport to send what is queued at the end


class Work(Protocol):
  """The arrays. `submit` queues an action, first in first out; its answer comes as an event."""

  def submit(self, action: actions.Work) -> None: ...


class Records(Protocol):
  """Where facts and lines for people go. Never raises, never blocks for long."""

  def report(self, fact: facts.Fact) -> None: ...

  def say(self, text: str) -> None: ...


class Tape(Protocol):
  """Where every turn of the machine is written (protocol/tape/tape.py). Never raises."""

  def record(self, now_ns: int, event: events.Event, actions: Sequence[actions.Action]) -> None:
    """A turn was taken; returns once a kill of the process cannot undo the line."""

  def crash(self, now_ns: int, event: events.Event, error: Exception) -> str:
    """The machine raised; returns the words that tell where the tape is and how to replay it."""
