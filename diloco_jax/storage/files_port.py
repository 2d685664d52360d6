"""The port Files: one directory of files, each written once, and the effect of a crash on them.

The write-ahead log (storage/wal.py) uses this port, so the production log runs on a real directory
(storage/files.py) and on the simulated disk, which loses and tears writes
(verification/sim/disk.py).

Every reader sees written bytes at once, and they survive the death of the process. Each call states
what survives the death of the *host*. Until the fsync of a file its bytes may reach the disk in any
order, or not at all: a lost part reads as zeros, as garbage, or the file is shorter.
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

  def write(self, name: str, *buffers: bytes | bytearray | memoryview) -> None:
    """Makes a file of all buffers (flat, never copied whole), or replaces one. Durable by
    fsync and fsync_names. If the call raises, the file may be missing or have a part of the bytes.
    """

  def fsync(self, name: str) -> None:
    """On return, the bytes of a file that this process has written are durable.

    If the call raises, the state of the bytes is unknown, and a later fsync does not help: the
    kernel drops the pages that it could not write. They stay readable until the host restarts.
    """

  def rename(self, old: str, new: str) -> None:
    """Atomic, also in a crash: `new` is the earlier `new` or `old`. Durable by fsync_names."""

  def remove(self, name: str) -> None:
    """Durable by fsync_names."""

  def fsync_names(self) -> None:
    """On return, all creations, renames and removals so far are durable."""
