"""Reading a write-ahead log back: what is whole, what is a torn tail, what is damage.

A host that loses power while a group of records is written leaves any part of it. None of that was
acknowledged, so it may be cut: a *torn tail*. A broken byte in anything older is *damage*: what
was acknowledged is not there any more, and only a person may decide to go on without it.

The two look alike, so every entry says which record was already durable when it was written
(`proven`), and a commit is followed by a mark that says it of the records just committed. Broken
bytes where record n is due are damage if any header behind them, or the header of the next
segment, proves n; a tear if none does. A broken mark alone costs nothing: what it proves is also
proven by the entry behind it, so it is passed over.

One window remains. A mark is not fsynced on its own (that would double the cost of a commit): it
survives the death of the process, but not a power loss right after the commit. If the mark is lost
so, *and* a byte of the last committed group rots before the next commit, that group is taken for a
tear and cut. Nothing in the log can tell; a snapshot that is newer than what is left (`after` of
wal.open_log), and learners that saw a newer version, do.
"""

import dataclasses
from collections.abc import Iterator

from diloco_jax.storage import files_port as files_port_lib
from diloco_jax.storage import wal_format as fmt

# The command that helps, of experiments/local.py: the log is set aside, and a new one begins behind
# the newest checkpoint.
RESTORE = '--restore=checkpoint'


@dataclasses.dataclass
class Segment:
  """A file of the log."""

  name: str
  first: int  # number of its first record
  size: int = fmt.SEGMENT_HEADER_BYTES  # up to the end of its last whole entry


@dataclasses.dataclass
class Damage:
  """Where a log cannot be trusted any more, and why."""

  name: str
  offset: int
  why: str


@dataclasses.dataclass
class Found:
  """What a log holds."""

  segments: list[Segment]
  last: int = 0  # the newest whole record
  chain: bytes = b''  # hash after it
  proven: int = 0  # the newest record that is known to have been durable
  torn_bytes: int = 0  # behind the last whole entry of the last segment
  passed: list[tuple[str, int]] = dataclasses.field(default_factory=list)  # broken marks
  damage: Damage | None = None

  @property
  def first(self) -> int:
    return self.segments[0].first if self.segments else 1

  def damaged(self, files: files_port_lib.Files, damage: Damage, after: int = 0) -> fmt.WalDamaged:
    """The error in words; `after`: the last record that the checkpoint holds."""
    return fmt.WalDamaged(
      f'WAL {files.place}/{damage.name} is damaged at byte {damage.offset}, before its end: '
      f'{damage.why}. Not started, nothing changed; records {self.first} to {self.last} are whole. '
      f'Restore the file, or go back to the newest checkpoint with {RESTORE}: the log is set aside, '
      f'and the outer steps behind record {after} are made anew.',
      damage.name,
      damage.offset,
      self.last,
    )


class _Foreign(fmt.Corrupt):
  """Whole, so no tear, but not what belongs here."""


def segment_names(files: files_port_lib.Files) -> list[str]:
  """The files of the log, by number."""
  return sorted(name for name in files.names() if fmt.first_of(name) is not None)


def scan(files: files_port_lib.Files, run: str | None = None) -> Found:
  """Verifies every header, number, CRC and hash; changes nothing.

  Args:
    files: where the log is.
    run: whose log it has to be; None: anyone's.

  Raises:
    WalUnsupported: another format version, or another run.
    OSError: the disk cannot be read.
  """
  names = segment_names(files)
  scanner = _Scanner(files, run)
  for name in names:
    damage = scanner.segment(name, is_last=name == names[-1])
    if damage:
      scanner.found.damage = damage
      break
  return scanner.found


