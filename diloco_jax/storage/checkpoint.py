"""Checkpoints of one node: asynchronous, atomic, verified when read.

One root per node, one folder per checkpoint, written by Orbax: the arrays first, the folder's name
last, so a process killed during a save leaves the previous checkpoint as the newest. Beside the
arrays lie their shapes (a restore into another model is refused in one line) and a digest of every
bit: a checkpoint that does not read back as it was written is moved aside, with a warning, once the
previous one has been read. If none can be read nothing is moved: memory or the disk may have failed
for a while.

  <root>/<number>/state   parameters and optimizer state
  <root>/<number>/record  JSON: clock, data cursor, the machine's state, shapes, digests, and the
                          SHA-256 of all these

The root may be in a bucket, gs://BUCKET/PREFIX. There a name cannot be given last, so Orbax writes
a file `commit_success.txt` last, and a folder without one is no checkpoint. Nothing keeps two
processes from saving there at once; what they have mixed does not read back.

The first save of a process of one host is read back before it counts: what was never read may be no
checkpoint. Several hosts save one checkpoint together, each its part of the arrays; the first of
them changes all other files.

A learner's anchors are not among them: it takes every fragment whole when it joins again.

The number is the clock or, if that is taken, the next one after the newest: no save replaces
another. The newest two are kept and, of every `keep_every` numbers, the first one: a run goes back
to these (launch/restore.py).

Orbax's Checkpointer is not thread-safe: use an instance from one thread.
"""

import contextlib
import json
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco_jax.protocol import formats, rate_limited_log
from diloco_jax.storage import files, folders, json_files, orbax_context, tree_digest

CHECKPOINTS_KEPT = 2  # the newest
SAY_AGAIN_NS = 60 * 10**9  # on a full disk every save fails
_RECORD = pathlib.Path('record', 'data.json')  # where Orbax's JsonHandler writes it
_MAX_RECORD_BYTES = 64 << 20
# Orbax numbers the operations of a process globally. When operations of several nodes overlapped in
# one process (single-controller mode), saves finalised each other's folders half written, and a
# save beside a load waited for ever.
_ONE_OPERATION = threading.Semaphore(1)
_LOG = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
  """A save failed, now or in the background, or no checkpoint of a folder reads back."""


class Restored(NamedTuple):
  """The arguments of `save`, read back and verified."""

  step: int  # the clock at which it was saved
  state: Any  # on the shardings asked for
  data_state: int
  protocol: dict[str, Any]


