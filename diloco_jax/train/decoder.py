r"""The reference task: a Gemma-like decoder over ids of text, a flax.nnx module.

  x = E[tokens] sqrt(D)
  x = x + Attention(norm(x)); x = x + GeGLU(norm(x))     for every layer
  logits = c tanh(norm(x) E^T / c)                       softcap c; E^T, or a head of its own

RMSNorm precedes each block (with `config.post_norms` another one follows it); its scale is 1 + s, s
starts at 0, so weight decay would pull the scale towards 1. Queries and keys are normed per head
(QK-norm, Gemma 3), then rotated by RoPE; N query heads share K key-value heads (GQA); attention is
causal, and of most layers limited to a window if `config.window` says so (attention.py). With
`config.style` 'llama' it is one of that family. storage/hugging_face.py reads and writes both.

With `config.num_experts` the feed-forward block is a Mixture of Experts (experts.py), whose balance
loss is added to the gradient of the loss.

Axes: B batch, L length, D embedding, N query heads, K key-value heads, H head, F hidden, V words.
Outside this file the parameters are a plain tree, `nnx.to_pure_dict` of the module's state: one
leaf per tensor and layer (`params['layers'][3]['query']`), or with `config.scan` one per tensor,
with a first axis of layers (`params['layers']['query']`), for a program that does not grow with the
depth. The protocol cuts both between layers (numerics/fragments.py), and both begin with the same
values.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from diloco_jax.numerics import fragments
from diloco_jax.storage import arrays, hugging_face
from diloco_jax.train import attention, evaluate, experts, flops, initial
from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import task as task_lib
from diloco_jax.train import tokenizer as tokenizer_lib

Params = dict[str, Any]

_SPLIT = (
  (r'(query|key|value)', P('fsdp', 'tensor', None)),  # D N H
  (r'out', P('tensor', 'fsdp', None)),  # N H D
  (r'(gate|up)', P('fsdp', 'tensor')),  # D F
  (r'down', P(('tensor', 'fsdp'), None)),  # F D
)
PARTITION = (
  (r'embedding', P('tensor', 'fsdp')),  # V D
  (r'head', P('fsdp', 'tensor')),  # D V
  *((rf'layers/\d+/{name}', spec) for name, spec in _SPLIT),
  *((rf'layers/{name}', P(None, *spec)) for name, spec in _SPLIT),
  *experts.PARTITION,
)
MATRICES = (
  (r'layers/\d+/(query|key|value)', ((0,), (1, 2))),  # D -> N H
  (r'layers/\d+/out', ((0, 1), (2,))),  # N H -> D
  (r'layers/(query|key|value)', ((1,), (2, 3))),  # the same behind an axis of layers
  (r'layers/out', ((1, 2), (3,))),
  (r'layers/(gate|up|down)', ((1,), (2,))),
  (r'layers/\w+_norm', None),
  *experts.MATRICES,
)
_SAVED = {  # by config.remat: what a layer keeps for the backward pass
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'full': jax.checkpoint_policies.nothing_saveable,
}
BALANCE_LOSS = 0.01  # the weight of the loss that spreads tokens over the experts
_EMBED_STD = 0.02
_LLAMA3_TURNS = (1.0, 4.0)  # in _LLAMA3_LENGTH positions: wavelengths with fewer are longer, with
_LLAMA3_LENGTH = 8192  # more they stay


def task(model: train_config.ModelConfig, data: train_config.DataConfig) -> task_lib.Task:
  """The decoder on the corpus of `data`, which is read on first use."""
  tokenizer = functools.cache(lambda: tokenizer_lib.load(data.tokenizer, data.corpus, data.field))

  @functools.cache
  def corpus() -> data_lib.Corpus:
    if tokenizer().size > model.vocab_size:
      raise ValueError(
        f'tokenizer {data.tokenizer!r} has {tokenizer().size} ids, model.vocab_size is '
        f'{model.vocab_size}: raise it, on a TPU to a multiple of 128'
      )
    return data_lib.load_corpus(data.corpus, data.tokenizer, data.field)

  return task_lib.Task(
    init=functools.partial(initial_params, model),
    start=functools.partial(start, model),
    export=functools.partial(export, model),
    loss=functools.partial(loss, model),
    batches=lambda shard: data_lib.make_shard(corpus(), data, shard),
    tokens_per_batch=data.rows * data.seq_len,
    eval_batches=lambda: data_lib.eval_batches(corpus(), data) if data_lib.has_files(data) else (),
    label=label,
    partition=PARTITION,
    matrices=MATRICES,
    data_digest=lambda: data_lib.digest(corpus(), data),
    tokenizer=tokenizer,
    logits=functools.partial(apply, model),
    suite=lambda most: evaluate.text_suite(corpus().held_out(data.seq_len), tokenizer(), most),
    flops_per_token=flops.decoder(model, data.seq_len),
  )


class Block(nnx.Module):
  """One layer: attention, then the gated feed-forward block."""

  def __init__(self, config: train_config.ModelConfig):
    """Draws projections with standard deviation 1/sqrt(fan in); those whose output is added to the
    residual sum are also divided by sqrt(2 layers) (GPT-2), so that its variance does not grow with
    depth."""
    self.window, self.eps, self.is_llama = config.window, config.norm_eps, config.style == 'llama'
    scale = lambda size: nnx.Param(np.full((size,), self.is_llama, np.float32))
    D, N, K = config.embed_dim, config.num_heads, config.num_kv_heads
    H, F = config.head_dim, config.hidden_dim
    residual = (2 * config.num_layers) ** -0.5
    self.attention_norm = scale(D)
    self.query = normal((D, N, H), D**-0.5)
    self.key = normal((D, K, H), D**-0.5)
    self.value = normal((D, K, H), D**-0.5)
    if config.qk_norm:
      self.query_norm, self.key_norm = scale(H), scale(H)
    if config.post_norms:
      self.attention_post_norm, self.mlp_post_norm = scale(D), scale(D)
    self.out = normal((N, H, D), (N * H) ** -0.5 * residual)
    self.mlp_norm = scale(D)
    if config.num_experts:
      self.experts = experts.Experts(config, residual)
    else:
      self.gate = normal((D, F), D**-0.5)
      self.up = normal((D, F), D**-0.5)
      self.down = normal((F, D), F**-0.5 * residual)

  def __call__(
    self,
    x_BxLxD: jax.Array,
    sin_LxH: jax.Array,
    cos_LxH: jax.Array,
    sees_all: bool | jax.Array,
    sharding: jax.sharding.NamedSharding | None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the new x_BxLxD and `experts.routing`, zeros if there are no experts. `sees_all`:
    attention has no window."""
    normed_BxLxD = self._normed(x_BxLxD, 'attention_norm')
    mixed_BxLxD = self._attention(normed_BxLxD, sin_LxH, cos_LxH, sees_all, sharding)
    x_BxLxD = x_BxLxD + self._normed(mixed_BxLxD, 'attention_post_norm')
    normed_BxLxD = self._normed(x_BxLxD, 'mlp_norm')
    if hasattr(self, 'experts'):
      mixed_BxLxD, routing_3 = self.experts(normed_BxLxD, sharding)
    else:
      mixed_BxLxD, routing_3 = self._gated(normed_BxLxD), jnp.zeros(3, jnp.float32)
    return x_BxLxD + self._normed(mixed_BxLxD, 'mlp_post_norm'), routing_3

  def _normed(self, x_xD: jax.Array, name: str) -> jax.Array:
    """By the norm of this name; without one x stays as it is."""
    scale = getattr(self, name, None)
    return x_xD if scale is None else rms_norm(x_xD, scale[...], self.eps, self.is_llama)

  def _attention(
    self,
    x_BxLxD: jax.Array,
    sin_LxH: jax.Array,
    cos_LxH: jax.Array,
    sees_all: bool | jax.Array,
    sharding: jax.sharding.NamedSharding | None,
  ) -> jax.Array:
    query_BxLxNxH = jnp.einsum('bld,dnh->blnh', x_BxLxD, self.query[...])
    key_BxLxKxH = jnp.einsum('bld,dkh->blkh', x_BxLxD, self.key[...])
    value_BxLxKxH = jnp.einsum('bld,dkh->blkh', x_BxLxD, self.value[...])
    query_BxLxNxH = _rope(self._normed(query_BxLxNxH, 'query_norm'), sin_LxH, cos_LxH)
    key_BxLxKxH = _rope(self._normed(key_BxLxKxH, 'key_norm'), sin_LxH, cos_LxH)
    of_all, of_window = (
      functools.partial(attention.attention, window=window, sharding=sharding)
      for window in (0, self.window)
    )
    arrays = query_BxLxNxH, key_BxLxKxH, value_BxLxKxH
    if isinstance(sees_all, jax.Array):  # in a scan: one program for all layers
      mixed_BxLxNxH = jax.lax.cond(sees_all, of_all, of_window, *arrays)
    else:
      mixed_BxLxNxH = (of_all if sees_all else of_window)(*arrays)
    return jnp.einsum('blnh,nhd->bld', mixed_BxLxNxH, self.out[...])

  def _gated(self, x_BxLxD: jax.Array) -> jax.Array:
    activation = jax.nn.silu if self.is_llama else jax.nn.gelu
    return (activation(x_BxLxD @ self.gate[...]) * (x_BxLxD @ self.up[...])) @ self.down[...]


