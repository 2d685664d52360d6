"""Arrays that a user brings, in a folder that Orbax wrote or a *.safetensors file, and a trained
model in such a file."""

import importlib
import math
import pathlib
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import fragments
from diloco_jax.protocol import safe_json
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import json_files, orbax_context, states

by_name = fragments.by_path  # the names in a file are the paths of the tree
_DTYPES = {'F32': 'float32', 'F16': 'float16', 'BF16': jnp.bfloat16}
_ENTRY = {'dtype': str, 'shape': list[int], 'data_offsets': tuple[int, int]}


def load(path: pathlib.Path) -> Any:
  """Reads a folder that Orbax wrote: nested dicts of arrays, compared with its manifest if it has
  one, as RUN/model. Raises StateError; ValueError for a path that `files.require_name` refuses."""
  files_lib.require_name(path)
  if (path / states.MANIFEST).exists():
    return states.load_on_host(path.absolute())[1]
  try:
    for part in path.rglob('*'):
      if not part.is_dir():
        files_lib.require_file(part)
    with orbax_context.run_operation(alone=True):
      return orbax_context.ocp.load(path.absolute())
  except Exception as error:  # Orbax raises many kinds
    raise states.StateError(f'cannot read {path}: {states.one_line(error)}') from error


def start(path: str, shapes: Any) -> Any:
  """The arrays of a *.safetensors file, or of a folder that Orbax wrote, such as RUN/model, in the
  tree and the types of `shapes`. Raises ValueError: it is not readable, or of another model."""
  try:
    if path.endswith('.safetensors'):
      files_lib.require_file(path)
      saved = _safetensors().load_file(path)
    else:
      saved = by_name(load(pathlib.Path(path)))
  except Exception as error:  # Rust's
    raise ValueError(f'cannot read {path}: {error}') from error
  wanted = by_name(shapes)
  shape_of = lambda named: {name: leaf.shape for name, leaf in named.items()}
  require_shapes(path, shape_of(saved), shape_of(wanted))
  leaves = [np.asarray(saved[name], leaf.dtype) for name, leaf in wanted.items()]
  return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def require_shapes(path: str, saved: dict, wanted: dict, of: str = 'the model of this run') -> None:
  """Raises ValueError, which names the first tensor that differs."""
  for name in [*wanted, *saved]:
    shape, wanted_shape = saved.get(name, 'absent'), wanted.get(name, 'absent')
    if shape != wanted_shape:
      raise ValueError(f'{path}: {name} is {shape}, in {of} {wanted_shape}')


class Tensor(NamedTuple):
  """A tensor in a *.safetensors file, which is read where it is used."""

  path: pathlib.Path
  where: str  # for people
  kind: str  # its type there
  shape: tuple[int, ...]
  at: int  # its first byte

  def map(self) -> np.ndarray:
    """Raises ValueError, OSError."""
    if self.kind not in _DTYPES:
      raise ValueError(
        f'{self.where} is {self.kind}, which is not read: write it as one of {", ".join(_DTYPES)}'
      )
    return np.memmap(self.path, _DTYPES[self.kind], 'r', self.at, self.shape)


def tensors_in(path: pathlib.Path) -> dict[str, Tensor]:
  """The tensors in a *.safetensors file by name. Their bytes are side by side, from the end of the
  header to that of the file. Raises ValueError, OSError."""
  files_lib.require_file(path)
  with path.open('rb') as file:
    size = int.from_bytes(file.read(8), 'little')
    header = json_files.require_keys(path, file.read(min(size, safe_json.MAX_BYTES + 1)), {})
  header.pop('__metadata__', None)
  for name, entry in header.items():
    json_files.require_keys(f'{path}: {name}', entry, _ENTRY)
  tensors, at = {}, 8 + size
  for name, entry in sorted(header.items(), key=lambda item: item[1]['data_offsets']):
    new = Tensor(path, f'{name} in {path}', entry['dtype'], tuple(entry['shape']), at)
    tensors[name] = new
    begin, at = (8 + size + offset for offset in entry['data_offsets'])
    item = np.dtype(_DTYPES.get(new.kind, 'V0')).itemsize  # 0: not known
    is_full = not item or at - begin == item * math.prod(new.shape)
    if begin != new.at or not is_full or min((at - begin, *new.shape)) < 0:
      raise ValueError(f'{new.where} has other bytes than its type, its shape and its neighbours')
  if at != path.stat().st_size:
    raise ValueError(f'{path.name} has {path.stat().st_size} bytes, by its header {at}')
  return tensors


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
    files_lib.require_file(path)

  named = {name: np.asarray(leaf, order='C') for name, leaf in by_name(tree).items()}
  json_files.replace(path, numpy.save(named, metadata))