class _Scanner:
  """Walks through a log from its first entry on."""

  def __init__(self, files: files_port_lib.Files, run: str | None):
    self._files = files
    self._run = run
    self._trailing: Damage | None = None  # broken bytes at the end of the segment before
    self.found = Found([])

  def segment(self, name: str, is_last: bool) -> Damage | None:
    """Reads one; the damage that ends the walk, if any."""
    try:
      header = fmt.parse_segment(name, self._files.read(name, 0, fmt.SEGMENT_HEADER_BYTES))
      self._check_header(name, header)
    except fmt.Corrupt as error:
      return self._trailing or Damage(name, 0, str(error))
    if self._trailing:  # only a mark was hit: the records before it are what this header says
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
        f'WAL {self._files.place}/{name} belongs to the run "{header.run}", not to "{self._run}". '
        'Nothing was changed. Use another state directory.'
      )
    if fmt.first_of(name) != header.first:
      raise _Foreign(f'it begins with record {header.first}, its name says otherwise')
    if found.segments and header.first != found.last + 1:
      raise _Foreign(
        f'it begins with record {header.first}, the log before it ends with record {found.last}'
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
    """The entry at an offset, verified as the one that is due. Raises Corrupt."""
    entry = fmt.parse_entry(self._files.read(name, offset, fmt.ENTRY_HEADER_BYTES))
    start = offset + fmt.ENTRY_HEADER_BYTES
    if entry.length > size - start:
      raise fmt.Corrupt(f'record {entry.number} is unfinished')
    found, (chain, crc) = (
      self.found,
      fmt.sums(
        self.found.chain,
        entry.kind,
        entry.number,
        entry.length,
        read_pieces(self._files, name, start, start + entry.length),
      ),
    )
    if crc != entry.crc:
      raise fmt.Corrupt(f'the payload of record {entry.number} is damaged')
    if entry.kind == fmt.COMMIT_MARK:
      chain, due = found.chain, found.last
    else:
      due = found.last + 1
    if entry.number != due:
      raise _Foreign(f'record {entry.number} stands where {due} is due')
    if entry.chain != chain:
      raise _Foreign(f'the chain hash of record {entry.number} does not follow from those before')
    return entry

  def _behind_mark(self, name: str, offset: int, size: int, error: fmt.Corrupt) -> fmt.Entry | None:
    """The record that is due, if it follows whole behind what can only be a broken mark."""
    if isinstance(error, _Foreign):
      return None
    try:
      entry = self._entry(name, offset + fmt.ENTRY_HEADER_BYTES, size)
    except fmt.Corrupt:
      return None
    return None if entry.kind == fmt.COMMIT_MARK else entry

  def _broken(
    self, name: str, offset: int, size: int, is_last: bool, error: fmt.Corrupt
  ) -> Damage | None:
    """Broken bytes where the next record is due: damage, or else a torn tail."""
    due, damage = self.found.last + 1, Damage(name, offset, str(error))
    if isinstance(error, _Foreign):
      return damage
    if not is_last:
      if size - offset > fmt.ENTRY_HEADER_BYTES:
        return damage
      self._trailing = damage  # a mark's worth: the next header tells
      return None
    if any(entry.proven >= due for entry in _headers(self._files, name, offset)):
      return damage
    self.found.torn_bytes = size - offset
    return None


def _headers(files: files_port_lib.Files, name: str, offset: int) -> Iterator[fmt.Entry]:
  """Every whole header of an entry from an offset on, wherever it begins."""
  size = files.size(name)
  while offset < size:
    data = files.read(name, offset, fmt.PIECE_BYTES + fmt.ENTRY_HEADER_BYTES - 1)
    for place, entry in fmt.entries_in(data):
      if place < fmt.PIECE_BYTES:  # else the next piece has it too
        yield entry
    offset += fmt.PIECE_BYTES


def read_pieces(files: files_port_lib.Files, name: str, start: int, end: int) -> Iterator[bytes]:
  """Bytes `start` to `end` of a file, piece by piece."""
  for offset in range(start, end, fmt.PIECE_BYTES):
    count = min(fmt.PIECE_BYTES, end - offset)
    data = files.read(name, offset, count)
    if len(data) != count:
      raise OSError(f'{name} ends at byte {offset + len(data)}, {end} were there')
    yield data


def entries(files: files_port_lib.Files, segment: Segment) -> Iterator[tuple[int, fmt.Entry]]:
  """The records of a segment that was scanned: (offset of the header, header)."""
  offset = fmt.SEGMENT_HEADER_BYTES
  while offset < segment.size:
    data = files.read(segment.name, offset, fmt.ENTRY_HEADER_BYTES)
    try:
      entry = fmt.parse_entry(data)
    except fmt.Corrupt:  # a mark that the scan passed over
      entry = None
    if entry and entry.kind != fmt.COMMIT_MARK:
      yield offset, entry
    offset += fmt.ENTRY_HEADER_BYTES + (entry.length if entry else 0)


def copy(files: files_port_lib.Files, name: str, start: int, end: int, target: str) -> None:
  """Bytes `start` to `end` as the file `target`, which is there whole and durable or not at all."""
  files.create(target + fmt.NEW)
  for data in read_pieces(files, name, start, end):
    files.append(target + fmt.NEW, data)
  files.fsync(target + fmt.NEW)
  files.rename(target + fmt.NEW, target)
  files.fsync_names()
