"""The payload store."""

import concurrent.futures
import zlib

import pytest

from diloco_jax.protocol import messages
from diloco_jax.transport import payloads


def test_put_get_drop():
  store = payloads.PayloadStore()
  data = memoryview(bytearray(4))
  payload_id = store.put(data)
  assert store.get(payload_id) is data  # no copy
  assert len(store) == 1
  store.drop(payload_id)
  assert len(store) == 0


def test_payload_ids_are_never_reused():
  store = payloads.PayloadStore()
  first = store.put(b'a')
  store.drop(first)
  assert store.put(b'b') != first


@pytest.mark.parametrize('method', ['get', 'drop'])
def test_an_unknown_payload_id_is_a_clear_error(method):
  store = payloads.PayloadStore()
  store.drop(store.put(b'a'))
  with pytest.raises(KeyError, match='no payload has id 1.*dropped already or never put'):
    getattr(store, method)(1)


def test_threads_get_different_payload_ids():
  store = payloads.PayloadStore()
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    payload_ids = list(pool.map(lambda k: store.put(bytes([k])), range(200)))
  assert len(set(payload_ids)) == 200
  assert all(store.get(payload_id) == bytes([k]) for k, payload_id in enumerate(payload_ids))


def test_bytes_to_send_are_kept_and_announced():
  store = payloads.PayloadStore()
  payload_id, payload = payloads.keep(store, memoryview(b'abc'))
  assert bytes(store.get(payload_id)) == b'abc'
  assert payload == messages.Payload(size_bytes=3, crc32=zlib.crc32(b'abc'))
