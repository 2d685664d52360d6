"""A joiner on a slow link: how long until the syncer merges its first contribution.

A syncer and two learners train over gRPC; then a third learner joins behind a proxy that lets so
many bytes a second pass. Machines, loop, transport and proxy are the production ones; arrays are
bytes of the right sizes, and a step only takes its time.

    python -m tests.runs.lib.slow_joiner [--rate_kb_s=250] [--update_kb_s=208]
    python -m tests.runs.lib.slow_joiner --queues=12 --rate_kb_s=40000

prints each thing that happens to the joiner with its time, and at last `contributes after N s, its
bytes need M s`. The second joins a model of 12 times the bytes that may wait for a learner, all
sizes a thousandth of those of a model of 26 billion parameters.
"""

import argparse
import asyncio
import contextlib
import threading
import time
import weakref
import zlib

import numpy as np

from diloco_jax.node import loop
from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.transport import addresses, grpc_client, grpc_server, link
from diloco_jax.transport import payloads as payloads_lib
from diloco_jax.verification.faults import proxy as proxy_lib

KB = 1_000
AGREEMENT = '{}'
SECOND_NS = config_lib.SECOND_NS

ACCESS = addresses.Access(plaintext_loopback=True)


class Bytes:
  """Payloads of a size, each in memory of its own, with their announcement; counts those that
  exist."""

  def __init__(self, store: payloads_lib.PayloadStore, size: int):
    self._store, self._size = store, size
    self.payload = messages.Payload(size_bytes=size, crc32=zlib.crc32(bytes(size)))
    self.read_count, self.alive, self.most_alive = 0, set(), 0

  def put(self) -> int:
    data, number = np.zeros(self._size, np.uint8), self.read_count
    self.read_count += 1
    self.alive.add(number)
    weakref.finalize(data, self.alive.discard, number)
    self.most_alive = max(self.most_alive, len(self.alive))
    return self._store.put(memoryview(data))


class Work:
  """Work without arrays: every digest is 7, and a step takes `step_s`."""

  def __init__(self, post, store, sizes: argparse.Namespace):
    self._post, self._store = post, store
    self._delta, self.wholes = Bytes(store, sizes.delta), Bytes(store, sizes.whole)
    self._step_s = sizes.step_s
    self._versions: dict[int, int] = {}

  def submit(self, action: actions.Work) -> None:
    match action:
      case actions.Step():
        done = events.StepDone(tokens=8, step_ns=int(self._step_s * SECOND_NS))
        timer = threading.Timer(self._step_s, self._post, [done])
        timer.daemon = True
        timer.start()
      case actions.Encode(sync=sync, fragment=p):
        self._post(
          events.Encoded(
            sync=sync, fragment=p, payload_id=self._delta.put(), payload=self._delta.payload
          )
        )
      case actions.Adopt(fragment=p, version=version, payload_id=payload_id):
        self._store.drop(payload_id)
        self._post(events.AdoptDone(fragment=p, version=version, digest=7))
      case actions.Merge(sync=sync, fragment=p, version=version, participants=participants):
        for participant in participants:
          self._store.drop(participant.payload_id)
        self._versions[p] = version
        self._post(
          events.MergeDone(
            sync=sync,
            fragment=p,
            payload_id=self._delta.put(),
            payload=self._delta.payload,
            digest=7,
            norms=(1,) * len(participants),
          )
        )
      case actions.ReadFragment(fragment=p):
        self._post(
          events.FragmentRead(
            fragment=p,
            version=self._versions.get(p, 0),
            payload_id=self.wholes.put(),
            payload=self.wholes.payload,
            digest=7,
          )
        )
      case actions.Save(clock=clock):
        self._post(events.SaveDone(clock=clock))


class Records:
  """What a node reports, with its name."""

  def __init__(self, name: str, on_fact):
    self._name, self._on_fact = name, on_fact

  def report(self, fact: facts.Fact) -> None:
    self._on_fact(self._name, fact)

  def say(self, text: str) -> None:
    self._on_fact(self._name, text)


def start(name, machine, make_transport, sizes, report):
  """A node on its own thread; returns its event queue, its transport and its work."""
  inbox, store = loop.EventQueue(), payloads_lib.PayloadStore()
  transport, work = make_transport(inbox.post, store), Work(inbox.post, store, sizes)
  node = loop.Node(machine, inbox, loop.Monotonic(), transport, work, store, Records(name, report))
  inbox.post(events.Wake())

  def run() -> None:
    with contextlib.suppress(_Over):
      node.run()

  threading.Thread(target=run, daemon=True).start()
  return inbox, transport, work


class _Over(Exception):
  """The experiment has ended."""


class SlowLink:
  """A proxy with a rate, in a thread of its own."""

  def __init__(self, address: str, rate: float):
    self._ready = threading.Event()
    self._resolve, self._rate = (lambda: address), rate
    self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
    self._thread.start()
    self._ready.wait()

  async def _serve(self) -> None:
    self.proxy = proxy_lib.Proxy(self._resolve)
    await self.proxy.start()
    for lane in (self.proxy.up, self.proxy.down):
      lane.set(proxy_lib.Toxics(rate=self._rate))
    self.address = self.proxy.address
    self._over, self._loop = asyncio.Event(), asyncio.get_running_loop()
    self._ready.set()
    await self._over.wait()
    await self.proxy.close()

  def close(self) -> None:
    self._loop.call_soon_threadsafe(self._over.set)
    self._thread.join()


