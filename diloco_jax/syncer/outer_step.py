"""The outer step of a fragment, tile by tile.

A tile is 512 Ki values, in large fragments twice as many, so that what one call reads and writes
stays in the cache of a core, and one compiled function serves all tiles of all fragments; the last
tile of a fragment is filled up with zeros. A byte of a payload is read twice (its norms, its row in
the sum), a value of the state once. The M float32 rows never exist, and new values go into the
buffers of old ones:

  lengths      the length of each tensor of one payload
  cosines      between the payloads, if the merge rule asks for them
  sums         the sums u = sum_m factor_m v_m, and the lengths of their tensors
  merge        the outer gradient, encoded; optimizer, delta, published value, digest
  redo         the same from the encoded outer gradient alone

Each works on as many tiles at a time as the process has cores. The bits depend neither on that nor
on the size of the tiles, nor on where they are: what crosses the border of a block is summed in
one order (exchange.tensor_sums). A transform that looks at whole tensors gets them: its fragments
are one tile each (numerics/outer.py).

On the devices of a single controller each fragment is one tile, too. They are spread over the
devices: a payload goes there from the devices of its learner, and the delta from there to the
devices of all learners. The host receives the lengths of tensors, flags, digests and, for the log,
the encoded outer gradient.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.node import payload as payload_lib
from diloco_jax.numerics import codecs, exchange, fragments, outer
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.transport import payloads as payloads_lib

TILE = 1 << 19
LARGE = 32 * TILE  # from here on the last tile of a fragment and idle cores cost less than calls
AT_ONCE = 4, 2, 1  # rows in a call
MOST_THREADS = 4  # a call takes 0.25 ms, 0.05 of them with the GIL: more threads would wait

Row = tuple[np.ndarray, np.ndarray]  # a payload uint8[B], and its factor for each tensor


def cores() -> int:
  """The cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def share_cores() -> None:
  """Leaves XLA the cores that `threads` does not use, at least one: threads of its own that wait
  for work spin, which costs as much again as the work. An evaluation has XLA's cores alone. Call
  it before JAX looks for devices."""
  os.environ.setdefault('PJRT_NPROC', str(max(1, cores() - MOST_THREADS)))


@functools.cache
def threads() -> futures.ThreadPoolExecutor:
  """One for each core, at most MOST_THREADS."""
  return futures.ThreadPoolExecutor(min(cores(), MOST_THREADS), thread_name_prefix='tiles')


class Stepped(NamedTuple):
  """The result of an outer step that is finite.

  Attributes:
    tiles: the new values. The old ones are valid until `recycle`.
    delta: a payload, from the published version before to this one.
    digest: of the published value.
  """

  tiles: list[exchange.Values]
  delta: payload_lib.Payload
  digest: int


class _Encoded:
  """A payload that is written tile by tile, or is the only tile, where it is."""

  def __init__(self, codec: codecs.Codec, size: int, on_host: bool):
    """`size`: in values."""
    self._codec, self._size = codec, size
    self.payload = payloads_lib.MEMORY.take(codec.encoded_size(size)) if on_host else None

  def write(self, start: int, n: int, sections: Sequence[jax.Array]) -> None:
    """Writes an encoded tile of n values into the payload of its fragment."""
    if self.payload is None:
      self.payload = jnp.concatenate(sections)
      return
    spans = codecs.ranges(self._codec, self._size, start, min(start + n, self._size))
    for to, section in zip(spans, sections, strict=True):
      self.payload[to] = np.asarray(section)[: to.stop - to.start]


