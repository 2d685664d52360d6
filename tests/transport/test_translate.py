"""Every message crosses the wire unchanged, and nothing else does."""

import dataclasses
import pathlib
import re
import types
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.protocol import messages
from diloco_jax.protocol.tape import codec
from diloco_jax.transport import control_crc, sync_pb2, translate
from tests.transport import samples

DIRECTIONS = (translate.LEARNER_TO_SYNCER, translate.SYNCER_TO_LEARNER)
CASES = [(direction, cls) for direction in DIRECTIONS for cls in direction.classes]


# What people read comes back as it was if it is printable.
_PRINTABLE = st.characters(codec='utf-8').filter(str.isprintable)
_ASCII = st.characters(min_codepoint=32, max_codepoint=126)


def ident(case):
  return f'{case[0].envelope.DESCRIPTOR.name}-{case[1].__name__}'


def values(cls, name, kind):
  """All values that a field may have on the wire."""
  if isinstance(kind, types.UnionType):
    return st.none() | values(cls, name, typing.get_args(kind)[0])
  if typing.get_origin(kind) is tuple:
    item = typing.get_args(kind)[0]
    return st.lists(values(cls, name, item), max_size=5).map(tuple)
  if dataclasses.is_dataclass(kind):
    return instances(kind)
  if kind is str:
    return st.text(_ASCII if name == 'agreement' else _PRINTABLE, max_size=15)
  if kind is bool:
    return st.booleans()
  if kind is float:
    return st.floats(allow_nan=False, allow_infinity=False)
  low, high = translate._RANGES.get((cls, name), translate._COUNT)
  return st.integers(low, high)


def instances(cls):
  return st.builds(cls, **{f.name: values(cls, f.name, f.type) for f in dataclasses.fields(cls)})


def test_every_message_of_the_protocol_has_a_translation():
  assert set(translate.LEARNER_TO_SYNCER.classes) == set(typing.get_args(messages.FromLearner))
  assert set(translate.SYNCER_TO_LEARNER.classes) == set(typing.get_args(messages.FromSyncer))
  for direction in DIRECTIONS:
    bodies = {f.message_type.name for f in direction.envelope.DESCRIPTOR.oneofs[0].fields}
    assert bodies == {cls.__name__ for cls in direction.classes}


@pytest.mark.parametrize('case', CASES, ids=ident)
def test_the_schema_has_the_fields_of_the_class(case):
  _, cls = case
  proto = getattr(sync_pb2, cls.__name__).DESCRIPTOR
  assert [f.name for f in proto.fields] == [f.name for f in dataclasses.fields(cls)]


@pytest.mark.parametrize('case', CASES, ids=ident)
def test_round_trip(case):
  direction, cls = case

  @settings(max_examples=25, deadline=None)
  @given(instances(cls), st.integers(0, 2**64 - 1))
  def check(message, transfer):
    assert direction.decode(direction.encode(message, transfer)) == (message, transfer)

  check()


def join(**changes):
  return dataclasses.replace(samples.join(), **changes)


@pytest.mark.parametrize(
  'message, clause',
  [
    (join(protocol=-1), 'range'),
    (join(pid=2**63), 'range'),
    (join(nonce=2**64), 'range'),
    (join(nonce=-1), 'range'),
    (join(learner='x' * 64), 'length'),
    (join(learner='ü' * 32), 'length'),
    (join(agreement='x' * 3073), 'length'),
    (join(agreement='{"a\x1b": 1}'), 'string'),
    (messages.Leave(reason='x' * 256), 'length'),
    (join(learner='\ud800'), 'string'),
    (join(learner=None), 'type'),
    (messages.Finish(), 'body'),
  ],
)
def test_an_unencodable_message_is_refused_before_sending(message, clause):
  with pytest.raises(control_crc.WireError) as caught:
    translate.LEARNER_TO_SYNCER.encode(message)
  assert caught.value.clause == clause


def envelope(**body):
  return sync_pb2.ControlRequest(**body).SerializeToString()


