"""How many bytes may be on their way at once: as many as the link carries in a second."""

import collections
import itertools

import pytest

from diloco_jax.transport import chunks, flow_control

FRAME = 1 << 16


def carry(window: flow_control.Window, rate: float, latency_s: float, frames: int) -> float:
  """Sends frames over a link of so many bytes a second, and acknowledges each when it arrives.
  Returns the longest time that a byte waited for the link."""
  now_s = free_s = longest_s = 0.0
  arrivals: list[tuple[float, int]] = []
  sent = 0
  for _ in range(frames):
    while not window.has_room(FRAME):
      arrived_s, received = arrivals.pop(0)
      now_s = max(now_s, arrived_s)
      assert window.acknowledge(received, now_s)
    window.add(FRAME, now_s)
    sent += FRAME
    longest_s = max(longest_s, free_s - now_s)
    free_s = max(free_s, now_s) + FRAME / rate
    arrivals.append((free_s + latency_s, sent))
  return longest_s


@pytest.mark.parametrize('rate', [20_000, 250_000, 10_000_000])
@pytest.mark.parametrize('latency_s', [0.001, 0.2])
def test_no_byte_waits_much_longer_than_a_second(rate, latency_s):
  least_s = flow_control.LEAST_BYTES / rate
  assert carry(flow_control.Window(), rate, latency_s, 300) <= max(
    1.1 * flow_control.QUEUE_S, least_s
  )


def test_a_link_that_has_become_slow_gets_less():
  window = flow_control.Window()
  carry(window, 100_000_000, 0.01, 2_000)
  assert window.fast
  window = _copy_idle(window)
  carry(window, 250_000, 0.01, 1_000)
  assert not window.fast and window._bytes <= 1.2 * 250_000 * flow_control.QUEUE_S


@pytest.mark.parametrize('rate', [10_000_000, 20_000_000, 100_000_000])
@pytest.mark.parametrize('latency_s', [0.001, 0.1])
def test_heartbeats_arrive_between_the_frames_of_large_payloads(rate, latency_s):
  """Payloads of 32 MiB with pauses between them, a heartbeat every 5 ms, one link for both."""
  window, receipts = flow_control.Window(), flow_control.Receipts()
  now_s = free_s = 0.0
  left, beats, arriving, acknowledging = 1 << 25, [], collections.deque(), collections.deque()
  while now_s < 10:
    now_s += 0.001
    while arriving and arriving[0][0] <= now_s:
      receipts.add(arriving.popleft()[1], now_s)
    if (received := receipts.due(now_s)) is not None:
      acknowledging.append((now_s + latency_s, received))
    while acknowledging and acknowledging[0][0] <= now_s:
      window.acknowledge(acknowledging.popleft()[1], now_s)
    size = chunks.LARGE_CHUNK_BYTES if window.fast else chunks.CHUNK_BYTES
    if left > 0 and window.has_room(size) and not window.wait_s(now_s):
      window.add(size, now_s)
      left, free_s = left - size, max(free_s, now_s) + size / rate
      arriving.append((free_s + latency_s, size))
    elif left <= 0 and not arriving and not acknowledging:
      left = 1 << 25
    if int(now_s * 1000) % 5 == 0:
      beats.append(max(free_s, now_s) + latency_s)
  gaps = [after - before for before, after in itertools.pairwise(beats)]
  assert max(gaps) < 0.07
  assert window._bytes >= rate * (2 * latency_s + flow_control.ACK_EVERY_S)


def _copy_idle(window: flow_control.Window) -> flow_control.Window:
  """The same window once everything is acknowledged."""
  fresh = flow_control.Window()
  fresh._bytes_per_s, fresh._shortest_s = window._bytes_per_s, window._shortest_s
  return fresh


def test_one_frame_may_always_leave_and_each_is_acknowledged_once():
  window = flow_control.Window()
  assert window.has_room(1 << 40) and not window.acknowledge(0, 0.0)
  for _ in range(3):
    window.add(FRAME, 0.0)
  assert not window.has_room(1 << 40) and window.acknowledge(2 * FRAME, 1.0)
  for received in (2 * FRAME, FRAME, 2 * FRAME + 1, 3 * FRAME + 1):
    assert not window.acknowledge(received, 1.0)
  assert window.acknowledge(3 * FRAME, 1.0) and window.has_room(1 << 40)


def test_receipts_are_sent_at_most_so_often():
  receipts = flow_control.Receipts()
  assert receipts.due(0.0) is None and receipts.wait_s(0.0) is None
  assert receipts.add(flow_control.FEW_BYTES, 0.0) and not receipts.add(2, 0.0)
  assert receipts.due(0.0) == flow_control.FEW_BYTES + 2
  assert receipts.add(flow_control.FEW_BYTES, 0.0)
  assert receipts.due(0.0) is None and receipts.wait_s(0.0) == flow_control.ACK_EVERY_S
  assert receipts.due(flow_control.ACK_EVERY_S) == 2 * flow_control.FEW_BYTES + 2


def test_few_bytes_wait_for_more():
  receipts = flow_control.Receipts()
  assert receipts.add(1, 1.0) and not receipts.add(1, 1.1)
  assert receipts.due(1.1) is None and receipts.wait_s(1.0) == flow_control.FEW_WAIT_S
  assert receipts.add(flow_control.FEW_BYTES, 1.2)
  assert receipts.due(1.2) == flow_control.FEW_BYTES + 2
  assert receipts.add(1, 2.0)
  assert receipts.due(2.0 + flow_control.FEW_WAIT_S) == flow_control.FEW_BYTES + 3
