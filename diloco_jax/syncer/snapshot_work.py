"""The syncer's work on a snapshot of the whole run: its own part, and the manifest.

On the work thread, like every save: what is merged before is in the part, what is merged after is
not. The manifest is the last word (manifests.py).
"""

import contextlib
import pathlib
import time
from typing import Any

from diloco_jax.config import build
from diloco_jax.protocol import actions, events
from diloco_jax.protocol.syncer import run_snapshot
from diloco_jax.storage import checkpoint, manifests, outer_log, tapes
from diloco_jax.storage import files as files_lib


class SyncerSnapshots:
  """The syncer's parts and the manifests of a run; one thread at a time."""

  def __init__(self, workdir: pathlib.Path, assembled: build.Assembly, log: outer_log.OuterLog):
    self._workdir = workdir
    self._agreement = assembled.agreement
    self._log = log
    self._parts: checkpoint.Checkpoints | None = None
    self._position: dict[str, Any] = {}  # of the newest part

  def save(self, save: actions.SavePart, arrays: dict[str, Any]) -> events.PartSaved:
    """Saves the syncer's part and removes those that are needed no more."""
    number, self._position = save.snapshot, self._log.position
    try:
      if self._parts is None:
        folder = manifests.syncer_folder(self._workdir) / manifests.FOLDER
        self._parts = checkpoint.Checkpoints(str(folder), keep_all=True)
      seal = self._parts.save(number, arrays, 0, (), {**save.books, **self._position})()
      self._parts.remove_all_but({*save.keep, number})
    except (checkpoint.CheckpointError, ValueError) as error:
      return events.PartSaved(snapshot=number, step=save.step, seal='', error=str(error))
    return events.PartSaved(snapshot=number, step=save.step, seal=seal)

  def write(self, write: actions.WriteManifest) -> events.ManifestWritten:
    """Writes the manifest, then drops those that are one too many."""
    try:
      manifests.write(
        self._workdir,
        {
          'snapshot': write.snapshot,
          'step': write.step,
          'syncer': write.seal,
          **self._position,
          'learners': {
            part.learner: {'incarnation': part.incarnation, 'step': part.step, 'seal': part.seal}
            for part in write.parts
          },
          'missing': dict(write.missing),
          'agreement': self._agreement,
          'commit': tapes.commit(),
          'time': time.strftime('%Y-%m-%d %H:%M:%S'),  # for people only
        },
      )
    except (OSError, files_lib.DirectoryError) as error:
      if write.snapshot not in manifests.numbers(self._workdir):
        return events.ManifestWritten(snapshot=write.snapshot, error=str(error))
    with contextlib.suppress(OSError, files_lib.DirectoryError):  # the next one tries again
      manifests.remove_all_but(
        self._workdir, manifests.numbers(self._workdir)[-run_snapshot.KEPT :]
      )
    return events.ManifestWritten(snapshot=write.snapshot)

  def close(self) -> None:
    if self._parts is not None:
      self._parts.close()
