"""The exchange of fragment p: pure functions that learner and syncer jit whole.

One sync of fragment p, with A_v the value published as version v (learners hold it as their anchor,
bit for bit), Theta the syncer's float32 master, C and D a codec's encode and decode:

  learner m   bytes_m = C_up(A_v - theta_m)                                     pseudo_gradient
  syncer      ||D_up(bytes_m)||, to reject outliers                                 payload_norm
              Theta'  = Theta - OuterOpt(Merge({D_up(bytes_m)}, w))
              bytes   = C_down(Theta' - A_v)
              A_{v+1} = A_v + D_down(bytes)                                     outer_step
  learner m   A_{v+1} = A_v + D_down(bytes)                                     apply_delta
              theta_m <- A_{v+1} + (theta_m - (A_v - c_m))                       rebase
           or theta_m <- (1 - alpha) A_{v+1} + alpha theta_m                    adopt

with c_m = D_up(bytes_m) if the syncer merged it, else 0.

Error feedback upward: theta_m - (A_v - c_m) holds, beside the steps since the capture, what the
codec lost of them. Error feedback downward: the codec's error, e = Theta' - A_{v+1}, stays in the
master and is part of the next delta, Theta'' - A_{v+1} = (Theta'' - Theta') + e. So rounding errors
do not pile up.

Every learner that holds version v computes the same A_{v+1} from the same bytes: the decoded values
are exact (see codecs.py), every backend rounds one addition alike, and `apply_delta` makes the
result canonical (no subnormals, no -0). The digest verifies it. A learner that holds another
version gets A_{v+1} whole: the float32 codec is lossless for canonical values.

Give `layout`, `p`, the codecs, `outer` and `alpha` to jax.jit as static arguments. Only bytes,
flags and digests need to cross to the host.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import codecs, fragments
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.numerics import outer as outer_lib

PyTree = Any


class OuterResult(NamedTuple):
  """The result of an outer step.

  Attributes:
    master_N: the new float32 master, Theta'.
    published_N: the new published value, A_{v+1}.
    opt_state: the new state of the outer optimizer.
    delta_bytes: uint8, the encoded delta from A_v to A_{v+1}.
    digest: uint32[2] of published_N.
    ok: false if all weights are 0 or a value is not finite. Then the three states above are the
      arguments (donated buffers lose nothing) and delta_bytes must not be sent.
    norm: the norm of the merged outer gradient of the fragment.
  """

  master_N: jax.Array
  published_N: jax.Array
  opt_state: PyTree
  delta_bytes: jax.Array
  digest: jax.Array
  ok: jax.Array
  norm: jax.Array


def pseudo_gradient(
  layout: fragments.Layout, p: int, codec: codecs.Codec, params_tree: PyTree, anchor_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Learner: (the encoded pseudo-gradient of fragment p, ok). Send it only if ok."""
  return codec.encode(anchor_N - fragments.gather(layout, p, params_tree))


