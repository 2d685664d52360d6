"""An island's own checkpoints: asynchronous, atomic, verified on the way back.

One root per island, one folder per checkpoint, written by Orbax: the arrays first, the folder's
name last, so a process killed in the middle leaves the checkpoint before as the newest. Beside the
arrays lie their shapes (a restore into another model is refused in one line) and a digest of every
bit: what does not read back as it was written is set aside, with a warning, and the one before it
is used.

  <root>/<number>/state    parameters and optimizer state
  <root>/<number>/anchors  one float32 array per fragment; absent for an island that trains alone
  <root>/<number>/record   JSON: clock, data cursor, the protocol's own record, shapes, digests, the
                           snapshot of the run that pins it, and the SHA-256 of all that

The number is the clock, or the next free one behind the newest: no save takes the place of another.
The newest two are kept, and those that a snapshot pins. What a save gives back is the number and
the SHA-256 of the record. Kept elsewhere (a snapshot's manifest, storage/manifests.py), it makes
`verify` independent of what the folder says of itself.

A checkpoint is a cache of one island's progress; the truth of a run is the syncer's log.
Orbax's Checkpointer is not thread-safe: use an instance from one thread.
"""

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp

CHECKPOINTS_KEPT = 2  # beside those that are pinned
_UNREADABLE = 0  # no snapshot has this number
# Orbax numbers the operations of a process globally. Where those of several islands overlap in one
# process (single-controller mode), saves have been seen to finalise each other's folders half
# written, and a save beside a load to wait for ever.
_ONE_OPERATION = threading.Semaphore(1)
_LOG = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
  """A save that failed, now or in the background, or a folder in which nothing reads back."""


class Restored(NamedTuple):
  """What `save` was given, read back and verified."""

  step: int  # the clock at which it was saved
  state: Any  # on the shardings asked for
  data_state: int
  anchors: list[jax.Array]  # float32, flat, one per fragment
  protocol: dict[str, Any]


class Saved(NamedTuple):
  """A complete checkpoint, as a snapshot of the run names it."""

  number: int
  record_sha256: str


