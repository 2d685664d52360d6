"""Tensors are partitioned as in the table, and the partition does not change the results."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from diloco_jax.train import config as train_config
from diloco_jax.train import decoder
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import optimizer as optimizer_lib
from diloco_jax.train import step as step_lib
from tests.train import small_task


class Device(NamedTuple):
  """A device with the fields that `islands` reads."""

  id: int
  slice_index: int


def _one_step(task, optimizer, mesh_config, batch):
  mesh = mesh_lib.make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
  tx = optimizer_lib.make_optimizer(optimizer, task)
  state, shardings = step_lib.init_state(task, tx, mesh, seed=0)
  train_step = step_lib.make_train_step(task, tx, mesh, shardings)
  rate = jax.device_put(np.float32(1e-4), mesh_lib.replicated(mesh))
  return jax.block_until_ready(train_step(state, mesh_lib.put_batch(mesh, batch), rate))


def _sharded_step(task, optimizer, batch):
  """The states after a step on one device and on a mesh of eight. Adam divides by sqrt(v), which
  turns the rounding of an almost zero gradient into a full update; so moments are compared."""
  state, metrics = _one_step(task, optimizer, train_config.MeshConfig(), batch)
  sharded_mesh = train_config.MeshConfig(data=2, fsdp=2, tensor=2)
  sharded_state, sharded_metrics = _one_step(task, optimizer, sharded_mesh, batch)
  for name in metrics:
    np.testing.assert_allclose(metrics[name], sharded_metrics[name], rtol=1e-4)
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
  jax.tree.map(close, state.opt_state, sharded_state.opt_state)
  return state, sharded_state


def _parts(leaf: jax.Array) -> set[tuple[int, ...]]:
  return {shard.data.shape for shard in leaf.addressable_shards}


def test_sharded_step_equals_the_unsharded_one(model, optimizer):
  model.num_layers = 1
  task = decoder.task(model, train_config.DataConfig())
  _, sharded_state = _sharded_step(task, optimizer, _text(4, 17))
  layer = sharded_state.params['layers'][0]
  assert _parts(layer['query']) == {(8, 2, 8)}  # D/2 N/2 H
  assert _parts(layer['down']) == {(8, 16)}  # F/4 D
  assert _parts(layer['query_norm']) == {(8,)}
  moments, embedding = sharded_state.opt_state[1], sharded_state.params['embedding']
  assert moments.nu['embedding'].sharding == embedding.sharding


def test_sharded_muon_equals_the_unsharded_one(optimizer, data):
  """It multiplies whole matrices, of which each device has a part; AdamW has the embedding."""
  optimizer.name = 'muon'
  task = small_task.of_data(data)
  state, sharded_state = _sharded_step(task, optimizer, _text(4, 17))
  body = sharded_state.params['body']
  np.testing.assert_allclose(state.params['body'], body, atol=1e-5)
  assert _parts(body) == {(8, 8)}
  moments = sharded_state.opt_state[1].inner_states
  assert moments['matrix'].inner_state[0].mu['body'].sharding == body.sharding
  embedding = sharded_state.params['embedding']
  assert moments['rest'].inner_state.nu['embedding'].sharding == embedding.sharding


@pytest.mark.full
def test_sharded_experts_equal_the_unsharded_ones(model, optimizer):
  """Muon, too: a matrix of an expert is one matrix of its tensor."""
  model.num_layers, model.num_experts, optimizer.name = 1, 4, 'muon'
  task = decoder.task(model, train_config.DataConfig())
  states = _sharded_step(task, optimizer, _text(4, 17))
  layer, sharded_layer = (state.params['layers'][0]['experts'] for state in states)
  for name in ('gate', 'up', 'down'):
    np.testing.assert_allclose(layer[name], sharded_layer[name], atol=1e-5)
    assert _parts(sharded_layer[name]) == {(4, 8, 16)}  # E D/2 F/2 or E F/4 D
  assert _parts(sharded_layer['router']) == {(16, 4)}
  moments = states[1].opt_state[1].inner_states['matrix'].inner_state[0].mu['layers'][0]['experts']
  assert moments['up'].sharding == sharded_layer['up'].sharding


def _text(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def test_mesh_takes_exactly_its_devices():
  config = train_config.MeshConfig(data=2, tensor=2)
  mesh = mesh_lib.make_mesh(config, jax.devices()[4:8])
  assert mesh.shape == {'data': 2, 'fsdp': 1, 'tensor': 2}
  assert set(mesh.devices.flat) == set(jax.devices()[4:8])
  with pytest.raises(ValueError, match='needs 4 devices, got 3: .*JAX_NUM_CPU_DEVICES=4'):
    mesh_lib.make_mesh(config, jax.devices()[:3])


@pytest.mark.parametrize('shape, said', [((), r'shape \(\)'), ((3, 2), r'shape \(3, 2\)')])
def test_a_batch_without_rows_is_refused(shape, said):
  mesh = mesh_lib.make_mesh(train_config.MeshConfig(data=2), jax.devices()[:2])
  batch = {'x': np.zeros((4, 2)), 'scale': np.zeros(shape)}
  with pytest.raises(ValueError, match=rf"\['scale'\] of a batch has {said}: each leaf of a batch"):
    mesh_lib.put_batch(mesh, batch)


@pytest.mark.parametrize('devices', [1, 2])
def test_a_batch_may_be_a_view_of_a_buffer_that_is_reused(devices):
  """A dispatched step reads it later, and jax would share aligned memory."""
  mesh = mesh_lib.make_mesh(train_config.MeshConfig(data=devices), jax.devices()[:devices])
  raw = np.zeros(64 + 32, np.float32)
  buffer = raw[-raw.ctypes.data // 4 % 16 :][:64]
  placed = mesh_lib.put_batch(mesh, {'x': buffer})
  buffer[:] = 77
  assert not placed['x'].any()


def test_the_error_names_the_tensor_that_does_not_split():
  mesh = mesh_lib.make_mesh(train_config.MeshConfig(tensor=4), jax.devices()[:4])
  tree = {'layers': [{'key': jax.ShapeDtypeStruct((16, 2, 8), np.float32)}]}
  with pytest.raises(ValueError, match=r"layers/0/key .*: 2 does not split 4 ways .*'tensor'"):
    mesh_lib.tree_shardings(mesh, tree, decoder.PARTITION)


def test_a_partition_may_name_some_axes_or_several_for_one():
  mesh = mesh_lib.make_mesh(train_config.MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())
  tree = {'a': jax.ShapeDtypeStruct((8, 3), np.float32)}

  def sharding(spec: P) -> jax.sharding.NamedSharding:
    return mesh_lib.tree_shardings(mesh, tree, [('a', spec)])['a']

  assert sharding(P('fsdp')).shard_shape((8, 3)) == (4, 3)
  assert sharding(P(('data', 'fsdp'), None)).shard_shape((8, 3)) == (2, 3)
  with pytest.raises(ValueError, match='a has shape .*too few axes'):
    sharding(P('fsdp', None, None))
  with pytest.raises(ValueError, match='3 does not split 4 ways'):
    sharding(P(None, ('data', 'fsdp')))


def test_leaves_without_a_rule_are_replicated():
  mesh = mesh_lib.make_mesh(train_config.MeshConfig(fsdp=2), jax.devices()[:2])
  tree = {'count': jax.ShapeDtypeStruct((), np.int32), 'norm': jax.ShapeDtypeStruct((3,), np.int32)}
  assert {
    s.spec for s in jax.tree.leaves(mesh_lib.tree_shardings(mesh, tree, decoder.PARTITION))
  } == {P()}


def test_islands_are_runs_of_devices_without_slices():
  devices = jax.devices()[:8]
  assert mesh_lib.islands(devices, [2, 1, 4]) == [devices[:2], devices[2:3], devices[3:7]]
  with pytest.raises(ValueError, match=r'8 devices in 1 slices do not make islands of \[3, 3, 3\]'):
    mesh_lib.islands(devices, [3, 3, 3])


def test_islands_are_whole_slices():
  devices = [Device(id=i, slice_index=i % 4) for i in range(8)]
  dealt = mesh_lib.islands(devices, [4, 2])
  assert [{d.slice_index for d in island} for island in dealt] == [{0, 1}, {2}]
  with pytest.raises(ValueError, match='8 devices in 4 slices do not make'):
    mesh_lib.islands(devices, [2, 3])


def test_the_global_model_lies_where_no_island_does():
  devices = jax.devices()[:8]
  assert mesh_lib.syncer_devices(devices, [devices[:2], devices[2:4]]) == devices[6:]
  assert mesh_lib.syncer_devices(devices, [devices[:7]]) == devices[7:]
  assert mesh_lib.syncer_devices(devices, [devices]) == devices[:1]
