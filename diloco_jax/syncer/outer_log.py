"""The log of outer steps: what the syncer commits, and how Theta is made again from it.

A record of the write-ahead log (storage/wal.py, in WORKDIR/syncer/wal) is one outer step: who took
part, who of them was refused and at what norms, how it ended, the machine's books
(protocol/syncer/recovery.py), and the participants' payloads as they came. `commit` returns once it is
durable, and only then does anything about it leave the process. So whatever anybody has seen of an
outer step can be made again::

    Theta and books = checkpoint + the records behind it, each merged again by the function that
                      merged it first; the digest of the result must be the one that was committed

A refused outer step is recorded, too: it has settled tokens. A full disk commits nothing: the outer
step waits, and with it those that follow; learners train on. A failing disk ends the process.

The log reaches back to the older of the newest two checkpoints, and to its beginning until there
are two: whichever of them does not read back, the other one will do.
"""

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from diloco_jax.node import failpoints
from diloco_jax.protocol.syncer import recovery
from diloco_jax.storage import checkpoint, wal, wal_format
from diloco_jax.storage import files as files_lib
from diloco_jax.syncer import global_model as global_model_lib

OUTER_STEP = 1  # the kind of its records
RETRY_S = 0.5
SAY_AGAIN_S = 60.0
POSITION, CHAIN = 'log', 'chain'  # what a checkpoint's own record holds of the log


class NotReproduced(wal_format.WalError):
  """An outer step of the log does not come out as it did. The log is whole; nothing was changed."""


class Closed(Exception):
  """The log was closed while an outer step waited for space."""


class OuterStep(NamedTuple):
  """One record: `width` rows were stacked, `payloads` are in the order of the participants."""

  outcome: recovery.Outcome
  width: int
  payloads: Sequence[memoryview | bytes]


class Recovered(NamedTuple):
  """Where a syncer was: the machine's snapshot, and how many records made it from the one given."""

  snapshot: dict[str, Any]
  replayed: int


def run_of(agreement: str) -> str:
  """Whose log it is: the name of a run in its log."""
  return hashlib.sha256(agreement.encode()).hexdigest()[:32]


def encode(step: OuterStep) -> list[Any]:
  """Buffers for Wal.append; payloads are not copied."""
  outcome = step.outcome
  return wal_format.pack(
    {
      'sync': outcome.sync,
      'fragment': outcome.fragment,
      'version': outcome.version,
      'participants': outcome.participants,
      'digest': outcome.digest,
      'failed': outcome.failed,
      'books': outcome.books,
      'norms': outcome.norms,
      'refused': outcome.refused,
      'width': step.width,
      'payload_bytes': [memoryview(payload).nbytes for payload in step.payloads],
    },
    *step.payloads,
  )


def decode(payload: memoryview) -> OuterStep:
  """The inverse of `encode`; payloads are views. Raises ValueError, KeyError or TypeError."""
  header, data = wal_format.unpack(payload)
  width, sizes = header.pop('width'), header.pop('payload_bytes')
  participants = tuple(tuple(one) for one in header.pop('participants'))
  screened = {name: tuple(header.pop(name, ())) for name in ('norms', 'refused')}
  if len(sizes) != len(participants) or sum(sizes) != len(data):
    raise ValueError(
      f'{len(data)} bytes are left for payloads of {sizes} bytes from {len(participants)} learners'
    )
  ends = list(itertools.accumulate(sizes))
  payloads = [data[end - size : end] for size, end in zip(sizes, ends)]
  outcome = recovery.Outcome(participants=participants, **screened, **header)
  return OuterStep(outcome, width, payloads)


def shares(step: OuterStep) -> list[global_model_lib.Share | None]:
  """In the order of the participants; None is one that was refused."""
  return [
    None if learner in step.outcome.refused else global_model_lib.Share(payload, tokens, steps)
    for (learner, _, tokens, steps), payload in zip(step.outcome.participants, step.payloads)
  ]


# --- Carrying out an outer step again -------------------------------------------------------------


def redo(theta: global_model_lib.Theta, record: wal.Record, place: str) -> recovery.Outcome:
  """Carries out the outer step of a record again, on a Theta that stands right before it.

  Raises:
    NotReproduced: it does not belong there, or does not come out as it was committed.
  """
  step = _decoded(record, place)
  _check_next(theta, record, step.outcome, place)
  merged = theta.merge(step.outcome.fragment, shares(step), step.width)
  _check_same(record, step.outcome, merged, place)
  return step.outcome


def _decoded(record: wal.Record, place: str) -> OuterStep:
  if record.kind != OUTER_STEP:
    raise _refused(record, place, f'is of kind {record.kind}, which this release does not know')
  try:
    return decode(record.payload)
  except (ValueError, KeyError, TypeError) as error:
    raise _refused(record, place, f'cannot be read by this release ({error})') from error


def _check_next(
  theta: global_model_lib.Theta, record: wal.Record, outcome: recovery.Outcome, place: str
) -> None:
  before = theta.versions[outcome.fragment]
  if outcome.version != before + 1:
    raise _refused(
      record,
      place,
      f'makes version {outcome.version} of fragment {outcome.fragment}, the '
      f'checkpoint and the records before it end with version {before}: put the checkpoint back '
      'that belongs to this log',
    )


