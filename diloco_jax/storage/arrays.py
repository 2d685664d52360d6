"""A tree of arrays in a folder that plain Orbax reads: an exported model, an initial one.

from orbax.checkpoint import v1 as ocp
params = ocp.load(pathlib.Path('runs/NAME/model').absolute())
"""

import pathlib
import re
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from diloco_jax.storage import checkpoint, files, json_files, tree_digest


def save(path: pathlib.Path, tree: Any) -> None:
  """Writes a tree of numpy or jax arrays, replacing an older one, durably, and reads it back;
  without shardings, so that any machine can read it. Raises CheckpointError; ValueError for a path
  that `files.require_name` refuses."""
  files.require_name(path)
  path = path.absolute()
  tree = jax.tree.map(np.asarray, tree)
  try:
    ocp.save(path, tree, overwrite=True)
    json_files.fsync_tree(path)
    digests = tree_digest.digests_of_host(tree)
    tree_digest.require_reads_back(tree, digests, lambda part: ocp.load(path, part))
  except Exception as error:  # Orbax raises many kinds
    raise checkpoint.CheckpointError(f'cannot write {path}: {error}') from _by_number(error)


def _by_number(error: Exception) -> Exception:
  """An OSError for one of TensorStore, which has its number only in its text: so that a full disk
  is known as one."""
  number = re.search(r"os_error_code='(\d+)'", str(error))
  return OSError(int(number[1]), str(error)) if number else error


def load(
  path: pathlib.Path, like: Any = None, name: str = 'AUTO', most_bytes: int | None = None
) -> Any:
  """Reads a tree: nested dicts of arrays, or the tree of ShapeDtypeStructs `like`. `name`: of one
  tree in a checkpoint of several; Orbax finds a single one. `most_bytes`: of the arrays in memory,
  for a folder from elsewhere. Raises CheckpointError, and ValueError for a path that
  `files.require_name` refuses."""
  files.require_name(path)
  try:
    if most_bytes is not None:
      described = ocp.metadata(path.absolute(), name).metadata
      tree_digest.require_size(described, most_bytes)
    return ocp.load(path.absolute(), like, checkpointable_name=name)
  except Exception as error:  # Orbax raises many kinds
    raise checkpoint.CheckpointError(f'cannot read {path}: {error}') from error
