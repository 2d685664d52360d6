"""Initial values that are drawn when they are read, shard by shard: no host draws the whole model.

A leaf knows its shape, and `leaf[slices]` draws what is asked for (train/mesh.py `put` asks for the
shards of this host, the syncer for one piece after the other). The bits follow from the seed, the
path of the leaf and the row alone, and numpy draws them on the host, float32: so learners on
different devices and meshes, and a syncer without a mesh, start from the same bits.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_AT_ONCE = 1 << 16  # values of a draw, at least, if the leaf has them


class _Leaf:
  """What a leaf must have to be read like an array of numpy."""

  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    del copy
    return self[:].astype(dtype or self.dtype)

  def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
    first, *rest = index if isinstance(index, tuple) else (index,)
    start, stop, _ = first.indices(self.shape[0])
    return self._rows(start, stop, tuple(rest))

  def _rows(self, start: int, stop: int, rest: tuple[slice, ...]) -> np.ndarray:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Normal(_Leaf):
  """Normally distributed values.

  Attributes:
    shape: of the leaf.
    std: standard deviation.
    key: what the draws depend on, integers; `seed_leaves` sets it.
    dtype: to which the draws are rounded.
  """

  shape: tuple[int, ...]
  std: float
  key: tuple[int, ...] = ()
  dtype: np.dtype = np.dtype(np.float32)

  def _rows(self, start: int, stop: int, rest: tuple[slice, ...]) -> np.ndarray:
    rows = max(1, _AT_ONCE // math.prod(self.shape[1:]))  # of a draw
    first, parts = start // rows, []
    for number in range(first, -(-stop // rows)):
      count = min(rows, self.shape[0] - number * rows)
      drawn = np.random.default_rng((*self.key, number)).standard_normal(
        (count, *self.shape[1:]), np.float32
      )
      part = drawn[max(0, start - number * rows) : stop - number * rows]
      parts.append((part[(slice(None), *rest)] * np.float32(self.std)).astype(self.dtype))
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked(_Leaf):
  """Equal leaves as the rows of one, for a scan over them."""

  leaves: Sequence[Any]

  @property
  def shape(self) -> tuple[int, ...]:
    return len(self.leaves), *self.leaves[0].shape

  @property
  def dtype(self) -> np.dtype:
    return self.leaves[0].dtype

  def _rows(self, start: int, stop: int, rest: tuple[slice, ...]) -> np.ndarray:
    return np.stack([leaf[rest or slice(None)] for leaf in self.leaves[start:stop]])


def seed_leaves(tree: Any, seed: int, dtype: str) -> Any:
  """The tree with draws that depend on `seed` and the path of each leaf; its leaves have `dtype`
  now."""
  kind = np.dtype(jnp.dtype(dtype))

  def name_leaf(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
    if not isinstance(leaf, Normal):
      return leaf.astype(kind)
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return dataclasses.replace(leaf, key=(seed, zlib.crc32(name.encode())), dtype=kind)

  return jax.tree_util.tree_map_with_path(name_leaf, tree)