def _check_same(
  record: wal.Record, outcome: recovery.Outcome, merged: global_model_lib.Merged, place: str
) -> None:
  if (merged.digest, bool(merged.failed)) != (outcome.digest, bool(outcome.failed)):
    raise _refused(
      record,
      place,
      f'does not come out as it did: sync {outcome.sync}, fragment '
      f'{outcome.fragment}, version {outcome.version} has digest {merged.digest:016x}, was '
      f'committed with {outcome.digest:016x}. Start it with the jax, the flags and the kind of '
      'machine that committed it; if nothing of that has changed, test the memory of this host',
    )


def _refused(record: wal.Record, place: str, what: str) -> NotReproduced:
  return NotReproduced(
    f'Record {record.number} of the log in {place} {what}. Not started, no record is lost.'
  )


# --- The log --------------------------------------------------------------------------------------


def begin(files: files_lib.Files, agreement: str, position: dict[str, Any]) -> None:
  """A log in a folder without one, behind the position of a checkpoint that a run was brought back
  to (restore.py). Raises ValueError, WalFull, WalBroken."""
  wal.begin(files, run_of(agreement), position[POSITION], bytes.fromhex(position[CHAIN]))


class OuterLog:
  """The log of one run. `recover` first; one thread at a time, but `close` from any."""

  def __init__(
    self,
    files: files_lib.Files,
    agreement: str,
    say: Callable[[str], None],
    retry_s: float = RETRY_S,
  ):
    """Takes the folder for this process.

    Args:
      files: the folder; closed by `close`.
      agreement: the run's (protocol/agreement.py): another run's log is refused.
      say: where lines for people go.
      retry_s: pause before a full disk is tried again.

    Raises:
      DirectoryError: it cannot be written, or another syncer has it.
    """
    self._files = files
    self._run = run_of(agreement)
    self._say = say
    self._retry_s = retry_s
    self._wal: wal.Wal | None = None
    self._closed = threading.Event()
    files.lock()
    files.probe()

  @property
  def position(self) -> dict[str, Any]:
    """For the record of a checkpoint that holds every outer step committed so far."""
    return {POSITION: self._wal.committed, CHAIN: self._wal.chain.hex()}

  # --- Recovery -----------------------------------------------------------------------------------

  def recover(self, theta: global_model_lib.Theta, snapshot: dict[str, Any]) -> Recovered:
    """Opens the log and carries out again what came after a checkpoint, or after version 0.

    Args:
      theta: as the checkpoint has it; moved to where the log ends.
      snapshot: the machine's, with `position` if it is a checkpoint's. One without (of a release
        that had no log) stands before record 1.

    Raises:
      NotReproduced, WalDamaged, WalUnsupported: it must not go on; nothing was changed.
      WalFull, WalBroken: the disk.
    """
    machine = {name: value for name, value in snapshot.items() if name not in (POSITION, CHAIN)}
    after, chain = snapshot.get(POSITION, 0), snapshot.get(CHAIN)
    self._wal = wal.open_log(self._files, self._run, after, bytes.fromhex(chain) if chain else None)
    for line in self._wal.recovered.words:
      self._say(line)
    replayed = self._wal.last - after
    outcomes = (redo(theta, record, self._files.place) for record in self._wal.records(after))
    return Recovered(recovery.recovered(machine, outcomes), replayed)

  # --- Commit -------------------------------------------------------------------------------------

  def commit(self, step: OuterStep) -> None:
    """Returns once the outer step is durable; waits while there is no space for it.

    Raises:
      WalBroken: the disk failed; nothing about this outer step may leave the process.
    """
    buffers = encode(step)
    failpoints.reached('wal.before_append')
    self._append(buffers)
    failpoints.reached('wal.after_append')
    self._wal.commit()
    failpoints.reached('wal.after_commit')

  def _append(self, buffers: list[Any]) -> None:
    said_s = None
    while True:
      try:
        self._wal.append(OUTER_STEP, *buffers)
        break
      except wal_format.WalFull as full:
        if said_s is None or time.monotonic() - said_s >= SAY_AGAIN_S:
          self._say(str(full))
          said_s = time.monotonic()
      if self._closed.wait(self._retry_s):
        raise Closed
    if said_s is not None:
      self._say(f'There is space on {self._files.place} again: outer updates are committed.')

  # --- Compaction ---------------------------------------------------------------------------------

  def compact(self, checkpoints: checkpoint.Checkpoints) -> None:
    """Drops what both of the newest two checkpoints hold; called after a save has succeeded.

    Raises:
      WalBroken: the disk failed.
    """
    try:
      self._wal.roll()
      newest = checkpoints.numbers[-checkpoint.KEPT :]
      if len(newest) == checkpoint.KEPT:
        self._wal.drop_before(checkpoints.protocol(newest[0]).get(POSITION, 0) + 1)
    except checkpoint.CheckpointError as error:
      self._say(f'the log is kept as it is: {error}')
    except wal_format.WalFull:
      pass  # the next outer step says it; the next save tries again

  def close(self) -> None:
    """Gives the folder back. An outer step that waits for space waits no longer."""
    self._closed.set()
    self._files.close()
