"""Holds array bytes between transport and work, each under an integer payload id.

Machines see payload ids only. The store copies nothing: the owner must not change the bytes later.
"""

import threading

from isal import isal_zlib

from diloco_jax.node import ports
from diloco_jax.protocol import messages

Buffer = memoryview | bytes


class PayloadStore:
  """The port `node.ports.Payloads` as a dictionary; safe to use from any thread."""

  def __init__(self):
    self._lock = threading.Lock()
    self._kept: dict[int, Buffer] = {}
    self._last = 0

  def put(self, data: Buffer) -> int:
    """Keeps `data` (no copy) and returns a new payload id."""
    with self._lock:
      self._last += 1
      self._kept[self._last] = data
      return self._last

  def get(self, payload_id: int) -> Buffer:
    with self._lock:
      self._check(payload_id)
      return self._kept[payload_id]

  def drop(self, payload_id: int) -> None:
    with self._lock:
      self._check(payload_id)
      del self._kept[payload_id]

  def __len__(self) -> int:
    with self._lock:
      return len(self._kept)

  def _check(self, payload_id: int) -> None:
    # A second drop is a bug of the caller; this check reports it at once.
    if payload_id not in self._kept:
      raise KeyError(
        f'no payload has id {payload_id}: of {self._last} put, {len(self._kept)} '
        'are kept; it was dropped already or never put'
      )


def keep(payloads: ports.Payloads, data: Buffer) -> tuple[int, messages.Payload]:
  """Keeps bytes to send; returns their payload id and what announces them."""
  view = memoryview(data).cast('B')
  announced = messages.Payload(size_bytes=view.nbytes, crc32=isal_zlib.crc32(view))
  return payloads.put(view), announced
