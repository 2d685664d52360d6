"""Fragments: the P parts of the parameters; a sync exchanges one of them.

A layout maps the rows of every leaf to fragments. It follows from the shapes of the tree, so it is
the same on every learner (the handshake compares `digest()`), and it is hashable, so it can be a
static argument of `jax.jit`.

A fragment travels as one flat float32 vector of N_p values: its pieces in tree order, each padded
with zeros to a multiple of 32. So a block of the codec never spans two tensors, and a tensor of
small values does not share a scale with one of large values.

They are balanced (paper section 5): tensors sorted by size, the largest first, each into the
fragment that is smallest so far (the LPT rule). Tensors stay whole if that keeps every fragment
within 4/3 of the mean; if not (LPT promises 4/3 of the *optimum*, and one big embedding makes the
optimum itself bad), they are cut by rows: first those larger than a fair share into parts of at
most one share, then of a half, a third ... of it. With parts of at most a third of the mean m, the
fragment that took its last part x while it was the smallest has at most m + x <= 4/3 m, so the
search ends unless single rows are too large. So the peak bandwidth is within 4/3 of an ideally even
one.

A leaf labelled 'layer' is a stack of tensors, one per layer, as a scan over layers wants them; one
labelled 'expert' has one per expert of a Mixture of Experts. They are cut between all their rows
first, so that each layer or expert is merged by itself.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 32  # values that share a scale in the integer codecs; the length of pieces is a multiple
EXPERT = 'expert'  # the label of stacks of experts
LAYER = 'layer'  # the label of stacks of layers
LOCAL = 'local'  # the label of parameters that each learner trains for itself and never sends
FROZEN = 'frozen'  # of parameters that no learner trains or sends
NEVER_SENT = (LOCAL, FROZEN)
STATISTIC = 'statistic'  # the label of what is counted and not trained, as BatchNorm's variance

_FINEST_CUT = 12  # the most parts per fair share that the search for a balanced layout tries

SMALL, PACKED = 1 << 14, 1 << 18  # values of a leaf that is packed, and of a packed one

PyTree = Any
Paths = tuple[str, ...]  # of one leaf, or of small ones that are packed


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
  """Rows [start, stop) of the leaf at `path` (see `by_path`); `shape` is the piece's own.

  A scalar leaf counts as one row and keeps its shape ().
  """

  path: str
  start: int
  stop: int
  shape: tuple[int, ...]
  label: str

  @property
  def key(self) -> str:
    """The name of the piece in `split`: unique in a layout."""
    return f'{self.path}[{self.start}:{self.stop}]'

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def padded_size(self) -> int:
    return -(-self.size // BLOCK) * BLOCK


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
  """The pieces of each fragment; equal layouts have equal digests."""

  fragments: tuple[tuple[Piece, ...], ...]

  @property
  def num_fragments(self) -> int:
    return len(self.fragments)

  def size(self, p: int) -> int:
    """N_p: the length of fragment p as a flat vector, padding included."""
    return sum(piece.padded_size for piece in self.fragments[p])

  def parameters(self, p: int) -> int:
    """The number of parameters in fragment p, without padding."""
    return sum(piece.size for piece in self.fragments[p])

  def digest(self) -> str:
    """Hex sha256 over paths, rows, shapes and labels; learner and syncer must agree on it."""
    fields = operator.attrgetter(*Piece.__slots__)
    rows = [[fields(piece) for piece in f] for f in self.fragments]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def make_layout(tree: PyTree, num_fragments: int, label: Callable[[str], str]) -> Layout:
  """Cuts `tree` (arrays or ShapeDtypeStructs) into `num_fragments` fragments.

  Args:
    tree: the parameters; only paths, shapes and dtypes matter.
    num_fragments: P.
    label: path -> the label by which merge rules are chosen (see merge.by_label).

  Raises:
    ValueError: a leaf is empty or not of floats, or the tree cannot fill so many fragments evenly.

  >>> tree = {'embed': jnp.zeros((8, 8)), 'layers': [{'w': jnp.zeros((8, 8))}] * 2}
  >>> layout = make_layout(tree, 3, label=lambda path: 'rda')
  >>> [[piece.key for piece in fragment] for fragment in layout.fragments]
  [['embed[0:8]'], ['layers/0/w[0:8]'], ['layers/1/w[0:8]']]
  """
  if num_fragments < 1:
    raise ValueError(f'fragments: num_fragments is {num_fragments}; it must be at least 1')
  leaves = [
    piece
    for leaf in _leaves(tree, label)
    for piece in _cut(leaf, leaf.stop if leaf.label in (EXPERT, LAYER) else 1)
  ]
  fragments = _balanced(leaves, num_fragments)
  order = {piece.path: i for i, piece in enumerate(leaves)}
  tree_order = lambda piece: (order[piece.path], piece.start)
  return Layout(tuple(tuple(sorted(f, key=tree_order)) for f in fragments))


def spans(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, int]]:
  """Each piece of a fragment, with the span [start, stop) of its padded values in the vector."""
  start = 0
  for piece in pieces:
    yield piece, start, start + piece.padded_size
    start += piece.padded_size


def split(layout: Layout, p: int, flat_N: jax.Array) -> dict[str, jax.Array]:
  """Fragment p as its pieces: Piece.key -> array of Piece.shape. Drops the padding.

  Leading axes before the flat one (stacked learners) are kept.
  """
  if flat_N.shape[-1] != layout.size(p):
    raise ValueError(
      f'fragments: fragment {p} has {layout.size(p)} values, the vector {flat_N.shape[-1]}; '
      'it was made with another layout (compare layout.digest())'
    )
  return {
    piece.key: unflatten(piece, flat_N[..., start:stop])
    for piece, start, stop in spans(layout.fragments[p])
  }


def unflatten(piece: Piece, flat_n: jax.Array) -> jax.Array:
  """The inverse of `flat`: the values of a piece in its shape, behind any leading axes."""
  return flat_n[..., : piece.size].reshape((*flat_n.shape[:-1], *piece.shape))


def join(layout: Layout, p: int, pieces: dict[str, jax.Array]) -> jax.Array:
  """The inverse of `split`: pieces -> flat float32[N_p], zeros in the padding."""
  return concatenate([flat(piece, pieces[piece.key]) for piece in layout.fragments[p]])


def flat(piece: Piece, values: jax.Array) -> jax.Array:
  """The values of a piece as they travel: a flat float32 vector, zeros in the padding."""
  values = values.reshape(-1).astype(jnp.float32)
  padding = piece.padded_size - piece.size
  return jnp.pad(values, (0, padding)) if padding else values


def keep(tree: PyTree, wanted: Callable[[str], bool]) -> PyTree:
  """The tree with None, which jax takes for no leaf, where `wanted` is false of a leaf's path."""
  leaves = [leaf if wanted(path) else None for path, leaf in by_path(tree).items()]
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def fill(tree: PyTree, rest: PyTree) -> PyTree:
  """The tree with the leaves of `rest` where it has None."""
  is_none = lambda leaf: leaf is None
  return jax.tree.map(lambda a, b: b if a is None else a, tree, rest, is_leaf=is_none)


