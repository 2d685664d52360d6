"""The syncer's work on a run snapshot: its manifest, written last (manifests.py).

It runs on the work thread, like every save, so the checkpoints that the manifest names are complete.
"""

import contextlib
import pathlib
import time

from diloco_jax.protocol import actions, events
from diloco_jax.protocol.syncer import checkpoints
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import manifests, tapes


def write(
  workdir: pathlib.Path, agreement: str, write: actions.WriteManifest
) -> events.ManifestWritten:
  """Writes the manifest, then removes the oldest ones beyond SNAPSHOTS_KEPT."""
  try:
    manifests.write(
      workdir,
      {
        'snapshot': write.snapshot,
        'step': write.clock,
        'syncer': {'checkpoint': write.checkpoint, 'record_sha256': write.record_sha256},
        'learners': {
          part.learner: {
            'incarnation': part.incarnation,
            'checkpoint': part.checkpoint,
            'record_sha256': part.record_sha256,
          }
          for part in write.parts
        },
        'missing': dict(write.missing),
        'agreement': agreement,
        'commit': tapes.commit(),
        'time': time.strftime('%Y-%m-%d %H:%M:%S'),  # for people only
      },
    )
  except (OSError, files_lib.DirectoryError) as error:
    if write.snapshot not in manifests.numbers(workdir):
      return events.ManifestWritten(snapshot=write.snapshot, error=str(error))
  with contextlib.suppress(OSError, files_lib.DirectoryError):  # the next snapshot does it
    manifests.remove_all_but(workdir, manifests.numbers(workdir)[-checkpoints.SNAPSHOTS_KEPT :])
  return events.ManifestWritten(snapshot=write.snapshot)
