"""Manifests of run snapshots on the syncer's simulated disk, as in storage/manifests.py: files that
name the checkpoints that they pin (disk.py), written under another name, made durable, renamed.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from diloco_jax.protocol.syncer import checkpoints
from diloco_jax.verification.sim import disk as disk_lib

_MANIFEST, _NEW = 'manifest-', 'manifest.new'


def write(disk: disk_lib.Disk, manifest: dict[str, Any]) -> Iterator[None]:
  """Writes the manifest of a run snapshot, and drops superfluous ones. Raises OSError."""
  data = json.dumps(manifest).encode()
  disk.write(_NEW, hashlib.sha256(data).digest() + data)
  yield
  disk.fsync(_NEW)
  yield
  disk.rename(_NEW, f'{_MANIFEST}{manifest["snapshot"]:04}')
  yield
  disk.fsync_names()
  for other in numbers(disk)[: -checkpoints.SNAPSHOTS_KEPT]:
    disk.remove(f'{_MANIFEST}{other:04}')
  disk.fsync_names()


def numbers(disk: disk_lib.Disk) -> list[int]:
  """The run snapshots that have a manifest, whole or not."""
  return [int(name.removeprefix(_MANIFEST)) for name in disk.names() if name.startswith(_MANIFEST)]


def read(disk: disk_lib.Disk, number: int) -> dict[str, Any] | None:
  """A manifest, or None if it differs from what was written."""
  data = disk.read(f'{_MANIFEST}{number:04}')
  return json.loads(data[32:]) if hashlib.sha256(data[32:]).digest() == data[:32] else None
