"""One golden step, and the donated buffers of the jitted step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.train import config as train_config
from diloco_jax.train import decoder
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import optimizer as optimizer_lib
from diloco_jax.train import step as step_lib


@pytest.fixture(name='stepped', scope='module')
def _stepped():
  model = train_config.ModelConfig(
    num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=32
  )
  optimizer = train_config.OptimizerConfig()
  mesh = mesh_lib.make_mesh(train_config.MeshConfig(), jax.devices()[:1])
  task = decoder.task(model, train_config.DataConfig())
  tx = optimizer_lib.make_optimizer(optimizer, task)
  state, shardings = step_lib.init_state(task, tx, mesh, seed=0)
  initial = jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
  train_step = step_lib.make_train_step(task, tx, mesh, shardings)
  batch = (np.arange(68) * 37 % 251).astype(np.uint8).reshape(4, 17)
  after, metrics = train_step(state, jnp.asarray(batch), jnp.float32(5e-3))
  return state, initial, after, metrics


def test_golden_step(stepped):
  """The numbers of one step from seed 0.

  If this fails, the model, the initialisation, the loss or the optimizer computes other values. If
  the change is intended, check each number (loss near ln 256 = 5.545; an update of about the
  learning rate, 5e-3), then write the new ones. If the numbers differ in the last digits
  only, the compiler rounds differently: do not widen a tolerance beyond 1e-3.
  """
  _, initial, after, metrics = stepped
  rms = lambda tree: float(
    np.sqrt(np.mean(np.concatenate([np.square(leaf).ravel() for leaf in jax.tree.leaves(tree)])))
  )
  update = jax.tree.map(lambda a, b: np.asarray(a) - b, after.params, initial.params)
  statistics = {
    'loss': float(metrics['loss']),
    'grad_norm': float(metrics['grad_norm']),
    'initial_rms': rms(initial.params),
    'update_rms': rms(update),
    'mu_rms': rms(after.opt_state[1].mu),
    'num_parameters': sum(leaf.size for leaf in jax.tree.leaves(initial.params)),
  }
  assert statistics == pytest.approx(_GOLDEN, rel=1e-3)


_GOLDEN = {
  'loss': 5.53605,
  'grad_norm': 1.38419,
  'initial_rms': 0.162386,
  'update_rms': 0.00500014,
  'mu_rms': 0.000982851,
  'num_parameters': 10352,
}


def test_the_step_donates_its_state(stepped):
  before, _, after, _ = stepped
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
  assert int(after.opt_state[1].count) == 1
