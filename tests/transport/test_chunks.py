"""The chunk format of transport/chunks.py: golden bytes, every clause, every flipped byte."""

import struct
import zlib

import numpy as np
import pytest

from diloco_jax.transport import chunks, control_crc
from diloco_jax.transport import payloads as payloads_lib
from tests.transport import samples

CHUNK = chunks.CHUNK_BYTES

# The payload b'abc'. If this test fails, the format has changed: raise VERSION.
GOLDEN = bytes.fromhex(
  '444c4342'  # magic
  '0400'  # version
  '2000'  # header of 32 bytes
  '0300000000000000'  # total 3 bytes
  '00000000'  # index 0
  '01000000'  # count 1
  'c2412435'  # crc32 of 'abc'
  '4f40a37f'  # check of the header
  '616263'
)


def assembler(max_payload_bytes=1 << 24):
  return chunks.Assembler(max_payload_bytes=max_payload_bytes)


def frame(data=b'abc', **changes):
  """A frame with some changed fields and a correct header check, as a hostile peer makes it."""
  fields = {
    'magic': chunks.MAGIC,
    'version': chunks.VERSION,
    'header': chunks.HEADER_BYTES,
    'total': len(data),
    'index': 0,
    'count': 1,
    'crc32': zlib.crc32(data),
  } | changes
  header = struct.pack('<4sHHQIII', *fields.values())
  return header + struct.pack('<I', zlib.crc32(header)) + data


def clause_of_error(frames, **limits):
  """The clause of the error that one of these frames raises."""
  receiver = assembler(**limits)
  with pytest.raises(control_crc.WireError) as caught:
    for each in frames:
      receiver.add(each)
  return caught.value.clause


def test_golden_bytes():
  assert list(chunks.split(b'abc')) == [GOLDEN]
  transfer = assembler().add(GOLDEN)
  assert (transfer.number, bytes(transfer.data), transfer.crc32) == (1, b'abc', 0x352441C2)


