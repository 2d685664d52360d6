"""The simulated syncer's checkpoints and log, and its recovery from them, as in production.

Checkpoints hold the machine state, Theta, and the position in the log that they cover. The log is
the production one (storage/outer_log.py) on the simulated disk and the simulated arrays.

When a log refuses to open, the *operator* repairs it as process/restore.py does: sets it aside, and
begins a new one after the newest whole checkpoint.

The world also knows what no program can ask: which records survive a power loss (`durable`).
"""

import struct
from typing import Any, NamedTuple

from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import recovery
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.storage import outer_log, wal
from diloco_jax.verification.sim import arrays
from diloco_jax.verification.sim import disk as disk_lib

UNREADABLE = (
  ValueError,
  LookupError,
  TypeError,
  AssertionError,
  struct.error,
  outer_log.NotReproduced,
)
SET_ASIDE = '.aside'


class NotRecovered(Exception):
  """The log opens, but its records cannot be replayed."""


class Recovered(NamedTuple):
  """A recovered syncer; `machine_state` is None if the disk has no checkpoint and no record."""

  log: wal.Wal
  machine_state: dict[str, Any] | None
  theta: arrays.Theta
  torn: bool  # a record was unfinished


def recover(disk: disk_lib.Disk, start: tape_lib.Start) -> Recovered:
  """Recovers from a disk; `start` is that of version 0.

  Raises:
    WalError: the log cannot be opened.
    NotRecovered: a record differs from the committed one, and the log did not notice.
  """
  saved = disk_lib.Checkpoints(disk).newest()
  theta = arrays.Theta(list(start.digests)) if saved is None else arrays.Theta.load(saved['theta'])
  torn = wal.NEW in disk.names()
  load = lambda machine_state: syncer_machine.SyncerMachine.load(
    start.config, start.agreement, start.payload_bytes, machine_state, start.links_measured
  )
  try:
    log, ended = outer_log.recover(disk, start.agreement, theta, saved or {})
    if saved is None and not ended:
      return Recovered(log, None, theta, torn)
    machine_state = start.make().state() if saved is None else saved['snapshot']
    return Recovered(log, recovery.replay_log(load, machine_state, ended), theta, torn)
  except UNREADABLE as error:
    raise NotRecovered(f'{type(error).__name__}: {error}') from error


def durable(disk: disk_lib.Disk, known: int) -> int:
  """The newest record that survives a power loss, `known` or a later one."""
  while disk.durable(wal.name_of(known + 1)):
    known += 1
  return known


# --- The operator ---------------------------------------------------------------------------------


def repair(disk: disk_lib.Disk, agreement: str) -> None:
  """Repairs a log that refuses to open, as an operator does; afterwards it opens.

  Raises:
    OSError, WalFull, WalBroken: the disk failed; call it again.
  """
  saved = disk_lib.Checkpoints(disk).newest()
  after, chain = (0, None) if saved is None else (saved['log'], bytes.fromhex(saved['chain']))
  for name in map(wal.name_of, wal.numbers(disk)):
    disk.rename(name, f'{name}.{len(disk.names())}{SET_ASIDE}')
  disk.fsync_names()
  wal.begin(disk, outer_log.run_of(agreement), after, chain)
