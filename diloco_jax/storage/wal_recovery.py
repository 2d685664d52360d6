"""Reads a write-ahead log back and tells whole records, a torn tail and damage apart.

A host that loses power while it writes a group of records leaves any part of the group. None of it
was acknowledged, so it may be cut: a *torn tail*. A broken byte in an older record is *damage*: an
acknowledged record is lost, and only a person may decide to continue without it.

The two look alike. Therefore every entry says which record was already durable when it was written
(`proven`), and after each commit a mark says so of the records just committed. Broken bytes where
record n is due are damage if any header behind them, or the header of the next segment, proves n,
else a tear. The payload of a record whose header is whole is not searched: a learner chose it. A
broken mark alone is skipped: the entry behind it proves the same.

One gap remains. A mark is not fsynced by itself (that would double the cost of a commit): it
survives the death of the process, but not a power loss right after the commit. If the mark is lost
in this way *and* a byte of the last committed group rots before the next commit, the scan takes
that group for a tear and cuts it. Nothing in the log shows this, but a checkpoint that is newer
than the rest of the log (`after` of wal.open_log) does, and so do learners that saw a newer
version.
"""

import dataclasses
from collections.abc import Iterator

from diloco_jax.storage import files_port as files_port_lib
from diloco_jax.storage import wal_format as fmt

# The command that repairs a damaged log: it moves the log aside and begins a new one behind the
# newest checkpoint.
RESTORE = 'diloco restore --to=latest'


@dataclasses.dataclass
class Segment:
  """A file of the log."""

  name: str
  first: int  # number of its first record
  size: int = fmt.SEGMENT_HEADER_BYTES  # up to the end of its last whole entry


@dataclasses.dataclass
class Damage:
  """The first place where a log is damaged, and how."""

  name: str
  offset: int
  why: str


@dataclasses.dataclass
class Found:
  """The content of a log."""

  segments: list[Segment]
  last: int = 0  # the newest whole record
  chain: bytes = b''  # hash after it
  proven: int = 0  # the newest record that was certainly durable
  torn_bytes: int = 0  # behind the last whole entry of the last segment
  passed: list[tuple[str, int]] = dataclasses.field(default_factory=list)  # broken marks
  damage: Damage | None = None

  @property
  def first(self) -> int:
    return self.segments[0].first if self.segments else 1

  def damaged(self, files: files_port_lib.Files, damage: Damage) -> fmt.WalDamaged:
    """The error for people."""
    some = self.last >= self.first
    whole = f'records {self.first} to {self.last} are whole' if some else 'no record is whole'
    return fmt.WalDamaged(
      f'WAL {files.place}/{damage.name} is damaged at byte {damage.offset}, before its end: '
      f'{damage.why}. Nothing was changed; {whole}. Put the file back, or go back to the newest '
      f'checkpoint with {RESTORE}: it moves the log aside, and the run repeats the outer steps '
      'behind that checkpoint.'
    )


def _shown(text: str) -> str:
  return text.encode('unicode_escape').decode()


class _Foreign(fmt.Corrupt):
  """A whole entry, so no tear, but not the one that is due here."""


class _BrokenPayload(fmt.Corrupt):
  """The header of a record is whole, its payload is not; `next_header`: the first place at which
  the next header may be."""

  def __init__(self, why: str, next_header: int):
    super().__init__(why)
    self.next_header = next_header


def segment_names(files: files_port_lib.Files) -> list[str]:
  """The files of the log in the order of their records."""
  return sorted(name for name in files.names() if fmt.first_of(name) is not None)


def scan(files: files_port_lib.Files, run: str | None = None, key: bytes = b'') -> Found:
  """Verifies every header, number, CRC and hash; changes nothing.

  Args:
    files: the folder of the log.
    run: the run that the log must belong to; None: any run.
    key: of its chain; empty: none.

  Raises:
    WalUnsupported: another format version, or another run.
    OSError: the disk cannot be read.
  """
  names = segment_names(files)
  scanner = _Scanner(files, run, key)
  for name in names:
    damage = scanner.segment(name, is_last=name == names[-1])
    if damage:
      scanner.found.damage = damage
      break
  return scanner.found


