"""Causal attention: on TPU by the splash kernel, elsewhere by JAX's own.

Axes as in decoder.py. The plain form makes the scores [B, N, L, L], which at long L are most of a
step's memory; splash (jax.experimental.pallas) computes them block by block and leaves out blocks
that the mask hides. A kernel is opaque to the partitioner, so it runs inside `shard_map`, on the
sequences and heads that a device has.
"""

import functools

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jax.sharding import PartitionSpec as P

_BLOCKS = (512, 256, 128)  # of queries and keys; 128 is the width of a register


def attention(
  query_BxLxNxH: jax.Array,
  key_BxLxKxH: jax.Array,
  value_BxLxKxH: jax.Array,
  window: int,
  sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
  """The mixed values, [B, L, N, H].

  Args:
    query_BxLxNxH, key_BxLxKxH, value_BxLxKxH: N is a multiple of K.
    window: a position attends to itself and the window - 1 before it; 0: to all before it.
    sharding: of the batch axis; its mesh says whether the devices are TPUs, and has an axis
      'tensor', over which heads are split. None: the plain form.
  """
  arrays = query_BxLxNxH, key_BxLxKxH, value_BxLxKxH
  on_tpu = sharding is not None and sharding.mesh.devices.flat[0].platform == 'tpu'
  if on_tpu and query_BxLxNxH.shape[1] % _BLOCKS[-1] == 0:
    heads = P(*sharding.spec, None, 'tensor')
    return jax.shard_map(
      functools.partial(splash, window=window),
      mesh=sharding.mesh,
      in_specs=(heads, heads, heads),
      out_specs=heads,
      check_vma=False,  # a kernel does not say over which axes its result varies
    )(*arrays)
  local = (window - 1, 0) if window else None
  with jax.numpy_dtype_promotion('standard'):  # JAX's own attention promotes bfloat16 logits
    return jax.nn.dot_product_attention(*arrays, is_causal=True, local_window_size=local)


def splash(
  query_BxLxNxH: jax.Array,
  key_BxLxKxH: jax.Array,
  value_BxLxKxH: jax.Array,
  window: int,
  interpret: bool = False,
) -> jax.Array:
  """As `attention`, by the kernel, of arrays on one device; L is a multiple of 128. `interpret`
  runs it without a TPU."""
  L, N, H = query_BxLxNxH.shape[1:]
  block = next(size for size in _BLOCKS if L % size == 0)
  names = ('block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv', 'block_q_dq', 'block_kv_dq')
  seen = mask_lib.LocalMask((L, L), (window - 1, 0), 0) if window else mask_lib.CausalMask((L, L))
  kernel = kernel_lib.make_splash_mha_single_device(
    mask_lib.MultiHeadMask([seen] * N),
    block_sizes=kernel_lib.BlockSizes(**dict.fromkeys(names, block)),
    interpret=interpret,
  )
  swap = lambda array: array.swapaxes(1, 2)  # heads in front
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    mixed = jax.vmap(kernel)(
      swap(query_BxLxNxH * H**-0.5), *map(swap, (key_BxLxKxH, value_BxLxKxH))
    )
  return swap(mixed)