def apply_delta(
  codec: codecs.Codec, anchor_N: jax.Array, data: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Learner: (the new published value float32[N_p], its digest) from the old one and a delta."""
  published_N = codecs.canonical(anchor_N + codec.decode(data, anchor_N.shape[0]))
  return published_N, digest_lib.digest(published_N)


def adopt(
  layout: fragments.Layout,
  p: int,
  params_tree: PyTree,
  anchor_N: jax.Array,
  published_N: jax.Array,
  alpha: float = 0.0,
) -> tuple[PyTree, jax.Array]:
  """Learner: (parameters with fragment p adopted, the new anchor).

  theta <- (1 - alpha) published + alpha theta. The paper overwrites (alpha = 0); Streaming DiLoCo
  (arXiv 2501.18512) mixes. The old anchor is an argument so that its buffer can be donated to the
  new one.
  """
  if not 0.0 <= alpha < 1.0:
    raise ValueError(f'exchange: alpha is {alpha}; it must be in [0, 1), and 0 overwrites')
  if anchor_N.shape != published_N.shape:
    raise ValueError(
      f'exchange: fragment {p} was anchored at {anchor_N.shape} values and {published_N.shape} '
      'were published; learner and syncer have different layouts'
    )
  theta_N = published_N
  if alpha:
    theta_N = (1 - alpha) * published_N + alpha * fragments.gather(layout, p, params_tree)
  return fragments.scatter(layout, p, params_tree, theta_N), published_N


def rebase(
  layout: fragments.Layout,
  p: int,
  codec: codecs.Codec,
  params_tree: PyTree,
  anchor_N: jax.Array,
  published_N: jax.Array,
  capture: jax.Array,
  keep: jax.Array,
  merged: jax.Array,
) -> tuple[PyTree, jax.Array]:
  """Learner: (parameters with fragment p rebased onto the published value, the new anchor).

  Args:
    capture: uint8, the newest encoded pseudo-gradient of the fragment.
    keep: bool scalar; False: theta <- published.
    merged: bool scalar, whether the published value contains the capture.
  """
  theta_N = fragments.gather(layout, p, params_tree)
  merged_N = jnp.where(merged, codec.decode(capture, anchor_N.shape[0]), 0.0)
  carried_N = jnp.where(keep, theta_N - (anchor_N - merged_N), 0.0)
  return fragments.scatter(layout, p, params_tree, published_N + carried_N), published_N


def init_outer(
  layout: fragments.Layout, p: int, outer: outer_lib.OuterOptimizer, master_N: jax.Array
) -> PyTree:
  """Syncer: the state of the outer optimizer for fragment p."""
  return outer.init(fragments.split(layout, p, master_N))


def payload_norm(codec: codecs.Codec, n: int, data: jax.Array) -> jax.Array:
  """Syncer: the norm of an encoded pseudo-gradient of n values, float32[]. It is not finite if one
  of the values is not, or if their squares overflow float32.

  It sums squares block by block, so that a long sum does not absorb small addends.
  """
  squares_BxK = jnp.square(codec.decode(data, n)).reshape(-1, codecs.BLOCK)
  return jnp.sqrt(jnp.sum(jnp.sum(squares_BxK, axis=1)))


def outer_step(
  layout: fragments.Layout,
  p: int,
  outer: outer_lib.OuterOptimizer,
  codec_up: codecs.Codec,
  codec_down: codecs.Codec,
  master_N: jax.Array,
  published_N: jax.Array,
  opt_state: PyTree,
  payloads_MxB: jax.Array,
  weights_M: jax.Array,
) -> OuterResult:
  """Syncer: one outer step of fragment p.

  Args:
    payloads_MxB: uint8, the encoded pseudo-gradients in the order of learner ids. The row of an
      absent learner is all zeros (which decodes to zeros in every codec) and its weight is 0.
    weights_M: float32, see merge.token_weights.
  """
  n = layout.size(p)
  deltas_MxN = jax.vmap(lambda data: codec_up.decode(data, n))(payloads_MxB)
  deltas = fragments.split(layout, p, deltas_MxN)
  params = fragments.split(layout, p, master_N)
  new_params, new_state, merged = outer.update(deltas, weights_M, opt_state, params)
  new_master_N = fragments.join(layout, p, new_params)

  data, ok = codec_down.encode(new_master_N - published_N)
  new_published_N = codecs.canonical(published_N + codec_down.decode(data, n))
  ok &= jnp.all(jnp.isfinite(new_published_N)) & jnp.any(weights_M > 0)
  for leaf in jax.tree.leaves(new_state):
    ok &= jnp.all(jnp.isfinite(leaf))

  old = (master_N, published_N, opt_state)
  new = (new_master_N, new_published_N, new_state)
  kept = jax.tree.map(lambda new_leaf, old_leaf: jnp.where(ok, new_leaf, old_leaf), new, old)
  return OuterResult(*kept, data, digest_lib.digest(kept[1]), ok, _global_norm(merged))


def _global_norm(tree: PyTree) -> jax.Array:
  return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))


def host_bytes(array: jax.Array) -> memoryview:
  """The bytes of a uint8 array on the host; waits for the device without holding the GIL."""
  return memoryview(np.asarray(array)).cast('B')
