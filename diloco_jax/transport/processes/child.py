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


def _make_transport(
  channel: channel_lib.Channel, start: Start, totals: memoryview
) -> grpc_server.GrpcSyncerTransport:
  store = payloads_lib.PayloadStore()

  def post(event: events.Event) -> None:
    payload = None
    if isinstance(event, events.Received) and event.payload_id is not None:
      payload = store.get(event.payload_id)
      store.drop(event.payload_id)
    channel.send(event, payload)

  print_line = channel.send
  door = grpc_server.Door(
    start.address, start.limits.seats, print_line, access=start.access, shared_port=True
  )
  return grpc_server.GrpcSyncerTransport(
    door,
    post,
    store,
    start.limits,
    about=start.about,
    numbers=itertools.count(start.first, start.every),
    traffic=link.Traffic(totals[2 * start.index : 2 * start.index + 2]),
  )


def _serve(channel: channel_lib.Channel, transport: grpc_server.GrpcSyncerTransport) -> None:
  """Carries out calls, until the syncer's process shuts the transport down or is gone."""
  while True:
    (name, *arguments), payload = channel.receive()
    if name == 'send':
      transport.send(*arguments, payload)
    else:
      getattr(transport, name)(*arguments)
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
      transport = _make_transport(channel, start, totals)
    except (ValueError, OSError) as error:
      channel.send(error)
    else:
      channel.send(transport.address)
      _serve(channel, transport)
  except (EOFError, OSError):  # the syncer's process is gone
    os._exit(1)
  channel.close()
