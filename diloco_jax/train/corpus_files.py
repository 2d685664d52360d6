"""The files of a corpus, the documents in them, and a cache of what is made of them. Imports no
jax, so a run without any text is refused before it begins.

A file is one document; each row of `text` of a *.parquet file, and each record of a *.array_record
file, is one.
"""

import fcntl
import functools
import glob
import hashlib
import os
import pathlib
import shutil
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence

from diloco_jax.storage import files, folders, json_files

HELD_OUT_OF_1000 = 30
_SKIPPED_DIRECTORIES = frozenset({'__pycache__', 'site-packages', 'dist-packages'})
_say_once = functools.cache(lambda text: print(text, file=sys.stderr, flush=True))


def list_files(source: str) -> list[tuple[str, str]]:
  """Returns sorted (relative name, path); names use '/' so that hashes agree on every system. What
  is no regular file nor a link to one is left out, and named once.

  Raises:
    ValueError: there is no file.
  """
  if source == 'stdlib':
    root = sysconfig.get_path('stdlib')
    paths = _walk(root, '.py')
  elif os.path.isdir(source):
    root, paths = source, _walk(source, '')
  else:
    root, paths = '', [p for p in glob.glob(source, recursive=True) if not os.path.isdir(p)]
  paths = [path for path in paths if _is_regular(path)]
  root = root or os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths] or ['/'])
  if not paths:
    raise ValueError(
      f"corpus {source!r} has no files: use 'stdlib', a directory that holds "
      'files, or a glob that matches some'
    )
  return sorted((os.path.relpath(p, root).replace(os.sep, '/'), p) for p in paths)


def _walk(root: str, suffix: str) -> list[str]:
  paths = []
  for directory, subdirectories, names in os.walk(root):
    subdirectories[:] = [d for d in subdirectories if d not in _SKIPPED_DIRECTORIES]
    links = [d for d in subdirectories if os.path.islink(os.path.join(directory, d))]
    paths += [os.path.join(directory, name) for name in names + links if name.endswith(suffix)]
  return paths


def _is_regular(path: str) -> bool:
  """Whether it is a regular file, or a link to one."""
  if what := files.kind(path):
    _say_once(f'{path} is {what}: it is left out of the corpus, which is made of regular files')
  return not what


def documents(listed: Sequence[tuple[str, str]]) -> Iterator[tuple[bool, bytes]]:
  """Of every document whether it is held out, by a hash of its name, and its text. Raises
  ValueError: a file is not readable."""
  for name, path in listed:
    try:
      for number, text in enumerate(_read(path)):
        one = f'{name}#{number}' if number else name
        crc = zlib.crc32(one.encode('utf-8', 'surrogateescape'))
        yield crc % 1000 < HELD_OUT_OF_1000, text
    except (ImportError, LookupError, OSError) as error:
      why = getattr(error, 'strerror', None) or error
      raise ValueError(f'cannot read {path}: {why}; make it readable or leave it out') from error


def _read(path: str) -> Iterator[bytes]:
  if path.endswith('.parquet'):
    from pyarrow import parquet

    for rows in parquet.ParquetFile(path).iter_batches(columns=['text']):
      yield from (str(text).encode() for text in rows['text'].to_pylist())
  elif path.endswith('.array_record'):
    import grain

    yield from grain.sources.ArrayRecordDataSource([path])
  else:
    yield pathlib.Path(path).read_bytes()


def cached(what: str, source: str, build: Callable[[pathlib.Path], None]) -> pathlib.Path:
  """A folder with what `build` makes of a corpus: once for all processes of this machine, which
  wait for it, and again if the name, size or time of a file changes. It is whole or not there; who
  dies while it builds leaves it to the next. Raises ValueError."""
  try:
    stats = [(name, os.stat(path)) for name, path in list_files(source)]
    made_of = [what, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)]
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()
    folder = folders.cache() / 'diloco_jax' / 'corpora' / digest[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix('.lock'), 'w', encoding='utf-8') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      if not folder.is_dir():
        new = folder.with_suffix('.new')
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        build(new)
        json_files.fsync_tree(new)
        new.rename(folder)
  except OSError as error:
    raise ValueError(f'{error}; mend it, make space, or set XDG_CACHE_HOME') from error
  return folder
