"""Snapshots of the whole run on simulated disks, as storage/manifests.py has them.

A part is a file beside the checkpoints of its node, a manifest one on the syncer's disk. Each is
written beside, made durable, renamed; the manifest is the last. A seal is the digest of what was
meant to be written, so whatever a disk has made of it since is told from it.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Any

from diloco_jax.proof.sim import disk as disk_lib

KEPT = 2
_PART, _MANIFEST, _NEW = 'part-', 'manifest-', '.new'


def seal(state: Any) -> str:
  return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def save_part(
  disk: disk_lib.Disk, number: int, state: Any, keep: Collection[int]
) -> Iterator[None]:
  """Writes a part and removes those that are needed no more. Raises OSError."""
  yield from _write(disk, f'{_PART}{number:04}', state)
  for other in _numbers(disk, _PART):
    if other != number and other not in keep:
      disk.remove(f'{_PART}{other:04}')


def part(disk: disk_lib.Disk, number: int, expected: str) -> Any:
  """A part that is whole, by its seal; else None."""
  return _read(disk, f'{_PART}{number:04}', expected)


def write_manifest(disk: disk_lib.Disk, manifest: dict[str, Any]) -> Iterator[None]:
  """Makes a snapshot whole, and drops manifests that are one too many. Raises OSError."""
  yield from _write(disk, f'{_MANIFEST}{manifest["snapshot"]:04}', [manifest, seal(manifest)])
  for other in manifests(disk)[:-KEPT]:
    disk.remove(f'{_MANIFEST}{other:04}')
  disk.fsync_names()


def manifests(disk: disk_lib.Disk) -> list[int]:
  """The snapshots that have one, sound or not."""
  return _numbers(disk, _MANIFEST)


def manifest(disk: disk_lib.Disk, number: int) -> dict[str, Any] | None:
  """A manifest that is what was written; else None."""
  try:
    found, digest = json.loads(disk.read(f'{_MANIFEST}{number:04}'))
  except (ValueError, TypeError):
    return None
  return found if digest == seal(found) else None


def _write(disk: disk_lib.Disk, name: str, state: Any) -> Iterator[None]:
  data = json.dumps(state).encode()  # as it is now
  disk.create(_PART + _NEW)
  disk.append(_PART + _NEW, data)
  yield
  disk.fsync(_PART + _NEW)
  yield
  disk.rename(_PART + _NEW, name)
  yield
  disk.fsync_names()


def _read(disk: disk_lib.Disk, name: str, expected: str) -> Any:
  if name not in disk.names():
    return None
  try:
    state = json.loads(disk.read(name))
  except ValueError:
    return None
  return state if seal(state) == expected else None


def _numbers(disk: disk_lib.Disk, kind: str) -> list[int]:
  return [
    int(name.removeprefix(kind))
    for name in disk.names()
    if name.startswith(kind) and not name.endswith(_NEW)
  ]
