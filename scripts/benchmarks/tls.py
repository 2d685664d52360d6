"""What mutual TLS costs: CPU time for a MiB of payload, against plain TCP and a Unix socket.

    python scripts/benchmarks/tls.py [--mib=256] [--rounds=5]     # about a minute

A learner's transport sends contributions of 8 MiB over loopback to a syncer's, both in this
process, so the CPU time is that of both ends: gRPC, checksums and TLS. Rounds of each way
alternate, so that other load on the host affects all of them.
"""

import argparse
import pathlib
import queue
import resource
import statistics
import sys
import tempfile
import time
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.certs import authority, proofs
from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, grpc_client, grpc_server, link, payloads

MIB = 1 << 20
PAYLOAD = bytes(range(256)) * (8 * MIB // 256)
DEADLINE_S = 60
LIMITS = link.Limits(max_payload_bytes=len(PAYLOAD))


def cpu_s() -> float:
  used = resource.getrusage(resource.RUSAGE_SELF)
  return used.ru_utime + used.ru_stime


def measure(address: str, syncer: addresses.Access, learner: addresses.Access, mib: int) -> tuple:
  """(CPU seconds, seconds) for `mib` MiB."""
  inbox, connected, kept = queue.Queue(), queue.Queue(), payloads.PayloadStore()
  server = grpc_server.GrpcSyncerTransport(address, inbox.put, kept, LIMITS, access=syncer)
  client = grpc_client.GrpcLearnerTransport(
    lambda: server.address, connected.put, payloads.PayloadStore(), LIMITS, access=learner
  )
  client.dial(1)
  event = connected.get(timeout=DEADLINE_S)
  assert isinstance(event, events.Connected), event
  assert isinstance(inbox.get(timeout=DEADLINE_S), events.Connected)
  announced = messages.Payload(size_bytes=len(PAYLOAD), crc32=zlib.crc32(PAYLOAD))
  contribution = messages.Contribution(
    sync=1,
    fragment=0,
    version=0,
    steps=1,
    tokens_from=0,
    tokens_to=1,
    shard=0,
    cursor=1,
    payload=announced,
  )
  began_cpu_s, began_s = cpu_s(), time.monotonic()
  for _ in range(mib * MIB // len(PAYLOAD)):
    client.send(1, contribution, PAYLOAD)
    received = inbox.get(timeout=DEADLINE_S)
    assert isinstance(received, events.Received), received
    kept.drop(received.payload_id)
  taken = cpu_s() - began_cpu_s, time.monotonic() - began_s
  client.shutdown(1.0)
  server.shutdown(1.0)
  return taken


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--mib', type=int, default=256)
  parser.add_argument('--rounds', type=int, default=5)
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    owner = authority.init(pathlib.Path(folder) / 'certs', 'benchmark', proofs.utc_now())
    owner.issue('l0', proofs.utc_now())
    plain = addresses.Access(plaintext_loopback=True)
    ways = {
      'plain TCP': ('127.0.0.1:0', plain, plain),
      'Unix socket': (
        addresses.in_folder(pathlib.Path(folder)),
        addresses.LOCAL,
        addresses.LOCAL,
      ),
      'mutual TLS': (
        '127.0.0.1:0',
        addresses.Access(owner.folder / 'syncer'),
        addresses.Access(owner.folder / 'l0'),
      ),
    }
    taken = {way: [] for way in ways}
    for way in ways:
      measure(*ways[way], 8)  # not counted
    for _ in range(flags.rounds):
      for way in ways:
        taken[way].append(measure(*ways[way], flags.mib))
  plain_ms = statistics.median(1e3 * cpu / flags.mib for cpu, _ in taken['plain TCP'])
  for way, rounds in taken.items():
    cpu_ms = statistics.median(1e3 * cpu / flags.mib for cpu, _ in rounds)
    rate = statistics.median(flags.mib / seconds for _, seconds in rounds)
    print(
      f'{way:12} {cpu_ms:5.2f} ms of CPU for a MiB, {cpu_ms / plain_ms:4.2f} times plain TCP; '
      f'{rate:4.0f} MiB/s'
    )


if __name__ == '__main__':
  main()
