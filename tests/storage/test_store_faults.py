"""A hundred random failures of the requests to a store: nothing is lost, nothing accepted half."""

import concurrent.futures
import itertools
import random
import threading

import pytest

from diloco_jax.storage import store as store_lib
from tests.storage import fake_gcs

FAILURES = 100
WORKERS = 24
ACTS_AFTER = 10  # of each worker
SHARED = 8  # names that several workers try to be the first to write


class Worker:
  """Writes, replaces, reads and removes objects, and asserts what it is told of them. After a
  StoreError an object of its own is as before or as it should be."""

  def __init__(self, store: store_lib.Store, seed: int, number: int):
    self.store, self.number = store, number
    self.random = random.Random(1_000 * seed + number)
    self.mine: dict[str, set[bytes | None]] = {}  # what each object may be
    self.won: dict[str, bytes] = {}
    self.counted: list[int] = []  # the numbers that it has given to the counter
    self.acts = self.errors = 0

  def act(self) -> None:
    self.acts += 1
    one = self.random.choice([self._put, self._put_new, self._count, self._read, self._remove])
    try:
      one()
    except store_lib.StoreError:
      self.errors += 1

  def _bytes(self) -> bytes:
    return self.random.randbytes(self.random.choice([0, 10, 1_000, 100_000]))

  def _name(self) -> str:
    return f'own/{self.number}/{self.random.randrange(6)}'

  def _put(self) -> None:
    name, data = self._name(), self._bytes()
    self.mine.setdefault(name, {None}).add(data)
    self.store.put(name, data)
    self.mine[name] = {data}

  def _remove(self) -> None:
    name = self._name()
    self.mine.setdefault(name, {None}).add(None)
    self.store.remove(name)
    self.mine[name] = {None}

  def _read(self) -> None:
    name = self._name()
    found = self.store.read(name)
    data = found.data if found else None
    assert data in self.mine.get(name, {None}), f'{name} is not what was written'
    kept = {name for name, may in self.mine.items() if None not in may}
    assert kept <= set(self.store.names(f'own/{self.number}/')), 'a list lacks an object'

  def _put_new(self) -> None:
    name = f'first/{self.random.randrange(SHARED)}'
    data = b'%d %d' % (self.number, self.random.randrange(10**9))
    if self.store.put_new(name, data):
      self.won[name] = data

  def _count(self) -> None:
    """The next number, by one of those who try."""
    found = self.store.read('counter')
    number = int(found.data.split()[0]) + 1 if found else 1
    data = b'%d %d %d' % (number, self.number, self.random.randrange(10**9))
    if self.store.replace('counter', data, found.generation if found else None):
      self.counted.append(number)


def _assert_nothing_is_lost(workers: list[Worker], objects: dict[str, bytes]) -> None:
  for worker in workers:
    for name, may in worker.mine.items():
      assert objects.get(name) in may, f'{name} is not what was written'
    for name, data in worker.won.items():
      assert objects[name] == data, f'{name} is of two'
  counted = sorted(itertools.chain(*(worker.counted for worker in workers)))
  assert len(counted) == len(set(counted)), 'two have counted the same number'
  assert counted[-1] <= int(objects['counter'].split()[0])


def _play(
  bucket: fake_gcs.Bucket,
  seed: int,
  kinds: tuple[str, ...] = fake_gcs.KINDS,
  rate: float = 0.3,
  of: str = '',
) -> list[Worker]:
  """Workers act until a hundred requests have failed, and a little longer. `of`: in the names of
  the objects whose requests fail."""
  only = lambda request: of in request.name
  faults = bucket.door.faults = fake_gcs.Faults(seed, rate, kinds, FAILURES, only)
  store = store_lib.Store(f'{bucket.url}/run')
  workers = [Worker(store, seed, number) for number in range(WORKERS)]
  over = threading.Event()

  def work(worker: Worker) -> None:
    while not over.is_set():
      worker.act()
      if faults.injected.total() >= FAILURES:
        over.set()
    for _ in range(ACTS_AFTER):
      worker.act()

  with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
    for done in [pool.submit(work, worker) for worker in workers]:
      done.result()
  below = len('run/')
  objects = {name[below:]: data for name, data in bucket.objects.items()}
  _assert_nothing_is_lost(workers, objects)
  return workers


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))]


@pytest.mark.parametrize(('rate', 'retries'), [(0.1, 4), (0.7, 1)])
@pytest.mark.parametrize('seed', SEEDS)
def test_a_hundred_failures_of_requests_lose_nothing(bucket, seed, rate, retries, monkeypatch):
  """Of few requests, so that all succeed at last; of most, so that calls fail, too."""
  monkeypatch.setattr(fake_gcs, 'SLOW_S', 0.2)
  monkeypatch.setitem(store_lib._RETRIES, 'max_retries', retries)
  workers = _play(bucket, seed, rate=rate)
  assert bucket.door.faults.injected.keys() == set(fake_gcs.KINDS)
  assert bucket.door.faults.injected.total() == FAILURES
  assert retries > 1 or any(worker.errors for worker in workers)


def test_the_workers_notice_a_store_that_keeps_half(bucket):
  with pytest.raises(AssertionError, match='is not what was written'):
    _play(bucket, 1, (fake_gcs.HALF_KEPT,), of='own/')


def test_the_workers_notice_a_store_that_compares_no_generations(bucket, monkeypatch):
  monkeypatch.setattr(fake_gcs.FakeGcs, '_refuses', lambda *_: None)
  with pytest.raises(AssertionError, match='is of two|counted the same number'):
    _play(bucket, 1, ('503',))
