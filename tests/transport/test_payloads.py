"""The payload store."""

import concurrent.futures

import pytest

from diloco_jax.transport import payloads


def test_put_get_drop():
  store = payloads.PayloadStore()
  data = memoryview(bytearray(4))
  handle = store.put(data)
  assert store.get(handle) is data  # no copy
  assert len(store) == 1
  store.drop(handle)
  assert len(store) == 0


def test_handles_are_never_reused():
  store = payloads.PayloadStore()
  first = store.put(b'a')
  store.drop(first)
  assert store.put(b'b') != first


@pytest.mark.parametrize('method', ['get', 'drop'])
def test_an_unknown_handle_is_a_clear_error(method):
  store = payloads.PayloadStore()
  store.drop(store.put(b'a'))
  with pytest.raises(KeyError, match='no payload has id 1.*dropped already or never put'):
    getattr(store, method)(1)


def test_threads_get_different_handles():
  store = payloads.PayloadStore()
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    handles = list(pool.map(lambda k: store.put(bytes([k])), range(200)))
  assert len(set(handles)) == 200
  assert all(store.get(handle) == bytes([k]) for k, handle in enumerate(handles))