def contributes_after_s(sizes: argparse.Namespace, limit_s: float, say=print) -> float:
  """Seconds from the joiner's start until a contribution of it is merged; inf: not in `limit_s`."""
  config = config_lib.ProtocolConfig(
    learners=2,
    fragments=sizes.fragments,
    period=sizes.period,
    overlap=6,  # the latency budget: 1.5 s
    quorum=1,
    total_steps=1_000_000,
    shards=4,
    save_steps=0,
  )
  merged, started_s, running = threading.Event(), [time.monotonic()], threading.Event()
  synced = [0]

  def on_fact(name, fact):
    if name == 'syncer' and isinstance(fact, facts.Synced):
      synced[0] += 1
      if synced[0] >= 4:
        running.set()
      if 'l2' in fact.participants and not merged.is_set():
        merged.set()
        say(f'{time.monotonic() - started_s[0]:7.2f} s  merged: sync {fact.sync}')
    elif name == 'l2' or (isinstance(fact, facts.Member) and fact.learner == 'l2'):
      say(f'{time.monotonic() - started_s[0]:7.2f} s  {name}: {fact}')

  limits = link.Limits(
    contribution_bytes=(sizes.delta,) * sizes.fragments,
    publish_bytes=(max(sizes.whole, sizes.delta),) * sizes.fragments,
    max_queued_bytes=sizes.max_queued,
  )
  syncer = syncer_machine.SyncerMachine(
    config, AGREEMENT, 'slow', (7,) * sizes.fragments, (sizes.delta,) * sizes.fragments
  )
  door = grpc_server.Door('127.0.0.1:0', limits.seats, access=ACCESS)
  inbox, server, work = start(
    'syncer',
    syncer,
    lambda post, store: grpc_server.GrpcSyncerTransport(door, post, store, limits),
    sizes,
    on_fact,
  )
  inboxes, transports = [inbox], []

  def learner(name, address):
    identity = learner_machine.Identity(
      learner=name, nonce=len(transports) + 1, agreement=AGREEMENT, host='here', pid=1
    )
    held = (7,) * sizes.fragments if name != 'l2' else None  # the joiner needs every fragment
    machine = learner_machine.LearnerMachine(config, identity, held)
    inbox, transport, _ = start(
      name,
      machine,
      lambda post, store: grpc_client.GrpcLearnerTransport(
        lambda: address, post, store, limits, access=ACCESS
      ),
      sizes,
      on_fact,
    )
    inboxes.append(inbox)
    transports.append(transport)
    return transport

  address = server.address
  for name in ('l0', 'l1'):
    learner(name, address)
  assert running.wait(60), 'the run does not begin'
  slow = SlowLink(address, sizes.rate)
  started_s[0] = time.monotonic()
  joiner = learner('l2', slow.address)
  contributes = merged.wait(limit_s)
  took_s = time.monotonic() - started_s[0]
  say(
    f'{took_s:7.2f} s  received {joiner.traffic.received_bytes / 1e6:.1f} MB, '
    f'sent {joiner.traffic.sent_bytes / 1e6:.1f} MB'
  )
  for inbox in inboxes:
    inbox.fail(_Over())
  for transport in (*transports, server):
    transport.shutdown(0.0)
  slow.close()
  wholes = work.wholes
  say(
    f'{took_s:7.2f} s  {wholes.read_count} whole fragments were read, {wholes.most_alive} at once'
  )
  sizes.most_wholes = wholes.most_alive
  return took_s if contributes else float('inf')


def sizes(rate: float, update_rate: float, fragments: float):
  """Of a run of four fragments whose learners are sent `update_rate` bytes of deltas a second."""
  step_s, count, period = 0.25, 4, 8
  return argparse.Namespace(
    rate=rate,
    fragments=count,
    period=period,
    step_s=step_s,
    delta=int(update_rate * step_s * period / count),
    whole=int(fragments / count),
    need_s=fragments / rate,
    max_queued=link.Limits.max_queued_bytes,
  )


def large(rate: float, queues: int):
  """Of a model of so many times the bytes that may wait for a learner, a thousandth of 8 GiB."""
  max_queued, count = (8 << 30) // 1_000, 4 * queues
  return argparse.Namespace(
    rate=rate,
    fragments=count,
    period=count,
    step_s=0.25,
    delta=max_queued // 16,
    whole=max_queued // 4,
    need_s=queues * max_queued / rate,
    max_queued=max_queued,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rate_kb_s', type=float, default=250)
  parser.add_argument('--update_kb_s', type=float, default=208)
  parser.add_argument('--limit_s', type=float, default=200)
  parser.add_argument('--queues', type=int, default=0)
  flags = parser.parse_args()
  chosen = sizes(flags.rate_kb_s * KB, flags.update_kb_s * KB, 10e6)
  if flags.queues:
    chosen = large(flags.rate_kb_s * KB, flags.queues)
  took_s = contributes_after_s(chosen, flags.limit_s)
  print(f'contributes after {took_s:.1f} s, its bytes need {chosen.need_s:.1f} s')


if __name__ == '__main__':
  main()
