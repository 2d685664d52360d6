"""The pure link: the order of sending, and the pairing of messages with payloads."""

import zlib

import pytest

from diloco_jax.protocol import messages
from diloco_jax.transport import link
from tests.transport import samples


def split(payload):
  """Frames of two bytes."""
  data = bytes(payload)
  for start in range(0, max(1, len(data)), 2):
    yield data[start : start + 2]


def send_queue(max_bytes=100, max_messages=10):
  return link.SendQueue(split, max_bytes, max_messages)


def publish(data, fragment=0, version=1, base=0):
  return samples.publish(
    samples.payload(data), sync=version, fragment=fragment, version=version, base_version=base
  )


def pull(sync):
  return messages.Pull(sync=sync, fragment=0, now=True)


def control_of(box):
  return list(iter(box.next_control, None))


def transfers_of(box):
  """(version, frames) of all transfers, in the order of sending."""
  out = []
  while (frames := box.next_transfer()) is not None:
    [(message, _)] = control_of(box)
    out.append((message.version, list(frames)))
  return out


def test_control_never_waits_for_bulk():
  box = send_queue()
  box.push(publish(b'abcdef'), b'abcdef')
  frames = box.next_transfer()
  next(frames)
  box.push(messages.Heartbeat())
  assert control_of(box) == [(publish(b'abcdef'), 1), (messages.Heartbeat(), 0)]
  assert list(frames) == [b'cd', b'ef']


def test_both_lanes_are_first_in_first_out_and_a_transfer_is_announced_when_it_begins():
  box = send_queue()
  for k in range(4):
    box.push(pull(k))
    box.push(publish(bytes([k]), fragment=k, version=k), bytes([k]))
  assert control_of(box) == [(pull(k), 0) for k in range(4)]
  list(box.next_transfer())
  assert control_of(box) == [(publish(b'\0', version=0), 1)]
  assert transfers_of(box) == [(k, [bytes([k])]) for k in range(1, 4)]
  assert box.next_transfer() is None


def test_a_whole_publish_replaces_the_unsent_older_ones_of_its_fragment_only():
  box = send_queue()
  box.push(publish(b'1', version=1, base=None), b'1')
  box.push(publish(b'2', version=2, base=1), b'2')
  box.push(publish(b'8', fragment=1, version=2, base=1), b'8')
  box.push(publish(b'3', version=3, base=None), b'3')
  assert transfers_of(box) == [(2, [b'8']), (3, [b'3'])]
  assert box.queued_bytes == 0


def test_a_transfer_that_has_begun_is_not_replaced():
  box = send_queue()
  box.push(publish(b'1234', version=1), b'1234')
  frames = box.next_transfer()
  box.push(publish(b'3', version=3, base=None), b'3')
  assert list(frames) == [b'12', b'34']
  assert [m.version for m, _ in control_of(box)] == [1]
  assert [version for version, _ in transfers_of(box)] == [3]


def test_waiting_payload_bytes_are_bounded():
  box = send_queue(max_bytes=5)
  box.push(publish(b'123'), b'123')
  box.next_transfer()
  box.push(publish(b'45', version=2, base=1), b'45')
  assert box.queued_bytes == 5
  with pytest.raises(link.LinkError, match='5 payload bytes wait.* 1 more .* over the 5'):
    box.push(publish(b'6', version=3, base=2), b'6')
  box.next_transfer()  # says that the transfer before has been sent
  box.push(publish(b'6', version=3, base=2), b'6')


def test_waiting_messages_are_bounded():
  box = send_queue(max_messages=2)
  box.push(pull(1)), box.push(pull(2))
  with pytest.raises(link.LinkError, match='2 messages wait'):
    box.push(pull(3))


def progress(clock):
  return messages.Progress(clock=clock, steps=clock, tokens=clock, step_ns=1, finished=False)


def test_a_waiting_progress_is_replaced_by_the_next_one_but_keeps_its_place():
  box = send_queue(max_messages=3)
  for clock in range(5):
    box.push(progress(clock))
  box.push(pull(1))
  for clock in range(5, 9):
    box.push(progress(clock))
  assert [message for message, _ in control_of(box)] == [progress(4), pull(1), progress(8)]


def test_clear_drops_all_messages_and_payloads():
  box = send_queue()
  box.push(pull(1)), box.push(publish(b'1'), b'1')
  box.clear()
  assert (box.next_control(), box.next_transfer(), box.queued_bytes) == (None, None, 0)


# --- Incoming -------------------------------------------------------------------------------------


def receive_buffer(max_payload_bytes=10, max_announced=2):
  return link.ReceiveBuffer(max_payload_bytes, max_announced)


def arrive(box, transfer, data):
  return box.on_transfer(transfer, data, zlib.crc32(data))


def test_announcement_and_transfer_meet_in_either_order_and_no_other_message_waits_for_them():
  box = receive_buffer()
  assert box.on_message(publish(b'abc'), 1) is None
  assert box.on_message(pull(1), 0) == (pull(1), None)
  assert arrive(box, 1, b'abc') == (publish(b'abc'), b'abc')
  assert arrive(box, 2, b'de') is None
  assert box.on_message(publish(b'de'), 2) == (publish(b'de'), b'de')


@pytest.mark.parametrize('data', [b'abd', b'ab', b''])
def test_a_transfer_other_than_the_announced_one_is_refused(data):
  box = receive_buffer()
  box.on_message(publish(b'abc'), 1)
  with pytest.raises(link.LinkError, match='announces'):
    arrive(box, 1, data)


@pytest.mark.parametrize('message, transfer', [(pull(1), 3), (publish(b'abc'), 0)])
def test_only_a_message_with_payload_has_a_transfer_number(message, transfer):
  with pytest.raises(link.LinkError, match=f'names transfer {transfer}'):
    receive_buffer().on_message(message, transfer)


def test_transfer_numbers_grow():
  box = receive_buffer()
  box.on_message(publish(b'abc'), 5)
  with pytest.raises(link.LinkError, match='transfer 5 is announced after transfer 5'):
    box.on_message(publish(b'abc'), 5)
  arrive(box, 5, b'abc')
  for transfer in (5, 4):
    with pytest.raises(link.LinkError, match='came twice'):
      arrive(box, transfer, b'abc')


def test_the_memory_for_one_peer_is_bounded():
  box = receive_buffer(max_payload_bytes=3, max_announced=2)
  with pytest.raises(link.LinkError, match='4 bytes is announced, at most 3'):
    box.on_message(publish(b'abcd'), 1)
  arrive(box, 1, b'ab')
  assert box.has_room(2, 1) and not box.has_room(2, 2)
  with pytest.raises(link.LinkError, match='unannounced'):
    arrive(box, 2, b'bc')
  arrive(box, 3, b'')
  with pytest.raises(link.LinkError, match='unannounced'):
    arrive(box, 4, b'')
  box.on_message(publish(b'a'), 5), box.on_message(publish(b'a'), 6)
  with pytest.raises(link.LinkError, match='have not come'):
    box.on_message(publish(b'a'), 7)
