"""Checkpoints of one node: asynchronous, atomic, verified when read.

One root per node, one state (states.py) per checkpoint:

  <root>/<number>/   parameters and optimizer state; clock, data cursor and the machine's state are
                     its record

A save writes to <number>.new, and the folder gets its name last, so a process killed during a save
leaves the previous checkpoint as the newest. A checkpoint that does not read back as it was written
is moved aside, with a warning, once the previous one has been read. If none can be read nothing is
moved: memory or the disk may have failed for a while.

The root may be in a bucket, gs://BUCKET/PREFIX. There a folder has its name from the start, and is
damaged until its manifest is there. Nothing keeps two processes from saving there at once; what
they have mixed does not read back.

The first save of a process of one host is read back before it counts: what was never read may be no
checkpoint. Several hosts save one checkpoint together, each its part of the arrays; the first of
them changes all other files.

A learner's anchors are not among them: it takes every fragment whole when it joins again.

The number is the clock or, if that is taken, the next one after the newest: no save replaces
another. The newest two are kept and, of every `keep_every` numbers, the first one: a run goes back
to these (process/restore.py).
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

from diloco_jax.protocol import rate_limited_log
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files, orbax_context, states, tree_digest

CHECKPOINTS_KEPT = 2  # the newest
SAY_AGAIN_NS = 60 * 10**9  # on a full disk every save fails
_NEW, _OLD = 'new', 'old'
_LOG = logging.getLogger(__name__)


class Restored(NamedTuple):
  """The arguments of `save`, read back and verified."""

  step: int  # the clock at which it was saved
  state: Any  # on the shardings asked for
  data_state: int
  protocol: dict[str, Any]


class Checkpoints:
  """The checkpoints of one node. Use an instance from one thread.

  Args:
    root: a folder of this node alone, created if it does not exist; or gs://BUCKET/PREFIX.
    keep_every: the first of every so many numbers is kept; 0: only the newest are.
    remedy: what to do if all are damaged.
    store: in which the root lies. While it is away nothing is created or saved.

  Attributes:
    pinned: the number of a checkpoint that is not removed for now, whatever its age.

  Raises:
    ValueError: the folder cannot be written, or `files.require_name` refuses its path, or a library
      is missing.
    StateError: the bucket does not answer.
  """

  def __init__(
    self,
    root: str,
    keep_every: int = 0,
    remedy: str = 'remove the folder to start without them',
    store: str = '',
  ):
    self._remedy, self._store = remedy, store
    self._root = folders.place(root)
    if isinstance(self._root, pathlib.Path):
      files_lib.require_name(self._root)
      self._root = self._root.resolve()
    # A save of this process has been read. Of several hosts none could read it alone: Orbax counts
    # the loads of each, and they would wait for each other.
    self._reads_back = jax.process_count() > 1
    self._keep_every = keep_every
    self.pinned: int | None = None
    self._under_way: futures.Future[int] | None = None
    self._awaited: futures.Future[int] | None = None  # a caller waits for it
    self._closed = False
    self._newest = -1  # the number of the newest; a step waits for no bucket that lists them
    self._notices = rate_limited_log.Notices(SAY_AGAIN_NS, _LOG.warning)
    self._checkpointer: Any = None  # Orbax's
    with _opening(self._root):
      if not folders.is_away(self._store):
        self._open()

  @property
  def numbers(self) -> list[int]:
    """The numbers of the checkpoints, whole or damaged, ascending."""
    return folders.numbers_in(self._root)

  def protocol(self, number: int) -> dict[str, Any]:
    """Reads the machine's state in a checkpoint, without the arrays. Raises Damaged."""
    return states.read(self._root / str(number), self._name(number)).record['protocol']

  def warm_up(self, state: Any) -> None:
    """Compiles what a save computes, so that the first one takes no longer than later ones."""
    tree_digest.compile_digests(state)

  def save(
    self, step: int, state: Any, data_state: int, protocol: dict[str, Any] | None = None
  ) -> Callable[[], int]:
    """Starts a save; returns as soon as `state` may change or be donated again.

    Waits first for a save that is still running.

    Returns:
      A function that blocks until this save is complete, returns its number, and raises StateError
      if it failed. It may be called from another thread, or not at all: `wait` and `close` wait as
      well, and `close` only warns.

    Raises:
      StateError: this save cannot start.
      TypeError: `protocol` is not JSON.
    """
    protocol = protocol or {}
    record = {'step': int(step), 'data_state': int(data_state), 'protocol': protocol}
    record['run'] = protocol.get('run') or protocol.get('protocol', {}).get('run', '')
    record = json.loads(json.dumps(record))  # what is no JSON fails here, not in the background
    rows = tree_digest.describe(state)
    self._wait_or_warn()
    if folders.is_away(self._store):
      raise states.StateError(f'{self._store} is away, so nothing was saved there')
    if self._checkpointer is None:
      try:
        self._open()
      except Exception as error:  # of a bucket of any kind
        raise states.StateError(f'cannot write {self._root}: {states.one_line(error)}') from error
    number = max(int(step), self._newest + 1)
    if jax.process_count() > 1:
      number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    orbax_context.ONE_OPERATION.acquire()
    if self._closed:  # while this thread hung: the folder may be another's by now
      orbax_context.ONE_OPERATION.release()
      raise states.StateError('the folder of checkpoints is closed')
    try:
      # Forced: the caller decides when to save, and a save skipped by a policy would be silent.
      response = self._checkpointer.save_checkpointables_async(number, {'state': state}, force=True)
    except Exception as error:
      orbax_context.ONE_OPERATION.release()
      raise self._failed(number, error) from error
    done = self._under_way = futures.Future()
    threading.Thread(
      target=self._complete, args=(number, response, done, rows, record), name='save', daemon=True
    ).start()

    def result() -> int:
      self._awaited = done
      return done.result()

    return result

  def restore(self, shardings: Any, like: Any, run: str = '') -> Restored | None:
    """Returns the newest checkpoint that verifies, or None if there is no checkpoint.

    Args:
      shardings: tree of Shardings for the state; the mesh may differ from the one that saved.
      like: tree of arrays or ShapeDtypeStructs, the state of this model and optimizer.
      run: of which it must be, if it is of any.

    Raises:
      ValueError: the checkpoint is of another model or optimizer, or of another format.
      StateError: there are checkpoints but none can be read; nothing was changed.
      JaxRuntimeError: the devices have failed; nothing was changed.
    """
    self._wait_or_warn()
    abstract, unread = tree_digest.abstract(like, shardings), {}

    def use(number: int) -> Restored:
      folder = self._root / str(number)
      try:
        manifest, tree = states.load(folder, abstract, self._name(number), run)
      except tree_digest.Mismatch as mismatch:
        raise ValueError(
          f'checkpoint {folder}: {mismatch}; restore with the configuration it was saved with, or '
          'choose another folder'
        ) from None
      record = manifest.record
      return Restored(record['step'], tree, record['data_state'], record['protocol'])

    try:
      restored = states.newest(lambda: self.numbers, use, unread.__setitem__)
    except states.Damaged as error:
      raise states.StateError(
        f'none of the checkpoints {self.numbers} under {self._root} can be read ({error}). Nothing '
        'was changed: if memory, the disk or its permissions have failed, start again once that is '
        f'mended; if they are damaged, {self._remedy}'
      ) from error
    for number, error in unread.items():
      self._set_aside(number, error)
    return restored

  def wait(self) -> None:
    """Blocks until the running save, if any, is complete. Raises StateError: it failed."""
    done, self._under_way = self._under_way, None
    try:
      if done:
        done.result()
    except states.StateError:
      with contextlib.suppress(Exception):
        self._checkpointer.wait()  # Orbax raises the error again in every thread that waits
      raise

  def close(self) -> None:
    """Waits for the running save, with a warning if it failed, and closes the folder."""
    self._closed = True
    self._wait_or_warn()
    if self._checkpointer is not None:
      with contextlib.suppress(Exception):
        self._checkpointer.wait()  # as in `wait`, for an error that another thread has waited for
      self._checkpointer.close()

  def _open(self) -> None:
    """Makes the folder, and opens it for saves."""
    if _leads():
      self._root.mkdir(parents=True, exist_ok=True)
      probe = self._root / '.writable'
      try:
        probe.write_text('probe', 'utf-8')
      except FileNotFoundError as error:
        raise ValueError(f'there is no such bucket ({error})') from error
      probe.unlink(missing_ok=True)  # a request whose answer was lost is sent again
      self._remove_left_over()
      self._newest = max(self.numbers, default=-1)
    self._checkpointer = orbax_context.checkpointer(
      self._root, _NEW if isinstance(self._root, pathlib.Path) else None
    )

  def _name(self, number: int) -> str:
    return f'{self._root.parent.name}/{number}'

  def _written(self, number: int) -> json_files.Place:
    """Where a save writes: a bucket has no folder that could get another name."""
    prefix = f'{_NEW}_' if isinstance(self._root, pathlib.Path) else ''
    return self._root / f'{prefix}{number}'

  def _complete(
    self,
    number: int,
    response: Any,
    done: futures.Future[int],
    rows: list[tuple[str, list[int], str, int]],
    record: dict[str, Any],
  ) -> None:
    """Runs in a separate thread, so that the next save can start even if no caller waits."""
    try:
      response.result()
      if _leads():
        folder = self._written(number)
        manifest = states.write(folder, self._name(number), rows, record)
        if not self._reads_back:
          with orbax_context.context():
            states.read_back(folder, manifest)
          self._reads_back = True
        if folder.name != str(number):
          json_files.move(folder, self._root / str(number))
        self._newest = number
        self._remove_old()
      done.set_result(number)
    except Exception as error:
      done.set_exception(self._failed(number, error))
    finally:
      orbax_context.ONE_OPERATION.release()

  def _remove_old(self) -> None:
    """Removes the checkpoints that need not be kept. A failure is no failure of the save."""
    kept = orbax_context.kept_numbers(self.numbers, CHECKPOINTS_KEPT, self._keep_every)
    for number in sorted(set(self.numbers) - {*kept, self.pinned}):
      self._remove(self._root / str(number))

  def _remove_left_over(self) -> None:
    """Removes what killed saves and failed removals have left."""
    for path in self._root.glob('*'):
      if isinstance(path, pathlib.Path):
        left_over = path.name.startswith((f'{_NEW}_', f'{_OLD}_'))
      elif left_over := path.name.isdecimal() and not (path / states.MANIFEST).exists():
        _LOG.warning('%s is of a save that did not end, and is removed', path)
      if left_over:
        self._remove(path)

  def _remove(self, folder: json_files.Place) -> None:
    try:
      if isinstance(folder, pathlib.Path) and folder.name.isdecimal():
        # Who reads it finds it gone, not damaged.
        folder = folder.rename(folder.with_name(f'{_OLD}_{folder.name}'))
      json_files.rmtree(folder)
    except OSError as error:
      text = f'an old checkpoint cannot be removed: {error}. Remove it by hand'
      self._notices.say(time.monotonic_ns(), 'old', text)

  def _wait_or_warn(self) -> None:
    """Waits like `wait`, but only warns of a failure, since the next save may succeed; not if the
    caller of that save waits for it."""
    is_awaited = self._under_way is self._awaited
    try:
      self.wait()
    except states.StateError as error:
      if not is_awaited:
        self._notices.say(time.monotonic_ns(), 'save', str(error))

  def _set_aside(self, number: int, error: Exception) -> None:
    folder, aside = self._root / str(number), self._root / f'unreadable-{number}'
    _LOG.warning('checkpoint %s, moved to %s: an older one is used', error, aside)
    if _leads():
      if aside.exists():
        json_files.rmtree(aside)
      json_files.move(folder, aside)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(aside.name)

  def _failed(self, number: int, error: Exception) -> states.StateError:
    if _leads():
      with contextlib.suppress(Exception):  # a store that is gone; its errors are of many kinds
        # Also of earlier saves: threads of Orbax may write on for a while after it has raised.
        json_files.rmtree(self._written(number))
      with contextlib.suppress(Exception):
        self._remove_left_over()
    with contextlib.suppress(Exception):
      self._checkpointer.reload()  # it counts what was removed
    earlier = 'there is no earlier one'
    if self._newest >= 0:
      earlier = f'checkpoint {self._newest} is still there'
    return states.StateError(
      f'saving {self._root / str(number)} failed: {states.one_line(error)}; {earlier}'
    )


def _leads() -> bool:
  """Whether this process changes the files. All hosts of a learner save and read its arrays."""
  return jax.process_index() == 0


@contextlib.contextmanager
def _opening(root: json_files.Place) -> Iterator[None]:
  """Raises ValueError if this process may not write to a root, and StateError if it is in a bucket
  that does not answer."""
  try:
    yield
  except Exception as error:  # of a bucket of any kind
    in_bucket = not isinstance(root, pathlib.Path)
    forbidden = getattr(error, 'code', 0) == 401 or 'Forbidden' in str(error)
    if isinstance(error, ValueError if in_bucket else OSError) or (in_bucket and forbidden):
      raise ValueError(
        f'cannot write checkpoints under {root}: {states.one_line(error)}; choose a folder that '
        'this process may write to'
      ) from error
    if not in_bucket:
      raise
    raise states.StateError(
      f'{root} does not answer: {states.one_line(error)}. Nothing was started; start again'
    ) from error
