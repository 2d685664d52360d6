"""A transport process: a `GrpcSyncerTransport` at the end of a channel.

parent.py starts it with two descriptors: its end of the pipe, and the memory where it counts bytes.
First the syncer's process sends a `Start`; the answer is the address, or the error. Then it sends
the calls of the port `node.ports.Transport`, and receives the events of the port, and lines for the
operator. It ends with the syncer's process, which alone reacts to signals.
"""

import dataclasses
import itertools
import os
import signal
import sys
from multiprocessing import connection

from diloco_jax.protocol import events
from diloco_jax.transport import addresses, grpc_server, link
from diloco_jax.transport import payloads as payloads_lib
from diloco_jax.transport.processes import blocks
from diloco_jax.transport.processes import channel as channel_lib


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
  """The settings of a process: its sessions are `first`, `first + every` ...; `index`: where its
  bytes are among the totals."""

  address: str
  limits: link.Limits
  access: addresses.Access
  about: bytes
  first: int
  every: int
  index: int


class Child:
  """The transport of this process."""

  def __init__(self, channel: channel_lib.Channel, start: Start, totals: memoryview):
    self._channel = channel
    self._store = payloads_lib.PayloadStore()
    door = grpc_server.Door(
      start.address,
      start.limits.seats,
      channel.send,  # lines for the operator
      access=start.access,
      shared_port=True,
    )
    self.transport = grpc_server.GrpcSyncerTransport(
      door,
      self._post,
      self._store,
      start.limits,
      about=start.about,
      numbers=itertools.count(start.first, start.every),
      traffic=link.Traffic(totals[2 * start.index : 2 * start.index + 2]),
    )

  def _post(self, event: events.Event) -> None:
    payload = None
    if isinstance(event, events.Received) and event.payload_id is not None:
      payload = self._store.get(event.payload_id)
      self._store.drop(event.payload_id)
    self._channel.send(event, payload)

  def run(self) -> None:
    """Carries out calls, until the syncer's process shuts the transport down or is gone."""
    while True:
      (name, *arguments), payload = self._channel.receive()
      if name == 'send':
        self.transport.send(*arguments, payload)
      else:
        getattr(self.transport, name)(*arguments)
        if name == 'shutdown':
          return


def main() -> None:
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  payloads_lib.MEMORY.make = blocks.BLOCKS.make
  pipe, totals_descriptor = map(int, sys.argv[1:])
  channel = channel_lib.Channel(connection.Connection(pipe))
  totals = memoryview(blocks.map_block(totals_descriptor)).cast('q')
  try:
    start, _ = channel.receive()
    try:
      child = Child(channel, start, totals)
    except (ValueError, OSError) as error:
      channel.send(error)
    else:
      channel.send(child.transport.address)
      child.run()
  except (EOFError, OSError):  # the syncer's process is gone
    os._exit(1)
  channel.close()