class Checkpoints:
  """The checkpoints of one node.

  Args:
    root: a folder of this node alone, created if it does not exist; or gs://BUCKET/PREFIX.
    keep_every: the first of every so many numbers is kept; 0: only the newest are.

  Attributes:
    held: the number of one that is kept for now, whatever its age.

  Raises:
    ValueError: the folder cannot be written, or `files.require_name` refuses its path, or a library
      is missing.
    CheckpointError: the bucket does not answer.
  """

  def __init__(
    self, root: str, keep_every: int = 0, remedy: str = 'remove the folder to start without them'
  ):
    self._remedy = remedy  # if all are damaged
    self._root = folders.place(root)
    if isinstance(self._root, pathlib.Path):
      files.require_name(self._root)
      self._root = self._root.resolve()
    # A save of this process has been read. Of several hosts none could read it alone: Orbax counts
    # the loads of each, and they would wait for each other.
    self._reads_back = jax.process_count() > 1
    self._keep_every = keep_every
    self.held: int | None = None
    with _opening(self._root):
      if _leads():
        _probe(self._root)
      # Orbax itself removes nothing: it would remove old checkpoints before the new one is durable,
      # and a failure of that would count as one of the save.
      training = orbax_context.ocp.training
      self._checkpointer = training.Checkpointer(
        self._root,
        context=orbax_context.context(),
        preservation_policy=training.preservation_policies.PreserveAll(),
        cleanup_tmp_directories=True,
      )
    self._under_way: futures.Future[int] | None = None
    self._awaited: futures.Future[int] | None = None  # its caller hears how it ended
    self._closed = False
    self._notices = rate_limited_log.Notices(SAY_AGAIN_NS, _LOG.warning)

  @property
  def numbers(self) -> list[int]:
    """The numbers of the complete checkpoints, ascending."""
    return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

  def protocol(self, number: int) -> dict[str, Any]:
    """Reads the machine's state in a checkpoint, without the arrays.

    Raises:
      CheckpointError: the record does not read back.
    """
    try:
      return machine_state(self._root / str(number))
    except formats.OtherFormat:
      raise
    except (OSError, ValueError) as error:
      raise CheckpointError(
        f'{self._root / str(number)} does not read back: {_one_line(error)}'
      ) from error

  def warm_up(self, state: Any) -> None:
    """Compiles what a save computes, so that the first one takes no longer than later ones."""
    tree_digest.compile_digests({'state': state})

  def save(
    self, step: int, state: Any, data_state: int, protocol: dict[str, Any] | None = None
  ) -> Callable[[], int]:
    """Starts a save; returns as soon as `state` may change or be donated again.

    Waits first for a save that is still running.

    Returns:
      A function that blocks until this save is complete, returns its number, and raises
      CheckpointError if it failed.
      It may be called from another thread, or not at all: `wait` and `close` wait as well, and
      `close` only warns.

    Raises:
      CheckpointError: this save cannot start.
      TypeError: `protocol` is not JSON.
    """
    arrays = {'state': state}
    record = {
      **formats.stamp('checkpoint'),
      'data_state': int(data_state),
      'step': int(step),
      'protocol': protocol or {},
      'shapes': tree_digest.shapes(arrays),
      'digests': tree_digest.digests(arrays),
    }
    record = json.loads(
      json.dumps(record)
    )  # other values than JSON fail here, not in the background
    self._wait_or_warn()
    number = max([int(step), *(saved + 1 for saved in self.numbers)])
    if jax.process_count() > 1:
      number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    record |= {'sha256': json_files.sha256(record)}
    _ONE_OPERATION.acquire()
    if self._closed:  # while this thread hung: the folder may be another's by now
      _ONE_OPERATION.release()
      raise CheckpointError('the folder of checkpoints is closed')
    try:
      # Forced: the caller decides when to save, and a save skipped by a policy would be silent.
      response = self._checkpointer.save_checkpointables_async(
        number, arrays | {'record': record}, force=True
      )
    except Exception as error:
      _ONE_OPERATION.release()
      raise self._failed(number, error) from error
    done = self._under_way = futures.Future()
    like = None if self._reads_back else tree_digest.abstract(arrays)
    threading.Thread(
      target=self._complete,
      args=(number, response, done, like, record['digests']),
      name='save',
      daemon=True,
    ).start()

    def result() -> int:
      self._awaited = done
      return done.result()

    return result

  def restore(self, shardings: Any, like: Any) -> Restored | None:
    """Returns the newest checkpoint that verifies, or None if there is no checkpoint.

    Args:
      shardings: tree of Shardings for the state; the mesh may differ from the one that saved.
      like: tree of arrays or ShapeDtypeStructs, the state of this model and optimizer.

    Raises:
      ValueError: the checkpoint is of another model or optimizer, or of another format.
      CheckpointError: there are checkpoints but none can be read; nothing was changed.
      JaxRuntimeError: the devices have failed; nothing was changed.
    """
    self._wait_or_warn()
    numbers = self.numbers
    unread: dict[int, Exception] = {}
    restored = None
    for number in reversed(numbers):
      try:
        with _ONE_OPERATION:
          restored = self._read(number, shardings, like)
        break
      except tree_digest.Mismatch as mismatch:
        raise ValueError(
          f'checkpoint {self._root / str(number)}: {mismatch}; restore with the '
          'configuration it was saved with, or choose another folder'
        ) from None
      # Of the devices: this checkpoint may be whole. Or another release has saved it.
      except (jax.errors.JaxRuntimeError, formats.OtherFormat):
        raise
      except Exception as error:  # of any kind: the previous checkpoint may be whole
        unread[number] = error
    if unread and restored is None:
      number, error = next(iter(unread.items()))
      raise CheckpointError(
        f'none of the checkpoints {numbers} under {self._root} can be read '
        f'({number}: {_one_line(error)}). Nothing was '
        'changed: if memory, the disk or its permissions have failed, start again once that is '
        f'mended; if they are damaged, {self._remedy}'
      )
    for number, error in unread.items():
      self._set_aside(number, error)
    return restored

  def wait(self) -> None:
    """Blocks until the running save, if any, is complete.

    Raises:
      CheckpointError: the save failed.
    """
    done, self._under_way = self._under_way, None
    try:
      if done:
        done.result()
    except CheckpointError:
      with contextlib.suppress(Exception):
        self._checkpointer.wait()  # Orbax raises the error again in every thread that waits
      raise

  def close(self) -> None:
    """Waits for the running save, with a warning if it failed, and closes the folder."""
    self._closed = True
    self._wait_or_warn()
    with contextlib.suppress(Exception):
      self._checkpointer.wait()  # as in `wait`, for an error that another thread has waited for
    self._checkpointer.close()

  def _complete(
    self,
    number: int,
    response: Any,
    done: futures.Future[int],
    like: Any,
    digests: dict[str, int],
  ) -> None:
    """Runs in a separate thread, so that the next save can start even if no caller waits. `like`:
    the shapes of the arrays, of a save that is to be read back."""
    folder = self._root / str(number)
    try:
      response.result()
      if not _leads():
        done.set_result(number)
        return
      json_files.fsync_tree(folder)
      if like is not None:
        with orbax_context.context():
          load = lambda part: orbax_context.ocp.load_checkpointables(folder, part)
          tree_digest.require_reads_back(like, digests, load)
        self._reads_back = True
      self._remove_old()
      done.set_result(number)
    except Exception as error:
      failed = self._failed(number, error)
      with contextlib.suppress(Exception):
        self._checkpointer.reload()  # it counted the checkpoint that was removed
      done.set_exception(failed)
    finally:
      _ONE_OPERATION.release()

  def _remove_old(self) -> None:
    """Removes the checkpoints that need not be kept. A failure is no failure of the save."""
    numbers = self.numbers
    kept = orbax_context.kept(numbers, CHECKPOINTS_KEPT, self._keep_every)
    old = sorted(set(numbers) - {*kept, self.held})
    for number in old:
      try:
        json_files.rmtree(self._root / str(number))
      except OSError as error:
        text = f'an old checkpoint cannot be removed: {error}. Remove it by hand'
        self._notices.say(time.monotonic_ns(), 'old', text)
    if old:
      with contextlib.suppress(Exception):  # or `_complete` would remove the new one
        self._checkpointer.reload()

  def _wait_or_warn(self) -> None:
    """Waits like `wait`, but only warns of a failure, since the next save may succeed; not if the
    caller of that save hears of it."""
    told = self._under_way is self._awaited
    try:
      self.wait()
    except CheckpointError as error:
      if not told:
        self._notices.say(time.monotonic_ns(), 'save', str(error))

  def _read(self, number: int, shardings: Any, like: Any) -> Restored:
    folder = self._root / str(number)
    json_files.files_in(folder)  # no links, before anything is opened
    record = _read_record(folder)
    arrays = {'state': tree_digest.abstract(like, shardings)}
    tree_digest.require_same_shapes(record['shapes'], tree_digest.shapes(arrays))
    arrays = self._checkpointer.load_checkpointables(number, arrays)
    tree_digest.require_same_digests(record['digests'], tree_digest.digests(arrays))
    return Restored(record['step'], arrays['state'], record['data_state'], record['protocol'])

  def _set_aside(self, number: int, error: Exception) -> None:
    aside = self._root / f'unreadable-{number}'
    _LOG.warning(
      'checkpoint %s does not read back (%s): moved to %s',
      self._root / str(number),
      _one_line(error),
      aside,
    )
    if _leads():
      if aside.exists():
        json_files.rmtree(aside)
      json_files.move(self._root / str(number), aside)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(aside.name)
    self._checkpointer.reload()

  def _failed(self, number: int, error: Exception) -> CheckpointError:
    earlier, partial = [], [self._root / str(number)] * _leads()  # it did not read back
    with contextlib.suppress(Exception):  # a store that is gone; its errors are of many kinds
      # Also of earlier saves: threads of Orbax may write on for a while after it has raised.
      partial += _leads() * list(self._root.glob('*.orbax-checkpoint-tmp*'))
    for folder in partial:
      with contextlib.suppress(OSError):
        json_files.rmtree(folder)
    with contextlib.suppress(Exception):
      earlier = [one for one in self.numbers if one != number]
    left = f'checkpoint {earlier[-1]} is still there' if earlier else 'there is no earlier one'
    return CheckpointError(f'saving {self._root / str(number)} failed: {_one_line(error)}; {left}')