# --- many small leaves as one -------------------------------------------------------------------


def pack_pieces(
  pieces: Sequence[Piece], leaves: dict[str, jax.ShapeDtypeStruct], at: Any = None
) -> list[tuple[Piece, Paths, jax.ShapeDtypeStruct]]:
  """The pieces of a fragment, the leaf of each and its paths, of which the first is the piece's.
  Small neighbours of one type are a vector, with the sharding `at`: a program compiles for a tenth
  of a second for each of its pieces, and a model may have thousands of a few values."""
  result: list[tuple[Piece, Paths, jax.ShapeDtypeStruct]] = []
  before: Any = None
  for piece in pieces:
    leaf, size, paths = leaves[piece.path], piece.padded_size, (piece.path,)
    small = piece.shape == leaf.shape and size <= SMALL
    whole = small and (leaf.sharding is None or leaf.sharding.is_fully_replicated)
    if whole and leaf.sharding is not None:
      whole = leaf.sharding.is_fully_addressable  # hosts wait for each other in each program
    mesh = getattr(leaf.sharding, 'mesh', None)
    whole &= mesh == getattr(at, 'mesh', None)
    if whole and mesh and jax.sharding.AxisType.Explicit in mesh.axis_types:
      whole = not any(leaf.sharding.spec)  # axes of one device, which bind a reshape all the same
    kind = (leaf.dtype, piece.label == STATISTIC) if whole else None
    if kind and kind == before and result[-1][0].padded_size + size <= PACKED:
      first, earlier, _ = result.pop()
      size, paths = first.padded_size + size, earlier + paths
      piece = Piece(first.path, 0, size, (size,), first.label)
      leaf = jax.ShapeDtypeStruct((size,), leaf.dtype, sharding=at)
    result.append((piece, paths, leaf))
    before = kind
  return result


