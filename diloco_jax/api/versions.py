"""The newest versions of a model side by side, for programs that read while the next is written.

  OUT/versions/N-H/   version N: whole, durable, with its manifest (states.py); H is of its files
  OUT/index.json      the newest version, its path, and the size and SHA-256 of each of its files
  OUT/latest          a symbolic link to it

A version gets its name once it is written, and never changes after that. Then index and link are
replaced, each at once: what they name is whole at every moment, also after a kill.
"""

import contextlib
import pathlib
import re
import shutil
from collections.abc import Callable

from diloco_jax.storage import files as files_lib
from diloco_jax.storage import json_files, states

INDEX, LATEST = 'index.json', 'latest'
_VERSIONS, _NEW, _OLD = 'versions', 'new', 'old'
_NAME = re.compile(r'(\d+)-[0-9a-f]{8}')


class Versions:
  """The newest `keep` versions in a folder, which this process alone writes until `close`."""

  def __init__(self, folder: pathlib.Path, keep: int):
    """Makes the folder; removes what a killed process has left of a version. Raises DirectoryError:
    another process writes there, or nothing can be written; OtherFormat, OSError."""
    self._folder, self._keep = folder, keep
    lock = files_lib.Files(folder)
    lock.lock('follower')
    self.close = lock.close
    self._remove_parts()
    self._kept: list[pathlib.Path] = []  # the next to be removed first
    for path in (folder / _VERSIONS).glob('*'):
      if _NAME.fullmatch(path.name):
        try:
          states.verify(path)
          self._kept.append(path)
        except states.Damaged:
          shutil.rmtree(path)
    latest = (folder / LATEST).resolve().name
    self._kept.sort(key=lambda path: (path.name == latest, int(path.name.split('-')[0])))

  def add(self, number: int, write: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """Makes a version the newest one, and returns its folder. `write` writes it, to a new folder.
    After its error, or OSError, the newest is what it was."""
    new = self._folder / _VERSIONS / _NEW
    try:
      write(new)
      files = states.write(new, f'version/{number}', (), {'version': number}).files
      path = new.with_name(f'{number}-{json_files.sha256({"files": files})[:8]}')
      if not path.exists():  # as it does where a killed process has written the same
        json_files.move(new, path)
    finally:
      self._remove_parts()
    self._kept = [*(kept for kept in self._kept if kept != path), path]
    relative = path.relative_to(self._folder)
    index = {'version': number, 'path': relative.as_posix(), 'files': files}
    json_files.write(self._folder / INDEX, json_files.seal(index))
    link = self._folder / f'{LATEST}.{_NEW}'
    link.unlink(missing_ok=True)
    link.symlink_to(relative)
    link.replace(self._folder / LATEST)
    json_files.fsync(self._folder)
    while len(self._kept) > self._keep:
      with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
        self._kept.pop(0).rename(new.with_name(_OLD))  # no part of it is there under its name
      self._remove_parts()
    return path

  def _remove_parts(self) -> None:
    for name in (_NEW, _OLD):
      shutil.rmtree(self._folder / _VERSIONS / name, ignore_errors=True)
