"""The write-ahead log of the syncer, a file for each record: committed records survive every crash.

A record holds all data that is needed to repeat one outer step, bit for bit. `append` writes it to
the file `record.new`; `commit` makes its bytes durable, renames it to NUMBER.rec, and makes the
name durable. No consequence of a record (an acknowledgement, a publication, a metric) may leave
the process before its commit has returned. So every file with a name was whole and durable:
recovery removes `record.new`, verifies all other files, and refuses a log of which any byte behind
the checkpoint differs. No file is ever changed, so a store of whole objects could hold a log, too.

Records are numbered 1, 2, 3 ... and chained by their hashes. The oldest file is the base of those
behind it: they follow from its hash, its payload is not read. A new log begins with a base of kind
BASE: number 0, or that of the checkpoint behind which it begins. Compaction removes the oldest
files without an fsync, and a crash may bring some of them back. So files before a gap do not count;
a gap behind the checkpoint is refused.

When the disk is full, `record.new` is removed, and the caller may append the same record later. Any
other failure breaks the log: it writes nothing more, and the process has to end and recover.

A file has a header of 136 bytes, then the payload. All numbers are little-endian:

| bytes | what |
|---|---|
| 0-7 | `DJAXREC\\n` |
| 8-11 | format version, 3 |
| 12-15 | kind: 0 is BASE, all others belong to the caller |
| 16-23 | number of the record |
| 24-31 | payload bytes |
| 32-63 | chain hash |
| 64-127 | the run, UTF-8, filled up with zeros |
| 128-131 | zeros |
| 132-135 | CRC-32 of bytes 0-131 |

Chain hash of a record = SHA-256(chain hash before, bytes 12-31, the SHA-256 of each MiB of the
payload). So several cores can compute it, and one hash names a whole history. The first one, of
number 0, is the SHA-256 of the run's name.
"""

import collections
import contextlib
import functools
import hashlib
import re
import shlex
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

from diloco_jax.protocol import formats
from diloco_jax.storage import files_port

VERSION = formats.NUMBERS['log']
BASE = 0
NEW = 'record.new'
PART_BYTES = 1 << 20  # of a payload, hashed together
RUN_BYTES = 64

_MAGIC = b'DJAXREC\n'
_HEADER = struct.Struct('<8sIIQQ32s64s4x')
_CHAIN_AT = 32
_CHAINED = struct.Struct('<IQQ')
_UNCHAINED = 'its bytes have changed, or its hash does not follow from the records before it'
_CRC = struct.Struct('<I')
HEADER_BYTES = _HEADER.size + _CRC.size
_NAME = re.compile(r'(\d{20})\.rec')


class WalError(Exception):
  """What happened, what is safe, what to do."""


class WalFull(WalError):
  """The disk has no space for this record. The log is whole: append the record again later."""


class WalDamaged(WalError):
  """The log differs from the committed one. Nothing was changed.

  Attributes:
    number: of the damaged record, 0 if it is none.
  """

  def __init__(self, text: str, number: int = 0):
    super().__init__(text)
    self.number = number


class WalBroken(WalError):
  """The disk failed. The log writes nothing more: end the process (exit code 74)."""


class WalUnsupported(WalError):
  """A whole log, but of another format version or of another run. Nothing was changed."""


class Record(NamedTuple):
  """A committed record."""

  number: int
  kind: int
  chain: bytes  # hash of the history up to and including this record
  payload: memoryview


def name_of(number: int) -> str:
  return f'{number:020}.rec'


def numbers(files: files_port.Files) -> list[int]:
  """The numbers that have a file, ascending."""
  return [int(match[1]) for match in map(_NAME.fullmatch, files.names()) if match]


def chain_in(file: bytes) -> bytes:
  """The chain hash in the header of a file, which nothing has verified."""
  return file[_CHAIN_AT : _CHAIN_AT + 32]


def run_in(file: bytes) -> str:
  """The run in the header of a file, which nothing has verified."""
  return file[_CHAIN_AT + 32 : _CHAIN_AT + 32 + RUN_BYTES].rstrip(b'\0').decode(errors='replace')


def restore_command(place: str) -> str:
  """The command that repairs the log of a run's folder, WORKDIR/syncer/wal: it moves the log aside
  and begins a new one behind the newest checkpoint."""
  return shlex.join(['diloco', 'restore', f'--workdir={place.rsplit("/", 2)[0]}', '--to=latest'])


