"""The files of a corpus, the documents in them, and a cache of what is made of them. Imports no
jax, so a run without any text is refused before it begins.

| a file, whatever the case of its suffix | is |
|---|---|
| *.jsonl, *.ndjson | a document in each line: the string `data.field` of its object |
| *.parquet | a document in each row: the string in the column `data.field`; needs pyarrow |
| *.array_record | a document in each record |
| *.csv, *.json, ..., a container by its first bytes | left out and counted; alone refused |
| hidden, an editor's copy | left out and counted; alone read |
| a link, symbolic or hard, to one of the other files | left out and counted |
| *.txt, *.md, what is UTF-8 without a zero byte from end to end | one document |
| anything else | binary: left out and counted; alone refused |

A document that is null, or has a zero byte (an end, data.py) or half a surrogate pair, is left out
and counted. A value of another type is refused, and a record that is not text. A *.txt or *.md that
is not UTF-8 is kept, with a warning.

Whether a document is held out is decided by a hash of its text, not by a name, a place or a number:
so a copy, which is counted, is on the side of its original, also with other white space around it.
"""

import collections
import contextlib
import fcntl
import functools
import glob
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from diloco_jax import version
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files
from diloco_jax.train import fingerprint

HELD_OUT_OF_1000 = 30
_COPIES = ('~', '.swp', '.swo', '.bak', '.orig', '.tmp')
_FIELDS = ('.csv', '.tsv', '.json', '.ipynb')
_ROWS = ('.jsonl', '.ndjson', '.parquet', '.array_record')
_PLAIN = ('.txt', '.md')
_CONTAINER = re.compile(  # by its first bytes
  rb'(?P<gzip>\x1f\x8b)|(?P<bzip2>BZh)|(?P<xz>\xfd7zXZ)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<lz4>\x04"M\x18)|'
  rb'(?P<zip>PK\x03\x04)|(?P<seven_zip>7z\xbc\xaf)|(?P<PDF>%PDF)|(?P<PostScript>%!PS)|(?P<RTF>{\\rtf)|'
  rb'(?P<UTF16>\xff\xfe|\xfe\xff)|(?P<LFS_pointer>version https://git-lfs)'
)
_LOOKED_AT = 8192  # first bytes; a file of text has no zero byte there
_SKIPPED_DIRECTORIES = frozenset({'__pycache__', 'site-packages', 'dist-packages'})
say_once = functools.cache(lambda text: print(text, file=sys.stderr, flush=True))


def list_files(source: str) -> list[tuple[str, str]]:
  """Returns sorted (relative name, path); names use '/', so that all systems sort them alike. What
  is no text (top of this file) or no regular file is left out, and named once.

  Raises:
    ValueError: there is no file of text; a package is missing.
  """
  left_out = ''
  if source == 'stdlib':
    root = sysconfig.get_path('stdlib')
    paths = list(filter(os.path.isfile, _walk(root, '.py')))
  elif os.path.isdir(source):
    root, (paths, left_out) = source, _text_of(source, _walk(source, ''))
  elif os.path.isfile(source):
    root, left_out = '', _no_text(source)
    paths = [] if left_out else [source]
  else:
    root, matches = '', [p for p in glob.glob(source, recursive=True) if not os.path.isdir(p)]
    paths, left_out = _text_of(os.path.dirname(source.partition('*')[0]), matches)
  links_last = sorted(paths, key=lambda path: (os.path.islink(path), path))
  originals = {os.stat(path)[1:3]: path for path in reversed(links_last)}  # by inode and device
  if (links := len(paths) - len(originals)) and source != 'stdlib':
    say_once(f'left out of the corpus {source!r}: {links} links to its other files')
  paths = [*originals.values()]
  root = root or os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths] or ['/'])
  if not paths:
    raise ValueError(
      f"corpus {source!r} has no text, only {left_out or 'no files'}: use 'stdlib', or files of "
      'text in UTF-8, *.jsonl or *.parquet (data.field names the field of the text)'
    )
  if any(p.lower().endswith('.parquet') for p in paths) and not importlib.util.find_spec('pyarrow'):
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


