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
from collections.abc import Callable

import pytest

from diloco_jax.config import load
from diloco_jax.process import own_model, restore, run_folder
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, json_files, outer_log, states, tapes, wal
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.syncer import commit, global_model
from diloco_jax.syncer import node as syncer_node
from diloco_jax.verification.replay import tape_files
from tests.process import test_restore as restores
from tests.syncer import test_durability as durability

config = restores._config
assembled = durability._assembled


@pytest.fixture(scope='module', name='whole')
def _whole(config, tmp_path_factory) -> pathlib.Path:
  """A run that can be restored, and a folder beside it that looks like an island."""
  base = tmp_path_factory.mktemp('whole')
  restores.make_run(config, base / 'run')
  half = base / 'outside' / 'ckpt' / '99.orbax-checkpoint-tmp'
  half.mkdir(parents=True)
  (half / 'file').write_text('of another program')
  return base


def _tree(base: pathlib.Path) -> dict[str, tuple]:
  """Everything below a folder, and when it changed: also of a folder, if a file in it came or
  went."""
  statuses = {}
  for folder, folders, files in os.walk(base):
    for name in {*folders, *files} - {files_lib.LOCK}:
      path = os.path.join(folder, name)
      now = os.lstat(path)
      statuses[os.path.relpath(path, base)] = now.st_mode, now.st_ino, now.st_size, now.st_mtime_ns
  return statuses


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


def _resave(path: pathlib.Path, change: Callable[[dict], None]) -> None:
  """Changes the record of a checkpoint, or a lineage; its digest is right."""
  values = json_files.unseal(json.loads(path.read_bytes()))
  change(values['manifest']['record'] if 'manifest' in values else values)
  path.write_text(json.dumps(json_files.seal(values)), encoding='utf-8')


@pytest.mark.parametrize(
  'way, values',
  [
    (('protocol', 'members', 0, 'learner'), NAMES),  # none becomes a path
    (('protocol', 'log'), NUMBERS),
    (('step',), NUMBERS),
    (('data_state',), NUMBERS),
  ],
)
def test_a_checkpoint_with_a_name_or_a_number_that_is_none_is_passed_over(whole, way, values):
  folder = whole / 'run' / 'syncer' / 'ckpt' / '205'
  place = folder / states.MANIFEST
  before = place.read_bytes()
  try:
    for value in values:
      _resave(place, _set(*way, to=value))
      with pytest.raises((ValueError, states.StateError)):
        restore._require_state(states.read(folder).record['protocol'], folder)
    assert restores._choose(whole / 'run').clock == 105
  finally:
    place.write_bytes(before)
  gc.collect()


def test_a_lineage_with_a_name_that_is_none_is_refused(tmp_path):
  assert len(NAMES) >= 60
  lineage_lib.write(tmp_path, lineage_lib.Lineage(gone=('l0',)))
  for name in NAMES:
    _resave(tmp_path / lineage_lib.FILE, _set('gone', to=[name]))
    with pytest.raises(ValueError, match='does not read back'):
      lineage_lib.read(tmp_path)


def test_the_operators_words_are_typed_too(config, whole):
  before = _tree(whole)
  for name in WORDS + PATHS:
    with pytest.raises(ValueError, match="--to is 'latest' or a clock") as refused:
      restore.restore(config, whole / 'run', name, print)
    assert len(str(refused.value)) < 20_000
  assert _tree(whole) == before


# --- Links and other special files ----------------------------------------------------------------


@pytest.mark.parametrize(
  'path',
  [
    'islands',
    'islands/l0',
    'islands/l0/ckpt',
    'islands/l0/ckpt/200',
    'islands/l0/ckpt/200/state',
    'islands/l0/ckpt/200/manifest.json',
    'islands/l0/ckpt/200/state/_METADATA',
    'syncer',
    'syncer/ckpt/205',
    'syncer/wal',
    'tapes',
  ],
)
def test_links_are_not_followed(config, whole, tmp_path, path):
  """A folder that is one is refused, a checkpoint with one is passed over."""
  base = shutil.copytree(whole, tmp_path / 'base')
  place = base / 'run' / path
  place.rename(base / 'outside' / 'moved')
  place.symlink_to(base / 'outside' / 'moved')
  before, outside, said = _tree(base), _tree(base / 'outside'), []
  if '/ckpt/' in path:
    restore.restore(config, base / 'run', 'latest', said.append)
    assert 'symbolic link' in said[0] and 'passed over' in said[0], said
  else:
    with pytest.raises(ValueError, match='symbolic link'):
      restore.restore(config, base / 'run', 'latest', said.append)
    assert _tree(base) == before
  assert _tree(base / 'outside') == outside
  gc.collect()


