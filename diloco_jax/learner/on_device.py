"""The exchange of fragments on the devices of an island: its anchors, encodings, adoptions."""

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build
from diloco_jax.learner import carriers, island_port, split
from diloco_jax.node import payload as payload_lib
from diloco_jax.numerics import codecs, exchange, fragments
from diloco_jax.numerics import digest as digest_lib


class Exchange:
  """The anchors of an island and the functions that exchange its fragments, compiled ahead of use.

  `compile_all` compiles the functions of every sync, in the order of the syncs. A caller whose
  function is not compiled yet waits for that function only.

  Made from shapes alone (jax.ShapeDtypeStruct with shardings, also on devices that this machine
  lacks) it can lower its functions and no more. `begin` makes the arrays.

  Attributes:
    kinds: by fragment, the argument of `lower_encode`, `lower_adopt` and `lower_apply`.
    anchors: by fragment, from `begin` on.
  """

  def __init__(
    self,
    assembled: build.Assembly,
    island: island_port.IslandState,
    compiled: dict[tuple, futures.Future] | None = None,
    in_process: bool = False,
  ):
    """`compiled`: the functions of an equal model on the same devices, to share them. `in_process`:
    the syncer is in this process, and payloads are arrays of jax (node/payload.py)."""
    self._island = island
    self._layout = assembled.layout
    self._codec_up, self._codec_down = assembled.codec_up, assembled.codec_down
    self._rebases = assembled.protocol.rebases
    # By fragment: where its leaves are among those of the parameters, and the first row of each of
    # its pieces.
    self._leaf_indices: list[list[list[int]]] = []
    self._first_rows: list[np.ndarray] = []
    order = {path: index for index, path in enumerate(fragments.by_path(island.params))}
    self.kinds = self._make_kinds(order)
    self._programs = carriers.CompiledFunctions(compiled)
    carrier = carriers.HostsBytes if jax.process_count() > 1 else carriers.Bytes
    self._carrier = (carriers.Arrays if in_process else carrier)(
      self._programs, self._codec_up, self._codec_down, island.replicated
    )
    # By fragment: its newest encoded pseudo-gradient, on the device.
    self._captures: dict[int, jax.Array] = {}
    # On CPUs the first touch of a page costs more than the encoding. So there the exchange keeps a
    # merged payload of each size, and the next payload takes its place.
    device = next(iter(jax.tree.leaves(island.params)[0].sharding.device_set))
    self._reuses = self._rebases and device.platform == 'cpu' and not in_process
    self._merged: dict[int, jax.Array] = {}
    self._digest = jax.jit(digest_lib.digest)

  def _make_kinds(self, order: dict[str, int]) -> list[split.Kind]:
    like = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    params, replicated = self._island.params, self._island.replicated
    likes = fragments.by_path(jax.tree.map(like, params, self._island.shardings.params))
    self._likes = list(likes.values())
    self._concatenate = jax.jit(jnp.concatenate, out_shardings=replicated)
    kinds = []
    for pieces in self._layout.fragments:
      packed = fragments.pack_pieces(pieces, likes, replicated)
      leaves = {paths: leaf for _, paths, leaf in packed}
      names = {paths: name for name, paths in split.by_index(leaves).items()}
      label = lambda piece: piece.label if piece.label == fragments.STATISTIC else ''
      named = (
        dataclasses.replace(piece, path=names[paths], label=label(piece))
        for piece, paths, _ in packed
      )
      kinds.append(split.make_kind(tuple(named), tuple(leaves.values()), replicated))
      self._leaf_indices.append([[order[path] for path in paths] for paths in leaves])
      self._first_rows.append(np.int32([piece.start for piece, *_ in packed]))
    return kinds

  def begin(self) -> 'Exchange':
    """Makes the parameters as they are the anchors; returns itself."""
    self.borrow()  # the first arrays are a program's own
    put = functools.partial(split.put, sharding=self._island.replicated)
    self._flags = put(np.bool_(False)), put(np.bool_(True))
    self._starts = list(map(put, self._first_rows))
    self.anchors = [
      self._programs.get(self._lower_gather, kind)(self._leaves(p), self._starts[p])
      for p, kind in enumerate(self.kinds)
    ]
    return self

  def borrow(self) -> None:
    """No adoption consumes the parameters as they are now."""
    # Weak references: an array that the program has let go of is nobody's.
    self._borrowed = [weakref.ref(leaf) for leaf in jax.tree.leaves(self._island.params)]

  def compile_all(self, stopped: Callable[[], bool] = lambda: False) -> None:
    """Ends early, between two functions, once `stopped` returns true."""
    for kind in self.kinds:
      for lower, *key in (
        (self.lower_encode, kind),
        (self.lower_adopt, kind),
        (self.lower_apply, kind),
        *self._carrier.needs(kind),
      ):
        if stopped():
          return
        self._programs.get(lower, *key)

  @property
  def launches(self) -> int:
    """How many functions were launched: as many on each host of a learner."""
    return self._programs.launches

  def _lower_gather(self, kind: split.Kind) -> jax.stages.Lowered:
    def flat(rows: exchange.Leaves) -> jax.Array:
      parts = [fragments.flat(piece, rows[piece.path]) for piece in kind.local]
      return codecs.canonical(jnp.concatenate(parts))

    each = kind.on_each(flat, (kind.rows_specs,), kind.flat)
    gather = lambda leaves, starts: each(kind.rows(leaves, starts))
    return kind.jit(gather, kind.sharding).lower(*self._leaves_like(kind))

  def _lower_digest(self, kind: split.Kind) -> jax.stages.Lowered:
    each = kind.on_each(kind.digest, (kind.flat,), jax.P())
    return kind.jit(each, self._island.replicated).lower(kind.like(kind.size, np.float32))

  def lower_encode(self, kind: split.Kind) -> jax.stages.Lowered:
    codec = self._codec_up
    size = codec.encoded_size(kind.size)

    def encode(data, rows, anchor_n):
      data = jnp.zeros(size, jnp.uint8) if data is None else data
      data, ok = exchange.pseudo_gradient(kind.local, codec, data, rows, anchor_n)
      return data, ok[None]

    each = kind.on_each(encode, (kind.flat, kind.rows_specs, kind.flat), (kind.flat, kind.flat))

    def encode_all(data, leaves, starts, anchor):
      data, oks = each(data, kind.rows(leaves, starts), anchor)
      return data, jnp.all(oks)

    shardings = kind.sharding, self._island.replicated
    return kind.jit(encode_all, shardings, donate=0).lower(
      kind.like(size, np.uint8) if self._reuses else None,
      *self._leaves_like(kind),
      kind.like(kind.size, np.float32),
    )

  def lower_adopt(self, kind: split.Kind) -> jax.stages.Lowered:
    adopt = functools.partial(exchange.adopt, kind.local, self._codec_up, self._codec_down)
    specs = exchange.Adoption(*3 * (kind.flat,), *2 * (jax.P(),))
    each = kind.on_each(adopt, (kind.rows_specs, kind.flat, specs), kind.rows_specs)

    def adopt_all(leaves, starts, anchor, published):
      rows = each(kind.rows(leaves, starts), anchor, published)
      return kind.with_rows(leaves, starts, rows)

    anchor, flag = kind.like(kind.size, np.float32), self._like((), np.bool_)
    data, capture = (
      kind.like(codec.encoded_size(kind.size), np.uint8)
      for codec in (self._codec_down, self._codec_up)
    )
    shardings = split.by_index(leaf.sharding for leaf in kind.leaves)
    return kind.jit(adopt_all, shardings, donate=0).lower(
      *self._leaves_like(kind), anchor, exchange.Adoption(anchor, data, capture, flag, flag)
    )

  def lower_apply(self, kind: split.Kind) -> jax.stages.Lowered:
    def apply(base_n, data):
      published_n, _ = exchange.apply_delta(self._codec_down, base_n, data)
      return published_n, kind.digest(published_n)

    each = kind.on_each(apply, (kind.flat, kind.flat), (kind.flat, jax.P()))
    shardings = kind.sharding, self._island.replicated
    return kind.jit(each, shardings, donate=0).lower(
      kind.like(kind.size, np.float32),
      kind.like(self._codec_down.encoded_size(kind.size), np.uint8),
    )

  def _leaves_like(self, kind: split.Kind) -> tuple[exchange.Leaves, jax.ShapeDtypeStruct]:
    like = lambda leaf: leaf.update(sharding=split.automatic(leaf.sharding))
    return split.by_index(map(like, kind.leaves)), self._like((len(kind.pieces),), np.int32)

  def _like(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = split.automatic(self._island.replicated)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def _leaves(self, p: int) -> exchange.Leaves:
    """The parameters with rows in fragment p."""
    leaves = jax.tree.leaves(self._island.params)
    groups = ([leaves[index] for index in indices] for indices in self._leaf_indices[p])
    return split.by_index(fragments.pack(some, self._concatenate) for some in groups)

  def digests(self) -> tuple[int, ...]:
    """Returns the digest of each anchor as it is now."""
    digest = functools.partial(self._programs.get, self._lower_digest)
    # In turn: see tree_digest.py for many all-reduces at once.
    pairs = zip(self.kinds, self.anchors)
    return tuple(digest_lib.as_int(digest(kind)(anchor)) for kind, anchor in pairs)

  def encode(self, p: int) -> tuple[jax.Array, jax.Array]:
    """Returns (bytes of the pseudo-gradient, ok) of fragment p, on the device; keeps them for the
    adoption of a version that contains them."""
    kind = self.kinds[p]
    merged = None
    if self._reuses:
      # While the transport still reads that payload, JAX leaves it alone and takes new memory.
      size = kind.parts * self._codec_up.encoded_size(kind.size)
      merged = self._merged.pop(size, None)
      merged = self._zeros(self._codec_up, kind) if merged is None else merged
    encode = self._programs.launch(self.lower_encode, kind)
    data, ok = encode(merged, self._leaves(p), self._starts[p], self.anchors[p])
    if self._rebases:
      self._captures[p] = data
    return self._carrier.collect(kind, data), ok

  def wire(self, p: int, data: jax.Array) -> payload_lib.Payload:
    """The payload that `encode` has made, as it travels; as bytes it waits for the device."""
    return self._carrier.payload(self.kinds[p], data)

  def adopt(
    self, p: int, data: payload_lib.Payload, whole: bool, keep: bool, merged: bool
  ) -> jax.Array:
    """Replaces the anchor of fragment p and adopts it; returns its digest.

    Args:
      p: the fragment.
      data: the value: float32 if `whole`, else an encoded delta to the anchor.
      whole: see `data`.
      keep: carry the steps that are not in the value onto it (exchange.adopt); without it nothing
        of the local value survives.
      merged: the value contains the newest capture of the fragment.
    """
    if whole and not keep and self._carrier.from_host:
      return self._take_whole(p, np.frombuffer(data, np.float32))
    capture = self._captures.pop(p) if merged else None
    flat = self._carrier.flat(self.kinds[p], data, whole)
    if whole:
      digest = self._adopt(p, flat, None, capture, keep)
    else:
      digest = self._adopt(p, self.anchors[p], flat, capture, keep)
    if capture is not None and self._reuses:
      self._merged[capture.size] = capture
    return digest

  def _take_whole(self, p: int, value_N: np.ndarray) -> jax.Array:
    """Makes a value from the host the anchor of fragment p and its parameters; returns its digest.

    A learner that comes back does this with every fragment before its first step, so all fragments
    have one function, for the digest of a padded value.
    """
    kind, leaves = self.kinds[p], self._leaves(p)
    for index, (piece, start, stop) in enumerate(fragments.spans(kind.pieces)):
      leaf, at = leaves[piece.path], kind.leaves[int(piece.path)].sharding
      rows = fragments.unflatten(piece, value_N[start:stop]).astype(leaf.dtype)
      if rows.shape == leaf.shape:
        leaves[piece.path] = split.put(rows, at)
      else:
        rows = split.put(rows, kind.shardings[index])
        leaf, rows = (
          jax.device_put(array, split.automatic(array.sharding)) for array in (leaf, rows)
        )
        leaves[piece.path] = kind.jit(_replace, at)(leaf, rows, self._first_rows[p][index])
    self._programs.launches += 1
    self._assign(p, leaves)
    self.anchors[p] = split.values(kind, value_N.view(np.uint8))
    padding = max(map(self._layout.size, range(self._layout.num_fragments))) - value_N.size
    device = next(iter(self.anchors[p].sharding.addressable_devices))
    padded = jax.device_put(np.pad(value_N, (0, padding)), device)
    return self._digest(padded, count=np.uint32(value_N.size))

  def rewind(self) -> None:
    """Sets the parameters back to the anchors; the inner optimizer keeps its state."""
    self._captures.clear()
    for p, anchor_N in enumerate(self.anchors):
      self._adopt(p, anchor_N, None, None, keep=False)

  def _adopt(
    self,
    p: int,
    base_N: jax.Array,
    delta: jax.Array | None,
    capture: jax.Array | None,
    keep: bool,
  ) -> jax.Array:
    """Adopts base + delta; without a delta the base. `capture`: the one that it contains."""
    kind, merged = self.kinds[p], capture is not None
    if delta is None:
      delta = self._zeros(self._codec_down, kind)
    if capture is None:  # its bytes do not count: any array of the same size will do
      alike = kind.parts * self._codec_up.encoded_size(kind.size) == delta.size
      capture = delta if alike else self._zeros(self._codec_up, kind)
    value = exchange.Adoption(base_N, delta, capture, self._flags[merged], self._flags[keep])
    adopt = self._programs.launch(self.lower_adopt, kind)
    adopted = adopt(self._consumable(p), self._starts[p], self.anchors[p], value)
    self._assign(p, adopted)
    apply = self._programs.launch(self.lower_apply, kind)
    self.anchors[p], digest = apply(base_N, delta)
    return digest

  def _consumable(self, p: int) -> exchange.Leaves:
    """The leaves of fragment p, for an adoption to consume: copies of those that are the arrays
    that the program gave first, or are in the tree twice, as tied ones. Small ones are in a vector,
    and deleted: a program that goes on with what has been replaced fails with small arrays, too."""
    leaves = jax.tree.leaves(self._island.params)
    uses = collections.Counter(map(id, leaves))
    uses.update(id(leaf) for ref in self._borrowed if (leaf := ref()) is not None)
    consumed = self._leaves(p)
    for indices in self._leaf_indices[p]:
      for index in indices if len(indices) > 1 else ():
        if uses[id(leaves[index])] == 1:
          leaves[index].delete()
    own = lambda leaf: leaf.copy() if uses[id(leaf)] > 1 else leaf
    return jax.tree.map(own, consumed)

  def _zeros(self, codec: codecs.Codec, kind: split.Kind) -> jax.Array:
    """Encoded zeros."""
    like = kind.like(codec.encoded_size(kind.size), np.uint8)
    return split.put(np.zeros(like.shape, np.uint8), kind.sharding)

  def _assign(self, p: int, values: exchange.Leaves) -> None:
    """Replaces the parameters with rows in fragment p."""
    leaves, tree = jax.tree.flatten(self._island.params)
    for name, indices in split.by_index(self._leaf_indices[p]).items():
      likes = [self._likes[index] for index in indices]
      for index, leaf in zip(indices, fragments.unpack(values[name], likes)):
        leaves[index] = leaf
    self._island.params = jax.tree.unflatten(tree, leaves)


def _replace(leaf: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(leaf, rows, start, 0)
