"""A disk that tears, flips, fills up, and fails an fsync.

Written bytes are in the page cache; fsync makes a file's bytes durable, fsync_names the names. A
process that is killed loses nothing of the cache. A host that loses power (`crash`) keeps of every
file what was durable and any part of what was written after it, the last kept bytes perhaps wrong,
and of the renames that were not made durable the first ones.

Errors are OSErrors with the errno of a real disk. A failed fsync says nothing about what is
durable, and the next one does not make up for it (the kernel has dropped the dirty pages).
"""

import errno
import hashlib
import json
import random
from typing import Iterator


class Disk:
  """The files of one node."""

  def __init__(self, draw: random.Random):
    self._draw = draw
    self._files: dict[str, bytes] = {}
    self._durable: dict[str, int] = {}  # bytes of each file that are durable
    self._names: list[tuple[str, str, bytes | None]] = []  # renames: from, to, what it replaced
    self.full = False
    self.failing_fsyncs = 0

  # --- What a program does ------------------------------------------------------------------------

  def create(self, name: str) -> None:
    """An empty file in place of what was there."""
    self._files[name], self._durable[name] = b'', 0

  def append(self, name: str, data: bytes) -> None:
    """Writes at the end; a full disk takes only a part, then ENOSPC."""
    if self.full:
      self._files[name] += data[:self._draw.randrange(len(data) + 1)]
      raise OSError(errno.ENOSPC, 'No space left on device')
    self._files[name] += data

  def read(self, name: str) -> bytes:
    return self._files[name]

  def names(self) -> list[str]:
    return sorted(self._files)

  def remove(self, name: str) -> None:
    del self._files[name], self._durable[name]

  def fsync(self, name: str) -> None:
    if self.failing_fsyncs:
      self.failing_fsyncs -= 1
      raise OSError(errno.EIO, 'Input/output error')
    self._durable[name] = len(self._files[name])

  def rename(self, old: str, new: str) -> None:
    """Atomic: `new` is one or the other, also after a crash."""
    self._names.append((old, new, self._files.get(new)))
    self._files[new], self._durable[new] = self._files.pop(old), self._durable.pop(old)

  def fsync_names(self) -> None:
    self._names.clear()

  # --- What happens to it -------------------------------------------------------------------------

  def crash(self) -> None:
    """The host loses power."""
    keep = self._draw.randrange(len(self._names) + 1)
    for old, new, replaced in reversed(self._names[keep:]):
      if new not in self._files:
        continue  # removed since
      self._files[old], self._durable[old] = self._files.pop(new), self._durable.pop(new)
      if replaced is not None:
        self._files[new], self._durable[new] = replaced, len(replaced)
    self._names.clear()
    for name, durable in self._durable.items():
      self._tear(name, durable)

  def _tear(self, name: str, durable: int) -> None:
    data = self._files[name]
    if len(data) == durable:
      return
    kept = self._draw.randint(durable, len(data))
    self._files[name] = data[:kept]
    if kept > durable and self._draw.randrange(4) == 0:
      self._flip(name, self._draw.randrange(durable, kept))
    self._durable[name] = kept

  def flip(self) -> bool:
    """A bit rots somewhere; False: there is none."""
    names = [name for name in self.names() if self._files[name]]
    if names:
      name = self._draw.choice(names)
      self._flip(name, self._draw.randrange(len(self._files[name])))
    return bool(names)

  def _flip(self, name: str, place: int) -> None:
    data = bytearray(self._files[name])
    data[place] ^= 1 << self._draw.randrange(8)
    self._files[name] = bytes(data)


class Checkpoints:
  """Verified snapshots on a disk: the newest that is whole counts, two are kept.

  A checkpoint is written beside, made durable, then renamed; its digest tells torn or flipped ones.
  `save` is a generator that yields where time passes and a crash may come between.
  """

  def __init__(self, disk: Disk):
    self._disk = disk
    self._numbers = 0

  def save(self, state: dict) -> Iterator[None]:
    """Writes the state as it is now; raises OSError if it could not, the older ones are untouched
    then."""
    return self._write(json.dumps(state).encode())

  def _write(self, data: bytes) -> Iterator[None]:
    self._numbers = max([self._numbers, *self._saved()]) + 1
    self._disk.create('new')
    self._disk.append('new', hashlib.sha256(data).digest() + data)
    yield
    self._disk.fsync('new')
    yield
    self._disk.rename('new', f'{self._numbers:08}')
    yield
    self._disk.fsync_names()
    for number in self._saved()[:-2]:
      self._disk.remove(f'{number:08}')

  def _saved(self) -> list[int]:
    return [int(name) for name in self._disk.names() if name != 'new']

  def newest(self) -> dict | None:
    """The newest one that is whole."""
    for number in reversed(self._saved()):
      data = self._disk.read(f'{number:08}')
      if hashlib.sha256(data[32:]).digest() == data[:32]:
        return json.loads(data[32:])
    return None
