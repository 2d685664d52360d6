"""Checkpoints in a bucket while requests fail: a save that was reported is never lost, and what is
restored is what was saved."""

import asyncio
import itertools
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.storage import checkpoint
from tests.storage import fake_gcs

LEAVES, VALUES = 3, 2_000


@pytest.fixture(autouse=True)
def _quick(bucket, monkeypatch):
  """gcsfs waits 1, 2, 4 ... seconds before it tries again."""
  from gcsfs import retry

  monkeypatch.setattr(fake_gcs, 'SLOW_S', 0.1)
  sleep = lambda seconds: asyncio.sleep(seconds / 100)
  monkeypatch.setattr(retry, 'asyncio', types.SimpleNamespace(sleep=sleep))


def _state(step: int) -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(step), LEAVES)
  return {f'leaf{k}': jax.random.normal(key, VALUES) for k, key in enumerate(keys)}


LIKE = {f'leaf{k}': jax.ShapeDtypeStruct((VALUES,), jnp.float32) for k in range(LEAVES)}


def _restore(root: str) -> checkpoint.Restored | None:
  """As a process on a new machine does it."""
  checkpoints = checkpoint.Checkpoints(root)
  try:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return checkpoints.restore(jax.tree.map(lambda _: one, LIKE), LIKE)
  finally:
    checkpoints.close()


def _assert_holds(restored: checkpoint.Restored, step: int) -> None:
  assert (restored.step, restored.data_state) == (step, 10 * step)
  assert restored.protocol == {'outer_steps': step}
  for name, leaf in _state(step).items():
    np.testing.assert_array_equal(restored.state[name], leaf)


def _save(checkpoints: checkpoint.Checkpoints, step: int) -> None:
  checkpoints.save(step, _state(step), 10 * step, {'outer_steps': step})()


@pytest.mark.parametrize(
  ('seed', 'rate', 'failures'),
  [
    (1, 0.1, 25),
    *(pytest.param(seed, 0.3, 100, marks=pytest.mark.full) for seed in range(1, 4)),
  ],
)
def test_failures_of_requests_lose_no_checkpoint(bucket, seed, rate, failures):
  """Processes follow each other on empty disks; each saves some times and is gone."""
  root, draw = f'{bucket.url}/run/islands/l0/ckpt', random.Random(seed)
  faults = bucket.door.faults = fake_gcs.Faults(seed, rate, most=failures)
  steps, saved, tried = itertools.count(1), 0, {0}
  while faults.injected.total() < failures:
    checkpoints = _opened(root)
    for _ in range(draw.randint(1, 3)):
      step = next(steps)
      tried.add(step)
      try:
        _save(checkpoints, step)
        saved = step
      except checkpoint.CheckpointError:
        pass
    checkpoints.close()
    try:
      restored = _restore(root)
    except (checkpoint.CheckpointError, ValueError):
      continue  # the next process tries again
    if restored:
      assert restored.step in tried
      _assert_holds(restored, restored.step)
  bucket.door.faults = None
  restored = _restore(root)
  assert restored.step >= saved > 0
  _assert_holds(restored, restored.step)


def _opened(root: str) -> checkpoint.Checkpoints:
  while True:
    try:
      return checkpoint.Checkpoints(root)
    except (OSError, ValueError):
      pass  # the failures of its requests; a real process ends and is started again


@pytest.mark.parametrize('verified', [True, False])
def test_arrays_of_another_checkpoint_are_not_restored(bucket, monkeypatch, verified):
  """Whole objects in the wrong place, which Orbax reads; and without the digests they would be."""
  root = f'{bucket.url}/run/islands/l0/ckpt'
  checkpoints = _opened(root)
  _save(checkpoints, 1)
  _save(checkpoints, 2)
  checkpoints.close()
  first, second = 'run/islands/l0/ckpt/1/state/', 'run/islands/l0/ckpt/2/state/'
  for name in bucket.objects:
    if name.startswith(second):
      bucket.fake.remove(bucket.name, name)
  for name, data in bucket.objects.items():
    if name.startswith(first):
      bucket.fake.put(bucket.name, second + name.removeprefix(first), data)
  if verified:
    _assert_holds(_restore(root), 1)
    return
  monkeypatch.setattr(checkpoint.tree_digest, 'require_same_digests', lambda *_: None)
  with pytest.raises(AssertionError, match='Mismatched elements'):
    _assert_holds(_restore(root), 2)


@pytest.mark.filterwarnings('ignore:coroutine:RuntimeWarning')
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('part', ['state', 'record'])
def test_a_checkpoint_of_which_half_was_kept_is_not_restored(bucket, part):
  """A store that says 200 and keeps half of an object, in a save that is not read back."""
  root = f'{bucket.url}/run/islands/l0/ckpt'
  checkpoints = _opened(root)
  _save(checkpoints, 1)
  only = lambda request: f'/2/{part}/' in request.name and request.method == 'POST'
  bucket.door.faults = fake_gcs.Faults(0, 1, (fake_gcs.HALF_KEPT,), only=only)
  try:
    _save(checkpoints, 2)
  except checkpoint.CheckpointError:
    pass
  checkpoints.close()
  assert bucket.door.faults.injected.total()
  bucket.door.faults = None
  _assert_holds(_restore(root), 1)


class DownFrom:
  """Faults: from the first request for an object of this name on, every request is reset."""

  def __init__(self, name: str):
    self.name, self.down = name, False

  def draw(self, request: fake_gcs.Request) -> str:
    self.down = self.down or request.name.endswith(self.name)
    return 'reset' if self.down else ''


def test_a_store_that_is_gone_at_the_end_of_a_save_is_an_error_of_that_save(bucket):
  """Also what the failed save has left cannot be removed then."""
  root = f'{bucket.url}/run/islands/l0/ckpt'
  checkpoints = _opened(root)
  _save(checkpoints, 1)
  bucket.door.faults = DownFrom('/2/commit_success.txt')
  with pytest.raises(
    checkpoint.CheckpointError, match='saving .*/2 failed: .*checkpoint 1 is still'
  ):
    _save(checkpoints, 2)
  bucket.door.faults = None
  _save(checkpoints, 3)
  checkpoints.close()
  _assert_holds(_restore(root), 3)


def test_a_lost_answer_at_the_start_is_no_refusal(bucket):
  """The second request to remove the probe finds none, and a process that is refused stays away."""
  only = lambda request: request.name.endswith('.writable') and request.method == 'DELETE'
  faults = bucket.door.faults = fake_gcs.Faults(0, 1, ('lost answer',), most=1, only=only)
  checkpoint.Checkpoints(f'{bucket.url}/run/islands/l0/ckpt').close()
  assert faults.injected.total() == 1
