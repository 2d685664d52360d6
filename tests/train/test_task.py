"""An own model is one file: its task trains on an island like the decoder's, on any mesh."""

import pathlib

import jax
import numpy as np
import pytest

from diloco_jax.config import build, load
from diloco_jax.train import config as train_config
from diloco_jax.train import island as island_lib

EXAMPLES = pathlib.Path(__file__).parents[2] / 'experiments' / 'examples'


@pytest.mark.parametrize('name', ['digits_linen', 'text_plain'])
def test_a_task_of_one_file_trains_on_a_mesh(name):
  config = load.load(str(EXAMPLES / f'{name}.py'))
  config.mesh = train_config.MeshConfig(data=2)
  config.validate()
  assembled = build.assemble(config)
  island = island_lib.Island(
    task=assembled.task,
    optimizer=config.optimizer,
    mesh=config.mesh,
    total_steps=config.train.steps,
    devices=jax.devices()[:2],
    seed=config.train.seed,
  )
  jax.tree.map(np.testing.assert_array_equal, island.params, assembled.init())
  before = island.evaluate()
  results = [island.step(clock) for clock in range(20)]
  assert all(result.tokens == assembled.task.tokens_per_batch for result in results)
  assert island.evaluate() < before - 0.3
  labels = {piece.label for fragment in assembled.layout.fragments for piece in fragment}
  assert labels <= {'embedding', 'head', 'body'} and len(labels) > 1


def test_the_text_example_needs_text_for_its_evaluation_before_it_trains():
  config = load.load(str(EXAMPLES / 'text_plain.py'))
  config.data.eval_batches = 1_000_000
  with pytest.raises(ValueError, match='held-out examples of 64 ids, fewer than 1000000 x'):
    build.assemble(config)
