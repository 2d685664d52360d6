"""The files of a corpus, the documents in them, and a cache of what is made of them. Imports no
jax, so a run without any text is refused before it begins.

| a file | is |
|---|---|
| *.jsonl, *.ndjson | a document in each line: the string `text` of its object |
| *.parquet | a document in each row: the string in its column `text`; needs pyarrow |
| *.array_record | a document in each record |
| hidden, an editor's copy, compressed, binary | left out and counted; alone refused |
| anything else | one document |

The first bytes of a file say whether it is compressed or binary. Rows without a text (null) are
left out and counted; a value that is no text is refused.
"""

import collections
import fcntl
import functools
import glob
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence

from diloco_jax.storage import files, folders, json_files

HELD_OUT_OF_1000 = 30
_COPIES = ('~', '.swp', '.swo', '.bak', '.orig', '.tmp')
_COMPRESSED = {  # by their first bytes
  b'\x1f\x8b': 'gzip',
  b'BZh': 'bzip2',
  b'\xfd7zXZ': 'xz',
  b'\x28\xb5\x2f\xfd': 'zstd',
  b'PK\x03\x04': 'zip',
  b'7z\xbc\xaf': '7z',
}
_LOOKED_AT = 8192  # first bytes; a file of text has no zero byte there
_SKIPPED_DIRECTORIES = frozenset({'__pycache__', 'site-packages', 'dist-packages'})
_say_once = functools.cache(lambda text: print(text, file=sys.stderr, flush=True))


def list_files(source: str) -> list[tuple[str, str]]:
  """Returns sorted (relative name, path); names use '/' so that hashes agree on every system. What
  is no text (top of this file) or no regular file is left out, and named once.

  Raises:
    ValueError: there is no file; the one that was named is no text; a package is missing.
  """
  if source == 'stdlib':
    root = sysconfig.get_path('stdlib')
    paths = _walk(root, '.py')
  elif os.path.isdir(source):
    root, paths = source, _text_of(source, _walk(source, ''))
  elif os.path.isfile(source):
    root, paths = '', [source]
    if what := _no_text(source):
      raise ValueError(
        f'corpus {source!r} is {what}, no text: unpack or convert it to text, *.jsonl or *.parquet'
      )
  else:
    root, found = '', [p for p in glob.glob(source, recursive=True) if not os.path.isdir(p)]
    paths = _text_of(os.path.dirname(source.partition('*')[0]), found)
  paths = [path for path in paths if _is_regular(path)]
  root = root or os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths] or ['/'])
  if not paths:
    raise ValueError(
      f"corpus {source!r} has no files: use 'stdlib', a directory that holds "
      'files, or a glob that matches some'
    )
  if any(p.endswith('.parquet') for p in paths) and not importlib.util.find_spec('pyarrow'):
    raise ValueError(
      f'corpus {source!r} has *.parquet files, which need the package pyarrow: pip install pyarrow'
    )
  return sorted((os.path.relpath(p, root).replace(os.sep, '/'), p) for p in paths)


def _walk(root: str, suffix: str) -> list[str]:
  paths = []
  for directory, subdirectories, names in os.walk(root):
    subdirectories[:] = [d for d in subdirectories if d not in _SKIPPED_DIRECTORIES]
    links = [d for d in subdirectories if os.path.islink(os.path.join(directory, d))]
    paths += [os.path.join(directory, name) for name in names + links if name.endswith(suffix)]
  return paths


def _text_of(root: str, paths: Sequence[str]) -> list[str]:
  """Those of the files in `root` that are text; the others are counted, and said once."""
  kept, left_out = [], collections.defaultdict(list)
  for path in sorted(paths):
    parts = os.path.relpath(path, root or '.').split(os.sep)
    is_hidden = any(part.startswith('.') and part != '..' for part in parts)
    what = 'hidden' if is_hidden else 'a copy' if path.endswith(_COPIES) else _no_text(path)
    (left_out[what] if what else kept).append(path)
  if left_out:
    told = (f'{len(some)} {what} ({os.path.basename(some[0])})' for what, some in left_out.items())
    _say_once(f'left out of the corpus in {root or "."}, as no text: {", ".join(told)}')
  return kept


def _no_text(path: str) -> str:
  """What a file is by its first bytes, if that is no text; ''."""
  try:
    stat = os.stat(path)
    return _looked_at(path, stat.st_size, stat.st_mtime_ns)
  except OSError:
    return ''  # who reads it says why it cannot be read


@functools.lru_cache(maxsize=1 << 20)
def _looked_at(path: str, size: int, changed_ns: int) -> str:
  del size, changed_ns  # of the file as it was looked at
  if path.endswith(('.parquet', '.array_record')) or files.kind(path):
    return ''
  with open(path, 'rb') as file:
    first = file.read(_LOOKED_AT)
  packed = (name for magic, name in _COMPRESSED.items() if first.startswith(magic))
  return next(packed, 'binary' if b'\0' in first else '')


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
    yield from _texts(path, _parquet_rows(path))
  elif path.endswith(('.jsonl', '.ndjson')):
    yield from _texts(path, _json_lines(path))
  elif path.endswith('.array_record'):
    import grain

    yield from grain.sources.ArrayRecordDataSource([path])
  else:
    yield pathlib.Path(path).read_bytes()


def _texts(path: str, rows: Iterator[object]) -> Iterator[bytes]:
  """The texts of rows; null is none, and counted."""
  nulls = count = 0
  for count, text in enumerate(rows, 1):
    if text is None:
      nulls += 1
    elif isinstance(text, str):
      yield text.encode('utf-8', 'surrogateescape')
    else:
      raise ValueError(
        f'{path}: `text` of row {count} is {type(text).__name__}, no text: write a string there, '
        'or leave the file out'
      )
  if nulls:
    _say_once(f'{path}: {nulls:,} of {count:,} rows have no text (null), and are left out')


def _parquet_rows(path: str) -> Iterator[object]:
  from pyarrow import parquet

  rows = parquet.ParquetFile(path)
  if 'text' not in rows.schema_arrow.names:
    raise ValueError(
      f'{path} has no column `text`, only {", ".join(rows.schema_arrow.names)}: name the column so'
    )
  for some in rows.iter_batches(columns=['text']):
    yield from some['text'].to_pylist()


def _json_lines(path: str) -> Iterator[object]:
  with open(path, 'rb') as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        yield json.loads(line)['text']
      except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
          f'{path}: line {number} is no object with `text`: write each document as '
          '{"text": "..."}, or leave the file out'
        ) from error


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
