"""The exchange of fragment p: pure functions that learner and syncer jit whole.

One sync of fragment p, with A_v the value published as version v (learners hold it as their anchor,
bit for bit), Theta the syncer's float32 master, C and D a codec's encode and decode:

  learner m   bytes_m = C_up(A_v - theta_m)                                   pseudo_gradient
  syncer      ||D_up(bytes_m)||, to reject outliers and for the merge rule    block_squares
              <D_up(bytes_m), D_up(bytes_k)>, if the merge rule asks          block_products
              u       = sum_m factor_m D_up(bytes_m)                          add_rows
              bytes'  = C_log(stretch u)                                      outer_gradient
              Theta'  = Theta - OuterOpt(D_log(bytes'))
              bytes   = C_down(Theta' - A_v)
              A_{v+1} = A_v + D_down(bytes)                                   outer_step
  learner m   theta_m <- A_{v+1} + (theta_m - (A_v - c_m))                    adopt
           or theta_m <- A_{v+1}                                              adopt
              A_{v+1} = A_v + D_down(bytes)                                   apply_delta

with c_m = D_up(bytes_m) if the syncer merged it, else 0. Parameters of fewer bits than float32
hold A_v rounded; what they have moved is counted from there (`round_to`), or every learner would
contribute the same rounding error as if it had trained it.

Error feedback upward: theta_m - (A_v - c_m) holds, beside the steps since the capture, what the
codec lost of them. Error feedback downward: the codec's error, e = Theta' - A_{v+1}, stays in the
master and is part of the next delta, Theta'' - A_{v+1} = (Theta'' - Theta') + e. So rounding errors
do not pile up.

Every learner that holds version v computes the same A_{v+1} from the same bytes: the decoded values
are exact (see codecs.py), every backend rounds one addition alike, and `apply_delta` makes the
result canonical (no subnormals, no -0). The digest verifies it. A learner that holds another
version gets A_{v+1} whole, as float32 values: that is lossless, as they are canonical.

The syncer's functions take one tile of n values at a time, any n that is a multiple of 32, and
their bits do not depend on n (syncer/outer_step.py); a learner's take a whole fragment.

Give `pieces`, the codecs and `tx` to jax.jit as static arguments. Only bytes, flags,
digests and sums of squares need to cross to the host.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.numerics import codecs, fragments, outer
from diloco_jax.numerics import digest as digest_lib

PyTree = Any
Pieces = tuple[fragments.Piece, ...]  # of one fragment
Leaves = dict[str, jax.Array]  # parameters by the paths of its pieces

_AT_ONCE = 1 << 18  # values


class Values(NamedTuple):
  """The syncer's state of n values: the master Theta, the published value A_v, and the state of
  the outer optimizer."""

  master_n: jax.Array
  published_n: jax.Array
  tx_state: PyTree


class OuterResult(NamedTuple):
  """The result of the outer step of a tile.

  Attributes:
    tile: the new values.
    delta: the sections of the encoded delta from A_v to A_{v+1}.
    digest: uint32[2], the part of this tile in the digest of the published value.
    ok: false if a value is not finite: none of this may be used.
  """

  tile: Values
  delta: tuple[jax.Array, ...]
  digest: jax.Array
  ok: jax.Array


def pseudo_gradient(
  pieces: Pieces, codec: codecs.Codec, data: jax.Array, leaves: Leaves, anchor_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Learner: (the encoded pseudo-gradient of a fragment, ok). Send it only if ok.

  Tensor by tensor: the flat fragment is never made. Give `data`, a payload of the same size that is
  not needed any more, to jit as donated: the new one takes its place.
  """
  n, oks = anchor_N.shape[0], []
  for piece, start, _ in fragments.spans(pieces):

    def encode(state: tuple[jax.Array, jax.Array], first: Any, rows: jax.Array):
      (data, ok), at, theta_n = state, start + first, fragments.flat(piece, rows)
      anchor_n = codecs.part(anchor_N, at, theta_n.size)
      data, finite = codec.encode_into(data, n, at, round_to(anchor_n, rows.dtype) - theta_n)
      return data, ok & finite

    data, ok = _in_turns(fragments.rows(leaves, piece), encode, (data, jnp.bool_(True)))
    oks.append(ok)
  return data, functools.reduce(jnp.logical_and, oks)


def _in_turns(array: jax.Array, function: Callable, state: Any) -> Any:
  """state <- function(state, 0, array); on TPU function(state, index of the first value, some rows)
  for all rows one after the other, so many that there are about _AT_ONCE values.

  For TPU the blocks of a codec take eight times the memory of their values, and a program grows
  with its arrays: a loop bounds both. On CPUs it can take twice as long.
  """
  width = array.shape[-1] if array.ndim else 1
  even = codecs.BLOCK // math.gcd(width, codecs.BLOCK)  # so many rows are whole blocks
  count = _AT_ONCE // width // even * even
  if array.size <= _AT_ONCE or array.size % codecs.BLOCK or not count:
    return function(state, 0, array)

  def loop(array: jax.Array, state: Any) -> Any:
    array = array.reshape(-1, width)
    turns, rest = divmod(len(array), count)

    def turn(i: jax.Array, state: Any) -> Any:
      rows = jax.lax.dynamic_slice_in_dim(array, i * count, count)
      return function(state, i * count * width, rows)

    state = jax.lax.fori_loop(0, turns, turn, state)
    return function(state, turns * count * width, array[-rest:]) if rest else state

  whole = lambda array, state: function(state, 0, array)
  return jax.lax.platform_dependent(array, state, tpu=loop, default=whole)


