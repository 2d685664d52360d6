"""The inner optimizer's state as bytes: what a donor gives to a learner that joins.

The bytes are the leaves of the optax state in the order of the tree, each raw, in C order and the
byte order of the machine (little endian on everything that JAX runs on), nothing between them. Both
ends know shapes and dtypes from the model and the optimizer that they have agreed on.

A snapshot is taken on the device between two steps: copies, since the next step donates the
originals, so for as long as it is on its way it takes as much device memory as the state itself.
The copies reach the host leaf by leaf and the payload in pieces of PIECE_BYTES, so that a thread
beside the steps never holds the interpreter for long.

The digest (64 bits) is of every bit of every leaf, computed where the leaf lies, so it holds from
the donor's device to the joiner's, whatever their meshes are.
"""

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.storage import checkpoint

PIECE_BYTES = 1 << 20


class Snapshot(NamedTuple):
  """On the device still: copies of the leaves, one digest per leaf, whether all is finite."""

  moments: Any
  digests: Any
  finite: jax.Array


@jax.jit
def snapshot(moments: Any) -> Snapshot:
  """Copies a state between two steps."""
  leaves = [leaf for leaf in jax.tree.leaves(moments) if jnp.issubdtype(leaf.dtype, jnp.floating)]
  finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
  return Snapshot(
    jax.tree.map(jnp.copy, moments), jax.tree.map(checkpoint.digest_leaf, moments), finite
  )


def digest(digests: Any) -> int:
  """One number of the digests of all leaves."""
  numbers = [int(value) for value in jax.device_get(jax.tree.leaves(digests))]
  return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8])


def size_bytes(moments: Any) -> int:
  """Of the bytes of a state, of arrays or of ShapeDtypeStructs."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(moments))


def to_bytes(moments: Any) -> memoryview:
  """The bytes of a state; waits for its devices."""
  data = np.empty(size_bytes(moments), np.uint8)
  start = 0
  for leaf in jax.tree.leaves(moments):
    raw = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
    for piece in range(0, raw.size, PIECE_BYTES):  # numpy copies without the interpreter's lock
      part = raw[piece : piece + PIECE_BYTES]
      data[start + piece : start + piece + part.size] = part
    start += raw.size
  return memoryview(data)


def from_bytes(data: memoryview | bytes, like: Any) -> Any:
  """A tree of numpy arrays, views of `data`.

  Raises:
    ValueError: there are more or fewer bytes than a state `like` this one has.
  """
  expected = size_bytes(like)
  if memoryview(data).nbytes != expected:
    raise ValueError(
      f'{memoryview(data).nbytes} bytes of moments came, this optimizer has {expected}'
    )
  raw, start, leaves = np.frombuffer(data, np.uint8), 0, []
  for leaf in jax.tree.leaves(like):
    size = leaf.size * leaf.dtype.itemsize
    leaves.append(raw[start : start + size].view(leaf.dtype).reshape(leaf.shape))
    start += size
  return jax.tree.unflatten(jax.tree.structure(like), leaves)
