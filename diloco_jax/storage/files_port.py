"""The port Files: one directory of files that only grow, and what a crash leaves of them.

The write-ahead log (storage/wal.py) is written against it, so the production log runs on a real
directory (storage/files.py) and on the simulated disk that tears and forgets (proof/sim/disk.py).

What is written is seen at once by every reader and survives the death of the process. What
survives the death of the *host* is said per call. Between two fsyncs of a file its written bytes
may reach the disk in any order, or not at all: a lost part reads as zeros, as rubbish, or the file
is shorter.
"""

from typing import Protocol


class Files(Protocol):
  """Every call may raise OSError with the errno of a real disk. One thread at a time."""

  place: str
  """The directory, in words, for messages."""

  def names(self) -> list[str]:
    """The files there are, sorted."""

  def size(self, name: str) -> int:
    """Bytes of a file."""

  def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
    """`count` bytes from `offset` (None: all), fewer only where the file ends."""

  def create(self, name: str) -> None:
    """An empty file, in place of what was there. Durable by fsync and fsync_names."""

  def append(self, name: str, *pieces: bytes | bytearray | memoryview) -> None:
    """Writes all the pieces, in their order, at the end; flat buffers, never copied whole.

    If it raises, any part of the bytes may have been written (a full disk takes a part, then
    ENOSPC); the file's size tells how much.
    """

  def truncate(self, name: str, size: int) -> None:
    """Cuts a file back to its first `size` bytes. Durable by fsync."""

  def fsync(self, name: str) -> None:
    """On return, all that the file holds is durable.

    If it raises, nothing is known of what was written since the last one that returned, and none
    that follows makes up for it: a kernel drops the pages that it could not write. They can still
    be read until the host restarts, so only writing them once more makes them durable.
    """

  def rename(self, old: str, new: str) -> None:
    """Atomic, also in a crash: `new` is what it was or what `old` is. Durable by fsync_names."""

  def remove(self, name: str) -> None:
    """Durable by fsync_names."""

  def fsync_names(self) -> None:
    """On return, the files created, renamed and removed so far are durably so."""
