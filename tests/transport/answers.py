"""A learner's answer to a Pull, for tests of its way."""

import zlib

from diloco_jax.protocol import messages


def payload(data: bytes, **changes) -> messages.Payload:
  return messages.Payload(**{'size_bytes': len(data), 'crc32': zlib.crc32(data)} | changes)


def contribution(announced: messages.Payload, **changes) -> messages.Contribution:
  """The answer to the first Pull, of fragment 0; with some changed fields."""
  fields = {
    'sync': 1,
    'fragment': 0,
    'version': 0,
    'steps': 1,
    'tokens_from': 0,
    'tokens_to': 1,
    'shard': 0,
    'cursor': 1,
  }
  return messages.Contribution(**fields | changes, payload=announced)
