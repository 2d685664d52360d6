"""A disk that tears, forgets, flips, fills up, and fails an fsync: the port of
storage/files_port.py.

Written bytes are in the page cache: every process reads them, and a killed process loses none.
fsync makes a file's bytes durable, fsync_names the changes of names. A host that loses power
(`crash`) keeps all durable bytes, and of the rest a random selection: of each file any part of the
bytes, shorter, with holes of zeros or a wrong bit; and any of the files created, renamed and
removed, in an order that no name contradicts.

Errors are OSErrors with the errno of a real disk. An fsync that fails has dropped the dirty pages:
reads still return them, but no later fsync writes them.
"""

import errno
import hashlib
import json
import random
from collections.abc import Iterator

KEPT = 2  # checkpoints
PAGE = 24  # bytes lost or kept together; a record here is a few hundred bytes


class Cut(Exception):
  """The process, or its whole host, died in the middle of this call."""


class _File:
  """The bytes of a file, whatever its name.

  Attributes:
    data: as a process reads it.
    durable: how many bytes were fsynced, or belong to an fsync that failed.
    lost: the parts of these that no fsync will ever write.
  """

  __slots__ = ('data', 'durable', 'lost')

  def __init__(self, data: bytes = b''):
    self.data, self.durable = bytearray(data), len(data)
    self.lost: list[tuple[int, int]] = []


class Disk:
  """The files of one node.

  Attributes:
    full: the disk has no room left.
    failing_fsyncs: how many of the next fsyncs fail.
    rot: positions of flipped bits: (file, byte).
    fuse: after this number of further changing calls the process dies in the call: raises Cut.
    fuse_power: whether its host loses power then.
  """

  place = 'disk'

  def __init__(self, draw: random.Random, files: dict[str, bytes] | None = None):
    """`files`: durable files that are on the disk from the start."""
    self._draw = draw
    self._files = {name: _File(data) for name, data in (files or {}).items()}
    self._kept = dict(self._files)  # the durable names
    self._changes: list[tuple[str, str, _File | None]] = []  # (name, '' or old name, new file)
    self.full = False
    self.failing_fsyncs = 0
    self.rot: list[tuple[str, int]] = []
    self.fuse: int | None = None
    self.fuse_power = False

  # --- Calls of a process -------------------------------------------------------------------------

  def names(self) -> list[str]:
    return sorted(self._files)

  def size(self, name: str) -> int:
    return len(self._files[name].data)

  def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
    return bytes(self._files[name].data[offset : None if count is None else offset + count])

  def write(self, name: str, *buffers: bytes | bytearray | memoryview) -> None:
    """A file of these bytes; a full disk stores only a part, then raises ENOSPC."""
    data = b''.join(buffers)
    self._burn(name, data)
    if self.full:
      self._store(name, data[: self._draw.randrange(len(data) + 1)])
      raise OSError(errno.ENOSPC, 'No space left on device')
    self._store(name, data)

  def _store(self, name: str, data: bytes) -> None:
    file = self._files[name] = _File()
    file.data += data
    self._changes.append((name, '', file))

  def fsync(self, name: str) -> None:
    self._burn()
    file = self._files[name]
    written = file.durable, len(file.data)
    try:
      self._may_fail()
    except OSError:
      file.durable = len(file.data)
      file.lost += [written] if written[0] < written[1] else []
      raise
    file.durable = len(file.data)

  def rename(self, old: str, new: str) -> None:
    """Atomic: `new` is the old or the new file, also after a crash."""
    self._burn()
    self._files[new] = self._files.pop(old)
    self._changes.append((new, old, None))

  def remove(self, name: str) -> None:
    self._burn()
    del self._files[name]
    self._changes.append((name, '', None))

  def fsync_names(self) -> None:
    self._burn()
    self._may_fail()
    self._kept = dict(self._files)
    self._changes.clear()

  def _may_fail(self) -> None:
    if self.failing_fsyncs:
      self.failing_fsyncs -= 1
      raise OSError(errno.EIO, 'Input/output error')

  def _burn(self, name: str = '', data: bytes = b'') -> None:
    """Counts a call; the last one before the death writes a part of its bytes."""
    if self.fuse is None:
      return
    self.fuse -= 1
    if self.fuse < 0:
      self.fuse = None
      if data:
        self._store(name, data[: self._draw.randrange(len(data) + 1)])
      if self.fuse_power:
        self.crash()
      raise Cut

  # --- Known to the simulated world only ----------------------------------------------------------

  def durable(self, name: str) -> bool:
    """Whether a file exists and no power loss can destroy its name or its bytes."""
    file = self._files.get(name)
    changed = any(name in change[:2] for change in self._changes)
    if file is None or changed or self._kept.get(name) is not file:
      return False
    return file.durable == len(file.data) and not file.lost

  # --- Faults -------------------------------------------------------------------------------------

  def crash(self) -> None:
    """The host loses power."""
    self._files, undone = self._kept, set()
    for name, old, file in self._changes:
      if {name, old} & undone or self._draw.randrange(2):
        undone |= {name, old} - {''}
      elif old:
        self._files[name] = self._files.pop(old)
      elif file is not None:
        self._files[name] = file
      else:
        del self._files[name]
    self._kept = dict(self._files)
    self._changes.clear()
    for name in self.names():
      self._tear(self._files[name])

  def _tear(self, file: _File) -> None:
    """Keeps, drops or tears the bytes that were not durable."""
    data, durable = file.data, file.durable
    if len(data) > durable and self._draw.randrange(2):
      del data[self._draw.randint(durable, len(data)) :]
    for start, end in (*file.lost, (durable, len(data))):
      self._spoil(data, start, min(end, len(data)))
    file.durable = len(data)
    file.lost.clear()

  def _spoil(self, data: bytearray, start: int, end: int) -> None:
    """Bytes that are not durable: right, with a wrong bit, or with holes."""
    if start >= end:
      return
    match self._draw.randrange(4):
      case 0:
        data[self._draw.randrange(start, end)] ^= 1 << self._draw.randrange(8)
      case 1:
        for page in range(start, end, PAGE):
          stop = min(page + PAGE, end)
          if self._draw.randrange(2):
            data[page:stop] = bytes(stop - page)

  def flip(self) -> bool:
    """Flips one bit at random; False: the disk is empty."""
    names = [name for name in self.names() if self._files[name].data]
    if names:
      name = self._draw.choice(names)
      index = self._draw.randrange(self.size(name))
      self._files[name].data[index] ^= 1 << self._draw.randrange(8)
      self.rot.append((name, index))
    return bool(names)


