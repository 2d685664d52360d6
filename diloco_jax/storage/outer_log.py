"""The log of outer steps: what the syncer commits, and how Theta is made again from it.

A record of the write-ahead log (wal.py) is one outer step: the Merge that the machine asked for,
with the machine's books (protocol/syncer/recovery.py), the MergeDone that answers it, and the
participants' payloads as they came. Nothing about an outer step leaves the process before its
record is durable. So whatever anybody has seen of an outer step can be made again::

    Theta and books = checkpoint + the records behind it, each merged again by the function that
                      merged it first; the digest of the result must be the one that was committed

A refused outer step is recorded, too: it has settled tokens.

The log reaches back to the older of the two checkpoints that are kept, and to its beginning until
there are two: whichever of them does not read back, the other one will do.

It needs two ports, Files and Theta, so the simulator (proof/sim) runs it on its disks and arrays.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import files_port, wal, wal_format

OUTER_STEP = 1  # the kind of its records
CHECKPOINTS = 2  # so many are kept
POSITION, CHAIN = 'log', 'chain'  # what a checkpoint's own record holds of the log


class NotReproduced(wal_format.WalError):
  """An outer step of the log does not come out as it did. The log is whole; nothing was changed."""


class Merged(Protocol):
  """What became of an outer step."""

  failed: str
  """Why it was refused, in words; then nothing has changed."""

  digest: int
  """Of the fragment's published value after it."""


class Theta(Protocol):
  """The global model, as far as the log moves it."""

  versions: list[int]

  def merge(
    self,
    p: int,
    participants: Sequence[actions.Participant],
    payloads: Sequence[memoryview | bytes],
    refused: Sequence[str],
    width: int,
  ) -> Merged:
    """Carries out an outer step of fragment p: its next version, unless it is refused.

    Args:
      p: the fragment.
      participants: in the order of learner ids.
      payloads: theirs, in the same order.
      refused: learners that are left out, as if they were absent.
      width: how many rows are stacked.
    """


Ended = tuple[actions.Merge, events.MergeDone]


class OuterStep(NamedTuple):
  """One record: `width` rows were stacked, `payloads` are in the order of the participants."""

  merge: actions.Merge
  done: events.MergeDone
  width: int
  payloads: Sequence[memoryview | bytes]


def run_of(agreement: str) -> str:
  """Whose log it is: the name of a run in its log."""
  return hashlib.sha256(agreement.encode()).hexdigest()[:32]


def encode(step: OuterStep) -> list[Any]:
  """Buffers for Wal.append; payloads are not copied."""
  return wal_format.pack(
    {
      'merge': step.merge,
      'done': step.done,
      'width': step.width,
      'payload_bytes': [memoryview(payload).nbytes for payload in step.payloads],
    },
    *step.payloads,
  )


def decode(payload: memoryview) -> OuterStep:
  """The inverse of `encode`; payloads are views. Raises ValueError, KeyError, TypeError or
  TapeError."""
  header, data = wal_format.unpack(payload)
  merge = codec.decode(actions.Merge, header['merge'])
  done = codec.decode(events.MergeDone, header['done'])
  sizes = header['payload_bytes']
  if len(sizes) != len(merge.participants) or sum(sizes) != len(data):
    raise ValueError(
      f'{len(data)} bytes are left for payloads of {sizes} bytes from {len(merge.participants)} '
      'learners'
    )
  ends = itertools.accumulate(sizes)
  payloads = [data[end - size : end] for size, end in zip(sizes, ends)]
  return OuterStep(merge, done, header['width'], payloads)


# --- Carrying out an outer step again -------------------------------------------------------------


def redo(theta: Theta, record: wal.Record, place: str) -> OuterStep:
  """Carries out the outer step of a record again, on a Theta that stands right before it.

  Raises:
    NotReproduced: it does not belong there, or does not come out as it was committed.
  """
  step = _decoded(record, place)
  merge, done = step.merge, step.done
  before = theta.versions[merge.fragment]
  if merge.version != before + 1:
    raise _refused(
      record,
      place,
      f'makes version {merge.version} of fragment {merge.fragment}, the '
      f'checkpoint and the records before it end with version {before}: put the checkpoint back '
      'that belongs to this log',
    )
  merged = theta.merge(merge.fragment, merge.participants, step.payloads, done.refused, step.width)
  if (merged.digest, bool(merged.failed)) != (done.digest, bool(done.failed)):
    raise _refused(
      record,
      place,
      f'does not come out as it did: sync {merge.sync}, fragment '
      f'{merge.fragment}, version {merge.version} has digest {merged.digest:016x}, was '
      f'committed with {done.digest:016x}. Start it with the jax, the flags and the kind of '
      'machine that committed it; if nothing of that has changed, test the memory of this host',
    )
  return step


