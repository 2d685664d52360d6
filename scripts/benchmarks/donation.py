"""The cost of a donation for the donor: its step time during a donation and before it.

A donor's island trains in this process, on the first CPU; the syncer's end of the wire is another
process, on the last CPU. Rounds of steps with and without a donation alternate, so that other load
on the host affects both. A step counts as disturbed if it overlaps a donation, from the copy of the
moments between two steps until the last byte has arrived.

    python scripts/benchmarks/donation.py [--short] [--json=FILE] [--rate_mib_s=16]

prints medians in ms, their ratio (steps/s during donations over steps/s otherwise), the bytes, and
the cost of a MiB for this process: CPU time during donations minus that of as many undisturbed
steps. The same CPU emulates the device, which is the worst case.
"""

import multiprocessing
import os
import pathlib
import statistics
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import measured

STEPS_BETWEEN = 12


def _run_on(choose) -> None:
  """Restricts this process to one of its CPUs."""
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {choose(os.sched_getaffinity(0))})


def syncer(pipe, moments_bytes: int) -> None:
  """The syncer's end: receives donations and reports each one."""
  _run_on(max)
  from diloco_jax.protocol import events, messages
  from diloco_jax.transport import (
    addresses,
    grpc_server,
    link,  # pylint: disable=g-import-not-at-top
    payloads,
  )

  kept = payloads.PayloadStore()

  def post(event):
    match event:
      case events.Received(session=session, message=message):
        transport.handled(session)
        if isinstance(message, messages.Donation):
          kept.drop(event.payload_id)
          ask(session, message.transfer + 1)
          pipe.send(message.transfer)
      case events.Connected(session=session):
        ask(session, 1)

  def ask(session, transfer):
    transport.send(session, messages.Donate(transfer=transfer, clock=0, versions=(0,)))

  transport = grpc_server.GrpcSyncerTransport(
    '127.0.0.1:0',
    post,
    kept,
    link.Limits(contribution_bytes=(0,), publish_bytes=(0,), donation_bytes=moments_bytes),
    access=addresses.Access(plaintext_loopback=True),
  )
  pipe.send(transport.port)
  pipe.recv()
  transport.shutdown(1.0)


class Donor:
  """An island and its link to the syncer."""

  def __init__(self, pipe, port: int, config, rate_bytes_per_s: int, assembled):
    from diloco_jax.learner import moments_work
    from diloco_jax.protocol import messages  # pylint: disable=g-import-not-at-top
    from diloco_jax.train import island as island_lib
    from diloco_jax.transport import (
      addresses,
      grpc_client,
      link,  # pylint: disable=g-import-not-at-top
      payloads,
    )

    self._pipe = pipe
    self.island = island_lib.Island(
      task=assembled.task,
      optimizer=config.optimizer,
      mesh=config.mesh,
      total_steps=100_000,
    )
    self.island.warm_up()
    self._payloads = payloads.PayloadStore()
    self._moments = moments_work.Moments(self.island, self._post, None, self._payloads, None)
    self._moments.compile()
    self._connected = threading.Event()
    limits = link.Limits(
      contribution_bytes=(0,),
      publish_bytes=(0,),
      donation_bytes=assembled.moments_bytes,
      donation_bytes_per_s=rate_bytes_per_s,
    )
    self._transport = grpc_client.GrpcLearnerTransport(
      lambda: f'127.0.0.1:{port}',
      self._post,
      self._payloads,
      limits,
      access=addresses.Access(plaintext_loopback=True),
    )
    self._transport.dial(1)
    self._connected.wait()
    join = messages.Join(protocol=1, learner='l0', nonce=1, agreement='', host='', pid=1)
    self._transport.send(1, join)

  def _post(self, event) -> None:
    from diloco_jax.protocol import events, messages  # pylint: disable=g-import-not-at-top

    if isinstance(event, events.Connected):
      self._connected.set()
    elif isinstance(event, events.MomentsRead):
      donation = messages.Donation(
        transfer=event.transfer,
        donor='l0',
        clock=0,
        versions=(0,),
        digest=event.digest,
        payload=event.payload,
      )
      self._transport.send(1, donation, self._payloads.get(event.payload_id))
      self._payloads.drop(event.payload_id)

  def give(self, transfer: int) -> None:
    """Starts a donation; call it at a step boundary."""
    self._moments.read(transfer)

  def arrived(self) -> bool:
    return bool(self._pipe.poll() and self._pipe.recv())

  def close(self) -> None:
    self._transport.shutdown(1.0)


