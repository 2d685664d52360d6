"""How many payload bytes may be on their way at once, so that short messages do not wait for them.

Both streams of a session share a connection. What the sender hands to it waits in the buffers of
kernels and routers, and a heartbeat that comes later waits behind: on a slow link for longer than a
lease. So the receiver *acknowledges* the bytes of frames that have arrived (chunks.py), and the
sender keeps at most as many unacknowledged ones as the link carries in `QUEUE_S`. The rate of the
link is what was on its way when a frame left, divided by the time until its acknowledgement came.
"""

import collections

QUEUE_S = 1.0
LEAST_BYTES = 1 << 18  # before the rate is known, and on a link of any rate
ACK_EVERY_S = 0.05
FEW_BYTES = LEAST_BYTES // 4  # an acknowledgement costs as much as a small payload
FEW_WAIT_S = 0.25
FAST_BYTES = 1 << 24  # in QUEUE_S: on such a link a large chunk delays other messages by 62 ms


class Window:
  """The sender's half. Not thread-safe."""

  def __init__(self):
    self._bytes = LEAST_BYTES
    self._sent = self._acknowledged = 0
    self._under_way: collections.deque[tuple[int, int, float]] = collections.deque()

  @property
  def fast(self) -> bool:
    """Whether the link is known to be fast."""
    return self._bytes >= FAST_BYTES

  def takes(self, size: int) -> bool:
    """Whether a frame of so many bytes may leave; one always may."""
    under_way = self._sent - self._acknowledged
    return not under_way or under_way + size <= self._bytes

  def add(self, size: int, now_s: float) -> None:
    """A frame leaves."""
    self._sent += size
    self._under_way.append((self._sent, self._sent - self._acknowledged, now_s))

  def acknowledge(self, received: int, now_s: float) -> bool:
    """The peer has received so many bytes in all; False: no peer says that. It must be the end of a
    frame that is not acknowledged yet, so there are no more acknowledgements than frames."""
    if not self._acknowledged < received <= self._sent:
      return False
    while self._under_way and self._under_way[0][0] <= received:
      self._acknowledged, under_way, sent_s = self._under_way.popleft()
      took_s = max(now_s - sent_s, 1e-6)
      carried = int(under_way * QUEUE_S / took_s)
      # Few bytes on their way do not show what the link can carry, unless they take long.
      if took_s > QUEUE_S or carried > self._bytes:
        self._bytes = max(LEAST_BYTES, carried)
    return self._acknowledged == received


class Receipts:
  """The receiver's half: when to acknowledge which bytes. Not thread-safe."""

  def __init__(self):
    self._received = self._told = 0
    self._next_s = self._few_s = 0.0

  def add(self, size: int, now_s: float) -> bool:
    """A frame has come; returns whether it changes when the next acknowledgement is due."""
    before = self._received - self._told
    self._received += size
    if not before:
      self._few_s = now_s + FEW_WAIT_S
    return not before or before < FEW_BYTES <= before + size

  def due(self, now_s: float) -> int | None:
    """All received bytes, if it is time to acknowledge them."""
    if self.wait_s(now_s) != 0:
      return None
    self._told, self._next_s = self._received, now_s + ACK_EVERY_S
    return self._received

  def wait_s(self, now_s: float) -> float | None:
    """Seconds until the next acknowledgement is due; None: there is nothing to acknowledge."""
    waiting = self._received - self._told
    if not waiting:
      return None
    due_s = self._next_s if waiting >= FEW_BYTES else max(self._next_s, self._few_s)
    return max(0.0, due_s - now_s)
