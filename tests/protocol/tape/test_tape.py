"""Tapes: the codec is total and strict, damage is found, a divergence is shown with its context."""

import dataclasses
import hashlib
import inspect
import json
import pathlib
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.verification.replay import machines as replay_machines

GOLDEN = pathlib.Path(__file__).resolve().parent / 'golden'
MACHINES = (syncer_machine.SyncerMachine, learner_machine.LearnerMachine)
# Parts of messages, never sent alone.
PARTS = {messages.Payload, messages.Held, actions.Participant}


def config(**settings: Any) -> config_lib.ProtocolConfig:
  usual = {'learners': 2, 'fragments': 2, 'period': 4, 'overlap': 1, 'quorum': 2}
  return config_lib.ProtocolConfig(**usual | {'total_steps': 20} | settings)


def start(**settings: Any) -> tape_lib.Start:
  identity = connection.Identity(learner='l0', nonce=1, agreement='{}', host='h', pid=1)
  usual = {'role': 'learner', 'node': 'l0', 'digests': (5, 2**64 - 1), 'identity': identity}
  return tape_lib.Start(**usual | {'config': config()} | settings)


def received(message: messages.Message) -> events.Received:
  return events.Received(session=1, message=message)


_TIMES = {'step_ns': 1, 'data_ns': 0, 'saving_ns': 0, 'loss': None}
EVENTS = (
  events.Wake(),
  events.Connected(session=1),
  received(messages.Offer(run='r0', incarnation=1)),
  received(messages.Joined(incarnation=1, clock=0, shard=0, cursor=0, due=(), settled=(0, 0))),
  *[events.StepDone(tokens=5, step_ns=9)] * 3,
  events.Stop(reason='enough'),
  events.StepDone(tokens=5, step_ns=9),
  events.SaveDone(clock=4),
)


def recorded(segments: tuple[int, ...] = (), crash: bool = False) -> list[bytes]:
  """The tape of a short learner process; a new segment before each of those turns."""
  writer = tape_lib.Writer(start(), 'digest', 'commit', {'python': '3'})
  machine, lines = start().make(), [writer.header()]
  for time, event in enumerate(EVENTS):
    if time in segments:
      lines.append(writer.header())
    lines.append(writer.turn(time, event, machine.handle(time, event)))
  if crash:
    wrong = events.MergeDone(sync=1, fragment=0, payload_id=None, payload=None, digest=1)
    with pytest.raises(TypeError) as raised:
      start().make().handle(99, wrong)
    turn = {'index': len(EVENTS) - 1, 'now_ns': 99, 'event': json.loads(tape_lib.encode(wrong))}
    error = tape_lib.describe(raised.value)
    lines[-1] = tape_line_after(lines[-2], 'Crash', **turn, error=error)
  return lines


# --- The chain as docs/simulator.md and tape.py describe it, implemented a second time ------------


def hash_of(line: bytes) -> str:
  return json.loads(line)['hash']


def tape_line_after(previous: bytes, kind: str, **fields: Any) -> bytes:
  return sealed(hash_of(previous), {'kind': kind, **fields})


def sealed(previous: str, data: dict) -> bytes:
  body = json.dumps(data, separators=(',', ':'))[:-1]
  digest = hashlib.sha256((previous + body).encode()).hexdigest()
  return f'{body},"hash":"{digest}"}}\n'.encode()


def edited(lines: list[bytes], number: int, edit: Any) -> list[bytes]:
  """The tape with one line edited and every hash from there on computed again."""
  out = list(lines)
  for index in range(number, len(lines)):
    data = json.loads(lines[index])
    del data['hash']
    if index == number:
      edit(data)
    out[index] = sealed(hash_of(out[index - 1]) if index else tape_lib.GENESIS, data)
  return out


# --- Codec ----------------------------------------------------------------------------------------


def classes(module: types.ModuleType) -> list[type]:
  """The dataclasses of a module, in its order."""
  return [
    cls
    for cls in vars(module).values()
    if inspect.isclass(cls) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
  ]


