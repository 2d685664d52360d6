"""Checkpoints in a bucket: whole or none, whatever happens to a process or a request."""

import asyncio
import contextlib
import itertools
import pathlib
import random
import sys
import types

import jax
import pytest

from diloco_jax.storage import checkpoint, folders, states
from diloco_jax.train import config as train_config
from tests.storage import fake_gcs
from tests.storage import test_checkpoint as on_disk


def _restore(url: str) -> tuple[checkpoint.Restored, list[int]]:
  """What a process on an empty disk finds, and the numbers that are left."""
  like = on_disk._state(0)
  shardings = on_disk._shardings(train_config.MeshConfig(fsdp=4), like)
  with contextlib.closing(checkpoint.Checkpoints(url)) as checkpoints:
    return checkpoints.restore(shardings, like), checkpoints.numbers


def test_a_process_on_another_machine_reads_what_was_saved_with_its_own_mesh(bucket):
  url = f'{bucket.url}/run/islands/l0/ckpt'
  shardings = on_disk._shardings(train_config.MeshConfig(fsdp=2), on_disk._state(0))
  checkpoints = checkpoint.Checkpoints(url)
  for step in (1, 2, 3):
    checkpoints.save(step, jax.device_put(on_disk._state(step), shardings), 10 * step)
  checkpoints.close()
  restored, numbers = _restore(url)
  on_disk._assert_holds(restored, 3)
  assert len(restored.state['w'].sharding.device_set) == 4
  assert numbers == [2, 3] == folders.checkpoints(folders.place(f'{bucket.url}/run/islands/l0'))
  assert not any('/ckpt/1/' in name or '.writable' in name for name in bucket.objects)


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
  'door, url, kind, words',
  [
    ({}, 'gs://no-such-bucket/run', ValueError, 'cannot write checkpoints under gs:'),
    ({'refuses_with': 403}, '', ValueError, 'Forbidden'),
    ({'refuses_with': 401}, '', ValueError, 'cannot write'),
    ({'shut': True}, '', states.StateError, 'does not answer'),
  ],
  ids=['missing', 'forbidden', 'unknown', 'shut'],
)
def test_a_bucket_that_cannot_be_written_is_refused_at_the_start(
  door, url, kind, words, bucket, quick, capfd
):
  vars(bucket.door).update(door)
  with pytest.raises(kind, match=words) as refused:
    checkpoint.Checkpoints(url or f'{bucket.url}/run/ckpt')
  assert '\n' not in str(refused.value) and not capfd.readouterr().err


def test_a_library_that_is_missing_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)
  with pytest.raises(ValueError, match=r"needs gcsfs .*: pip install 'diloco-jax\[gcs\]'"):
    folders.of_learners(pathlib.Path('x'), 'gs://bucket/run')


# --- Requests that fail ---------------------------------------------------------------------------


@pytest.fixture(name='quick')
def _quick(monkeypatch):
  """gcsfs waits 1, 2, 4 ... seconds before it tries again."""
  from gcsfs import retry

  monkeypatch.setattr(fake_gcs, 'SLOW_S', 0.1)
  sleep = lambda seconds: asyncio.sleep(seconds / 100)
  monkeypatch.setattr(retry, 'asyncio', types.SimpleNamespace(sleep=sleep))


def _opened(url: str) -> checkpoint.Checkpoints:
  while True:
    try:
      return checkpoint.Checkpoints(url)
    except (OSError, ValueError):
      pass  # the failures of its requests; a real process ends and is started again


@pytest.mark.parametrize(
  ('seed', 'rate', 'failures'),
  [
    (1, 0.1, 25),
    *(pytest.param(seed, 0.3, 100, marks=pytest.mark.full) for seed in range(1, 4)),
  ],
)
def test_failures_of_requests_lose_no_checkpoint(bucket, quick, seed, rate, failures):
  """Processes follow each other on empty disks; each saves some times and is gone."""
  url, draw = f'{bucket.url}/run/islands/l0/ckpt', random.Random(seed)
  faults = bucket.door.faults = fake_gcs.Faults(seed, rate, most=failures)
  steps, saved, tried = itertools.count(1), 0, {0}
  while faults.injected.total() < failures:
    checkpoints = _opened(url)
    for _ in range(draw.randint(1, 3)):
      step = next(steps)
      tried.add(step)
      with contextlib.suppress(states.StateError):
        checkpoints.save(step, on_disk._state(step), 10 * step)()
        saved = step
    checkpoints.close()
    try:
      restored, _ = _restore(url)
    except (states.StateError, ValueError):
      continue  # the next process tries again
    if restored:
      assert restored.step in tried
      on_disk._assert_holds(restored, restored.step)
  bucket.door.faults = None
  restored, _ = _restore(url)
  assert restored.step >= saved > 0
  on_disk._assert_holds(restored, restored.step)


class DownFrom:
  """Faults: from the first request for such an object on, every request is reset."""

  def __init__(self, folder: str, name: str):
    self.folder, self.name, self.down = folder, name, False

  def draw(self, request: fake_gcs.Request) -> str:
    here = self.folder in request.name and self.name in request.name
    self.down = self.down or (here and request.method != 'GET')
    return 'reset' if self.down else ''


@pytest.mark.parametrize(
  'last',
  [
    pytest.param('manifest', marks=pytest.mark.full),
    pytest.param('record', marks=pytest.mark.full),
    'commit_success',
  ],
)
def test_a_save_that_did_not_end_is_no_checkpoint(last, bucket, quick):
  """As of a process that was killed: what the save has left cannot be removed either."""
  url = f'{bucket.url}/run/islands/l0/ckpt'
  checkpoints = checkpoint.Checkpoints(url)
  checkpoints.save(1, on_disk._state(1), 10)()
  bucket.door.faults = DownFrom('/ckpt/2/', last)
  with pytest.raises(states.StateError, match='saving .*/2 failed: .*checkpoint 1 is still'):
    checkpoints.save(2, on_disk._state(2), 20)()
  bucket.door.faults = None
  assert any('/ckpt/2/' in name for name in bucket.objects), 'it had begun'
  restored, numbers = _restore(url)
  on_disk._assert_holds(restored, 1)
  assert numbers == [1]
  assert not any('/ckpt/2/' in name for name in bucket.objects), 'the next process removes it'
  checkpoints.save(3, on_disk._state(3), 30)()
  checkpoints.close()
  on_disk._assert_holds(_restore(url)[0], 3)


def test_a_lost_answer_at_the_start_is_no_refusal(bucket, quick):
  """The second request to remove the probe finds none, and a process that is refused stays away."""
  only = lambda request: request.name.endswith('.writable') and request.method == 'DELETE'
  faults = bucket.door.faults = fake_gcs.Faults(0, 1, ('lost answer',), most=1, only=only)
  checkpoint.Checkpoints(f'{bucket.url}/run/islands/l0/ckpt').close()
  assert faults.injected.total() == 1
