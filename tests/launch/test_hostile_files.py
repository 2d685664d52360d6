"""Files of a run that a stranger wrote: refused in one line, and nothing is changed anywhere.

The digests, CRCs and chains of what is written here are right. `outside` lies beside the run's
folder.
"""

import gc
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

import pytest

from diloco_jax.config import load
from diloco_jax.launch import own_model, restore, run_folder
from diloco_jax.protocol.tape import tape
from diloco_jax.report import records as records_lib
from diloco_jax.storage import (
  checkpoint,
  json_files,
  manifests,
  outer_log,
  tapes,
  wal,
  wal_format,
)
from diloco_jax.storage import files as files_lib
from diloco_jax.syncer import commit
from diloco_jax.syncer import global_model as global_model_lib
from diloco_jax.syncer import process as syncer_process
from tests.launch import test_restore as restores
from tests.syncer import test_durability as durability

pytestmark = restores.pytestmark
config = restores._config
agreement = restores._agreement
assembled = durability._assembled


@pytest.fixture(scope='module', name='whole')
def _whole(config, agreement, tmp_path_factory) -> pathlib.Path:
  """A run with snapshot 1, and a folder beside it that looks like an island."""
  base = tmp_path_factory.mktemp('whole')
  _make_run(config, agreement, base / 'run')
  half = base / 'outside' / 'ckpt' / '99.orbax-checkpoint-tmp'
  half.mkdir(parents=True)
  (half / 'file').write_text('of another program')
  shutil.copytree(base / 'run' / 'islands' / 'l0' / 'ckpt' / '105', base / 'outside/ckpt/105')
  return base


def _make_run(config, agreement: str, workdir: pathlib.Path) -> None:
  run_folder.open_workdir(config, workdir, resume=False)
  restores._take(workdir, 1, agreement)
  for node in ('l0', 'l1'):
    (workdir / 'islands' / node / 'ckpt' / files_lib.LOCK).write_text('')
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  files.lock()
  wal.begin(files, 'the run', 10, restores.CHAIN).append(1, b'an outer step')
  files.close()


def _tree(base: pathlib.Path) -> dict[str, tuple]:
  """Everything below a folder, and when it changed: also of a folder, if a file in it came or
  went."""
  found = {}
  for folder, folders, files in os.walk(base):
    for name in {*folders, *files} - {files_lib.LOCK}:
      path = os.path.join(folder, name)
      now = os.lstat(path)
      found[os.path.relpath(path, base)] = now.st_mode, now.st_ino, now.st_size, now.st_mtime_ns
  return found


def _refusals(base: pathlib.Path, config, files: dict[str, Callable[[], None]], **asked) -> dict:
  """What a restore says to each file, which `files` writes; nothing else changes."""
  said = {}
  for name, write in files.items():
    write()
    before = _tree(base)
    with pytest.raises(ValueError) as refused:
      restore.restore(config, base / 'run', restore.Asked('latest', **asked), lambda text: None)
    said[name] = str(refused.value)
    assert said[name].isprintable() and len(said[name]) < 1000, (name, said[name])
    assert _tree(base) == before, name
  gc.collect()
  return said


def _manifest(base: pathlib.Path) -> pathlib.Path:
  return base / 'run' / manifests.FOLDER / '1.json'


def _signed(values: dict) -> bytes:
  """A manifest with a right digest."""
  values = {name: value for name, value in values.items() if name != 'digest'}
  return json.dumps({**values, 'digest': manifests.sha256(values)}).encode()


def _replaced(path: pathlib.Path, data: bytes) -> Callable[[], None]:
  return lambda: path.write_bytes(data)


@pytest.fixture(name='base')
def _base(whole) -> Iterator[pathlib.Path]:
  """The run and what is beside it; put back as it was after the test."""
  path = _manifest(whole)
  data = path.read_bytes()
  yield whole
  path.unlink()
  path.write_bytes(data)


# --- Names and numbers ----------------------------------------------------------------------------