@pytest.mark.parametrize(
  'data, clause',
  [
    (b'', 'body'),
    (b'\xff', 'protobuf'),
    (b'\x08', 'protobuf'),
    (bytes.fromhex('fa0100'), 'body'),  # body 31, of some later version
    (envelope(contribution=sync_pb2.Contribution(sync=1)), 'missing'),
    (envelope(progress=sync_pb2.Progress(tokens=-1)), 'range'),
    (envelope(progress=sync_pb2.Progress(loss=float('nan'))), 'type'),
    (envelope(join=sync_pb2.Join(learner='x' * 64)), 'length'),
    (envelope(confirm=sync_pb2.Confirm(held=[sync_pb2.Held()] * 4097)), 'length'),
    (envelope(confirm=sync_pb2.Confirm(held=[sync_pb2.Held(version=-2)])), 'range'),
    (envelope(contribution=sync_pb2.Contribution(payload={'size_bytes': -1})), 'range'),
    (b'\x12\x03\x12\x01\xff', 'protobuf'),  # learner is no UTF-8
  ],
)
def test_hostile_bytes_are_a_typed_error(data, clause):
  with pytest.raises(control_crc.WireError) as caught:
    translate.LEARNER_TO_SYNCER.decode(data)
  assert caught.value.clause == clause


def test_text_of_a_peer_arrives_on_one_printable_line():
  forged = messages.Leave(reason='done\r\n[syncer] all good\x1b[2J\u202e')
  data = translate.LEARNER_TO_SYNCER.encode(forged)
  message, _ = translate.LEARNER_TO_SYNCER.decode(data)
  assert message.reason == r'done\r\n[syncer] all good\x1b[2J\u202e'
  long = messages.Refused(code='MISMATCH', text='a\n' * 1500, retry_ns=None)
  message, _ = translate.SYNCER_TO_LEARNER.decode(translate.SYNCER_TO_LEARNER.encode(long))
  text = message.text
  assert text.isprintable() and len(text) == 2000 and text.endswith('...')


def test_the_receiver_sets_how_many_items_it_takes():
  held = (messages.Held(version=0, digest=1),) * 3
  confirm = dataclasses.replace(samples.CONFIRM, held=held)
  data = translate.LEARNER_TO_SYNCER.encode(confirm)
  assert translate.LEARNER_TO_SYNCER.decode(data, 3) == (confirm, 0)
  with pytest.raises(control_crc.WireError, match='length 3, at most 2'):
    translate.LEARNER_TO_SYNCER.decode(data, 2)


def longest(cls, fragments):
  """A message of that class with every field as long as a learner may send it."""

  def value(name, kind):
    if isinstance(kind, types.UnionType):
      return value(name, typing.get_args(kind)[0])
    if typing.get_origin(kind) is tuple:
      return (value(name, typing.get_args(kind)[0]),) * fragments
    if dataclasses.is_dataclass(kind):
      return longest(kind, fragments)
    if kind is str:
      return ('"' if name == 'agreement' else '\x1b') * translate.MAX_STRING_BYTES[name]
    return kind(translate._RANGES.get((cls, name), translate._COUNT)[1])

  return cls(**{f.name: value(f.name, f.type) for f in dataclasses.fields(cls)})


@pytest.mark.parametrize('cls', translate.LEARNER_TO_SYNCER.classes)
def test_a_received_message_takes_little_of_a_tape(cls):
  direction, fragments = translate.LEARNER_TO_SYNCER, 24
  message, _ = direction.decode(direction.encode(longest(cls, fragments)), fragments)
  assert len(codec.encode(message)) < (8 if cls is messages.Join else 4) << 10


def test_the_checked_in_stubs_are_those_of_the_proto():
  proto = pathlib.Path(translate.__file__).parent / 'diloco/v1/sync.proto'
  text = re.sub(r'//.*', '', proto.read_text())
  written = {}
  for name, body in re.findall(r'message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}', text):
    written[name] = {f: int(n) for f, n in re.findall(r'(\w+) = (\d+);', body)}
  stubs = {
    name: {f.name: f.number for f in message.fields}
    for name, message in sync_pb2.DESCRIPTOR.message_types_by_name.items()
  }
  assert written == stubs, 'run scripts/generate_stubs.sh'