EVERY_CLASS = [
  *classes(events),
  *classes(actions),
  *classes(messages),
  config_lib.ProtocolConfig,
  connection.Identity,
  tape_lib.Start,
  tape_lib.Header,
  tape_lib.Record,
  tape_lib.Crash,
]
SAMPLES = {
  int: [0, -(2**80)],
  bool: [True, False],
  str: ['', 'a"\\\n\u00fc\U0001f600\ud800,"hash":'],
  Any: [{'a': [1, None, 'b']}],
  types.NoneType: [None],
  dict[str, Any]: [{'z': {'b': 1}, 'a': [True, 2.5]}],
}


def samples(hint: Any) -> list[Any]:
  """Values of a type; of a dataclass enough to cover every choice of every field."""
  if hint in SAMPLES:
    return SAMPLES[hint]
  if hint is config_lib.ProtocolConfig:
    return [config(), config(max_lag=0)]
  if dataclasses.is_dataclass(hint):
    hints = typing.get_type_hints(hint)
    of_field = {field.name: samples(hints[field.name]) for field in dataclasses.fields(hint)}
    count = max((len(values) for values in of_field.values()), default=1)
    return [
      hint(**{name: values[n % len(values)] for name, values in of_field.items()})
      for n in range(count)
    ]
  arguments = typing.get_args(hint)
  if typing.get_origin(hint) is tuple:
    return (
      [(), tuple(samples(arguments[0]))]
      if arguments[1:] == (...,)
      else [tuple(samples(argument)[0] for argument in arguments)]
    )
  return [value for argument in arguments for value in samples(argument)]


@pytest.mark.parametrize('cls', EVERY_CLASS, ids=lambda cls: cls.__name__)
def test_every_class_survives_a_round_trip(cls: type):
  for value in samples(cls):
    text = tape_lib.encode(value)
    assert tape_lib.decode(cls, json.loads(text)) == value
    assert tape_lib.encode(tape_lib.decode(cls, json.loads(text))) == text


@pytest.mark.parametrize(
  'module, union',
  [(events, events.Event), (actions, actions.Action), (messages, messages.Message)],
)
def test_every_kind_is_in_the_union_of_a_tape(module: types.ModuleType, union: Any):
  assert set(classes(module)) - PARTS == set(typing.get_args(union))
  for cls in typing.get_args(union):
    for value in samples(cls):
      assert type(tape_lib.decode(union, json.loads(tape_lib.encode(value)))) is cls


RECEIVED = {'kind': 'Received', 'session': 1, 'payload_id': None, 'message': {'kind': 'Finish'}}
JOINED = {'kind': 'Joined', **dict.fromkeys(('incarnation', 'clock', 'shard', 'cursor'), 0)}


@pytest.mark.parametrize(
  'data, words',
  [
    ({'kind': 'Dance'}, "the kind of value is 'Dance', it must be one of Connected, "),
    ({'session': 1}, 'the kind of value is None'),
    ({'kind': ['Wake']}, "is ['Wake']"),
    ('Wake', "value is 'Wake', it must be one of Connected"),
    ({'kind': 'Stop'}, 'value.Stop: missing reason, unknown -'),
    ({'kind': 'Stop', 'reason': 'x', 'why': 'y'}, 'missing -, unknown why'),
    ({'kind': 'Stop', 'reason': 1}, 'value.Stop.reason is 1, it must be of type str'),
    ({'kind': 'StepDone', 'tokens': True, **_TIMES}, 'tokens is True, it must be of type int'),
    ({'kind': 'StepDone', 'tokens': 1.0, **_TIMES}, 'tokens is 1.0, it must be of type int'),
    (
      {**RECEIVED, 'payload_id': 'x'},
      "value.Received.payload_id is 'x', it must be of type int",
    ),
    (
      {**RECEIVED, 'message': {'kind': 'Wake'}},
      "the kind of value.Received.message is 'Wake', it must be one of Join, ",
    ),
    (
      {**RECEIVED, 'message': {**JOINED, 'due': 3, 'settled': [0]}},
      'message.Joined.due is 3, it must be a list',
    ),
  ],
)
def test_unknown_data_is_an_error_with_both_values(data: Any, words: str):
  with pytest.raises(tape_lib.TapeError) as error:
    tape_lib.decode(events.Event, data)
  assert words in str(error.value)