def _text_of(root: str, paths: Sequence[str]) -> tuple[list[str], str]:
  """(the files in `root` that are text, the counts of the others, which are printed once). Only a
  regular file is text, or a link to one: to open a pipe can take for ever."""
  kept, left_out = [], collections.defaultdict(list)
  for path in sorted(paths):
    parts = os.path.relpath(path, root or '.').split(os.sep)
    is_hidden = any(part.startswith('.') and part != '..' for part in parts)
    is_copy = path.lower().endswith(_COPIES)
    what = files_lib.kind(path) or (
      'hidden' if is_hidden else 'a copy' if is_copy else _no_text(path)
    )
    (left_out[what] if what else kept).append(path)
  counts = (f'{len(some)} {what} ({os.path.basename(some[0])})' for what, some in left_out.items())
  if counted := ', '.join(counts):
    say_once(f'left out of the corpus in {root or "."}, as no text: {counted}')
  return kept, counted


def _no_text(path: str) -> str:
  """What a file is, if it is no text (top of this file); ''."""
  try:
    key = fingerprint.key(path)
    return (_looked_at if fingerprint.is_lasting(key) else _looked_at.__wrapped__)(path, key)
  except OSError:
    return ''  # its reader raises the reason


@functools.lru_cache(maxsize=1 << 20)
def _looked_at(path: str, key: fingerprint.Key) -> str:
  del key  # part of the cache's key
  name = path.lower()
  if name.endswith(_FIELDS):
    return name[name.rindex('.') :]
  if name.endswith(_ROWS):
    return ''
  with open(path, 'rb') as file:
    first = file.read(_LOOKED_AT)
  if container := _CONTAINER.match(first):
    return str(container.lastgroup)
  if name.endswith(_PLAIN):
    return 'binary' if b'\0' in first else ''
  with contextlib.suppress(UnicodeDecodeError), open(path, encoding='utf-8', newline='') as text:
    if b'\0' not in first and all(
      '\0' not in part for part in iter(lambda: text.read(1 << 20), '')
    ):
      return ''
  return 'binary'


def documents(
  listed: fingerprint.Files, field: str = 'text', once: bool = False
) -> Iterator[tuple[bool, bytes]]:
  """Yields for every document whether it is held out, and its text. `once`: none is held out, and
  copies are left out. Prints at the end how many are copies, and how many are not UTF-8. Raises
  ValueError: a file cannot be read, or has a row without `field` or with no text in it."""
  others, seen, copies = [], set(), 0
  for _, path in listed:
    try:
      for text in _texts(path, *_rows(path, field)):
        if path.lower().endswith(_PLAIN) and not _is_utf8(text):
          others.append(path)
        number = int.from_bytes(hashlib.sha256(text.strip()).digest()[:8])
        is_copy = number in seen and text.strip() != b''
        copies += is_copy
        seen.add(number)
        if not (once and is_copy):
          yield not once and number % 1000 < HELD_OUT_OF_1000, text
    except Exception as error:  # the libraries raise many kinds
      why = getattr(error, 'strerror', None) or error
      raise ValueError(
        f'cannot read {path}: {why}; nothing was changed: mend the file, or leave it out'
      ) from error
  if copies and not path.startswith(sysconfig.get_path('stdlib')):  # else nobody can mend it
    say_once(f'{copies:,} documents are copies of others: none is held out without its original')
  if others:
    say_once(
      f'{len(others):,} documents are not UTF-8 (the first: {others[0]}), so their letters beyond '
      'ASCII are read as others: convert them, as with iconv -f ENCODING -t UTF-8'
    )


def has_both(listed: fingerprint.Files, field: str) -> bool:
  """Whether some text is held out, and some is not. Raises as `documents`."""
  sides = (held_out for held_out, text in documents(listed, field) if text.strip())
  first = next(sides, None)
  return any(side != first for side in sides)


