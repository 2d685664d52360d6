"""How many bytes have crossed a transport: messages, chunk headers and payloads, both lanes."""

import threading


class Traffic:
  """Counters of one end of a transport, over all its sessions. Thread-safe."""

  def __init__(self):
    self._lock = threading.Lock()
    self.sent_bytes = 0
    self.received_bytes = 0

  def add(self, sent_bytes: int = 0, received_bytes: int = 0) -> None:
    with self._lock:
      self.sent_bytes += sent_bytes
      self.received_bytes += received_bytes