UP = ('..', '../..', '../../outside', '../l0', '../../../../../../etc', 'l0/../../../outside')
PATHS = (
  *UP,
  *(f'l0/{way}' for way in UP),
  *(f'{way}/' for way in UP),
  *(f'./{way}' for way in UP),
  *('/', '/etc', '//', '/dev/null', '~', '~root', 'l0/', '/l0', 'l0/ckpt', '..\\l0'),
)
WORDS = (
  *('', '.', ' ', 'l0 ', ' l0', 'l0\n', '\nl0', 'l0\0', 'l0\0.json', '\x1b[2J', 'l\u202e0'),
  *('L0', 'l.0', '-l0', '_l0', 'l٠', 'ｌ0', 'l0*', '$HOME', '`id`', 'l0;id', 'x' * 64),
  *('x' * 9000, '%2e%2e', 'l0\t', 'é'),
)
VALUES = (None, 0, True, 1.5, [], ['l0'], {}, {'l0': 1})
NAMES = (*PATHS, *WORDS, *VALUES)
NUMBERS = (
  *('../../../outside', '1', '', None, True, False, 1.0, -1, [], {}, [1]),
  *(1 << 53 | 1, 1 << 63, 10**30, 10**90),
)


@pytest.mark.parametrize('place', ['part', 'missing', 'unverified'])
def test_names_that_are_no_ids_never_become_paths(config, base, place):
  assert len(NAMES) >= 60
  values = json.loads(_manifest(base).read_bytes())
  files = {}
  for name in NAMES:
    changed = json.loads(json.dumps(values))
    match place:
      case 'part':
        changed['parts'][0]['learner'] = name
      case 'missing':
        changed['missing'] = [[name, 'why']]
      case 'unverified':
        changed['unverified'] = [name]
    files[f'{name!r:.40}{len(files)}'] = _replaced(_manifest(base), _signed(changed))
  for said in _refusals(base, config, files).values():
    assert 'no snapshot in' in said


@pytest.mark.parametrize(
  'path', [('snapshot',), ('step',), ('checkpoint',), ('parts', 0, 'checkpoint')]
)
def test_numbers_out_of_range_never_become_paths(config, base, path):
  files = {}
  for number in NUMBERS:
    values = json.loads(_manifest(base).read_bytes())
    *way, last = path
    inner = values
    for step in way:
      inner = inner[step]
    inner[last] = number
    files[repr(number)] = _replaced(_manifest(base), _signed(values))
  _refusals(base, config, files)


def test_the_operators_words_are_typed_too(config, base):
  before = _tree(base)
  for name in WORDS + PATHS:
    for asked in (restore.Asked(name), restore.Asked('latest', without=(name,))):
      with pytest.raises(ValueError) as refused:
        restore.restore(config, base / 'run', asked, print)
      assert len(str(refused.value)) < 20_000
  assert _tree(base) == before


# --- Manifests ------------------------------------------------------------------------------------

TEXTS = {
  'lists without an end': b'[' * 200_000,
  'objects without an end': b'{"a":' * 200_000,
  'deep': b'{"a":' + b'[' * 5000 + b']' * 5000 + b'}',
  'nothing': b'',
  'a list': b'[]',
  'a number': b'1',
  'null': b'null',
  'a text': b'"snapshot"',
  'an empty object': b'{}',
  'cut': b'{"snapshot": 1, "dig',
  'NaN': b'{"snapshot": NaN}',
  'infinite': b'{"snapshot": 1e999}',
  'digits': b'{"snapshot": ' + b'9' * 10_000 + b'}',
  'binary': bytes(range(256)),
  'UTF-16': '{"snapshot": 1}'.encode('utf-16'),
  'half of a pair': b'{"snapshot": "\\ud800"}',
  'nul': b'\0' * 4096,
  'large': b' ' * (json_files.MAX_BYTES + 1),
  'no digest': b'{"kind": "Manifest", "snapshot": 1}',
  'a wrong digest': b'{"kind": "Manifest", "snapshot": 1, "digest": "00"}',
}


def test_hostile_manifests(config, base):
  values = json.loads(_manifest(base).read_bytes())
  files = {name: _replaced(_manifest(base), text) for name, text in TEXTS.items()}
  for name in sorted(values.keys() - {'digest'}):
    for what, wrong in (('gone', None), ('a number', -1), ('nested', [[{'kind': 'Part'}]])):
      changed = {**values, name: wrong}
      if what == 'gone':
        del changed[name]
      files[f'{name} {what}'] = _replaced(_manifest(base), _signed(changed))
  twice = {**values, 'parts': [*values['parts'], values['parts'][0]]}
  files['a learner twice'] = _replaced(_manifest(base), _signed(twice))
  files['one field more'] = _replaced(_manifest(base), _signed({**values, 'more': 1}))
  assert len(files) >= 40
  for name, said in _refusals(base, config, files).items():
    assert 'no snapshot in' in said, name