def test_an_impossible_config_is_an_error():
  data = json.loads(tape_lib.encode(config()))
  for name, value, words in (
    ('quorum', 9, 'quorum is 9, it must be between 1 and 2'),
    ('lease_ns', '1', "lease_ns is '1', it must be of type int"),
  ):
    with pytest.raises(tape_lib.TapeError, match=words):
      tape_lib.decode(config_lib.ProtocolConfig, {**data, name: value})


@pytest.mark.parametrize('value', [{1, 2}, b'x', object(), float('nan'), 1j, {(1, 2): 3}])
def test_a_value_that_json_cannot_hold_is_an_error(value: Any):
  words = ': keys must be str' if isinstance(value, dict) else ''
  with pytest.raises(tape_lib.TapeError, match=f'cannot be put on a tape{words}'):
    tape_lib.encode(actions.Save(clock=1, machine_state={'a': value}))


@pytest.mark.parametrize('name', ['syncer', 'learner'])
def test_machine_states_are_plain_json(name: str):
  """A start that goes through a tape must make the same machine: no int keys, no tuples."""
  with open(GOLDEN / f'{name}.jsonl', 'rb') as file:
    reader = tape_lib.Reader(file)
    machine = reader.header.start.make()
    for turn in reader:
      machine.handle(turn.now_ns, turn.event)
  assert json.loads(tape_lib.encode(machine.state())) == machine.state()


# --- Start ----------------------------------------------------------------------------------------


def starts() -> Iterator[tape_lib.Start]:
  of_syncer = start(
    role='syncer', node='syncer', agreement='{}', payload_bytes=(8, 8), identity=None
  )
  for begun in (start(), of_syncer):
    yield begun
    yield dataclasses.replace(begun, digests=None, state=begun.make().state())


def test_a_start_makes_the_machine_of_its_role():
  kinds = [type(begun.make()) for begun in starts()]
  assert kinds == [MACHINES[1], MACHINES[1], MACHINES[0], MACHINES[0]]
  assert [begun.make().state()['digests'] for begun in list(starts())[2:]] == [[5, 2**64 - 1]] * 2


# --- Reading whole, torn and damaged tapes --------------------------------------------------------


def test_a_whole_tape_is_identical():
  lines = recorded()
  result = replay_machines.replay(lines)
  assert result.text() == f'identical: {len(EVENTS)} events, hash {hash_of(lines[-1])}'
  assert (result.end, result.header.commit, result.header.segment) == ('exit', 'commit', 0)


def test_segments_are_one_tape():
  whole = replay_machines.replay(recorded())
  cut = replay_machines.replay(recorded(segments=(0, 3, 7)))
  assert (cut.identical, cut.events, cut.end) == (True, whole.events, 'exit')
  assert cut.hash != whole.hash  # headers are in the chain


@pytest.mark.parametrize(
  'left, words',
  [
    (slice(2, None), 'segment 1 comes where segment 0 is due'),
    (slice(6, None), 'the first line is not a header'),
  ],
)
def test_a_tape_is_read_from_its_beginning(left: slice, words: str):
  lines = recorded(segments=(1, 7))
  rest = lines[left]
  if 'first' in words:  # without the header the hash of the line would be wrong too
    data = json.loads(rest[0])
    del data['hash']
    rest[0] = sealed(tape_lib.GENESIS, data)
  with pytest.raises(tape_lib.TapeError, match=f'line 1: {words}'):
    replay_machines.replay(rest)


