"""The method in one file computes what the engine computes when its learners keep step."""

import functools

import jax
import pytest

from diloco_jax.config import run_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import task as task_lib
from diloco_jax.verification.virtual import conditions, virtual
from experiments.examples import simple_diloco

LATE = conditions.Network(latency=2.0)  # each learner waits for each sync, tau steps after it


def task(config: run_config.Config) -> task_lib.Task:
  """The file's model and data for the engine."""
  data = config.data
  corpus = functools.cache(lambda: data_lib.load_corpus(data.corpus))
  return task_lib.Task(
    init=simple_diloco.init,
    loss=lambda params, batch, sharding: simple_diloco.loss(params, batch),
    batches=lambda shard: data_lib.make_shard(corpus(), data, shard),
    tokens_per_batch=data.rows * data.seq_len,
    eval_batches=lambda: data_lib.eval_batches(corpus(), data),
    data_digest=lambda: data_lib.digest(corpus(), data),
  )


def _config(steps: int) -> run_config.Config:
  config = run_config.Config(name='simple', task=f'{__file__}:task', data=simple_diloco.DATA)
  inner, sync = config.optimizer, config.sync
  inner.learning_rate, inner.warmup_steps = simple_diloco.RATE, simple_diloco.WARM_UP
  inner.b2, inner.clip_norm, inner.weight_decay, inner.end_lr_ratio = 0.95, 1.0, 0.1, 1.0
  sync.learners = sync.quorum = simple_diloco.M
  sync.fragments, sync.period = len(simple_diloco.FRAGMENTS), simple_diloco.H
  sync.overlap = sync.max_lag = simple_diloco.TAU
  sync.codec_up = sync.codec_down = 'int8'
  sync.outer = 'nesterov(learning_rate=0.7, momentum=0.5)'
  config.train.steps, config.train.seed = steps, 0
  return config


@pytest.mark.parametrize('steps', [24, pytest.param(80, marks=pytest.mark.long)])
def test_its_merged_model_has_the_held_out_loss_of_the_engines(steps: int):
  with jax.numpy_dtype_promotion('standard'):  # optax corrects its averages by float ** int
    _, held_out = simple_diloco.train(steps)
  engine = virtual.train(_config(steps), network=LATE)
  assert engine.tokens == steps * simple_diloco.M * 8 * 32  # learners that waited skip no step
  assert abs(held_out - engine.final_loss) < 5e-4  # both round to int8, from other last bits


def test_it_is_read_in_one_sitting():
  with open(simple_diloco.__file__, encoding='utf-8') as file:
    assert len(file.readlines()) <= 150