class Tiles:
  """Cuts fragments into tiles and computes with them. One caller at a time."""

  def __init__(
    self,
    layout: fragments.Layout,
    codec_up: codecs.Codec,
    codec_down: codecs.Codec,
    codec_log: codecs.Codec,
    tx: optax.GradientTransformation,
    devices: Sequence[jax.Device],
    tile: int | None = 0,
  ):
    """`devices`: fragment p is on the one at p modulo their number. `tile`: values in a tile, a
    multiple of 32; 0: as many as is fast; None: each fragment is one, and payloads are arrays of
    jax, wherever they are.
    """
    self._on_host = tile is not None  # payloads
    self._up, self._down, self._log = codec_up, codec_down, codec_log
    self._shardings = [jax.sharding.SingleDeviceSharding(device) for device in devices]
    count = layout.num_fragments
    self._sizes = [layout.size(p) for p in range(count)]
    usual = 2 * TILE if max(self._sizes) >= LARGE else TILE
    widest = min(tile or usual, max(self._sizes))
    by_value = outer.elementwise(tx)
    self._whole = not (self._on_host and by_value)
    self._n = self._sizes if self._whole else [widest] * count
    # A call for the lengths keeps no values, so it takes as many bytes of a payload as a tile has.
    measured = round(4 * widest / codec_up.encoded_size(widest)) * widest
    self._measured = self._sizes if self._whole else [min(measured, max(self._sizes))] * count
    self._tx = [tx if by_value else outer.by_tensor(tx, layout, p) for p in range(count)]
    # By fragment: how many blocks each tensor has, how many values each block has.
    self._blocks = blocks = [
      np.array([piece.padded_size // codecs.BLOCK for piece in layout.fragments[p]])
      for p in range(count)
    ]
    self._counts = [np.full(block.sum(), codecs.BLOCK, np.int32) for block in blocks]
    for p in range(count):
      padding = [piece.padded_size - piece.size for piece in layout.fragments[p]]
      self._counts[p][np.cumsum(blocks[p]) - 1] -= np.array(padding, np.int32)
    self._spare: dict[tuple[int, jax.sharding.Sharding], list[jax.Array]] = {}
    # By fragment: whether each block belongs to a statistic; None if the model has none.
    self._statistic: list[np.ndarray] | None = None
    is_statistic = lambda piece: piece.label == fragments.STATISTIC
    flags = [list(map(is_statistic, pieces)) for pieces in layout.fragments]
    if any(map(any, flags)):
      self._statistic = [np.repeat(flags[p], blocks[p]) for p in range(count)]
    self._make_functions()

  def _make_functions(self) -> None:
    self._squares = jax.jit(exchange.block_squares, static_argnums=(0, 1))
    self._products = jax.jit(exchange.block_products, static_argnums=0)
    self._add_rows = jax.jit(exchange.add_rows, static_argnums=0, donate_argnums=1)
    self._gradient = jax.jit(exchange.outer_gradient, static_argnums=0)
    # Arguments without a use are buffers for results.
    decode = lambda codec, spare_n, sections: codec.decode_sections(sections, spare_n.shape[0])
    self._decode = jax.jit(decode, static_argnums=0, donate_argnums=1, keep_unused=True)
    sums = lambda counts, blocks_B: jnp.stack(exchange.tensor_sums(counts, blocks_B))
    self._tensor_sums = jax.jit(sums, static_argnums=0)
    self._digest = jax.jit(digest_lib.digest)
    step = lambda codec_log, codec, tx, spare, *rest: exchange.outer_step(
      codec_log, codec, tx, *rest
    )
    self._step = jax.jit(step, static_argnums=(0, 1, 2), donate_argnums=3, keep_unused=True)

  @property
  def unlike(self) -> list[int]:
    """One fragment for each set of functions to compile."""
    return list(range(len(self._n))) if self._whole else [0]

  # --- Cutting and joining ------------------------------------------------------------------------

  def sharding(self, p: int) -> jax.sharding.Sharding:
    """Where the arrays of fragment p are."""
    return self._shardings[p % len(self._shardings)]

  def near(self, p: int, payload: payload_lib.Payload) -> Any:
    """A payload of fragment p where it can be computed with, uint8[B]."""
    if not payload_lib.is_on_devices(payload):  # also one of the log
      payload = np.frombuffer(payload, np.uint8)
    return payload if self._on_host else jax.device_put(payload, self.sharding(p))

  def published(self, p: int, tiles: Sequence[exchange.Values]) -> Any:
    """The published value of fragment p as a payload, float32[N_p], a new array."""
    if self._on_host:
      return self.flat(p, [tile.published_n for tile in tiles])
    return jnp.copy(tiles[0].published_n)  # the original becomes a buffer

  def starts(self, p: int) -> range:
    """Where the tiles of fragment p begin."""
    return range(0, self._sizes[p], self._n[p])

  def begin(self, p: int, values_N: Any) -> list[exchange.Values]:
    """Version 0 of fragment p: master and published value, and the optimizer's first state."""
    make = lambda value_n: exchange.Values(value_n, jnp.copy(value_n), self._tx[p].init(value_n))
    return [jax.device_put(make(value_n), self.sharding(p)) for value_n in self._cut(p, values_N)]

  def cut(self, p: int, whole: exchange.Values) -> list[exchange.Values]:
    """The inverse of `join`."""
    leaves, tree = jax.tree.flatten(whole)
    tiles = zip(*(self._cut(p, leaf) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(tree, tile) for tile in tiles]

  def _cut(self, p: int, values_N: Any) -> list[jax.Array]:
    values_N, n = np.asarray(values_N), self._n[p]
    if values_N.shape != (self._sizes[p],):  # of the whole fragment, as the count of steps
      return [jax.device_put(np.array(values_N), self.sharding(p)) for _ in self.starts(p)]
    parts = (values_N[start : start + n] for start in self.starts(p))
    return [jax.device_put(np.pad(part, (0, n - len(part))), self.sharding(p)) for part in parts]

  def join(self, p: int, tiles: Sequence[exchange.Values]) -> exchange.Values:
    """Fragment p in arrays of its length, new ones."""
    return jax.tree.map(lambda *parts: self.flat(p, parts), *tiles)

  def flat(self, p: int, parts: Sequence[jax.Array]) -> np.ndarray:
    """The values of all tiles as one array, a new one."""
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
    self._check_size(p, payload, self._up)
    codec, n = self._up, self._measured[p]
    squares_of = lambda start: self._squares(codec, n, self._sections(codec, p, payload, start, n))
    return np.sqrt(self._by_tensor(p, self._each(range(0, self._sizes[p], n), squares_of)))

  def cosines(self, p: int, payloads: Sequence[np.ndarray], lengths_MxT: np.ndarray) -> np.ndarray:
    """Between the payloads, float64[M, M, T], of each tensor; 0 where one of them is zero. Of a
    tile one decoded row exists at a time."""

    def products(start: int) -> list[jax.Array]:
      blocks = []
      for m, payload in enumerate(payloads[:-1]):
        row_n = self._decode(*self._read(p, payload, start, self._buffer(p)))
        for other in payloads[m + 1 :]:
          blocks.append(self._products(*self._read(p, other, start, row_n)))
        self._keep(p, [row_n])
      return blocks

    moved_MxT = lengths_MxT > 0
    cosines_MxMxT = np.eye(len(payloads))[..., None] * moved_MxT
    pairs = itertools.combinations(range(len(payloads)), 2)
    for (m, k), blocks in zip(pairs, zip(*self._each(self.starts(p), products)), strict=True):
      both_T = moved_MxT[m] & moved_MxT[k]
      scale_T = np.where(both_T, lengths_MxT[m] * lengths_MxT[k], np.inf)
      cosines_MxMxT[m, k] = cosines_MxMxT[k, m] = self._by_tensor(p, blocks) / scale_T
    return cosines_MxMxT

  def sums(self, p: int, rows: Sequence[Row]) -> tuple[list[jax.Array], np.ndarray]:
    """(the sums u in tiles, the lengths of their tensors float64[T]) of at least one row."""
    factors = [np.repeat(factors_T.astype(np.float32), self._blocks[p]) for _, factors_T in rows]

    def add(start: int) -> tuple[jax.Array, jax.Array]:
      total_n, squares_B, done = self._buffer(p), None, 0
      while done < len(rows):
        count = next(most for most in AT_ONCE if most <= len(rows) - done)
        span = range(done, done + count)
        total_n, squares_B = self._add_rows(
          self._up,
          total_n,
          [self._sections(self._up, p, rows[m][0], start, self._n[p]) for m in span],
          [self._of_blocks(p, factors[m], start) for m in span],
          np.bool_(done == 0),
          np.bool_(span.stop == len(rows)),
        )
        done = span.stop
      return total_n, squares_B

    totals, squares = zip(*self._each(self.starts(p), add))
    return list(totals), np.sqrt(self._by_tensor(p, squares))

  def merge(
    self,
    p: int,
    tiles: Sequence[exchange.Values],
    totals: Sequence[jax.Array],
    stretch_T: np.ndarray,
    periods: int = 1,
    is_replaced: bool = False,
  ) -> tuple[np.ndarray, Stepped] | None:
    """(the encoded outer gradient uint8[B], the outer step with it); None: a value is not finite.
    Consumes the sums; `tiles` stay as they are. `periods`: those that it covers. `is_replaced`: the
    fragment becomes the value of its one participant."""
    stretch_B = np.repeat(stretch_T.astype(np.float32), self._blocks[p])
    encoded = self._encoded(self._log, p)
    totals_at = dict(zip(self.starts(p), totals, strict=True))

    def gradient(start: int) -> tuple[Sequence[Any], bool]:
      total_n = totals_at.pop(start)
      sections, ok = self._gradient(
        self._log,
        total_n,
        self._of_blocks(p, stretch_B, start),
        self._of_blocks(p, self._counts[p], start),
      )
      encoded.write(start, self._n[p], sections)
      self._keep(p, [total_n])
      return sections, bool(ok)

    stepped = self._outer_step(p, tiles, gradient, periods, is_replaced)
    return stepped and (encoded.payload, stepped)

  def redo(
    self,
    p: int,
    tiles: Sequence[exchange.Values],
    data: np.ndarray,
    periods: int = 1,
    is_replaced: bool = False,
  ) -> Stepped | None:
    """The outer step with an encoded outer gradient, otherwise as `merge`. Raises ValueError for
    another size."""
    self._check_size(p, data, self._log)

    def gradient(start: int) -> tuple[Sequence[Any], bool]:
      return self._sections(self._log, p, data, start, self._n[p]), True

    return self._outer_step(p, tiles, gradient, periods, is_replaced)

  def _outer_step(
    self,
    p: int,
    tiles: Sequence[exchange.Values],
    gradient: Callable[[int], tuple[Sequence[Any], bool]],
    periods: int,
    is_replaced: bool,
  ) -> Stepped | None:
    """Tile by tile: `gradient` returns the sections of the outer gradient where a tile starts, and
    whether it is finite; then optimizer, delta and digest."""
    size, n = self._sizes[p], self._n[p]
    count = np.int32(periods) if periods > 1 else None
    statistic = self._statistic and self._statistic[p]
    if is_replaced:  # no outer optimizer moves it, as with statistics
      statistic = np.ones(len(self._counts[p]), bool)
    delta, before = self._encoded(self._down, p), dict(zip(self.starts(p), tiles, strict=True))

    def step(start: int) -> tuple[exchange.Values, np.ndarray, bool]:
      sections, finite = gradient(start)
      spare = [self._buffer(p) for _ in self._vectors(p, before[start])]
      span = np.uint32(start), np.uint32(min(n, size - start))
      statistic_B = None if statistic is None else self._of_blocks(p, statistic, start)
      more = sections, before[start], *span, statistic_B, count
      result = self._step(self._log, self._down, self._tx[p], spare, *more)
      delta.write(start, n, result.delta)
      return result.tile, np.asarray(result.digest, np.uint64), finite and bool(result.ok)

    stepped, digests, oks = zip(*self._each(self.starts(p), step))
    if not all(oks):
      self.recycle(p, stepped)
      return None
    return Stepped(list(stepped), delta.payload, digest_lib.as_int(sum(digests) & 0xFFFFFFFF))

  def recycle(self, p: int, tiles: Iterable[exchange.Values]) -> None:
    """Takes tiles that are not needed any more, for later results."""
    for tile in tiles:
      self._keep(p, self._vectors(p, tile))

  def digest(self, p: int, tiles: Sequence[exchange.Values]) -> int:
    """The digest of the published value."""
    total = np.zeros(2, np.uint64)
    for start, tile in zip(self.starts(p), tiles, strict=True):
      count = np.uint32(min(self._n[p], self._sizes[p] - start))
      total += np.asarray(self._digest(tile.published_n, np.uint32(start), count))
    return digest_lib.as_int(total & 0xFFFFFFFF)

  def _each(self, starts: range, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work` where tiles start, in order, of several threads."""

    def on_cpu(start: int) -> Any:
      with self.use_own_device():
        return work(start)

    return list((threads().map if len(starts) > 1 else map)(on_cpu, starts))

  def use_own_device(self) -> Any:
    """Here jax computes on a device of the global model what is on no device yet, not on one of
    an island."""
    return jax.default_device(next(iter(self.sharding(0).device_set)))

  def _check_size(self, p: int, payload: np.ndarray, codec: codecs.Codec) -> None:
    size = codec.encoded_size(self._sizes[p])
    if payload.size != size:
      raise ValueError(f'a payload has {payload.size} bytes, fragment {p} needs {size}')

  def _sections(self, codec: codecs.Codec, p: int, payload: Any, start: int, n: int) -> list[Any]:
    """The sections of n values of a payload, filled up with zeros, which decode to zeros."""
    if not self._on_host:
      return [payload]
    size = self._sizes[p]
    stop = min(start + n, size)
    parts = [payload[at] for at in codecs.ranges(codec, size, start, stop)]
    if stop - start == n:
      return parts
    widths = (n // codecs.BLOCK * width for width in codec.sections)
    return [np.pad(part, (0, width - len(part))) for part, width in zip(parts, widths)]

  def _read(self, p: int, payload: np.ndarray, start: int, values_n: jax.Array) -> tuple[Any, ...]:
    """What reads one tile of a payload: its codec, `values_n`, its sections."""
    return self._up, values_n, self._sections(self._up, p, payload, start, self._n[p])

  def _encoded(self, codec: codecs.Codec, p: int) -> _Encoded:
    return _Encoded(codec, self._sizes[p], self._on_host)

  def _of_blocks(self, p: int, values_B: np.ndarray, start: int) -> np.ndarray:
    """The values for the blocks of one tile, zeros behind the last."""
    first, count = start // codecs.BLOCK, self._n[p] // codecs.BLOCK
    part = values_B[first : first + count]
    return part if len(part) == count else np.pad(part, (0, count - len(part)))

  def _by_tensor(self, p: int, blocks: Iterable[jax.Array]) -> np.ndarray:
    """The sum for each tensor, of one number for each block, tile by tile."""
    if not self._on_host:
      (blocks_B,) = blocks
      return np.asarray(self._tensor_sums(tuple(self._blocks[p]), blocks_B), np.float64)
    blocks_B = np.concatenate([np.asarray(block) for block in blocks])
    with np.errstate(over='ignore', invalid='ignore'):  # what is not finite stays so
      return np.array(exchange.tensor_sums(self._blocks[p], blocks_B), np.float64)

  def _buffer(self, p: int) -> jax.Array:
    try:
      return self._spare[self._n[p], self.sharding(p)].pop()
    except LookupError:  # there is none
      return jax.device_put(np.zeros(self._n[p], np.float32), self.sharding(p))

  def _keep(self, p: int, arrays: Iterable[jax.Array]) -> None:
    self._spare.setdefault((self._n[p], self.sharding(p)), []).extend(arrays)

  def _vectors(self, p: int, tile: exchange.Values) -> list[jax.Array]:
    """The arrays of a tile that serve as buffers."""
    leaves = jax.tree.leaves(tile)
    return [leaf for leaf in leaves if (leaf.shape, leaf.dtype) == ((self._n[p],), np.float32)]
