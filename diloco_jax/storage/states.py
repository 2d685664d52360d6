"""A state: a folder of arrays, and a manifest of what is in it.

  <folder>/manifest.json   written last: without it there is no state
  <folder>/...             the arrays, as plain Orbax reads them: ocp.load(folder)

States are the checkpoints of syncer and learners, the trained model, the model that a user's loop
brings, and their copies in a store. The manifest has the name of the state, so that one in the
place of another is known; size and SHA-256 of each file; shape, type and digest of each array as it
was in memory; and a record, of JSON. Whoever reads arrays compares their digests, whoever copies
files their SHA-256. A state that is empty, cut, another one, or not all there is *damaged*, and
`newest` goes on to the one before it.

Of what several hosts of a learner save there are sizes without SHA-256, and of what Orbax writes to
a bucket no files: one host would have to read all of it again. The arrays have digests like others.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import jax
import numpy as np

from diloco_jax.protocol import formats, safe_json
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files, orbax_context, tree_digest
from diloco_jax.storage import store as store_lib

MANIFEST = 'manifest.json'
_MAX_MANIFEST_BYTES = 64 << 20
_PART_BYTES = 256 << 20  # of arrays that are read at once on the host, beside one that is larger
_LEFT_OUT = ...  # Orbax reads no such leaf
_COPY = re.compile(rf'(.*/ckpt/\d+-[0-9a-f]{{8}})/{re.escape(MANIFEST)}')
_LOOKS = 30  # for a state that is not removed while it is read
_T = TypeVar('_T')


class StateError(RuntimeError):
  """A state cannot be written, or none of several can be read: one line."""


class Damaged(StateError):
  """A state is not what was written. An older one may be whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The content of a state.

  Attributes:
    name: 'l0/30', the node and the number of a checkpoint, or 'model'.
    files: path, bytes and SHA-256 of each file, but for the manifest; '' if it was not computed.
    arrays: path, shape, type and digest (storage/tree_digest.py) of each array.
    record: what belongs to the arrays: data position and machine state of a checkpoint.
  """

  name: str
  files: tuple[tuple[str, int, str], ...]
  arrays: tuple[tuple[str, list[int], str, int], ...]
  record: dict[str, Any]

  def __post_init__(self):
    """Raises ValueError: a path leads out of the folder, or a number is out of range."""
    for path, size, _ in self.files:
      if {'..', ''} & set(path.split('/')):
        raise ValueError(f'it names {codec.short(path)}')
      folders.require_number('a size', size)
    for _, shape, _, digest in self.arrays:
      [folders.require_number('a size', size) for size in (*shape, digest)]
    for name in {'step', 'data_state'} & self.record.keys():
      folders.require_number(name, self.record[name])
    if type(self.record.get('protocol', {})) is not dict:
      raise ValueError('its protocol is no object')

  @property
  def run(self) -> str:
    """The run that the state is of; '' if it began before its run had a name."""
    return str(self.record.get('run', ''))

  def shapes(self, within: str = '') -> dict[str, list]:
    """Shape and type of each array by its path, of those whose path begins so."""
    return {path: [shape, kind] for path, shape, kind, _ in self.arrays if path.startswith(within)}

  def digests(self, within: str = '') -> dict[str, int]:
    return {path: digest for path, *_, digest in self.arrays if path.startswith(within)}


def _parse(data: bytes, place: object, name: str, run: str) -> Manifest:
  """The manifest in a file. Raises OtherFormat; Damaged: it is not what was written, or not that of
  `name` or `run`."""
  try:
    values = json_files.unseal(safe_json.parse_object(data, _MAX_MANIFEST_BYTES))
    manifest = codec.decode(Manifest, formats.require('state', values, place).get('manifest'), 'it')
    if name not in ('', manifest.name):
      raise ValueError(f'it is that of {codec.short(manifest.name)}')
    if run not in ('', manifest.run):
      raise ValueError(f'it is of the run {codec.short(manifest.run)}, this is the run {run}')
    return manifest
  except formats.OtherFormat:
    raise
  except (ValueError, codec.TapeError) as error:
    raise Damaged(f'{place} does not read back: {one_line(error)}') from error


def read(folder: json_files.Place, name: str = '', run: str = '') -> Manifest:
  """The manifest of a state. `name`, `run`: of the state that should be there. Raises Damaged,
  OtherFormat."""
  try:
    json_files.files_in(folder)  # no links, before anything is opened
    data = json_files.read_bytes(folder / MANIFEST, _MAX_MANIFEST_BYTES)
  except FileNotFoundError as error:
    raise Damaged(f'{folder} has no {MANIFEST}') from error
  except (OSError, ValueError) as error:
    raise Damaged(f'{folder / MANIFEST} does not read back: {one_line(error)}') from error
  return _parse(data, folder / MANIFEST, name, run)


def verify(folder: json_files.Place, name: str = '', run: str = '') -> Manifest:
  """The manifest of a state whose files are all what was written; of one in a bucket, or of several
  hosts, they have the right sizes. Raises Damaged, OtherFormat."""
  manifest = read(folder, name, run)
  for path, size, digest in manifest.files:
    file = folder / path
    try:
      with json_files.as_os_errors():
        bytes_there = file.stat().st_size if isinstance(file, pathlib.Path) else file.stat().length
      if bytes_there != size or (digest and digest != sha256(file)):
        raise Damaged(f'{file} is not what was written')
    except OSError as error:
      raise Damaged(f'{file} does not read back: {one_line(error)}') from error
  return manifest


def sha256(path: pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


# --- Choosing -------------------------------------------------------------------------------------


def newest(
  list_states: Callable[[], Sequence[Any]],
  use: Callable[[Any], _T | None],
  passed_over: Callable[[Any, Exception], object],
) -> _T | None:
  """What `use` returns for the newest state that it can read, None if there is none for it.

  Args:
    list_states: lists the states, the newest last. It is called again and again: a run under way
      removes old ones, also while they are read.
    use: reads one; None: it is whole, and not for this caller. Damaged means that it cannot be
      read; any other error is raised, as of a disk that is full.
    passed_over: called with each that is there and cannot be read, and why.

  Raises:
    Damaged: there are states, and none can be read. The text is about the newest.
  """
  unread: dict[Any, Exception] = {}
  others: list[Any] = []
  looks = 0
  while left := [state for state in list_states() if state not in (*unread, *others)]:
    try:
      if (result := use(left[-1])) is not None:
        return result
      others.append(left[-1])
    except Damaged as error:
      if left[-1] in list_states():
        unread[left[-1]] = error
        passed_over(left[-1], error)
      elif (looks := looks + 1) == _LOOKS:
        raise StateError(
          f'{left[-1]} was removed while it was read, as {looks - 1} others: the run saves faster '
          'than this process reads. Read a copy of its folder'
        ) from error
  if unread and not others:
    raise Damaged(one_line(next(iter(unread.values()))))
  return None


# --- Arrays ---------------------------------------------------------------------------------------


def load(
  folder: json_files.Place, like: Any, name: str = '', run: str = ''
) -> tuple[Manifest, Any]:
  """Reads all arrays of a state to devices. All hosts of a learner call it together.

  Args:
    folder: of the state.
    like: a tree of ShapeDtypeStructs with shardings; the mesh may differ from the one that saved.
    name, run: of the state that should be there.

  Raises:
    Mismatch: the state is whole, but of another model or optimizer.
    Damaged: it is not what was written.
    OtherFormat: another release has written it.
    JaxRuntimeError: the devices have failed; the state may be whole.
  """
  manifest = read(folder, name, run)
  tree_digest.require_same_shapes(manifest.shapes(), tree_digest.shapes(like))
  with _reading(folder), orbax_context.run_operation():
    tree = orbax_context.ocp.load(folder, like)
    tree_digest.require_same_digests(manifest.digests(), tree_digest.digests(tree))
  return manifest, tree


def load_on_host(
  folder: json_files.Place,
  like: Any = None,
  within: str = '',
  most_bytes: int | None = None,
  name: str = '',
  run: str = '',
) -> tuple[Manifest, Any]:
  """Reads arrays of a state to NumPy arrays.

  Args:
    folder: of the state.
    like: a tree of arrays or their shapes; None: all arrays, in nested dicts and lists.
    within: the path at which the state has `like`, with a '/' at its end; '': it is all of it.
    most_bytes: of all arrays in memory, for a folder from elsewhere: a few bytes on a disk may be
      gigabytes of zeros.
    name, run: of the state that should be there.

  Raises:
    Mismatch, Damaged, OtherFormat: as `load`.
  """
  manifest, read_in = read(folder, name, run), {}
  if like is not None:
    shapes = tree_digest.shapes(like).items()
    tree_digest.require_same_shapes(
      manifest.shapes(within), {within + path: row for path, row in shapes}
    )
  with _reading(folder), orbax_context.run_operation(alone=True):
    described = orbax_context.ocp.metadata(folder).metadata
    if most_bytes is not None:
      tree_digest.require_size(jax.tree.leaves(described), most_bytes)
    for part in _parts(folder, described, manifest, within):
      read_in |= part
  wanted = described if like is None else like
  leaves = [read_in[within + path] for path in tree_digest.by_path(wanted)]
  return manifest, jax.tree.unflatten(jax.tree.structure(wanted), leaves)


@contextlib.contextmanager
def _reading(folder: json_files.Place) -> Iterator[None]:
  try:
    yield
  except (jax.errors.JaxRuntimeError, Damaged):
    raise
  except Exception as error:  # Orbax and TensorStore raise many kinds
    raise Damaged(f'{folder} does not read back: {one_line(error)}') from error


def _parts(
  folder: json_files.Place, described: Any, manifest: Manifest, within: str = ''
) -> Iterator[dict[str, np.ndarray]]:
  """Reads arrays by their path, in parts, each compared with its digest, as neither the devices nor
  the host may have room for a second copy of all. `described`: the tree as Orbax describes it.
  Raises ValueError, and what Orbax raises."""
  leaves, structure = tree_digest.by_path(described), jax.tree.structure(described)
  tree_digest.require_same_shapes(manifest.shapes(), tree_digest.shapes(described))
  digests, part, room = manifest.digests(within), {}, _PART_BYTES
  for path in (*digests, None):
    size = 0 if path is None else tree_digest.num_bytes(leaves[path])
    if part and (path is None or size > room):
      wanted = [np.ndarray if leaf in part else _LEFT_OUT for leaf in leaves]
      read_in = orbax_context.ocp.load(folder, jax.tree.unflatten(structure, wanted))
      arrays = {key: leaf for key, leaf in tree_digest.by_path(read_in).items() if key in part}
      tree_digest.require_same_digests(part, tree_digest.digests_of_host(arrays))
      yield arrays
      part, room = {}, _PART_BYTES
    if path is not None:
      part[path], room = digests[path], room - size


# --- Writing --------------------------------------------------------------------------------------


def save(folder: pathlib.Path, name: str, tree: Any, record: dict[str, Any]) -> None:
  """Writes a tree of numpy or jax arrays, without shardings, so that any machine can read it, and
  reads it back; replaces an older state, durably. Raises StateError; ValueError for a path that
  `files.require_name` refuses."""
  files_lib.require_name(folder)
  folder = folder.absolute()
  tree = jax.tree.map(np.asarray, tree)
  new = folder.with_name(f'{folder.name}.new')
  try:
    with orbax_context.run_operation(alone=True):
      orbax_context.ocp.save(new, tree, overwrite=True)
      read_back(new, write(new, name, tree_digest.describe(tree), record))
    if folder.exists():
      json_files.rmtree(folder)
    json_files.move(new, folder)
  except Exception as error:  # Orbax raises many kinds
    shutil.rmtree(new, ignore_errors=True)  # a full disk needs the space
    raise StateError(f'cannot write {folder}: {one_line(error)}') from _by_number(error)


def read_back(folder: json_files.Place, manifest: Manifest) -> None:
  """Reads all arrays of a state that this process has just written: what was never read may be no
  state. The caller has the lock of `orbax_context.run_operation`. Raises as `_parts`."""
  for _ in _parts(folder, orbax_context.ocp.metadata(folder).metadata, manifest):
    pass


def write(
  folder: json_files.Place,
  name: str,
  arrays: Sequence[tuple[str, list[int], str, int]],
  record: dict[str, Any],
) -> Manifest:
  """Writes the manifest of a folder that Orbax has written, and makes all of it durable."""
  alone = isinstance(folder, pathlib.Path) and jax.process_count() == 1
  with futures.ThreadPoolExecutor(1) as pool:  # the disk and a core work at once
    durable = pool.submit(json_files.fsync_tree, folder)
    sizes = [
      (path.relative_to(folder).as_posix(), path.stat().st_size, sha256(path) if alone else '')
      for path in json_files.files_in(folder)
    ]
    durable.result()
  manifest = Manifest(name=name, files=tuple(sizes), arrays=tuple(arrays), record=record)
  values = json.loads(codec.encode(formats.stamp('state') | {'manifest': manifest}))
  data = json.dumps(json_files.seal(values)).encode()
  if isinstance(folder, pathlib.Path):
    json_files.replace(folder / MANIFEST, data)
  else:
    with json_files.as_os_errors():
      (folder / MANIFEST).write_bytes(data)
  return manifest


def _by_number(error: Exception) -> Exception:
  """An OSError for one of TensorStore, which has its number only in its text: so that a full disk
  is known as one."""
  number = re.search(r"os_error_code='(\d+)'", str(error))
  return OSError(int(number[1]), str(error)) if number else error


def one_line(error: Exception) -> str:
  return ' '.join(str(error).split())[:400] or type(error).__name__


# --- Copies in a store ----------------------------------------------------------------------------


def copies(store: store_lib.Store, part: str) -> list[str]:
  """The places of the complete copies of checkpoints in a part of a store, <part>ckpt/N-H, the
  newest last: checkpoint N of the syncer, H a hash of its manifest. Raises StoreError."""
  places = [match[1] for match in map(_COPY.fullmatch, store.names(f'{part}ckpt/')) if match]
  return sorted(places, key=number)


def number(copy: str) -> int:
  """The number of the checkpoint that was copied."""
  return int(copy.rsplit('/', 1)[1].split('-')[0])


def fetch_manifest(
  store: store_lib.Store, at: str, name: str = '', run: str = ''
) -> tuple[Manifest, bytes]:
  """The manifest of a copy in a store, and its bytes. Raises as `fetch`."""
  place = f'{store.place}/{at}/{MANIFEST}'
  if (stored := store.read(f'{at}/{MANIFEST}', _MAX_MANIFEST_BYTES)) is None:
    raise Damaged(f'{place} is not there')
  return _parse(stored.data, place, name, run), stored.data


def fetch(
  store: store_lib.Store, at: str, folder: pathlib.Path, name: str = '', run: str = ''
) -> Manifest:
  """Writes the files of a copy in a store to a new folder, and returns its manifest. `name`, `run`:
  of the state that should be there. Raises Damaged: an object is not what was put, or not there;
  StateError: the folder cannot be written; StoreError, OtherFormat."""
  manifest, data = fetch_manifest(store, at, name, run)
  new = folder.with_name(f'{folder.name}.new')
  try:
    if new.exists():
      json_files.rmtree(new)
    for path, size, digest in manifest.files:
      json_files.replace(new / path, store.parts(f'{at}/{path}', size))
      if (new / path).stat().st_size != size or digest not in ('', sha256(new / path)):
        raise Damaged(f'{store.place}/{at}/{path} is not what was put there')
    json_files.replace(new / MANIFEST, data)
    json_files.move(new, folder)
  except OSError as error:  # the copy is whole, and no older one would do
    raise StateError(f'cannot write {folder}: {one_line(error)}') from error
  return manifest


def put(store: store_lib.Store, at: str, folder: pathlib.Path, proceed: Callable[[], None]) -> None:
  """Writes a verified state to a store, its manifest last. `proceed` is called before each object,
  and raises to end it. Raises Damaged, StoreError, OSError."""
  for path in (*(path for path, *_ in verify(folder).files), MANIFEST):
    proceed()
    store.put_file(f'{at}/{path}', folder / path)