def round_to(anchor_n: jax.Array, dtype: Any) -> jax.Array:
  """An anchor in the precision of parameters of this type. Not by casts: XLA may leave a
  pair out."""
  info = jnp.finfo(dtype)
  if info.bits >= 32:
    return anchor_n
  rounded_n = jax.lax.reduce_precision(anchor_n, info.nexp, info.nmant)
  if info.nexp == jnp.finfo(jnp.float32).nexp:
    return rounded_n  # an anchor has no subnormals (codecs.canonical)
  # Here some normal float32 values become subnormals: a cast keeps them, reduce_precision does not.
  step = float(info.smallest_subnormal)
  small_n = jnp.round(anchor_n / step) * step
  return jnp.where(jnp.abs(anchor_n) < float(info.smallest_normal), small_n, rounded_n)


def apply_delta(
  codec: codecs.Codec, base_N: jax.Array, data: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Learner: (the new published value float32[N_p], its digest) from another one and a delta."""
  published_N = _published(base_N, codec.decode(data, base_N.shape[0]))
  return published_N, digest_lib.digest(published_N)


def _published(base_n: jax.Array, delta_n: jax.Array) -> jax.Array:
  return codecs.canonical(base_n + delta_n)


class Adoption(NamedTuple):
  """A published value as it reaches a learner, and the learner's share of it.

  Attributes:
    base_N: float32; the value is base + D_down(data).
    data: uint8, the encoded delta.
    capture: uint8, the newest encoded pseudo-gradient of the fragment.
    merged: bool scalar, whether the value contains the capture.
    keep: bool scalar; False: theta <- the value.
  """

  base_N: jax.Array
  data: jax.Array
  capture: jax.Array
  merged: jax.Array
  keep: jax.Array


def adopt(
  pieces: Pieces,
  codec_up: codecs.Codec,
  codec_down: codecs.Codec,
  leaves: Leaves,
  anchor_N: jax.Array,
  adoption: Adoption,
) -> Leaves:
  """Learner: the parameters with the published value of a fragment adopted, tensor by tensor.

  Give `leaves` to jit as donated: each tensor is replaced in place.
  """
  if anchor_N.shape != adoption.base_N.shape:
    raise ValueError(
      f'exchange: a fragment was anchored at {anchor_N.shape} values and '
      f'{adoption.base_N.shape} were published; learner and syncer have different layouts'
    )
  leaves, n = dict(leaves), anchor_N.shape[0]
  # A sum of differences of a statistic may be a value that no learner has had, as a variance below
  # 0. Published values are means of what learners had.
  kept = lambda piece: adoption.keep if piece.label != fragments.STATISTIC else False
  for piece, start, stop in fragments.spans(pieces):
    # In the shape of the tensor, or XLA's CPU backend would copy it instead of writing in place.
    shaped = functools.partial(fragments.unflatten, piece)
    rows = fragments.rows(leaves, piece)
    theta = rows.astype(jnp.float32)
    delta_n = codec_down.decode_range(adoption.data, n, start, stop)
    value = shaped(_published(codecs.part(adoption.base_N, start, stop - start), delta_n))
    given_n = codec_up.decode_range(adoption.capture, n, start, stop)
    merged_n = jnp.where(adoption.merged, given_n, 0.0)
    carried = theta - shaped(
      round_to(codecs.part(anchor_N, start, stop - start), rows.dtype) - merged_n
    )
    fragments.replace_rows(leaves, piece, value + jnp.where(kept(piece), carried, 0.0))
  return leaves


def block_squares(codec: codecs.Codec, n: int, sections: Sequence[jax.Array]) -> jax.Array:
  """Syncer: the sum of squares of each block of a payload of n values, float32[n/32]. It is not
  finite if one of the values is not, or if a square overflows float32.

  `sections` are the sections of the payload (codecs.ranges): it is not copied to join them.
  """
  return codecs.canonical(codec.squares(jnp.concatenate(sections), n))


def tensor_sums(counts: Sequence[int], blocks_B: Any) -> list[Any]:
  """Syncer: the sum for each tensor, float32, of one float32 number for each block.

  Halves are added to halves, whatever the number of blocks, so that each addition is the same on
  every device: the bits belong to what syncers of one run agree on. An array of NumPy is summed by
  NumPy. Sums of products, which may cancel, differ where one is subnormal: XLA may flush it to 0.

  Args:
    counts: the blocks of each tensor, one tensor after the other. Blocks behind them do not count.

  >>> tensor_sums([3, 1], np.float32([1, 2, 4, 8, 16]))
  [np.float32(7.0), np.float32(8.0)]
  """
  totals, start = [], 0
  for count in counts:
    sums = blocks_B[start : start + count]
    while half := len(sums) // 2:
      middle = sums[half:-half]  # one number, or none
      sums = sums[:half] + sums[-half:]
      if len(middle):
        sums = (np if isinstance(sums, np.ndarray) else jnp).concatenate([sums, middle])
    totals.append(sums[0])
    start += count
  return totals


def block_products(
  codec: codecs.Codec, row_n: jax.Array, sections: Sequence[jax.Array]
) -> jax.Array:
  """Syncer: the sum of the products of each block of a decoded payload with another payload."""
  return codecs.products_of(row_n, codec.decode_sections(sections, row_n.shape[0]))


def add_rows(
  codec: codecs.Codec,
  total_n: jax.Array,
  rows: Sequence[Sequence[jax.Array]],
  factors: Sequence[jax.Array],
  first: jax.Array,
  last: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Syncer: total + factor * D_up(bytes) for one row after the other, with a factor for each block;
  and the sum of squares of each block of the result.

  Each addition is total + product, however many rows a call has: a compiler may fuse it into a
  multiply-add, and then of every row alike.

  Args:
    rows: the sections of each payload.
    first: bool scalar; True: begin with 0, and `total_n` is only a buffer to donate.
    last: bool scalar; False: the squares are not needed, and are 0.
  """
  total_n = jnp.where(first, jnp.float32(0), total_n)
  for sections, factors_B in zip(rows, factors, strict=True):
    decoded_n = codec.decode_sections(sections, total_n.shape[0])
    total_n += decoded_n * codecs.spread(factors_B)
  squares = lambda total_n: codecs.canonical(codecs.squares_of(total_n))
  return total_n, jax.lax.cond(last, squares, lambda _: jnp.zeros(factors[0].shape), total_n)


def outer_gradient(
  codec: codecs.Codec, total_n: jax.Array, stretch_B: jax.Array, count_B: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
  """Syncer: (the sections of the encoded outer gradient stretch * total, ok). Use them only if ok.

  Args:
    stretch_B: a factor for each block.
    count_B: how many values of each block belong to a tensor. The padding behind them becomes 0,
      whatever a learner has sent.
  """

  def padded(stretched_n: jax.Array) -> jax.Array:
    index = jax.lax.iota(jnp.int32, total_n.shape[0]) % codecs.BLOCK
    return jnp.where(index < codecs.spread(count_B), stretched_n, 0.0)

  encode = lambda mask: lambda: codec.to_sections(mask(total_n * codecs.spread(stretch_B)))
  full = jnp.all(count_B == codecs.BLOCK)  # of a large tensor most tiles are
  return jax.lax.cond(full, encode(lambda stretched_n: stretched_n), encode(padded))


def outer_step(
  codec_log: codecs.Codec,
  codec: codecs.Codec,
  tx: optax.GradientTransformation,
  gradient: Sequence[jax.Array],
  tile: Values,
  first: jax.Array,
  count: jax.Array,
  statistic_B: jax.Array | None = None,
  periods: jax.Array | None = None,
) -> OuterResult:
  """Syncer: the outer optimizer and the down-link of one tile. The optimizer gets the decoded
  gradient, so the bytes are all that a replay needs.

  Args:
    gradient: the sections of the encoded outer gradient.
    first, count: where the tile is in its fragment, as for digest.digest.
    statistic_B: whether each block belongs to a statistic, which becomes the learners' mean.
    periods: how many the outer gradient is of; None: of one.
  """
  # A compiler could fuse the last product of decoding into a multiply-add of the optimizer, and its
  # choice would change with n: so that there is none, it does not know these ones.
  ones = jnp.where(count > 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
  merged_n = codecs.mask_bits(codec_log.decode_sections(gradient, tile.master_n.shape[0]), ones)
  updates_n, tx_state = tx.update(merged_n, tile.tx_state, tile.master_n)
  if periods is not None:
    tx_state = outer.after_periods(tx, merged_n, tile.tx_state, tile.master_n, periods)
  if statistic_B is not None:
    updates_n = jnp.where(codecs.spread(statistic_B), -merged_n, updates_n)
  master_n = optax.apply_updates(tile.master_n, updates_n)
  delta, ok = codec.to_sections(master_n - tile.published_n)
  published_n = _published(tile.published_n, codec.decode_sections(delta, master_n.shape[0]))
  vectors = []
  for leaf in jax.tree.leaves(tx_state):
    if (leaf.shape, leaf.dtype) == (published_n.shape, published_n.dtype):
      vectors.append(leaf)
    else:
      ok &= jnp.all(jnp.isfinite(leaf))
  digest, finite = digest_lib.digest_and_check(published_n, first, count, vectors)
  return OuterResult(Values(master_n, published_n, tx_state), delta, digest, ok & finite)
