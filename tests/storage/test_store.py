"""The store on a folder and on a bucket: one meaning, whatever fails on the way."""

import multiprocessing
import os
import threading
import tracemalloc
from concurrent import futures

import pytest

from diloco_jax.storage import json_files
from diloco_jax.storage import store as store_lib
from tests.storage import fake_gcs

RACERS = 8


@pytest.fixture(name='store', params=['folder', 'bucket'])
def _store(request, tmp_path) -> store_lib.Store:
  if request.param == 'folder':
    return store_lib.Store(f'{tmp_path}/not #there/%20')
  return store_lib.Store(f'{request.getfixturevalue("bucket").url}/run/x')


def test_an_object_is_read_as_it_was_written(store):
  assert store.names() == [] and store.read('syncer/claim') is None
  data = os.urandom(3 << 20)
  store.put('syncer/ckpt/7/d/a b#c', data)
  store.put('syncer/empty', b'')
  assert store.read('syncer/ckpt/7/d/a b#c', len(data)).data == data
  assert store.read('syncer/empty').data == b''
  store.put('syncer/empty', b'no longer')
  assert store.read('syncer/empty').data == b'no longer'


@pytest.mark.filterwarnings('ignore:Sending a large body')  # of aiohttp to gcsfs
@pytest.mark.parametrize('kind', ['folder', 'bucket'])
def test_a_large_file_is_copied_in_parts(kind, tmp_path, request, monkeypatch):
  """Both ways: never more of it is in memory, or in a request, than some parts."""
  monkeypatch.setattr(store_lib, 'PART_BYTES', 1 << 20)
  size, requests = 40 << 20, []
  (tmp_path / 'file').write_bytes(data := os.urandom(size))
  bucket = request.getfixturevalue('bucket') if kind == 'bucket' else None
  store = store_lib.Store(f'{bucket.url}/run/x' if bucket else str(tmp_path / 'store'))
  if bucket:  # which is in this process
    bucket.door.faults = fake_gcs.Faults(
      1, 1.0, only=lambda asked: requests.append(len(asked.body))
    )
  tracemalloc.start()
  store.put_file('model/d/0', tmp_path / 'file')
  if not bucket:
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
  tracemalloc.reset_peak()
  json_files.replace(tmp_path / 'back', store.parts('model/d/0', size))
  if not bucket:
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
  tracemalloc.stop()
  assert (tmp_path / 'back').read_bytes() == data
  assert store.names() == ['model/d/0']
  assert b''.join(store.parts('model/d/0', size + (5 << 20))) == data
  assert max(requests, default=0) < 16 << 20 and (len(requests) > 40 or not bucket)


def test_names_begin_with_the_prefix_and_are_sorted(store):
  for name in ('b/2', 'b/10', 'a/1', 'bb', 'b/3/x'):
    store.put(name, b'x')
  assert store.names('b/') == ['b/10', 'b/2', 'b/3/x']
  assert store.names() == ['a/1', 'b/10', 'b/2', 'b/3/x', 'bb']
  store.remove(*store.names('b/'), 'there is none')
  assert store.names() == ['a/1', 'bb']


def test_replace_needs_the_present_generation_and_put_new_that_there_is_no_object(store):
  for _ in range(2):  # the answer to the first may have been lost
    assert store.put_new('claim', b'a')
  assert not store.put_new('claim', b'another')
  first = store.replace('claim', b'a', None)
  assert store.read('claim') == (b'a', first)
  second = store.replace('claim', b'b', first)
  assert second and second != first
  assert store.replace('claim', b'c', first) is None
  assert store.replace('claim', b'b', first) == second  # its own bytes
  store.remove('claim')
  assert store.replace('claim', b'd', second) is None
  assert store.read('claim') is None


