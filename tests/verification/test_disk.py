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
  disk.create('log')
  disk.append('log', data)
  disk.fsync('log')
  disk.fsync_names()
  return disk


def test_a_crash_keeps_fsynced_bytes_and_any_part_of_the_others():
  kept = set()
  for seed in range(300):
    disk = new_log(seed, b'durable')
    disk.append('log', b'12', b'345')
    assert disk.durable('log') == len(b'durable')
    disk.crash()
    data = disk.read('log')
    assert data.startswith(b'durable')
    kept.add(data[7:])
  assert {b'', b'123', b'12345', bytes(5)} <= kept  # lost, torn, whole, zeros
  assert any(len(tail) == 5 and tail.count(0) == 0 and tail != b'12345' for tail in kept)  # wrong


def test_a_truncation_that_is_not_durable_may_be_undone():
  kept = set()
  for seed in range(100):
    disk = new_log(seed, b'12345')
    disk.truncate('log', 2)
    disk.append('log', b'ab')
    assert (disk.read('log'), disk.durable('log')) == (b'12ab', 2)
    disk.crash()
    kept.add(disk.read('log'))
  assert {b'12345', b'12', b'12ab'} <= kept
  disk = new_log(1, b'12345')
  disk.truncate('log', 2)
  disk.fsync('log')
  disk.crash()
  assert disk.read('log') == b'12'


def test_changes_of_names_that_are_not_durable_may_be_undone():
  seen = set()
  for seed in range(200):
    disk = new_log(seed, b'old')
    disk.create('new')
    disk.append('new', b'new')
    disk.fsync('new')
    assert disk.durable('new') == 0  # its name may be lost
    disk.rename('new', 'log')
    disk.create('other')
    disk.remove('other')
    assert disk.names() == ['log']
    disk.crash()
    seen.add(tuple(disk.contents().items()))
  assert {(('log', b'old'),), (('log', b'new'),)} <= seen
  assert any(dict(files).get('new') == b'new' and dict(files)['log'] == b'old' for files in seen)
  assert any('other' in dict(files) for files in seen)
  assert all(dict(files)['log'] in (b'old', b'new') for files in seen)  # atomic


def test_a_full_disk_stores_a_part_and_raises():
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


def test_the_next_fsync_does_not_repair_a_failed_one():
  damaged = 0
  for seed in range(50):
    disk = new_log(seed, b'durable')
    disk.append('log', b'x' * 100)
    disk.failing_fsyncs = 1
    with pytest.raises(OSError) as caught:
      disk.fsync('log')
    assert caught.value.errno == errno.EIO
    disk.append('log', b'more')
    disk.fsync('log')
    assert disk.read('log') == b'durable' + b'x' * 100 + b'more'  # until the host restarts
    assert disk.durable('log') == len(b'durable')
    disk.crash()
    assert disk.read('log').startswith(b'durable') and disk.read('log').endswith(b'more')
    damaged += disk.read('log') != b'durable' + b'x' * 100 + b'more'
  assert damaged


def test_bytes_written_again_to_another_file_become_durable():
  disk = new_log(1, b'durable')
  disk.append('log', b'x' * 100)
  disk.failing_fsyncs = 1
  with pytest.raises(OSError):
    disk.fsync('log')
  disk.create('copy')
  disk.append('copy', disk.read('log'))
  disk.fsync('copy')
  disk.rename('copy', 'log')
  disk.fsync_names()
  disk.crash()
  assert disk.read('log') == b'durable' + b'x' * 100


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
