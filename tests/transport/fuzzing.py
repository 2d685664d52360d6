"""What decodes bytes of others, and mutators that make such bytes.

A *target* is a decoder with examples of what it reads and the errors that it may raise. Mutated
examples would mostly fail at their checksums, which guard against accidents and not against an
attacker; so each target has a `mend` that makes the checksums of mutated bytes right.

The tests run every target for a moment; `scripts/fuzz.py` for as long as wanted. An input that was
found once stays in tests/corpus, one folder for each target, and every run begins with it.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import pathlib
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.certs import allowlist
from diloco_jax.protocol import actions, events, formats, messages
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files, outer_log, wal
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.transport import chunks, control_crc, translate
from diloco_jax.verification.sim import disk as disk_lib
from tests.transport import samples

TESTS = pathlib.Path(__file__).resolve().parents[1]
CORPUS = TESTS / 'corpus'
GRANTED_BYTES = 1 << 16  # of a payload, and how many may be incomplete
MEMORY_PER_BYTE = 200  # what a decoder may allocate for each byte of its input

BOUNDS = (0, 1, 2, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
NASTY = (
  *BOUNDS,
  -1,
  10**30,
  1.5,
  1e308,
  True,
  None,
  '',
  'x',
  '../../etc/passwd',
  'a\x00b',
  '\u202e',
  [],
  {},
  [[]],
  {'kind': 'Merge'},
)
DEEP = b'[' * 100_000


@dataclasses.dataclass(frozen=True)
class Target:
  """A decoder.

  Attributes:
    examples: whole inputs.
    decode: raises one of `raises` for bytes that it does not take, and nothing else.
    mend: makes the checksums of mutated bytes right.
    json: whether the input is JSON, to be mutated as such.
    slow: a run takes so many times as long as that of a fast decoder.
    granted_bytes: what it may allocate beside MEMORY_PER_BYTE for each byte of its input.
  """

  name: str
  examples: tuple[bytes, ...]
  decode: Callable[[bytes], Any]
  raises: tuple[type[Exception], ...]
  mend: Callable[[bytes], bytes] = lambda data: data
  json: bool = False
  slow: int = 1
  granted_bytes: int = 1 << 20

  def run(self, data: bytes) -> bool:
    """Decodes these bytes; returns whether they were accepted. Any other exception is a defect."""
    try:
      self.decode(data)
    except self.raises:
      return False
    return True

  def run_measured(self, data: bytes) -> None:
    """The same, and asserts that it allocates no more than granted."""
    tracemalloc.start()
    try:
      self.run(data)
      _, peak = tracemalloc.get_traced_memory()
    finally:
      tracemalloc.stop()
    most = self.granted_bytes + MEMORY_PER_BYTE * len(data)
    assert peak <= most, f'{self.name}: {peak} bytes for {len(data)}, at most {most} are granted'

  def remembered(self) -> list[bytes]:
    """The inputs of tests/corpus."""
    return [path.read_bytes() for path in sorted((CORPUS / self.name).glob('*'))]

  def mutants(self, draw: random.Random) -> Iterator[bytes]:
    """Endless mutated inputs."""
    while True:
      data = draw.choice(self.examples)
      if self.json and draw.random() < 0.7:
        mutated = mutate_json(data, draw)
      else:
        mutated = mutate(data, self.examples, draw)
      yield self.mend(mutated) if draw.random() < 0.9 else mutated


def remember(target: Target, data: bytes) -> pathlib.Path:
  """Keeps an input in tests/corpus, so that every later run begins with it."""
  folder = CORPUS / target.name
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / hashlib.sha256(data).hexdigest()[:16]
  path.write_bytes(data)
  return path


# --- Mutators -------------------------------------------------------------------------------------


def mutate(data: bytes, others: tuple[bytes, ...], draw: random.Random) -> bytes:
  """These bytes with some changes."""
  out = bytearray(data)
  for _ in range(draw.choice((1, 1, 2, 4))):
    place = draw.randrange(len(out) + 1)
    match draw.randrange(8):
      case 0 if out:
        out[place % len(out)] ^= 1 << draw.randrange(8)
      case 1 if out:
        out[place % len(out)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
      case 2:
        form = draw.choice(('<B', '<H', '<I', '<Q'))
        number = struct.pack(form, draw.choice(BOUNDS) % (1 << 8 * struct.calcsize(form)))
        out[place : place + len(number)] = number
      case 3:
        del out[place : place + draw.choice((1, 4, 16, len(out)))]
      case 4:
        out[place:place] = draw.randbytes(draw.choice((1, 4, 40)))
      case 5:
        out[place:place] = out[place : place + draw.randrange(1, 100)]
      case 6:
        other = draw.choice(others)
        out[place:] = other[draw.randrange(len(other) + 1) :]
      case 7 if draw.random() < 0.05:
        out[place:place] = DEEP
  return bytes(out)


def mutate_json(data: bytes, draw: random.Random) -> bytes:
  """This JSON text with other values in some places."""
  value = json.loads(data)
  for _ in range(draw.choice((1, 1, 2))):
    places = list(_places(value))
    if not places:
      break
    container, key = draw.choice(places)
    match draw.randrange(6):
      case 0:
        del container[key]
      case 1 if isinstance(container, dict):
        container['new'] = container.pop(key)
      case 2:
        other, other_key = draw.choice(places)
        if other_key in (other if isinstance(other, dict) else range(len(other))):
          container[key] = copy.deepcopy(other[other_key])
      case _:
        container[key] = copy.deepcopy(draw.choice(NASTY))
  text = json.dumps(value).encode()
  if draw.random() < 0.02:
    text = text.replace(b'null', DEEP, 1) if b'null' in text else DEEP
  if draw.random() < 0.02:
    text = text.replace(b'0', b'9' * 5_000, 1)
  return text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
  """(container, key) of every value in a JSON value."""
  keys = value.keys() if isinstance(value, dict) else range(len(value))
  for key in list(keys):
    yield value, key
    if isinstance(value[key], dict | list):
      yield from _places(value[key])


# --- Targets --------------------------------------------------------------------------------------


def _mend_frame(data: bytes) -> bytes:
  if len(data) < chunks.HEADER_BYTES:
    return data
  fields, payload = bytearray(data[:28]), data[chunks.HEADER_BYTES :]
  fields[24:28] = struct.pack('<I', zlib.crc32(payload))
  return bytes(fields) + struct.pack('<I', zlib.crc32(fields)) + payload


def _decode_frame(data: bytes) -> None:
  chunks.Assembler(max_payload_bytes=GRANTED_BYTES).add(data)


def _mend_seal(data: bytes) -> bytes:
  return control_crc.Seal().close(data[:-5])


def _decode_sealed(data: bytes) -> None:
  translate.LEARNER_TO_SYNCER.decode(control_crc.Seal().open(data))


_PAYLOAD = messages.Payload(size_bytes=3, crc32=5)
_HELD = (messages.Held(version=-1, digest=2**64 - 1), messages.Held(version=3, digest=0))
_FROM_LEARNER = (
  dataclasses.replace(samples.join(), nonce=2**64 - 1, agreement='{"a":1}', host='h'),
  dataclasses.replace(samples.CONFIRM, clock=5, steps=5, tokens=50, held=_HELD, shard=1, cursor=5),
  messages.Progress(clock=2, steps=2, tokens=20, step_ns=10**8, finished=True, loss=2.5),
  samples.contribution(_PAYLOAD, sync=2, fragment=1, version=3, tokens_from=10, tokens_to=30),
  messages.Decline(sync=2, fragment=0, reason='bad_value', tokens_to=3),
)
_FROM_SYNCER = (
  messages.Refused(code='FENCED', text='no \x1b', retry_ns=None),
  messages.Joined(incarnation=1, clock=2, shard=0, cursor=5, due=(0, 1), settled=(0, 0)),
  samples.publish(_PAYLOAD, base_version=None, digest=2**64 - 1),
)


def _record_file() -> bytes:
  disk = disk_lib.Disk(random.Random(0))
  log = wal.begin(disk, 'r')
  log.append(1, b'payload')
  log.commit()
  return disk.read(wal.name_of(1))


def _read_record_file(data: bytes) -> None:
  wal.open_log(disk_lib.Disk(random.Random(0), {wal.name_of(1): data}), 'r', after=1)


def _mend_record_file(data: bytes) -> bytes:
  header, payload = data[: wal.HEADER_BYTES - 4], data[wal.HEADER_BYTES :]
  return header + struct.pack('<I', zlib.crc32(header)) + payload


def _outer_step() -> bytes:
  participant = actions.Participant(
    learner='l0', incarnation=1, payload_id=4, tokens=10, steps=1, limit=5
  )
  merge = actions.Merge(
    sync=2,
    fragment=0,
    version=1,
    participants=(participant, participant),
    machine_state={'next': 3, 'a': [1, 2]},
  )
  done = events.MergeDone(
    sync=2, fragment=0, payload_id=None, payload=_PAYLOAD, digest=77, norms=(5, 6), refused=('l0',)
  )
  return b''.join(outer_log.encode(outer_log.OuterStep(merge, done, b'xyz')))


def _json_of_outer_step(data: bytes) -> bytes:
  """The JSON of a record's header; `_with_header` puts it back."""
  (count,) = struct.unpack_from('<I', data)
  return data[4 : 4 + count]


