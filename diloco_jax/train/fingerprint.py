"""What is in the files that a user brings. Names, sizes and times of change do not show it: tar,
Nix and images make them equal for different files. So each byte is read, once on a machine; what
was in a file is remembered under device, inode, size and ctime in ns. The kernel moves the ctime
with each change, and no program can set it back. What such a memory could get
wrong:

* A file changes while it is read: refused, by its ctime behind the last byte.
* It changes twice within a tick of the clock: what is younger than _YOUNG_NS is not remembered.
* A ctime is of no kernel, but of an image, FAT or a bucket: one of whole seconds is not remembered.
* An inode or a device number was another file's: size and nanosecond would have to be equal, too.
  Hard links, bind mounts and cloned disks have the same content.
* A program writes to a mapping of the file: only its first write to a page moves the ctime, until
  the page is on the disk. So it is put there first, if it may not be. tmpfs has no disk.
* Another client of an NFS server changes a file: this one sees it within a minute (`acregmax`).
* The memory is torn or damaged: it has a checksum. It is another user's (XDG_CACHE_HOME): who can
  write there can also write the compiled programs beside it.
* Not seen are bits that a disk turns over, and writes to a device below its file system.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import time
from collections.abc import Iterable, Sequence

from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files

Files = Sequence[tuple[str, str]]  # name, path
Key = tuple[int, int, int, int]
_YOUNG_NS = 3 * 10**9  # many ticks of a clock that has parts of a second
_WRITTEN_NS = 120 * 10**9  # within which kernels write to a disk what has changed in memory


def of(listed: Files | pathlib.Path) -> str:
  """The fingerprint of some files, or of those in a folder: of their names and contents, in order.
  Raises ValueError: one cannot be read, or changes meanwhile."""
  listed = in_folder(listed) if isinstance(listed, pathlib.Path) else listed
  names, paths = [name for name, _ in listed], [path for _, path in listed]
  try:
    keys = [key(path) for path in paths]
    memory = folders.cache() / 'diloco_jax' / 'fingerprints' / combine(zip(names, keys))
    lasts = all(map(is_lasting, keys))
    with contextlib.suppress(OSError, ValueError):
      digest, check = memory.read_text('utf-8').split()
      if lasts and check == combine([digest]):
        return digest
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # hashes have no GIL
      digest = combine(zip(names, pool.map(_sha256, paths)))
    if [key(path) for path in paths] != keys:
      raise ValueError(f'{newest(listed)}, while it was read: start again when nobody writes it')
  except OSError as error:
    raise ValueError(f'cannot read {error.filename}: {error.strerror}') from error
  if lasts:
    with contextlib.suppress(OSError):  # the files are read again
      json_files.replace(memory, f'{digest} {combine([digest])}'.encode())
  return digest


def combine(parts: Iterable[object]) -> str:
  """One fingerprint of names and fingerprints."""
  return hashlib.sha256(repr([*parts]).encode()).hexdigest()[:32]


def key(path: str) -> Key:
  """What the content of a file may be remembered under, if `is_lasting`. Raises OSError."""
  status = os.stat(path)
  return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def is_lasting(file_key: Key) -> bool:
  return bool(file_key[-1] % 10**9) and file_key[-1] < time.time_ns() - _YOUNG_NS


def in_folder(path: str | os.PathLike) -> Files:
  """The files in a folder by their names there, or one file."""
  root = str(pathlib.Path(path))
  walked = os.walk(root) if os.path.isdir(root) else [('', (), [root])]
  paths = (os.path.join(parent, name) for parent, _, names in walked for name in names)
  return sorted((file[len(root) + 1 :], file) for file in paths)


def newest(listed: Files) -> str:
  """For people: which of some files has changed last on this machine, and when; '' of none."""
  times = [(os.stat(path).st_ctime, path) for _, path in listed if os.path.exists(path)]
  if not times:
    return ''
  at_s, path = max(times)
  return f'{path} changed last, {time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))}'


def _sha256(path: str) -> str:
  files_lib.require_file(path)
  with open(path, 'rb', buffering=0) as file:
    if os.fstat(file.fileno()).st_ctime_ns > time.time_ns() - _WRITTEN_NS:
      with contextlib.suppress(OSError):  # of a file system that only reads
        os.fsync(file)
    return hashlib.file_digest(file, 'sha256').hexdigest()
