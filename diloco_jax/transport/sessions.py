"""What both gRPC ends of `node.ports.Transport` have in common: their sessions, by number."""

import threading
import time

from diloco_jax.node import payload as payload_lib
from diloco_jax.node import ports
from diloco_jax.protocol import messages
from diloco_jax.transport import grpc_session, link
from diloco_jax.transport import payloads as payloads_lib


class Sessions:
  def __init__(
    self,
    post: ports.Post,
    payloads: ports.Payloads,
    limits: link.Limits,
    traffic: link.Traffic | None = None,
  ):
    self._post = post
    self._payloads = payloads
    self._limits = limits
    self.traffic = traffic or link.Traffic()
    self._lock = threading.Lock()
    self._sessions: dict[int, grpc_session.Session] = {}
    payloads_lib.keep_freed_memory()

  def admit(self, session: int) -> None:
    if (live := self._find(session)) is not None:
      live.admit()

  def send(
    self, session: int, message: messages.Message, payload: payload_lib.Payload | None = None
  ) -> None:
    if (live := self._find(session)) is not None:
      live.send(message, payload)

  def handled(self, session: int) -> None:
    if (live := self._find(session)) is not None:
      live.handled()

  def close(self, session: int, reason: str) -> None:
    if (live := self._find(session)) is not None:
      live.close(reason)

  def _find(self, session: int) -> grpc_session.Session | None:
    with self._lock:
      return self._sessions.get(session)

  def _add(self, number: int, dialed: bool) -> grpc_session.Session:
    """A new session; the caller holds the lock."""
    session = grpc_session.Session(
      number, self._post, self._payloads, self._limits, dialed, self.traffic
    )
    self._sessions[number] = session
    return session

  def _close_all(self, reason: str, grace_s: float) -> list[grpc_session.Session]:
    """Closes every session; returns those that are not finished after `grace_s`."""
    deadline_s = time.monotonic() + grace_s
    with self._lock:
      sessions = list(self._sessions.values())
    for session in sessions:
      session.close(reason)
    wait = lambda session: session.finished.wait(max(0.0, deadline_s - time.monotonic()))
    return [session for session in sessions if not wait(session)]
