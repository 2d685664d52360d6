"""A payload: the values of a fragment on their way between a learner and the syncer.

For a node it is opaque: it has a size, and an id (ports.Payloads). Between processes it is bytes,
which `transport/` cuts, sends and checks. Within one process (transport/in_process.py) it is an
array on the devices where it was made, uint8 or, of a whole fragment, float32; the other end
copies it to its own devices, and it never passes through the host.
"""

from typing import Any

Payload = memoryview | bytes | Any
"""The last is an array, of numpy or of jax: a node imports neither."""


def size_bytes(payload: Payload) -> int:
  """
  >>> size_bytes(b'abc'), size_bytes(memoryview(b'abc'))
  (3, 3)
  """
  return len(payload) if isinstance(payload, bytes) else payload.nbytes


def is_on_devices(payload: Payload) -> bool:
  """Whether it is an array of jax, not bytes of this host."""
  return hasattr(payload, 'sharding')