class Checkpoints:
  """The checkpoints of one island; keeps the last two and those that a snapshot pins.

  Args:
    root: a folder of this island alone; created if it is not there. `gs://` works with gcsfs.

  Raises:
    ValueError: the folder cannot be written.
  """

  def __init__(self, root: str):
    self._root = epath.Path(root).resolve()
    _require_writable(self._root)
    self._pins: dict[int, int] = {}  # of a checkpoint: the snapshot that pins it
    self._checkpointer = ocp.training.Checkpointer(
      self._root,
      context=_context(),
      preservation_policy=_NewestAndPinned(self._pins),
      cleanup_tmp_directories=True,
    )
    self._under_way: futures.Future[Saved] | None = None
    for number in self.numbers:
      snapshot = self._snapshot_of(number)
      if snapshot is not None:
        self._pins[number] = snapshot

  @property
  def numbers(self) -> list[int]:
    """Of the complete checkpoints, ascending."""
    return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

  def protocol(self, number: int) -> dict[str, Any]:
    """The protocol's own record of a checkpoint, arrays unread.

    Raises:
      CheckpointError: it does not read back.
    """
    try:
      with _ONE_OPERATION:
        return self._record(number)['protocol']
    except Exception as error:
      raise CheckpointError(
        f'{self._root / str(number)} does not read back: {_one_line(error)}'
      ) from error

  def save(
    self,
    step: int,
    state: Any,
    data_state: int,
    anchors: Sequence[jax.Array] = (),
    protocol: dict[str, Any] | None = None,
    snapshot: int | None = None,
    keep: Collection[int] = (),
  ) -> Callable[[], Saved]:
    """Starts a save; returns as soon as `state` may change or be donated again.

    A save under way is waited for first. `snapshot`: of the run, pins this checkpoint; those of
    other snapshots that are not in `keep` are pinned no more. None: nothing is unpinned.

    Returns:
      A function that blocks until this save is complete, and raises CheckpointError if it failed.
      It may be called from another thread, or not at all: `wait` and `close` wait as well.

    Raises:
      CheckpointError: this save cannot start.
      TypeError: `protocol` is not JSON.
    """
    arrays = {'state': state} | ({'anchors': list(anchors)} if anchors else {})
    record = {
      'data_state': int(data_state),
      'step': int(step),
      'protocol': protocol or {},
      'snapshot': snapshot,
      'shapes': _shapes(arrays),
      'digests': _digests(arrays),
    }
    record = json.loads(json.dumps(record))  # what is no JSON fails here, not in the background
    sha256 = _sha256(record)
    self._wait_or_warn()
    number = max([int(step), *(saved + 1 for saved in self.numbers)])
    if snapshot is not None:
      for pinned in [one for one, pin in self._pins.items() if pin not in keep]:
        del self._pins[pinned]
      self._pins[number] = snapshot
    _ONE_OPERATION.acquire()
    try:
      # Forced: the caller decides when to save, and a save skipped by a policy would be silent.
      response = self._checkpointer.save_checkpointables_async(
        number, arrays | {'record': record | {'sha256': sha256}}, force=True
      )
    except Exception as error:
      _ONE_OPERATION.release()
      raise self._failed(number, error) from error
    done = self._under_way = futures.Future()
    saved = Saved(number, sha256)
    threading.Thread(
      target=self._complete, args=(saved, response, done), name='save', daemon=True
    ).start()
    return done.result

  def restore(
    self, shardings: Any, anchor_sharding: jax.sharding.Sharding, like: Any
  ) -> Restored | None:
    """Returns the newest checkpoint that verifies, or None where none was ever saved.

    Args:
      shardings: tree of Shardings for the state; the mesh may differ from the one that saved.
      anchor_sharding: where each anchor goes.
      like: tree of arrays or ShapeDtypeStructs, the state this model and optimizer have.

    Raises:
      ValueError: the checkpoint is of another model or optimizer.
      CheckpointError: there are checkpoints and none verifies.
    """
    self._wait_or_warn()
    numbers = self.numbers
    for number in reversed(numbers):
      try:
        with _ONE_OPERATION:
          return self._read(number, shardings, anchor_sharding, like)
      except _Mismatch as mismatch:
        raise ValueError(
          f'checkpoint {self._root / str(number)}: {mismatch}; restore with the '
          'configuration it was saved with, or choose another folder'
        ) from None
      except Exception as error:  # whatever the storage says, the checkpoint before may be whole
        self._set_aside(number, error)
    if numbers:
      raise CheckpointError(
        f'none of the checkpoints {numbers} under {self._root} reads back as it '
        'was written: remove the folder to start afresh'
      )
    return None

  def verify(self, number: int, record_sha256: str = '') -> dict[str, Any]:
    """Reads a whole checkpoint, whatever model it is of, and compares it with its record, and that
    with the SHA-256 that it had, if that is known.

    Returns:
      The protocol's own record.

    Raises:
      CheckpointError: it is not what was saved; says which leaf, or that the record is not.
    """
    try:
      with _ONE_OPERATION:
        record = self._record(number)
        if record_sha256 not in ('', _sha256(record)):
          raise ValueError('its record is of another checkpoint')
        arrays = self._checkpointer.load_checkpointables(number, self._abstract_of(number))
        _require_same_shapes(record['shapes'], _shapes(arrays))
        _require_same_digests(record['digests'], _digests(arrays))
    except Exception as error:  # whatever the storage says: it does not read back
      raise CheckpointError(
        f'{self._root / str(number)} does not read back as it was written: {_one_line(error)}'
      ) from error
    return record['protocol']

  def wait(self) -> None:
    """Blocks until the save under way, if any, is complete.

    Raises:
      CheckpointError: it failed.
    """
    done, self._under_way = self._under_way, None
    try:
      if done:
        done.result()
    except CheckpointError:
      with contextlib.suppress(Exception):
        self._checkpointer.wait()  # Orbax raises it once more in every thread that waits
      raise

  def close(self) -> None:
    """Waits, as `wait` does, and releases the folder."""
    try:
      self.wait()
    finally:
      self._checkpointer.close()

  def _complete(self, saved: Saved, response: Any, done: futures.Future[Saved]) -> None:
    """Runs in a thread of its own, so that the next save may start even if nobody waits."""
    try:
      response.result()
    except Exception as error:
      failure = self._failed(saved.number, error)
    else:
      failure = None
    _ONE_OPERATION.release()
    if failure is None:
      done.set_result(saved)
    else:
      done.set_exception(failure)

  def _wait_or_warn(self) -> None:
    """A save that failed is no reason not to try the next one."""
    try:
      self.wait()
    except CheckpointError as error:
      _LOG.warning('%s', error)

  def _read(
    self, number: int, shardings: Any, anchor_sharding: jax.sharding.Sharding, like: Any
  ) -> Restored:
    load, record = self._checkpointer.load_checkpointables, self._record(number)
    anchor_shapes = [
      shape for path, (shape, _) in record['shapes'].items() if path.startswith('anchors/')
    ]
    arrays = {'state': jax.tree.map(_abstract, like, shardings)}
    if anchor_shapes:
      arrays['anchors'] = [
        jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=anchor_sharding)
        for shape in anchor_shapes
      ]
    _require_same_shapes(record['shapes'], _shapes(arrays))
    arrays = load(number, arrays)
    _require_same_digests(record['digests'], _digests(arrays))
    return Restored(
      record['step'],
      arrays['state'],
      record['data_state'],
      arrays.get('anchors', []),
      record['protocol'],
    )

  def _abstract_of(self, number: int) -> dict[str, Any]:
    """The arrays of a checkpoint as it describes them itself, all on the first device."""
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    described = self._checkpointer.checkpointables_metadata(number).metadata
    for name, tree in described.items():
      if tree is None and name != 'record':  # Orbax has warned, and would guess
        raise ValueError(f'what its {name} is made of cannot be read')
    return {
      name: jax.tree.map(lambda leaf: _abstract(leaf, place), tree)
      for name, tree in described.items()
      if name != 'record'
    }

  def _record(self, number: int) -> dict[str, Any]:
    """Raises ValueError if it is not what was saved, and whatever the storage says."""
    record = self._checkpointer.load_checkpointables(number, {'record': None})['record']
    if record.pop('sha256') != _sha256(record):
      raise ValueError('its record is not the one that was saved')
    return record

  def _snapshot_of(self, number: int) -> int | None:
    """The snapshot that pins a checkpoint; if nobody can tell, it stays until the next snapshot."""
    try:
      with _ONE_OPERATION:
        return self._record(number)['snapshot']
    except Exception:
      return _UNREADABLE

  def _set_aside(self, number: int, error: Exception) -> None:
    aside = self._root / f'unreadable-{number}'
    _LOG.warning(
      'checkpoint %s does not read back (%s): moved to %s, trying the one before',
      self._root / str(number),
      _one_line(error),
      aside,
    )
    if aside.exists():
      aside.rmtree()
    (self._root / str(number)).rename(aside)
    self._checkpointer.reload()

  def _failed(self, number: int, error: Exception) -> CheckpointError:
    return CheckpointError(
      f'saving {self._root / str(number)} failed: {_one_line(error)}; the '
      'checkpoint before it is still there'
    )


