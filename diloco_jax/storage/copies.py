"""The copies of checkpoints in the store of a run, which a syncer on another disk and followers
read; syncer/stored.py puts them there."""

import hashlib
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

from diloco_jax.protocol import formats, safe_json
from diloco_jax.storage import json_files
from diloco_jax.storage import store as store_lib

LAST = '_CHECKPOINT_METADATA'  # of the files of a tree: Orbax reads no folder without it
_COPY = re.compile(r'.*/ckpt/\d+-[0-9a-f]{8}\.json')


class Damaged(store_lib.StoreError):
  """An object is not what was put."""


def part(restored: Sequence[str]) -> str:
  """The part of the store that has the copies and records since a run's last restore."""
  return f'syncer/restored-{restored[-1]}/' if restored else 'syncer/'


def names(store: store_lib.Store, at: str) -> list[str]:
  """The names of the complete copies in a part of the store, the newest last. Raises StoreError."""
  found = [
    name.removesuffix('.json') for name in store.names(f'{at}ckpt/') if _COPY.fullmatch(name)
  ]
  return sorted(found, key=lambda name: int(number(name)))


def number(name: str) -> str:
  """The number of the checkpoint of a copy."""
  return name.rsplit('/', 1)[1].split('-')[0]


def manifest(store: store_lib.Store, name: str) -> dict[str, Any]:
  """Raises StoreError if there is none any more; OtherFormat."""
  found, place = store.read(f'{name}.json'), f'{store.place}/{name}.json'
  try:
    values = safe_json.parse_object(found.data)
  except (AttributeError, ValueError) as error:
    raise store_lib.StoreError(f'{place} is no manifest') from error
  return formats.taken('manifest', values, place)


def download(store: store_lib.Store, name: str, folder: pathlib.Path) -> dict[str, Any]:
  """Writes the files of a complete copy; returns its manifest. Raises Damaged if an object is not
  what was put; StoreError."""
  about = manifest(store, name)
  new = folder.with_name(f'{folder.name}.new')
  shutil.rmtree(new, ignore_errors=True)
  for path, (size, digest) in about['files'].items():
    if path.startswith('/') or '..' in path.split('/'):
      raise Damaged(f'{store.place}/{name}.json names {path}')
    json_files.replace(new / path, store.parts(f'{name}/{path}', size))
    if sha256(new / path) != digest:
      raise Damaged(f'{store.place}/{name}/{path} is not what was put there')
  new.rename(folder)
  json_files.fsync_tree(folder)
  return about


def sha256(path: pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
