"""Files of a run's folder that are read or replaced as a whole: JSON and short texts.

Nothing here follows a symbolic link or trusts a file: it must be a regular one of a limited size,
and its JSON is read by protocol/safe_json.py. A file that is replaced is complete and durable on
return, and after an error it is as it was before.

Some functions take an object of a bucket, too: it is complete and durable as soon as it exists, and
there are no links.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from diloco_jax.protocol import safe_json
from diloco_jax.protocol.tape import codec

Place = pathlib.Path | epath.Path  # of a file system; of a bucket, gs://...
MAX_BYTES = 16 << 20
_SEAL = 'sha256'
_NUMBER = re.compile(r'0|[1-9][0-9]{0,17}', re.ASCII)


def read(path: Place, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
  """The JSON object in a file. Raises Unreadable, or OSError if it cannot be opened."""
  return safe_json.parse_object(read_bytes(path, max_bytes), max_bytes)


def read_bytes(path: Place, max_bytes: int) -> bytes:
  """The content of a regular file. Raises Unreadable if it is none, a link or too large; OSError if
  it cannot be opened."""
  if not isinstance(path, pathlib.Path):
    with as_os_errors():
      if (size := path.stat().length) > max_bytes:
        raise safe_json.Unreadable(f'it has {size} bytes, at most {max_bytes} are read')
      return path.read_bytes()
  if path.is_symlink():
    raise safe_json.Unreadable('it is a symbolic link, which is not followed')
  # Without O_NONBLOCK, opening a pipe would wait for its other end.
  descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
  try:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
      raise safe_json.Unreadable('it is not a regular file')
    if status.st_size > max_bytes:
      raise safe_json.Unreadable(f'it has {status.st_size} bytes, at most {max_bytes} are read')
    with open(descriptor, 'rb', closefd=False) as file:
      return file.read(status.st_size + 1)  # not max_bytes: it is allocated at once
  finally:
    os.close(descriptor)


def require_keys(where: object, value: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
  """A JSON object, or that in a text of bytes, that has these keys, each of its type (a hint, as
  `int | None`); it may have others. Raises ValueError, which names the file and the key."""
  try:
    value = safe_json.parse(value, finite=False) if isinstance(value, bytes) else value
    values = codec.decode(dict[str, Any], value, 'it')
    for key, hint in keys.items():
      codec.decode(hint, values.get(key), f'`{key}`')
  except (codec.TapeError, safe_json.Unreadable) as error:
    raise ValueError(
      f'{where}: {error}. Nothing was changed: mend the file, or copy it again from its source'
    ) from None
  return values


def sha256(values: dict[str, Any]) -> str:
  """The SHA-256 of a JSON object, as hex digits, whatever the order of its names is."""
  text = json.dumps(values, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()


def seal(values: dict[str, Any]) -> dict[str, Any]:
  """A JSON object with its own SHA-256, which `unseal` compares."""
  return {**values, _SEAL: sha256(values)}


def unseal(values: dict[str, Any]) -> dict[str, Any]:
  """The object of `seal`. Raises Unreadable: it is another one."""
  inside = {name: value for name, value in values.items() if name != _SEAL}
  if values.get(_SEAL) != sha256(inside):
    raise safe_json.Unreadable('it is not what was written')
  return inside


def write(path: pathlib.Path, value: Any) -> None:
  """Replaces a file by JSON, durably; makes its folder. Raises OSError."""
  replace(path, json.dumps(value, indent=1, allow_nan=False).encode() + b'\n')


def replace(path: pathlib.Path, data: bytes | Iterable[bytes]) -> None:
  """Replaces a file, by one buffer or several, durably; makes its folder. A link of its name is
  replaced, not followed. Raises OSError, and what their iterator raises."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_name(path.name + '.new')
  new.unlink(missing_ok=True)  # of a killed process
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
  try:
    with open(os.open(new, flags, 0o666), 'wb') as file:
      file.writelines((data,) if isinstance(data, bytes) else data)
      file.flush()
      os.fsync(file.fileno())
    new.replace(path)
  except BaseException:
    new.unlink(missing_ok=True)
    raise
  fsync(path.parent)


def fsync(path: pathlib.Path) -> None:
  """On return, a file, or the names in a folder, are durable. Raises OSError."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def fsync_tree(folder: Place) -> None:
  """On return, everything in a folder is durable, and its name. Raises OSError."""
  if not isinstance(folder, pathlib.Path):
    return
  for parent, _, names in os.walk(folder, topdown=False):
    for path in (*(pathlib.Path(parent, name) for name in names), pathlib.Path(parent)):
      fsync(path)
  fsync(folder.parent)


def rmtree(folder: Place) -> None:
  """Removes a folder and all that is in it. Raises OSError."""
  if isinstance(folder, pathlib.Path):
    shutil.rmtree(folder)
  else:
    with as_os_errors():
      folder.rmtree()


def move(folder: Place, target: Place) -> None:
  """Gives a folder another name, durably; makes the folder of that name. Raises OSError."""
  with as_os_errors():
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(folder, pathlib.Path):
      folder.rename(target)
      fsync(folder.parent)
    else:
      if not target.parent.exists():  # a folder of a bucket exists once something is in it
        (target.parent / 'moved').write_text('here', 'utf-8')
      folder.rename(target)


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
  """Turns what the libraries of a bucket raise into an OSError."""
  try:
    yield
  except (OSError, ValueError):
    raise
  except Exception as error:  # of gcsfs, aiohttp and google.auth
    raise OSError(f'{type(error).__name__}: {error}') from error


def number(name: str) -> int | None:
  """The number that is a file's name; None if it is not one that this package writes.

  >>> number('12'), number('012'), number('٣')
  (12, None, None)
  """
  return int(name) if _NUMBER.fullmatch(name) else None


def numbers(names: Iterable[str]) -> list[int]:
  """The numbers among the names of files, ascending; other names are left out."""
  return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def files_in(folder: Place) -> list[pathlib.Path]:
  """The regular files in a folder and its folders, sorted; none of a bucket. Raises Unreadable if
  there is anything else, and OSError."""
  if not isinstance(folder, pathlib.Path):
    return []
  _require_kind(folder, stat.S_ISDIR)
  files, folders = [], [folder]
  while folders:
    with os.scandir(folders.pop()) as entries:
      for entry in entries:
        path = pathlib.Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
          folders.append(path)
        else:
          _require_kind(path, stat.S_ISREG)
          files.append(path)
  return sorted(files)


def _require_kind(path: pathlib.Path, is_kind: Any) -> None:
  if not is_kind(path.lstat().st_mode):
    what = 'a symbolic link' if path.is_symlink() else 'no plain file or folder'
    raise safe_json.Unreadable(f'{path} is {what}, which is not followed')
