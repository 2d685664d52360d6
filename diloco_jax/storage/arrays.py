"""A tree of arrays in a folder that plain Orbax reads: an exported model, an initial one.

from orbax.checkpoint import v1 as ocp
params = ocp.load('runs/NAME/model')
"""

import pathlib
from typing import Any

from orbax.checkpoint import v1 as ocp

from diloco_jax.storage import checkpoint


def save(path: pathlib.Path, tree: Any) -> None:
  """Writes a tree of numpy or jax arrays, replacing an older one. Raises CheckpointError."""
  try:
    ocp.save(path.absolute(), tree, overwrite=True)
  except Exception as error:  # Orbax raises many kinds
    raise checkpoint.CheckpointError(f'cannot write {path}: {error}') from error


def load(path: pathlib.Path) -> Any:
  """Reads a tree, nested dicts of arrays. Raises CheckpointError."""
  try:
    return ocp.load(path.absolute())
  except Exception as error:  # Orbax raises many kinds
    raise checkpoint.CheckpointError(f'cannot read {path}: {error}') from error
