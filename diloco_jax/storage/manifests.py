"""Snapshots of the whole run on disk: the manifests that make them, and what they pin.

    WORKDIR/snapshots/N.json        the manifest of snapshot N, written last
    WORKDIR/syncer/ckpt/NUMBER/     the syncer's checkpoints (storage/checkpoint.py)
    WORKDIR/islands/ID/ckpt/NUMBER/ a learner's

A manifest is JSON and names the checkpoints that it pins, each with the SHA-256 of its record,
which in turn holds a digest of every leaf: whatever has changed since is found from here. Its own
`digest` is the SHA-256 of all the rest. Checkpoints that were saved for a snapshot without a
manifest are ordinary ones: that snapshot never was.

`RESTORING` is there while a restore (restore.py) is under way: nothing may start from a state
directory that is half one thing and half another.
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
  """A manifest that cannot be trusted or read; says which and why."""


def syncer_folder(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / 'syncer'


def island_folder(workdir: pathlib.Path, learner: str) -> pathlib.Path:
  return workdir / 'islands' / learner


def numbers(workdir: pathlib.Path) -> list[int]:
  """Snapshots that have a manifest, sound or not, ascending."""
  found = (path.stem for path in (workdir / FOLDER).glob('*' + _SUFFIX))
  return sorted(int(stem) for stem in found if stem.isdecimal())


def read(workdir: pathlib.Path, number: int) -> dict[str, Any]:
  """The manifest of a snapshot, verified. Raises Unfit."""
  path = workdir / FOLDER / f'{number}{_SUFFIX}'
  try:
    manifest = json.loads(path.read_bytes())
    digest = manifest.pop('digest')
  except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
    raise Unfit(f'its manifest {path} does not read back: {error}') from None
  if digest != _digest(manifest) or manifest.get('snapshot') != number:
    raise Unfit(f'its manifest {path} is not what was written')
  if manifest['format'] != FORMAT:
    raise Unfit(f'its manifest {path} has format {manifest["format"]}, this release reads {FORMAT}')
  return manifest


def write(workdir: pathlib.Path, manifest: dict[str, Any]) -> None:
  """Makes a snapshot whole: durable on return. Raises OSError, DirectoryError."""
  manifest = {'format': FORMAT, **manifest}
  write_durably(
    workdir / FOLDER, f'{manifest["snapshot"]}{_SUFFIX}', {**manifest, 'digest': _digest(manifest)}
  )


def remove_all_but(workdir: pathlib.Path, keep: Collection[int]) -> None:
  """Removes the manifests of other snapshots, durably; what they pinned may go from then on. Raises
  OSError, DirectoryError."""
  files = files_lib.Files(workdir / FOLDER)
  try:
    for number in set(numbers(workdir)) - set(keep):
      files.remove(f'{number}{_SUFFIX}')
    files.fsync_names()  # none may come back once its checkpoints are gone
  finally:
    files.close()


def write_durably(folder: pathlib.Path, name: str, value: Any) -> None:
  """JSON in a file that is there whole and durable, or as it was. Raises OSError."""
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
  """Raises DirectoryError if a restore has begun and not ended."""
  path = syncer_folder(workdir) / RESTORING
  if path.exists():
    raise files_lib.DirectoryError(
      f'{workdir} is in the middle of a restore ({path}). Nothing is lost, nothing was started. '
      'Run it again with the same --restore.'
    )


def _digest(manifest: dict[str, Any]) -> str:
  text = json.dumps(manifest, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()
