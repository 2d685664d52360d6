"""The store of a run: whole objects by name, in a folder or a bucket, for what outlives a machine.

TensorStore reads and writes them, as it does for Orbax, with Google Cloud Storage and with files
alike: an object is replaced at once, is durable on return, and has a *generation* that changes with
every write. A write may require a generation, so that of two processes that replace an object one
succeeds. Large files travel in parts, so that a copy needs little memory whatever it copies: they
are written by gcsfs, as TensorStore writes whole objects, or into the folder.

The answer to a write can be lost after the write was carried out. TensorStore then sends it again,
and the required generation is gone; so a write whose generation does not match reads the object,
and has succeeded if it finds its own bytes. After a StoreError a write may have been carried out,
or still be on its way: write the same bytes again, or read.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorstore

from diloco_jax.storage import folders, json_files

_ABSENT = b'\x02'  # TensorStore's generation of what does not exist
PART_BYTES = 8 << 20  # of a file
LIMIT_S = 30.0  # for the answer to a small request
_BYTES_PER_S = 1 << 19  # of the slowest network that is waited for
# TensorStore's own 32 attempts would take a quarter of an hour; its callers try again themselves.
_RETRIES = {'max_retries': 4, 'initial_delay': '100ms', 'max_delay': '2s'}


class StoreError(RuntimeError):
  """The store could not be read or written: one line."""


class Object(NamedTuple):
  """What was read."""

  data: bytes
  generation: bytes


class Store:
  """The objects below a place. Any thread may call it.

  Args:
    place: a folder, made when something is written, or gs://BUCKET/PREFIX.
    limit_s: how long a call may take, and longer for many bytes.

  Attributes:
    begun: a run has begun there. If it has none of its signs then it is *away*, as below a file
      system that is not mounted: it is read as empty, and nothing is written into its place.
  """

  def __init__(self, place: str, limit_s: float = LIMIT_S):
    self.place, self._limit_s, self.begun = place.rstrip('/'), limit_s, False
    self._folder: pathlib.Path | None = None
    if place.startswith(folders.BUCKET):
      bucket, _, prefix = self.place.removeprefix(folders.BUCKET).partition('/')
      spec = {'driver': 'gcs', 'bucket': bucket, 'path': f'{prefix}/', 'context': {}}
      spec['context']['gcs_request_retries'] = _RETRIES
    else:
      self._folder = pathlib.Path(os.path.abspath(self.place))  # without ..
      spec = {'driver': 'file', 'path': f'{self._folder}/'}
    self._objects = self._do('', tensorstore.KvStore.open(spec))

  def read(self, name: str, size: int = 0) -> Object | None:
    """An object, None if there is none. `size`: of a large one. Raises StoreError."""
    result = self._do(name, self._objects.read(name), size)
    return None if result.state == 'missing' else Object(result.value, result.stamp.generation)

  def is_there(self) -> bool:
    """Whether a run has begun there. Raises StoreError."""
    return any(map(self.names, folders.SIGNS))

  def put(self, name: str, data: bytes) -> None:
    """Writes an object, or replaces it. Raises StoreError."""
    self._require_not_away()
    self._do(name, self._objects.write(name, data), len(data))

  def put_file(self, name: str, path: pathlib.Path) -> None:
    """Writes an object, or replaces it, with the bytes of a file. Raises StoreError, OSError."""
    if path.stat().st_size <= PART_BYTES:
      self.put(name, path.read_bytes())
      return
    self._require_not_away()
    with open(path, 'rb') as file:
      parts = iter(lambda: file.read(PART_BYTES), b'')
      if self._folder:
        json_files.replace(self._folder / name, parts)
        return
      try:
        with json_files.as_os_errors(), folders.place(f'{self.place}/{name}').open('wb') as copy:
          copy.writelines(parts)
      except OSError as error:
        raise StoreError(f'{self.place}/{name}: {error}') from error

  def parts(self, name: str, size: int) -> Iterator[bytes]:
    """The bytes of an object of this size, fewer of a shorter one. Raises StoreError."""
    for start in range(0, size, PART_BYTES):
      span = slice(start, min(start + PART_BYTES, size))
      try:
        yield self._do(name, self._objects.read(name, byte_range=span), PART_BYTES).value
      except StoreError as error:
        if 'OUT_OF_RANGE' not in str(error):
          raise
        return

  def put_new(self, name: str, data: bytes) -> bool:
    """Writes an object that does not exist; returns whether it exists now with these bytes. Raises
    StoreError."""
    return self.replace(name, data, None) is not None

  def replace(self, name: str, data: bytes, generation: bytes | None) -> bytes | None:
    """Writes an object if it has this generation (None: if there is none); returns its new one, or
    None if another write came before. Raises StoreError."""
    self._require_not_away()
    write = self._objects.write(name, data, if_equal=generation or _ABSENT)
    if new_generation := self._do(name, write, len(data)).generation:
      return new_generation
    stored = self.read(name, len(data))
    return stored.generation if stored and stored.data == data else None

  def names(self, prefix: str = '') -> list[str]:
    """The names of the objects that begin so, sorted. Raises StoreError."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ''
    names = self._do(prefix, self._objects.list(tensorstore.KvStore.KeyRange(prefix, end)))
    return sorted(map(bytes.decode, names))

  def remove(self, *names: str) -> None:
    """Removes objects; one that does not exist is no error. Raises StoreError."""
    for name in names:
      self._do(name, self._objects.write(name, None))
      with contextlib.suppress(OSError):  # a folder is not empty
        while self._folder and (name := os.path.dirname(name)):
          (self._folder / name).rmdir()

  def _require_not_away(self) -> None:
    if self.begun and folders.is_away(self.place):
      raise StoreError(
        f'{self.place} is away: it has neither {" nor ".join(folders.SIGNS)}. Nothing was made '
        'there. Is its file system mounted?'
      )

  def _do(self, name: str, future: Any, size: int = 0) -> Any:
    limit_s = self._limit_s + size / _BYTES_PER_S
    try:
      return future.result(timeout=limit_s)
    except TimeoutError:
      future.cancel()
      why = f'no answer within {limit_s:.0f} s'
    except Exception as error:  # TensorStore raises many kinds
      why = ' '.join(str(error).split()).split(' [source locations=')[0][:300]
    self._require_not_away()
    raise StoreError(f'{self.place}/{name}: {why}')
