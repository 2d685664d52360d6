"""The log of outer steps: the syncer's commits, from which a restart computes Theta again.

A record of the write-ahead log (wal.py) is one outer step:

* the Merge that the machine asked for, with the machine state (protocol/syncer/recovery.py);
* the MergeDone that answers it;
* the encoded outer gradient that the outer optimizer got, empty if the outer step was refused;
* of the payloads the CRC-32, with the participants. So a record is as large as one payload,
  whatever the number of learners.

Nothing about an outer step leaves the process before its record is durable, so every outer step
that any learner has seen can be computed again: start from the checkpoint and apply the gradient of
each later record with the same function; each digest must equal the recorded one.

A refused outer step is recorded, too, since it settled tokens.

The log reaches back to the older of the two newest checkpoints (until there are two,
to its beginning): if one of them does not read back, the other one suffices.

It needs two ports, Files and Theta, so the simulator (verification/sim) runs it on its own disks
and arrays.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from diloco_jax.protocol import actions, events, safe_json
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import files_port, wal

OUTER_STEP = 1  # the kind of its records
AGREEMENT = 'agreement.json'  # the settings of the run, beside the log, which has only a hash of it
CHECKPOINTS = 2  # the number that a syncer keeps
POSITION, CHAIN = 'log', 'chain'  # fields of a checkpoint's record: where it is in the log
MAX_COUNT = 1 << 53
_SIZE = struct.Struct('<I')  # of the JSON header of a record


class NotReproduced(wal.WalError):
  """A record of the log cannot be repeated: unreadable, misplaced, or with another result than
  before. The log is unchanged."""


class Merged(Protocol):
  """The result of an outer step."""

  failed: str
  """Why it was refused, for people; then nothing has changed."""

  digest: int
  """The digest of the fragment's published value after it."""

  gradient: memoryview
  """The encoded outer gradient; empty if it was refused."""


class Theta(Protocol):
  """The part of the global model that the log uses."""

  versions: list[int]

  def redo(
    self,
    p: int,
    participants: Sequence[actions.Participant],
    refused: Sequence[str],
    gradient: memoryview | bytes,
  ) -> Merged:
    """Repeats an outer step of fragment p from its encoded outer gradient: makes its next version.
    An empty gradient is that of an outer step that was refused. `participants`, in the order of
    learner ids, without the `refused`, decide how many periods the outer step covers. Raises
    ValueError."""


Ended = tuple[actions.Merge, events.MergeDone]


class OuterStep(NamedTuple):
  """One record."""

  merge: actions.Merge
  done: events.MergeDone
  gradient: memoryview | bytes


def run_of(agreement: str) -> str:
  """The name of a run in its log."""
  return hashlib.sha256(agreement_lib.of_run(agreement).encode()).hexdigest()[:32]


def pack(header: dict[str, Any], *arrays: Any) -> list[Any]:
  """Buffers for Wal.append: u32 JSON size, JSON padded with spaces to 8 bytes, the arrays' bytes.

  Equal headers (same keys in the same order) have equal bytes; NaN raises ValueError.
  """
  text = codec.encode(header).encode()
  text += b' ' * (-(_SIZE.size + len(text)) % 8)  # aligns the arrays for reading
  return [_SIZE.pack(len(text)) + text, *arrays]


def unpack(payload: memoryview | bytes) -> tuple[dict[str, Any], memoryview]:
  """Returns the header and the arrays' bytes, not copied. Raises ValueError."""
  view = memoryview(payload)
  if len(view) < _SIZE.size:
    raise ValueError('it has no header')
  (count,) = _SIZE.unpack_from(view)
  return safe_json.parse_object(bytes(view[4 : 4 + count])), view[4 + count :]


def encode(step: OuterStep) -> list[Any]:
  """Makes the buffers for Wal.append; does not copy the gradient."""
  sizes = [memoryview(step.gradient).nbytes]
  return pack({'merge': step.merge, 'done': step.done, 'sizes': sizes}, step.gradient)


def decode(payload: memoryview) -> OuterStep:
  """The inverse of `encode`; the gradient is a view. Raises ValueError, KeyError, TypeError or
  TapeError."""
  header, data = unpack(payload)
  merge = codec.decode(actions.Merge, header['merge'])
  done = codec.decode(events.MergeDone, header['done'])
  if not merge.participants:
    raise ValueError('it has no participants')
  if not set(done.refused) <= {participant.learner for participant in merge.participants}:
    raise ValueError(f'{codec.short(done.refused)} were refused and are no participants')
  for participant in merge.participants:
    if not 0 <= participant.tokens <= MAX_COUNT or not 0 <= participant.steps <= MAX_COUNT:
      raise ValueError(
        f'{participant.learner} has {participant.tokens} tokens of {participant.steps} steps'
      )
  if header['sizes'] != [len(data)]:
    raise ValueError(f'{len(data)} bytes are no gradient of {codec.short(header["sizes"])} bytes')
  return OuterStep(merge, done, data)