def _rows(path: str, field: str) -> tuple[type, Iterator[Any]]:
  """The rows of a file, and what type the text in one has."""
  name = path.lower()
  if name.endswith('.parquet'):
    return str, _parquet_rows(path, field)
  if name.endswith(('.jsonl', '.ndjson')):
    return str, _json_lines(path, field)
  if name.endswith('.array_record'):
    import grain

    return bytes, iter(grain.sources.ArrayRecordDataSource([path]))
  return bytes, iter([pathlib.Path(path).read_bytes()])


def _texts(path: str, kind: type, rows: Iterator[Any]) -> Iterator[bytes]:
  """The texts of rows; those that have none (top of this file) are counted."""
  kept = count = 0
  for count, row in enumerate(rows, 1):
    if not isinstance(row, kind | None):
      raise ValueError(f'the text of row {count} is {type(row).__name__}, write a string there')
    if kind is bytes and path.lower().endswith('.array_record') and not _is_text(row):
      raise ValueError(
        f'record {count} is not text in UTF-8, but perhaps a serialized tf.train.Example: write '
        'the text alone'
      )
    with contextlib.suppress(UnicodeEncodeError):  # half a surrogate pair
      text = row.encode() if isinstance(row, str) else row
      if text is not None and b'\0' not in text:
        kept += 1
        yield text
  if kept < count:
    say_once(
      f'{path}: {count - kept:,} of {count:,} documents are left out, as they have no text (null), '
      'a zero byte or half a surrogate pair'
    )


def _is_text(record: bytes) -> bool:
  """Whether a record is UTF-8, and no tf.train.Example. The lengths in one of 128 bytes or more are
  hardly ever UTF-8; in a shorter one three fields lie in each other behind newlines, their tags."""
  framed = record[0:5:2] == b'\n\n\n' and record[1] == len(record) - 2 and b'\x12' in record
  return not framed and _is_utf8(record)


def _is_utf8(text: bytes) -> bool:
  try:
    text.decode()
  except UnicodeDecodeError:
    return False
  return True


def _parquet_rows(path: str, field: str) -> Iterator[object]:
  from pyarrow import parquet

  rows = parquet.ParquetFile(path)
  if field not in (names := rows.schema_arrow.names):
    raise ValueError(f'no column {field!r}, only {", ".join(names)}: set data.field to one')
  for some in rows.iter_batches(columns=[field]):
    yield from some[field].to_pylist()


def _json_lines(path: str, field: str) -> Iterator[object]:
  with open(path, 'rb') as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        yield json.loads(line)[field]
      except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
          f'line {number} has no object with the key {field!r}: set data.field to that of the text'
        ) from error


def build_once(what: str, source: str, build: Callable[[pathlib.Path], None]) -> pathlib.Path:
  """A folder with what `build` makes of a corpus: once for all processes of this machine, which
  wait for it, and again if the content of a file changes, or that of the folder. It is whole or not
  there; who dies while it builds leaves it to the next. Raises ValueError."""
  kind = lambda name: pathlib.Path(name).suffix.lower()
  content = lambda: fingerprint.of([(kind(name), path) for name, path in list_files(source)])
  try:
    before = content()
    name = fingerprint.combine([what, before, version.__version__])
    folder = folders.cache() / 'diloco_jax' / 'corpora' / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix('.lock'), 'a+', encoding='utf-8') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      lock.seek(0)
      if not folder.is_dir() or lock.read() != fingerprint.of(folder):
        new = folder.with_suffix('.new')
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        new.mkdir()
        build(new)
        if content() != before:
          raise ValueError('a file has changed while it was read: start again')
        json_files.fsync_tree(new)
        lock.truncate(0)
        lock.write(fingerprint.of(new))
        new.rename(folder)
  except OSError as error:
    raise ValueError(f'{error}; mend it, make space, or set XDG_CACHE_HOME') from error
  return folder