# --- Links and other special files ----------------------------------------------------------------


@pytest.fixture(name='copy')
def _copy(whole, tmp_path) -> pathlib.Path:
  return shutil.copytree(whole, tmp_path / 'base')


@pytest.mark.parametrize(
  'path',
  [
    'snapshots/1.json',
    'snapshots',
    'islands',
    'islands/l0',
    'islands/l0/ckpt',
    'islands/l0/ckpt/105',
    'islands/l0/ckpt/105/record',
    'islands/l0/ckpt/105/record/data.json',
    'islands/l0/ckpt/105/state/_METADATA',
    'syncer',
    'syncer/ckpt/100',
    'syncer/wal',
    'tapes',
  ],
)
def test_links_are_not_followed(config, copy, path):
  place = copy / 'run' / path
  if path == 'tapes':
    place.mkdir()
  place.rename(copy / 'outside' / 'moved')
  place.symlink_to(copy / 'outside' / 'moved')
  (said,) = _refusals(copy, config, {path: lambda: None}).values()
  assert 'symbolic link' in said or 'no snapshot in' in said, said


def test_neither_are_pipes_and_folders(config, copy):
  path = _manifest(copy)
  for make in (os.mkfifo, os.mkdir):
    path.unlink() if path.is_file() or path.is_fifo() else None
    make(path)
    _refusals(copy, config, {'special': lambda: None})


def test_a_link_in_the_log_is_not_followed(tmp_path):
  """Neither to read nor to write."""
  target = tmp_path / 'target'
  target.write_bytes(b'of another program')
  for name in (wal_format.segment_name(1), wal_format.segment_name(1) + wal_format.NEW, 'lock'):
    files = files_lib.Files(tmp_path / name)
    (tmp_path / name / name).symlink_to(target)
    with pytest.raises((wal_format.WalBroken, files_lib.DirectoryError)):
      files.lock()
      wal.open_log(files, 'run')
    files.close()
  assert target.read_bytes() == b'of another program'


def test_a_config_that_is_a_link_is_neither_read_nor_written_through(config, tmp_path):
  target = tmp_path / 'target'
  workdir = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  (workdir / load.FILE).rename(target)
  (workdir / load.FILE).symlink_to(target)
  before = target.read_bytes()
  with pytest.raises(ValueError, match='config.json: it is a symbolic link'):
    load.read(workdir)
  config_with_more = load.load('stdlib_lm:tiny')
  config_with_more.train.steps = 7
  load.write(workdir, config_with_more)
  assert target.read_bytes() == before and load.read(workdir).train.steps == 7


# --- Other JSON -----------------------------------------------------------------------------------


def _read_tape(workdir: pathlib.Path) -> None:
  """A tape whose first line has the file's text in a field."""
  path = workdir / 'tapes' / 'l0.1.0.jsonl'
  text = path.read_bytes().replace(b'\n', b' ')
  path.write_bytes(b'{"kind":"Header","x":' + text + b',"hash":"' + b'0' * 64 + b'"}\n')
  tapes.read(tapes.ProcessTape('l0', 1, (path,)))


READERS = {
  load.FILE: load.read,
  'syncer/model/model.json': own_model.read,
  f'syncer/{manifests.RESTORED}': manifests.read_restored,
  'tapes/l0.1.0.jsonl': _read_tape,
}


@pytest.mark.parametrize('name', READERS)
def test_no_reader_of_json_is_broken_by_a_file(tmp_path, name):
  path = tmp_path / name
  path.parent.mkdir(parents=True, exist_ok=True)
  for what, text in TEXTS.items():
    path.write_bytes(text)
    with pytest.raises((ValueError, tape.TapeError)) as refused:
      READERS[name](tmp_path)
    assert len(str(refused.value)) < 1000 and str(refused.value).isprintable(), what