class _Scanner:
  """Reads a log from its first entry to its last."""

  def __init__(self, files: files_port_lib.Files, run: str | None, key: bytes):
    self._files = files
    self._run = run
    self._key = key
    self._trailing: Damage | None = None  # broken bytes at the end of the segment before
    self.found = Found([])

  def segment(self, name: str, is_last: bool) -> Damage | None:
    """Reads one segment; returns the damage that ends the scan, if any."""
    try:
      header = fmt.parse_segment(name, self._files.read(name, 0, fmt.SEGMENT_HEADER_BYTES))
      self._check_header(name, header)
    except fmt.Corrupt as error:
      return self._trailing or Damage(name, 0, str(error))
    if self._trailing:  # only a mark is broken: this header confirms the records before it
      self.found.passed.append((self._trailing.name, self._trailing.offset))
      self._trailing = None
    self.found.segments.append(Segment(name, header.first))
    self.found.last, self.found.chain = header.first - 1, header.chain
    self.found.proven = header.first - 1
    return self._walk(name, is_last)

  def _check_header(self, name: str, header: fmt.Header) -> None:
    found, self._run = self.found, self._run or header.run
    if header.run != self._run:
      raise fmt.WalUnsupported(
        f'WAL {self._files.place}/{name} belongs to the run "{_shown(header.run)}", not to '
        f'"{self._run}". Nothing was changed. Use another state directory.'
      )
    if fmt.first_of(name) != header.first:
      raise _Foreign(f'it begins with record {header.first}, which is not the one in its name')
    if found.segments and header.first != found.last + 1:
      raise _Foreign(
        f'it begins with record {header.first}, but the log before it ends with {found.last}'
      )
    if found.segments and header.chain != found.chain:
      raise _Foreign('its chain hash does not follow from the records before it')

  def _walk(self, name: str, is_last: bool) -> Damage | None:
    found, segment, size = self.found, self.found.segments[-1], self._files.size(name)
    while segment.size < size:
      try:
        entry = self._entry(name, segment.size, size)
      except fmt.Corrupt as error:
        entry = self._behind_mark(name, segment.size, size, error)
        if entry is None:
          return self._broken(name, segment.size, size, is_last, error)
        found.passed.append((name, segment.size))
        segment.size += fmt.ENTRY_HEADER_BYTES
      segment.size += fmt.ENTRY_HEADER_BYTES + entry.length
      found.last, found.chain = entry.number, entry.chain
      found.proven = max(found.proven, entry.proven)
    return None

  def _entry(self, name: str, offset: int, size: int) -> fmt.Entry:
    """Reads the entry at an offset and verifies that it is the one due. Raises Corrupt."""
    entry = fmt.parse_entry(self._files.read(name, offset, fmt.ENTRY_HEADER_BYTES))
    start, found = offset + fmt.ENTRY_HEADER_BYTES, self.found
    end = start + entry.length
    due = found.last + (entry.kind != fmt.COMMIT_MARK)
    next_header = end if entry.number == due else start
    if end > size:
      raise _BrokenPayload(f'record {entry.number} is unfinished', next_header)
    pieces = read_pieces(self._files, name, start, end)
    hashes = b''.join(fmt.hash_of([piece]) for piece in pieces)
    if fmt.crc_of(hashes) != entry.crc:
      raise _BrokenPayload(f'the payload of record {entry.number} is damaged', next_header)
    chain = found.chain
    if entry.kind != fmt.COMMIT_MARK:
      chain = fmt.chain_of(chain, entry.kind, entry.number, entry.length, hashes, self._key)
    if entry.number != due:
      raise _Foreign(f'record {entry.number} is where record {due} is due')
    if entry.chain != chain:
      sealed = ' under this seal key' if self._key else '; a log with a key needs its --seal_key'
      raise _Foreign(
        f'the chain hash of record {entry.number} does not follow from those before{sealed}'
      )
    return entry

  def _behind_mark(self, name: str, offset: int, size: int, error: fmt.Corrupt) -> fmt.Entry | None:
    """The due record, if it is whole and directly behind bytes that can only be a broken mark."""
    if isinstance(error, _Foreign | _BrokenPayload):
      return None
    try:
      entry = self._entry(name, offset + fmt.ENTRY_HEADER_BYTES, size)
    except fmt.Corrupt:
      return None
    return None if entry.kind == fmt.COMMIT_MARK else entry

  def _broken(
    self, name: str, offset: int, size: int, is_last: bool, error: fmt.Corrupt
  ) -> Damage | None:
    """Decides whether broken bytes where the next record is due are damage or a torn tail."""
    due, damage = self.found.last + 1, Damage(name, offset, str(error))
    if isinstance(error, _Foreign):
      return damage
    if not is_last:
      if size - offset > fmt.ENTRY_HEADER_BYTES:
        return damage
      self._trailing = damage  # as long as a mark: the next header decides
      return None
    behind = error.next_header if isinstance(error, _BrokenPayload) else offset
    if any(entry.proven >= due for entry in _headers(self._files, name, behind)):
      return damage
    self.found.torn_bytes = size - offset
    return None


def _headers(files: files_port_lib.Files, name: str, offset: int) -> Iterator[fmt.Entry]:
  """Finds every whole header of an entry behind an offset, at any place."""
  size = files.size(name)
  while offset < size:
    data = files.read(name, offset, fmt.PIECE_BYTES + fmt.ENTRY_HEADER_BYTES - 1)
    for place, entry in fmt.entries_in(data):
      if place < fmt.PIECE_BYTES:  # the next piece has the others again
        yield entry
    offset += fmt.PIECE_BYTES


def read_pieces(files: files_port_lib.Files, name: str, start: int, end: int) -> Iterator[bytes]:
  """Reads bytes `start` to `end` of a file, piece by piece."""
  for offset in range(start, end, fmt.PIECE_BYTES):
    count = min(fmt.PIECE_BYTES, end - offset)
    data = files.read(name, offset, count)
    if len(data) != count:
      raise OSError(f'{name} ends at byte {offset + len(data)}, it had {end}')
    yield data


def entries(files: files_port_lib.Files, segment: Segment) -> Iterator[tuple[int, fmt.Entry]]:
  """Reads the records of a scanned segment: (offset of the header, header)."""
  offset = fmt.SEGMENT_HEADER_BYTES
  while offset < segment.size:
    data = files.read(segment.name, offset, fmt.ENTRY_HEADER_BYTES)
    try:
      entry = fmt.parse_entry(data)
    except fmt.Corrupt:  # a broken mark, which the scan skipped
      entry = None
    if entry and entry.kind != fmt.COMMIT_MARK:
      yield offset, entry
    offset += fmt.ENTRY_HEADER_BYTES + (entry.length if entry else 0)


def copy(files: files_port_lib.Files, name: str, start: int, end: int, target: str) -> None:
  """Copies bytes `start` to `end` to a file `target`, which exists only once it is durable."""
  files.create(target + fmt.NEW)
  for data in read_pieces(files, name, start, end):
    files.append(target + fmt.NEW, data)
  files.fsync(target + fmt.NEW)
  files.rename(target + fmt.NEW, target)
  files.fsync_names()
