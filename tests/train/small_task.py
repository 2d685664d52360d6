"""The smallest task with an embedding, a matrix and a head: for tests of what an island, a learner
and an exchange do with any model. It compiles in a tenth of the time of the decoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from diloco_jax.config import run_config
from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import task as task_lib

_V, _D = 256, 16
_SHAPES = {'embedding': (_V, _D), 'body': (_D, _D), 'head': (_D, _V)}


@functools.cache
def corpus() -> data_lib.Corpus:
  """Two thousand windows of 32 ids, of which a model learns that they are below 32."""
  ids = np.random.default_rng(0).integers(0, 32, 1 << 16).astype(np.uint8)
  return data_lib.Corpus(ids, ids[: 1 << 12], 'small')


def of_data(data: train_config.DataConfig) -> task_lib.Task:
  def init(seed: int) -> task_lib.Params:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(0, 0.1, shape).astype('f') for name, shape in _SHAPES.items()}

  def loss(params, ids_BxL1: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    del sharding
    ids_BxL1 = ids_BxL1.astype(jnp.int32)
    x_BxLxD = jnp.tanh(params['embedding'][ids_BxL1[:, :-1]] @ params['body'])
    logits_BxLxV = x_BxLxD @ params['head']
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, ids_BxL1[:, 1:]).mean()

  return task_lib.Task(
    init=init,
    loss=loss,
    batches=lambda shard: data_lib.make_shard(corpus(), data, shard),
    tokens_per_batch=data.rows * data.seq_len,
    eval_batches=lambda: data_lib.eval_batches(corpus(), data),
    partition=(('embedding', P('tensor', 'fsdp')), ('body|head', P('fsdp', 'tensor'))),
    flops_per_token=6.0 * sum(map(np.prod, _SHAPES.values())),
  )


def task(config: run_config.Config) -> task_lib.Task:
  """For `config.task`."""
  return of_data(config.data)


def use(config: run_config.Config) -> run_config.Config:
  """A config of one device for each learner, with this task."""
  config.task, config.mesh.data = f'{__file__}:task()', 1
  return config
