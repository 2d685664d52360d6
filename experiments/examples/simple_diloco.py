"""Decoupled DiLoCo in one file: M learners in one jitted program, without a network.

    python experiments/examples/simple_diloco.py

Here all learners keep step: each sync has all M payloads and merges them tau steps after they were
captured, and the weights, which count tokens, are equal. Learners that are slow, dead or late, and
that nobody waits for, are the protocol's part (docs/protocol.md).

A fragment is one tensor. Shapes: M learners, H steps of a period, B windows of L + 1 bytes.

References:
  Decoupled DiLoCo, arXiv 2604.21428, section 4; Streaming DiLoCo, arXiv 2501.18512.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib

M, T, H, TAU = 4, 240, 4, 2  # learners, inner steps, steps between two syncs of a fragment, overlap
RATE, WARM_UP = 3e-3, 20
FRAGMENTS = ('embedding', 'head', 'layer_1', 'layer_2')  # p is due after steps p + 1, p + 1 + H ...
DATA = train_config.DataConfig(seq_len=32, batch_size=8, shards=M, eval_batches=2)
CLIP, ADAM, WEIGHT_DECAY = optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95), 0.1
INNER = optax.chain(CLIP, ADAM, optax.add_decayed_weights(WEIGHT_DECAY))
OUTER = optax.sgd(0.7, momentum=0.5, nesterov=True)


def init(seed: int, width: int = 64) -> dict[str, np.ndarray]:
  draw = np.random.default_rng(seed).standard_normal
  shapes = (256, width), (width, 256), (width, 4 * width), (4 * width, width)
  scales = 1.0, 0.02, width**-0.5, 0.5 * width**-0.5
  drawn = [draw(shape, np.float32) * np.float32(scale) for shape, scale in zip(shapes, scales)]
  return dict(zip(FRAGMENTS, drawn))


def loss(params: dict[str, jax.Array], batch_BxL1: jax.Array) -> jax.Array:
  """Each byte is predicted from the two before it."""
  bytes_BxL1 = batch_BxL1.astype(jnp.int32)
  x_BxLxD = params['embedding'][bytes_BxL1]
  x_BxLxD = (x_BxLxD + jnp.roll(x_BxLxD, 1, axis=1))[:, 1:-1]
  hidden_BxLxF = jax.nn.gelu(x_BxLxD @ params['layer_1'])
  logits_BxLxV = (x_BxLxD + hidden_BxLxF @ params['layer_2']) @ params['head']
  return optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, bytes_BxL1[:, 2:]).mean()


def int8(values: jax.Array) -> jax.Array:
  """The values as int8 carries them: 32 neighbours share a power of two (MXINT8)."""
  blocks_Bx32 = values.reshape(-1, 32)
  _, exponent_Bx1 = jnp.frexp(jnp.abs(blocks_Bx32).max(axis=1, keepdims=True))
  step_Bx1 = jnp.ldexp(jnp.float32(1), exponent_Bx1 - 7)
  return (jnp.clip(jnp.round(blocks_Bx32 / step_Bx1), -127, 127) * step_Bx1).reshape(values.shape)


def rda(given_MxAxB: jax.Array) -> jax.Array:
  """Radial-directional averaging of pseudo-gradients: the mean length in the mean direction."""
  norm = functools.partial(jnp.linalg.norm, keepdims=True)
  length_Mx1x1 = norm(given_MxAxB, axis=(1, 2))
  mean_AxB = (given_MxAxB / jnp.maximum(length_Mx1x1, 1e-19)).mean(axis=0)
  return mean_AxB * (length_Mx1x1.mean() / jnp.maximum(norm(mean_AxB), 0.01))


def capture(state: dict, p: int) -> dict:
  """Each learner gives its pseudo-gradient of fragment p: its anchor minus its parameters."""
  name = FRAGMENTS[p]
  given = jax.vmap(int8)(state['anchor'][name][None] - state['params'][name])
  return state | {'given': state['given'] | {name: given}}


def merge_and_adopt(state: dict, p: int) -> dict:
  """The outer step of fragment p, and its adoption: each learner keeps what it has trained since
  the capture, and what int8 lost of it."""
  name = FRAGMENTS[p]
  own, given, anchor, master, outer = (state[key][name] for key in KEYS)
  merged = int8(given.mean(axis=0) if name in ('embedding', 'head') else rda(given))
  update, outer = OUTER.update(merged, outer)
  master = master + update
  published = anchor + int8(master - anchor)  # what int8 loses of it is in the next one
  own = published[None] + (own - (anchor[None] - given))
  new = dict(zip(KEYS, (own, given, published, master, outer)))
  return state | {key: state[key] | {name: value} for key, value in new.items()}


KEYS = 'params', 'given', 'anchor', 'master', 'outer'


def inner_step(params: dict, opt_state: tuple, batch_BxL1: jax.Array, rate: jax.Array) -> tuple:
  value, grads = jax.value_and_grad(loss)(params, batch_BxL1)
  updates, opt_state = INNER.update(grads, opt_state, params)
  return optax.apply_updates(params, jax.tree.map(lambda u: -rate * u, updates)), opt_state, value


@functools.partial(jax.jit, donate_argnums=0)
def period(state: dict, batches_HxMxBxL1: jax.Array, rates_H: jax.Array) -> tuple[dict, jax.Array]:
  """H inner steps of M learners, and their losses float32[H, M]: after each step one fragment is
  captured, and the one that was captured tau steps before is merged and adopted."""
  losses, step = [], jax.vmap(inner_step, in_axes=(0, 0, 0, None))
  for i in range(H):
    arguments = state['params'], state['opt_state'], batches_HxMxBxL1[i], rates_H[i]
    params, opt_state, loss_M = step(*arguments)
    state = capture(state | {'params': params, 'opt_state': opt_state}, i)
    state = merge_and_adopt(state, (i - TAU) % H)
    losses.append(loss_M)
  return state, jnp.stack(losses)


@jax.jit
def close(state: dict) -> dict:
  """Merges what is in flight, then what each learner has trained since: nothing of the fragment
  that was captured last."""
  for p in range(H - TAU, H):
    state = merge_and_adopt(state, p)
  for p in range(H - 1):
    state = merge_and_adopt(capture(state, p), p)
  return state


def train(steps: int = T) -> tuple[np.ndarray, float]:
  """(the learners' losses float32[T, M], the held-out loss of the merged model)."""
  corpus, first = data_lib.load_corpus(DATA.corpus), jax.device_put(init(seed=0))
  shards = [data_lib.make_shard(corpus, DATA, m) for m in range(M)]
  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * M), first)
  outer = {name: OUTER.init(value) for name, value in first.items()}
  values = params, jax.tree.map(jnp.zeros_like, params), first, jax.tree.map(jnp.copy, first), outer
  state = dict(zip(KEYS, values)) | {'opt_state': jax.vmap(INNER.init)(params)}
  losses = []
  for t in range(0, steps, H):
    batches = np.stack([[shard[t + i] for shard in shards] for i in range(H)])
    rates_H = np.float32([RATE * min(1, (t + i + 1) / WARM_UP) for i in range(H)])
    state, losses_HxM = period(state, batches, rates_H)
    losses.append(losses_HxM)
  merged = close(state)['anchor']
  held_out = np.mean([loss(merged, batch) for batch in data_lib.eval_batches(corpus, DATA)])
  return np.concatenate(losses), float(held_out)


if __name__ == '__main__':
  losses_TxM, held_out = train()
  for t in range(40, T + 1, 40):
    print(t, 'steps, losses of the last 20:', *losses_TxM[t - 20 : t].mean(axis=0).round(3))
  print(f'the merged model: {held_out:.3f} nats a byte of held-out text')
