"""The exchange of fragments on the devices of an island: its anchors, encodings, adoptions."""

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build
from diloco_jax.learner import island_port
from diloco_jax.numerics import codecs, exchange, fragments
from diloco_jax.numerics import digest as digest_lib


class _Kind(NamedTuple):
  """All that the functions of a fragment depend on: fragments of one kind share them.

  Attributes:
    pieces: of the fragment; their paths are '0', '1' ..., the places of their leaves in `leaves`;
      of their labels only that of statistics is kept.
    leaves: shape, dtype and sharding of the parameters with rows in the fragment.
  """

  pieces: exchange.Pieces
  leaves: tuple[jax.ShapeDtypeStruct, ...]

  @property
  def size(self) -> int:
    return sum(piece.padded_size for piece in self.pieces)


class Exchange:
  """The anchors of an island and the functions that exchange its fragments, compiled ahead of use.

  `compile_all` compiles the functions of every sync, in the order of the syncs. A caller whose
  function is not compiled yet waits for that function only.
  """

  def __init__(
    self,
    assembled: build.Assembly,
    island: island_port.IslandState,
    compiled: dict[tuple, futures.Future] | None = None,
  ):
    """`compiled`: the functions of an equal model on the same devices, to share them."""
    self._island = island
    # Its first arrays are a program's own; a dead one is none of any tree.
    self._borrowed = [weakref.ref(leaf) for leaf in jax.tree.leaves(island.params)]
    self._layout = assembled.layout
    self._codec_up, self._codec_down = assembled.codec_up, assembled.codec_down
    self._rebases = assembled.protocol.rebases
    share = assembled.config.sync.alpha if assembled.protocol.blends else 0.0
    self._alpha = None if self._rebases else share
    # By fragment: where its leaves are among those of the parameters, and its kind.
    order = {path: place for place, path in enumerate(fragments.by_path(island.params))}
    self._places = [
      list(dict.fromkeys(order[piece.path] for piece in pieces))
      for pieces in self._layout.fragments
    ]
    self._kinds = self._make_kinds(order)
    # By fragment: its newest encoded pseudo-gradient, on the device.
    self._captures: dict[int, jax.Array] = {}
    # On CPUs the first touch of a page costs more than the encoding. So there the exchange keeps a
    # merged payload of each size, and the next payload takes its place.
    device = next(iter(jax.tree.leaves(island.params)[0].devices()))
    self._reuses = self._rebases and device.platform == 'cpu'
    self._merged: dict[int, jax.Array] = {}
    self._compiled = {} if compiled is None else compiled
    self._lock = threading.Lock()
    self.launches = 0  # of its functions: as many on each host of a learner
    self._digest = jax.jit(digest_lib.digest)
    self._flags = self._put((np.bool_(False), np.bool_(True)))
    self.anchors = self._get(self._lower_gather)(island.params)

  def _make_kinds(self, order: dict[str, int]) -> list[_Kind]:
    leaves, shardings = _flat(self._island.params), _flat(self._island.shardings.params)
    like = [
      jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
      for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    kinds = []
    for pieces, places in zip(self._layout.fragments, self._places):
      names = {place: name for name, place in _named(places).items()}
      label = lambda piece: piece.label if piece.label == fragments.STATISTIC else ''
      named = (
        dataclasses.replace(piece, path=names[order[piece.path]], label=label(piece))
        for piece in pieces
      )
      kinds.append(_Kind(tuple(named), tuple(like[place] for place in places)))
    return kinds

  def _put(self, arrays: Any) -> Any:
    return jax.device_put(arrays, self._island.replicated)

  def compile_all(self, stopped: Callable[[], bool] = lambda: False) -> None:
    """Ends early, between two functions, once `stopped` returns true."""
    for kind in self._kinds:
      for lower, key in (
        (self._lower_encode, kind),
        (self._lower_adopt, kind),
        (self._lower_apply, kind.size),
      ):
        if stopped():
          return
        self._get(lower, key)

  def _get(self, lower: Callable[..., jax.stages.Lowered], *key) -> Callable:
    """Returns a compiled function; the first caller compiles it and later callers wait. After a
    failure the next caller tries again."""
    name = lower.__name__, *key
    with self._lock:
      known = self._compiled.get(name)
      if known is None:
        mine = self._compiled[name] = futures.Future()
    if known is not None:
      return known.result()
    try:
      mine.set_result(lower(*key).compile())
    except BaseException as error:
      del self._compiled[name]
      mine.set_exception(error)
      raise
    return mine.result()

  def _lower_gather(self) -> jax.stages.Lowered:
    def gather(params):
      fragments_N = [
        fragments.gather(self._layout, p, params) for p in range(self._layout.num_fragments)
      ]
      return [codecs.canonical(fragment_N) for fragment_N in fragments_N]

    leaves = {
      place: leaf
      for places, kind in zip(self._places, self._kinds)
      for place, leaf in zip(places, kind.leaves)
    }
    tree = jax.tree.structure(self._island.params)
    like = jax.tree.unflatten(tree, map(leaves.get, range(tree.num_leaves)))
    return jax.jit(gather, out_shardings=self._island.replicated).lower(like)

  def _lower_encode(self, kind: _Kind) -> jax.stages.Lowered:
    encode = functools.partial(exchange.pseudo_gradient, kind.pieces, self._codec_up)
    data_bytes = self._codec_up.encoded_size(kind.size)
    held = _named(kind.leaves), self._like((kind.size,), np.float32)
    at = self._island.replicated
    if self._reuses:
      data = self._like((data_bytes,), np.uint8)
      return jax.jit(encode, donate_argnums=0, out_shardings=at).lower(data, *held)
    anew = lambda *held: encode(jnp.zeros(data_bytes, jnp.uint8), *held)
    return jax.jit(anew, out_shardings=at).lower(*held)

  def _lower_adopt(self, kind: _Kind) -> jax.stages.Lowered:
    adopt = functools.partial(
      exchange.adopt, kind.pieces, self._codec_up, self._codec_down, self._alpha
    )
    anchor_N, flag = self._like((kind.size,), np.float32), self._like((), np.bool_)
    data, capture = (
      self._like((codec.encoded_size(kind.size),), np.uint8)
      for codec in (self._codec_down, self._codec_up)
    )
    shardings = _named(leaf.sharding for leaf in kind.leaves)
    return jax.jit(adopt, donate_argnums=0, out_shardings=shardings).lower(
      _named(kind.leaves),
      anchor_N,
      exchange.Published(anchor_N, data, capture, flag, flag),
    )

  def _lower_apply(self, size: int) -> jax.stages.Lowered:
    apply = functools.partial(exchange.apply_delta, self._codec_down)
    data_bytes = self._codec_down.encoded_size(size)
    return jax.jit(apply, donate_argnums=0, out_shardings=self._island.replicated).lower(
      self._like((size,), np.float32), self._like((data_bytes,), np.uint8)
    )

  def _like(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=self._island.replicated)

  def _leaves(self, p: int) -> exchange.Leaves:
    """The parameters with rows in fragment p."""
    leaves = jax.tree.leaves(self._island.params)
    return _named(leaves[place] for place in self._places[p])

  def digests(self) -> tuple[int, ...]:
    """Returns the digest of each anchor as it is now."""
    return tuple(digest_lib.as_int(self._digest(anchor_N)) for anchor_N in self.anchors)

  def encode(self, p: int) -> tuple[jax.Array, jax.Array]:
    """Returns (bytes of the pseudo-gradient, ok) of fragment p, on the device; keeps them for the
    adoption of a version that contains them."""
    kind = self._kinds[p]
    encode = self._get(self._lower_encode, kind)
    held = self._leaves(p), self.anchors[p]
    if self._reuses:
      # While the transport still reads that payload, JAX leaves it alone and takes new memory.
      merged = self._merged.pop(kind.size, None)
      held = self._zeros(self._codec_up, kind.size) if merged is None else merged, *held
    self.launches += 1
    data, ok = encode(*held)
    if self._rebases:
      self._captures[p] = data
    return data, ok

  def adopt(
    self, p: int, data: memoryview | bytes, whole: bool, keep: bool, merged: bool
  ) -> jax.Array:
    """Replaces the anchor of fragment p and adopts it; returns its digest.

    Args:
      p: the fragment.
      data: the value: float32 if `whole`, else an encoded delta to the anchor.
      whole: see `data`.
      keep: carry the steps that are not in the value, or a share of them, onto it
        (exchange.adopt); without it nothing of the local value survives.
      merged: the value contains the newest capture of the fragment.
    """
    if whole and not keep:
      return self._take_whole(p, np.frombuffer(data, np.float32))
    capture = self._captures.pop(p) if merged else None
    if whole:
      digest = self._adopt(p, self._put(np.frombuffer(data, np.float32)), None, capture, keep)
    else:
      delta = self._put(np.frombuffer(data, np.uint8))
      digest = self._adopt(p, self.anchors[p], delta, capture, keep)
    if capture is not None and self._reuses:
      self._merged[self._kinds[p].size] = capture
    return digest

  def _take_whole(self, p: int, value_N: np.ndarray) -> jax.Array:
    """Makes a value from the host the anchor of fragment p and its parameters; returns its digest.

    A learner that comes back does this with every fragment before its first step, so all fragments
    have one function, for the digest of a padded value.
    """
    kind = self._kinds[p]
    leaves = self._leaves(p)
    for piece, start, stop in fragments.places(kind.pieces):
      leaf = leaves[piece.path]
      rows = fragments.shaped(piece, value_N[start:stop]).astype(leaf.dtype)
      whole = rows.shape == leaf.shape
      leaves[piece.path] = (
        rows if whole else jax.lax.dynamic_update_slice_in_dim(leaf, rows, piece.start, 0)
      )
    self._assign(p, jax.device_put(leaves, _named(leaf.sharding for leaf in kind.leaves)))
    self.anchors[p] = self._put(value_N)
    self.launches += 1
    padding = max(kind.size for kind in self._kinds) - kind.size
    return self._digest(self._put(np.pad(value_N, (0, padding))), count=np.uint32(kind.size))

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
    kind, merged = self._kinds[p], capture is not None
    self._own(p)
    if delta is None:
      delta = self._zeros(self._codec_down, kind.size)
    if capture is None:  # its bytes do not count: those of another array of the same size will do
      alike = self._codec_up.encoded_size(kind.size) == delta.size
      capture = delta if alike else self._zeros(self._codec_up, kind.size)
    self.launches += 2
    value = exchange.Published(base_N, delta, capture, self._flags[merged], self._flags[keep])
    adopted = self._get(self._lower_adopt, kind)(self._leaves(p), self.anchors[p], value)
    self._assign(p, adopted)
    self.anchors[p], digest = self._get(self._lower_apply, kind.size)(base_N, delta)
    return digest

  def _own(self, p: int) -> None:
    """Copies those parameters of fragment p that an adoption must not consume: they are the arrays
    that the program gave first, or have two places in the tree, as tied ones."""
    uses = collections.Counter(map(id, jax.tree.leaves(self._island.params)))
    uses.update(id(leaf) for ref in self._borrowed if (leaf := ref()) is not None)
    leaves = self._leaves(p)
    if any(uses[id(leaf)] > 1 for leaf in leaves.values()):
      own = lambda leaf: leaf.copy() if uses[id(leaf)] > 1 else leaf
      self._assign(p, jax.tree.map(own, leaves))

  def _zeros(self, codec: codecs.Codec, size: int) -> jax.Array:
    """Encoded zeros."""
    return self._put(np.zeros(codec.encoded_size(size), np.uint8))

  def _assign(self, p: int, values: exchange.Leaves) -> None:
    """Replaces the parameters with rows in fragment p."""
    leaves, tree = jax.tree.flatten(self._island.params)
    for name, place in _named(self._places[p]).items():
      leaves[place] = values[name]
    self._island.params = jax.tree.unflatten(tree, leaves)


def _flat(tree: Any) -> list[Any]:
  """The leaves of a tree; in one of shardings None is a leaf."""
  return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


def _named(leaves: Iterable[Any]) -> dict[str, Any]:
  """The leaves of a fragment by the paths of its kind."""
  return {str(place): leaf for place, leaf in enumerate(leaves)}
