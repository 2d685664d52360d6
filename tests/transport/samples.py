"""Messages whose fields no test minds, but for those that it gives."""

import zlib

from diloco_jax.protocol import messages

JOINED = messages.Joined(incarnation=1, clock=0, shard=0, cursor=0, due=(), settled=(0, 0))
CONFIRM = messages.Confirm(
  nonce=1, incarnation=1, clock=0, steps=0, tokens=0, held=(), shard=None, cursor=0
)


def join(learner: str = 'l0') -> messages.Join:
  return messages.Join(protocol=1, learner=learner, nonce=1, agreement='', host='', pid=1)


def payload(data: bytes, **changes) -> messages.Payload:
  return messages.Payload(**{'size_bytes': len(data), 'crc32': zlib.crc32(data)} | changes)


def contribution(announced: messages.Payload, **changes) -> messages.Contribution:
  """The answer to the first Pull, of fragment 0; with some changed fields."""
  fields = {'sync': 1, 'fragment': 0, 'version': 0, 'steps': 1, 'tokens_from': 0, 'tokens_to': 1}
  fields |= {'shard': 0, 'cursor': 1}
  return messages.Contribution(**fields | changes, payload=announced)


def publish(announced: messages.Payload, **changes) -> messages.Publish:
  """Version 1 of fragment 0, as a delta; with some changed fields."""
  fields = {'sync': 1, 'fragment': 0, 'version': 1, 'base_version': 0, 'digest': 0}
  fields |= {'settled_to': 0, 'keep': True}
  return messages.Publish(**fields | changes, payload=announced)
