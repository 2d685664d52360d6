"""What the transport of a syncer costs: CPU time for each payload byte, with 8 and 32 sessions.

    python scripts/benchmarks/lanes.py [--quick] [--json=FILE]                # two minutes
    python scripts/benchmarks/lanes.py --against=CHECKOUT --way=both,8        # some ways only
    python scripts/benchmarks/lanes.py --way=both,8,2         # with two transport processes

A syncer's transport exchanges payloads of 16 MiB with learners in two other processes, over
loopback: up, down, or both. Two are on their way in each session and direction. There is no
machine, no arithmetic and no log. Ways, and checkouts of this repository, take turns. The benchmark
prints CPU-ns for each byte of the syncer's process (and the kernel's share of it), of its transport
processes and of the learners' processes, MB/s, and the resident memory of the syncer's process.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, os.environ.get('BENCHMARKED') or str(ROOT))

import numpy as np
import psutil

from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, grpc_client, grpc_server, link, payloads
from scripts.benchmarks import measured

WAYS = ('up,8', 'down,8', 'both,8', 'both,32')
SIZE = 1 << 24
LEARNER_PROCESSES = 2
UNDER_WAY = 2  # payloads of a session and direction
DEADLINE_S = 300
PLAIN = addresses.Access(plaintext_loopback=True)


def limits(sessions: int) -> link.Limits:
  return link.Limits(
    contribution_bytes=(SIZE,),
    publish_bytes=(SIZE,),
    messages_per_s=1 << 20,
    message_bytes_per_s=1 << 30,
    max_members=sessions,
    max_strangers=sessions,
  )


def _payload(store: payloads.PayloadStore) -> tuple[memoryview, messages.Payload]:
  data = payloads.MEMORY.take(SIZE)  # as a syncer's
  data[:] = np.tile(np.frombuffer(os.urandom(1 << 20), np.uint8), SIZE >> 20)
  payload_id, announced = payloads.keep(store, data)
  return store.get(payload_id), announced


class Learner:
  """Answers every Pull at once, and every Publish with Adopted."""

  def __init__(self, name: str, address: str):
    self._name, self._store = name, payloads.PayloadStore()
    self._payload, self._announced = _payload(self._store)
    self._made = threading.Event()
    self._transport = grpc_client.GrpcLearnerTransport(
      lambda: address, self._post, self._store, limits(1), access=PLAIN
    )
    self._made.set()
    self._transport.dial(1)

  def _post(self, event: events.Event) -> None:
    self._made.wait()
    if isinstance(event, events.Connected):
      join = messages.Join(
        protocol=1, learner=self._name, nonce=1, agreement='', host='', pid=os.getpid()
      )
      self._transport.send(1, join)
    elif isinstance(event, events.Received):
      self._transport.handled(1)
      self._answer(event.message, event.payload_id)

  def _answer(self, message: messages.Message, payload_id: int | None) -> None:
    match message:
      case messages.Pull(sync=sync):
        contribution = messages.Contribution(
          sync=sync,
          fragment=0,
          version=0,
          steps=1,
          tokens_from=0,
          tokens_to=1,
          shard=0,
          cursor=1,
          payload=self._announced,
        )
        self._transport.send(1, contribution, self._payload)
      case messages.Publish(version=version):
        self._store.drop(payload_id)
        adopted = messages.Adopted(fragment=0, version=version, tokens=1, matched=True)
        self._transport.send(1, adopted)


class Syncer:
  """Keeps UNDER_WAY payloads of each session on their way."""

  def __init__(self, ways: str, sessions: int, processes: int):
    self._ups, self._downs = (UNDER_WAY * (ways in (one, 'both')) for one in ('up', 'down'))
    self._store, self._numbers = payloads.PayloadStore(), {}
    self._lock = threading.Lock()
    self.begun = collections.Counter()  # by session
    address, ports = '127.0.0.1:0', (self._post, self._store, limits(sessions))
    if processes:
      from diloco_jax.transport.processes import parent

      self.transport = parent.ProcessesTransport(processes, address, *ports, access=PLAIN)
    else:
      door = grpc_server.Door(address, ports[-1].seats, access=PLAIN)
      self.transport = grpc_server.GrpcSyncerTransport(door, *ports)
    self.children = psutil.Process().children()
    self._payload, self._announced = _payload(self._store)

  def _post(self, event: events.Event) -> None:
    if not isinstance(event, events.Received):
      return
    self.transport.handled(event.session)
    match event.message:
      case messages.Join():
        self.transport.admit(event.session)
        for _ in range(self._ups):
          self._pull(event.session)
        for _ in range(self._downs):
          self._publish(event.session)
      case messages.Contribution():
        self._store.drop(event.payload_id)
        self._pull(event.session)
      case messages.Adopted():
        self._publish(event.session)

  def _number(self, session: int) -> int:
    with self._lock:
      self.begun[session] += 1
      return self.begun[session]

  def _pull(self, session: int) -> None:
    pull = messages.Pull(sync=self._number(session), fragment=0, now=True)
    self.transport.send(session, pull)

  def _publish(self, session: int) -> None:
    version = self._number(session)
    publish = messages.Publish(
      sync=version,
      fragment=0,
      version=version,
      base_version=version - 1,
      digest=0,
      settled_to=0,
      keep=True,
      payload=self._announced,
    )
    self.transport.send(session, publish, self._payload)


def serve(ways: str, sessions: int, seconds: float, processes: int = 0) -> dict[str, float]:
  """The figures of one run."""
  syncer, each = Syncer(ways, sessions, processes), sessions // LEARNER_PROCESSES
  children = [
    psutil.Popen(
      [sys.executable, __file__, 'learners', syncer.transport.address, str(k), str(each)]
    )
    for k in range(LEARNER_PROCESSES)
  ]
  try:
    deadline_s = time.monotonic() + DEADLINE_S
    while (
      len(syncer.begun) < sessions or min(syncer.begun.values()) < 4 * UNDER_WAY
    ):  # the windows have opened
      if time.monotonic() > deadline_s:
        raise TimeoutError(f'after {DEADLINE_S} s not every session has exchanged payloads')
      time.sleep(0.1)
    before = _used(syncer, children)
    time.sleep(seconds)
    after = _used(syncer, children)
  finally:
    for child in children:
      child.kill()
      child.wait()
  number, own_s, kernel_s, transport_s, others_s, seconds = (b - a for a, b in zip(before, after))
  per_byte = 1e9 / number
  return {
    'syncer': own_s * per_byte,
    'of it kernel': kernel_s * per_byte,
    'its processes': transport_s * per_byte,
    'learners': others_s * per_byte,
    'MB/s': number / seconds / 1e6,
    'resident MB': psutil.Process().memory_info().rss / 1e6,
  }


def _used(syncer: Syncer, children: list[psutil.Popen]) -> tuple[float, ...]:
  own = os.times()
  used = lambda some: sum(one.user + one.system for one in (child.cpu_times() for child in some))
  traffic = syncer.transport.traffic
  return (
    traffic.sent_bytes + traffic.received_bytes,
    own.user + own.system,
    own.system,
    used(syncer.children),
    used(children),
    time.monotonic(),
  )


def main() -> None:
  parser = measured.parser(__doc__)
  parser.add_argument('--against', action='append', default=[], help='another checkout')
  parser.add_argument('--way', action='append', help=f'some of {" ".join(WAYS)}')
  flags = parser.parse_args()
  turns, seconds = (1, 2) if flags.quick else (3, 4)
  checkouts = {'': ''} | {f'{pathlib.Path(one).name}: ': one for one in flags.against}
  taken: dict[str, list[dict[str, float]]] = {}
  for _ in range(turns):
    for way in flags.way or WAYS:
      for name, checkout in checkouts.items():
        done = subprocess.run(
          [sys.executable, __file__, 'syncer', *way.split(','), str(seconds)],
          env=os.environ | {'BENCHMARKED': checkout},
          stdout=subprocess.PIPE,
          check=True,
        )
        taken.setdefault(f'{name}{way}', []).append(json.loads(done.stdout))
  found: dict[str, Any] = {}
  for way, runs in taken.items():
    found[way] = {name: measured.spread([run[name] for run in runs]) for name in runs[0]}
    print(f'{way:16}' + ', '.join(f'{n} {measured.text(one)}' for n, one in found[way].items()))
  measured.write(flags.json, found)


if __name__ == '__main__':
  match sys.argv[1:]:
    case ['syncer', ways, sessions, *processes, seconds]:
      found = serve(ways, int(sessions), float(seconds), *map(int, processes))
      print(json.dumps(found), flush=True)
      os._exit(0)  # the threads of its sessions would wait for their peers
    case ['learners', address, first, count]:
      kept = [Learner(f'l{int(first) * int(count) + k}', address) for k in range(int(count))]
      threading.Event().wait()
    case _:
      main()
