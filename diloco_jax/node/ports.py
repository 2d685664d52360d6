"""The ports of a node: the interfaces that carry out the actions of a machine.

The same machine runs over gRPC, in one process, and in the simulator; only the implementations of
these ports differ.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from diloco_jax.node import payload as payload_lib
from diloco_jax.protocol import actions, events, facts, messages

Post = Callable[[events.Event], None]
"""Puts an event into a node's queue; may be called from any thread."""


class Clock(Protocol):
  """Monotonic time. Only the loop reads it; a machine gets the time with each event."""

  def now_ns(self) -> int: ...


class Payloads(Protocol):
  """Holds the payloads that transport and work exchange, by payload id. Thread-safe."""

  def put(self, data: payload_lib.Payload) -> int:
    """Keeps `data` (no copy) and returns a new payload id."""

  def get(self, payload_id: int) -> payload_lib.Payload: ...

  def drop(self, payload_id: int) -> None: ...


class Transport(Protocol):
  """Sessions with peers. No call blocks. The transport posts these events:

  Connected, Disconnected (exactly once per session, also for a failed Dial), and Received, after it
  has put the complete payload into Payloads, with a correct checksum if it has come as bytes.

  Attributes:
    nonce: of a learner's transport: names its process to the syncer.
  """

  nonce: int

  def dial(self, session: int) -> None: ...

  def admit(self, session: int) -> None:
    """The peer is a member: the limits of a stranger's session no longer apply."""

  def send(
    self, session: int, message: messages.Message, payload: payload_lib.Payload | None
  ) -> None:
    """Queues a message and its payload; has no effect if the session is closed."""

  def handled(self, session: int) -> None:
    """The machine has handled a message of this session. A session with many messages that have not
    been handled takes no further ones from its peer."""

  def close(self, session: int, reason: str) -> None: ...

  def shutdown(self, grace_s: float, reason: str = '') -> None:
    """Ends every session, after at most `grace_s` for sending the queued messages. `reason`: what
    the peers of a syncer receive, if it is more than that."""


MakeTransport = Callable[[Post, Payloads], Transport]
SHUTDOWN_S = 2.0  # `grace_s` of a node at its end


class Work(Protocol):
  """Array computations. `submit` queues an action, first in, first out; the result is an event."""

  def submit(self, action: actions.Work) -> None: ...


class Records(Protocol):
  """Takes facts and console lines. Never raises, never blocks for long."""

  def report(self, fact: facts.Fact) -> None: ...

  def say(self, text: str) -> None: ...


class Tape(Protocol):
  """Takes every turn of the machine (protocol/tape/tape.py). Never raises."""

  def record(self, now_ns: int, event: events.Event, actions: Sequence[actions.Action]) -> None:
    """Writes a turn; returns once a kill of the process cannot lose the line."""

  def crash(self, now_ns: int, event: events.Event, error: Exception) -> str:
    """Writes the turn that raised; returns the text that names the tape and the replay command."""
