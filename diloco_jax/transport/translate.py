"""Translates every message of the machines to protobuf and back, strictly.

The proto has one message per class of `protocol/messages.py` with the same field names, so one
small reader and one small writer, driven by the annotations of the classes, serve all classes. Both
ends check these rules, which protobuf does not, before encoding and after decoding:

  range     integers are in [0, 2^53], `Held.version` may be -1, nonces and digests are in
            [0, 2^64), checksums in [0, 2^32); other numbers are finite
  length    strings have at most the UTF-8 bytes of `MAX_STRING_BYTES`, tuples at most `MAX_ITEMS`;
            of a learner, as many as the run has fragments
  missing   a nested message must be present (protobuf would invent one of zeros)
  type      a field holds a value of its type; a string is Unicode text (`string`)
  body      exactly one known body per envelope
  protobuf  the bytes are a protobuf of this schema

`decode` escapes what is not printable in every text that people may read (protocol/printable.py).
Ids and agreements are compared, not read, and stay as they are.
"""

import dataclasses
import functools
import math
import re
import types
import typing
from typing import Any

from google.protobuf import message as protobuf

from diloco_jax.protocol import messages, printable
from diloco_jax.transport import control_crc, sync_pb2

MAX_ITEMS = 4096  # more than the fragments of any model
MAX_STRING_BYTES = {
  'learner': 63,
  'run': 63,
  'code': 63,
  'doing': 63,
  'reason': 255,
  'error': 1 << 10,
  'host': 255,
  'agreement': 3 << 10,
  'text': 1 << 12,
}
_COMPARED = ('learner', 'agreement')
_TEXT_CHARS = 2000  # of a refusal, which may show several differences

_COUNT = (0, 2**53)
_RANGES = {
  (messages.Payload, 'crc32'): (0, 2**32 - 1),
  (messages.Join, 'nonce'): (0, 2**64 - 1),
  (messages.Confirm, 'nonce'): (0, 2**64 - 1),
  (messages.Held, 'digest'): (0, 2**64 - 1),
  (messages.Held, 'version'): (-1, 2**53),
  (messages.Publish, 'digest'): (0, 2**64 - 1),
}


@dataclasses.dataclass(frozen=True)
class Direction:
  """One direction of the Control stream: its envelope and the messages that it may carry."""

  envelope: type[protobuf.Message]
  classes: tuple[type, ...]

  def encode(self, message: messages.Message, transfer_id: int = 0) -> bytes:
    """Returns the serialised envelope. Raises WireError if a value breaks a rule above."""
    if type(message) not in self.classes:
      raise control_crc.WireError(
        'body',
        f'{type(message).__name__} is no body of {self._name}; its bodies are '
        f'{", ".join(c.__name__ for c in self.classes)}',
      )
    envelope = self.envelope(transfer_id=transfer_id)
    body = getattr(envelope, _body_name(type(message)))
    body.SetInParent()  # marks a message without fields as present
    _write(body, message)
    return envelope.SerializeToString()

  def decode(self, data: bytes, max_items: int = MAX_ITEMS) -> tuple[messages.Message, int]:
    """Returns (message, transfer id) of a serialised envelope. Raises WireError for other bytes,
    and for a tuple of more than `max_items`."""
    try:
      envelope = self.envelope.FromString(data)
    except protobuf.DecodeError as error:
      text = f'{len(data)} bytes are no {self._name} ({error})'
      raise control_crc.WireError('protobuf', text) from error
    name = envelope.WhichOneof('body')
    if name is None:
      raise control_crc.WireError(
        'body',
        f'{self._name} of {len(data)} bytes has no known body of protocol version '
        f'{messages.PROTOCOL_VERSION}',
      )
    cls = next(cls for cls in self.classes if _body_name(cls) == name)
    return _read(cls, getattr(envelope, name), max_items), envelope.transfer_id

  @property
  def _name(self) -> str:
    return self.envelope.DESCRIPTOR.name