def pack(leaves: Sequence[jax.Array], join: Callable = jnp.concatenate) -> jax.Array:
  """Some leaves as one."""
  return concatenate([_flat(leaf) for leaf in leaves], join) if len(leaves) > 1 else leaves[0]


def concatenate(parts: list[jax.Array], join: Callable = jnp.concatenate) -> jax.Array:
  """A few at once, because a program with hundreds of them compiles for seconds."""
  while len(parts) > 1:
    parts = [join(parts[i : i + 16]) for i in range(0, len(parts), 16)]
  return parts[0]


def unpack(values: jax.Array, likes: Sequence[jax.ShapeDtypeStruct]) -> Iterator[jax.Array]:
  """The inverse of `pack`, leaf by leaf."""
  first = 0
  for like in likes:
    yield values if len(likes) == 1 else _part(like.sharding)(values, first, like.shape)
    first += -(-like.size // BLOCK) * BLOCK


@functools.cache
def _part(at: Any) -> Callable:
  slice_of = jax.lax.dynamic_slice_in_dim
  part = lambda values, first, shape: slice_of(values, first, math.prod(shape)).reshape(shape)
  return jax.jit(part, static_argnums=2, out_shardings=at)


@jax.jit
def _flat(leaf: jax.Array) -> jax.Array:
  return jnp.pad(leaf.reshape(-1), (0, -leaf.size % BLOCK))


# --- reading the tree --------------------------------------------------------------------------


def by_path(tree: PyTree) -> dict[str, Any]:
  """The leaves by path ('layers/3/kernel'), in tree order. Raises ValueError if two leaves have one
  path.

  >>> list(by_path({'layers': [{'w': 1}] * 2, 'scale': 3}))
  ['layers/0/w', 'layers/1/w', 'scale']
  """
  leaves = [
    (jax.tree_util.keystr(keys, simple=True, separator='/'), len(keys) > 1, leaf)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
  ]
  below = collections.Counter(
    path[:at] for path, *_ in leaves for at, c in enumerate(path) if c in '/.'
  )
  leaves_by_path = {}
  for path, nested, leaf in leaves:
    parent = path.removesuffix('/value').removesuffix('.value')
    if nested and below[parent] == 1:  # of a flax.nnx variable; 'value' among others is a name
      path = parent
    if path in leaves_by_path:
      raise ValueError(f'two parameters have the name {path!r}; names are paths joined by "/"')
    leaves_by_path[path] = leaf
  return leaves_by_path


def _leaves(tree: PyTree, label: Callable[[str], str]) -> list[Piece]:
  """Every leaf as one whole piece, in tree order."""
  whole = []
  for path, leaf in by_path(tree).items():
    shape = tuple(leaf.shape)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(
        f'fragments: leaf {path} is {leaf.dtype}; parameters must be floats; leave it out'
      )
    if 0 in shape:
      raise ValueError(f'fragments: leaf {path} of shape {shape} is empty; leave it out')
    whole.append(Piece(path, 0, shape[0] if shape else 1, shape, label(path)))
  if not whole:
    raise ValueError('fragments: the tree has no leaves; pass the parameters')
  return whole


def rows(leaves: dict[str, jax.Array], piece: Piece) -> jax.Array:
  """The values of a piece, among the leaves by path."""
  leaf = leaves.get(piece.path)
  if leaf is None:
    raise ValueError(f'fragments: the tree has no leaf {piece.path}; it has {sorted(leaves)}')
  values = leaf[piece.start : piece.stop] if leaf.ndim else leaf
  if values.shape != piece.shape:
    raise ValueError(
      f'fragments: rows {piece.start}:{piece.stop} of leaf {piece.path} have shape {values.shape}, '
      f'the layout says {piece.shape}; make the layout from this tree'
    )
  return values


def replace_rows(leaves: dict[str, jax.Array], piece: Piece, values: jax.Array) -> None:
  """Replaces the values of a piece, among the leaves by path; `values` are cast to their dtype."""
  leaf = leaves[piece.path]
  rows(leaves, piece)  # checks the shape
  values = values.astype(leaf.dtype)
  whole = leaf.shape == piece.shape
  leaves[piece.path] = values if whole else leaf.at[piece.start : piece.stop].set(values)


# --- which piece is in which fragment ----------------------------------------------------------


def _balanced(leaves: list[Piece], num_fragments: int) -> list[list[Piece]]:
  balanced, sizes = _evenly(leaves, num_fragments)
  if balanced is None:
    row = max(leaf.size // (leaf.stop - leaf.start) for leaf in leaves)
    most = min(num_fragments - 1, 4 * sum(sizes) // (3 * row))
    works = next(p for p in range(most, 0, -1) if _evenly(leaves, p)[0])
    raise ValueError(
      f'fragments: {num_fragments} balanced fragments of these {len(leaves)} leaves would hold '
      f'{min(sizes)} to {max(sizes)} values, more than 4/3 of the mean '
      f'{sum(sizes) / num_fragments:.0f}; rows cannot be cut: use fewer, sync.fragments={works}'
    )
  return balanced


def _evenly(leaves: list[Piece], num_fragments: int) -> tuple[list[list[Piece]] | None, list[int]]:
  """The fragments if they are nearly equal, and their sizes."""
  share = sum(leaf.padded_size for leaf in leaves) / num_fragments
  best: list[int] = []
  for cut in range(_FINEST_CUT + 1):  # 0: whole tensors
    pieces = [piece for leaf in leaves for piece in _cut(leaf, math.ceil(leaf.size * cut / share))]
    fragments = _pack(pieces, num_fragments)
    sizes = [sum(piece.padded_size for piece in f) for f in fragments]
    if min(sizes) and 3 * num_fragments * max(sizes) <= 4 * sum(sizes):
      return fragments, sizes
    best = min(best or sizes, sizes, key=max)
  return None, best


def _cut(piece: Piece, parts: int) -> list[Piece]:
  """The piece as `parts` pieces of nearly equal numbers of rows (at most one piece per row)."""
  rows = piece.stop - piece.start
  parts = max(1, min(parts, rows))
  if parts == 1:
    return [piece]
  bounds = [piece.start + i * rows // parts for i in range(parts + 1)]
  return [
    dataclasses.replace(piece, start=a, stop=b, shape=(b - a, *piece.shape[1:]))
    for a, b in zip(bounds, bounds[1:])
  ]


def _pack(pieces: list[Piece], num_fragments: int) -> list[list[Piece]]:
  """Largest first into the smallest fragment; ties by path and row, so that learners agree."""
  fragments, sizes = [[] for _ in range(num_fragments)], [0] * num_fragments
  for piece in sorted(pieces, key=lambda x: (-x.padded_size, x.path, x.start)):
    smallest = sizes.index(min(sizes))
    fragments[smallest].append(piece)
    sizes[smallest] += piece.padded_size
  return fragments
