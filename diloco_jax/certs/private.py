"""Files and folders that only this user may read."""

import contextlib
import fcntl
import os
import pathlib
import stat
from collections.abc import Iterator

_MAX_BYTES = 1 << 20  # of a certificate, a key or a request
OTHERS = stat.S_IRWXG | stat.S_IRWXO


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
def alone(folder: pathlib.Path) -> Iterator[None]:
  """Waits until no other process is in this block with the folder."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)


def objection(path: pathlib.Path) -> str:
  """Says why a file or folder is not of this user alone; '' if it is."""
  found = path.stat()
  if found.st_uid not in (os.geteuid(), 0):
    return f'{path} belongs to user {found.st_uid}, this is user {os.geteuid()}'
  if found.st_mode & OTHERS:
    right = '700' if stat.S_ISDIR(found.st_mode) else '600'
    return (
      f'{path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}): '
      f'chmod {right} {path}'
    )
  return ''


def read(path: pathlib.Path) -> bytes:
  """The content of a certificate, a key or a request, perhaps of another person. Raises OSError,
  and ValueError if it is far too large to be one."""
  with open(path, 'rb') as file:
    data = file.read(_MAX_BYTES + 1)
  if len(data) > _MAX_BYTES:
    raise ValueError(f'{path} has more than {_MAX_BYTES} bytes: it is no certificate and no key')
  return data