LEARNER_TO_SYNCER = Direction(sync_pb2.ControlRequest, typing.get_args(messages.FromLearner))
SYNCER_TO_LEARNER = Direction(sync_pb2.ControlResponse, typing.get_args(messages.FromSyncer))


def _body_name(cls: type) -> str:
  return re.sub(r'(?<!^)(?=[A-Z])', '_', cls.__name__).lower()


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, Any, bool], ...]:
  """(name, type, optional) of each field of a message class."""
  fields = []
  for field in dataclasses.fields(cls):
    optional = isinstance(field.type, types.UnionType)  # of a type and None
    fields.append(
      (field.name, typing.get_args(field.type)[0] if optional else field.type, optional)
    )
  return tuple(fields)


def _write(proto: protobuf.Message, message: Any) -> None:
  for name, kind, optional in _fields(type(message)):
    value = getattr(message, name)
    if optional and value is None:
      continue
    if typing.get_origin(kind) is tuple:
      for item in _checked(type(message), name, value):
        if dataclasses.is_dataclass(item):
          _write(getattr(proto, name).add(), item)
        else:
          getattr(proto, name).append(item)
    elif dataclasses.is_dataclass(kind):
      getattr(proto, name).SetInParent()
      _write(getattr(proto, name), value)
    else:
      setattr(proto, name, _checked(type(message), name, value))


def _read(cls: type, proto: protobuf.Message, max_items: int) -> Any:
  fields = _fields(cls)
  return cls(**{field[0]: _read_field(cls, proto, *field, max_items) for field in fields})


def _read_field(
  cls: type, proto: protobuf.Message, name: str, kind: Any, optional: bool, max_items: int
) -> Any:
  if optional and not proto.HasField(name):
    return None
  value = getattr(proto, name)
  if typing.get_origin(kind) is tuple:
    item = typing.get_args(kind)[0]
    # The count comes first, so that a peer cannot make this end build items that it will refuse.
    _check_length(cls, name, len(value), max_items)
    nested = dataclasses.is_dataclass(item)
    items = (_read(item, v, max_items) for v in value) if nested else value
    return _checked(cls, name, tuple(items))
  if dataclasses.is_dataclass(kind):
    if not proto.HasField(name):
      raise control_crc.WireError('missing', f'{cls.__name__} came without its {name}')
    return _read(kind, value, max_items)
  value = _checked(cls, name, value)
  if kind is str and name not in _COMPARED:
    return printable.printable(value, _TEXT_CHARS if name == 'text' else printable.MOST_CHARS)
  return value


def _checked(cls: type, name: str, value: Any) -> Any:
  """Returns `value` if it keeps the rules of this field."""
  match value:
    case bool():
      pass
    case int():
      _check_range(cls, name, value)
    case float() if math.isfinite(value):
      pass
    case str():
      _check_string(cls, name, value)
    case tuple():
      _check_length(cls, name, len(value), MAX_ITEMS)
      for item in value:
        if isinstance(item, int):
          _check_range(cls, name, item)
    case _:
      raise control_crc.WireError('type', f'{cls.__name__}.{name} cannot be {value!r}')
  return value


def _check_range(cls: type, name: str, value: int) -> None:
  low, high = _RANGES.get((cls, name), _COUNT)
  if not low <= value <= high:
    raise control_crc.WireError(
      'range', f'{cls.__name__}.{name} is {value}, outside [{low}, {high}]'
    )


def _check_string(cls: type, name: str, value: str) -> None:
  try:
    length = len(value.encode())
  except UnicodeEncodeError as error:
    text = f'{cls.__name__}.{name} is no Unicode text: {error}'
    raise control_crc.WireError('string', text) from error
  _check_length(cls, name, length, MAX_STRING_BYTES[name])
  if name == 'agreement' and not (value.isascii() and value.isprintable()):
    raise control_crc.WireError('string', f'{cls.__name__}.{name} is no printable ASCII')


def _check_length(cls: type, name: str, length: int, limit: int) -> None:
  if length > limit:
    raise control_crc.WireError(
      'length', f'{cls.__name__}.{name} has length {length}, at most {limit}'
    )
