"""Versions at every door: what another release has written is refused in one sentence that names
both numbers and who reads it, and every byte stays as it is."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax import version
from diloco_jax.certs import allowlist, private
from diloco_jax.config import load
from diloco_jax.learner import moments as moments_lib
from diloco_jax.process import own_model, restore
from diloco_jax.protocol import actions, formats, messages
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import facts as report_facts
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, json_files, states, tapes, wal
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.syncer import stored
from diloco_jax.transport import chunks, control_crc
from diloco_jax.verification.replay import tape_files
from tests import visits
from tests.launch.lib import command_line
from tests.protocol import single

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = '9.9.9'  # which has written it
STATE = {'opt_state': {'m': jnp.arange(4.0)}}

# How an older and a newer number differ from that of this release; None: there is no number.
OTHERS = {'older': -1, 'newer': 1, 'none': None}


class Door(NamedTuple):
  """A format: `write` makes files below a folder as this release does; `change` gives them another
  number; `open` reads them, and raises `error`."""

  write: Callable[[pathlib.Path], object]
  change: Callable[[pathlib.Path, int | None], object]
  open: Callable[[pathlib.Path], object]
  error: type[Exception] = formats.OtherFormat
  says_program: bool = True


# --- Another number -------------------------------------------------------------------------------


def _restamp(values: dict, number: int | None) -> dict:
  values = {**values, 'format': number, 'program': PROGRAM}
  return values if number is not None else {k: v for k, v in values.items() if k != 'format'}


def _in_json(name: str, digest: str = '') -> Callable[[pathlib.Path, int | None], object]:
  """Changes the number of a JSON file; `digest`: its field with the SHA-256 of the others."""

  def change(here: pathlib.Path, number: int | None) -> None:
    (path,) = here.glob(name)
    values = _restamp(json.loads(path.read_text('utf-8')), number)
    if digest:
      values.pop(digest)
      values[digest] = json_files.sha256(values)
    path.write_text(json.dumps(values), 'utf-8')

  return change


def _in_header(name: str, at: int, kind: str, checked: int) -> Callable:
  """Changes the number at a place of a binary header, whose first bytes a CRC-32 follows."""

  def change(here: pathlib.Path, number: int | None) -> None:
    (path,) = here.glob(name)
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, at, number or 0)
    struct.pack_into('<I', data, checked, zlib.crc32(data[:checked]))
    path.write_bytes(data)

  return change


# --- The formats ----------------------------------------------------------------------------------


def _join(here: pathlib.Path) -> None:
  """A learner joins a syncer; raises the text of its refusal."""
  number = json.loads((here / 'join').read_text('utf-8'))
  join = dataclasses.replace(single.join(), protocol=number)
  for action in single.new_machine().handle(0, single.received(1, join)):
    if isinstance(action, actions.Send) and isinstance(action.message, messages.Refused):
      assert action.message.retry_ns is None
      raise formats.OtherFormat(action.message.text)


def _write_number(here: pathlib.Path, number: int | None = None) -> None:
  (here / 'join').write_text(json.dumps(messages.PROTOCOL_VERSION if number is None else number))


def _write_model(here: pathlib.Path) -> None:
  model = own_model.describe({'w': jnp.ones((8, 8))}, None)
  own_model.write(here, model, own_model.config(8, None, None))


def _change_header(here: pathlib.Path, number: int | None) -> None:
  path = here / 'syncer' / 'model' / states.MANIFEST
  values = json_files.unseal(json.loads(path.read_text('utf-8')))
  record = values['manifest']['record']
  record['header'] = json.dumps(_restamp(json.loads(record['header']), number))
  path.write_text(json.dumps(json_files.seal(values)), 'utf-8')


def _log_files(here: pathlib.Path) -> files_lib.Files:
  here.mkdir(exist_ok=True)
  return files_lib.Files(here)


def _write_log(here: pathlib.Path) -> None:
  with contextlib.closing(_log_files(here / 'wal')) as files:
    files.lock()
    log = wal.open_log(files, 'run')
    log.append(1, b'abc')
    log.commit()


def _open_log(here: pathlib.Path) -> None:
  with contextlib.closing(_log_files(here / 'wal')) as files:
    wal.open_log(files, 'run')


def _write_checkpoints(here: pathlib.Path) -> None:
  checkpoints = checkpoint.Checkpoints(str(here / 'islands' / 'l0' / 'ckpt'))
  for step in (1, 2):
    checkpoints.save(step, STATE, step, {'protocol': {}})
  checkpoints.close()


def _restore(here: pathlib.Path) -> checkpoint.Restored | None:
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  checkpoints = checkpoint.Checkpoints(str(here / 'islands' / 'l0' / 'ckpt'))
  try:
    return checkpoints.restore(jax.tree.map(lambda _: place, STATE), STATE)
  finally:
    checkpoints.close()


def _write_claim(here: pathlib.Path) -> None:
  (here / 'store').mkdir()
  _open_claim(here, disk='first')


def _open_claim(here: pathlib.Path, disk: str = 'second') -> None:
  config = load.load('stdlib_lm:tiny')
  config.train.store = str(here / 'store')
  with stored.open_store(config, here.parent / disk, print):
    pass


def _write_tape(here: pathlib.Path) -> None:
  config = single.new_machine()._config
  start = tape_lib.Start(role='learner', node='l0', config=config, digests=(77,))
  tapes.Tape(here, start, print).close()


def _change_tape(here: pathlib.Path, number: int | None) -> None:
  (path,) = here.glob('tapes/*.jsonl')
  values = json.loads(path.read_text('utf-8'))
  del values['hash']
  values |= {'schema': number, 'versions': values['versions'] | {tape_lib.PROGRAM: PROGRAM}}
  body = json.dumps(values, separators=(',', ':'))[:-1]
  chain = hashlib.sha256((tape_lib.GENESIS + body).encode()).hexdigest()
  path.write_text(f'{body},"hash":"{chain}"}}\n', 'utf-8')


def _open_tape(here: pathlib.Path) -> None:
  for life in tape_files.find(here):
    list(tape_files.read(life))


def _write_records(here: pathlib.Path) -> None:
  with contextlib.closing(records_lib.Recorder(here, 'l0', tensorboard=False)) as recorder:
    recorder.report(report_facts.Eval(step=1, loss=2.0))


def _change_records(here: pathlib.Path, number: int | None) -> None:
  path = here / 'records' / 'l0.jsonl'
  first, *others = path.read_text('utf-8').splitlines(keepends=True)
  path.write_text(json.dumps(_restamp(json.loads(first), number)) + '\n' + ''.join(others), 'utf-8')


def _write_allowlist(here: pathlib.Path) -> None:
  private.make_folder(here / 'certs')
  allowlist.Allowlist('run-x', {'l0': {}}).write(here / 'certs')


def _write_track(here: pathlib.Path) -> None:
  (here / 'records').mkdir()
  json_files.write(here / 'wandb.json', formats.stamp('track') | {'lines': {}})


def _diloco(*words: str) -> None:
  """Runs a command; raises its line if it ends with 42."""
  process = command_line.diloco(*words)
  if process.returncode == 42:
    raise formats.OtherFormat(process.stderr)
  assert not process.returncode, process.stderr


_MANIFEST = 'islands/l0/ckpt/2/manifest.json'
DOORS = {
  'protocol': Door(_write_number, _write_number, _join, says_program=False),
  'frame': Door(
    lambda here: (here / 'frame').write_bytes(next(iter(chunks.split(b'abc')))),
    _in_header('frame', 4, '<H', chunks.HEADER_BYTES - 4),
    lambda here: chunks.Assembler(max_payload_bytes=9).add((here / 'frame').read_bytes()),
    control_crc.WireError,
    says_program=False,
  ),
  'model header': Door(_write_model, _change_header, own_model.read),
  'log': Door(
    _write_log,
    _in_header(f'wal/{wal.name_of(1)}', 8, '<I', wal.HEADER_BYTES - 4),
    _open_log,
    wal.WalUnsupported,
    says_program=False,
  ),
  'state': Door(_write_checkpoints, _in_json(_MANIFEST, 'sha256'), _restore),
  'config': Door(
    lambda here: load.write(here, load.load('stdlib_lm:tiny')), _in_json(load.FILE), load.read
  ),
  'lineage': Door(
    lambda here: lineage_lib.write(here, lineage_lib.Lineage()),
    _in_json(lineage_lib.FILE, 'sha256'),
    lineage_lib.read,
  ),
  'claim': Door(
    _write_claim, _in_json(f'store/{claim_lib.NAME}', 'sha256'), _open_claim, claim_lib.Denied
  ),
  'tape': Door(_write_tape, _change_tape, _open_tape, tape_lib.OtherTape),
  'records': Door(_write_records, _change_records, lambda here: list(records_lib.records(here))),
  'allowlist': Door(
    _write_allowlist,
    _in_json(f'certs/{allowlist.FILE}'),
    lambda here: allowlist.read(here / 'certs'),
  ),
  'track': Door(
    _write_track, _in_json('wandb.json'), lambda here: _diloco('track', f'--workdir={here}')
  ),
}


def _bytes(here: pathlib.Path) -> dict[str, bytes]:
  locks = files_lib.LOCK, '.writable'
  paths = (path for path in here.rglob('*') if path.is_file() and path.name not in locks)
  return {str(path.relative_to(here)): path.read_bytes() for path in paths}


@pytest.fixture(name='here')
def _here(tmp_path) -> pathlib.Path:
  (tmp_path / 'here').mkdir()
  return tmp_path / 'here'


def test_every_format_has_its_door():
  assert DOORS.keys() == formats.NUMBERS.keys()


@pytest.mark.parametrize('name', DOORS)
def test_what_this_release_wrote_is_read(name, here):
  DOORS[name].write(here)
  DOORS[name].open(here)


@pytest.mark.parametrize(
  'name, other',
  [
    (name, other)
    for name, other in itertools.product(DOORS, OTHERS)
    if DOORS[name].says_program or other != 'none'  # a binary header has a number
  ],
)
def test_what_another_release_wrote_is_refused_and_stays_as_it_is(name, other, here):
  door, number, step = DOORS[name], formats.NUMBERS[name], OTHERS[other]
  other_number = None if step is None else number + step
  door.write(here)
  door.change(here, other_number)
  before = _bytes(here)
  with pytest.raises(door.error) as refused:
    door.open(here)
  text = str(refused.value)
  what = f'{name} format {other_number}' if step else f'no number of its {name} format'
  assert f' has {what}, diloco_jax {version.__version__} reads {number}. ' in text
  assert 'Nothing was changed or lost. Use the release that reads it: ' in text
  age = 'a newer' if step == 1 else 'an older'
  reader = f'diloco_jax {PROGRAM}' if door.says_program else f'{age} diloco_jax'
  assert f'reads it: {reader}' in text
  assert _bytes(here) == before
  visits.saw('doors', name)


# --- More doors of some formats -------------------------------------------------------------------

CHECKPOINT_DOORS = {
  'restore': lambda here: restore._newest(here, here / 'islands' / 'l0', None, '', print),
  'read': lambda here: states.read(here / 'islands' / 'l0' / 'ckpt' / '2'),
  'moments': lambda here: moments_lib.find(here, 'l0', STATE['opt_state'], print),
}


@pytest.mark.parametrize('name', CHECKPOINT_DOORS)
def test_no_reader_passes_over_a_checkpoint_of_another_release(name, here):
  """The one before it would lose steps."""
  _write_checkpoints(here)
  _in_json(_MANIFEST, 'sha256')(here, 9)
  before = _bytes(here)
  with pytest.raises(formats.OtherFormat, match='state format 9'):
    CHECKPOINT_DOORS[name](here)
  assert _bytes(here) == before


def test_a_flipped_number_is_damage_and_the_checkpoint_before_is_used(here):
  _write_checkpoints(here)
  path = here / _MANIFEST
  values = json.loads(path.read_text('utf-8')) | {'format': 9}
  path.write_text(json.dumps(values), 'utf-8')
  assert _restore(here).step == 1


def test_moments_of_another_learner_may_be_of_another_release(here):
  _write_checkpoints(here)
  _in_json(_MANIFEST, 'sha256')(here, 9)
  assert moments_lib.find(here, 'l1', STATE['opt_state'], print).step == 1


@pytest.mark.parametrize('command', ['report', 'status', 'replay'])
def test_a_command_refuses_a_run_of_another_release_in_one_line(command, here):
  _write_records(here)
  _write_tape(here)
  _change_records(here, 9)
  _change_tape(here, 9)
  where = f'--workdir={here}' if command == 'status' else str(here)
  with pytest.raises(formats.OtherFormat, match=r'\Aerror: .* format 9, .*\n\Z'):
    _diloco(command, where)


def test_records_of_another_release_are_refused_at_each_call(here):
  _write_records(here)
  tail = records_lib.Tail(here / 'records' / 'l0.jsonl')
  _change_records(here, 9)
  for _ in range(2):
    with pytest.raises(formats.OtherFormat):
      tail.read()
  with pytest.raises(formats.OtherFormat):
    folder_lib.read(here)


def test_a_text_of_another_release_is_printable_and_short():
  text = formats.refusal('claim', 'x' * 999, 'the claim', '\x1b[2J' * 99)
  assert text.isprintable() and len(text) < 300


def test_a_loop_of_another_release_brings_no_model():
  header = json.loads(own_model.describe({'w': np.ones(4)}, None).header())
  with pytest.raises(formats.OtherFormat, match='the model of this loop has model header format 9'):
    own_model.from_header(json.dumps(header | {'format': 9}), dict)


def test_the_table_of_the_page_is_that_of_the_code():
  page = (ROOT / 'docs' / 'reference' / 'files.md').read_text('utf-8')
  section = page.split('## Formats\n')[1].split('\n## ')[0]
  rows = re.findall(r'^\| `([a-z ]+)` \| (\d+) \| \S.* \| \S.* \|$', section, re.M)
  assert {name: int(number) for name, number in rows} == formats.NUMBERS
