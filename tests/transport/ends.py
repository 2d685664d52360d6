"""The two ends of sessions over gRPC, each with its events."""

import queue

import grpc

from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, grpc_client, grpc_server, grpc_session, link
from diloco_jax.transport import payloads as payloads_lib
from tests.transport import samples

DEADLINE_S = 60
PLAIN = addresses.Access(plaintext_loopback=True)
OWN_CONNECTION = ('grpc.use_local_subchannel_pool', 1)


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


def idle_learner(address, limits: link.Limits, access: addresses.Access = PLAIN) -> End:
  """`address`: a function that returns it."""
  return End(
    lambda *ports: grpc_client.GrpcLearnerTransport(address, *ports, limits, access=access)
  )


def learner(address: str, limits: link.Limits, access: addresses.Access = PLAIN) -> End:
  """It dials session 1."""
  end = idle_learner(lambda: address, limits, access)
  end.transport.dial(1)
  return end


def open_session(syncer: End, learner: End) -> int:
  """The syncer's number of the session that a learner has dialed."""
  assert isinstance(learner.hears(), events.Connected)
  event = syncer.hears()
  assert isinstance(event, events.Connected), event
  return event.session


def join(syncer: End, learner: End, *answers: messages.Message) -> int:
  """Makes a member of a learner that has dialed session 1; returns the syncer's number of it."""
  number = open_session(syncer, learner)
  learner.transport.send(1, samples.join())
  assert isinstance(syncer.message(), messages.Join)
  syncer.transport.admit(number)
  for message in answers or (messages.Heartbeat(),):
    syncer.transport.send(number, message)
    assert learner.message() == message
  return number


def plain_channel(address: str) -> grpc.Channel:
  return grpc.insecure_channel(address, (OWN_CONNECTION,))


def call(channel: grpc.Channel, method: str, frames=(), token: str = '', **options) -> grpc.Call:
  """Calls a method of the syncer with raw bytes. gRPC cancels a call that nothing refers to."""
  stream = channel.stream_stream(f'/{grpc_session.SERVICE}/{method}')
  return stream(iter(frames), metadata=((grpc_session.TOKEN, token),) if token else (), **options)


def token_of(control: grpc.Call) -> str:
  return dict(control.initial_metadata())[grpc_session.TOKEN]