def test_a_missing_or_foreign_segment_is_found():
  lines = recorded(segments=(3, 7))
  _, second, third = (n for n, line in enumerate(lines) if 'segment' in json.loads(line))
  with pytest.raises(tape_lib.TapeError, match='segment 2 comes where segment 1 is due'):
    replay_machines.replay(lines[:second] + lines[third:])
  with pytest.raises(tape_lib.TapeError, match='lines are missing between them'):
    replay_machines.replay(lines[: second - 1] + lines[second:])
  other = edited(lines, second, lambda data: data['start']['identity'].update(seed=9))
  with pytest.raises(tape_lib.TapeError, match='segment 1 is of a machine with another start'):
    replay_machines.replay(other)


def test_every_changed_removed_or_moved_line_is_found():
  lines = recorded(segments=(5,))
  for n, line in enumerate(lines):
    for at in (1, len(line) // 2, line.rindex(b'"hash":"') + 9):
      changed = line[:at] + (b'0' if line[at : at + 1] != b'0' else b'1') + line[at + 1 :]
      with pytest.raises(tape_lib.TapeError, match=f'line {n + 1}: '):
        replay_machines.replay([*lines[:n], changed, *lines[n + 1 :]])
    if n + 1 < len(lines):  # without its last line a tape is a shorter tape
      with pytest.raises(tape_lib.TapeError, match=f'line {n + 1}: '):
        replay_machines.replay([*lines[:n], *lines[n + 1 :]])
      with pytest.raises(tape_lib.TapeError, match=f'line {n + 1}: '):
        replay_machines.replay([*lines[:n], lines[n + 1], line, *lines[n + 2 :]])
    with pytest.raises(tape_lib.TapeError, match=f'line {n + 2}: '):
      replay_machines.replay([*lines[: n + 1], line, *lines[n + 1 :]])


def test_a_torn_last_line_is_reported_and_is_not_a_divergence():
  lines = recorded()
  for keep in range(1, len(lines[-1])):
    result = replay_machines.replay([*lines[:-1], lines[-1][:keep]])
    assert (result.identical, result.torn, result.events) == (True, True, len(EVENTS) - 1)
  assert result.text().endswith('no exit (killed or running), the last line was cut off')


def test_no_line_follows_a_torn_one():
  lines = recorded()
  with pytest.raises(tape_lib.TapeError, match='line 4: a line follows one that was cut off'):
    replay_machines.replay([*lines[:2], lines[2][:-5], *lines[3:]])


@pytest.mark.parametrize('keep', [0, 1, 200])
def test_a_process_killed_before_its_first_turn(keep: int):
  result = replay_machines.replay([line for line in [recorded()[0][:keep]] if line])
  assert (result.header, result.identical, result.events) == (None, True, 0)


def test_a_tape_of_another_schema_names_the_commit_that_reads_it():
  lines = edited(recorded(), 0, lambda data: data.update(schema=9))
  with pytest.raises(tape_lib.TapeError, match="tape format 9, .* reads 3[.].*'commit'"):
    replay_machines.replay(lines)


@pytest.mark.parametrize(
  'edit, words',
  [
    (lambda data: data.update(index=7), 'turn 7 comes where turn 3 is due'),
    (lambda data: data['event'].update(kind='Dance'), "the kind of turn.Record.event is 'Dance'"),
    (lambda data: data.update(why=1), 'turn.Record: missing -, unknown why'),
  ],
)
def test_the_error_names_an_invalid_line(edit: Any, words: str):
  with pytest.raises(tape_lib.TapeError, match=f'line 5: .*{words}'):
    replay_machines.replay(edited(recorded(), 4, edit))


def test_no_turn_follows_the_end():
  lines = recorded()
  more = tape_line_after(
    lines[-1], 'Record', index=len(EVENTS), now_ns=1, event={'kind': 'Wake'}, actions=[]
  )
  with pytest.raises(tape_lib.TapeError, match=r'comes after the end \(exit\)'):
    replay_machines.replay([*lines, more])


def test_a_start_that_makes_no_machine_is_an_error():
  lines = edited(recorded(), 0, lambda data: data['start'].update(role='judge'))
  with pytest.raises(tape_lib.TapeError, match="no machine can be made of the header: .*'judge'"):
    replay_machines.replay(lines)


# --- Divergence and crash -------------------------------------------------------------------------


def test_one_edited_action_is_shown_with_its_context():
  def edit(data: dict) -> None:
    data['actions'][0]['message']['tokens'] = 11

  result = replay_machines.replay(edited(recorded(), 6, edit))
  assert (result.identical, result.events) == (False, 6)
  divergence = result.divergence
  assert (divergence.turn.index, divergence.turn.now_ns, divergence.turn.event) == (5, 5, EVENTS[5])
  assert [turn.index for turn in divergence.before] == [0, 1, 2, 3, 4]
  assert (
    divergence.turn.actions[0].message.tokens == 11 and divergence.replayed[0].message.tokens == 10
  )
  text = result.text()
  assert text.startswith('diverges at turn 5:\nturn 0 at 0 ns  {"kind":"Wake"} -> Dial\n')
  event = '{"kind":"StepDone","tokens":5,"step_ns":9,"data_ns":0,"saving_ns":0,"loss":null}'
  assert f'\n  event     {event}\n' in text
  assert '\n  recorded  {"kind":"Send",' in text and '"tokens":11,' in text
  assert '\n  replayed  {"kind":"Send",' in text and '"tokens":10,' in text
  assert '\n  both      {"kind":"Step","clock":2}' in text


@pytest.mark.parametrize(
  'edit, words',
  [
    (lambda data: data['actions'].pop(), 'recorded  nothing\n  replayed  {"kind":"Step"'),
    (
      lambda data: data['actions'].append({'kind': 'Say', 'text': 'x'}),
      'recorded  {"kind":"Say","text":"x"}\n  replayed  nothing',
    ),
    (lambda data: data['actions'].reverse(), 'recorded  {"kind":"Step"'),
    (lambda data: data.update(now_ns=10**12), 'replayed  {"kind":"Close"'),
    (
      lambda data: (
        data['event'].update(kind='Encoded', sync=1, fragment=0, payload_id=1, payload=None)
        or [data['event'].pop(name) for name in ('tokens', *_TIMES)]
      ),
      'replayed  raised IndexError: pop from an empty deque',
    ),
  ],
)
def test_any_difference_of_a_turn_is_a_divergence(edit: Any, words: str):
  result = replay_machines.replay(edited(recorded(), 6, edit))
  assert result.divergence.turn.index == 5
  assert words in result.text()


def test_the_order_of_a_dict_matters():
  """An order that depends on the hash seed must not pass."""

  def edit(data: dict) -> None:
    (save,) = [action for action in data['actions'] if action['kind'] == 'Save']
    save['machine_state'] = dict(reversed(save['machine_state'].items()))

  assert replay_machines.replay(edited(recorded(), 9, edit)).divergence.turn.index == 8


def test_a_long_difference_is_shown_at_its_position():
  a, b = 'x' * 9_000 + 'here' + 'y' * 900, 'x' * 9_000 + 'HERE' + 'y' * 900
  divergence = replay_machines.Divergence(
    tape_lib.Record(0, 0, events.Wake(), (actions.Say(text=a),)), (actions.Say(text=b),), ()
  )
  lines = divergence.text().splitlines()
  assert 'xhere' in lines[-2] and 'xHERE' in lines[-1] and max(map(len, lines)) < 300


def test_a_recorded_crash_is_reproduced_with_its_traceback():
  result = replay_machines.replay(recorded(crash=True))
  assert (result.identical, result.end, result.events) == (True, 'crash', len(EVENTS))
  assert 'crashes as recorded' in result.text()
  assert isinstance(result.crash, TypeError) and result.crash.__traceback__ is not None


@pytest.mark.parametrize(
  'edit, words',
  [
    (lambda data: data.update(event={'kind': 'Wake'}), 'recorded  raised TypeError: not an event'),
    (lambda data: data.update(error='KeyError: 3'), 'recorded  raised KeyError: 3'),
  ],
)
def test_a_crash_that_is_not_reproduced_is_a_divergence(edit: Any, words: str):
  lines = recorded(crash=True)
  result = replay_machines.replay(edited(lines, len(lines) - 1, edit))
  assert not result.identical and words in result.text()