def _with_header(text: bytes) -> bytes:
  return struct.pack('<I', len(text)) + text + b'xyz'


def _mend_line(body: bytes) -> bytes:
  """A line of a tape with this JSON, and the hash that it must have."""
  body = body.rstrip(b'\n').removesuffix(b'}').replace(b'\n', b' ')
  header = body.startswith(b'{"kind":"Header",')
  try:
    before = json.loads(body + b'}')['previous'] if header else tape_lib.GENESIS
    chain = hashlib.sha256(str(before).encode() + body).hexdigest()
  except (ValueError, KeyError, TypeError, RecursionError):
    chain = hashlib.sha256(tape_lib.GENESIS.encode() + body).hexdigest()
  return body + b',"hash":"' + chain.encode() + b'"}\n'


def _lines() -> list[bytes]:
  """The JSON of lines of a real tape, without their hashes."""
  lines = (TESTS / 'protocol' / 'tape' / 'golden' / 'syncer.jsonl').read_bytes().splitlines()
  return [line[: line.rindex(b',"hash"')] + b'}' for line in lines[:40]]


def _decode_line(data: bytes) -> None:
  list(tape_lib.Reader([data]))


def _decode_turn(data: bytes) -> None:
  tape_lib.decode(
    tape_lib.Record | tape_lib.Crash, tape_lib._parse(data.rstrip(b'\n').removesuffix(b'}'))
  )


