"""The port Files: one directory of append-only files, and the effect of a crash on them.

The write-ahead log (storage/wal.py) uses this port, so the production log runs on a real directory
(storage/files.py) and on the simulated disk, which loses and tears writes
(verification/sim/disk.py).

Every reader sees written bytes at once, and they survive the death of the process. Each call states
what survives the death of the *host*. Between two fsyncs of a file its written bytes may reach the
disk in any order, or not at all: a lost part reads as zeros, as garbage, or the file is shorter.
"""

import errno
from typing import Protocol

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # a disk that is full, a quota, a limit of sizes


class Files(Protocol):
  """Every call may raise OSError with the errno of a real disk. One thread at a time."""

  place: str
  """The directory, for messages."""

  def names(self) -> list[str]:
    """The names of all files, sorted."""

  def size(self, name: str) -> int:
    """The size of a file in bytes."""

  def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
    """`count` bytes from `offset` (None: all), fewer only where the file ends."""

  def create(self, name: str) -> None:
    """Makes an empty file; replaces an existing one. Durable by fsync and fsync_names."""

  def append(self, name: str, *pieces: bytes | bytearray | memoryview) -> None:
    """Writes all pieces (flat buffers, never copied whole) in order at the end of the file.

    If the call raises, any part of the bytes may be written (a full disk takes a part, then raises
    ENOSPC); the file's size tells how much.
    """

  def truncate(self, name: str, size: int) -> None:
    """Cuts a file back to its first `size` bytes. Durable by fsync."""

  def fsync(self, name: str) -> None:
    """On return, the whole file is durable.

    If the call raises, the state of the bytes since the last successful fsync is unknown, and a
    later fsync does not help: the kernel drops the pages that it could not write. They stay
    readable until the host restarts, so only writing them again makes them durable.
    """

  def rename(self, old: str, new: str) -> None:
    """Atomic, also in a crash: `new` is the earlier `new` or `old`. Durable by fsync_names."""

  def remove(self, name: str) -> None:
    """Durable by fsync_names."""

  def fsync_names(self) -> None:
    """On return, all creations, renames and removals so far are durable."""
