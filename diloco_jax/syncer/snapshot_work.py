"""The syncer's work on a run snapshot: its manifest, written last (manifests.py).

It runs on the work thread, like every save, so the checkpoints in the manifest are complete.
"""

import contextlib
import pathlib
import time

from diloco_jax.protocol import actions, events
from diloco_jax.protocol.syncer import checkpoints
from diloco_jax.storage import checkpoint, manifests, seals, tapes


def write(
  workdir: pathlib.Path,
  agreement: str,
  write: actions.WriteManifest,
  key: seals.Key | None = None,
) -> events.ManifestWritten:
  """Writes the manifest, then removes the oldest ones beyond SNAPSHOTS_KEPT. The answer names the
  learners whose parts are not under this folder: on another machine, or nowhere."""
  unverified = tuple(part.learner for part in write.parts if not _is_there(workdir, part))
  manifest = manifests.Manifest(
    snapshot=write.snapshot,
    step=write.clock,
    checkpoint=write.checkpoint,
    record_sha256=write.record_sha256,
    parts=write.parts,
    missing=write.missing,
    unverified=unverified,
    agreement=agreement,
    place=str(workdir.resolve()),
    commit=tapes.commit(),
    time=time.strftime('%Y-%m-%d %H:%M:%S'),
  )
  try:
    manifests.write(workdir, manifest, key)
  except OSError as error:
    if write.snapshot not in manifests.numbers(workdir):
      return events.ManifestWritten(snapshot=write.snapshot, error=str(error))
  with contextlib.suppress(OSError):  # the next snapshot does it
    manifests.remove_all_but(workdir, manifests.numbers(workdir)[-checkpoints.SNAPSHOTS_KEPT :])
  return events.ManifestWritten(snapshot=write.snapshot, unverified=unverified)


def _is_there(workdir: pathlib.Path, part: actions.Part) -> bool:
  root = manifests.island_folder(workdir, part.learner) / manifests.CHECKPOINTS
  return checkpoint.has(root / str(part.checkpoint), part.record_sha256)
