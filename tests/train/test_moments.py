"""Moments as bytes: they move between islands bit for bit, for any two meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.storage import tree_digest
from diloco_jax.train import config as config_lib
from diloco_jax.train import moments


def states(island):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(island.moments)]


def equal(ours, theirs):
  return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_copy_of_the_moments_survives_the_next_step(make_island):
  island = make_island()
  island.step(0)
  before = states(island)
  copied = moments.snapshot(island.moments)
  island.step(1)  # donates the copied arrays
  assert not equal(states(island), before)
  assert bytes(moments.to_bytes(copied.moments)) == b''.join(one.tobytes() for one in before)
  assert bool(copied.finite)


def test_moments_arrive_unchanged_on_another_mesh(make_island, optimizer):
  optimizer.name = 'muon'  # its state contains one of AdamW
  donor = make_island(config_lib.MeshConfig(data=2))
  joiner = make_island(config_lib.MeshConfig(fsdp=2))
  for clock in range(3):
    donor.step(clock)
  copied = moments.snapshot(donor.moments)
  data = moments.to_bytes(copied.moments)
  assert data.nbytes == moments.size_bytes(joiner.moments)
  params = [np.asarray(leaf) for leaf in jax.tree.leaves(joiner.params)]
  joiner.moments = moments.from_bytes(data, joiner.moments)
  assert equal(states(joiner), states(donor))
  assert moments.digest(moments.snapshot(joiner.moments).digests) == moments.digest(copied.digests)
  assert equal(params, [np.asarray(leaf) for leaf in jax.tree.leaves(joiner.params)])
  joiner.step(3)


def test_one_bit_changes_the_digest():
  state = {'count': jnp.int32(3), 'mu': jnp.float32([1.0, -0.0]), 'nu': jnp.float32([[0.5]])}
  data = bytearray(moments.to_bytes(state))
  right = moments.digest(moments.snapshot(state).digests)
  for bit in range(8 * len(data)):
    data[bit // 8] ^= 1 << bit % 8
    wrong = jax.tree.map(jnp.asarray, moments.from_bytes(bytes(data), state))
    assert moments.digest(moments.snapshot(wrong).digests) != right, bit
    data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_moments_that_are_not_finite_are_marked(value):
  assert not bool(moments.snapshot({'mu': jnp.float32([1.0, value])}).finite)


def test_another_size_is_refused_with_both_sizes():
  state = {'mu': jnp.float32([1.0, 2.0])}
  with pytest.raises(ValueError, match='received 7 bytes of moments, but this optimizer has 8'):
    moments.from_bytes(bytes(7), state)


@pytest.mark.parametrize('dtype', ['bool', 'int8', 'bfloat16', 'float16', 'int32', 'float32'])
def test_leaves_of_any_width_have_digests(dtype):
  leaf = jnp.arange(12).reshape(3, 4).astype(dtype)
  found = int(tree_digest.digest_leaf(leaf))
  for row in range(3):
    changed = leaf.at[row, 1].set(jnp.array(row == 0, dtype))
    assert (int(tree_digest.digest_leaf(changed)) == found) == bool((changed == leaf).all())


def test_a_state_without_floats_is_finite():
  assert bool(moments.snapshot({'count': jnp.int32(3)}).finite)
