"""The write-ahead log of the syncer: committed records survive every crash.

A record holds all data that is needed to repeat one outer step, bit for bit. `append` gives it to
the operating system; `commit` makes all records appended since the last commit durable with one
fsync. No consequence of a record (an acknowledgement, a publication, a metric) may leave the
process before the commit that covers it has returned.

The log is a sequence of segments, files named by the number of their first record (bytes:
wal_format.py). Records are numbered 1, 2, 3 ... and chained by their hashes. Recovery verifies the
whole log: it cuts a tail torn by a crash and reports this; it refuses any other damage
(wal_recovery.py, which also defines the difference).

Failures. When the disk is full, the log cuts off the partly written record, and the caller may
append the same record later. Any other failure breaks the log: after a failed fsync it is unknown
which records are durable, and a second fsync would not tell. So the log writes nothing more, and
the process has to end and recover. Recovery may then read pages that never reached the disk; it
therefore writes whole records without a proven commit once more, to a new file, before use.

The order of I/O calls keeps these statements true at every moment of a crash:
  a segment gets its name only after its header and all earlier records are durable;
  the log removes the oldest segment first, durably, before the next;
  only a whole, durable file replaces another.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from diloco_jax.storage import files_port as files_port_lib
from diloco_jax.storage import wal_format as fmt
from diloco_jax.storage import wal_recovery

SEGMENT_BYTES = 256 << 20


class Record(NamedTuple):
  """An appended record."""

  number: int
  kind: int
  chain: bytes  # hash of the history up to and including this record
  payload: memoryview


@dataclasses.dataclass(frozen=True)
class Recovered:
  """The findings and changes of a recovery."""

  cut_bytes: int  # of the torn tail
  words: tuple[str, ...]  # console lines; empty if recovery changed nothing


def open_log(
  files: files_port_lib.Files,
  run: str,
  after: int = 0,
  chain: bytes | None = None,
  segment_bytes: int = SEGMENT_BYTES,
  key: bytes = b'',
) -> 'Wal':
  """Recovers the log of a directory, or begins one if there is none. Read `records(after)` next.

  Every record of the returned log is durable and whole. The caller holds the directory's lock.

  Args:
    files: the directory of the log; its other files are not touched.
    run: the run of the log, 1 to 64 bytes.
    after: the last record in the caller's checkpoint; 0: no checkpoint. The log must hold this
      record or begin with the next one.
    chain: the hash of the history up to `after`, if the checkpoint has it.
    segment_bytes: the log closes a segment once it is larger.
    key: of its chain (seals.py); empty: none.

  Raises:
    WalDamaged: the log differs from the committed one; nothing was changed.
    WalUnsupported: another format version or run; nothing was changed.
    WalFull, WalBroken: the disk is full, or failed.
  """
  try:
    found = wal_recovery.scan(files, run, key)
    if found.damage:
      raise found.damaged(files, found.damage)
    if not found.segments and not after:
      return begin(files, run, segment_bytes=segment_bytes, key=key)
    if not after:
      chain = fmt.first_chain(run, key)
    _check_snapshot(files, found, after, chain)
    words = _recover(files, found)
  except OSError as error:
    raise _recovery_failed(files, error) from error
  recovered = Recovered(found.torn_bytes, tuple(words))
  log = Wal(files, run, found.segments, found.last, found.chain, segment_bytes, recovered, key)
  if found.proven < found.last:
    log._mark()
  return log


def read_log(files: files_port_lib.Files, run: str, key: bytes = b'') -> 'Wal':
  """Opens a log for reading only: the records that recovery would keep. Changes nothing.

  Raises:
    WalDamaged, WalUnsupported: as open_log.
    OSError: the log is not readable.
  """
  found = wal_recovery.scan(files, run, key)
  if found.damage:
    raise found.damaged(files, found.damage)
  recovered = Recovered(found.torn_bytes, ())
  log = Wal(files, run, found.segments, found.last, found.chain, SEGMENT_BYTES, recovered, key)
  log._broken = 'The log is open for reading only.'
  return log


def begin(
  files: files_port_lib.Files,
  run: str,
  after: int = 0,
  chain: bytes | None = None,
  segment_bytes: int = SEGMENT_BYTES,
  key: bytes = b'',
) -> 'Wal':
  """Begins a log after a checkpoint, in a directory without a log.

  Call it on purpose only: it abandons committed records that another log has after the checkpoint.
  """
  if wal_recovery.segment_names(files):
    raise ValueError(f'there is a log in {files.place} already; use open_log')
  chain = chain or fmt.first_chain(run, key)
  log = Wal(files, run, [], after, chain, segment_bytes, Recovered(0, ()), key)
  log._begin_segment()
  return log


def _check_snapshot(
  files: files_port_lib.Files, found: wal_recovery.Found, after: int, chain: bytes | None
) -> None:
  """Refuses a log and a checkpoint of different histories, or with a gap between them."""
  if not found.segments:
    raise _misfit(files, found, 'there is no log', after)
  if after > found.last:
    raise _misfit(files, found, f'the log ends with record {found.last}', after)
  if after < found.first - 1:
    raise _misfit(files, found, f'the log begins with record {found.first}', after)
  if chain is not None and chain_at(files, found.segments, after) != chain:
    raise _misfit(files, found, 'the log has another history up to there (another hash)', after)


def _misfit(
  files: files_port_lib.Files, found: wal_recovery.Found, why: str, after: int
) -> fmt.WalDamaged:
  """The error for a whole log that does not fit the checkpoint."""
  return fmt.WalDamaged(
    f'The checkpoint holds all records up to {after}, but {why}, in {files.place}. Not started, '
    'nothing changed. Restore the missing files of the log, or a checkpoint that fits, or set the '
    f'log aside and continue from the newest checkpoint: {wal_recovery.RESTORE}'
  )


def _recover(files: files_port_lib.Files, found: wal_recovery.Found) -> list[str]:
  """Makes all found records durable and cuts the torn tail; returns the console lines."""
  for name in files.names():
    if name.endswith(fmt.NEW) and fmt.first_of(name[: -len(fmt.NEW)]) is not None:
      files.remove(name)  # an unused segment
  files.fsync_names()  # the previous process may have ended between a rename and this call
  last = found.segments[-1]
  if found.proven < found.last:  # perhaps never on the disk, only in memory: see above
    wal_recovery.copy(files, last.name, 0, last.size, last.name)
  elif found.torn_bytes:
    files.truncate(last.name, last.size)  # durable with the next fsync; until then repeatable
  words = [
    f'WAL {files.place}/{name}: the mark at byte {offset} is damaged; every record is whole.'
    for name, offset in found.passed
  ]
  if found.torn_bytes:
    words.append(
      f'WAL {files.place}/{last.name} ended in an unfinished record ({found.torn_bytes} '
      f'bytes dropped, it was never acknowledged). The log ends with record {found.last}, hash '
      f'{fmt.short(found.chain)}.'
    )
  return words


def chain_at(
  files: files_port_lib.Files, segments: list[wal_recovery.Segment], number: int
) -> bytes | None:
  """The hash after a record, or before the first one; None if the log does not hold it."""
  for segment in segments:
    if segment.first == number + 1:
      header = files.read(segment.name, 0, fmt.SEGMENT_HEADER_BYTES)
      return fmt.parse_segment(segment.name, header).chain
  for segment in reversed(segments):
    if segment.first <= number:
      found = (e.chain for _, e in wal_recovery.entries(files, segment) if e.number == number)
      return next(found, None)
  return None


def _recovery_failed(files: files_port_lib.Files, error: OSError) -> fmt.WalError:
  """The error for a disk that failed before the log was open."""
  if error.errno in files_port_lib.FULL:
    return fmt.WalFull(
      f'No space on {files.place} to recover the log. Not started, no record is lost. Make space '
      'and start again.'
    )
  return fmt.WalBroken(
    f'Recovery of the log in {files.place} failed: {error}. Not started, no committed record was '
    'dropped. Check the disk, then start again.'
  )


class Wal:
  """An open log (open_log, begin). One thread at a time.

  Attributes:
    last: number of the newest appended record.
    committed: number of the newest durable record; after a failure all records up to it are safe.
    recovered: the findings of open_log.
  """

  def __init__(
    self,
    files: files_port_lib.Files,
    run: str,
    segments: list[wal_recovery.Segment],
    last: int,
    chain: bytes,
    segment_bytes: int,
    recovered: Recovered,
    key: bytes = b'',
  ):
    self._files = files
    self._run = run
    self._segments = segments
    self._segment_bytes = segment_bytes
    self._key = key
    self._chain = self._committed_chain = chain
    self._broken = ''  # why the log writes nothing more
    self.last = self.committed = last
    self.recovered = recovered

  @property
  def first(self) -> int:
    """Number of the oldest record in the log."""
    return self._segments[0].first

  @property
  def chain(self) -> bytes:
    """Hash of the history up to the newest durable record, for a checkpoint."""
    return self._committed_chain

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
    if not 1 <= kind < 1 << 32:
      raise ValueError(f'kind {kind} of a record is not from 1 to 2**32 - 1')
    self._require_whole()
    views = [view.cast('B') for view in map(memoryview, buffers) if view.nbytes]
    if self._segments[-1].size >= self._segment_bytes and self.committed == self.last:
      self.roll()
    number, length = self.last + 1, sum(len(view) for view in views)
    hashes = fmt.hashes_of(views)
    chain = fmt.chain_of(self._chain, kind, number, length, hashes, self._key)
    entry = fmt.Entry(kind, number, self.committed, length, chain, fmt.crc_of(hashes))
    self._write(entry, views)
    self.last, self._chain = number, chain
    return number

  def commit(self) -> int:
    """Makes all appended records durable; after it their consequences may leave the process.

    Returns:
      The number of the last record.

    Raises:
      WalBroken: the fsync failed; no consequence of records since the last commit may leave the
        process.
    """
    self._require_whole()
    if self.committed < self.last:
      self._do('fsync of', self._files.fsync, self._segments[-1].name)
      self.committed, self._committed_chain = self.last, self._chain
      self._mark()
    return self.committed

  def records(self, after: int = 0) -> Iterator[Record]:
    """Yields the present records after number `after`, one at a time in memory.

    Raises:
      WalDamaged: a payload has changed since the log was opened.
      WalBroken: the disk is not readable.
    """
    due, last = max(after + 1, self.first), self.last
    try:
      for segment in self._from(due):
        for offset, entry in wal_recovery.entries(self._files, segment):
          if due <= entry.number <= last:
            if entry.number > due:
              raise self._changed(segment, due)
            yield self._record(segment, offset, entry)
            due += 1
    except OSError as error:
      raise self._fail('Reading back', error) from error
    if due <= last:
      raise self._changed(self._segments[-1], due)

  def roll(self) -> None:
    """Begins a new segment, so that the previous one can be dropped. Commit all records first."""
    if self.committed < self.last:
      raise ValueError(f'records {self.committed + 1} to {self.last} are not committed')
    self._require_whole()
    if self._segments[-1].first <= self.last:
      self._begin_segment()

  def drop_before(self, number: int) -> list[str]:
    """Removes the segments whose records are all < `number`; never the newest.

    The caller must have a *verified* checkpoint that holds every record before `number`.

    Returns:
      The removed files.
    """
    self._require_whole()
    dropped = []
    while len(self._segments) > 1 and self._segments[1].first <= number:
      name = self._segments[0].name
      self._do('removing', self._files.remove, name)
      self._do('fsync of the directory after removing', self._fsync_names, name)
      dropped.append(self._segments.pop(0).name)
    return dropped

  def _write(self, entry: fmt.Entry, views: list[memoryview]) -> None:
    """Writes a whole entry at the end, or, if the disk allows it, nothing."""
    segment = self._segments[-1]
    broken, self._broken = self._broken, 'A write was interrupted.'  # unless it returns
    try:
      self._files.append(segment.name, fmt.pack_entry(entry), *views)
    except OSError as error:
      if self._cut_back(segment) and error.errno in files_port_lib.FULL:
        self._broken = broken
        raise self._full(fmt.ENTRY_HEADER_BYTES + entry.length) from error
      raise self._fail(f'Writing to {segment.name}', error) from error
    self._broken = broken
    segment.size += fmt.ENTRY_HEADER_BYTES + entry.length

  def _cut_back(self, segment: wal_recovery.Segment) -> bool:
    """Cuts off a partly written entry; False: the disk failed, and recovery will cut it."""
    try:
      self._files.truncate(segment.name, segment.size)
      return True
    except OSError:
      return False

  def _mark(self) -> None:
    """Writes the commit to the log, so that recovery does not take damage for a torn tail."""
    try:
      self._write(fmt.Entry(fmt.COMMIT_MARK, self.last, self.last, 0, self._chain, 0), [])
    except fmt.WalError:
      pass  # the commit is valid; if the disk failed, the next append raises

  def _begin_segment(self) -> None:
    """Begins a segment; the file gets its name once its header is durable, and the end of the one
    before: a torn tail that recovery has cut must not come back in a segment that is not the
    last."""
    if self._segments:
      self._do('fsync of', self._files.fsync, self._segments[-1].name)
    first = self.last + 1
    name, new = fmt.segment_name(first), fmt.segment_name(first) + fmt.NEW
    header = fmt.pack_segment(fmt.Header(first, self._chain, self._run))
    self._do('creating', self._files.create, new, needed=len(header))
    self._do('writing to', self._files.append, new, header, needed=len(header))
    self._do('fsync of', self._files.fsync, new)
    self._do('renaming', self._files.rename, new, name, needed=len(header))
    self._do('fsync of the directory after renaming', self._fsync_names, new)
    self._segments.append(wal_recovery.Segment(name, first))

  def _fsync_names(self, name: str) -> None:
    del name  # for the error text
    self._files.fsync_names()

  def _from(self, number: int) -> list[wal_recovery.Segment]:
    """The segment that holds record `number`, and all later ones."""
    older = sum(segment.first <= number for segment in self._segments)
    return self._segments[max(older - 1, 0) :]

  def _record(self, segment: wal_recovery.Segment, offset: int, entry: fmt.Entry) -> Record:
    """Reads a record and checks its payload again."""
    payload, done = memoryview(bytearray(entry.length)), 0
    start = offset + fmt.ENTRY_HEADER_BYTES
    for data in wal_recovery.read_pieces(self._files, segment.name, start, start + entry.length):
      payload[done : done + len(data)] = data
      done += len(data)
    if fmt.crc_of(fmt.hashes_of([payload])) != entry.crc:
      raise self._changed(segment, entry.number)
    return Record(entry.number, entry.kind, entry.chain, payload.toreadonly())

  def _changed(self, segment: wal_recovery.Segment, number: int) -> fmt.WalDamaged:
    return fmt.WalDamaged(
      f'WAL {self._files.place}/{segment.name} has changed since it was opened: record {number} '
      'differs. Check the disk and the memory of this host, then start again.'
    )

  # --- Failures -----------------------------------------------------------------------------------

  def _require_whole(self) -> None:
    if self._broken:
      raise fmt.WalBroken(self._broken)

  def _do(
    self, doing: str, call: Callable[..., Any], name: str, *args: Any, needed: int = 0
  ) -> None:
    """Calls the port; if `needed` is set, a full disk does not break the log."""
    broken, self._broken = self._broken, f'Interrupted: {doing} {name}.'  # unless it returns
    try:
      call(name, *args)
    except OSError as error:
      if needed and error.errno in files_port_lib.FULL:
        self._broken = broken
        raise self._full(needed) from error
      raise self._fail(f'{doing} {name}', error) from error
    self._broken = broken

  def _full(self, needed: int) -> fmt.WalFull:
    return fmt.WalFull(
      f'No space on {self._files.place} ({needed} bytes needed). The syncer commits no outer step '
      f'until there is space; the last committed record {self.committed} is safe.'
    )

  def _fail(self, doing: str, error: OSError) -> fmt.WalBroken:
    """Breaks the log: it writes nothing more."""
    self._broken = (
      f'{doing} failed in {self._files.place}: {error}. The syncer stops before it acknowledges an '
      f'outer step that is not durable. Safe up to record {self.committed}, hash '
      f'{fmt.short(self._committed_chain)}. Check the disk, then start again.'
    )
    return fmt.WalBroken(self._broken)
