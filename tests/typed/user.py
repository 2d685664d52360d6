"""What a user writes: no error but in the lines that are marked as wrong."""

import jax
import jax.numpy as jnp
import numpy as np

import diloco_jax
from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm


def get_config(steps: int = 60) -> run_config.Config:
  config = stdlib_lm.get_config('tiny')
  config.train.steps = steps
  config.sync.quorum, config.sync.max_lag = 2, None
  config.sync.adopt = 'overwrite'
  config.sync.quorum = 'all'  # wrong
  config.sync.qourum = 2  # wrong
  diloco_jax.SyncConfig(learners=2, codec_up='int4')
  diloco_jax.SyncConfig(qourum=1)  # wrong
  return config


def task(config: run_config.Config) -> diloco_jax.Task:
  batches = [np.ones((config.data.batch_size, 8), np.float32)]

  def loss(params: dict, batch: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    del sharding
    return jnp.square(batch @ params['w'] - 1).mean()

  diloco_jax.Task(init=lambda seed: {}, loss=loss, batches=batches, tokens_per_batch=1)  # wrong
  return diloco_jax.Task(
    init=lambda seed: {'w': np.zeros(8, np.float32)},
    loss=loss,
    batches=lambda shard: batches,
    tokens_per_batch=config.data.batch_size,
  )


def loop(address: str) -> dict[str, jax.Array]:
  params = {'w': jnp.zeros(8)}
  with diloco_jax.join(params, syncer=address, total_steps=10) as peer:
    params = peer.params
    for clock, batch in peer.steps(lambda shard, index: np.full(8, shard + index)):
      params = {'w': params['w'] + batch / (1 + clock)}
      params = peer.sync(params, tokens=batch.size, metrics={'loss': params['w'].sum()})
      peer.snyc(params, tokens=batch.size)  # wrong
  return params


def whole_run() -> None:
  with diloco_jax.run_syncer(total_steps=10) as server:
    loop(server.address)
  diloco_jax.run(get_config(), 'runs/x')
  diloco_jax.load_params('runs/x')
  version, _ = next(diloco_jax.follow('syncer.example.org:7070', tls='certs/eval'))
  print(version + 1)
  print(next(diloco_jax.records('runs/x')))
  print(diloco_jax.jion)  # wrong