_LINEAGE = lineage_lib.Lineage(log=12, gone=('l1',))


def _mend_lineage(data: bytes) -> bytes:
  try:
    value = json.loads(data)
    value.pop(json_files._SEAL, None)
    return json.dumps(json_files.seal(value)).encode()
  except (ValueError, AttributeError, TypeError, RecursionError):
    return data


def _read_lineage(workdir: pathlib.Path, data: bytes) -> None:
  folders.syncer_folder(workdir).mkdir(exist_ok=True)
  (workdir / lineage_lib.FILE).write_bytes(data)
  lineage_lib.read(workdir)


_ALLOWLIST = {
  'format': 1,
  'run': 'r1',
  'learners': {'l0': [{'sha256': '0' * 64, 'until': '2027-01-01T00:00:00+00:00'}], 'l1': []},
}


def _read_allowlist(folder: pathlib.Path, data: bytes) -> None:
  path = folder / allowlist.FILE
  path.write_bytes(data)
  path.chmod(0o600)
  allowlist.read(folder)


def targets(workdir: pathlib.Path) -> dict[str, Target]:
  """All of them, by name; they write to the folder `workdir`."""
  step = _outer_step()
  json_of_step = _json_of_outer_step(step)
  frames = tuple(frame for size in (0, 3, 1_000) for frame in chunks.split(bytes(size)))
  up = tuple(map(translate.LEARNER_TO_SYNCER.encode, _FROM_LEARNER))
  sealed = tuple(control_crc.Seal().close(envelope) for envelope in up)
  down = tuple(map(translate.SYNCER_TO_LEARNER.encode, _FROM_SYNCER))
  broken, log = (control_crc.WireError,), (wal.WalDamaged, wal.WalUnsupported)
  # outer_log makes these the one error of a record that is not reproduced.
  record = (ValueError, KeyError, TypeError, tape_lib.TapeError)
  agreement = agreement_lib.encode({'model.width': 8, 'layout': 'x'})
  lines = tuple(_lines())
  decoders = (
    Target('frame', frames, _decode_frame, broken, _mend_frame),
    Target('sealed', sealed, _decode_sealed, broken, _mend_seal),
    Target('from_learner', up, translate.LEARNER_TO_SYNCER.decode, broken),
    Target('from_syncer', down, translate.SYNCER_TO_LEARNER.decode, broken),
    Target('record_file', (_record_file(),), _read_record_file, log, _mend_record_file),
    Target('record', (step,), lambda data: outer_log.decode(memoryview(data)), record),
    Target(
      'record_header',
      (json_of_step,),
      lambda data: outer_log.decode(memoryview(_with_header(data))),
      record,
      json=True,
      slow=4,
    ),
    Target('tape', lines, _decode_line, (tape_lib.TapeError,), _mend_line, json=True, slow=4),
    Target('turn', lines[1:], _decode_turn, (tape_lib.TapeError,), json=True, slow=4),
    Target(
      'lineage',
      (
        _mend_lineage(
          json.dumps(formats.stamp('lineage') | json.loads(tape_lib.encode(_LINEAGE))).encode()
        ),
      ),
      functools.partial(_read_lineage, workdir),
      (ValueError, files_lib.DirectoryError),
      _mend_lineage,
      json=True,
      slow=40,
    ),
    Target(
      'allowlist',
      (json.dumps(_ALLOWLIST).encode(),),
      functools.partial(_read_allowlist, workdir),
      (ValueError,),
      json=True,
      slow=40,
      granted_bytes=8 << 20,  # a file is read at once, up to its largest size
    ),
    Target(
      'agreement',
      (agreement.encode(),),
      lambda data: agreement_lib.refusal(data.decode(errors='replace'), agreement),
      (),
      json=True,
    ),
  )
  return {target.name: target for target in decoders}
