"""A directory on a real disk (the port storage/files_port.py), its lock, and a write test at start.

The descriptor of a written file stays open until it is renamed or removed, so the kernel reports a
failed fsync to the process that wrote. A write has no interpreter lock, so no step waits for the
disk. A large file is written around the page cache where the file system allows it (O_DIRECT). The
cache needs a new page for each 4 KiB, and the first touch of these pages can cost more than the
write itself. Only a recovery reads the bytes again.

The lock is flock(2) on the file `lock`; the kernel releases it at any end of the process. It works
between processes of one host, and between two hosts only on a shared file system that supports it
(NFS 4 does).
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import pathlib
import platform
import socket
import stat
from collections.abc import Sequence

from diloco_jax.protocol import safe_json

MOST_BYTES = 1 << 20  # in one direct write
MOST_BUFFERS = 64  # in one write
DIRECT_BYTES = 4 << 20  # of a file that is written around the page cache
BLOCK = 4096  # bytes; such a write has whole blocks, in the file and in memory
_DIRECT = getattr(os, 'O_DIRECT', 0)  # 0 on a system that has no such writes
_NOT_DIRECT = errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS  # a file system that refuses them
_PLAIN = os.O_NOFOLLOW | os.O_CLOEXEC  # a symbolic link is no file of a run
LOCK = 'lock'
PROBE = 'probe'
_PATTERN = frozenset('*?[]\\')
_KINDS = {stat.S_IFDIR: 'a folder', stat.S_IFIFO: 'a named pipe', stat.S_IFSOCK: 'a socket'}


class DirectoryError(RuntimeError):
  """The directory is unusable; the text is one line: why, and what to do."""


def require_name(folder: pathlib.Path) -> None:
  """Raises ValueError if checkpoints could not be read below this path. Orbax finds the parts of a
  save by a pattern that begins with the path, so that a letter of a pattern in it finds nothing, or
  the parts of a save in another folder."""
  for path in (folder.absolute(), folder.resolve()):
    if letters := sorted(_PATTERN & set(str(path))):
      raise ValueError(
        f'{path} has {" ".join(letters)} in its path, and below such a path no checkpoint could be '
        'read. Nothing was changed. Choose another folder, or rename this one'
      )


def loopback() -> str:
  """HOST:PORT of a free port on loopback. A machine may have no IPv4. Raises OSError."""
  for family, host in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):
    with contextlib.suppress(OSError), socket.socket(family) as probe:
      probe.bind((host, 0))
      return f'{f"[{host}]" if ":" in host else host}:{probe.getsockname()[1]}'
  raise OSError('this machine has no loopback address')


def host_name() -> str:
  """The name of this machine, which may have none."""
  return platform.node() or 'a host without a name'


def kind(path: str | os.PathLike) -> str:
  """What a path is, if it is no regular file nor a link to one; '' if it is. A user may name
  anything, and to open a pipe or to read a device can take for ever."""
  link = 'a link to ' if os.path.islink(path) else ''
  try:
    mode = os.stat(path).st_mode
  except OSError as error:
    return f'{link}nothing' if link else f'not there ({error.strerror})'
  return '' if stat.S_ISREG(mode) else link + _KINDS.get(stat.S_IFMT(mode), 'a device')


def require_file(path: str | os.PathLike) -> None:
  """Raises ValueError unless a path is a regular file or a link to one."""
  if what := kind(path):
    raise ValueError(f'{path} is {what}; only a regular file is read, or a link to one')


class Files:
  """The files of one directory, which is created if it does not exist."""

  def __init__(self, path: str | os.PathLike):
    """Raises DirectoryError."""
    self._path = pathlib.Path(path)
    self._open: dict[str, int] = {}  # descriptors of written files
    self._aligned: memoryview | None = None  # memory for direct writes
    self._lock = -1
    self.place = str(self._path)
    try:
      self._path.mkdir(parents=True, exist_ok=True)
      self._directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
      raise DirectoryError(f'{self.place} is no directory to write in: {error}') from error

  # --- The port -----------------------------------------------------------------------------------

  def names(self) -> list[str]:
    self._require_open()
    return sorted(os.listdir(self._path))

  def size(self, name: str) -> int:
    self._require_open()
    return os.lstat(self._path / name).st_size

  def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
    self._require_open()
    descriptor = os.open(self._path / name, os.O_RDONLY | _PLAIN)
    with open(descriptor, 'rb', buffering=0) as file:
      file.seek(offset)
      if count is None:
        return file.readall()
      parts = []
      while count and (part := file.read(count)):  # short: a signal, or the end of the file
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b''.join(parts)

  def write(self, name: str, *buffers: bytes | bytearray | memoryview) -> None:
    self._require_open()
    self._close(name)
    descriptor = self._open[name] = os.open(
      self._path / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _PLAIN, 0o644
    )
    views = [memoryview(buffer) for buffer in buffers]
    if _DIRECT and sum(map(len, views)) >= DIRECT_BYTES:
      views = self._write_direct(descriptor, views)
    _write(descriptor, views)

  def fsync(self, name: str) -> None:
    self._require_open()
    os.fsync(self._open[name])

  def rename(self, old: str, new: str) -> None:
    self._require_open()
    os.rename(self._path / old, self._path / new)
    self._close(new)
    self._close(old)

  def remove(self, name: str) -> None:
    self._require_open()
    os.unlink(self._path / name)
    self._close(name)

  def fsync_names(self) -> None:
    self._require_open()
    os.fsync(self._directory)

  # --- Beside the port ----------------------------------------------------------------------------

  def lock(self, role: str = 'syncer') -> None:
    """Locks the directory for this process until `close` or its end, once. Raises
    DirectoryError."""
    if self._lock >= 0:
      return
    try:
      self._require_open()
      descriptor = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | _PLAIN, 0o644)
    except OSError as error:
      raise self._unwritable(error) from error
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      holder, remedy = _holder(descriptor)
      os.close(descriptor)
      raise DirectoryError(
        f'{self.place} is already used by {holder}. Nothing was changed. {remedy}'
      ) from error
    except OSError as error:
      os.close(descriptor)
      raise self._unwritable(error) from error
    self._lock = descriptor
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the holder's name
      os.ftruncate(descriptor, 0)
      holder = {'role': role, 'pid': os.getpid(), 'host': host_name()}
      os.pwrite(descriptor, json.dumps(holder).encode(), 0)

  def probe(self) -> None:
    """Writes, fsyncs and removes a file. Raises DirectoryError: read-only, wrong owner, full."""
    try:
      self.write(PROBE, b'probe')
      self.fsync(PROBE)
      self.remove(PROBE)
      self.fsync_names()
    except OSError as error:
      raise self._unwritable(error) from error

  def close(self) -> None:
    """Closes all files and releases the lock; every later call but `close` raises OSError."""
    for name in list(self._open):
      self._close(name)
    for descriptor in (self._directory, self._lock):
      if descriptor >= 0:
        os.close(descriptor)
    self._directory = self._lock = -1

  def _write_direct(self, descriptor: int, views: Sequence[memoryview]) -> Sequence[memoryview]:
    """Writes whole blocks to a new file. Returns what is left: all of it on a file system that has
    no such writes, the end if the disk becomes full."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
      fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
      if self._aligned is None:
        self._aligned = memoryview(mmap.mmap(-1, MOST_BYTES))
      while count := min(sum(map(len, views)), MOST_BYTES) // BLOCK * BLOCK:
        done = 0  # the copy holds the interpreter lock for a tenth of a millisecond
        for view in _cut(views, count)[0]:
          self._aligned[done : done + len(view)] = view
          done += len(view)
        written = os.write(descriptor, self._aligned[:count])
        _, views = _cut(views, written)
        if written < count:
          break
    except OSError as error:
      if error.errno not in _NOT_DIRECT:
        raise
    finally:
      fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return views

  def _require_open(self) -> None:
    """Raises OSError after `close`: another process may have the lock by then."""
    if self._directory < 0:
      raise OSError(errno.EBADF, f'{self.place} is closed')

  def _close(self, name: str) -> None:
    if name in self._open:
      os.close(self._open.pop(name))

  def _unwritable(self, error: OSError) -> DirectoryError:
    return DirectoryError(
      f'{self.place} is not writable: {error}. Not started. Check its owner, its mode and the '
      f'space on its disk (this process is user {os.geteuid()}).'
    )


