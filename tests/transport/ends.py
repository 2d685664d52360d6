"""The two ends of sessions over gRPC, each with its events."""

import queue

from diloco_jax.protocol import events
from diloco_jax.transport import addresses, grpc_client, grpc_server, link
from diloco_jax.transport import payloads as payloads_lib

DEADLINE_S = 60
PLAIN = addresses.Access(plaintext_loopback=True)


class End:
  """A transport, its payloads, and the events that it has heard."""

  def __init__(self, make):
    self.inbox = queue.Queue()
    self.payloads = payloads_lib.PayloadStore()
    self.history = []
    self.transport = make(self.inbox.put, self.payloads)

  @property
  def port(self):
    """Where a syncer listens on loopback."""
    return int(self.transport.address.rpartition(':')[2])

  def hears(self):
    event = self.inbox.get(timeout=DEADLINE_S)
    self.history.append(event)
    if isinstance(event, events.Received):
      self.transport.handled(event.session)
    return event

  def message(self):
    event = self.hears()
    assert isinstance(event, events.Received), event
    return event.message


def syncer(
  limits: link.Limits, access: addresses.Access = PLAIN, address: str = '127.0.0.1:0', said=print
) -> End:
  door = grpc_server.Door(address, limits.seats, said, access=access)
  return End(lambda *ports: grpc_server.GrpcSyncerTransport(door, *ports, limits))


def learner(address: str, limits: link.Limits, access: addresses.Access = PLAIN) -> End:
  """It dials session 1."""
  end = End(
    lambda *ports: grpc_client.GrpcLearnerTransport(lambda: address, *ports, limits, access=access)
  )
  end.transport.dial(1)
  return end
