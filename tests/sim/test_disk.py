"""The simulated disk is as bad as a real one, and a checkpoint is whole or not there."""

import errno

import pytest

from diloco_jax.sim import disk as disk_lib
from diloco_jax.sim import engine


def new_disk(seed: int) -> disk_lib.Disk:
  return disk_lib.Disk(engine.stream(seed, 'disk'))


def test_a_crash_keeps_what_was_fsynced_and_any_part_of_the_rest():
  kept = set()
  for seed in range(200):
    disk = new_disk(seed)
    disk.create('log')
    disk.append('log', b'durable')
    disk.fsync('log')
    disk.append('log', b'12345')
    disk.crash()
    data = disk.read('log')
    assert data.startswith(b'durable')
    kept.add(data[7:])
  assert {b'', b'123', b'12345'} <= kept  # lost, torn, whole
  assert any(not b'12345'.startswith(tail) for tail in kept)  # and wrong


def test_a_full_disk_takes_a_part_and_says_so():
  parts = set()
  for seed in range(50):
    disk = new_disk(seed)
    disk.create('log')
    disk.full = True
    with pytest.raises(OSError) as caught:
      disk.append('log', b'123')
    assert caught.value.errno == errno.ENOSPC
    parts.add(disk.read('log'))
  assert len(parts) == 4


def test_a_failed_fsync_makes_nothing_durable():
  disk = new_disk(1)
  disk.create('log')
  disk.append('log', b'x' * 1000)
  disk.failing_fsyncs = 1
  with pytest.raises(OSError) as caught:
    disk.fsync('log')
  assert caught.value.errno == errno.EIO
  disk.crash()
  assert len(disk.read('log')) < 1000


def save(checkpoints: disk_lib.Checkpoints, state: dict, stages: int = 9) -> None:
  """Saves as far as that many stages."""
  for _, _ in zip(range(stages), checkpoints.save(state)):
    pass


def test_a_checkpoint_survives_whatever_happens_to_the_next_one():
  seen = set()
  for seed in range(300):
    disk = new_disk(seed)
    checkpoints = disk_lib.Checkpoints(disk)
    save(checkpoints, {'number': 1})
    save(checkpoints, {'number': 2}, stages=seed % 5)
    disk.crash()
    newest = disk_lib.Checkpoints(disk).newest()
    assert newest in ({'number': 1}, {'number': 2})
    seen.add(newest['number'])
  assert seen == {1, 2}


def test_a_flipped_bit_is_noticed_and_the_older_one_used():
  for seed in range(100):
    disk = new_disk(seed)
    checkpoints = disk_lib.Checkpoints(disk)
    for number in (1, 2):
      save(checkpoints, {'number': number})
    before = disk.read('00000002')
    disk.flip()
    flipped = disk.read('00000002') != before
    assert checkpoints.newest() == {'number': 1 if flipped else 2}
