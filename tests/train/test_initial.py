"""Initial values do not depend on who draws them, and nobody draws more than it holds."""

import dataclasses

import jax
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.syncer import global_model
from diloco_jax.train import config as train_config
from diloco_jax.train import decoder, initial
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import optimizer as optimizer_lib
from diloco_jax.train import step as step_lib


def _leaf(*shape: int) -> initial.Normal:
  return initial.Normal(shape, 2.0, key=(0, 7))


def test_the_values_are_normally_distributed_and_differ_by_leaf_and_seed():
  tree = {'a': _leaf(300, 400), 'b': _leaf(300, 400)}
  first, second = (initial.seed_leaves(tree, seed, 'float32') for seed in (0, 1))
  values = [np.asarray(leaf) for leaf in (first['a'], first['b'], second['a'])]
  for drawn in values:
    assert drawn.dtype == np.float32
    assert abs(drawn.mean()) < 0.05 and drawn.std() == pytest.approx(2.0, rel=0.01)
  correlations = np.corrcoef([drawn.ravel() for drawn in values]) - np.eye(3)
  assert np.abs(correlations).max() < 0.02


@pytest.mark.parametrize('shape', [(5, 3), (700, 300), (3, 70_000), (200_000,)])
def test_a_part_is_that_of_the_whole(shape):
  leaf, rng = _leaf(*shape), np.random.default_rng(0)
  whole = np.asarray(leaf)
  assert whole.shape == leaf.shape and whole.size == leaf.size
  for _ in range(20):
    ends = [sorted(rng.choice(size + 1, 2, replace=False).tolist()) for size in shape]
    index = tuple(slice(*pair) for pair in ends)
    np.testing.assert_array_equal(leaf[index], whole[index])
    stacked = initial.Stacked([leaf, leaf])[(slice(1, 2), *index)]
    np.testing.assert_array_equal(stacked, whole[index][None])


def test_a_device_draws_its_own_rows(monkeypatch):
  drawn, rng = [], np.random.default_rng
  monkeypatch.setattr(np.random, 'default_rng', lambda key: drawn.append(key) or rng(key))
  _leaf(8192, 64)[1024:2048]
  assert len(drawn) == 1  # of eight: as many values as are drawn at once


def test_the_bits_depend_on_no_mesh_and_on_no_scan(model):
  """Learners of one device and of eight, and the syncer, start from the same values."""

  def params(mesh: train_config.MeshConfig, scan: bool):
    task = decoder.task(dataclasses.replace(model, scan=scan), train_config.DataConfig())
    tx = optimizer_lib.make_optimizer(train_config.OptimizerConfig(), task)
    devices = mesh_lib.make_mesh(mesh, jax.devices()[: mesh.num_devices])
    return step_lib.init_state(task, tx, devices, seed=3)[0].params

  split = params(train_config.MeshConfig(fsdp=4, tensor=2), scan=False)
  assert {shard.data.shape for shard in split['embedding'].addressable_shards} == {(128, 4)}
  jax.tree.map(np.testing.assert_array_equal, split, params(train_config.MeshConfig(), scan=False))
  stacked = params(train_config.MeshConfig(fsdp=4, tensor=2), scan=True)
  for name, leaf in stacked['layers'].items():
    for number in range(model.num_layers):
      np.testing.assert_array_equal(leaf[number], split['layers'][number][name])


def test_the_syncer_draws_piece_by_piece(monkeypatch):
  config = stdlib_lm.get_config('small')
  config.model.scan = True
  assembled = build.assemble(config)
  theta = global_model.Theta(assembled)
  expected = jax.tree.map(np.asarray, decoder.initial_params(config.model, 0))
  read, rows = [], initial.Normal._rows
  monkeypatch.setattr(initial.Normal, '_rows', lambda *args: read.append(rows(*args)) or read[-1])
  jax.tree.map(np.testing.assert_array_equal, theta.params(), expected)
  largest = max(piece.size for pieces in assembled.layout.fragments for piece in pieces)
  assert max(part.size for part in read) <= largest < expected['layers']['gate'].size
