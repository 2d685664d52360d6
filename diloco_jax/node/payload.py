"""A payload: the values of a fragment on their way between a learner and the syncer.

For a node it is opaque: it has a size, and an id (ports.Payloads). Between processes it is bytes,
which `transport/` cuts, sends and checks. Within one process (transport/in_process.py) it is an
array on the devices where it was made, uint8 or, of a whole fragment, float32; the other end
copies it to its own devices, and it never passes through the host.
"""

from typing import Any

import numpy as np

Payload = memoryview | bytes | np.ndarray | Any
"""The last is a jax.Array: a node does not import jax."""


def size_bytes(payload: Payload) -> int:
  """
  >>> size_bytes(b'abc'), size_bytes(np.zeros(3, np.float32))
  (3, 12)
  """
  return len(payload) if isinstance(payload, bytes) else payload.nbytes


def is_on_devices(payload: Payload) -> bool:
  """Whether it is an array of jax, not bytes of this host."""
  return not isinstance(payload, (memoryview, bytes, bytearray, np.ndarray))


def to_host(payload: Payload) -> memoryview:
  """Its bytes. Of an array of jax a copy; waits for the devices without holding the GIL."""
  if is_on_devices(payload):
    payload = np.asarray(payload)
  return memoryview(payload).cast('B')