def measure(donor: Donor, rounds: int) -> tuple[list[float], list[float], float]:
  """Returns the seconds of undisturbed steps, of disturbed steps, and the CPU time of a
  donation."""
  calm, giving, clock, calm_cpu_s, giving_cpu_s = [], [], 0, 0.0, 0.0

  def step() -> float:
    nonlocal clock
    start_s = time.perf_counter()
    donor.island.step(clock)
    clock += 1
    return time.perf_counter() - start_s

  for _ in range(STEPS_BETWEEN):
    step()
  for transfer in range(1, rounds + 1):
    cpu_s = time.process_time()
    calm += [step() for _ in range(STEPS_BETWEEN)]
    calm_cpu_s, cpu_s = calm_cpu_s + time.process_time() - cpu_s, time.process_time()
    start_s, before = time.perf_counter(), clock
    donor.give(transfer)
    snapshot_s = time.perf_counter() - start_s
    while not donor.arrived():
      giving.append(step() + (snapshot_s if clock == before + 1 else 0.0))
    giving_cpu_s += time.process_time() - cpu_s
    step()  # the rest of the donation
  return calm, giving, (giving_cpu_s - calm_cpu_s / len(calm) * len(giving)) / rounds


def main() -> None:
  parser = measured.parser(__doc__)
  parser.add_argument('--rate_mib_s', type=int, default=16)
  flags = parser.parse_args()
  rounds = 3 if flags.short else 10
  from diloco_jax.config import build  # pylint: disable=g-import-not-at-top
  from diloco_jax.configs import stdlib_lm

  config = stdlib_lm.get_config('tiny')
  config.mesh.data = 1
  config.model.num_layers, config.model.embed_dim, config.model.hidden_dim = 4, 128, 768
  config.data.seq_len, config.data.batch_size = 128, 4
  assembled = build.assemble(config)
  ours, theirs = multiprocessing.get_context('spawn').Pipe()
  process = multiprocessing.get_context('spawn').Process(
    target=syncer, args=(theirs, assembled.moments_bytes), daemon=True
  )
  process.start()
  _run_on(min)
  donor = Donor(ours, ours.recv(), config, flags.rate_mib_s << 20, assembled)
  calm, giving, cpu_s = measure(donor, rounds)
  donor.close()
  ours.send('end')
  process.join(5)
  alone_ms, during_ms = (1e3 * statistics.median(one) for one in (calm, giving))
  size_mib = assembled.moments_bytes / 2**20
  print(
    f'moments {size_mib:.1f} MiB at {flags.rate_mib_s} MiB/s, '
    f'{rounds} donations: step {alone_ms:.1f} ms alone (n={len(calm)}), '
    f'{during_ms:.1f} ms while donating (n={len(giving)}), '
    f'steps/s ratio {alone_ms / during_ms:.3f}; CPU {1e3 * cpu_s / size_mib:.1f} ms per MiB'
  )
  measured.write(
    flags.json,
    {
      'rate_mib_s': flags.rate_mib_s,
      'step_ms': {
        'alone': measured.spread([1e3 * one for one in calm]),
        'donating': measured.spread([1e3 * one for one in giving]),
      },
      'ratio': alone_ms / during_ms,
      'cpu_ms_per_mib': 1e3 * cpu_s / size_mib,
    },
  )


if __name__ == '__main__':
  main()
