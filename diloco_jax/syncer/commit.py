"""The log of outer steps (storage/outer_log.py) in the process that owns its folder.

While the disk is full nothing is committed: the outer step waits, and all later ones with it, while
learners keep training. After FULL_S without space, or if the disk fails, the process ends: learners
would train for nothing. A store (stored.py) that does not answer counts as a full disk.
"""

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.storage import checkpoint, json_files, outer_log, states, wal
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import store as store_lib
from diloco_jax.syncer import stored

MAX_AGREEMENT_BYTES = 1 << 20
RETRY_S = 5.0  # an attempt fills the disk for a moment, also for other processes
SAY_AGAIN_S = 60.0
FULL_S = 300.0


class Closed(Exception):
  """No outer step is written to the log any more."""


class CommitLog:
  """The log of one run. Call `recover` first, and all but `stop` from one thread at a time."""

  def __init__(
    self,
    files: files_lib.Files,
    agreement: str,
    say: Callable[[str], None],
    retry_s: float = RETRY_S,
    full_s: float = FULL_S,
    store: stored.Stored | None = None,
  ):
    """Locks the folder for this process.

    Args:
      files: the folder; closed by `close`, and by an error.
      agreement: as for outer_log.recover.
      say: prints a line for people.
      retry_s: pause before another write to a full disk.
      full_s: how long an outer step waits for space, or for the store.
      store: of the run.

    Raises:
      DirectoryError: the folder cannot be written, or another syncer has it.
    """
    self._files, self._agreement, self._say = files, agreement, say
    self._wal: wal.Wal | None = None
    self._retry_s, self._full_s, self._store = retry_s, full_s, store
    self._closed = threading.Event()
    try:
      files.lock()
      files.probe()
    except BaseException:
      files.close()
      raise

  @property
  def place(self) -> str:
    """The folder, for messages."""
    return self._files.place

  @property
  def position(self) -> dict[str, Any]:
    """The position for a checkpoint that holds every outer step committed so far."""
    return outer_log.position(self._wal)

  def recover(self, theta: outer_log.Theta, position: dict[str, Any]) -> list[outer_log.Ended]:
    """As outer_log.recover; the refusal of another run's log names the settings that differ."""
    path = pathlib.Path(self._files.place) / outer_log.AGREEMENT
    try:
      before = json_files.read_bytes(path, MAX_AGREEMENT_BYTES).decode()
    except (OSError, ValueError):
      before = ''  # the last process has written none that can be read
    try:
      self._wal, ended = outer_log.recover(self._files, self._agreement, theta, position)
    except wal.WalUnsupported as error:
      differences = agreement_lib.differences(self._agreement, before or self._agreement)
      raise wal.WalUnsupported(' '.join([str(error), '; '.join(differences)])) from error
    for line in self._wal.words:
      self._say(line)
    if before != self._agreement:
      with contextlib.suppress(OSError):  # a full disk; the refusal would be shorter
        json_files.replace(path, self._agreement.encode())
    return ended

  def write(self, step: outer_log.OuterStep) -> None:
    """Returns once the outer step is durable; waits while the disk has no space for it, or the
    store does not answer.

    Raises:
      Closed: `stop` was called before it was written.
      WalFull: there was no space, or no answer, for too long.
      Denied: another syncer has the claim.
      WalBroken: the disk failed; nothing about this outer step may leave the process.
    """
    buffers = outer_log.encode(step)
    said_s = full_s = number = None  # times of the last line, and of the first refusal
    durable = False
    while not self._closed.is_set():
      try:
        if number is None:
          number = self._wal.append(outer_log.OUTER_STEP, *buffers)
        if self._store and not durable:
          self._store.before_commit(number, lambda: self._files.read(wal.NEW))
        self._wal.commit()
        durable = True
        if self._store:
          self._store.after_commit(number, step.merge.sync)
        break
      except wal.WalFull as full:
        number, why, remedy = None, full, 'make space'
      except store_lib.StoreError as error:
        why, remedy = f'No outer step is committed: {error}.', 'mend that'
      now_s = time.monotonic()
      full_s = now_s if full_s is None else full_s
      if now_s - full_s >= self._full_s:
        raise wal.WalFull(
          f'{why} It was so for {self._full_s / 60:g} minutes, so the process ends: {remedy} and '
          'start it again; it continues from there.'
        )
      if said_s is None or now_s - said_s >= SAY_AGAIN_S:
        self._say(str(why))
        said_s = now_s
      self._closed.wait(self._retry_s)
    else:
      raise Closed
    if said_s is not None:
      self._say(f'{self._files.place} has space again, its store answers: steps are committed.')

  def compact_behind(self, checkpoints: checkpoint.Checkpoints) -> None:
    """Drops the records that the checkpoints make superfluous. Raises WalBroken."""
    try:
      newest = checkpoints.numbers[-checkpoint.CHECKPOINTS_KEPT :]
      outer_log.compact(self._wal, [checkpoints.protocol(number) for number in newest])
    except states.StateError as error:
      self._say(f'the log keeps all its records: {error}')

  def stop(self) -> None:
    """From now on no outer step is written: one that waits for space, and later ones, raise
    Closed."""
    self._closed.set()

  def close(self) -> None:
    """Unlocks the folder."""
    self.stop()
    self._files.close()