def _decoded(record: wal.Record, place: str) -> OuterStep:
  if record.kind != OUTER_STEP:
    raise _refused(record, place, f'is of kind {record.kind}, which this release does not know')
  try:
    return decode(record.payload)
  except (ValueError, KeyError, TypeError, codec.TapeError) as error:
    raise _refused(record, place, f'cannot be read by this release ({error})') from error


def _refused(record: wal.Record, place: str, what: str) -> NotReproduced:
  return NotReproduced(
    f'Record {record.number} of the log in {place} {what}. Not started, no record is lost.'
  )


# --- The log --------------------------------------------------------------------------------------


def begin(files: files_port.Files, agreement: str, position: dict[str, Any]) -> None:
  """A log in a folder without one, behind the position of a checkpoint that a run was brought back
  to (launch/restore.py). Raises ValueError, WalFull, WalBroken."""
  wal.begin(files, run_of(agreement), position[POSITION], bytes.fromhex(position[CHAIN]))


class OuterLog:
  """The log of one run. `recover` first; one thread at a time."""

  def __init__(
    self,
    files: files_port.Files,
    agreement: str,
    say: Callable[[str], None],
    segment_bytes: int = wal.SEGMENT_BYTES,
  ):
    """The log in a directory whose lock the caller holds.

    Args:
      files: the directory.
      agreement: the run's (protocol/agreement.py): another run's log is refused.
      say: where lines for people go.
      segment_bytes: as for wal.open_log.
    """
    self._files = files
    self._run = run_of(agreement)
    self._say = say
    self._segment_bytes = segment_bytes
    self._wal: wal.Wal | None = None

  @property
  def position(self) -> dict[str, Any]:
    """For the record of a checkpoint that holds every outer step committed so far."""
    return {POSITION: self._wal.committed, CHAIN: self._wal.chain.hex()}

  def recover(self, theta: Theta, position: dict[str, Any]) -> list[Ended]:
    """Opens the log and carries out again what came after a checkpoint, or after version 0; what
    these records say.

    Args:
      theta: as the checkpoint has it; moved to where the log ends.
      position: of the checkpoint; empty: there is none.

    Raises:
      NotReproduced, WalDamaged, WalUnsupported: it must not go on; nothing was changed.
      WalFull, WalBroken: the disk.
    """
    after, chain = position.get(POSITION, 0), position.get(CHAIN)
    self._wal = wal.open_log(
      self._files, self._run, after, chain and bytes.fromhex(chain), self._segment_bytes
    )
    for line in self._wal.recovered.words:
      self._say(line)
    steps = (redo(theta, record, self._files.place) for record in self._wal.records(after))
    return [(step.merge, step.done) for step in steps]

  def append(self, step: OuterStep) -> int:
    """Gives an outer step to the operating system; its number. `commit` makes it durable.

    Raises:
      WalFull: there is no space; append the same again later.
      WalBroken: the disk failed.
    """
    return self._wal.append(OUTER_STEP, *encode(step))

  def commit(self) -> None:
    """Returns once what was appended is durable.

    Raises:
      WalBroken: the disk failed; nothing about this outer step may leave the process.
    """
    self._wal.commit()

  def compact(self, kept: Sequence[dict[str, Any]]) -> None:
    """Drops what every checkpoint that is kept holds; called after a save has succeeded.

    Args:
      kept: the records of the checkpoints, with their positions, oldest first.

    Raises:
      WalFull: there is no space to begin a new segment.
      WalBroken: the disk failed.
    """
    self._wal.roll()
    if len(kept) >= CHECKPOINTS:
      self._wal.drop_before(kept[0][POSITION] + 1)
