"""The syncer's work on a run snapshot: its manifest, written last (manifests.py).

It runs on the work thread, like every save, so the checkpoints in the manifest are complete.
"""

import contextlib
import pathlib
import time

from diloco_jax.protocol import actions, events
from diloco_jax.protocol.syncer import checkpoints
from diloco_jax.storage import checkpoint, manifests, tapes

_REASON_CHARS = 200


def write(
  workdir: pathlib.Path,
  agreement: str,
  write: actions.WriteManifest,
) -> events.ManifestWritten:
  """Writes the manifest, then removes the oldest ones beyond SNAPSHOTS_KEPT. The answer names the
  learners whose parts are not under this folder: on another machine, or nowhere. A part that no
  checkpoint could have is not in the manifest."""
  unverified = tuple(part.learner for part in write.parts if not _is_there(workdir, part))
  parts = tuple(part for part in write.parts if _is_one(part))
  reasons = dict(write.missing) | {
    part.learner: 'what it has saved is no checkpoint' for part in write.parts if part not in parts
  }
  manifest = manifests.Manifest(
    snapshot=write.snapshot,
    step=write.clock,
    checkpoint=write.checkpoint,
    record_sha256=write.record_sha256,
    parts=parts,
    missing=tuple((name, why[:_REASON_CHARS]) for name, why in sorted(reasons.items())),
    unverified=tuple(name for name in unverified if name not in reasons),
    agreement=agreement,
    place=str(workdir.resolve()),
    commit=tapes.commit(),
    time=time.strftime('%Y-%m-%d %H:%M:%S'),
  )
  try:
    manifests.write(workdir, manifest)
  except OSError as error:
    if write.snapshot not in manifests.numbers(workdir):
      return events.ManifestWritten(snapshot=write.snapshot, error=str(error))
  remove_old(workdir)
  return events.ManifestWritten(snapshot=write.snapshot, unverified=unverified)


def remove_old(workdir: pathlib.Path) -> None:
  """Removes the oldest manifests beyond SNAPSHOTS_KEPT. If the disk fails, the next snapshot or the
  next start does it."""
  with contextlib.suppress(OSError):
    manifests.remove_all_but(workdir, manifests.numbers(workdir)[-checkpoints.SNAPSHOTS_KEPT :])


def _is_one(part: actions.Part) -> bool:
  """Whether a learner's words about its part could be true."""
  try:
    manifests.require_number('checkpoint', part.checkpoint)
    manifests.require_sha256(part.record_sha256)
    return True
  except ValueError:
    return False


def _is_there(workdir: pathlib.Path, part: actions.Part) -> bool:
  root = manifests.island_folder(workdir, part.learner) / manifests.CHECKPOINTS
  return _is_one(part) and checkpoint.has(root / str(part.checkpoint), part.record_sha256)
