"""How a fragment lies on the devices of an island, and how its bytes on the wire get there.

A device holds of a fragment what it holds of the parameters: its part of each piece, one after the
other, as one flat vector. So the functions of numerics/exchange.py run on each device by itself,
on pieces of local shapes, and only flags and digests cross between devices. A flat array of an
island (anchor, payload, capture) is these vectors in the order of the devices; payloads on the wire
are the same for every island.

A part has to consist of whole blocks of 32 neighbours. Where the parts of a leaf do not, the
same axes of the mesh split the piece along another axis (the compiler exchanges its parts), or else
the piece is whole on every device. On one device all of this is the identity.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco_jax.numerics import codecs, exchange, fragments
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.transport import payloads as payloads_lib


class Kind(NamedTuple):
  """What the compiled functions of a fragment depend on: fragments of equal kinds share them.

  Attributes:
    pieces: of the fragment. Their paths are '0', '1' ..., the indices of their leaves in `leaves`;
      of their labels only that of statistics is kept. Their first rows are 0, as the functions get
      the real ones as an argument, except for leaves whose rows are split.
    leaves: shape, dtype and sharding of the parameters with rows in the fragment.
    sharding: of flat arrays; None: they are committed to no device.
    specs: how each piece is split.
    local: the pieces as one device has them; the path of each is its index in `pieces`.
  """

  pieces: exchange.Pieces
  leaves: tuple[jax.ShapeDtypeStruct, ...]
  sharding: jax.sharding.Sharding | None
  specs: tuple[P, ...]
  local: exchange.Pieces

  @property
  def size(self) -> int:
    """The values of one device."""
    return sum(piece.padded_size for piece in self.local)

  @property
  def parts(self) -> int:
    """1: flat arrays are whole on each device."""
    flat = isinstance(self.sharding, NamedSharding) and any(self.sharding.spec)
    return self.sharding.mesh.size if flat else 1

  @property
  def flat(self) -> P:
    """The spec of flat arrays."""
    return self.sharding.spec if self.parts > 1 else P()

  @property
  def shardings(self) -> list[jax.sharding.Sharding | None]:
    """How the rows of each piece lie."""
    if self.parts == 1:
      return [self.sharding] * len(self.specs)
    return [NamedSharding(self.sharding.mesh, spec) for spec in self.specs]

  @property
  def rows_specs(self) -> dict[str, P]:
    return by_index(self.specs)

  def like(self, size: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """A flat array with `size` elements on each device."""
    return jax.ShapeDtypeStruct((self.parts * size,), dtype, sharding=automatic(self.sharding))

  def jit(self, function: Callable, out: Any, donate: int | None = None) -> Any:
    """`function`, whose results lie as `out` says and which consumes its argument `donate`. It is
    lowered for arguments `automatic`."""
    return jax.jit(function, donate_argnums=donate, out_shardings=out)

  def on_each(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` as it runs on each device with its parts; inside `jit`."""
    if self.parts == 1:
      return function
    return jax.shard_map(
      function, mesh=self._auto_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  @property
  def _auto_mesh(self) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(self.sharding.mesh.devices, self.sharding.mesh.axis_names)

  def rows(self, leaves: exchange.Leaves, starts: jax.Array) -> exchange.Leaves:
    """The values of each piece. `starts`: the first row of each, int32."""
    values = []
    for index, piece in enumerate(self.pieces):
      rows = leaves[piece.path]
      if rows.shape != piece.shape:
        rows = jax.lax.dynamic_slice_in_dim(
          rows, self._start(index, starts), piece.stop - piece.start
        )
        rows = self._as_leaf(index, rows)
      values.append(rows)
    return by_index(values)

  def with_rows(
    self, leaves: exchange.Leaves, starts: jax.Array, rows: exchange.Leaves
  ) -> exchange.Leaves:
    """The leaves with the values of each piece replaced."""
    leaves = dict(leaves)
    for index, piece in enumerate(self.pieces):
      leaf, values = leaves[piece.path], rows[str(index)]
      if leaf.shape != piece.shape:
        values = self._as_leaf(index, values)
        values = jax.lax.dynamic_update_slice_in_dim(leaf, values, self._start(index, starts), 0)
      leaves[piece.path] = values
    return leaves

  def _start(self, index: int, starts: jax.Array) -> Any:
    piece = self.pieces[index]
    return piece.start if _splits_rows(self.leaves[int(piece.path)]) else starts[index]

  def _as_leaf(self, index: int, rows: jax.Array) -> jax.Array:
    """Some rows, split as their leaf. Otherwise the compiler may gather the whole leaf to split
    these rows along another axis."""
    leaf = self.leaves[int(self.pieces[index].path)]
    if self.parts == 1 or not _is_on(self.sharding.mesh, leaf.sharding) or _splits_rows(leaf):
      return rows
    sharding = NamedSharding(self._auto_mesh, leaf.sharding.spec)
    return jax.lax.with_sharding_constraint(rows, sharding)

  def digest(self, values_n: jax.Array) -> jax.Array:
    """The digest of the whole fragment, uint32[2], from the values of this device."""
    if self.parts == 1:
      return digest_lib.digest(values_n)
    zero = total = jnp.zeros(2, jnp.uint32)
    shares, first = collections.defaultdict(lambda: zero), 0  # by the axes that split a piece
    for (local, start, stop), piece, spec in zip(
      fragments.spans(self.local), self.pieces, self.specs
    ):
      if axes := tuple(sorted(sum(map(_axes, spec), ()))):
        shaped = fragments.unflatten(local, codecs.part(values_n, start, local.padded_size))
        shares[axes] += digest_lib.at(shaped, first + _indices(piece, local, spec))
      else:
        total += digest_lib.digest(values_n[start:stop], first)
      first += piece.padded_size
    return sum((jax.lax.psum(share, axes) for axes, share in shares.items()), total)


def automatic(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
  """The same, but the partitioner is free where a mesh of the user's own has explicit axes."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  mesh = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
  return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def by_index(values: Iterable[Any]) -> dict[str, Any]:
  """Values by their indices."""
  return {str(index): value for index, value in enumerate(values)}


def make_kind(
  pieces: exchange.Pieces,
  leaves: tuple[jax.ShapeDtypeStruct, ...],
  replicated: jax.sharding.Sharding | None,
) -> Kind:
  """The kind of a fragment. `pieces`: with the rows of their leaves; `replicated`: of a whole array
  on the devices of the island, None: no array is committed."""
  mesh = replicated.mesh if isinstance(replicated, NamedSharding) else None
  if mesh is not None and mesh.size > 1:
    sharding = NamedSharding(mesh, P(mesh.axis_names))
  else:
    sharding, mesh = replicated, None
  kept, specs, local = [], [], []
  for index, piece in enumerate(pieces):
    leaf = leaves[int(piece.path)]
    if not _splits_rows(leaf):
      piece = dataclasses.replace(piece, start=0, stop=piece.stop - piece.start)
    spec = _spec(mesh, piece.shape, leaf.sharding) if mesh else P()
    shape = NamedSharding(mesh, spec).shard_shape(piece.shape) if mesh else piece.shape
    rows = shape[0] if shape else 1
    kept.append(piece)
    specs.append(spec)
    local.append(dataclasses.replace(piece, path=str(index), start=0, stop=rows, shape=shape))
  return Kind(tuple(kept), leaves, sharding, tuple(specs), tuple(local))


def _splits_rows(leaf: jax.ShapeDtypeStruct) -> bool:
  """Whether the rows of a leaf are on several devices. A slice of them has to begin at a constant,
  or the compiler would gather all of them first."""
  sharding = leaf.sharding
  named = isinstance(sharding, NamedSharding) and leaf.shape
  return bool(named) and sharding.shard_shape(leaf.shape)[0] < leaf.shape[0]


def _spec(
  mesh: jax.sharding.Mesh, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None
) -> P:
  """As the leaf is split, if the parts are whole blocks; else along the first axis for which they
  are; else the piece is not split."""
  if not _is_on(mesh, sharding):
    return P()
  entries = [_axes(entry) for entry in sharding.spec]
  entries = [tuple(axis for axis in entry if mesh.shape[axis] > 1) for entry in entries]
  entries += [()] * (len(shape) - len(entries))
  used = sum(entries, ())
  moved = [
    [used if axis == target else () for axis in range(len(shape))] for target in range(len(shape))
  ]
  for choice in (entries, *moved) if used else ():
    ways = [math.prod(mesh.shape[axis] for axis in entry) for entry in choice]
    last = max(axis for axis, entry in enumerate(choice) if entry)
    even = all(size % number == 0 for size, number in zip(shape, ways))
    if even and math.prod(shape[last:]) // ways[last] % codecs.BLOCK == 0:
      return P(*(entry or None for entry in choice))
  return P()


def _is_on(mesh: jax.sharding.Mesh, sharding: jax.sharding.Sharding | None) -> bool:
  return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def _axes(entry: Any) -> tuple[str, ...]:
  return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _indices(piece: fragments.Piece, local: fragments.Piece, spec: P) -> jax.Array:
  """The indices in a piece of the values of this device, uint32, in their shape."""
  indices, stride = jnp.zeros(local.shape, jnp.uint32), piece.size
  for axis, (size, entry) in enumerate(zip(piece.shape, spec)):
    stride //= size
    at = jax.lax.broadcasted_iota(jnp.uint32, local.shape, axis)
    if axes := _axes(entry):
      at += jax.lax.axis_index(axes).astype(jnp.uint32) * np.uint32(local.shape[axis])
    indices += at * np.uint32(stride)
  return indices


_NUMBERS = codecs.get('float32')._replace(name='numbers', sections=(1,))  # one number for a block

# --- between host and devices ---------------------------------------------------------------------


def to_wire(kind: Kind, codec: codecs.Codec, array: jax.Array) -> memoryview:
  """A payload as it travels; waits for the device without holding the GIL. `array`: all of its
  parts are on devices of this host, or it is whole on one."""
  if kind.parts == 1:
    return payloads_lib.to_host(array)
  size, parts = codec.encoded_size(kind.size), {}
  for shard in array.addressable_shards:
    start = shard.index[0].start or 0
    data = np.asarray(shard.data)
    parts |= {(start + k) // size: data[k : k + size] for k in range(0, len(data), size)}
  data, done = np.empty(codec.encoded_size(_whole_size(kind)), np.uint8), set()
  for device, part in parts.items():
    for name, wire, own in _blocks(kind, codec, data, part, device):
      if name not in done:  # else a copy
        done.add(name)
        wire[:] = own
  return memoryview(data)


def from_wire(
  kind: Kind, codec: codecs.Codec, data: np.ndarray, dtype: Any = np.uint8
) -> jax.Array:
  """The flat array of a payload, uint8; each host puts the parts of its devices. `dtype`: of its
  elements."""
  if kind.parts == 1:
    return put(data.view(dtype), kind.sharding)
  like = kind.like(codec.encoded_size(kind.size) // np.dtype(dtype).itemsize, dtype)

  def part(index: tuple[slice]) -> np.ndarray:
    own_data = np.empty(codec.encoded_size(kind.size), np.uint8)
    device = (index[0].start or 0) * kind.parts // like.size
    for _, wire, own in _blocks(kind, codec, data, own_data, device):
      own[:] = wire
    return own_data.view(dtype)

  return jax.make_array_from_callback(like.shape, like.sharding, part)


def values(kind: Kind, data: np.ndarray) -> jax.Array:
  """The flat array of a whole value in float32, given as bytes."""
  return from_wire(kind, codecs.get('float32'), data, np.float32)


class Order(NamedTuple):
  """Where blocks are on the wire and in a flat array of several parts.

  Attributes:
    flat_B: int32, by the index of a block on the wire its index in the flat array.
    wire_F: int32, by the index of a block in the flat array its index on the wire.
  """

  flat_B: np.ndarray
  wire_F: np.ndarray


def order(kind: Kind) -> Order:
  """The order of the blocks in every payload of a fragment of this kind."""
  flat_B = np.arange(_whole_size(kind) // codecs.BLOCK, dtype=np.int32)
  wire_F = np.empty(kind.parts * kind.size // codecs.BLOCK, np.int32)
  for device, part in enumerate(wire_F.reshape(kind.parts, -1)):
    for _, wire, own in _blocks(kind, _NUMBERS, flat_B, part, device):
      own[:] = wire
  flat_B[wire_F] = np.arange(wire_F.size)  # any one of several copies
  return Order(flat_B, wire_F)


def reorder(
  widths: Sequence[int], parts: tuple[int, int], data: jax.Array, order_B: jax.Array
) -> jax.Array:
  """The blocks of a payload in another order, for use inside jit: as `to_wire` and `from_wire`.

  Args:
    widths: the elements of a block in each section of the codec.
    parts: of `data` and of the result: 1 on the wire, else Kind.parts.
    order_B: a field of Order.
  """
  before, after = parts
  rows, sections, start = data.reshape(before, -1), [], 0
  for width in widths:
    stop = start + rows.shape[1] // sum(widths) * width
    sections.append(rows[:, start:stop].reshape(-1, width)[order_B].reshape(after, -1))
    start = stop
  return jnp.concatenate(sections, axis=1).reshape(-1)


def put(values: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
  return jax.device_put(values) if sharding is None else mesh_lib.put(values, sharding)


def _whole_size(kind: Kind) -> int:
  return sum(piece.padded_size for piece in kind.pieces)


def _blocks(
  kind: Kind, codec: codecs.Codec, data: np.ndarray, part: np.ndarray, device: int
) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
  """The blocks of one device, for each piece and section of the codec: (what they are, views of
  them in the payload and in the bytes of the device)."""
  mesh = kind.sharding.mesh
  pieces = zip(fragments.spans(kind.pieces), fragments.spans(kind.local), kind.specs)
  for number, ((piece, start, stop), (_, first, last), spec) in enumerate(pieces):
    index = NamedSharding(mesh, spec).devices_indices_map(piece.shape)[mesh.devices.flat[device]]
    # The last axis that is split, with those behind it, is one axis of blocks.
    axis = max((axis for axis, entry in enumerate(spec) if entry), default=0)
    run = math.prod(piece.shape[axis + 1 :])
    where = [slice(*span.indices(size)) for span, size in zip(index[: axis + 1], piece.shape)]
    if any(spec):
      where[axis] = slice(
        where[axis].start * run // codecs.BLOCK, where[axis].stop * run // codecs.BLOCK
      )
    else:
      where = [slice(None)]
    for at, own, width in zip(
      codecs.ranges(codec, _whole_size(kind), start, stop),
      codecs.ranges(codec, kind.size, first, last),
      codec.sections,
    ):
      wire = data[at].reshape(*piece.shape[:axis], -1, width)[tuple(where)]
      yield (number, at.start, str(where)), wire, part[own].reshape(wire.shape)