@pytest.mark.parametrize('chunk', [CHUNK, chunks.LARGE_CHUNK_BYTES])
@pytest.mark.parametrize('size', [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 9 * CHUNK])
def test_a_payload_arrives_whole(size, chunk):
  payload = bytes(range(256)) * (size // 256) + b'x' * (size % 256)
  frames = list(chunks.split(payload, chunk))
  assert max(map(len, frames)) <= chunks.HEADER_BYTES + chunks.LARGE_CHUNK_BYTES
  receiver = assembler()
  *early, last = [receiver.add(each) for each in frames]
  assert early == [None] * (len(frames) - 1)
  assert last.data == payload and last.data.readonly and last.crc32 == zlib.crc32(payload)
  if size:
    assert np.frombuffer(last.data, np.uint8).ctypes.data % payloads_lib.ALIGNMENT == 0


def test_frames_of_any_contiguous_buffer_are_made_on_demand():
  words = np.zeros(CHUNK // 2, np.float32)
  frames = chunks.split(memoryview(words))
  next(frames)
  words[CHUNK // 4] = 9  # forbidden to callers; shows that the second chunk does not exist yet
  assert next(frames)[chunks.HEADER_BYTES :] == words.tobytes()[CHUNK:]


def test_transfers_are_counted():
  first, second = bytes(CHUNK + 1), b'\1' * (CHUNK + 2)
  receiver = assembler()
  frames = [*chunks.split(first), *chunks.split(b''), *chunks.split(second)]
  done = [t for t in map(receiver.add, frames) if t is not None]
  assert [(t.number, t.data) for t in done] == [(1, first), (2, b''), (3, second)]


@pytest.mark.parametrize('chunk', [CHUNK, chunks.LARGE_CHUNK_BYTES])
@pytest.mark.parametrize('size', [0, 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 7])
def test_frames_of_a_kept_payload_have_the_checksum_that_announces_it(size, chunk, monkeypatch):
  data, store = bytes(range(256)) * (size // 256) + b'x' * (size % 256), payloads_lib.PayloadStore()
  payload_id, announced = payloads_lib.keep(store, data)
  expected = list(chunks.split(data, chunk))
  monkeypatch.setattr(chunks.isal_zlib, 'crc32', only_headers(chunks.isal_zlib.crc32))
  assert list(chunks.split(store.get(payload_id), chunk)) == expected
  assert announced == samples.payload(data)


def only_headers(crc32):
  """A checksum that cannot read a payload again, which has a checksum before its chunk."""
  return lambda data: crc32(data)


def test_nothing_is_remembered_of_a_dropped_payload():
  store, before = payloads_lib.PayloadStore(), len(payloads_lib._checksums)
  ids = [payloads_lib.keep(store, bytes([k]))[0] for k in range(5)]
  assert len(payloads_lib._checksums) == before + 5
  for payload_id in ids:
    store.drop(payload_id)
  assert len(payloads_lib._checksums) == before
  assert payloads_lib.checksum(memoryview(b'0'), 1) is None


def test_a_frame_for_several_learners_is_made_once():
  payload, shared = memoryview(bytes(5 * CHUNK)), chunks.Shared()
  lanes = [chunks.split(payload, CHUNK, shared) for _ in range(3)]
  for frames in zip(*lanes, strict=True):
    assert len(set(map(id, frames))) == 1
  alike = list(chunks.split(memoryview(bytes(payload)), CHUNK, shared))
  large = list(chunks.split(payload, chunks.LARGE_CHUNK_BYTES, shared))
  assert alike == list(chunks.split(payload)) and large == list(chunks.split(payload, 1 << 20))


def test_frames_are_kept_up_to_a_number_of_bytes(monkeypatch):
  monkeypatch.setattr(chunks, 'SHARED_BYTES', 3 * CHUNK)
  shared, all_payloads = chunks.Shared(), [memoryview(bytes(CHUNK)) for _ in range(5)]
  for payload in all_payloads:
    list(chunks.split(payload, CHUNK, shared))
  kept_bytes = sum(len(frame) for _, frame in shared._frames.values())
  assert CHUNK < kept_bytes == shared._bytes <= 3 * CHUNK


def test_frames_of_a_payload_that_is_gone_are_dropped_and_of_no_other_one():
  shared = chunks.Shared()
  for turn in range(64):  # each may get the id of the one before
    payload = memoryview(bytes([turn]) * CHUNK)
    frames = list(chunks.split(payload, CHUNK, shared))
    assert frames == list(chunks.split(payload, CHUNK))
    assert shared._bytes <= 2 * len(frames[0]), 'of this one and the one before'
    assert len(shared._frames) <= 2


def test_a_slower_learner_gets_the_same_frames_from_a_payload_larger_than_what_is_kept(monkeypatch):
  monkeypatch.setattr(chunks, 'SHARED_BYTES', 2 * CHUNK)
  payload, shared = memoryview(bytes(range(256)) * (5 * CHUNK // 256)), chunks.Shared()
  slow = chunks.split(payload, CHUNK, shared)
  first = next(slow)
  assert [first, *slow] == list(chunks.split(payload, CHUNK, shared)) == list(chunks.split(payload))


def test_an_acknowledgement_is_no_chunk():
  frame = chunks.acknowledgement(2**40)
  assert chunks.parse_acknowledgement(frame) == 2**40
  assert clause_of_error([frame]) == 'count'
  assert [chunks.parse_acknowledgement(each) for each in (GOLDEN, next(chunks.split(b'')))] == [
    None
  ] * 2


@pytest.mark.parametrize('end', range(len(GOLDEN)))
def test_truncation_at_every_offset_is_an_error(end):
  assert clause_of_error([GOLDEN[:end]]) == ('truncated' if end < chunks.HEADER_BYTES else 'size')


@pytest.mark.parametrize('offset', range(len(GOLDEN)))
def test_every_flipped_bit_is_an_error(offset):
  for bit in range(8):
    broken = bytearray(GOLDEN)
    broken[offset] ^= 1 << bit
    clause_of_error([bytes(broken)])


@pytest.mark.parametrize(
  'clause, changes',
  [
    ('magic', {'magic': b'DLCA'}),
    ('version', {'version': 1}),
    ('version', {'header': 36}),
    ('count', {'count': 0}),
    ('count', {'count': 2}),
    ('count', {'total': 2**63}),
    ('index', {'index': 1}),
    ('size', {'total': 4}),
    ('checksum', {'crc32': 0}),
  ],
)
def test_one_error_per_clause(clause, changes):
  assert clause_of_error([frame(**changes)]) == clause


def test_a_payload_over_the_limit_is_refused_before_allocation():
  huge = frame(bytes(CHUNK), total=1 << 49, count=(1 << 49) // CHUNK)
  assert clause_of_error([huge]) == 'too_large'
  assert clause_of_error([frame(b'abc')], max_payload_bytes=2) == 'too_large'


def test_chunks_come_in_order_and_once_and_are_of_one_payload():
  first, second, third, *_ = chunks.split(bytes(5 * CHUNK))
  _, large = chunks.split(bytes(5 * CHUNK), chunks.LARGE_CHUNK_BYTES)
  _, other, *_ = chunks.split(b'\1' * (5 * CHUNK))
  assert clause_of_error([second]) == 'order'
  assert clause_of_error([first, third]) == 'order'
  assert clause_of_error([first, first]) == 'duplicate'
  assert clause_of_error([first, large]) == 'size'
  assert clause_of_error([first, other]) == 'checksum'
