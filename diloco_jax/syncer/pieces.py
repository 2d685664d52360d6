"""The outer step of a fragment, piece by piece.

A piece is 512 Ki values, so that what one call reads and writes stays in the cache of a core, and
one compiled function serves all pieces of all fragments; the last piece of a fragment is filled up
with zeros. A byte of a payload is read twice (its norms, its row in the sum), a value of the state
once. The M float32 rows never exist, and new values go into the buffers of old ones:

  lengths      the length of each tensor of one payload
  sums         the sums u = sum_m factor_m v_m, and the lengths of their tensors
  gradient     the outer gradient, encoded and as the optimizer gets it
  outer_step   optimizer, delta, published value, digest

`decoded` and `outer_step` repeat an outer step from the encoded gradient alone.

The bits do not depend on the size of the pieces: what crosses the border of a block is summed on
the host in float64, block after block. A transform that looks at whole tensors gets them: its
fragments are one piece each (numerics/outer.py).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.numerics import codecs, exchange, fragments
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.numerics import outer as outer_lib

PIECE = 1 << 19

Row = tuple[np.ndarray, np.ndarray]  # a payload uint8[B], and its factor for each tensor


class Stepped(NamedTuple):
  """The result of an outer step that is finite.

  Attributes:
    pieces: the new values. The old ones are valid until `recycle`.
    delta: uint8, from the published version before to this one.
    digest: of the published value.
  """

  pieces: list[exchange.Values]
  delta: np.ndarray
  digest: int


class Pieces:
  """Cuts fragments into pieces and computes with them. One thread at a time."""

  def __init__(
    self,
    layout: fragments.Layout,
    codec_up: codecs.Codec,
    codec_down: codecs.Codec,
    codec_log: codecs.Codec,
    tx: optax.GradientTransformation,
    place: jax.sharding.Sharding,
    piece: int = PIECE,
  ):
    """`place`: where the arrays are, on a CPU; `piece`: values in a piece, a multiple of 32."""
    self._up, self._down, self._log, self._place = codec_up, codec_down, codec_log, place
    count = layout.num_fragments
    self._sizes = [layout.size(p) for p in range(count)]
    widest = min(piece, max(self._sizes))
    self._whole = not outer_lib.elementwise(tx)
    self._n = self._sizes if self._whole else [widest] * count
    self._tx = [outer_lib.by_tensor(tx, layout, p) if self._whole else tx for p in range(count)]
    # By fragment: how many blocks each tensor has, the first of them, how many values each has.
    blocks = [
      np.array([one.padded_size // codecs.BLOCK for one in layout.fragments[p]])
      for p in range(count)
    ]
    self._blocks, self._first = blocks, [np.cumsum(one) - one for one in blocks]
    self._counts = [np.full(one.sum(), codecs.BLOCK, np.int32) for one in blocks]
    for p in range(count):
      padding = [one.padded_size - one.size for one in layout.fragments[p]]
      self._counts[p][np.cumsum(blocks[p]) - 1] -= np.array(padding, np.int32)
    self._spare: dict[int, list[jax.Array]] = {}

    self._squares = jax.jit(exchange.block_squares, static_argnums=(0, 1))
    self._add_row = jax.jit(exchange.add_row, static_argnums=0, donate_argnums=2)
    self._gradient = jax.jit(exchange.outer_gradient, static_argnums=0, donate_argnums=1)
    # Arguments without a use are buffers for results.
    decode = lambda codec, spare_n, sections: codec.decode(
      jnp.concatenate(sections), spare_n.shape[0]
    )
    self._decode = jax.jit(decode, static_argnums=0, donate_argnums=1, keep_unused=True)
    self._squares_of = jax.jit(codecs.squares_of)
    self._digest = jax.jit(digest_lib.digest)
    step = lambda codec, tx, spare, *rest: exchange.outer_step(codec, tx, *rest)
    self._step = jax.jit(step, static_argnums=(0, 1), donate_argnums=(2, 3), keep_unused=True)

  @property
  def unlike(self) -> list[int]:
    """One fragment for each set of functions to compile."""
    return list(range(len(self._n))) if self._whole else [0]

  # --- Cutting and joining ------------------------------------------------------------------------

  def starts(self, p: int) -> range:
    """Where the pieces of fragment p begin."""
    return range(0, self._sizes[p], self._n[p])

  def begin(self, p: int, values_N: Any) -> list[exchange.Values]:
    """Version 0 of fragment p: master and published value, and the optimizer's first state."""
    make = lambda value_n: exchange.Values(value_n, jnp.copy(value_n), self._tx[p].init(value_n))
    return [jax.device_put(make(value_n), self._place) for value_n in self._cut(p, values_N)]

  def cut(self, p: int, whole: exchange.Values) -> list[exchange.Values]:
    """The inverse of `join`."""
    leaves, tree = jax.tree.flatten(whole)
    pieces = zip(*(self._cut(p, leaf) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(tree, piece) for piece in pieces]

  def _cut(self, p: int, values_N: Any) -> list[jax.Array]:
    values_N, n = np.asarray(values_N), self._n[p]
    if values_N.shape != (self._sizes[p],):  # of the whole fragment, as the count of steps
      return [jax.device_put(np.array(values_N), self._place) for _ in self.starts(p)]
    parts = (values_N[start : start + n] for start in self.starts(p))
    return [jax.device_put(np.pad(part, (0, n - len(part))), self._place) for part in parts]

  def join(self, p: int, pieces: Sequence[exchange.Values]) -> exchange.Values:
    """Fragment p in arrays of its length, new ones."""
    return jax.tree.map(lambda *parts: self.flat(p, parts), *pieces)

  def flat(self, p: int, parts: Sequence[jax.Array]) -> np.ndarray:
    """The values of all pieces as one array, a new one."""
    if parts[0].shape != (self._n[p],):
      return np.array(parts[0])
    flat_N = np.empty(self._sizes[p], parts[0].dtype)
    for start, part in zip(self.starts(p), parts, strict=True):
      flat_N[start : start + self._n[p]] = np.asarray(part)[: len(flat_N) - start]
    return flat_N

  def like(self, p: int) -> exchange.Values:
    """The shapes of `join`."""
    value_N = jax.ShapeDtypeStruct((self._sizes[p],), jnp.float32)
    return exchange.Values(value_N, value_N, jax.eval_shape(self._tx[p].init, value_N))

  # --- Computing ----------------------------------------------------------------------------------

  def lengths(self, p: int, payload: np.ndarray) -> np.ndarray:
    """The length of each tensor in a payload, float64[T]. One is not finite if a value is not, or
    if the sum of the squares is too large for a float32. Raises ValueError for another size."""
    self._require_size(self._up, p, payload)
    with self._on_cpu():
      return self._lengths(
        p,
        (
          self._squares(self._up, self._n[p], self._sections(self._up, p, payload, start))
          for start in self.starts(p)
        ),
      )

  def sums(self, p: int, rows: Sequence[Row]) -> tuple[list[jax.Array], np.ndarray]:
    """(the sums u in pieces, the lengths of their tensors float64[T]) of at least one row."""
    factors = [np.repeat(factors_T.astype(np.float32), self._blocks[p]) for _, factors_T in rows]
    totals = []
    with self._on_cpu():
      for start in self.starts(p):
        total_n = self._buffer(p)
        for m, (payload, _) in enumerate(rows):
          total_n = self._add_row(
            self._up,
            np.bool_(m == 0),
            total_n,
            self._sections(self._up, p, payload, start),
            self._of_blocks(p, factors[m], start),
          )
        totals.append(total_n)
      return totals, self._lengths(p, map(self._squares_of, totals))

  def gradient(
    self, p: int, totals: Sequence[jax.Array], stretch_T: np.ndarray
  ) -> tuple[np.ndarray, list[jax.Array]] | None:
    """(the encoded outer gradient uint8[B], its decoded values in pieces); None: a value is not
    finite. Consumes the sums."""
    stretch_B = np.repeat(stretch_T.astype(np.float32), self._blocks[p])
    with self._on_cpu():
      made = [
        self._gradient(
          self._log,
          total_n,
          self._of_blocks(p, stretch_B, start),
          self._of_blocks(p, self._counts[p], start),
        )
        for start, total_n in zip(self.starts(p), totals, strict=True)
      ]
      data, oks, values = zip(*made)
      if not all(map(bool, oks)):
        self._keep(p, values)
        return None
      return self._payload(self._log, p, data), list(values)

  def decoded(self, p: int, data: np.ndarray) -> list[jax.Array]:
    """The values of an encoded outer gradient, in pieces. Raises ValueError for another size."""
    self._require_size(self._log, p, data)
    with self._on_cpu():
      return [
        self._decode(self._log, self._buffer(p), self._sections(self._log, p, data, start))
        for start in self.starts(p)
      ]

  def outer_step(
    self, p: int, pieces: Sequence[exchange.Values], gradient: Sequence[jax.Array]
  ) -> Stepped | None:
    """Consumes the decoded outer gradient; None: a value is not finite. `pieces` stay as they
    are."""
    size, n = self._sizes[p], self._n[p]
    spares = len(self._vectors(p, pieces[0])) - 1
    results = []
    with self._on_cpu():
      for start, piece, merged_n in zip(self.starts(p), pieces, gradient, strict=True):
        spare = [self._buffer(p) for _ in range(spares)]
        place = np.uint32(start), np.uint32(min(n, size - start))
        results.append(self._step(self._down, self._tx[p], spare, merged_n, piece, *place))
    stepped = [result.piece for result in results]
    if not all(bool(result.ok) for result in results):
      self.recycle(p, stepped)
      return None
    delta = self._payload(self._down, p, [result.delta_bytes for result in results])
    digest = sum(np.asarray(result.digest, np.uint64) for result in results)
    return Stepped(stepped, delta, digest_lib.as_int(digest & 0xFFFFFFFF))

  def recycle(self, p: int, pieces: Iterable[exchange.Values]) -> None:
    """Takes pieces that are not needed any more, for later results."""
    for piece in pieces:
      self._keep(p, self._vectors(p, piece))

  def digest(self, p: int, pieces: Sequence[exchange.Values]) -> int:
    """Of the published value."""
    total = np.zeros(2, np.uint64)
    for start, piece in zip(self.starts(p), pieces, strict=True):
      count = np.uint32(min(self._n[p], self._sizes[p] - start))
      total += np.asarray(self._digest(piece.published_n, np.uint32(start), count))
    return digest_lib.as_int(total & 0xFFFFFFFF)

  def _on_cpu(self) -> Any:
    """Arrays of the host are used on the CPU, also where there is an accelerator."""
    return jax.default_device(next(iter(self._place.device_set)))

  def _require_size(self, codec: codecs.Codec, p: int, payload: np.ndarray) -> None:
    expected = codec.encoded_size(self._sizes[p])
    if payload.shape != (expected,):
      raise ValueError(f'a payload has {payload.size} bytes, fragment {p} needs {expected}')

  def _sections(
    self, codec: codecs.Codec, p: int, payload: np.ndarray, start: int
  ) -> list[np.ndarray]:
    """The sections of one piece of a payload, filled up with zeros, which decode to zeros."""
    size, n = self._sizes[p], self._n[p]
    stop = min(start + n, size)
    parts = [payload[at] for at in codecs.ranges(codec, size, start, stop)]
    if stop - start == n:
      return parts
    widths = (n // codecs.BLOCK * width for width in codec.sections)
    return [np.pad(part, (0, width - len(part))) for part, width in zip(parts, widths)]

  def _payload(self, codec: codecs.Codec, p: int, encoded: Sequence[jax.Array]) -> np.ndarray:
    """The payload of a fragment from those of its pieces, uint8[B]."""
    size, n = self._sizes[p], self._n[p]
    payload = np.empty(codec.encoded_size(size), np.uint8)
    for start, data in zip(self.starts(p), map(np.asarray, encoded), strict=True):
      stop = min(start + n, size)
      places = codecs.ranges(codec, size, start, stop)
      for to, at in zip(places, codecs.ranges(codec, n, 0, stop - start)):
        payload[to] = data[at]
    return payload

  def _of_blocks(self, p: int, values_B: np.ndarray, start: int) -> np.ndarray:
    """The values for the blocks of one piece, zeros behind the last."""
    first, count = start // codecs.BLOCK, self._n[p] // codecs.BLOCK
    part = values_B[first : first + count]
    return part if len(part) == count else np.pad(part, (0, count - len(part)))

  def _lengths(self, p: int, squares: Iterable[jax.Array]) -> np.ndarray:
    """From the sums of squares of the blocks, piece by piece."""
    blocks_B = np.concatenate([np.asarray(one) for one in list(squares)])
    blocks_B = blocks_B[: self._sizes[p] // codecs.BLOCK].astype(np.float64)
    return np.sqrt(np.add.reduceat(blocks_B, self._first[p]))

  def _buffer(self, p: int) -> jax.Array:
    spare = self._spare.get(self._n[p])
    return spare.pop() if spare else jax.device_put(np.zeros(self._n[p], np.float32), self._place)

  def _keep(self, p: int, arrays: Iterable[jax.Array]) -> None:
    self._spare.setdefault(self._n[p], []).extend(arrays)

  def _vectors(self, p: int, piece: exchange.Values) -> list[jax.Array]:
    """The arrays of a piece that serve as buffers."""
    leaves = jax.tree.leaves(piece)
    return [one for one in leaves if (one.shape, one.dtype) == ((self._n[p],), np.float32)]
