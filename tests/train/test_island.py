"""An island trains alone, continues from a checkpoint bit for bit, and takes a replaced state."""

import weakref
from concurrent import futures

import jax
import numpy as np
import pytest

from diloco_jax.storage import checkpoint
from diloco_jax.storage import files as files_lib
from diloco_jax.train import island as island_lib


def _host(tree):
  return jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)


def _assert_same(state, expected):
  jax.tree.map(np.testing.assert_array_equal, _host(state), _host(expected))


def test_a_watcher_that_wakes_late_changes_no_time_of_a_step(make_island):
  """On a busy machine the next step, which is computed at its dispatch, has ended before."""
  island = make_island()
  island.warm_up()
  for clock in range(3):
    island.dispatch(clock)
  first = island._dispatched[0]
  late = futures.Future()
  late.set_result((first.ended.result()[0], first.ended.result()[1] + 60 * 10**9))
  island._dispatched[0] = first._replace(ended=late)
  assert all(0 < island.finish().seconds < 60 for _ in range(3))


def test_continues_from_a_checkpoint_bit_for_bit(make_island, optimizer, tmp_path):
  optimizer.name = 'muon'  # its state contains one of AdamW
  island = make_island(checkpoint_dir=str(tmp_path), shard=1)
  for clock in range(3):
    island.step(clock)
  island.save(3, {'versions': [1, 2]})
  expected = [island.step(clock) for clock in range(3, 6)]
  island.close()

  other = make_island(checkpoint_dir=str(tmp_path), seed=9)
  restored = other.restore()
  assert (restored.step, restored.data_state, restored.protocol) == (3, 3, {'versions': [1, 2]})
  assert (other.shard, other.data_state) == (1, 3)
  again = [other.step(clock) for clock in range(3, 6)]
  assert [r[:3] for r in again] == [r[:3] for r in expected]
  _assert_same(other.state, island.state)
  other.close()

  optimizer.name = 'adamw'
  with pytest.raises(ValueError, match='opt_state'):
    make_island(checkpoint_dir=str(tmp_path)).restore()


class _Damaged:
  """Batches of which some cannot be read; `once`: at the first attempt only."""

  def __init__(self, whole, damaged, once=False):
    self.read, self._whole, self._damaged, self._once = [], whole, set(damaged), once

  def __getitem__(self, index):
    if index in self._damaged:
      if self._once:
        self._damaged.remove(index)
      raise OSError(f'record {index} is damaged')
    self.read.append(index)
    return self._whole[index]


def test_a_damaged_record_costs_its_batch_and_not_the_learner(make_island, caplog):
  """Each new process of the learner would read the same batch first."""
  island = make_island()
  island._shard = batches = _Damaged(island._shard, {0, 3, 4})
  island.warm_up()
  for clock in range(6):
    island.step(clock)
  assert batches.read == [1, 1, 1, 2, 5, 5, 5] and island.data_state == 6
  assert [record.getMessage().split(':')[0] for record in caplog.records] == [
    f'batch {index} of shard 0 cannot be read (OSError' for index in (0, 3, 4)
  ]
  island._shard = _Damaged(batches, range(6, 6 + island_lib.MAX_DAMAGED + 1))
  with pytest.raises(OSError, match='record 6 is damaged'):  # no matter of one record
    island.step(6)


def test_a_read_that_failed_once_is_made_again(make_island, caplog):
  island = make_island()
  island._shard = batches = _Damaged(island._shard, {1}, once=True)
  for clock in range(3):
    island.step(clock)
  assert batches.read == [0, 1, 2] and not caplog.records


def test_a_learner_that_comes_back_holds_its_state_once(make_island, tmp_path, monkeypatch):
  """Neither the initial state beside that of the checkpoint, nor this beside published values."""
  island = make_island(checkpoint_dir=str(tmp_path))
  island.save(1, {})
  island.close()
  island = make_island(checkpoint_dir=str(tmp_path))
  initial = [weakref.ref(leaf) for leaf in jax.tree.leaves(island.state)]
  read_back = checkpoint.Checkpoints.restore

  def restore(*arguments):
    assert not any(leaf() is not None for leaf in initial)
    return read_back(*arguments)

  monkeypatch.setattr(checkpoint.Checkpoints, 'restore', restore)
  restored = island.restore()
  read = [weakref.ref(leaf) for leaf in jax.tree.leaves(island.params)]
  published = jax.tree.map(np.zeros_like, _host(island.params))
  island.params = published
  assert restored.step == 1 and not any(leaf() is not None for leaf in read)
  island.close()


def test_a_second_island_in_the_same_folder_is_refused(make_island, tmp_path):
  """It would remove the unfinished saves of the first."""
  island = make_island(checkpoint_dir=str(tmp_path))
  with pytest.raises(files_lib.DirectoryError, match='already used by learner pid'):
    make_island(checkpoint_dir=str(tmp_path))
  before = _host(island.state)
  assert island.restore() is None, 'there is no checkpoint'
  _assert_same(island.state, before)
  island.close()
  make_island(checkpoint_dir=str(tmp_path)).close()
  with pytest.raises(ValueError, match='pass checkpoint_dir'):
    make_island().save(0)


def test_adopt_replaces_parameters_and_keeps_moments(make_island):
  """Adopt: the fragment is overwritten, the inner moments stay (paper section 3)."""
  island = make_island(fsdp=2)
  island.step(0)
  moments = _host(island.state.opt_state)
  adopted = jax.tree.map(lambda leaf: leaf + np.float32(1), _host(island.params))
  island.params = adopted
  _assert_same(island.params, adopted)
  _assert_same(island.state.opt_state, moments)
  assert island.params['embedding'].sharding == island.shardings.params['embedding']
  kept = _host(adopted)
  island.step(1)
  _assert_same(adopted, kept)  # the step does not donate the caller's host arrays


def test_a_joiner_continues_with_the_donors_state_with_the_same_bits(make_island):
  """Recovery: model and inner optimizer state move to other devices (paper section 6)."""
  donor, joiner = make_island(fsdp=2), make_island(fsdp=2, first_device=4, seed=7)
  donor.step(0)
  joiner.state = _host(donor.state)
  joiner.read_from(donor.shard, donor.data_state)
  assert [joiner.step(n)[:3] for n in (1, 2)] == [donor.step(n)[:3] for n in (1, 2)]
  _assert_same(joiner.state, donor.state)


def test_a_state_of_another_shape_is_refused(make_island):
  island = make_island()
  params = _host(island.params)
  params['embedding'] = params['embedding'][:, :8]
  with pytest.raises(ValueError, match=r'embedding.*\(256, 8\).*\(256, 16\)'):
    island.params = params
  del params['embedding']
  with pytest.raises(ValueError, match='embedding'):
    island.params = params


def test_evaluates_given_parameters(make_island):
  island = make_island()
  start = island.evaluate()
  initial = _host(island.params)
  for clock in range(5):
    island.step(clock)
  assert island.evaluate() < start
  assert island.evaluate(initial) == start


def test_read_from_moves_the_shard(make_island):
  island = make_island(shard=0)
  initial = _host(island.state)

  def step_from_the_start(shard: int, next_index: int):
    island.state = initial
    island.read_from(shard, next_index)
    return island.step(0)[:3]

  results = [step_from_the_start(*position) for position in ((0, 5), (2, 5), (2, 6), (2, 5))]
  assert results[1] == results[3] and len(set(results)) == 3
  assert (island.shard, island.data_state) == (2, 6)
  with pytest.raises(ValueError, match='-1 is negative'):
    island.data_state = -1
