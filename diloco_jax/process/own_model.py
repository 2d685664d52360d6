"""The model of a user's own loop, what the syncer knows of it, and the settings of its run.

Frameworks disagree about trees (dicts, nnx states, dataclasses), so here the parameters are one
dict from name to array, the name being the path in the tree: 'layers/3/kernel'. flax.nnx ends every
path in '.value', which is left out, since it would change with flax.

A syncer without a task needs names, shapes, labels and version 0. The first learner brings them
(bring.py); the syncer writes them to the state WORKDIR/syncer/model, so that a restarted syncer has
them.
"""

import dataclasses
import json
import operator
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from diloco_jax.config import build, run_config
from diloco_jax.configs import own_loop
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import formats, safe_json
from diloco_jax.storage import arrays, folders, states
from diloco_jax.train import task as task_lib

MAX_HEADER_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class ModelDescription:
  """What a syncer must know of a user's own model.

  Attributes:
    shapes: name -> ShapeDtypeStruct of each parameter.
    labels: name -> the label of its merge rule (train/task.py).
    values: returns version 0, name -> float32 array.
  """

  shapes: Mapping[str, jax.ShapeDtypeStruct]
  labels: Mapping[str, str]
  values: Callable[[], dict[str, Any]]

  def header(self) -> str:
    """Everything but the values, as JSON."""
    return json.dumps(
      {
        **formats.stamp('model header'),
        'shapes': {name: [leaf.shape, str(leaf.dtype)] for name, leaf in self.shapes.items()},
        'labels': dict(self.labels),
      }
    )


NO_MODEL = ModelDescription({}, {}, dict)  # of a program that asks what the syncer has


def from_header(text: str, values: Callable[[], dict[str, Any]]) -> ModelDescription:
  """The inverse of `ModelDescription.header`. Raises ValueError if it is not one."""
  try:
    given = formats.require('model header', safe_json.parse_object(text), 'the model of this loop')
    shapes = {
      name: jax.ShapeDtypeStruct(tuple(shape), dtype)
      for name, (shape, dtype) in given['shapes'].items()
    }
    sizes = [size for leaf in shapes.values() for size in leaf.shape]
    if not all(type(size) is int and size >= 0 for size in sizes):
      raise ValueError('a size is no whole number, or negative')
    return ModelDescription(shapes, {name: str(given['labels'][name]) for name in shapes}, values)
  except formats.OtherFormat:
    raise
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'not the header of a model: {type(error).__name__}: {error}') from None


def as_arrays(tree: Any, what: str) -> Any:
  """The tree with arrays for leaves, of types that jax has; a number becomes a scalar. Warns once
  of values that lose bits. Raises ValueError for what is no array of numbers."""
  narrowed = []

  def as_array(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator='/') or 'the whole'
    value = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
      raise ValueError(
        f'{what}: {name} is a typed PRNG key, which has no bytes to exchange. Nothing was sent: '
        'keep the key out of the tree, or put jax.random.key_data(key) there'
      )
    if value.dtype != bool and not jax.dtypes.issubdtype(value.dtype, np.number):
      raise ValueError(
        f'{what}: {name} is a {type(leaf).__name__}, not an array of numbers. Nothing was sent: '
        'leave it out'
      )
    if isinstance(leaf, jax.Array):
      return leaf
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    if dtype != value.dtype and not isinstance(leaf, int | float):
      narrowed.append(name)
    return value.astype(dtype, copy=False)

  converted = jax.tree_util.tree_map_with_path(as_array, tree)
  if narrowed:
    warnings.warn(
      f'{what}: {len(narrowed)} leaves of NumPy have 64 bits, and jax takes 32 of them '
      f'({", ".join(narrowed[:3])}): give float32, or set JAX_ENABLE_X64=1 on all nodes',
      stacklevel=2,
    )
  return converted


def describe(params: Any, label: Callable[[str], str] | None) -> ModelDescription:
  """The model of a tree of parameters, without those that are never sent; `label` maps a name to a
  label, None: the usual ones."""
  named = arrays.by_name(params)
  if label is None:
    counted = statistics(params)
    label = lambda name: 'statistic' if name in counted else task_lib.embeddings(name)
  named = {name: leaf for name, leaf in named.items() if label(name) not in task_lib.NEVER_SENT}
  shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
  return ModelDescription(
    shapes={name: shape(leaf) for name, leaf in named.items()},
    labels={name: label(name) for name in named},
    values=lambda: {name: np.asarray(leaf, np.float32) for name, leaf in named.items()},
  )