# --- Repeating an outer step ----------------------------------------------------------------------


def redo(theta: Theta, record: wal.Record, place: str) -> OuterStep:
  """Repeats the outer step of a record, on the Theta directly before it.

  Raises:
    NotReproduced: the record does not follow, or its result is not the committed one.
  """
  if record.kind != OUTER_STEP:
    raise _refused(record, place, f'has kind {record.kind}, which this release does not know')
  try:
    step = decode(record.payload)
  except (ValueError, KeyError, TypeError, codec.TapeError) as error:
    raise _refused(record, place, f'cannot be read by this release ({error})') from error
  merge, done = step.merge, step.done
  if not 0 <= merge.fragment < len(theta.versions):
    raise _refused(record, place, f'is of fragment {merge.fragment}, there is none')
  before = theta.versions[merge.fragment]
  if merge.version != before + 1:
    raise _refused(
      record,
      place,
      f'makes version {merge.version} of fragment {merge.fragment}, but the '
      f'checkpoint and the records before it end with version {before}: put back the checkpoint '
      'that belongs to this log',
    )
  try:
    merged = theta.redo(merge.fragment, merge.participants, done.refused, step.gradient)
  except (ValueError, TypeError, ArithmeticError, MemoryError) as error:
    raise _refused(record, place, f'cannot be repeated ({error})') from error
  if (merged.digest, bool(merged.failed)) != (done.digest, bool(done.failed)):
    raise _refused(
      record,
      place,
      f'gives another result than before: sync {merge.sync}, fragment '
      f'{merge.fragment}, version {merge.version} has digest {merged.digest:016x}, was '
      f'committed with {done.digest:016x}. Start the syncer with the jax, the flags and the kind '
      'of machine that committed it; if none of these has changed, test the memory of this host',
    )
  return step


def _refused(record: wal.Record, place: str, what: str) -> NotReproduced:
  return NotReproduced(
    f'Record {record.number} of the log in {place} {what}. Nothing was changed, no record is lost.'
  )


# --- The log --------------------------------------------------------------------------------------


def begin(files: files_port.Files, agreement: str, position: dict[str, Any]) -> None:
  """Begins a log in a folder without one, behind the position of a checkpoint that a restore went
  back to (process/restore.py). Raises ValueError, WalFull, WalBroken."""
  wal.begin(files, run_of(agreement), position[POSITION], bytes.fromhex(position[CHAIN]))


def recover(
  files: files_port.Files, agreement: str, theta: Theta, position: dict[str, Any]
) -> tuple[wal.Wal, list[Ended]]:
  """Opens the log of a directory whose lock the caller holds, and repeats the outer steps behind a
  checkpoint, or behind version 0; returns both, the steps without their machine states but the
  last.

  Args:
    files: the directory.
    agreement: of the run (protocol/agreement.py): the log of another run is refused.
    theta: as in the checkpoint; moved to the end of the log.
    position: of the checkpoint; empty: there is none.

  Raises:
    NotReproduced, WalDamaged, WalUnsupported: the syncer must not start; nothing was changed.
    WalFull, WalBroken: the disk is full or failed.
  """
  after, chain = position.get(POSITION, 0), position.get(CHAIN)
  try:
    chain = chain and bytes.fromhex(chain)
  except (TypeError, ValueError):
    chain = b'?'
  if type(after) is not int or after < 0 or chain == b'?':
    raise NotReproduced(
      f'The checkpoint names no position in the log of {files.place}. Nothing was changed'
    )
  log = wal.open_log(files, run_of(agreement), after, chain)
  ended: list[Ended] = []
  for record in log.records(after):
    step = redo(theta, record, files.place)
    if ended:  # only the last machine state is needed, and there may be 100,000
      merge, done = ended[-1]
      ended[-1] = dataclasses.replace(merge, machine_state={}), done
    ended.append((step.merge, step.done))
  return log, ended


def position(log: wal.Wal) -> dict[str, Any]:
  """The position for a checkpoint that holds every outer step committed so far."""
  return {POSITION: log.committed, CHAIN: log.chain.hex()}


def compact(log: wal.Wal, kept: Sequence[dict[str, Any]]) -> None:
  """Drops the records that every kept checkpoint holds; call it after a save has succeeded.

  Args:
    log: the open log.
    kept: the records of the kept checkpoints, with their positions, oldest first.

  Raises:
    WalBroken: the disk failed.
  """
  if len(kept) >= CHECKPOINTS:
    log.drop_before(kept[0][POSITION])
