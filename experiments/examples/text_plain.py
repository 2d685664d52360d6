"""An own model in one file: plain JAX on the text of the demo, without a framework.

    diloco train --config=experiments/examples/text_plain.py

Each byte is predicted from the bytes before it by a mean of their embeddings that forgets. The text
and its shards are those of the decoder, `config.data`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.config import run_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import evaluate
from diloco_jax.train import task as task_lib
from diloco_jax.train import tokenizer as tokenizer_lib

BYTES, DECAY = 256, 0.7


def task(config: run_config.Config, width: int = 64) -> task_lib.Task:
  """The model, and the text of `config.data`."""
  data = config.data
  corpus = functools.cache(lambda: data_lib.load_corpus(data.corpus, field=data.field))

  def init(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed).standard_normal
    return {
      'embedding': draw((BYTES, width), np.float32),
      'hidden': draw((width, 4 * width), np.float32) * np.float32(width**-0.5),
      'head': draw((4 * width, BYTES), np.float32) * np.float32(0.02),
    }

  def logits(params: dict, tokens_BxL: jax.Array) -> jax.Array:
    x_BxLxD = params['embedding'][tokens_BxL.astype(jnp.int32)]
    mean_BxLxD = jax.lax.associative_scan(
      lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]),
      (jnp.full_like(x_BxLxD, DECAY), x_BxLxD * (1 - DECAY)),
      axis=1,
    )[1]
    return jax.nn.gelu(mean_BxLxD @ params['hidden']) @ params['head']

  def loss(params: dict, batch_BxL1: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    batch_BxL1 = jax.lax.with_sharding_constraint(batch_BxL1.astype(jnp.int32), sharding)
    logits_BxLxV, targets_BxL = logits(params, batch_BxL1[:, :-1]), batch_BxL1[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, targets_BxL).mean()

  return task_lib.Task(
    init=init,
    loss=loss,
    batches=lambda shard: data_lib.make_shard(corpus(), data, shard),
    tokens_per_batch=data.rows * data.seq_len,
    eval_batches=lambda: data_lib.eval_batches(corpus(), data),
    data_digest=lambda: data_lib.digest(corpus(), data),
    tokenizer=tokenizer_lib.Tokenizer,  # of these two `diloco sample` prints text
    logits=logits,
    suite=lambda most: evaluate.text_suite(  # of `diloco evaluate --suite`
      corpus().held_out(data.seq_len), tokenizer_lib.Tokenizer(), most
    ),
  )


def get_config() -> run_config.Config:
  """Two learners, some seconds on a CPU."""
  config = run_config.Config(name='text_plain', task=f'{__file__}:task(width=64)')
  config.optimizer.warmup_steps = 5
  config.data.seq_len, config.data.eval_batches = 64, 2
  config.sync.learners, config.sync.fragments, config.sync.period = 2, 3, 3
  config.sync.overlap = 1
  config.train.steps, config.train.eval_every = 120, 40
  return config
