"""Hugging Face folders: models as the library transformers writes them.

The tensors in `model.safetensors`, or in the files that `model.safetensors.index.json` names, are
mapped, not read: a process reads the rows of its own devices. If both are there they must be the
same. A matrix has its output axis first
there, its input axes here, and heads an axis of their own. Which decoder `config.json` describes,
and a run that begins with it: experiments/examples/pretrained.py.
"""

import errno
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from diloco_jax.storage import arrays, json_files, tree_digest
from diloco_jax.storage import files as files_lib

FILE, _INDEX = 'model.safetensors', 'model.safetensors.index.json'
_COPIED = re.compile(  # these are as true of other weights
  r'(generation_|tokenizer_)?config\.json|tokenizer\.(json|model)|(added_tokens|vocab)\.json|'
  r'special_tokens_map\.json|(vocab|merges)\.txt|chat_template\.(json|jinja)'
)
KNOWN = re.compile(rf'[^/]+\.safetensors|{re.escape(_INDEX)}|{_COPIED.pattern}')
_COMPUTED = '.rotary_emb.inv_freq'  # not read
_EMBEDDING, _HEAD = 'model.embed_tokens.weight', 'lm_head.weight'
_NAMES = {
  'embedding': 'model.embed_tokens',
  'final_norm': 'model.norm',
  'head': 'lm_head',
  **{name: f'self_attn.{name[0]}_proj' for name in ('query', 'key', 'value', 'out')},
  **{f'{name}_norm': f'self_attn.{name[0]}_norm' for name in ('query', 'key')},
  **{name: f'mlp.{name}_proj' for name in ('gate', 'up', 'down')},
  'attention_norm': 'input_layernorm',
  'mlp_norm': 'post_attention_layernorm',
}
_WITH_POST_NORMS = _NAMES | {
  'attention_post_norm': 'post_attention_layernorm',
  'mlp_norm': 'pre_feedforward_layernorm',
  'mlp_post_norm': 'post_feedforward_layernorm',
}


def is_model(path: str) -> bool:
  return path != '' and any(pathlib.Path(path, name).is_file() for name in (FILE, _INDEX))


def read(folder: str, like: Any) -> Any:
  """The tensors in the tree and the types of `like`, the leaves of a decoder without a scan. Raises
  ValueError: they cannot be read, or are of another model."""
  matches = _matches(like)
  wanted = {theirs: _shape(*match) for theirs, match in matches.items()}
  tensors = _tensors(pathlib.Path(folder), lambda theirs: not theirs.endswith(_COMPUTED))
  if _HEAD not in wanted and _HEAD in tensors:
    head = tensors.pop(_HEAD)
    if not _are_equal(head, tensors.get(_EMBEDDING)):
      raise ValueError(
        f'{head.where} is not {_EMBEDDING}, and the model of this run has one tensor for both. '
        'Nothing was changed: set tie_word_embeddings to false in config.json, or remove the tensor'
      )
  shapes = {theirs: tensor.shape for theirs, tensor in tensors.items()}
  arrays.require_shapes(folder, shapes, wanted)
  leaves = []
  for theirs, (name, leaf) in matches.items():
    rows = tensors[theirs].map()
    rows = rows if name == 'embedding' else rows.T
    leaves.append(np.asarray(rows.reshape(leaf.shape), leaf.dtype))
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _are_equal(tensor: arrays.Tensor, other: arrays.Tensor | None) -> bool:
  if other is None or tensor.shape != other.shape:
    return False
  rows, other_rows = np.atleast_1d(tensor.map()), np.atleast_1d(other.map())
  return all(map(np.array_equal, rows, other_rows))  # a row at a time, as they may be large


def tensors_of(params: Any) -> dict[str, np.ndarray]:
  """The tensors of such a folder by name. Raises ValueError."""
  named = {}
  for theirs, (name, leaf) in _matches(params).items():
    rows = np.asarray(leaf).reshape(_shape(name, leaf)[:: 1 if name == 'embedding' else -1])
    named[theirs] = rows if name == 'embedding' else rows.T
  return named


