"""What the syncer keeps on its disk, and the way back from it, as production has it.

Checkpoints hold the machine's state, Theta, and how far they reach in the log. The log is the
production one (storage/outer_log.py) on the simulated disk and the simulated arrays.

A log that refuses to open is put right by the *operator*, as launch/restore.py does it: it is set
aside, and a new one begins behind the newest checkpoint that is whole.

The world also knows what no program can ask: which records no power loss takes any more
(`durable`).
"""

import collections
import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from diloco_jax.proof.sim import arrays
from diloco_jax.proof.sim import disk as disk_lib
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import recovery
from diloco_jax.protocol.tape import tape
from diloco_jax.storage import outer_log, wal, wal_format, wal_recovery

SEGMENT_BYTES = 8 << 10  # so that a run has several
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
  """The log opens, but what it says does not make sense."""


class Recovered(NamedTuple):
  """Where a syncer was; `snapshot` is None if it has never been anywhere."""

  journal: 'Journal'
  machine_state: dict[str, Any] | None
  theta: arrays.Theta


def recover(disk: disk_lib.Disk, start: tape.Start) -> Recovered:
  """Goes on from what is on a disk; `start` is that of version 0.

  Raises:
    WalError: the log cannot be opened.
    NotRecovered: one of its records is not what was committed, and the log did not notice.
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
  """The open log of a syncer, and what the world knows of it."""

  def __init__(self, disk: disk_lib.Disk, agreement: str):
    self.words: list[str] = []  # what recovery had to say
    super().__init__(disk, agreement, self.words.append, SEGMENT_BYTES)
    # Of records that may not be durable: number, file, byte behind it.
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
    """The newest record that no power loss takes any more."""
    ends = self._ends
    while ends and self._files.durable(ends[0][1]) >= ends[0][2]:
      self._durable = ends.popleft()[0]
    return self._durable


def _ends(disk: disk_lib.Disk) -> list[tuple[int, str, int]]:
  """(number, file, byte behind it) of every record in the newest file."""
  name = wal_recovery.segment_names(disk)[-1]
  segment = wal_recovery.Segment(name, wal_format.first_of(name), disk.size(name))
  return [
    (entry.number, name, offset + wal_format.ENTRY_HEADER_BYTES + entry.length)
    for offset, entry in wal_recovery.entries(disk, segment)
  ]


# --- The operator ---------------------------------------------------------------------------------


def lost_unseen(disk: disk_lib.Disk, durable: int, rot: Sequence[tuple[str, int]]) -> bool:
  """Whether the last durable record may be taken for a torn tail, because a bit of it has rotted
  and the mark behind it was lost with the power: the window that storage/wal_recovery.py tells of.

  Args:
    disk: before the log is opened.
    durable: the last record that was.
    rot: what has rotted since the log was last opened.
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
  """What an operator does about a log that refuses to open; afterwards it opens.

  Raises:
    OSError, WalFull, WalBroken: the disk; to be done again.
  """
  saved = disk_lib.Checkpoints(disk).newest()
  after, chain = (0, None) if saved is None else (saved['log'], bytes.fromhex(saved['chain']))
  for name in wal_recovery.segment_names(disk):
    disk.rename(name, f'{name}.{len(disk.names())}{SET_ASIDE}')
  disk.fsync_names()
  wal.begin(disk, outer_log.run_of(agreement), after, chain, SEGMENT_BYTES)
