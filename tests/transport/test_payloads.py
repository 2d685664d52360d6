"""The payload store."""

import concurrent.futures
import types

import numpy as np
import pytest

from diloco_jax.launch import spec as spec_lib
from diloco_jax.transport import payloads as payloads_lib


def test_put_get_drop_and_no_id_is_used_again():
  store = payloads_lib.PayloadStore()
  data = memoryview(bytearray(4))
  payload_id = store.put(data)
  assert store.get(payload_id) is data  # no copy
  assert len(store) == 1
  store.drop(payload_id)
  assert len(store) == 0
  assert store.put(data) != payload_id


@pytest.mark.parametrize('method', ['get', 'drop'])
def test_an_unknown_payload_id_is_a_clear_error(method):
  store = payloads_lib.PayloadStore()
  store.drop(store.put(b'a'))
  with pytest.raises(KeyError, match='no payload has id 1.*dropped already or never put'):
    getattr(store, method)(1)


def test_threads_get_different_payload_ids():
  store = payloads_lib.PayloadStore()
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    payload_ids = list(pool.map(lambda k: store.put(bytes([k])), range(200)))
  assert len(set(payload_ids)) == 200
  assert all(store.get(payload_id) == bytes([k]) for k, payload_id in enumerate(payload_ids))


MIB = 1 << 20


def _address(array: np.ndarray) -> int:
  return array.__array_interface__['data'][0]


def test_memory_is_used_again_after_its_last_array_only():
  memory = payloads_lib.Memory()
  first = memory.take(4 * MIB)
  address = _address(first)
  view = memoryview(first[MIB:])
  del first
  second = memory.take(4 * MIB)
  assert _address(second) != address
  view.release()
  assert _address(memory.take(3 * MIB)) == address  # a smaller one, too
  assert memory.take(3 * MIB).shape == (3 * MIB,)
  assert _address(memory.take(MIB)) not in (address, _address(second))  # would waste three MiB


def test_memory_is_kept_for_no_more_than_was_in_use_at_once():
  memory = payloads_lib.Memory()
  arrays = [memory.take(2 * MIB) for _ in range(3)]
  arrays.clear()
  large = memory.take(6 * MIB)
  assert memory.unused_bytes == 0
  del large
  assert [memory.take(6 * MIB).nbytes for _ in range(2)] == [6 * MIB] * 2
  assert memory.unused_bytes == 0


def test_memory_that_nothing_uses_is_freed():
  """A joiner needs several times the memory of what follows."""
  memory = payloads_lib.Memory()
  whole = [memory.take(8 * MIB), memory.take(64 * MIB)]
  whole.clear()
  for _ in range(payloads_lib.KEPT_TAKES + 1):
    later = [memory.take(MIB), memory.take(MIB)]
    later.clear()
  assert memory.unused_bytes <= 2 * MIB


@pytest.mark.parametrize('size', [1, 1000, MIB - 1, MIB, 2 * MIB + 7])
def test_memory_is_aligned_and_can_be_written(size):
  memory = payloads_lib.Memory()
  for fill in (1, 2):
    array = memory.take(size)
    assert array.dtype == np.uint8 and array.shape == (size,)
    assert _address(array) % payloads_lib.ALIGNMENT == 0
    array[:] = fill
    assert array.sum() == fill * size


def test_threads_never_share_memory():
  memory = payloads_lib.Memory()

  def fill(mark: int) -> bool:
    array = memory.take(MIB + mark)
    array[:] = mark
    return bool(np.all(array == mark))

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert all(pool.map(fill, range(200)))
  assert memory.unused_bytes <= 8 * MIB


TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # M_... of malloc.h


def _mallopt(environment, monkeypatch):
  """What mallopt is called with in a process that has this environment."""
  calls = {}
  library = types.SimpleNamespace(mallopt=calls.__setitem__)
  monkeypatch.setattr(payloads_lib.ctypes, 'CDLL', lambda _: library)
  monkeypatch.setattr(payloads_lib.os, 'environ', environment)
  payloads_lib.keep_freed_memory.__wrapped__()
  return calls


def test_a_process_that_somebody_else_starts_keeps_freed_memory_as_one_of_diloco_train(monkeypatch):
  train = dict(part.split('=') for part in spec_lib.ENVIRONMENT['GLIBC_TUNABLES'].split(':'))
  assert _mallopt({}, monkeypatch) == {
    TRIM_THRESHOLD: int(train['glibc.malloc.trim_threshold']),
    TOP_PAD: int(train['glibc.malloc.top_pad']),
    MMAP_THRESHOLD: int(train['glibc.malloc.mmap_threshold']),
  }
  assert _mallopt(dict(spec_lib.ENVIRONMENT), monkeypatch) == {}


def test_what_the_environment_sets_of_malloc_stays(monkeypatch):
  tunables = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1'}
  assert _mallopt(tunables, monkeypatch).keys() == {TOP_PAD, MMAP_THRESHOLD}
  assert _mallopt({'MALLOC_TOP_PAD_': '1'}, monkeypatch).keys() == {TRIM_THRESHOLD, MMAP_THRESHOLD}
