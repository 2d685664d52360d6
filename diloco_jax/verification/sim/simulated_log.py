"""The simulated syncer's checkpoints and log, and its recovery from them, as in production.

Checkpoints hold the machine state, Theta, and the position in the log that they cover. The log is
the production one (storage/outer_log.py) on the simulated disk and the simulated arrays.

When a log refuses to open, the *operator* repairs it as launch/restore.py does: sets it aside, and
begins a new one after the newest whole checkpoint.

The world also knows what no program can ask: which records survive a power loss (`durable`).
"""

import collections
import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import recovery
from diloco_jax.protocol.tape import tape
from diloco_jax.storage import outer_log, wal, wal_format, wal_recovery
from diloco_jax.verification.sim import arrays
from diloco_jax.verification.sim import disk as disk_lib

SEGMENT_BYTES = 8 << 10  # a run has several segments
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

  journal: 'Journal'
  machine_state: dict[str, Any] | None
  theta: arrays.Theta


def recover(disk: disk_lib.Disk, start: tape.Start) -> Recovered:
  """Recovers from a disk; `start` is that of version 0.

  Raises:
    WalError: the log cannot be opened.
    NotRecovered: a record differs from the committed one, and the log did not notice.
  """
  saved = disk_lib.Checkpoints(disk).newest()
  theta = arrays.Theta(list(start.digests)) if saved is None else arrays.Theta.load(saved['theta'])
  journal = Journal(disk, start.agreement)
  load = functools.partial(
    syncer_machine.SyncerMachine.load, start.config, start.agreement, start.payload_bytes
  )
  try:
    records = journal.recover(theta, saved or {})
    if saved is None and not records:
      return Recovered(journal, None, theta)
    machine_state = start.make().state() if saved is None else saved['snapshot']
    return Recovered(journal, recovery.replay_log(load, machine_state, records), theta)
  except UNREADABLE as error:
    raise NotRecovered(f'{type(error).__name__}: {error}') from error


class Journal(outer_log.OuterLog):
  """The open log of a syncer, and which of its records are durable."""

  def __init__(self, disk: disk_lib.Disk, agreement: str):
    self.said: list[str] = []  # the lines that recovery printed
    super().__init__(disk, agreement, self.said.append, SEGMENT_BYTES)
    # Of records that may not be durable: number, file, byte after its end.
    self._ends: collections.deque[tuple[int, str, int]] = collections.deque()
    self._durable = 0

  def recover(self, theta: outer_log.Theta, position: dict[str, Any]) -> list[outer_log.Ended]:
    records = super().recover(theta, position)
    self._ends.extend(_ends(self._files))
    self._durable = self._ends[0][0] - 1 if self._ends else self.last
    return records

  @property
  def last(self) -> int:
    return self._wal.last

  @property
  def first(self) -> int:
    return self._wal.first

  @property
  def torn(self) -> bool:
    return bool(self._wal.recovered.cut_bytes)

  def append(self, step: outer_log.OuterStep) -> int:
    number = super().append(step)
    name = wal_recovery.segment_names(self._files)[-1]
    self._ends.append((number, name, self._files.size(name)))
    return number

  def durable(self) -> int:
    """The newest record that survives a power loss."""
    ends = self._ends
    while ends and self._files.durable(ends[0][1]) >= ends[0][2]:
      self._durable = ends.popleft()[0]
    return self._durable


def _ends(disk: disk_lib.Disk) -> list[tuple[int, str, int]]:
  """(number, file, byte after its end) of every record in the newest file."""
  name = wal_recovery.segment_names(disk)[-1]
  segment = wal_recovery.Segment(name, wal_format.first_of(name), disk.size(name))
  return [
    (entry.number, name, offset + wal_format.ENTRY_HEADER_BYTES + entry.length)
    for offset, entry in wal_recovery.entries(disk, segment)
  ]


# --- The operator ---------------------------------------------------------------------------------


def lost_unseen(disk: disk_lib.Disk, durable: int, rot: Sequence[tuple[str, int]]) -> bool:
  """Whether recovery may take the last durable record for a torn tail, because a bit of it has
  rotted and the mark after it was lost with the power (storage/wal_recovery.py describes this
  window).

  Args:
    disk: before the log is opened.
    durable: the last durable record.
    rot: the bits that have rotted since the log was last opened.
  """
  names = wal_recovery.segment_names(disk)
  if not names:
    return False
  name = names[-1]
  entries = list(wal_format.entries_in(disk.read(name)))
  if wal_format.first_of(name) > durable or any(one.proven >= durable for _, one in entries):
    return False
  ends = [
    place + wal_format.ENTRY_HEADER_BYTES + one.length
    for place, one in entries
    if one.number < durable
  ]
  start = max(ends, default=wal_format.SEGMENT_HEADER_BYTES)
  return any(file == name and place >= start for file, place in rot)


def repair(disk: disk_lib.Disk, agreement: str) -> None:
  """Repairs a log that refuses to open, as an operator does; afterwards it opens.

  Raises:
    OSError, WalFull, WalBroken: the disk failed; call it again.
  """
  saved = disk_lib.Checkpoints(disk).newest()
  after, chain = (0, None) if saved is None else (saved['log'], bytes.fromhex(saved['chain']))
  for name in wal_recovery.segment_names(disk):
    disk.rename(name, f'{name}.{len(disk.names())}{SET_ASIDE}')
  disk.fsync_names()
  wal.begin(disk, outer_log.run_of(agreement), after, chain, SEGMENT_BYTES)
