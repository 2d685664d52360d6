"""Run snapshots on disk: their manifests and the checkpoints that these pin.

    WORKDIR/snapshots/N.json        the manifest of snapshot N, written last
    WORKDIR/syncer/ckpt/NUMBER/     the syncer's checkpoints (storage/checkpoint.py)
    WORKDIR/islands/ID/ckpt/NUMBER/ a learner's

A manifest is JSON and names the checkpoints that it pins, each with the SHA-256 of its record,
which in turn holds a digest of every leaf: so the manifest detects every later change. Its own
`digest` is the SHA-256 of all its other fields. Without a manifest a snapshot does not exist:
checkpoints that were saved for it are ordinary ones.

The file `RESTORING` exists while a restore (restore.py) runs: no process may start from a folder
that is half restored.
"""

import hashlib
import json
import pathlib
from collections.abc import Collection
from typing import Any

from diloco_jax.storage import files as files_lib

FORMAT = 1
FOLDER = 'snapshots'
CHECKPOINTS = 'ckpt'
RESTORING = 'restoring.json'
RESTORED = 'restored.json'
_SUFFIX = '.json'


class Unfit(ValueError):
  """A manifest cannot be read or does not verify; the text says which and why."""


def syncer_folder(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / 'syncer'


def island_folder(workdir: pathlib.Path, learner: str) -> pathlib.Path:
  return workdir / 'islands' / learner


def numbers(workdir: pathlib.Path) -> list[int]:
  """The snapshots that have a manifest, whole or damaged, ascending."""
  found = (path.stem for path in (workdir / FOLDER).glob('*' + _SUFFIX))
  return sorted(int(stem) for stem in found if stem.isdecimal())


def read(workdir: pathlib.Path, number: int) -> dict[str, Any]:
  """Reads and verifies the manifest of a snapshot. Raises Unfit."""
  path = workdir / FOLDER / f'{number}{_SUFFIX}'
  try:
    manifest = json.loads(path.read_bytes())
    digest = manifest.pop('digest')
  except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
    raise Unfit(f'its manifest {path} does not read back: {error}') from None
  if digest != sha256(manifest) or manifest.get('snapshot') != number:
    raise Unfit(f'its manifest {path} is not what was written')
  if manifest['format'] != FORMAT:
    raise Unfit(f'its manifest {path} has format {manifest["format"]}, this release reads {FORMAT}')
  return manifest


def write(workdir: pathlib.Path, manifest: dict[str, Any]) -> None:
  """Writes the manifest of a snapshot, durable on return. Raises OSError, DirectoryError."""
  manifest = {'format': FORMAT, **manifest}
  write_durably(
    workdir / FOLDER, f'{manifest["snapshot"]}{_SUFFIX}', {**manifest, 'digest': sha256(manifest)}
  )


def remove_all_but(workdir: pathlib.Path, keep: Collection[int]) -> None:
  """Removes the manifests of other snapshots, durably; then the checkpoints that they pinned may be
  deleted. Raises OSError, DirectoryError."""
  files = files_lib.Files(workdir / FOLDER)
  try:
    for number in set(numbers(workdir)) - set(keep):
      files.remove(f'{number}{_SUFFIX}')
    files.fsync_names()  # no manifest may outlive its checkpoints
  finally:
    files.close()


def write_durably(folder: pathlib.Path, name: str, value: Any) -> None:
  """Writes JSON to a file that on return is complete and durable, and after an error is as it was
  before. Raises OSError."""
  files = files_lib.Files(folder)
  try:
    files.create(name + '.new')
    files.append(name + '.new', json.dumps(value, indent=1).encode() + b'\n')
    files.fsync(name + '.new')
    files.rename(name + '.new', name)
    files.fsync_names()
  finally:
    files.close()


def require_no_restore(workdir: pathlib.Path) -> None:
  """Raises DirectoryError if a restore has begun but not ended."""
  path = syncer_folder(workdir) / RESTORING
  if path.exists():
    raise files_lib.DirectoryError(
      f'{workdir} is in the middle of a restore ({path}). Nothing is lost, nothing was started. '
      'Run diloco restore again, with the same --to.'
    )


def sha256(values: dict[str, Any]) -> str:
  """The SHA-256 of a manifest or of a checkpoint's record, as hex digits."""
  text = json.dumps(values, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()