class Decoder(nnx.Module):
  """The whole model; the initial loss is close to ln V."""

  def __init__(self, config: train_config.ModelConfig):
    self.config = config
    self.embedding = normal((config.vocab_size, config.embed_dim), _EMBED_STD)
    ones = config.style == 'llama'
    self.final_norm = nnx.Param(np.full((config.embed_dim,), ones, np.float32))
    if config.scan:
      self.layers = Block(config)  # `bind` gives its parameters the axis of layers
    else:
      self.layers = nnx.List([Block(config) for _ in range(config.num_layers)])
    if not config.tied_head:
      self.head = normal((config.embed_dim, config.vocab_size), _EMBED_STD)

  def __call__(
    self,
    tokens_BxL: jax.Array,
    sharding: jax.sharding.NamedSharding | None = None,
    prefix_BxIxD: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns float32 logits_BxLxV of the token that follows each position, and the sum of the
    layers' `experts.routing`. Arguments: of `features`."""
    x_BxLxD, routing_3 = self.features(tokens_BxL, sharding, prefix_BxIxD)
    return self.logits(x_BxLxD), routing_3

  def features(
    self,
    tokens_BxL: jax.Array,
    sharding: jax.sharding.NamedSharding | None = None,
    prefix_BxIxD: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns x_BxLxD, of which `logits` predicts, and the sum of the layers' `experts.routing`.

    Args:
      tokens_BxL: of an integer type.
      sharding: pins the activations between the blocks (leading axis: the batch): without it the
        partitioner may gather the batch instead of the split parameters.
      prefix_BxIxD: what stands in the sequence in front of the tokens.
    """
    config, x_BxLxD = self.config, self.embedding[...][tokens_BxL]
    if config.style == 'gemma':
      x_BxLxD *= jnp.asarray(config.embed_dim**0.5, x_BxLxD.dtype)
    if prefix_BxIxD is not None:
      x_BxLxD = jnp.concatenate([prefix_BxIxD, x_BxLxD], axis=1)
    x_BxLxD, routing_3 = self._through_layers(x_BxLxD, sharding)
    x_BxLxD = x_BxLxD[:, -tokens_BxL.shape[1] :]
    x_BxLxD, is_llama = _pin(x_BxLxD, sharding), config.style == 'llama'
    return rms_norm(x_BxLxD, self.final_norm[...], config.norm_eps, is_llama), routing_3

  def _through_layers(
    self, x_BxLxD: jax.Array, sharding: jax.sharding.NamedSharding | None
  ) -> tuple[jax.Array, jax.Array]:
    config, length = self.config, x_BxLxD.shape[1]
    table = _rope_table(config, length, config.rope_theta, config.rope_factor)
    local = _rope_table(config, length, config.rope_local_theta or config.rope_theta)
    sees_all = config.sees_all
    block, _ = nnx.split(self.layers if config.scan else self.layers[0])

    def layer(x_BxLxD: jax.Array, leaves: nnx.State, sees_all: bool | jax.Array):
      sin_cos = jnp.where(sees_all, table, local) if config.rope_local_theta else table
      return nnx.merge(block, leaves)(_pin(x_BxLxD, sharding), *sin_cos, sees_all, sharding)

    def remat(function):
      saved = _SAVED.get(config.remat)
      return (
        jax.checkpoint(function, policy=saved, prevent_cse=not config.scan) if saved else function
      )

    if not config.scan:
      routing_3 = jnp.zeros(3, jnp.float32)
      for module, sees in zip(self.layers, sees_all):
        x_BxLxD, more = remat(functools.partial(layer, sees_all=sees))(x_BxLxD, nnx.state(module))
        routing_3 += more
      return x_BxLxD, routing_3
    rows = [nnx.state(self.layers)]
    if len(set(sees_all)) == 1:
      layer = functools.partial(layer, sees_all=sees_all[0])
    else:
      rows.append(jnp.asarray(sees_all))
    step = remat(layer)
    x_BxLxD, routing_Lx3 = jax.lax.scan(lambda x_BxLxD, row: step(x_BxLxD, *row), x_BxLxD, rows)
    return x_BxLxD, jnp.sum(routing_Lx3, axis=0)

  def logits(self, x_BxLxD: jax.Array) -> jax.Array:
    config = self.config
    head_DxV = self.embedding[...].T if config.tied_head else self.head[...]
    logits_BxLxV, cap = (x_BxLxD @ head_DxV).astype(jnp.float32), config.logit_softcap
    return cap * jnp.tanh(logits_BxLxV / cap) if cap else logits_BxLxV


def normal(shape: tuple[int, ...], std: float) -> nnx.Param:
  return nnx.Param(initial.Normal(shape, std))


def initial_params(
  config: train_config.ModelConfig, seed: int, kind: type[Decoder] = Decoder
) -> Params:
  """The initial parameters of a model, drawn when they are read (initial.py)."""
  module = kind(dataclasses.replace(config, scan=False))
  params = initial.seed_leaves(
    nnx.to_pure_dict(nnx.state(module, nnx.Param)), seed, config.param_dtype
  )
  return _stack_layers(config, params)


def _stack_layers(config: train_config.ModelConfig, params: Params) -> Params:
  if config.scan:
    layers = [params['layers'][number] for number in range(config.num_layers)]
    params['layers'] = jax.tree.map(lambda *leaves: initial.Stacked(leaves), *layers)
  return params


def start(config: train_config.ModelConfig, path: str, seed: int) -> Params:
  """The parameters in a Hugging Face folder, or in what `arrays.start` reads. Raises ValueError."""
  if not hugging_face.is_model(path):
    return arrays.start(path, initial_params(config, seed))
  like = initial_params(dataclasses.replace(config, scan=False), seed)
  return _stack_layers(config, hugging_face.read(path, like))


def export(config: train_config.ModelConfig, params: Params) -> dict[str, np.ndarray]:
  """The tensors of a Hugging Face folder. Raises ValueError: such a model is in none."""
  if config.scan:
    rows = [jax.tree.map(lambda leaf: leaf[n], params['layers']) for n in range(config.num_layers)]
    params = params | {'layers': rows}
  return hugging_face.tensors_of(params)


def bind(config: train_config.ModelConfig, params: Params, kind: type[Decoder] = Decoder) -> Any:
  """The model with the parameters of a tree, which computes in `config.dtype`."""
  module = kind(config)
  nnx.update(module, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(config.dtype)), params))
  return module


def apply(config: train_config.ModelConfig, params: Params, tokens_BxL: jax.Array) -> jax.Array:
  """Logits (Decoder.__call__) of a tree of parameters."""
  return bind(config, params)(tokens_BxL)[0]


def loss(
  config: train_config.ModelConfig,
  params: Params,
  tokens_BxL1: jax.Array,
  sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array | task_lib.Measured:
  """Mean cross-entropy of the next token, in nats: L predictions from L + 1 tokens of an integer
  type; with experts as `text_loss`."""
  tokens_BxL1 = tokens_BxL1.astype(jnp.int32)
  module, targets_BxL = bind(config, params), tokens_BxL1[:, 1:]
  x_BxLxD, routing_3 = module.features(tokens_BxL1[:, :-1], sharding)
  size = config.loss_chunk
  if not size:
    return text_loss(config, module.logits(x_BxLxD), targets_BxL, routing_3)

  def part(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    x_BxCxD, targets_BxC = chunk
    entropies_BxC = optax.softmax_cross_entropy_with_integer_labels(
      module.logits(_pin(x_BxCxD, sharding)), targets_BxC
    )
    return total + jnp.sum(entropies_BxC), None

  cut = lambda array: array.reshape(len(array), -1, size, *array.shape[2:]).swapaxes(0, 1)
  total, _ = jax.lax.scan(jax.checkpoint(part), jnp.float32(0), (cut(x_BxLxD), cut(targets_BxL)))
  return _with_routing(config, total / targets_BxL.size, routing_3)


def text_loss(
  config: train_config.ModelConfig,
  logits_BxLxV: jax.Array,
  targets_BxL: jax.Array,
  routing_3: jax.Array,
) -> jax.Array | task_lib.Measured:
  """The mean cross-entropy; with experts the entropies of their routers, too, means over the
  layers, and the gradient of the balance loss, but not its value: so losses of training, held-out
  losses, and those of models without experts can be compared."""
  entropies_BxL = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, targets_BxL)
  return _with_routing(config, jnp.mean(entropies_BxL), routing_3)


def _with_routing(
  config: train_config.ModelConfig, loss: jax.Array, routing_3: jax.Array
) -> jax.Array | task_lib.Measured:
  if not config.num_experts:
    return loss
  balance, *entropies = routing_3
  names = 'router_entropy', 'load_entropy'
  measured = {name: entropy / config.num_layers for name, entropy in zip(names, entropies)}
  balance_loss = BALANCE_LOSS * balance
  return loss + (balance_loss - jax.lax.stop_gradient(balance_loss)), measured


def label(path: str) -> str:
  """The label that selects the merge rule of a parameter, from its path.

  The syncer merges the embedding and an untied head by plain averaging (paper section 4).

  >>> label('embedding'), label('head'), label('layers/0/query')
  ('embedding', 'head', 'body')
  >>> label('layers/0/experts/router'), label('layers/0/experts/up')
  ('router', 'expert')
  >>> label('layers/query')  # in a scan
  'layer'
  """
  *above, name = path.split('/')
  inside = 'body'
  if above[:1] == ['layers'] and not path.split('/')[1].isdigit():
    inside = fragments.LAYER
  inside = fragments.EXPERT if 'experts' in above else inside
  return {'embedding': 'embedding', 'head': 'head', 'router': 'router'}.get(name, inside)


def rms_norm(x_xD: jax.Array, scale_D: jax.Array, eps: float, is_llama: bool) -> jax.Array:
  """x / rms(x) * (1 + scale) over the last axis, or * scale, computed in float32."""
  x32_xD = x_xD.astype(jnp.float32)
  inverse_x1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_xD), axis=-1, keepdims=True) + eps)
  scale_xD = jnp.expand_dims(
    float(not is_llama) + scale_D.astype(jnp.float32), range(x_xD.ndim - 1)
  )
  return (x32_xD * inverse_x1 * scale_xD).astype(x_xD.dtype)


def _rope_table(
  config: train_config.ModelConfig, length: int, theta: float, factor: float = 1.0
) -> jax.Array:
  """Sines and cosines of position * theta^(-2i/H), i < H/2, float32 [2, L, H/2]. `factor`: of
  Llama 3.1, wavelengths that hardly fit into the texts of its first training are so much longer."""
  exponent_H = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
  frequency_H = theta**-exponent_H
  if factor != 1:
    few, many = _LLAMA3_TURNS
    turns_H = _LLAMA3_LENGTH / (2 * np.pi) * frequency_H
    kept_H = jnp.clip((turns_H - few) / (many - few), 0.0, 1.0)
    frequency_H = frequency_H * (kept_H + (1 - kept_H) / factor)
  angle_LxH = jnp.outer(jnp.arange(length, dtype=jnp.float32), frequency_H)
  return jnp.stack([jnp.sin(angle_LxH), jnp.cos(angle_LxH)])


def _rope(x_BxLxNxH: jax.Array, sin_LxH: jax.Array, cos_LxH: jax.Array) -> jax.Array:
  """Rotates the pair (x_i, x_{i + H/2}) by its angle (arXiv 2104.09864)."""
  sin_1xLx1xH, cos_1xLx1xH = (t[None, :, None, :] for t in (sin_LxH, cos_LxH))
  a, b = jnp.split(x_BxLxNxH.astype(jnp.float32), 2, axis=-1)
  turned = (a * cos_1xLx1xH - b * sin_1xLx1xH, b * cos_1xLx1xH + a * sin_1xLx1xH)
  return jnp.concatenate(turned, axis=-1).astype(x_BxLxNxH.dtype)


def _pin(x: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
  return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
