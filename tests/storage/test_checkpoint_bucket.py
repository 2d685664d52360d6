"""Checkpoints in a bucket: whole or none, whatever happens to a process or a request."""

import asyncio
import json
import pathlib
import signal
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import pytest

from diloco_jax.learner import moments
from diloco_jax.storage import checkpoint, folders
from diloco_jax.train import config as config_lib
from tests.storage import fake_gcs
from tests.storage import test_checkpoint as on_disk

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAVER = """
import sys
import jax
jax.config.update('jax_num_cpu_devices', 2)
from diloco_jax.storage import checkpoint
from diloco_jax.train import config as config_lib
from tests.storage import test_checkpoint as on_disk

state = on_disk._state(0)
shardings = on_disk._shardings(config_lib.MeshConfig(fsdp=2), state)
checkpoints = checkpoint.Checkpoints(sys.argv[1])
for step in map(int, sys.argv[2:]):
  done = checkpoints.save(step, jax.device_put(on_disk._state(step), shardings), 10 * step)
  done()
checkpoints.close()
"""


def _saver(url: str, *steps: int) -> subprocess.Popen:
  """A process of two devices that saves."""
  words = [sys.executable, '-c', SAVER, url, *map(str, steps)]
  return subprocess.Popen(words, cwd=ROOT)


def _restore(url: str, devices: int = 4) -> tuple[checkpoint.Restored, list[int]]:
  """What a process on an empty disk finds, and the numbers that are left."""
  like = on_disk._state(0)
  checkpoints = checkpoint.Checkpoints(url)
  try:
    shardings = on_disk._shardings(config_lib.MeshConfig(fsdp=devices), like)
    return checkpoints.restore(shardings, like), checkpoints.numbers
  finally:
    checkpoints.close()


def test_a_process_on_another_machine_reads_what_was_saved_with_its_own_mesh(bucket):
  url = f'{bucket.url}/run/islands/l0/ckpt'
  shardings = on_disk._shardings(config_lib.MeshConfig(fsdp=2), on_disk._state(0))
  checkpoints = checkpoint.Checkpoints(url)
  for step in (1, 2, 3):
    checkpoints.save(step, jax.device_put(on_disk._state(step), shardings), 10 * step)
  checkpoints.close()
  restored, numbers = _restore(url)
  on_disk._assert_holds(restored, 3)
  assert len(restored.state['w'].sharding.device_set) == 4
  assert numbers == [2, 3] == folders.checkpoints(folders.place(f'{bucket.url}/run/islands/l0'))
  assert not any('/ckpt/1/' in name or '.writable' in name for name in bucket.objects)


@pytest.mark.parametrize(
  'last',
  [
    pytest.param('manifest', marks=pytest.mark.full),
    pytest.param('record', marks=pytest.mark.full),
    'commit_success',
  ],
)
def test_a_save_that_was_killed_is_no_checkpoint(last, bucket):
  """The process dies when the object that its second save writes with this name is on its way."""
  url = f'{bucket.url}/run/islands/l0/ckpt'
  asked = threading.Event()

  def is_last(request: fake_gcs.Request) -> bool:
    if '/ckpt/2/' in request.name and last in request.name and request.method != 'GET':
      asked.set()
      bucket.door.silent = True
    return False

  bucket.door.faults = fake_gcs.Faults(0, only=is_last, rate=1.0)
  saver = _saver(url, 1, 2)
  assert asked.wait(120)
  saver.send_signal(signal.SIGKILL)
  saver.wait()
  bucket.door.faults, bucket.door.silent = None, False
  assert any('/ckpt/2/' in name for name in bucket.objects), 'it had begun'
  restored, numbers = _restore(url)
  on_disk._assert_holds(restored, 1)
  assert numbers == [1]
  assert not any('/ckpt/2/' in name for name in bucket.objects), 'the next process removes it'


