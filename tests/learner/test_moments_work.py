"""A donation is taken only if its bits are those that the donor sent."""

import queue

import jax
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import moments_work
from diloco_jax.learner import process as learner_process
from diloco_jax.protocol import actions
from diloco_jax.train import moments as moments_lib
from diloco_jax.transport import payloads

DEADLINE_S = 60


class Side:
  """One island and its work on moments."""

  def __init__(self, assembled, folder, name):
    self.island = learner_process.make_island(
      assembled, folder, name, jax.devices()[: assembled.config.mesh.num_devices]
    )
    self.posted, self.kept = queue.SimpleQueue(), payloads.PayloadStore()
    self.failed = queue.SimpleQueue()
    self.work = moments_work.Moments(self.island, self.posted.put, self.failed.put, self.kept, None)
    self.work.compile()

  def moments(self):
    return [np.array(leaf) for leaf in jax.tree.leaves(self.island.moments)]

  def takes(self, data: bytes, digest: int) -> bool:
    self.work.take(actions.TakeMoments(transfer=1, payload_id=self.kept.put(data), digest=digest))
    return self.posted.get(timeout=DEADLINE_S).matched


def _same(ours, theirs) -> bool:
  return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope='module', name='sides')
def _sides(tmp_path_factory):
  assembled, folder = build.assemble(stdlib_lm.get_config('tiny')), tmp_path_factory.mktemp('run')
  donor, joiner = Side(assembled, folder, 'l0'), Side(assembled, folder, 'l1')
  for clock in range(2):
    donor.island.step(clock)
  yield donor, joiner
  donor.island.close()
  joiner.island.close()


def test_a_donation_whose_digest_differs_is_noticed_and_not_taken(sides):
  donor, joiner = sides
  donor.work.read(1)
  read = donor.posted.get(timeout=DEADLINE_S)
  data, own = bytearray(donor.kept.get(read.payload_id)), joiner.moments()
  data[len(data) // 2] ^= 1
  assert not joiner.takes(bytes(data), read.digest)
  assert not joiner.takes(bytes(donor.kept.get(read.payload_id)), read.digest ^ 1)
  assert _same(joiner.moments(), own) and not _same(own, donor.moments())
  assert joiner.takes(bytes(donor.kept.get(read.payload_id)), read.digest)
  assert _same(joiner.moments(), donor.moments())


def test_a_donation_that_is_not_finite_is_not_taken_whatever_its_digest(sides):
  """The donor's own check is not enough: the donor may lie, or its memory may fail."""
  donor, joiner = sides
  moments = donor.island.moments
  own = joiner.moments()
  for wrong in (np.nan, np.inf):
    leaves, tree = jax.tree.flatten(moments)
    place = next(i for i, leaf in enumerate(leaves) if leaf.ndim > 1)
    leaves[place] = leaves[place].at[0, 0].set(wrong)
    copied = moments_lib.snapshot(jax.tree.unflatten(tree, leaves))
    data = bytes(moments_lib.to_bytes(copied.moments))
    assert not joiner.takes(data, moments_lib.digest(copied.digests))
    assert _same(joiner.moments(), own)


def test_a_copy_that_does_not_reach_the_host_ends_the_node(sides, monkeypatch):
  donor, _ = sides
  error = MemoryError('no room for the moments')

  def put(data):
    raise error

  monkeypatch.setattr(donor.kept, 'put', put)
  donor.work.read(2)
  assert donor.failed.get(timeout=DEADLINE_S) is error