# --- A checkpoint by its folder, without an open root ---------------------------------------------


def verify(
  folder: json_files.Place,
  most_bytes: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads a whole checkpoint of any model and compares it with its record, and the record with
  its SHA-256. Writes nothing.

  Args:
    folder: of the checkpoint, <root>/<number>.
    most_bytes: of its arrays in memory; None: it is of this process's own folder.

  Returns:
    The machine's state, and the arrays by the name of their tree, on the first device.

  Raises:
    CheckpointError: it is not what was saved; the text names the leaf or the record.
    OtherFormat: another release has saved it.
  """
  try:
    json_files.files_in(folder)  # no links, before anything is opened
    record = _read_record(folder)
    with _ONE_OPERATION, orbax_context.context():
      arrays = orbax_context.ocp.load_checkpointables(
        folder, _abstract_of(folder, record['shapes'], most_bytes)
      )
      tree_digest.require_same_digests(record['digests'], tree_digest.digests(arrays))
  except formats.OtherFormat:
    raise
  except Exception as error:  # of any kind: the checkpoint does not read back
    raise CheckpointError(
      f'{folder} does not read back as it was written: {_one_line(error)}'
    ) from error
  return record['protocol'], arrays


def read_part(folder: json_files.Place, part: str, like: Any) -> tuple[int, Any, dict[str, Any]]:
  """Returns step, a part of the state (numpy arrays) and the machine's state. Raises any error."""
  json_files.files_in(folder)  # no links, before anything is opened
  record = _read_record(folder)
  load = lambda tree: orbax_context.ocp.load_checkpointables(folder, tree)
  with _ONE_OPERATION, orbax_context.context(alone=True):
    described = {'state': orbax_context.ocp.checkpointables_metadata(folder).metadata['state']}
    found = tree_digest.read_part(f'state/{part}/', like, record, described, load)
  return record['step'], found, record['protocol']


def machine_state(folder: json_files.Place) -> dict[str, Any]:
  """The machine's state in a checkpoint; its arrays are not read. Raises ValueError, OSError."""
  return _read_record(folder)['protocol']


def clock(folder: json_files.Place) -> int:
  """The clock at which a checkpoint was saved; its arrays are not read. Raises ValueError,
  OSError."""
  return _read_record(folder)['step']


def _read_record(folder: json_files.Place) -> dict[str, Any]:
  """Reads a checkpoint's record. Raises ValueError if it is not what was saved, and OSError."""
  record = json_files.read(folder / _RECORD, _MAX_RECORD_BYTES)
  if record.pop('sha256', None) != json_files.sha256(record):
    raise ValueError('its record is not the one that was saved')
  record = formats.taken('checkpoint', record, folder)
  try:
    for name in ('data_state', 'step'):
      folders.require_number(name, record[name])
    for name in ('protocol', 'shapes', 'digests'):
      if type(record[name]) is not dict:
        raise ValueError(f'{name} of its record is no object')
    for shape, kind in record['shapes'].values():
      sizes = [folders.require_number('a size', one) for one in shape]
      if type(kind) is not str or sizes != shape:
        raise ValueError('its record names no shapes')
  except (KeyError, TypeError) as error:
    raise ValueError(f'its record is none: {error}') from None
  return record


def _abstract_of(
  folder: json_files.Place, shapes: dict[str, list], most_bytes: int | None
) -> dict[str, Any]:
  """The arrays of a checkpoint by its own description, which must be that of its record, all on the
  first device."""
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  described = orbax_context.ocp.checkpointables_metadata(folder).metadata
  for name, tree in described.items():
    if tree is None and name != 'record':  # Orbax has warned, and would guess
      raise ValueError(f'the description of its {name} cannot be read')
  arrays = {
    name: tree_digest.abstract(tree, first) for name, tree in described.items() if name != 'record'
  }
  tree_digest.require_same_shapes(shapes, tree_digest.shapes(arrays))
  del described['record']
  tree_digest.require_size(described, most_bytes)
  return arrays


def _leads() -> bool:
  """Whether this process changes the files. All hosts of a learner save and read its arrays."""
  return jax.process_index() == 0


def _probe(root: json_files.Place) -> None:
  """Makes a folder for checkpoints, and writes to it."""
  root.mkdir(parents=True, exist_ok=True)
  probe = root / '.writable'
  try:
    probe.write_text('probe', 'utf-8')
  except FileNotFoundError as error:
    raise ValueError(f'there is no such bucket ({error})') from error
  probe.unlink(missing_ok=True)  # a request whose answer was lost is sent again


@contextlib.contextmanager
def _opening(root: json_files.Place) -> Iterator[None]:
  """Raises ValueError if this process may not write to a root, and CheckpointError if it is in a
  bucket that does not answer."""
  try:
    yield
  except Exception as error:  # of a bucket of any kind
    if isinstance(root, pathlib.Path):
      refused = isinstance(error, OSError)
    else:
      refused = isinstance(error, ValueError) or getattr(error, 'code', 0) == 401
      refused = refused or 'Forbidden' in str(error)
    if refused:
      raise ValueError(
        f'cannot write checkpoints under {root}: {_one_line(error)}; choose a folder that this '
        'process may write to'
      ) from error
    if isinstance(root, pathlib.Path):
      raise
    raise CheckpointError(
      f'{root} does not answer: {_one_line(error)}. Nothing was started; start again'
    ) from error


def _one_line(error: Exception) -> str:
  return ' '.join(str(error).split())[:400] or type(error).__name__