def test_an_unreadable_checkpoint_is_set_aside_and_the_one_before_it_read(bucket, caplog):
  url = f'{bucket.url}/run/islands/l0/ckpt'
  on_disk._save(url, 1, 2)
  name, data = max(
    (item for item in bucket.objects.items() if '/ckpt/2/state/' in item[0]),
    key=lambda item: len(item[1]),
  )
  bucket.fake.put(bucket.name, name, data[:-100] + bytes(100))
  restored, numbers = _restore(url)
  on_disk._assert_holds(restored, 1)
  assert numbers == [1] and 'moved to' in caplog.text
  names = [name.removeprefix('run/islands/l0/ckpt/') for name in bucket.objects]
  assert {name.split('/')[0] for name in names} == {'1', 'unreadable-2'}
  on_disk._save(url, 2)
  on_disk._assert_holds(_restore(url)[0], 2)


def test_no_step_waits_for_the_bucket(bucket):
  """`save` returns before anything was asked of it."""
  checkpoints = checkpoint.Checkpoints(f'{bucket.url}/run/ckpt')
  checkpoints.save(1, on_disk._state(1), 10)()
  bucket.door.silent = True
  done = checkpoints.save(2, on_disk._state(2), 20)
  bucket.door.silent = False
  assert done() == 2
  checkpoints.close()


@pytest.mark.parametrize(
  'prepare, url, kind, words',
  [
    (
      lambda door: None,
      'gs://no-such-bucket/run',
      ValueError,
      'cannot write checkpoints under gs:',
    ),
    (lambda door: setattr(door, 'refuses_with', 403), '', ValueError, 'Forbidden'),
    (lambda door: setattr(door, 'refuses_with', 401), '', ValueError, 'cannot write'),
    (lambda door: setattr(door, 'shut', True), '', checkpoint.CheckpointError, 'does not answer'),
  ],
  ids=['missing', 'forbidden', 'unknown', 'shut'],
)
def test_a_bucket_that_cannot_be_written_is_refused_at_the_start(
  prepare, url, kind, words, bucket, monkeypatch, capfd
):
  from gcsfs import retry

  at_once = types.SimpleNamespace(sleep=lambda delay: asyncio.sleep(0))
  monkeypatch.setattr(retry, 'asyncio', at_once)  # between its attempts
  prepare(bucket.door)
  with pytest.raises(kind, match=words) as refused:
    checkpoint.Checkpoints(url or f'{bucket.url}/run/ckpt')
  assert '\n' not in str(refused.value) and not capfd.readouterr().err


def test_a_library_that_is_missing_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  with pytest.raises(ValueError, match=r"needs gcsfs .*: pip install 'diloco-jax\[gcs\]'"):
    folders.of_learners(pathlib.Path('x'), 'gs://bucket/run')


def test_moments_of_another_learner_come_from_the_bucket(bucket):
  place = folders.place(f'{bucket.url}/run')
  like = {'count': jax.numpy.int32(0), 'mu': jax.numpy.ones((8, 8))}
  assert moments.find(place, 'l1', like) is None
  for name, step in {'l0': 4, 'l2': 9}.items():
    checkpoints = checkpoint.Checkpoints(str(moments.folder(place, name)))
    held = {'count': jax.numpy.int32(step), 'mu': jax.numpy.full((8, 8), float(step))}
    checkpoints.save(step, {'opt_state': held}, 0, {'protocol': {'learner': name}})()
    checkpoints.close()
  found = moments.find(place, 'l1', like)
  assert (found.learner, found.step, found.protocol) == ('l2', 9, {'learner': 'l2'})
  np.testing.assert_array_equal(found.moments['mu'], np.full((8, 8), 9.0))
  record = 'run/islands/l2/ckpt/9/record/data.json'
  bucket.fake.put(bucket.name, record, json.dumps({}).encode())
  assert moments.find(place, 'l1', like)[:2] == ('l0', 4)
