"""What mutual TLS costs: CPU time for a MiB of payload, and steps/s of a run, against plain TCP and
a Unix socket.

    python scripts/benchmarks/tls.py [--quick] [--json=FILE]     # half a minute
    python scripts/benchmarks/tls.py --steps=600                 # some minutes, two idle cores

A learner's transport sends contributions of 8 MiB over loopback to a syncer's, both in this
process, so the CPU time is that of both ends: gRPC, checksums and TLS. Rounds of each way
alternate, so that other load on the host affects all of them. With --steps, real processes train
the tiny config, two learners beside a syncer; the figure is that of learner l0, without its first
fifth, which compiles.
"""

import json
import pathlib
import queue
import resource
import subprocess
import sys
import tempfile
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from diloco_jax.certs import authority, proofs
from diloco_jax.launch import local_run
from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, grpc_client, grpc_server, link, payloads
from scripts.benchmarks import measured

MIB = 1 << 20
PAYLOAD = bytes(range(256)) * (8 * MIB // 256)
DEADLINE_S = 60
LIMITS = link.Limits(contribution_bytes=(len(PAYLOAD),), publish_bytes=(0,))


def cpu_s() -> float:
  used = resource.getrusage(resource.RUSAGE_SELF)
  return used.ru_utime + used.ru_stime


def measure(address: str, syncer: addresses.Access, learner: addresses.Access, mib: int) -> tuple:
  """(CPU seconds, seconds) for `mib` MiB."""
  inbox, connected, kept = queue.Queue(), queue.Queue(), payloads.PayloadStore()
  door = grpc_server.Door(address, LIMITS.seats, access=syncer)
  server = grpc_server.GrpcSyncerTransport(door, inbox.put, kept, LIMITS)
  client = grpc_client.GrpcLearnerTransport(
    lambda: server.address, connected.put, payloads.PayloadStore(), LIMITS, access=learner
  )
  client.dial(1)
  event = connected.get(timeout=DEADLINE_S)
  assert isinstance(event, events.Connected), event
  session = inbox.get(timeout=DEADLINE_S).session
  client.send(1, messages.Join(protocol=1, learner='l0', nonce=1, agreement='', host='', pid=1))
  assert isinstance(inbox.get(timeout=DEADLINE_S).message, messages.Join)
  server.admit(session)
  announced = messages.Payload(size_bytes=len(PAYLOAD), crc32=zlib.crc32(PAYLOAD))
  contribution = lambda sync: messages.Contribution(
    sync=sync,
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
  for sync in range(1, 1 + mib * MIB // len(PAYLOAD)):
    server.send(session, messages.Pull(sync=sync, fragment=0, now=True))
    assert isinstance(connected.get(timeout=DEADLINE_S), events.Received)
    client.handled(1)
    client.send(1, contribution(sync), PAYLOAD)
    received = inbox.get(timeout=DEADLINE_S)
    server.handled(session)
    assert isinstance(received, events.Received), received
    kept.drop(received.payload_id)
  taken = cpu_s() - began_cpu_s, time.monotonic() - began_s
  client.shutdown(1.0)
  server.shutdown(1.0)
  return taken


def steps_per_s(
  address: str, syncer: addresses.Access, learner: addresses.Access, steps: int
) -> float:
  """Of learner l0 in a run of real processes."""
  with tempfile.TemporaryDirectory() as workdir:
    common = [
      *('--config=stdlib_lm:tiny', f'--config.train.steps={steps}', '--config.sync.learners=2'),
      f'--workdir={workdir}',
    ]
    start = lambda command, access, *words: subprocess.Popen(
      [
        *(sys.executable, '-m', 'diloco_jax', command, *common, *words),
        *([f'--tls={access.tls}'] if access.tls else []),
        f'--plaintext_loopback={str(access.plaintext_loopback).lower()}',
      ],
      cwd=ROOT,
      env=local_run.environment(2) | {'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.DEVNULL,
    )
    listen = [] if address.startswith(addresses.UNIX) else [f'--listen={address}']
    where = f'--syncer=file:{workdir}/syncer/address'
    processes = [start('syncer', syncer, *listen)]
    for name in ('l0', 'l1'):
      tls = learner.tls and learner.tls.parent / name
      access = addresses.Access(tls, learner.plaintext_loopback)
      processes.append(start('learner', access, f'--learner={name}', where))
    assert not any(process.wait() for process in processes)
    lines = (pathlib.Path(workdir) / 'records' / 'l0.jsonl').read_text('utf-8').splitlines()
  facts = [fact for fact in map(json.loads, lines) if fact['name'] == 'step']
  facts = facts[len(facts) // 5 :]
  seconds = (facts[-1]['t_ns'] - facts[0]['t_ns']) / 1e9
  return (facts[-1]['steps'] - facts[0]['steps']) / seconds


def main() -> None:
  parser = measured.parser(__doc__)
  parser.add_argument('--steps', type=int, default=0, help='inner steps of a run of real processes')
  flags = parser.parse_args()
  mib, rounds = (64, 3) if flags.quick else (256, 5)
  with tempfile.TemporaryDirectory() as folder:
    owner = authority.init(pathlib.Path(folder) / 'certs', 'benchmark', proofs.utc_now())
    for name in ('l0', 'l1'):
      owner.issue(name, proofs.utc_now())
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
    for way in ways:
      measure(*ways[way], 8)  # not counted
    taken = {way: [] for way in ways}
    for _ in range(rounds):
      for way in ways:
        taken[way].append(
          steps_per_s(*ways[way], flags.steps) if flags.steps else measure(*ways[way], mib)
        )
  if flags.steps:
    found = {way: {'steps_per_s': measured.spread(rates)} for way, rates in taken.items()}
  else:
    found = {
      way: {
        'cpu_ms_per_mib': measured.spread([1e3 * cpu / mib for cpu, _ in runs]),
        'mib_per_s': measured.spread([mib / seconds for _, seconds in runs]),
      }
      for way, runs in taken.items()
    }
  for way, one in found.items():
    for name, value in one.items():
      ratio = value['median'] / found['plain TCP'][name]['median']
      print(f'{way:12} {name:15} {measured.text(value)}, {ratio:.2f} times plain TCP')
  measured.write(flags.json, found)


if __name__ == '__main__':
  main()
