"""Shape, type and digest of each array of a tree, for the manifest of a state (states.py)."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import digest as digest_lib

_CHUNK = 1 << 20  # elements

_BYTES_PER_PARAMETER, _BYTES_BESIDE = 256, 64 << 20  # far more than any optimizer keeps


class Mismatch(Exception):
  """A checkpoint is whole but of another model or optimizer."""


def by_path(tree: Any) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def shapes(tree: Any) -> dict[str, list]:
  """Shape and dtype of each leaf, by path."""
  return {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in by_path(tree).items()}


def require_same_shapes(saved: dict[str, list], wanted: dict[str, list]) -> None:
  """Raises Mismatch, which names the first leaf that differs."""
  for path in sorted(saved.keys() | wanted.keys()):
    if saved.get(path) != wanted.get(path):
      raise Mismatch(
        f'{path} was saved as {saved.get(path, "absent")}, this program has '
        f'{wanted.get(path, "no such array")}'
      )


def describe(tree: Any) -> list[tuple[str, list[int], str, int]]:
  """Path, shape, type and digest of each leaf of a tree of arrays."""
  on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree))
  numbers = digests_of_host(tree) if on_host else digests(tree)
  return [(path, *shape, numbers[path]) for path, shape in shapes(tree).items()]


def digests(tree: Any) -> dict[str, int]:
  """One 32-bit number per leaf, computed on the leaf's devices: only numbers reach the host."""
  numbers = _digest_tree(tree) if _spans_hosts(tree) else jax.tree.map(_digest_in_turn, tree)
  return {path: int(value) for path, value in jax.device_get(by_path(numbers)).items()}


def require_digests(tree: Any) -> None:
  """Raises ValueError, which names the first leaf that no checkpoint can have."""
  for path, leaf in by_path(tree).items():
    try:
      jax.eval_shape(digest_leaf, leaf)
    except (TypeError, ValueError):  # of less than a byte
      raise ValueError(
        f'{path} is {leaf.dtype}, which no checkpoint can have. Nothing was sent: keep it as '
        'another type, as int8, or join without opt_state'
      ) from None


def compile_digests(tree: Any) -> None:
  """Compiles `digests` of such a tree without running it."""
  if _spans_hosts(tree):
    _digest_tree.lower(tree).compile()
    return
  alike = {(leaf.shape, leaf.dtype, leaf.sharding): leaf for leaf in jax.tree.leaves(tree)}
  for leaf in alike.values():
    _digest_leaf.lower(leaf).compile()


def digest_leaf(leaf: jax.Array) -> jax.Array:
  """sum_i mixed(bits_i, i) mod 2^32: exact in any order, so the same with any sharding.

  A change of one element of at most 32 bits always changes the sum. Terms that are linear in the
  bits would not do: a flipped bit in a compressed file changes the signs of several values, and two
  signs together change a linear sum by 2^31 (2 i + 1 + 2 j + 1), which is 0.
  """
  bits = _bits(leaf)
  index = jnp.zeros(bits.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(bits.ndim)):
    index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
    stride *= bits.shape[axis]
  return jnp.sum(digest_lib.mixed(bits, index), dtype=jnp.uint32)


_digest_leaf = jax.jit(digest_leaf)  # leaf by leaf: a program grows with its leaves
# Of several hosts in one program: two at once could wait for each other on different hosts.
_digest_tree = jax.jit(lambda tree: jax.tree.map(digest_leaf, tree))


def _digest_in_turn(leaf: Any) -> jax.Array:
  """Waits where devices are emulated: with dozens of all-reduces under way on the few threads of a
  CPU, XLA's devices wait for each other until it ends the process."""
  number = _digest_leaf(leaf)
  devices = number.devices()
  emulated = len(devices) > 1 and next(iter(devices)).platform == 'cpu'
  return number.block_until_ready() if emulated else number


def _spans_hosts(tree: Any) -> bool:
  shardings = (getattr(leaf, 'sharding', None) for leaf in jax.tree.leaves(tree))
  return not all(sharding is None or sharding.is_fully_addressable for sharding in shardings)


def _bits(leaf: jax.Array) -> jax.Array:
  """The bits of each element as a uint32; of 64 bits as two, along a further axis."""
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  if jnp.iscomplexobj(leaf):
    leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
  unsigned = jnp.dtype(f'uint{min(8 * leaf.dtype.itemsize, 32)}')
  bits = leaf if leaf.dtype == unsigned else jax.lax.bitcast_convert_type(leaf, unsigned)
  return bits.astype(jnp.uint32)


def require_same_digests(saved: dict[str, int], read: dict[str, int]) -> None:
  """Raises ValueError, which names the first leaf that differs."""
  for path, value in saved.items():
    if read.get(path) != value:
      raise ValueError(f'{path} has digest {read.get(path)}, was saved with {value}')


def digests_of_host(tree: Any) -> dict[str, int]:
  """As `digests`, of numpy arrays, on the host."""
  return {path: _digest_of_host(leaf) for path, leaf in by_path(tree).items()}


def _digest_of_host(leaf: np.ndarray) -> int:
  bits = np.ascontiguousarray(leaf).reshape(-1).view(f'uint{min(8 * leaf.dtype.itemsize, 32)}')
  total = 0
  for start in range(0, len(bits), _CHUNK):
    part = bits[start : start + _CHUNK].astype(np.uint32)
    index = np.arange(start, start + len(part), dtype=np.uint64).astype(np.uint32)
    total += int(np.sum(digest_lib.mixed(part, index), dtype=np.uint32))
  return total % (1 << 32)


def most_bytes(shapes: Any) -> int:
  """More than the arrays of a checkpoint of a model take, whatever its optimizer is."""
  return _BYTES_BESIDE + _BYTES_PER_PARAMETER * sum(leaf.size for leaf in jax.tree.leaves(shapes))


def require_size(described: Iterable[Any], most_bytes: int) -> None:
  """Refuses arrays, as Orbax describes them, that take more memory than their model can. Raises
  ValueError."""
  size = sum(map(num_bytes, described))
  if size > most_bytes:
    raise ValueError(
      f'its arrays take {size} bytes, those of this model at most {most_bytes}; nothing was read'
    )


def num_bytes(leaf: Any) -> int:
  """What reading a leaf takes: at least one chunk, however small the array is."""
  storage = getattr(leaf, 'storage_metadata', None)
  chunk = (storage and storage.chunk_shape) or ()
  return max(math.prod(leaf.shape), math.prod(chunk)) * leaf.dtype.itemsize


def abstract(tree: Any, shardings: Any = None) -> Any:
  """The shapes of a tree, to be read to these shardings: one, or a tree of them."""
  shape = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  if shardings is None or isinstance(shardings, jax.sharding.Sharding):
    return jax.tree.map(lambda leaf: shape(leaf, shardings), tree)
  return jax.tree.map(shape, tree, shardings)
