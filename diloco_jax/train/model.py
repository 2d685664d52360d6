r"""A small Gemma-like decoder as plain functions over a plain tree of parameters.

  x = E[tokens] sqrt(D)
  x = x + Attention(norm(x)); x = x + GeGLU(norm(x))     for every layer
  logits = c tanh(norm(x) E^T / c)                       softcap c; E^T, or a head of its own

RMSNorm precedes each block (Gemma 2 and later also norm after it, which gains nothing at this
size); its scale is 1 + s, s starts at 0, so weight decay would pull the scale towards 1. Queries
and keys are normed per head (QK-norm, Gemma 3), then rotated by RoPE; N query heads share K
key-value heads (GQA); attention is causal.

Axes: B batch, L length, D embedding, N query heads, K key-value heads, H head, F hidden, V words.
Parameters are float32, one leaf per tensor and layer (`params['layers'][3]['query']`), because the
protocol cuts fragments between tensors and layers. For the same reason there is no scan over
layers: at these depths the unrolled model compiles in seconds. Activations have `config.dtype`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.train import config as config_lib

Params = dict[str, Any]

_EMBED_STD = 0.02


def init_params(config: config_lib.ModelConfig, seed: int) -> Params:
  """Draws parameters on the host as numpy float32; the initial loss is close to ln V.

  Projections have standard deviation 1/sqrt(fan in); those whose output is added to the residual
  sum are also divided by sqrt(2 layers) (GPT-2), so that its variance does not grow with depth.

  The draw is on the host so that learners on different devices and meshes, and a syncer without a
  mesh, start from the same bits, and so that nothing has to be compiled for it.
  """
  rng = np.random.default_rng(seed)
  params = {
    'embedding': _normal(rng, (config.vocab_size, config.embed_dim), _EMBED_STD),
    'final_norm': np.zeros((config.embed_dim,), np.float32),
    'layers': [_init_layer(config, rng) for _ in range(config.num_layers)],
  }
  if not config.tied_head:
    params['head'] = _normal(rng, (config.embed_dim, config.vocab_size), _EMBED_STD)
  return params


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> np.ndarray:
  return rng.standard_normal(shape, np.float32) * np.float32(std)


def _init_layer(config: config_lib.ModelConfig, rng: np.random.Generator) -> Params:
  D, N, K = config.embed_dim, config.num_heads, config.num_kv_heads
  H, F = config.head_dim, config.hidden_dim
  residual = (2 * config.num_layers) ** -0.5
  return {
    'attention_norm': np.zeros((D,), np.float32),
    'query': _normal(rng, (D, N, H), D**-0.5),
    'key': _normal(rng, (D, K, H), D**-0.5),
    'value': _normal(rng, (D, K, H), D**-0.5),
    'query_norm': np.zeros((H,), np.float32),
    'key_norm': np.zeros((H,), np.float32),
    'out': _normal(rng, (N, H, D), (N * H) ** -0.5 * residual),
    'mlp_norm': np.zeros((D,), np.float32),
    'gate': _normal(rng, (D, F), D**-0.5),
    'up': _normal(rng, (D, F), D**-0.5),
    'down': _normal(rng, (F, D), F**-0.5 * residual),
  }


def apply(
  config: config_lib.ModelConfig,
  params: Params,
  tokens_BxL: jax.Array,
  sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
  """Returns float32 logits_BxLxV of the token that follows each position.

  `sharding` pins the activations between the blocks (leading axis: the batch): without it the
  partitioner may gather the batch instead of the split parameters.
  """
  dtype = jnp.dtype(config.dtype)
  params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
  x_BxLxD = params['embedding'][tokens_BxL] * jnp.asarray(config.embed_dim**0.5, dtype)
  sin_LxH, cos_LxH = _rope_table(config, tokens_BxL.shape[1])
  for layer in params['layers']:
    x_BxLxD = _pin(x_BxLxD, sharding)
    x_BxLxD = x_BxLxD + _attention(
      layer, rms_norm(x_BxLxD, layer['attention_norm']), sin_LxH, cos_LxH
    )
    x_BxLxD = x_BxLxD + _geglu(layer, rms_norm(x_BxLxD, layer['mlp_norm']))
  x_BxLxD = rms_norm(_pin(x_BxLxD, sharding), params['final_norm'])
  head_DxV = params['embedding'].T if config.tied_head else params['head']
  return _softcap((x_BxLxD @ head_DxV).astype(jnp.float32), config.logit_softcap)


def loss(
  config: config_lib.ModelConfig,
  params: Params,
  tokens_BxL1: jax.Array,
  sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
  """Mean cross-entropy of the next token, in nats: L predictions from L + 1 tokens."""
  logits_BxLxV = apply(config, params, tokens_BxL1[:, :-1], sharding)
  targets_BxL = tokens_BxL1[:, 1:]
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, targets_BxL))


def label(path: str) -> str:
  """The label that selects the merge rule of a parameter, from its `jax.tree_util.keystr`.

  The syncer merges the embedding and an untied head by plain averaging (paper section 4).

  >>> label("['embedding']"), label("['head']"), label("['layers'][0]['query']")
  ('embedding', 'head', 'body')
  """
  return {"['embedding']": 'embedding', "['head']": 'head'}.get(path, 'body')


def rms_norm(x_xD: jax.Array, scale_D: jax.Array) -> jax.Array:
  """x / rms(x) * (1 + scale) over the last axis, computed in float32."""
  x32_xD = x_xD.astype(jnp.float32)
  inverse_x1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_xD), axis=-1, keepdims=True) + 1e-6)
  scale_xD = jnp.expand_dims(1.0 + scale_D.astype(jnp.float32), range(x_xD.ndim - 1))
  return (x32_xD * inverse_x1 * scale_xD).astype(x_xD.dtype)


def _attention(
  layer: Params, x_BxLxD: jax.Array, sin_LxH: jax.Array, cos_LxH: jax.Array
) -> jax.Array:
  query_BxLxNxH = jnp.einsum('bld,dnh->blnh', x_BxLxD, layer['query'])
  key_BxLxKxH = jnp.einsum('bld,dkh->blkh', x_BxLxD, layer['key'])
  value_BxLxKxH = jnp.einsum('bld,dkh->blkh', x_BxLxD, layer['value'])
  query_BxLxNxH = _rope(rms_norm(query_BxLxNxH, layer['query_norm']), sin_LxH, cos_LxH)
  key_BxLxKxH = _rope(rms_norm(key_BxLxKxH, layer['key_norm']), sin_LxH, cos_LxH)
  with jax.numpy_dtype_promotion('standard'):  # JAX's own attention promotes bfloat16 logits
    mixed_BxLxNxH = jax.nn.dot_product_attention(
      query_BxLxNxH, key_BxLxKxH, value_BxLxKxH, is_causal=True
    )
  return jnp.einsum('blnh,nhd->bld', mixed_BxLxNxH, layer['out'])


def _geglu(layer: Params, x_BxLxD: jax.Array) -> jax.Array:
  return (jax.nn.gelu(x_BxLxD @ layer['gate']) * (x_BxLxD @ layer['up'])) @ layer['down']


def _rope_table(config: config_lib.ModelConfig, length: int) -> tuple[jax.Array, jax.Array]:
  """Sines and cosines of position * theta^(-2i/H), i < H/2, one float32 array [L, H/2] each."""
  exponent_H = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
  angle_LxH = jnp.outer(jnp.arange(length, dtype=jnp.float32), config.rope_theta**-exponent_H)
  return jnp.sin(angle_LxH), jnp.cos(angle_LxH)


def _rope(x_BxLxNxH: jax.Array, sin_LxH: jax.Array, cos_LxH: jax.Array) -> jax.Array:
  """Rotates the pair (x_i, x_{i + H/2}) by its angle (arXiv 2104.09864)."""
  sin_1xLx1xH, cos_1xLx1xH = (t[None, :, None, :] for t in (sin_LxH, cos_LxH))
  a, b = jnp.split(x_BxLxNxH.astype(jnp.float32), 2, axis=-1)
  turned = (a * cos_1xLx1xH - b * sin_1xLx1xH, b * cos_1xLx1xH + a * sin_1xLx1xH)
  return jnp.concatenate(turned, axis=-1).astype(x_BxLxNxH.dtype)


def _softcap(logits: jax.Array, cap: float) -> jax.Array:
  return cap * jnp.tanh(logits / cap) if cap else logits


def _pin(x: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
  return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
