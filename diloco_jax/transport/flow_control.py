"""How many payload bytes may be on their way at once, so that short messages do not wait for them.

Both streams of a session share a connection. What the sender hands to it waits in the buffers of
kernels and routers, and a heartbeat that comes later waits behind: on a slow link for longer than a
lease. So the receiver *acknowledges* the bytes of frames that have arrived (chunks.py), and the
sender keeps at most as many unacknowledged ones as the link carries in the shortest time from a
frame to its acknowledgement and `SPARE_S`, or two frames if that is more, and never more than in
`QUEUE_S`. The rate of the link is what was not acknowledged when a frame left, divided by the time
from the acknowledgement before until that of the frame.

Frames that leave all at once keep every heartbeat back until the link has carried them. So they
leave at `PACE` times that rate at most, and heartbeats leave between them.
"""

import collections
import math

QUEUE_S = 1.0
SPARE_S = 0.2  # an acknowledgement may come ACK_EVERY_S late, and the one before, too
FORGET = 1 / 4096  # the share of a second by which the shortest time grows in each
PACE = 2
LEAST_BYTES = 1 << 18  # before the rate is known, and on a link of any rate
FEW_FRAMES = 2  # at least, if the link carries them in QUEUE_S
ACK_EVERY_S = 0.05
FEW_BYTES = LEAST_BYTES // 4  # an acknowledgement costs as much as a small payload
FEW_WAIT_S = 0.25
FAST_BYTES_PER_S = 1 << 24  # on such a link a large chunk delays other messages by 63 ms


class Window:
  """The sender's half. Not thread-safe."""

  def __init__(self):
    self._bytes_per_s = LEAST_BYTES / QUEUE_S
    self._sent = self._acknowledged = 0
    self._shortest_s = QUEUE_S
    self._last_size, self._last_s = 0, 0.0  # of the last frame
    # The last acknowledgement, or the first frame after everything was acknowledged.
    self._since_s = 0.0
    self._under_way: collections.deque[tuple[int, int, float, float]] = collections.deque()

  @property
  def _queue_s(self) -> float:
    return min(QUEUE_S, self._shortest_s + SPARE_S)

  @property
  def _bytes(self) -> int:
    least = self._bytes_per_s * self._queue_s
    frames = math.ceil(least / LEAST_BYTES)  # so that one more chunk than so far fits
    # With one of them a link is idle until the acknowledgement has come back through what is
    # on its way in the other direction.
    few = min(FEW_FRAMES, int(self._bytes_per_s * QUEUE_S / LEAST_BYTES))
    return max(frames, few) * LEAST_BYTES

  @property
  def fast(self) -> bool:
    """Whether the link is known to be fast."""
    return self._bytes_per_s >= FAST_BYTES_PER_S

  def has_room(self, size: int) -> bool:
    """Whether a frame of so many bytes may leave; one always may."""
    under_way = self._sent - self._acknowledged
    return not under_way or under_way + size <= self._bytes

  def wait_s(self, now_s: float) -> float:
    """Seconds until the next frame may leave."""
    spacing_s = self._last_size / (PACE * self._bytes_per_s)
    return max(0.0, self._last_s + spacing_s - now_s)

  def add(self, size: int, now_s: float) -> None:
    """A frame leaves."""
    if self._sent == self._acknowledged:
      self._since_s = now_s
    self._sent += size
    self._last_size, self._last_s = size, now_s
    under_way = self._sent - self._acknowledged
    self._under_way.append((self._sent, under_way, now_s, self._since_s))

  def acknowledge(self, received: int, now_s: float) -> bool:
    """The peer has received so many bytes in all. False: it cannot have, since they must end with a
    frame that is not acknowledged yet; so there are no more acknowledgements than frames."""
    if not self._acknowledged < received <= self._sent:
      return False
    self._shortest_s += FORGET * (now_s - self._since_s)
    self._since_s = now_s
    while self._under_way and self._under_way[0][0] <= received:
      self._acknowledged, under_way, sent_s, since_s = self._under_way.popleft()
      took_s = now_s - sent_s
      self._shortest_s = min(self._shortest_s, took_s)
      carried = under_way / max(now_s - since_s, 1e-6)
      # Few bytes on their way do not show what the link can carry, unless they take long.
      if took_s > QUEUE_S or carried > self._bytes_per_s:
        self._bytes_per_s = carried
    return self._acknowledged == received


class Receipts:
  """The receiver's half: when to acknowledge which bytes. Not thread-safe."""

  def __init__(self):
    self._received = self._acknowledged = 0
    self._next_s = self._few_s = 0.0

  def add(self, size: int, now_s: float) -> bool:
    """A frame has come; returns whether it changes when the next acknowledgement is due."""
    before = self._received - self._acknowledged
    self._received += size
    if not before:
      self._few_s = now_s + FEW_WAIT_S
    return not before or before < FEW_BYTES <= before + size

  def due(self, now_s: float) -> int | None:
    """All received bytes, if it is time to acknowledge them."""
    if self.wait_s(now_s) != 0:
      return None
    self._acknowledged = self._received
    self._next_s = now_s + ACK_EVERY_S
    return self._received

  def wait_s(self, now_s: float) -> float | None:
    """Seconds until the next acknowledgement is due; None: there is nothing to acknowledge."""
    waiting = self._received - self._acknowledged
    if not waiting:
      return None
    due_s = self._next_s if waiting >= FEW_BYTES else max(self._next_s, self._few_s)
    return max(0.0, due_s - now_s)
