"""One syncer: its node put together from ports, run to its end.

The same function serves a process of its own (gRPC) and the single-controller mode (in process):
only the transport differs.
"""

import pathlib
from typing import Callable

import jax

from diloco_jax.node import loop
from diloco_jax.node import ports
from diloco_jax.protocol import actions
from diloco_jax.protocol import tape as tape_lib
from diloco_jax.runtime import assembly
from diloco_jax.runtime import clock
from diloco_jax.runtime import payloads as payloads_lib
from diloco_jax.runtime import records as records_lib
from diloco_jax.runtime import syncer_work
from diloco_jax.runtime import tapes
from diloco_jax.runtime import traffic as traffic_lib
from diloco_jax.train import checkpoint

class SyncerRecords:
  """The syncer's records, with what crossed the wire beside its ledger (node.ports.Records)."""

  def __init__(
    self, records: records_lib.Recorder, traffic: traffic_lib.Traffic, assembled: assembly.Assembly
  ):
    self._records = records
    self._traffic = traffic
    self._learners = assembled.config.sync.learners
    self._parameters = assembled.parameters
    self.say = records.say

  def report(self, name: str, values: dict) -> None:
    up, down = self._traffic.received_bytes, self._traffic.sent_bytes
    if name == 'ledger':
      values = {
        **values, 'wire_bytes_up': up, 'wire_bytes_down': down,
        'wire_bytes_data_parallel': self._data_parallel_bytes(values),
      }
    self._records.report(name, values)
    if name == 'synced':
      self._records.scalars(values['sync'], {
        'diloco/participants': len(values['participants']),
        'diloco/grace_seconds': values['grace_ns'] / 1e9,
        'diloco/staleness': values['staleness'],
        'diloco/bytes_up': up, 'diloco/bytes_down': down,
      })

  def _data_parallel_bytes(self, ledger: dict) -> int:
    """What data-parallel training of the same steps would have moved: in every inner step a ring
    all-reduce of bfloat16 gradients, in which each of M learners sends 2 (M - 1) / M of them."""
    steps = sum(row['steps'] for row in ledger['learners'].values())
    return steps * 2 * self._parameters * 2 * (self._learners - 1) // self._learners


MakeTransport = Callable[[ports.Post, ports.Payloads], ports.Transport]
SHUTDOWN_S = 2.0


def run(
  assembled: assembly.Assembly,
  workdir: pathlib.Path,
  inbox: loop.Inbox,
  make_transport: MakeTransport,
  records: records_lib.Recorder,
) -> actions.Exit:
  """Runs a syncer until every fragment is closed or it is asked to stop.

  Args:
    assembled: the run.
    workdir: where its checkpoints and tapes are; a checkpoint there is continued.
    inbox: where Stop may be posted from outside.
    make_transport: called first, so that learners find somebody who listens; their words wait in
      the inbox until the machine is there.
    records: where facts go.

  Returns:
    The machine's Exit; what it saved is on disk.
  """
  payloads = payloads_lib.PayloadStore()
  transport = make_transport(inbox.post, payloads)
  tape = None
  try:
    theta = syncer_work.Theta(assembled)
    checkpoints = checkpoint.Checkpoints(str(workdir / 'syncer' / 'ckpt'))
    start = _start(assembled, theta, checkpoints, records)
    tape = tapes.Tape(workdir, start, records.say, assembled.config.to_dict())
    machine = start.make()
    evaluation = syncer_work.Evaluation(assembled, theta, records)
    evaluation.submit(machine.clock)
    work = syncer_work.SyncerWork(
      assembled, theta, inbox.post, payloads, records, checkpoints, evaluation
    )
    work.start()
    node = loop.Node(
      machine, inbox, clock.Monotonic(), transport, work, payloads,
      SyncerRecords(records, transport.traffic, assembled), tape,
    )
    result = node.run()
    work.stop()
    if work.error is not None:
      raise work.error
    evaluation.submit(machine.clock)
    evaluation.stop()
    checkpoints.close()
    return result
  finally:
    transport.shutdown(SHUTDOWN_S)
    if tape is not None:
      tape.close()


def _start(
  assembled: assembly.Assembly, theta: syncer_work.Theta, checkpoints: checkpoint.Checkpoints,
  records: records_lib.Recorder,
) -> tape_lib.Start:
  """What the machine is made of: version 0, or where the newest checkpoint left it."""
  place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  like = theta.arrays()
  restored = checkpoints.restore(jax.tree.map(lambda _: place, like), place, like)
  if restored is None:
    digests = tuple(theta.digest(p) for p in range(assembled.protocol.fragments))
    snapshot = None
  else:
    digests, snapshot = None, restored.protocol
    theta.restore(restored.state, snapshot['versions'])
    records.say(f'syncer goes on from its checkpoint of sync {restored.step}')
  return tape_lib.Start(
    role='syncer', node='syncer', config=assembled.protocol, agreement=assembled.agreement,
    payload_bytes=assembled.payload_bytes, digests=digests, snapshot=snapshot,
  )
