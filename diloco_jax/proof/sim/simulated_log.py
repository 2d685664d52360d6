"""What the syncer keeps on its disk, and the way back from it, as production has it.

Checkpoints hold the machine's snapshot, Theta, and how far they reach in the log (`log`, `chain`).
The log is the production one (storage/wal.py) on the simulated disk, a record for each outer step::

    where the syncer was = newest whole checkpoint, or version 0
                           + the records behind it: protocol/syncer/recovery.py for the machine,
                             every outer step again for Theta, every digest compared

A log that refuses to open is put right by the *operator*, as launch/restore.py does it: it is set
aside, and a new one begins behind the newest checkpoint that is whole.

The world also knows what no program can ask: which records no power loss takes any more
(`durable`).
"""

import collections
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from diloco_jax.proof.sim import arrays
from diloco_jax.proof.sim import disk as disk_lib
from diloco_jax.protocol.syncer import recovery
from diloco_jax.storage import wal, wal_format, wal_recovery

RUN = 'simulated'
OUTER_STEP = 1  # the kind of its records
SEGMENT_BYTES = 8 << 10  # so that a run has several
UNREADABLE = (ValueError, LookupError, TypeError, AssertionError, struct.error)
SET_ASIDE = '.aside'


class NotRecovered(Exception):
  """The log opens, but what it says does not make sense."""


class Recovered(NamedTuple):
  """Where a syncer was; `snapshot` is None if it has never been anywhere."""

  journal: 'Journal'
  snapshot: dict[str, Any] | None
  theta: arrays.Theta


def recover(disk: disk_lib.Disk, fresh: dict[str, Any], initial: Sequence[int]) -> Recovered:
  """Goes on from what is on a disk; `fresh` and `initial` are snapshot and Theta of version 0.

  Raises:
    WalError: the log cannot be opened.
    NotRecovered: one of its records is not what was committed, and the log did not notice.
  """
  saved = disk_lib.Checkpoints(disk).newest()
  theta, after, chain = arrays.Theta(list(initial)), 0, None
  if saved is not None:
    theta, after, chain = arrays.Theta.load(saved['theta']), saved['log'], saved['chain']
  log = wal.open_log(disk, RUN, after, chain and bytes.fromhex(chain), SEGMENT_BYTES)
  journal = Journal(disk, log)
  if saved is None and log.last == 0:
    return Recovered(journal, None, theta)
  snapshot = fresh if saved is None else saved['snapshot']
  try:
    outcomes = [_redo(theta, record) for record in log.records(after)]
    return Recovered(journal, recovery.recovered(snapshot, outcomes), theta)
  except UNREADABLE as error:
    raise NotRecovered(f'{type(error).__name__}: {error}') from error


def _redo(theta: arrays.Theta, record: wal.Record) -> recovery.Outcome:
  """Carries out an outer step again."""
  outcome, grads = decode(record.payload)
  p, made_of = outcome.fragment, arrays.good(outcome.participants, grads, outcome.refused)
  if outcome.failed:
    digest = theta.values[p]
  else:
    digest = theta.outer_step(p, outcome.version, *made_of)
    theta.take(p, outcome.version, *made_of, digest)
  if digest != outcome.digest:
    raise ValueError(f'record {record.number} makes {digest}, it was {outcome.digest}')
  return outcome


def encode(outcome: recovery.Outcome, grads: Sequence[arrays.Gradient]) -> list[Any]:
  payloads = [grad.encode() for grad in grads]
  header = {name: getattr(outcome, name) for name in recovery.Outcome.__slots__}
  return wal_format.pack({**header, 'payload_bytes': [len(one) for one in payloads]}, *payloads)


def decode(payload: memoryview) -> tuple[recovery.Outcome, list[arrays.Gradient]]:
  header, data = wal_format.unpack(payload)
  grads = []
  for size in header.pop('payload_bytes'):
    grads.append(arrays.Gradient.decode(bytes(data[:size])))
    data = data[size:]
  participants = tuple(tuple(one) for one in header.pop('participants'))
  screened = {name: tuple(header.pop(name)) for name in ('norms', 'refused')}
  return recovery.Outcome(participants=participants, **screened, **header), grads


class Journal:
  """The open log of a syncer."""

  def __init__(self, disk: disk_lib.Disk, log: wal.Wal):
    self._disk, self._log = disk, log
    # Of records that may not be durable: number, file, byte behind it.
    self._ends = collections.deque(_ends(disk))
    self._durable = self._ends[0][0] - 1 if self._ends else log.last

  @property
  def last(self) -> int:
    return self._log.last

  @property
  def first(self) -> int:
    return self._log.first

  @property
  def words(self) -> tuple[str, ...]:
    """What recovery had to say."""
    return self._log.recovered.words

  @property
  def torn(self) -> bool:
    return bool(self._log.recovered.cut_bytes)

  @property
  def position(self) -> dict[str, Any]:
    """For a checkpoint that holds all outer steps committed so far."""
    return {'log': self._log.committed, 'chain': self._log.chain.hex()}

  def append(self, outcome: recovery.Outcome, grads: Sequence[arrays.Gradient]) -> int:
    """Raises WalFull, WalBroken."""
    number = self._log.append(OUTER_STEP, *encode(outcome, grads))
    name = wal_recovery.segment_names(self._disk)[-1]
    self._ends.append((number, name, self._disk.size(name)))
    return number

  def commit(self) -> None:
    """Raises WalBroken."""
    self._log.commit()

  def compact(self, checkpoints: disk_lib.Checkpoints) -> None:
    """Drops what both of the newest two checkpoints hold; none before there are two.

    Raises:
      WalFull, WalBroken: the disk.
    """
    kept = checkpoints.last_two()
    if len(kept) == disk_lib.KEPT and kept[0] is not None:
      self._log.roll()
      self._log.drop_before(kept[0]['log'] + 1)

  def durable(self) -> int:
    """The newest record that no power loss takes any more."""
    ends = self._ends
    while ends and self._disk.durable(ends[0][1]) >= ends[0][2]:
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


def repair(disk: disk_lib.Disk) -> None:
  """What an operator does about a log that refuses to open; afterwards it opens.

  Raises:
    OSError, WalFull, WalBroken: the disk; to be done again.
  """
  saved = disk_lib.Checkpoints(disk).newest()
  after, chain = (0, None) if saved is None else (saved['log'], bytes.fromhex(saved['chain']))
  for name in wal_recovery.segment_names(disk):
    disk.rename(name, f'{name}.{len(disk.names())}{SET_ASIDE}')
  disk.fsync_names()
  wal.begin(disk, RUN, after, chain, SEGMENT_BYTES)