def test_neither_are_pipes_and_folders(tmp_path, whole):
  workdir = shutil.copytree(whole / 'run', tmp_path / 'run')
  path = workdir / 'syncer' / 'ckpt' / '205' / states.MANIFEST
  for make in (os.mkfifo, os.mkdir):
    path.unlink()
    make(path)
    assert restores._choose(workdir).clock == 105
    path = workdir / lineage_lib.FILE
    make(path)
    with pytest.raises(ValueError, match='does not read back'):
      lineage_lib.read(workdir)
    path.rmdir() if path.is_dir() else path.unlink()
    path = workdir / 'islands' / 'l0' / 'ckpt' / '200' / states.MANIFEST


def test_a_link_in_the_log_is_not_followed(tmp_path):
  """Neither to read nor to write."""
  target = tmp_path / 'target'
  target.write_bytes(b'of another program')
  for name in (wal.name_of(0), wal.NEW, 'lock'):
    files = files_lib.Files(tmp_path / name)
    (tmp_path / name / name).symlink_to(target)
    with pytest.raises((wal.WalBroken, files_lib.DirectoryError)):
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


# --- JSON ----------------------------------------------------------------------------------------

TEXTS = {  # beside those of tests/protocol/test_safe_json.py
  'lists without an end': b'[' * 200_000,
  'binary': bytes(range(256)),
  'a list': b'[]',
  'a number': b'1',
  'null': b'null',
  'a text': b'"log"',
  'an empty object': b'{}',
  'cut': b'{"log": 1, "dig',
  'large': b' ' * (json_files.MAX_BYTES + 1),
  'no digest': b'{"kind": "Note", "log": 1}',
  'a wrong digest': b'{"kind": "Note", "log": 1, "digest": "00"}',
}


def _read_tape(workdir: pathlib.Path) -> None:
  """A tape whose first line has the file's text in a field."""
  path = workdir / 'tapes' / 'l0.1.0.jsonl'
  text = path.read_bytes().replace(b'\n', b' ')
  path.write_bytes(b'{"kind":"Header","x":' + text + b',"hash":"' + b'0' * 64 + b'"}\n')
  tape_files.read(tapes.ProcessTape('l0', 1, (path,)))


READERS = {
  load.FILE: load.read,
  f'syncer/model/{states.MANIFEST}': own_model.read,
  lineage_lib.FILE: lineage_lib.read,
  'tapes/l0.1.0.jsonl': _read_tape,
}


@pytest.mark.parametrize('name', READERS)
def test_no_reader_of_json_is_broken_by_a_file(tmp_path, name):
  path = tmp_path / name
  path.parent.mkdir(parents=True, exist_ok=True)
  for what, text in TEXTS.items():
    path.write_bytes(text)
    with pytest.raises((ValueError, tape_lib.TapeError)) as refused:
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


def _write_log(
  folder: pathlib.Path, assembled, records: list[wal.Record], change: Books | None = None
) -> files_lib.Files:
  """A log of these records, the last of them changed; CRCs and chain are right."""
  files = files_lib.Files(folder)
  log = wal.begin(files, outer_log.run_of(assembled.agreement))
  for record in records:
    header, data = outer_log.unpack(record.payload)
    if change and record is records[-1]:
      change(header)
    log.append(record.kind, *outer_log.pack(header, data))
    log.commit()
  files.close()
  return files_lib.Files(folder)


def test_a_rewritten_log_is_refused_or_coherent_never_a_traceback(assembled, records, tmp_path):
  assert len(REWRITES) >= 20
  theta, accepted = global_model.Theta(assembled), []
  for name, change in {'as it was': None, **REWRITES}.items():
    folder = tmp_path / name
    _write_log(folder / 'wal', assembled, records, change).close()
    before = _tree(folder / 'wal')
    theta.forget()
    log = commit.CommitLog(files_lib.Files(folder / 'wal'), assembled.agreement, print)
    checkpoints = checkpoint.Checkpoints(str(folder / 'ckpt'))
    try:
      origin = lineage_lib.Lineage(run='0' * 16)
      syncer_node.recover(assembled, theta, checkpoints, log, durability.Records(), origin)
      accepted.append(name)
    except wal.WalError as error:
      assert str(error).isprintable() and len(str(error)) < 1500, (name, error)
      after = _tree(folder / 'wal')
      after.pop(outer_log.AGREEMENT, None)
      assert after == before, name
    finally:
      log.close()
      checkpoints.close()
  assert accepted == ['as it was'], 'these books are believed'
