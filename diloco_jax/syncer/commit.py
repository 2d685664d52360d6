"""The log of outer steps (storage/outer_log.py) in the process that owns its folder.

A full disk commits nothing: the outer step waits, and with it those that follow; learners train on.
A failing disk ends the process.
"""

import threading
import time
from collections.abc import Callable

from diloco_jax.node import failpoints
from diloco_jax.storage import checkpoint, outer_log, wal_format
from diloco_jax.storage import files as files_lib

RETRY_S = 0.5
SAY_AGAIN_S = 60.0


class Closed(Exception):
  """The log was closed while an outer step waited for space."""


class CommitLog(outer_log.OuterLog):
  """The log of one run; one thread at a time, but `close` from any."""

  def __init__(
    self,
    files: files_lib.Files,
    agreement: str,
    say: Callable[[str], None],
    retry_s: float = RETRY_S,
  ):
    """Takes the folder for this process.

    Args:
      files: the folder; closed by `close`.
      agreement, say: as for OuterLog.
      retry_s: pause before a full disk is tried again.

    Raises:
      DirectoryError: it cannot be written, or another syncer has it.
    """
    super().__init__(files, agreement, say)
    self._retry_s = retry_s
    self._closed = threading.Event()
    files.lock()
    files.probe()

  def write(self, step: outer_log.OuterStep) -> None:
    """Returns once the outer step is durable; waits while there is no space for it.

    Raises:
      WalBroken: the disk failed; nothing about this outer step may leave the process.
    """
    failpoints.reached('wal.before_append')
    self._append(step)
    failpoints.reached('wal.after_append')
    self.commit()
    failpoints.reached('wal.after_commit')

  def _append(self, step: outer_log.OuterStep) -> None:
    said_s = None
    while True:
      try:
        self.append(step)
        break
      except wal_format.WalFull as full:
        if said_s is None or time.monotonic() - said_s >= SAY_AGAIN_S:
          self._say(str(full))
          said_s = time.monotonic()
      if self._closed.wait(self._retry_s):
        raise Closed
    if said_s is not None:
      self._say(f'There is space on {self._files.place} again: outer updates are committed.')

  def compact_behind(self, checkpoints: checkpoint.Checkpoints) -> None:
    """Drops what the checkpoints make superfluous. Raises WalBroken."""
    try:
      newest = checkpoints.numbers[-checkpoint.CHECKPOINTS_KEPT :]
      self.compact([checkpoints.protocol(number) for number in newest])
    except checkpoint.CheckpointError as error:
      self._say(f'the log is kept as it is: {error}')
    except wal_format.WalFull:
      pass  # the next outer step says it; the next save tries again

  def close(self) -> None:
    """Gives the folder back. An outer step that waits for space waits no longer."""
    self._closed.set()
    self._files.close()