def test_records_that_are_none_are_skipped(tmp_path):
  tail = records_lib.Tail(tmp_path / 'l0.jsonl')
  lines = [text.replace(b'\n', b' ') for text in TEXTS.values() if len(text) < 10**6]
  lines += [b'{"name": 1}', b'{"name": "step", "time": "noon"}', b'{"name": "step", "loss": NaN}']
  (tmp_path / 'l0.jsonl').write_bytes(b'\n'.join(lines) + b'\n')
  (fact,) = tail.read()
  assert fact['name'] == 'step' and math.isnan(fact['loss'])


# --- Rewritten logs -------------------------------------------------------------------------------

Books = Callable[[dict], None]


def _set(*way: str | int, to: object) -> Books:
  def change(header: dict) -> None:
    for step in way[:-1]:
      header = header[step]
    header[way[-1]] = to

  return change


STATE = ('merge', 'machine_state')
REWRITES: dict[str, Books] = {
  'no merge': lambda header: header.pop('merge'),
  'no books': _set(*STATE, to={}),
  'books that are none': _set(*STATE, to=[]),
  'a fragment below 0': _set('merge', 'fragment', to=-1),
  'a fragment too many': _set('merge', 'fragment', to=99),
  'a version too many': _set('merge', 'version', to=99),
  'negative sizes': _set('sizes', to=[-1]),
  'sizes of text': _set('sizes', to='abc'),
  'a size too many': _set('sizes', to=[1, 1, 1, 1, 1]),
  'no participants': _set('merge', 'participants', to=[]),
  'tokens without end': _set('merge', 'participants', 0, 'tokens', to=10**90),
  'tokens below 0': _set('merge', 'participants', 0, 'tokens', to=-(10**6)),
  'another digest': _set('done', 'digest', to=1),
  'another outcome': _set('done', 'failed', to='no'),
  'refused by name': _set('done', 'refused', to=['../l0']),
  'members of numbers': _set(*STATE, 'members', to=[1, 2]),
  'a ledger of text': _set(*STATE, 'ledger', to='abc'),
  'a ghost': lambda header: header['merge']['machine_state']['members'].append(['x']),
  'no next sync': _set(*STATE, 'next', to=None),
  'windows of text': _set(*STATE, 'norms', to=7),
  'shards of text': _set(*STATE, 'data', to='abc'),
  'digests of text': _set(*STATE, 'digests', to=None),
}


@pytest.fixture(scope='module', name='records')
def _records(assembled, tmp_path_factory) -> list[wal.Record]:
  """The log of a syncer that has merged six times."""
  life = durability.Rig(assembled, tmp_path_factory.mktemp('log'))
  for sync in range(1, 7):
    life.merge(sync)
  records = list(life.log._wal.records())
  life.crash()
  life.checkpoints.close()
  return records


def _written(
  folder: pathlib.Path,
  assembled,
  records: list[wal.Record],
  change: Books | None = None,
) -> files_lib.Files:
  """A log of these records, the last of them changed; CRCs and chain are right."""
  files = files_lib.Files(folder)
  log = wal.begin(files, outer_log.run_of(assembled.agreement))
  for record in records:
    header, data = wal_format.unpack(record.payload)
    if change and record is records[-1]:
      change(header)
    log.append(record.kind, *wal_format.pack(header, data))
  log.commit()
  files.close()
  return files_lib.Files(folder)


def test_a_rewritten_log_is_refused_or_coherent_never_a_traceback(assembled, records, tmp_path):
  assert len(REWRITES) >= 20
  theta, accepted = global_model_lib.Theta(assembled), []
  for name, change in {'as it was': None, **REWRITES}.items():
    folder = tmp_path / name
    _written(folder / 'wal', assembled, records, change).close()
    before = _tree(folder / 'wal')
    theta.forget()
    log = commit.CommitLog(files_lib.Files(folder / 'wal'), assembled.agreement, print)
    checkpoints = checkpoint.Checkpoints(str(folder / 'ckpt'))
    try:
      syncer_process.recover(assembled, theta, checkpoints, log, durability.Records(), 'r0')
      accepted.append(name)
    except wal_format.WalError as error:
      assert str(error).isprintable() and len(str(error)) < 1500, (name, error)
      kept = {name: one for name, one in _tree(folder / 'wal').items() if name != commit.AGREEMENT}
      assert kept == before, name
    finally:
      log.close()
      checkpoints.close()
  assert accepted == ['as it was'], 'these books are believed'