def test_of_several_that_replace_an_object_one_succeeds(store):
  generation = store.replace('claim', b'', None)
  won, start = [], threading.Barrier(RACERS)

  def race(data: bytes) -> None:
    start.wait()
    if store.replace('claim', data, generation):
      won.append(data)

  with futures.ThreadPoolExecutor(RACERS) as pool:
    list(pool.map(race, [b'%d' % number for number in range(RACERS)]))
  assert [store.read('claim').data] == won


def _write_for_ever(place: str, wrote) -> None:
  store = store_lib.Store(place)
  for turn in range(10**9):
    store.put('whole', b'%d' % (turn % 10) * (1 << 20))
    wrote.set()


def test_a_killed_writer_leaves_a_whole_object_and_no_lock(tmp_path):
  spawn = multiprocessing.get_context('spawn')
  store = store_lib.Store(str(tmp_path / 'store'))
  for _ in range(3):
    wrote = spawn.Event()
    writer = spawn.Process(target=_write_for_ever, args=(str(tmp_path / 'store'), wrote))
    writer.start()
    assert wrote.wait(120)
    writer.kill()
    writer.join()
    data = store.read('whole', 1 << 20).data
    assert len(data) == 1 << 20 and len(set(data)) == 1
    assert store.names() == ['whole']
    store.put('whole', b'next')


@pytest.mark.parametrize('place', ['gs://x', 'gs://b/run'])
def test_a_bucket_of_no_valid_name_is_refused(place):
  with pytest.raises(ValueError, match='Invalid GCS bucket name'):
    store_lib.Store(place)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(store_lib.StoreError, match=r'file/store/claim: .*os_error_code') as caught:
    store_lib.Store(str(tmp_path / 'file' / 'store')).put_new('claim', b'x')
  assert '\n' not in str(caught.value)


# --- Failing requests -----------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['503', 'reset', 'lost answer', 'truncated answer',
                                  'truncated upload'])  # fmt: skip
def test_one_failure_of_any_kind_goes_unnoticed(bucket, kind):
  store = store_lib.Store(f'{bucket.url}/run')

  def fails_once(call):
    bucket.door.faults = fake_gcs.Faults(1, 1.0, (kind,), most=1)
    result = call()
    assert bucket.door.faults.injected.total() == 1
    return result

  data = os.urandom(1 << 18)
  assert fails_once(lambda: store.put_new('wal/1', data))
  assert not fails_once(lambda: store.put_new('wal/1', b'another'))
  stored = fails_once(lambda: store.read('wal/1'))
  assert stored.data == data
  assert fails_once(lambda: store.replace('wal/1', b'b', stored.generation))
  assert fails_once(lambda: store.replace('wal/1', b'c', stored.generation)) is None
  assert fails_once(lambda: store.names()) == ['wal/1']
  fails_once(lambda: store.remove('wal/1'))
  assert bucket.objects == {}


def test_a_store_that_does_not_answer_is_one_line(bucket):
  store = store_lib.Store(f'{bucket.url}/run', limit_s=1.0)
  bucket.door.delay_s = 3.0
  with pytest.raises(store_lib.StoreError, match='/run/claim: no answer within 1 s'):
    store.put_new('claim', b'x')
  bucket.door.delay_s, bucket.door.refuses_with = 0.0, 403
  with pytest.raises(store_lib.StoreError, match='PERMISSION_DENIED') as caught:
    store.put_new('claim', b'x')
  assert '\n' not in str(caught.value)
  bucket.door.refuses_with, bucket.door.shut = 0, True
  with pytest.raises(store_lib.StoreError, match='attempts failed|no answer'):
    store.put_new('claim', b'x')
  bucket.door.shut = False
  assert store.put_new('claim', b'x')


def test_a_folder_may_be_named_by_way_of_its_parent(tmp_path):
  assert store_lib.Store(str(tmp_path / 'run' / '..' / 'store')).put_new('claim', b'x')
  assert (tmp_path / 'store' / 'claim').read_bytes() == b'x'
