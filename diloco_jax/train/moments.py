"""The inner optimizer's state as bytes, which a donor sends to a joining learner.

The bytes are the leaves of the optax state in tree order, each raw, in C order and native byte
order (little endian on all hardware that JAX supports), without padding. Both ends know shapes and
dtypes from the model and the optimizer of the run.

The donor copies its moments on the device between two steps, since the next step donates the
originals; until the transfer ends the copy takes as much device memory as the moments themselves.
The copy moves to the host leaf by leaf and into the payload in pieces of PIECE_BYTES, so that the
copying thread never holds the interpreter lock for long.

The digest (64 bits) covers every bit of every leaf and is computed on the devices that hold the
leaf, so it is valid from the donor's devices to the joiner's, for any two meshes.
"""

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.storage import tree_digest as tree_digest_lib

PIECE_BYTES = 1 << 20


class Snapshot(NamedTuple):
  """A copy of the moments on the device, one digest per leaf, and whether all values are finite."""

  moments: Any
  digests: Any
  finite: jax.Array


@jax.jit
def snapshot(moments: Any) -> Snapshot:
  """Copies the moments between two steps."""
  finite = jnp.bool_(True)
  for leaf in jax.tree.leaves(moments):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      finite &= jnp.isfinite(leaf).all()
  return Snapshot(
    jax.tree.map(jnp.copy, moments), jax.tree.map(tree_digest_lib.digest_leaf, moments), finite
  )


def digest(digests: Any) -> int:
  """Combines the digests of all leaves into one number."""
  numbers = [int(value) for value in jax.device_get(jax.tree.leaves(digests))]
  return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8])


def size_bytes(moments: Any) -> int:
  """The number of bytes of a state, given as arrays or as ShapeDtypeStructs."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(moments))


def to_bytes(moments: Any) -> memoryview:
  """The bytes of a state; waits for its devices."""
  data = np.empty(size_bytes(moments), np.uint8)
  start = 0
  for leaf in jax.tree.leaves(moments):
    raw = np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
    for piece in range(0, raw.size, PIECE_BYTES):  # numpy copies without the interpreter lock
      part = raw[piece : piece + PIECE_BYTES]
      data[start + piece : start + piece + part.size] = part
    start += raw.size
  return memoryview(data)


def from_bytes(data: memoryview | bytes, like: Any) -> Any:
  """A tree of numpy arrays, views of `data`.

  Raises:
    ValueError: `data` has another size than the state `like`.
  """
  expected = size_bytes(like)
  if memoryview(data).nbytes != expected:
    raise ValueError(
      f'received {memoryview(data).nbytes} bytes of moments, but this optimizer has {expected}'
    )
  raw, start, leaves = np.frombuffer(data, np.uint8), 0, []
  for leaf in jax.tree.leaves(like):
    size = leaf.size * leaf.dtype.itemsize
    leaves.append(raw[start : start + size].view(leaf.dtype).reshape(leaf.shape))
    start += size
  return jax.tree.unflatten(jax.tree.structure(like), leaves)