class Checkpoints:
  """Checkpoints on a disk, as storage/checkpoint.py has them: the newest that is whole counts, and
  two are kept.

  A checkpoint is written beside, made durable, renamed, and read back; its digest tells a torn or
  flipped one. `save` is a generator that yields where time passes and a crash may come between.
  """

  def __init__(self, disk: Disk):
    self._disk = disk
    self._numbers = 0

  def save(self, state: dict) -> Iterator[None]:
    """The stages that write a checkpoint of the state as it is now: they raise OSError if they
    could not, the older ones are untouched then."""
    self._numbers = max([self._numbers, *self._saved()]) + 1
    return self._write(
      self._numbers, json.dumps({'number': self._numbers, 'state': state}).encode()
    )

  def _write(self, number: int, data: bytes) -> Iterator[None]:
    self._disk.write('new', hashlib.sha256(data).digest() + data)
    yield
    self._disk.fsync('new')
    yield
    self._disk.rename('new', f'{number:08}')
    yield
    self._disk.fsync_names()
    if self._load(number) is None:
      raise OSError(errno.EIO, 'It does not read back as it was written')
    for older in self._saved()[:-KEPT]:
      self._disk.remove(f'{older:08}')

  def _saved(self) -> list[int]:
    return [int(name) for name in self._disk.names() if name.isdecimal()]

  def _load(self, number: int) -> dict | None:
    data = self._disk.read(f'{number:08}')
    whole = hashlib.sha256(data[32:]).digest() == data[:32]
    return json.loads(data[32:]) if whole else None

  def last_two(self) -> list[dict | None]:
    """The newest ones, the oldest first; None: not whole."""
    records = [self._load(number) for number in self._saved()[-KEPT:]]
    return [record and record['state'] for record in records]

  def newest(self) -> dict | None:
    """The newest whole checkpoint."""
    whole = (self._load(number) for number in reversed(self._saved()))
    return next((record['state'] for record in whole if record is not None), None)
