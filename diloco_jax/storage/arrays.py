"""A tree of arrays in a folder that plain Orbax reads: a trained model, an initial one; or in a
*.safetensors file.

from orbax.checkpoint import v1 as ocp
params = ocp.load(pathlib.Path('runs/NAME/model').absolute())
"""

import collections
import importlib
import json
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.storage import checkpoint, files, json_files, orbax_context, tree_digest

_DTYPES = {'F32': 'float32', 'F16': 'float16', 'BF16': jnp.bfloat16}
_HEADER_BYTES = 100 << 20  # the most that the format allows


def save(path: pathlib.Path, tree: Any) -> None:
  """Writes a tree of numpy or jax arrays, replacing an older one, durably, and reads it back;
  without shardings, so that any machine can read it. Raises CheckpointError; ValueError for a path
  that `files.require_name` refuses."""
  files.require_name(path)
  path = path.absolute()
  tree = jax.tree.map(np.asarray, tree)
  try:
    orbax_context.ocp.save(path, tree, overwrite=True)
    json_files.fsync_tree(path)
    digests = tree_digest.digests_of_host(tree)
    tree_digest.require_reads_back(tree, digests, lambda part: orbax_context.ocp.load(path, part))
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
    for part in path.rglob('*'):
      if not part.is_dir():
        files.require_file(part)
    if most_bytes is not None:
      described = orbax_context.ocp.metadata(path.absolute(), name).metadata
      tree_digest.require_size(described, most_bytes)
    return orbax_context.ocp.load(path.absolute(), like, checkpointable_name=name)
  except Exception as error:  # Orbax raises many kinds
    raise checkpoint.CheckpointError(f'cannot read {path}: {error}') from error


def by_name(tree: Any) -> dict[str, Any]:
  """The leaves by name, in tree order. Raises ValueError if two leaves have one name."""
  leaves = [
    (jax.tree_util.keystr(path, simple=True, separator='/'), leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]
  below = collections.Counter(
    name[:at] for name, _ in leaves for at, c in enumerate(name) if c in '/.'
  )
  named = {}
  for name, leaf in leaves:
    parent = name.removesuffix('/value').removesuffix('.value')
    if below[parent] == 1:  # of a flax.nnx variable; 'value' among others is a name
      name = parent
    if name in named:
      raise ValueError(f'two parameters have the name {name!r}; names are paths joined by "/"')
    named[name] = leaf
  return named


def start(path: str, shapes: Any) -> Any:
  """The arrays of a *.safetensors file, or of a folder that Orbax wrote, such as RUN/model, in the
  tree and the types of `shapes`. Raises ValueError: it is not readable, or of another model."""
  try:
    if path.endswith('.safetensors'):
      files.require_file(path)
      found = _safetensors().load_file(path)
    else:
      found = by_name(load(pathlib.Path(path)))
  except Exception as error:  # Rust's
    raise ValueError(f'cannot read {path}: {error}') from error
  wanted = by_name(shapes)
  shape_of = lambda named: {name: leaf.shape for name, leaf in named.items()}
  require_shapes(path, shape_of(found), shape_of(wanted))
  leaves = [np.asarray(found[name], leaf.dtype) for name, leaf in wanted.items()]
  return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def require_shapes(path: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
  """Raises ValueError, which names the first tensor that differs."""
  for name in [*wanted, *found]:
    here, there = (shapes.get(name, 'absent') for shapes in (found, wanted))
    if here != there:
      raise ValueError(f'{path}: {name} is {here}, in the model of this run {there}')


def mapped(
  path: pathlib.Path, wants: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
  """The tensors of a *.safetensors file whose names are wanted, read where they are used. Raises
  ValueError, OSError."""
  files.require_file(path)
  with path.open('rb') as file:
    size = int.from_bytes(file.read(8), 'little')
    header = json.loads(file.read(min(size, _HEADER_BYTES)))
  header.pop('__metadata__', None)
  found = {}
  for name, one in header.items():
    if wants(name):
      if one['dtype'] not in _DTYPES:
        raise ValueError(
          f'{name} is {one["dtype"]}, which is not read: write it as one of {", ".join(_DTYPES)}'
        )
      at = 8 + size + one['data_offsets'][0]
      found[name] = np.memmap(path, _DTYPES[one['dtype']], 'r', at, tuple(one['shape']))
  return found


def _safetensors() -> types.ModuleType:
  try:
    return importlib.import_module('safetensors.numpy')
  except ImportError as error:
    raise ValueError(f"{error}: pip install 'diloco-jax[data]'") from error


def export(path: pathlib.Path, tree: Any, metadata: dict[str, str]) -> None:
  """Writes a *.safetensors file, replacing an older one at once. Raises ValueError: the library is
  missing, or the path is of no regular file; OSError."""
  numpy = _safetensors()
  if path.exists():
    files.require_file(path)

  named = {name: np.asarray(leaf, order='C') for name, leaf in by_name(tree).items()}
  json_files.replace(path, numpy.save(named, metadata))
