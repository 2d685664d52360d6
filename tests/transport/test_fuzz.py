"""Decoders get bytes that a hostile peer might send, with right checksums: they take them, or raise
their own error, and allocate no more than they were granted.

For longer: scripts/fuzz.py MINUTES.
"""

import pathlib
import random
import zlib

import hypothesis
import pytest
from hypothesis import strategies as st

from diloco_jax.protocol import messages
from diloco_jax.transport import chunks, control_crc, link
from tests.transport import fuzzing

MUTANTS = {'default': 20_000, 'full': 150_000}  # of a fast decoder
MEASURED = 100  # one of so many, because measuring is slow
NAMES = list(fuzzing.targets(pathlib.Path()))


@pytest.fixture(scope='module', name='targets')
def _targets(tmp_path_factory) -> dict[str, fuzzing.Target]:
  return fuzzing.targets(tmp_path_factory.mktemp('fuzz'))


@pytest.mark.parametrize('name', NAMES)
def test_mutated_bytes_are_taken_or_refused(name, targets, counts):
  target = targets[name]
  draw = random.Random(0)
  for data in (*target.examples, *target.remembered()):
    target.run_measured(data)
  mutants = target.mutants(draw)
  for number in range(MUTANTS['full' if counts.full else 'default'] // target.slow):
    data = next(mutants)
    try:
      target.run(data) if number % MEASURED else target.run_measured(data)
    except Exception as error:
      kept = fuzzing.remember(target, data)
      raise AssertionError(f'{type(error).__name__} for the bytes of {kept}: {error}') from error


@pytest.mark.parametrize('name', NAMES)
def test_examples_are_whole(name, targets):
  assert all(map(targets[name].run, targets[name].examples))


def test_mended_bytes_reach_behind_the_checksums(targets):
  """Else the fuzzing would test nothing but checksums."""
  for target in targets.values():
    mutants, draw = [], random.Random(1)
    for data in target.mutants(draw):
      mutants.append(data)
      if len(mutants) == 300:
        break
    assert any(map(target.run, mutants)), target.name


# --- Frames of several transfers ------------------------------------------------------------------


def frame(total: int, index: int, crc32: int, size: int) -> bytes:
  """A frame that is sound in itself, of `size` zeros."""
  count = min(chunks.chunk_count(total), 2**32 - 1)
  fields = chunks._FIELDS.pack(
    chunks.MAGIC, chunks.VERSION, chunks.HEADER_BYTES, total, index, count, crc32
  )
  return fields + chunks._CHECK.pack(zlib.crc32(fields)) + bytes(size)


MIB = chunks.CHUNK_BYTES
PARTS = st.tuples(
  st.sampled_from([0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB, 2**40, 2**63, 2**64 - 1]),
  st.integers(0, 3),
)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.lists(PARTS, max_size=12))
def test_sound_frames_in_any_order_keep_within_the_grants(parts):
  limit = 2 * MIB
  receiver = chunks.Assembler(max_payload_bytes=limit)
  for total, index in parts:
    if index >= chunks.chunk_count(total):
      continue
    size = min(MIB, total - index * MIB)
    sent = min(total, index * MIB + size)
    crc32 = zlib.crc32(bytes(sent)) if total <= 3 * MIB else 0
    try:
      done = receiver.add(frame(total, index, crc32, size))
    except control_crc.WireError:
      return  # the session ends
    assert receiver._partial is None or receiver._partial.buffer_S.nbytes <= limit
    assert done is None or bytes(done.data) == bytes(total)


# --- Announcements and transfers ------------------------------------------------------------------

ARRIVALS = st.tuples(st.booleans(), st.integers(0, 6), st.sampled_from([0, 1, 64, 65, 2**63 - 1]))


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.lists(ARRIVALS, max_size=15))
def test_announcements_and_transfers_in_any_order_keep_within_the_grants(arrivals):
  most, delivered = 3, []
  buffer = link.ReceiveBuffer(64, most)
  for announced, transfer, size in arrivals:
    try:
      if announced:
        payload = messages.Payload(size_bytes=size, crc32=0)
        word = messages.Publish(
          sync=1,
          fragment=0,
          version=1,
          base_version=None,
          digest=0,
          settled_to=0,
          keep=True,
          payload=payload,
        )
        delivery = buffer.on_message(word, transfer)
      else:
        delivery = buffer.on_transfer(transfer, bytes(min(size, 64)), 0)
    except link.LinkError:
      return  # the session ends
    assert len(buffer._announced) <= most and len(buffer._arrived) <= most
    assert sum(one.payload.size_bytes for one in buffer._arrived.values()) <= 64
    if delivery is not None:
      message, data = delivery
      delivered.append(message)
      assert message.payload.size_bytes == len(data)
