"""Files and folders that only this user may read."""

import contextlib
import fcntl
import os
import pathlib
import stat
from collections.abc import Iterator

_MAX_BYTES = 1 << 20  # of a certificate, a key or a request


def make_folder(folder: pathlib.Path) -> None:
  """Makes a folder of this user alone, and those above it. Raises FileExistsError or OSError."""
  folder.parent.mkdir(parents=True, exist_ok=True)
  folder.mkdir(mode=0o700)
  folder.chmod(0o700)  # whatever the umask takes away


def write_new(path: pathlib.Path, data: bytes) -> None:
  """Writes a file that does not exist yet. Raises FileExistsError or OSError."""
  with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def replace(path: pathlib.Path, data: bytes) -> None:
  """Writes a file at once: a reader finds the old one or the new one, whole. Raises OSError, and
  then the old one is there."""
  partial = path.with_name(f'{path.name}.{os.getpid()}.new')
  partial.unlink(missing_ok=True)  # of a killed process: in a container all have the same number
  try:
    write_new(partial, data)
    partial.replace(path)
  except OSError:
    partial.unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def lock(folder: pathlib.Path) -> Iterator[None]:
  """Waits until no other process is in this block with the folder."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)


def objection(path: pathlib.Path) -> str:
  """Says why a file or folder is not of this user alone; '' if it is."""
  status = path.stat()
  if status.st_uid not in (os.geteuid(), 0):
    return f'{path} belongs to user {status.st_uid}, this is user {os.geteuid()}'
  mode = stat.S_IMODE(status.st_mode)
  if mode & 0o077:
    right = '700' if stat.S_ISDIR(status.st_mode) else '600'
    return f'{path} is open to other users (mode {mode:04o}): chmod {right} {path}'
  return ''


def read(path: pathlib.Path, max_bytes: int = _MAX_BYTES) -> bytes:
  """The content of a certificate, a key, a request or an allowlist, perhaps of another person.
  Raises OSError, and ValueError if it is no regular file or far too large to be one of these."""
  at_once = lambda name, flags: os.open(name, flags | os.O_NONBLOCK)  # a pipe's other end may wait
  with open(path, 'rb', opener=at_once) as file:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
      raise ValueError(f'{path} is no regular file')
    data = file.read(max_bytes + 1)
  if len(data) > max_bytes:
    raise ValueError(f'{path} has more than {max_bytes} bytes: it is none of this package')
  return data
