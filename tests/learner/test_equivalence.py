"""A learner with a syncer and a learner alone reach the same parameters."""

import contextlib
import functools

import jax
import numpy as np
import pytest

from diloco_jax.api import single_controller
from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import baseline
from diloco_jax.learner import node as learner_node
from diloco_jax.node import loop
from diloco_jax.report import records as records_lib
from diloco_jax.transport import in_process
from tests.train import small_task


@pytest.fixture(name='config')
def _config():
  """One learner, a sync after every period, without loss: lr 1, no momentum, float32."""
  config = small_task.use(stdlib_lm.get_config('tiny'))
  sync = config.sync
  sync.learners = sync.quorum = 1
  sync.overlap = 0
  sync.codec_up = sync.codec_down = 'float32'
  sync.outer = 'sgd(learning_rate=1.0)'
  sync.merge = sync.embedding_merge = 'avg'
  config.train.steps = 16
  config.train.eval_every = 0
  config.optimizer.warmup_steps = 4
  config.train.checkpoint_every_steps = config.sync.checkpoint_every_syncs = 0
  config.validate()
  return config


def _saved_params(folder, config):
  """The parameters of l0's last checkpoint."""
  assembled = build.assemble(config)
  island = learner_node.make_island(
    assembled, folder, 'l0', jax.devices()[: config.mesh.num_devices]
  )
  assert island.restore() is not None
  params = jax.tree.map(np.asarray, island.params)
  island.close()
  return params


@pytest.mark.parametrize(
  'period,fragments',
  [(4, 2), *(pytest.param(*row, marks=pytest.mark.full) for row in ((4, 4), (4, 1), (1, 1)))],
)
def test_decoupled_with_one_learner_follows_the_lone_run(tmp_path, config, period, fragments):
  """M=1, outer lr 1, no momentum, float32, tau=0: anchor - (anchor - local) is local up to the
  rounding of two float32 subtractions per sync, 2^-23 relative to the larger of both. Adam turns
  such differences into at most a few learning rates of the smallest steps; measured: below 2e-6."""
  config.sync.period, config.sync.fragments = period, fragments
  together, by_itself = tmp_path / 'together', tmp_path / 'alone'

  single_controller.run(config, together)
  assembled = build.assemble(config)
  island = learner_node.make_island(
    assembled, by_itself, 'l0', jax.devices()[: config.mesh.num_devices]
  )
  with contextlib.closing(records_lib.Recorder(by_itself, 'l0', tensorboard=False)) as recorder:
    baseline.run(config, island, recorder)
    _require_own_kind(assembled, config, by_itself, together, recorder)

  ours, theirs = _saved_params(together, config), _saved_params(by_itself, config)
  moved = 0.0
  fresh = jax.tree.leaves(assembled.init())
  for a, b, start in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), fresh):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    moved = max(moved, float(np.abs(b - start).max()))
  assert moved > 1e-2  # it did train


def _require_own_kind(assembled, config, alone, together, recorder) -> None:
  """A learner without a syncer refuses the checkpoints of one with a syncer, and the reverse."""
  devices = jax.devices()[: config.mesh.num_devices]
  make = functools.partial(learner_node.make_island, assembled, learner_id='l0', devices=devices)
  with pytest.raises(ValueError, match='are of a learner with a syncer'):
    baseline.run(config, make(workdir=together), recorder)
  connect = in_process.InProcessHub().learner_transport
  with pytest.raises(ValueError, match='are of a learner without a syncer'):
    learner_node.run(
      assembled, make(workdir=alone), alone, 'l0', loop.EventQueue(), connect, recorder
    )