def statistics(params: Any) -> set[str]:
  """The names of leaves that look like running statistics, by their name or as a BatchStat of
  flax.nnx."""
  is_counted = lambda node: any(kind.__name__ == 'BatchStat' for kind in type(node).__mro__)
  counted = jax.tree.map(lambda node: jax.tree.map(lambda _: is_counted(node), node), params,
                         is_leaf=is_counted)  # fmt: skip
  return {
    name
    for name, is_statistic in arrays.by_name(counted).items()
    if is_statistic or task_lib.embeddings(name) == 'statistic'
  }


def config(
  total_steps: int, sync: run_config.SyncConfig | None, shards: int | None
) -> run_config.Config:
  """The config of a run of own loops; without `sync`, the settings of configs/own_loop.py. `shards`
  None: each loop has data of its own."""
  settings = own_loop.get_config()
  settings.train.steps, settings.data.local = _plain(total_steps), shards is None
  settings.data.shards = settings.data.shards if shards is None else _plain(shards)
  settings.sync = sync or settings.sync
  return settings


def _plain(number: Any) -> Any:
  """An int of a NumPy integer, say; any other value as it is, which the config refuses."""
  return operator.index(number) if hasattr(number, '__index__') else number


def complete(model: ModelDescription, config: run_config.Config) -> build.Assembly:
  """The objects of a config without a task, and a model. Raises ValueError."""
  for name in model.shapes:
    if repr(name) != f"'{name}'":
      raise ValueError(
        f'the parameter name {name!r} has quotes or unprintable characters: rename it'
      )
  config.validate()
  terms = Terms.of(config, model)
  assembled = build.assemble_own_loop(config, model.values, dict(model.shapes), model.labels)
  return dataclasses.replace(assembled, about=terms.encode())


class Terms(NamedTuple):
  """What a syncer answers to a loop (bring.py).

  Attributes:
    settings: that all share, as JSON.
    model: the header of the model; '' while the syncer has none.
    run: the name of the run; '' before version 0.
  """

  settings: str
  model: str = ''
  run: str = ''

  @classmethod
  def of(cls, config: run_config.Config, model: ModelDescription | None = None) -> 'Terms':
    """The answer before the run begins."""
    return cls(agreement_lib.encode(config.agreement()), model.header() if model else '')

  @classmethod
  def decode(cls, answer: bytes) -> 'Terms':
    return cls(*answer.decode().split('\n')[:3])

  def encode(self) -> bytes:
    return '\n'.join(self if self.run else self[:2]).encode()

  def applied_to(self, config: run_config.Config) -> run_config.Config:
    """The config with the shared settings of the syncer. Raises ValueError."""
    values, shared = config.to_dict(), safe_json.parse_object(self.settings)
    for name in config.agreement().keys() & shared.keys():
      section, _, field = name.partition('.')
      values[section][field] = shared[name]
    return run_config.Config.from_dict(values)


# --- On disk --------------------------------------------------------------------------------------


def write(workdir: pathlib.Path, model: ModelDescription, config: run_config.Config) -> None:
  """Writes a model to WORKDIR/syncer/model. Raises StateError; ValueError, and
  writes nothing, if no syncer of this config could use it, or the folder has a run without one."""
  complete(model, config)
  require_no_run(workdir)
  values = model.values()
  for name, value in values.items():
    require_finite(name, value)
  states.save(workdir / folders.OWN_MODEL, folders.VERSION_0, values, {'header': model.header()})


def require_no_run(workdir: pathlib.Path) -> None:
  """Raises ValueError if a syncer has begun a run: one of own loops has its model before that."""
  if any(folders.log_folder(workdir).glob('*.rec')):
    raise ValueError(
      f'{workdir} holds a run without {folders.OWN_MODEL}, so it is none of own loops. '
      'Nothing was changed. Choose another folder'
    )


def read(workdir: pathlib.Path) -> ModelDescription | None:
  """The model in a folder, None if there is none. Raises ValueError if it is damaged."""
  folder = workdir / folders.OWN_MODEL
  if not folder.exists():
    return None
  try:
    header = states.read(folder, folders.VERSION_0).record['header']
  except states.Damaged as error:
    raise ValueError(
      f'{error}. Nothing was started or changed. Put a copy of {folder} back; a syncer with the '
      'store of the run takes the one there'
    ) from error
  return from_header(header, lambda: states.load_on_host(folder, name=folders.VERSION_0)[1])


def shown(name: str) -> str:
  """A name for people: that of an array of a tuple is its index alone."""
  return f'[{name}]' if name.isdigit() else name


def require_finite(name: str, value: np.ndarray) -> None:
  if not np.isfinite(value).all():
    raise ValueError(
      f'{shown(name)} has initial values that are not finite (NaN or infinite). Nothing was '
      'written; correct the initial parameters'
    )