# --- Hashes ---------------------------------------------------------------------------------------


def first_chain(run: str) -> bytes:
  """The chain hash before record 1."""
  return hashlib.sha256(run.encode()).digest()


def chain_of(before: bytes, kind: int, number: int, length: int, hashes: bytes) -> bytes:
  """The chain hash of a record, from the hashes of its payload."""
  return hashlib.sha256(before + _CHAINED.pack(kind, number, length) + hashes).digest()


def hashes_of(buffers: Iterable[memoryview]) -> bytes:
  """A payload's hashes; those of a large one are computed on several cores."""
  parts = list(_parts(buffers))
  if len(parts) < 2:
    return b''.join(map(_hash_of, parts))
  return b''.join(_threads().map(_hash_of, parts))


def _hash_of(part: Iterable[memoryview]) -> bytes:
  total = hashlib.sha256()
  for view in part:
    total.update(view)  # releases the interpreter lock
  return total.digest()


def _parts(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
  """The MiBs of the joined buffers, not copied."""
  part, room = [], PART_BYTES
  for view in buffers:
    while view:
      part.append(view[:room])
      view, room = view[room:], room - len(part[-1])
      if not room:
        yield part
        part, room = [], PART_BYTES
  if part:
    yield part


@functools.cache
def _threads() -> futures.ThreadPoolExecutor:
  return futures.ThreadPoolExecutor(4, thread_name_prefix='hashes')


# --- Reading --------------------------------------------------------------------------------------


def _header(files: files_port.Files, run: str, number: int, first: int) -> tuple:
  """Kind, payload size and chain hash of a file. Raises WalDamaged, WalUnsupported, OSError."""
  name = name_of(number)
  header = files.read(name, 0, HEADER_BYTES)
  body, crc = header[: -_CRC.size], header[-_CRC.size :]
  if len(header) < HEADER_BYTES or body[:8] != _MAGIC or _CRC.pack(zlib.crc32(body)) != crc:
    raise _damaged(files, number, first, 'its header is damaged or cut off')
  _, version, kind, number_there, size, chain, run_there = _HEADER.unpack(body)
  if other := formats.refusal('log', version, f'WAL {files.place}/{name}'):
    raise WalUnsupported(f'{other}.')
  run_text = run_there.rstrip(b'\0').decode(errors='backslashreplace')
  if run_text != run:
    printable = run_text.encode('unicode_escape').decode()
    raise WalUnsupported(
      f'WAL {files.place}/{name} belongs to the run "{printable}", not to "{run}". Nothing was '
      'changed. Use another folder.'
    )
  if number_there != number:
    raise _damaged(files, number, first, f'it is record {number_there}')
  file_bytes = files.size(name)
  if file_bytes != HEADER_BYTES + size:
    raise _damaged(files, number, first, f'it has {file_bytes} bytes of {HEADER_BYTES + size}')
  return kind, size, chain


def _records(files: files_port.Files, run: str, base: int, last: int) -> Iterator[Record]:
  """Yields the records behind `base`, verified. Raises WalDamaged, WalUnsupported, OSError."""
  *_, before = _header(files, run, base, base)
  for number in range(base + 1, last + 1):
    kind, size, chain = _header(files, run, number, base)
    payload = memoryview(files.read(name_of(number), HEADER_BYTES, size))
    if chain_of(before, kind, number, size, hashes_of([payload])) != chain:
      raise _damaged(files, number, base, _UNCHAINED)
    yield Record(number, kind, chain, payload)
    before = chain


def _verify(files: files_port.Files, run: str, after: int, chain: bytes | None) -> 'Wal':
  """The log of a directory that has one. Every record behind the checkpoint is whole; damage of
  records that it contains is in the log's `words`. `after`, `chain`: as for open_log."""
  present = set(numbers(files))
  if not present:
    raise _misfit(files, after, 'there is no log')
  first = last = max(present)
  while first - 1 in present:
    first -= 1
  if not first <= after <= last:
    end = f'ends with record {last}' if after > last else f'begins with record {first + 1}'
    raise _misfit(files, after, f'the log {end}')
  *_, end = _header(files, run, after, after)
  if after == 0 and end != first_chain(run):
    raise _damaged(files, 0, 0, _UNCHAINED)
  if chain not in (None, end):
    raise _misfit(files, after, 'the log has another history up to there (another hash)')
  for record in _records(files, run, after, last):
    end = record.chain
  words = ()
  if min(present) < first:
    words = (
      f'WAL {files.place}: record {first - 1} is missing, the files before it do not count; the '
      'checkpoint holds these records.',
    )
  try:
    check(files, run, first, after)
  except WalDamaged as error:
    about = str(error).partition('. Nothing')[0]
    words += (f'{about}. The checkpoint holds this record, so nothing is lost: check the disk.',)
  return Wal(files, run, first, last, end, words)


def check(files: files_port.Files, run: str, after: int, last: int) -> None:
  """Verifies the records behind `after`, up to `last`. Raises WalDamaged, WalUnsupported,
  OSError."""
  collections.deque(_records(files, run, after, last), maxlen=0)


def _damaged(files: files_port.Files, number: int, base: int, why: str) -> WalDamaged:
  some = number > base + 1
  whole = f'records {base + 1} to {number - 1} are whole' if some else 'no record is whole'
  return WalDamaged(
    f'WAL {files.place}/{name_of(number)} is damaged: {why}. Nothing was changed; {whole}. Put the '
    'file back, or go back to the newest checkpoint, with the log moved aside: the run repeats the '
    f'outer steps behind that checkpoint: {restore_command(files.place)}',
    number,
  )


def _misfit(files: files_port.Files, after: int, why: str) -> WalDamaged:
  """The error for a whole log that does not fit the checkpoint."""
  return WalDamaged(
    f'The checkpoint holds all records up to {after}, but {why}, in {files.place}. Not '
    'started, nothing changed. Restore the missing files of the log, or a checkpoint that fits, or '
    f'set the log aside and continue from the newest checkpoint: {restore_command(files.place)}'
  )


# --- The log --------------------------------------------------------------------------------------


def open_log(
  files: files_port.Files, run: str, after: int = 0, chain: bytes | None = None
) -> 'Wal':
  """Recovers the log of a directory, or begins one if there is none. Read `records(after)` next.

  Every record of the returned log is durable and whole. The caller holds the directory's lock.

  Args:
    files: the directory of the log; its other files are not touched.
    run: the run of the log, 1 to 64 bytes.
    after: the last record in the caller's checkpoint; 0: no checkpoint. The log must hold this
      record, or be based on it.
    chain: the hash of the history up to `after`, if the checkpoint has it.

  Raises:
    WalDamaged: the log differs from the committed one; nothing was changed.
    WalUnsupported: another format version or run; nothing was changed.
    WalFull, WalBroken: the disk is full, or failed.
  """
  try:
    if not after and not numbers(files):
      return begin(files, run)
    log = _verify(files, run, after, chain)
    if NEW in files.names():
      files.remove(NEW)
      log.words += (
        f'WAL {files.place}: an unfinished record was removed, it was never acknowledged. The log '
        f'ends with record {log.committed}, hash {log.chain.hex()[:16]}.',
      )
    files.fsync_names()  # the previous process may have ended between a rename and this call
  except OSError as error:
    raise WalBroken(
      f'Recovery of the log in {files.place} failed: {error}. Not started, no committed record was '
      'dropped. Check the disk, then start again.'
    ) from error
  return log


def begin(files: files_port.Files, run: str, after: int = 0, chain: bytes | None = None) -> 'Wal':
  """Begins a log behind a checkpoint, in a directory without a log.

  Call it on purpose only: it abandons committed records that another log has behind the checkpoint.
  """
  if numbers(files):
    raise ValueError(f'there is a log in {files.place} already; use open_log')
  log = Wal(files, run, after, after, chain or first_chain(run))
  log._write(after, BASE, log.chain, [])
  log.commit()
  return log


class Wal:
  """An open log (open_log, begin). One thread at a time, one record between two commits.

  Attributes:
    first: number of the oldest file, the base of the records behind it.
    committed: number of the newest durable record; after a failure all records up to it are safe.
    chain: hash of the history up to that record, for a checkpoint.
    words: console lines about what recovery found; empty if all was as it should be.
  """

  def __init__(
    self,
    files: files_port.Files,
    run: str,
    first: int,
    committed: int,
    chain: bytes,
    words: tuple[str, ...] = (),
  ):
    self._files, self._run = files, run
    self.first, self.committed, self.chain, self.words = first, committed, chain, words
    self._appended: tuple[int, bytes, int] | None = None  # its number, hash and bytes
    self._broken = ''  # why the log writes nothing more

  def append(self, kind: int, *buffers: Any) -> int:
    """Gives a record to the operating system; `commit` makes it durable.

    Args:
      kind: at least 1; the caller defines its meaning.
      *buffers: the payload as a sequence of contiguous buffers (bytes, arrays), not copied. They
        must not change before this call returns.

    Returns:
      The number of the record.

    Raises:
      WalFull: there is no space; append the same record later.
      WalBroken: the disk failed; the log writes nothing more.
    """
    if not BASE < kind < 1 << 32:
      raise ValueError(f'kind {kind} of a record is not from 1 to 2**32 - 1')
    self._require_whole()
    if self._appended:
      raise ValueError(f'record {self._appended[0]} is not committed')
    views = [view.cast('B') for view in map(memoryview, buffers) if view.nbytes]
    number, size = self.committed + 1, sum(len(view) for view in views)
    chain = chain_of(self.chain, kind, number, size, hashes_of(views))
    self._write(number, kind, chain, views)
    return number

  def commit(self) -> int:
    """Makes the appended record durable; after it its consequences may leave the process.

    Returns:
      The number of the newest durable record.

    Raises:
      WalFull: there is no space; append the same record later.
      WalBroken: the disk failed; no consequence of the record may leave the process.
    """
    self._require_whole()
    if self._appended:
      number, chain, size = self._appended
      self._do('fsync of a record', self._files.fsync, NEW, needed=size)
      self._do('naming a record', self._files.rename, NEW, name_of(number), needed=size)
      self._do('fsync of the directory', self._files.fsync_names)
      self.committed, self.chain, self._appended = number, chain, None
    return self.committed

  def records(self, after: int = 0) -> Iterator[Record]:
    """Yields the committed records behind number `after`, one at a time in memory.

    Raises:
      WalDamaged: a file has changed since the log was opened.
      WalBroken: the disk is not readable.
    """
    base = min(max(after, self.first), self.committed)
    try:
      yield from _records(self._files, self._run, base, self.committed)
    except OSError as error:
      raise self._fail('Reading back', error) from error

  def drop_before(self, number: int) -> None:
    """Removes the files before record `number`, which becomes the base; never the newest.

    The caller must have a *verified* checkpoint that holds every record up to `number`.
    """
    number = min(number, self.committed)
    for older in self._do('listing the records', numbers, self._files):  # the oldest first
      if older < number:
        self._do('removing a record', self._files.remove, name_of(older))
    self.first = max(self.first, number)

  def _write(self, number: int, kind: int, chain: bytes, views: list[memoryview]) -> None:
    run = self._run.encode()
    if not 1 <= len(run) <= RUN_BYTES:
      raise ValueError(f'the run {self._run!r} needs 1 to {RUN_BYTES} bytes, has {len(run)}')
    size = sum(len(view) for view in views)
    header = _HEADER.pack(_MAGIC, VERSION, kind, number, size, chain, run)
    header += _CRC.pack(zlib.crc32(header))
    self._do('writing a record', self._files.write, NEW, header, *views, needed=len(header) + size)
    self._appended = number, chain, len(header) + size

  def _require_whole(self) -> None:
    if self._broken:
      raise WalBroken(self._broken)

  def _do(self, doing: str, call: Callable[..., Any], *args: Any, needed: int = 0) -> Any:
    """Calls the port; if `needed` (bytes) is set, a full disk does not break the log."""
    self._require_whole()
    self._broken = f'Interrupted: {doing}.'  # unless it returns
    try:
      result = call(*args)
    except OSError as error:
      if not needed or error.errno not in files_port.FULL:
        raise self._fail(doing, error) from error
      self._discard()
      raise WalFull(
        f'No space on {self._files.place} ({needed} bytes needed). The syncer commits no outer '
        f'step until there is space; the last committed record {self.committed} is safe.'
      ) from error
    self._broken = ''
    return result

  def _discard(self) -> None:
    """Removes the unfinished record: it takes no space, and the next one may be another."""
    self._appended = None
    with contextlib.suppress(OSError):  # it was not created, or the next record replaces it
      self._files.remove(NEW)
    self._broken = ''

  def _fail(self, doing: str, error: OSError) -> WalBroken:
    """Breaks the log: it writes nothing more."""
    self._broken = (
      f'{doing} failed in {self._files.place}: {error}. The syncer stops before it acknowledges an '
      f'outer step that is not durable. Safe up to record {self.committed}, hash '
      f'{self.chain.hex()[:16]}. Check the disk, then start again.'
    )
    return WalBroken(self._broken)