def write(folder: pathlib.Path, named: dict[str, np.ndarray], source: pathlib.Path) -> None:
  """Writes a new folder: the tensors in the types that they have in `source`, and the files
  there whose meaning is known. It is read back. Raises ValueError, OSError."""
  if folder.exists():
    raise ValueError(f'{folder} exists, and stays as it is: name a new folder')
  like = _tensors(source, named.__contains__)
  if absent := [name for name in named if name not in like]:
    raise ValueError(f'{source} is of another model: it has no {absent[0]}')
  typed = {name: tensor.astype(like[name].map().dtype) for name, tensor in named.items()}
  for file in source.iterdir():
    if _COPIED.fullmatch(file.name):
      json_files.replace(folder / file.name, file.read_bytes())
  arrays.export(folder / FILE, typed, {'format': 'pt'})
  written = {name: tensor.map() for name, tensor in arrays.tensors_in(folder / FILE).items()}
  if tree_digest.digests_of_host(typed) != tree_digest.digests_of_host(written):
    raise OSError(errno.EIO, f'{folder / FILE} does not read back')


def _matches(tree: Any) -> dict[str, tuple[str, Any]]:
  """Name there -> last part of the name here, and the leaf; in tree order."""
  ours, matches = arrays.by_name(tree), {}
  names = _WITH_POST_NORMS if any(name.endswith('_post_norm') for name in ours) else _NAMES
  for path, leaf in ours.items():
    *layer, name = path.split('/')
    if name not in names or len(layer) not in (0, 2):
      raise ValueError(f'no Hugging Face folder that is known here has {path}')
    within = f'model.layers.{layer[1]}.' if layer else ''
    matches[f'{within}{names[name]}.weight'] = name, leaf
  return matches


def _shape(name: str, leaf: Any) -> tuple[int, ...]:
  """The shape of the tensor in the file."""
  if name == 'embedding' or leaf.ndim == 1:
    return leaf.shape
  inputs = 2 if name == 'out' else 1
  return math.prod(leaf.shape[inputs:]), math.prod(leaf.shape[:inputs])


def read_object(path: pathlib.Path, keys: Mapping[str, Any]) -> dict[str, Any]:
  """The JSON object in a file, or behind a link to one as in the cache of Hugging Face, with these
  keys (json_files.require_keys). Raises ValueError, OSError."""
  files_lib.require_file(path)
  return json_files.require_keys(path, path.read_bytes(), keys)


def _tensors(folder: pathlib.Path, is_read: Callable[[str], bool]) -> dict[str, arrays.Tensor]:
  """The tensors of a folder that are read, each from the one file that the index names. Raises
  ValueError."""
  index, whole = (folder / _INDEX).is_file(), {}
  try:
    if not index or (folder / FILE).is_file():
      tensors = arrays.tensors_in(folder / FILE)
      whole = {name: tensor for name, tensor in tensors.items() if is_read(name)}
    if not index:
      return whole
    weight_map = read_object(folder / _INDEX, {'weight_map': dict[str, Any]})['weight_map']
    file_of = {name: file for name, file in weight_map.items() if is_read(name)}
    for name, file in file_of.items():
      if not re.fullmatch(r'[^/]+\.safetensors', str(file)):
        raise ValueError(f'{_INDEX} has {name} in {file!r}, no *.safetensors beside it')
    parts = {}
    for file in sorted(set(file_of.values())):
      tensors = arrays.tensors_in(folder / file)
      parts |= {name: tensor for name, tensor in tensors.items() if file_of.get(name) == file}
    if absent := sorted(file_of.keys() - parts.keys()):
      raise ValueError(f'{absent[0]} is not in {file_of[absent[0]]}, where the index has it')
    for name in whole and whole.keys() | parts:
      if name not in whole or not _are_equal(whole[name], parts.get(name)):
        raise ValueError(f'{name} is not the same in both')
    return parts
  except (OSError, ValueError) as error:
    both = f'{FILE} and {_INDEX} are there, remove one: ' if whole and index else ''
    raise ValueError(f'cannot read the model in {folder}: {both}{error}') from error
