"""Virtual runs repeat bit for bit, and their arithmetic is that of a real run."""

import dataclasses

import jax
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.verification.virtual import arrays, conditions, virtual

ROUGH = conditions.delays('wan', lognormal=0.3, slowness=(1, 1.3))
DEATHS = conditions.Faults(death_every=10, down=4)


@pytest.fixture(name='config')
def _config():
  """Three learners, two fragments: few functions to compile, the same for all tests."""
  config = stdlib_lm.get_config('tiny')
  config.model.embed_dim, config.model.hidden_dim, config.model.num_layers = 16, 32, 1
  config.data.seq_len = 16
  config.sync.fragments = 2
  config.train.steps = 20
  return config


def _without_time(result):
  return dataclasses.replace(result, seconds=0.0)


def _mean(*leaves):
  return np.mean(leaves, axis=0)


@pytest.mark.long
def test_two_runs_of_one_seed_have_the_same_bits_and_the_schedule_of_the_protocol_alone(config):
  first, again = (virtual.train(config, **ROUGH, faults=DEATHS, seed=5) for _ in range(2))
  assert _without_time(first) == _without_time(again)
  assert first.deaths >= 2 and len(first.theta_sha256) == 64
  assert first.final_loss < first.curve[0].loss - 0.1
  alone = virtual.schedule(config, **ROUGH, faults=DEATHS, seed=5)
  of_arrays = {'curve': (), 'theta_sha256': '', 'origins': {}}
  assert alone == dataclasses.replace(first, **of_arrays, seconds=alone.seconds)
  assert virtual.schedule(config, **ROUGH, faults=DEATHS, seed=6).merges != first.merges


@pytest.mark.long
def test_what_a_returning_learner_starts_with_changes_the_arrays_only(config):
  config.train.checkpoint_every_steps = 2
  own, fresh = (
    virtual.train(config, **ROUGH, faults=dataclasses.replace(DEATHS, host_lost=share), seed=5)
    for share in (0.0, 1.0)
  )
  assert own.deaths and own.theta_sha256 != fresh.theta_sha256
  assert sum(own.discarded_shares.values()) == own.discarded_shares['lost_with_process'] > 0


def test_without_delays_every_learner_is_in_every_merge_and_nothing_is_lost(config):
  result = virtual.schedule(config)
  assert result.participants == 3 and {merge.live for merge in result.merges} == {3}
  assert result.merged_share == 1.0 and not any(merge.late for merge in result.merges)
  assert result.steps == {'l0': 20, 'l1': 20, 'l2': 20} and result.tokens == 60 * 4 * 16


def test_in_lock_step_it_is_the_mean_of_the_learners(config):
  """float32, avg and an outer step of 1: after every period each learner has the mean parameters
  and its own moments. The tolerance is that of test_equivalence.py."""
  sync = config.sync
  sync.learners = sync.quorum = 2
  sync.overlap = 0
  sync.codec_up = sync.codec_down = 'float32'
  sync.outer, sync.merge, sync.embedding_merge = 'sgd(learning_rate=1.0)', 'avg', 'avg'
  sync.fragments, sync.period, config.train.steps = 1, 4, 12
  virtually = virtual.train(config, **conditions.delays('wan', slowness=(1, 2)))

  assembled = build.assemble(config)
  islands = [arrays.fresh_island(assembled) for _ in range(2)]
  for shard, island in enumerate(islands):
    island.read_from(shard)
  for clock in range(12):
    for island in islands:
      island.step(clock)
    if clock % 4 == 3:
      mean = jax.tree.map(_mean, *(jax.device_get(island.params) for island in islands))
      for island in islands:
        island.params = mean
  moved = 0.0
  begin = assembled.init()
  for ours, theirs, start in zip(*map(jax.tree.leaves, (virtually.params, mean, begin))):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    moved = max(moved, float(np.abs(theirs - start).max()))
  assert moved > 1e-2


def test_one_learner_alone_is_the_baseline(config):
  alone = virtual.alone(config)
  assert [point.tokens for point in alone.curve] == [0, 8 * 64, 16 * 64, 20 * 64]
  together = virtual.data_parallel(config)
  assert together.data.batch_size == 12 and together.sync.learners == 1


@pytest.mark.parametrize('faults', [conditions.Faults(), DEATHS], ids=['no deaths', 'deaths'])
def test_a_run_ends_at_equal_trained_tokens(config, faults):
  """At least so many, and less than one step of each learner more."""
  config.train.steps = 50
  tokens = 3 * 64 * 50
  result = virtual.schedule(config, **ROUGH, faults=faults, trained_tokens=tokens)
  assert result.config.train.steps > 50 == config.train.steps
  assert tokens <= result.tokens < tokens + 3 * 64
  assert result.tokens == 64 * sum(result.steps.values()) == result.ledger.trained


def test_a_fault_that_needs_a_disk_is_refused():
  rot = conditions.plans.Fault(at_ns=0, kind='rot', node='syncer')
  with pytest.raises(ValueError, match="no fault 'rot' of syncer; use one of: kill, freeze"):
    conditions.Faults(plan=(rot,))


@pytest.mark.parametrize(
  'wrong',
  [{'plan': (conditions.plans.Fault(at_ns=0, kind='kill', node='l7'),)}, {'noisy': ('l7',)}],
  ids=str,
)
def test_a_fault_of_a_node_that_the_run_has_not_is_refused(config, wrong):
  with pytest.raises(ValueError, match=r"the plan has faults of \['l7'\]; this run has l0, l1, l2"):
    virtual.schedule(config, faults=conditions.Faults(**wrong))


@pytest.mark.long
def test_liars_change_the_arrays_only_and_not_the_length_of_a_payload(config):
  """All learners send noise: the loss stays where it began; all flip: it rises."""
  everyone = ('l0', 'l1', 'l2')
  honest = virtual.train(config, seed=5)
  noise, flipped = (
    virtual.train(config, seed=5, faults=conditions.Faults(**{name: everyone}))
    for name in ('noisy', 'flipped')
  )
  assert honest.merges == noise.merges == flipped.merges
  assert honest.ledger == noise.ledger == flipped.ledger
  assert honest.final_loss < noise.final_loss < flipped.final_loss
  lie = arrays.noise(np.random.default_rng(0))
  values = np.float32([3.0, 4.0, 0.0])
  assert np.linalg.norm(lie(values)) == pytest.approx(5) and abs(lie(values) - values).max() > 0.1