def _write(descriptor: int, views: Sequence[memoryview]) -> None:
  left = [view for view in views if len(view)]
  while left:
    written = os.writev(descriptor, left[:MOST_BUFFERS])
    if not written:
      raise OSError(errno.EIO, 'the disk took nothing')
    _, left = _cut(left, written)  # a full disk takes a part; the next write fails


def _cut(
  views: Sequence[memoryview], count: int
) -> tuple[Sequence[memoryview], Sequence[memoryview]]:
  """The first `count` bytes, and the others."""
  for index, view in enumerate(views):
    if count < len(view):
      return [*views[:index], view[:count]], [view[count:], *views[index + 1 :]]
    count -= len(view)
  return views, []


def _holder(descriptor: int) -> tuple[str, str]:
  """Names the process that wrote the lock file, and what to do."""
  remedy = 'Stop that process, or choose another folder or learner id.'
  try:
    holder = safe_json.parse(os.pread(descriptor, 4096, 0))
    role, host = (''.join(filter(str.isprintable, holder[name])) for name in ('role', 'host'))
    pid = int(holder['pid'])
  except (OSError, ValueError, TypeError, KeyError):
    return 'another process', remedy  # which has not written its name yet
  if (pid, host) == (os.getpid(), host_name()):
    return f'{role} pid {pid} on {host}, which is this process itself', (
      'An earlier run of this program has not ended: wait for its end, or restart the program (in '
      'a notebook, the kernel), or choose another folder or learner id.'
    )
  return f'{role} pid {pid} on {host}', remedy