class _NewestAndPinned:
  """Which checkpoints Orbax keeps, the new one among them."""

  def __init__(self, pins: Collection[int]):
    self._pins = pins

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    newest = [one.step for one in checkpoints[-CHECKPOINTS_KEPT:]]
    return [one.step in newest or one.step in self._pins for one in checkpoints]


def _context() -> ocp.Context:
  """Stores the record as one JSON file; Orbax would take a dict for a tree of arrays.

  Each leaf is written by one of its replicas: cutting it among them, Orbax's default, took more
  than half of the time that `save` blocks a small island.
  """
  registry = ocp.handlers.local_registry()
  registry.add(ocp.handlers.JsonHandler, checkpointable_name='record')
  context = ocp.Context()
  context.checkpointables.registry = registry
  context.array.saving.use_replica_parallel = False
  return context


class _Mismatch(Exception):
  """The checkpoint is whole, but of another model or optimizer."""


def _require_writable(root: epath.Path) -> None:
  try:
    root.mkdir(parents=True, exist_ok=True)
    probe = root / '.writable'
    probe.write_text('')
    probe.unlink()
  except OSError as error:
    raise ValueError(
      f'cannot write checkpoints under {root}: {_one_line(error)}; choose a folder '
      'this process may write to'
    ) from error


def _abstract(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _paths(tree: Any) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _shapes(tree: Any) -> dict[str, list]:
  return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in _paths(tree).items()}


def _require_same_shapes(saved: dict[str, list], wanted: dict[str, list]) -> None:
  for path in sorted(saved.keys() | wanted.keys()):
    if saved.get(path) != wanted.get(path):
      raise _Mismatch(
        f'{path} was saved as {saved.get(path, "absent")}, this island has '
        f'{wanted.get(path, "no such leaf")}'
      )


def _digests(tree: Any) -> dict[str, int]:
  """One 32-bit number per leaf, computed where the leaf lies: only the numbers reach the host."""
  return {path: int(value) for path, value in jax.device_get(_paths(_digest_leaves(tree))).items()}


@jax.jit
def _digest_leaves(tree: Any) -> Any:
  return jax.tree.map(digest_leaf, tree)


def digest_leaf(leaf: jax.Array) -> jax.Array:
  """sum_i bits_i (2 i + 1) mod 2^32: exact in any order, so any sharding gives the same number.

  Every weight is odd, hence any change of one element changes the sum.
  """
  bits = leaf if leaf.dtype == jnp.uint32 else jax.lax.bitcast_convert_type(leaf, jnp.uint32)
  index = jnp.zeros(leaf.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(leaf.ndim)):
    index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride)
    stride *= leaf.shape[axis]
  return jnp.sum(bits * (jnp.uint32(2) * index + jnp.uint32(1)), dtype=jnp.uint32)


def _sha256(record: dict[str, Any]) -> str:
  """Of a record; it holds a digest of every leaf, so it stands for the checkpoint."""
  text = json.dumps(record, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()


def _require_same_digests(saved: dict[str, int], read: dict[str, int]) -> None:
  for path, value in saved.items():
    if read.get(path) != value:
      raise ValueError(f'{path} has digest {read.get(path)}, was saved with {value}')


def _one_line(error: Exception) -> str:
  return ' '.join(str(error).split())[:200] or type(error).__name__
