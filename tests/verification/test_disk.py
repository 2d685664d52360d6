"""The simulated disk is as bad as a real one, and a checkpoint is whole or does not exist."""

import errno

import pytest

from diloco_jax.verification import random_streams
from diloco_jax.verification.sim import disk as disk_lib


def new_disk(seed: int) -> disk_lib.Disk:
  return disk_lib.Disk(random_streams.random_stream(seed, 'disk'))


def new_log(seed: int, data: bytes = b'') -> disk_lib.Disk:
  """A disk with a durable file."""
  disk = new_disk(seed)
  disk.write('log', data)
  disk.fsync('log')
  disk.fsync_names()
  return disk


def test_a_crash_keeps_fsynced_files_and_any_part_of_the_others():
  kept = set()
  for seed in range(300):
    disk = new_log(seed, b'durable')
    disk.write('new', b'12', b'345')
    disk.fsync_names()
    assert disk.durable('log') and not disk.durable('new')
    disk.crash()
    assert disk.read('log') == b'durable'
    kept.add(disk.read('new'))
  assert {b'', b'123', b'12345', bytes(5)} <= kept  # lost, torn, whole, zeros
  assert any(len(data) == 5 and data.count(0) == 0 and data != b'12345' for data in kept)  # wrong


def test_changes_of_names_that_are_not_durable_may_be_undone():
  seen = set()
  for seed in range(200):
    disk = new_log(seed, b'old')
    disk.write('new', b'new')
    disk.fsync('new')
    assert not disk.durable('new')  # its name may be lost
    disk.rename('new', 'log')
    disk.write('other')
    disk.remove('other')
    assert disk.names() == ['log']
    disk.crash()
    seen.add(tuple((name, disk.read(name)) for name in disk.names()))
  assert {(('log', b'old'),), (('log', b'new'),)} <= seen
  assert any(dict(files).get('new') == b'new' and dict(files)['log'] == b'old' for files in seen)
  assert any('other' in dict(files) for files in seen)
  assert all(dict(files)['log'] in (b'old', b'new') for files in seen)  # atomic


def test_a_full_disk_stores_a_part_and_raises():
  parts = set()
  for seed in range(50):
    disk = new_disk(seed)
    disk.full = True
    with pytest.raises(OSError) as caught:
      disk.write('log', b'123')
    assert caught.value.errno == errno.ENOSPC
    parts.add(disk.read('log'))
  assert len(parts) == 4


def test_the_next_fsync_does_not_repair_a_failed_one():
  damaged = 0
  for seed in range(50):
    disk = new_log(seed, b'durable')
    disk.write('new', b'x' * 100)
    disk.failing_fsyncs = 1
    with pytest.raises(OSError) as caught:
      disk.fsync('new')
    assert caught.value.errno == errno.EIO
    disk.fsync('new')
    disk.fsync_names()
    assert disk.read('new') == b'x' * 100  # until the host restarts
    assert disk.durable('log') and not disk.durable('new')
    disk.crash()
    damaged += disk.read('new') != b'x' * 100
  assert damaged


def test_bytes_written_again_become_durable():
  disk = new_disk(1)
  disk.write('new', b'x' * 100)
  disk.failing_fsyncs = 1
  with pytest.raises(OSError):
    disk.fsync('new')
  disk.write('new', disk.read('new'))
  disk.fsync('new')
  disk.rename('new', 'log')
  disk.fsync_names()
  disk.crash()
  assert disk.read('log') == b'x' * 100


def save(checkpoints: disk_lib.Checkpoints, state: dict, stages: int = 9) -> None:
  """Runs the first `stages` stages of a save."""
  for _, _ in zip(range(stages), checkpoints.save(state)):
    pass


def test_a_checkpoint_survives_every_failure_of_the_next_one():
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


def test_a_checkpoint_with_a_flipped_bit_is_skipped_for_the_older_one():
  for seed in range(100):
    disk = new_disk(seed)
    checkpoints = disk_lib.Checkpoints(disk)
    for number in (1, 2):
      save(checkpoints, {'number': number})
    before = disk.read('00000002')
    disk.flip()
    flipped = disk.read('00000002') != before
    assert checkpoints.newest() == {'number': 1 if flipped else 2}
