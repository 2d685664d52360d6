"""The transport inside one process: it passes messages and payloads by reference, so that a payload
may be an array on the devices of its sender (node/payload.py).

For the single-controller mode and for tests. It gives the guarantees of the gRPC transport (the
same tests run over both): first in, first out per direction; `Disconnected` exactly once per
session on either side; no event of the session after it. One lock orders all calls of the hub; it
cannot deadlock, because a `Post` only puts into a queue and never calls back.
"""

import itertools
import secrets
import threading

from diloco_jax.node import payload as payload_lib
from diloco_jax.node import ports
from diloco_jax.protocol import events, messages
from diloco_jax.transport import link


class InProcessHub:
  """Connects one syncer and any number of learners, each with its own event queue and payloads."""

  def __init__(self):
    self._lock = threading.Lock()
    self._syncer: InProcessTransport | None = None
    self._numbers = itertools.count(1)

  def syncer_transport(self, post: ports.Post, payloads: ports.Payloads) -> 'InProcessTransport':
    """Returns the syncer's end; each session that a learner dials arrives as Connected.

    After a shutdown of the transport the hub accepts a new one (a restarted syncer).
    """
    with self._lock:
      if self._syncer is not None:
        raise ValueError('this hub has a syncer already: shut its transport down first')
      self._syncer = InProcessTransport(self, post, payloads)
      return self._syncer

  def learner_transport(self, post: ports.Post, payloads: ports.Payloads) -> 'InProcessTransport':
    return InProcessTransport(self, post, payloads)


class InProcessTransport:
  """One end of a hub: the port `node.ports.Transport`."""

  def __init__(self, hub: InProcessHub, post: ports.Post, payloads: ports.Payloads):
    self._hub = hub
    self._post = post
    self._payloads = payloads
    self._peers: dict[int, tuple[InProcessTransport, int]] = {}
    self.nonce = secrets.randbits(63)  # names the process of a learner
    self.traffic = link.Traffic()  # payloads only: messages are not serialised

  def dial(self, session: int) -> None:
    with self._hub._lock:
      if session in self._peers:
        raise ValueError(f'session {session} was dialed before: a number is used once')
      syncer = self._hub._syncer
      if syncer is None:
        self._post(events.Disconnected(session=session, reason='unavailable: no syncer listens'))
        return
      number = next(self._hub._numbers)
      syncer._peers[number] = (self, session)
      self._peers[session] = (syncer, number)
      syncer._post(events.Connected(session=number))
      self._post(events.Connected(session=session))

  def send(
    self, session: int, message: messages.Message, payload: payload_lib.Payload | None = None
  ) -> None:
    link.check_payload(message, payload)
    with self._hub._lock:
      if session in self._peers:
        peer, number = self._peers[session]
        payload_id = None
        if payload is not None:
          payload_id = peer._payloads.put(payload)
          self.traffic.add(sent_bytes=payload_lib.size_bytes(payload))
          peer.traffic.add(received_bytes=payload_lib.size_bytes(payload))
        peer._post(events.Received(session=number, message=message, payload_id=payload_id))

  def admit(self, session: int) -> None:
    pass  # peers in one process are trusted

  def handled(self, session: int) -> None:
    pass

  def close(self, session: int, reason: str) -> None:
    with self._hub._lock:
      self._end(session, reason)

  def shutdown(self, grace_s: float, reason: str = '') -> None:
    del grace_s  # this transport queues nothing
    with self._hub._lock:
      for session in list(self._peers):
        self._end(session, reason or 'shut down')
      if self._hub._syncer is self:
        self._hub._syncer = None

  def _end(self, session: int, reason: str) -> None:
    if session not in self._peers:
      return
    peer, number = self._peers.pop(session)
    del peer._peers[number]
    peer._post(events.Disconnected(session=number, reason=reason))
    self._post(events.Disconnected(session=session, reason=reason))
