"""A learner without a syncer."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import baseline
from diloco_jax.report import records as records_lib
from diloco_jax.storage import states
from diloco_jax.train import island as island_lib
from diloco_jax.train import task as task_lib

BATCH = np.ones((2, 4), np.float32)


@pytest.fixture(name='config')
def _config():
  config = stdlib_lm.get_config('tiny')
  config.train.steps, config.optimizer.warmup_steps = 4, 1
  config.train.eval_every, config.train.checkpoint_every_steps = 0, 2
  return config


@pytest.fixture(name='train')
def _train(tmp_path, config):
  """Trains in this folder; returns the end, the facts of evaluations and the lines for people."""

  def train(change=lambda island: None, held_out=(BATCH,), stopping=lambda: False):
    task = task_lib.Task(
      init=lambda seed: {'w': np.ones((4, 4), np.float32)},
      loss=lambda params, batch_BxD, sharding: jnp.mean((batch_BxD @ params['w']) ** 2),
      batches=lambda shard: [BATCH] * (config.train.steps + 1),
      tokens_per_batch=2,
      eval_batches=lambda: held_out,
    )
    island = island_lib.Island(
      task=task,
      optimizer=config.optimizer,
      mesh=config.mesh,
      total_steps=config.train.steps,
      devices=jax.devices()[: config.mesh.num_devices],
      checkpoint_dir=str(tmp_path / 'ckpt'),
    )
    change(island)
    said = []
    with contextlib.closing(records_lib.Recorder(tmp_path, 'l0', tensorboard=False)) as recorder:
      recorder.say = said.append
      ended = baseline.run(config, island, recorder, stopping)
    lines = (tmp_path / 'records' / 'l0.jsonl').read_text().splitlines()
    facts = [json.loads(line) for line in lines]
    return ended, [fact['step'] for fact in facts if fact['name'] == 'eval'], said

  return train


def _saved(folder) -> list[str]:
  return sorted(path.name for path in (folder / 'ckpt').iterdir() if path.name.isdecimal())


def test_it_trains_saves_each_state_once_and_evaluates(train, tmp_path):
  ended, evaluated, said = train()
  assert ended.text == 'done at step 4: 4 steps, 8 tokens'
  assert evaluated == [0, 4] and 'held-out loss at clock 4' in said[-1]
  lines = (tmp_path / 'records' / 'l0.jsonl').read_text().splitlines()
  names = [json.loads(line)['name'] for line in lines[:4]]
  assert names == ['records', 'startup', 'cost', 'eval']
  assert said[0].startswith('compiles the step') and said[0].endswith('2 x cpu')
  assert _saved(tmp_path) == ['2', '4']


def test_a_task_without_held_out_batches_trains(train):
  ended, evaluated, said = train(held_out=())
  assert ended.text == 'done at step 4: 4 steps, 8 tokens' and evaluated == []
  assert not any('held-out' in line for line in said)


def test_a_save_that_cannot_start_costs_this_checkpoint_and_not_the_run(train, tmp_path):
  def fail_once(island):
    save = island.save

    def failing(step, run):
      del step, run
      island.save = save
      raise states.StateError('no room')

    island.save = failing

  ended, _, said = train(fail_once)
  assert ended.text.startswith('done at step 4') and _saved(tmp_path) == ['4']
  assert 'checkpoint of step 2 failed: no room. Training continues.' in said


def test_a_stop_saves_and_leaves_the_evaluation_to_the_end(train, tmp_path):
  steps = iter([False, False, False, True])
  ended, evaluated, _ = train(stopping=lambda: next(steps))
  assert ended.text == 'stopped at step 3: 3 steps, 6 tokens'
  assert evaluated == [0] and _saved(tmp_path) == ['2', '3']
  ended, evaluated, _ = train()
  assert ended.text == 'done at step 4: 1 steps, 2 tokens' and evaluated == [0, 4]


def test_an_evaluation_that_was_cut_is_made_again(train):
  def killed(island):
    evaluate, calls = island.evaluate, iter([0, 1])

    def evaluate_or_die():
      if next(calls):
        raise KeyboardInterrupt
      return evaluate()

    island.evaluate = evaluate_or_die

  with pytest.raises(KeyboardInterrupt):
    train(killed)
  ended, evaluated, _ = train()
  assert ended.text == 'done at step 4: 0 steps, 0 tokens' and evaluated == [0, 4]


def test_a_task_that_raises_is_no_wrong_setting(train):
  """A wrong setting would end the learner for good, in one line."""

  class Short:
    def __getitem__(self, index: int) -> np.ndarray:
      if index:
        raise ValueError('short read')
      return BATCH

  def spoil(island):
    island._shard = Short()

  with pytest.raises(RuntimeError, match='inner step at clock 1 failed: short read'):
    train(spoil)
