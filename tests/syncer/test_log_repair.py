"""A log that the syncer refuses is put right by the command that the refusal names.

Lives of a real syncer's work (test_durability.Rig) leave a real log behind; the command runs in a
process of its own. Seven outer steps, checkpoints behind the second and the fifth: the log holds
records 3 to 7, since the older checkpoint has the first two.
"""

import errno
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from diloco_jax.launch import program
from diloco_jax.storage import wal_format, wal_recovery
from diloco_jax.syncer import log_repair
from tests.syncer import test_durability as durability

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAVES = (2, 5)
assembled = durability._assembled
expected = durability._expected


@pytest.fixture(scope='module', name='past')
def _past(assembled, tmp_path_factory) -> pathlib.Path:
  """The folder of a syncer that was killed after seven outer steps."""
  folder = tmp_path_factory.mktemp('past') / 'syncer'
  life = durability.Rig(assembled, folder)
  for sync in range(1, durability.SYNCS + 1):
    life.merge(sync)
    if sync in SAVES:
      assert not life.save(sync).error
  life.crash()
  life.checkpoints.close()
  return folder


@pytest.fixture(name='folder')
def _folder(past, tmp_path) -> pathlib.Path:
  return shutil.copytree(past, tmp_path / 'syncer')


@pytest.fixture(name='rig')
def _rig(assembled, folder):
  rigs = []

  def make() -> durability.Rig:
    rigs.append(durability.Rig(assembled, folder))
    return rigs[-1]

  yield make
  for rig in rigs:
    rig.crash()
    rig.checkpoints.close()


def run(*arguments: str, before: str = '') -> subprocess.CompletedProcess:
  """The command in a process of its own; `before`: what a shell does first."""
  command = shlex.join([sys.executable, '-m', 'experiments.wal_repair', *arguments])
  return subprocess.run(
    ['bash', '-c', f'{before}exec {command}'],
    cwd=ROOT,
    text=True,
    capture_output=True,
    timeout=200,
    env={
      **os.environ,
      'PYTHONPATH': str(ROOT),
      'JAX_PLATFORMS': 'cpu',
      'PYTHONWARNINGS': '',
      'PYTHONDONTWRITEBYTECODE': '1',
    },
  )


def segments(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted((folder / 'wal').glob('*.wal'))


def record(path: pathlib.Path, number: int) -> int:
  """Where a record begins in its file."""
  entries = wal_format.entries_in(path.read_bytes())
  return next(place for place, entry in entries if entry.kind and entry.number == number)


def rot(path: pathlib.Path, place: int) -> None:
  data = bytearray(path.read_bytes())
  data[place] ^= 1
  path.write_bytes(data)


def all_bytes(folder: pathlib.Path) -> int:
  return sum(path.stat().st_size for path in (folder / 'wal').iterdir() if path.name != 'lock')


def refusal(rig) -> str:
  with pytest.raises(program.NeverRetry) as refused, program.log_failures():
    rig()
  return str(refused.value)


def test_the_command_that_the_refusal_names_makes_it_start_again(rig, folder, expected):
  newest = segments(folder)[-1]
  rot(newest, record(newest, 6) + wal_format.ENTRY_HEADER_BYTES + 100)
  words, before = refusal(rig), all_bytes(folder)
  assert words.startswith('DD402') and newest.name in words and 'at byte' in words
  module, *arguments = shlex.split(re.search(r'run: python -m (.*?) \(drops 2 upd', words)[1])
  assert module == 'experiments.wal_repair' and arguments[-1] == '--to=5'
  done = run(*arguments)
  assert done.returncode == 0, done.stdout + done.stderr
  assert 'Dropped: 2 updates.' in done.stdout and 'nothing is to be done' in done.stdout
  assert any(path.name.endswith('.aside') for path in (folder / 'wal').iterdir())
  assert all_bytes(folder) >= before  # nothing was deleted
  life = rig()
  assert durability.bits(life.theta) == expected[5]
  assert not life.merge(6).failed and durability.bits(life.theta) == expected[6]
  life.crash()
  assert durability.bits(rig().theta) == expected[6]


def test_a_look_shows_what_there_is_and_changes_nothing(rig, folder):
  newest = segments(folder)[-1]
  place = record(newest, 7)
  rot(newest, place + 30)
  before = durability._content(folder / 'wal')
  shown = run(str(folder.parent))
  assert shown.returncode == program.NEVER_RETRY
  assert f'Damaged: {newest.name} at byte {place}' in shown.stdout, shown.stdout + shown.stderr
  assert 'records 3 to 6 are whole, in 2 files' in shown.stdout
  assert 'Checkpoint 5 holds every record up to 5' in shown.stdout
  assert re.search(r'--to=6  \(drops 1 updates; the log is cut', shown.stdout)
  assert durability._content(folder / 'wal') == before


def ends_before_its_checkpoint(folder: pathlib.Path) -> None:
  """The newest file is gone, the one before it ends with record 4; the checkpoint holds 5."""
  *_, old, new = segments(folder)
  new.unlink()
  os.truncate(old, record(old, 5))


def test_a_log_that_ends_before_its_checkpoint_begins_anew_behind_it(rig, folder, expected):
  """Nothing that the checkpoint holds is lost."""
  ends_before_its_checkpoint(folder)
  words = refusal(rig)
  assert 'holds all records up to 5, but the log ends with record 4' in words
  command = re.search(r'python -m experiments\.wal_repair (\S+)', words)[1]
  with log_repair.opened(pathlib.Path(command)) as repair:
    findings = repair.look()
    assert [number for number, _ in findings.ways] == [5, 4, 2]
    assert 'checkpoint 5, which holds every record up to 5' in repair.cut(findings, 5)
    assert log_repair.sound(repair.look())
  for sync in (6, 7):
    life = rig()
    assert durability.bits(life.theta) == expected[sync - 1]
    life.merge(sync)
    life.crash()


def test_what_is_newer_than_the_cut_is_put_aside_with_it(rig, folder, expected):
  """Behind record 4: the checkpoint that holds 5 is of no use any more."""
  ends_before_its_checkpoint(folder)
  with log_repair.opened(folder.parent) as repair:
    assert 'Checkpoints that are newer were put aside, too: 5.' in repair.cut(repair.look(), 4)
  assert (folder / 'ckpt' / '5.aside').is_dir()
  life = rig()
  assert durability.bits(life.theta) == expected[4]
  assert life.checkpoints.steps == [2]


def test_a_record_that_cannot_be_reached_is_refused(folder):
  before = durability._content(folder / 'wal')
  with log_repair.opened(folder / 'wal') as repair:
    for number in (1, 8):  # the log begins with 3, the oldest checkpoint holds 2
      with pytest.raises(ValueError, match='it can behind 7, 5, 2. Nothing was changed'):
        repair.cut(repair.look(), number)
  assert durability._content(folder / 'wal') == before
  assert sorted(path.name for path in (folder / 'ckpt').iterdir() if path.is_dir()) == ['2', '5']


def test_nobody_repairs_the_log_of_a_running_syncer(rig, folder):
  life = rig()
  refused = run(str(folder.parent), '--to=5')
  assert refused.returncode == program.NEVER_RETRY
  assert f'DD406 {folder}/wal is already used by syncer pid {os.getpid()}' in refused.stderr
  assert not life.merge(8).failed  # and it goes on


def test_a_failing_disk_ends_it_with_74_and_it_can_be_run_again(rig, folder, expected):
  full = run(str(folder.parent), '--to=6', before='ulimit -f 1; ')  # files of 1 KiB at most
  assert full.returncode == program.DISK_FAILED, full.stdout + full.stderr
  assert 'File too large' in full.stderr and 'run this again' in full.stderr
  with log_repair.opened(folder.parent) as repair:
    assert 'Dropped: 1 updates.' in repair.cut(repair.look(), 6)
  assert durability.bits(rig().theta) == expected[6]


def test_a_new_log_that_could_not_begin_is_begun_by_running_it_again(folder, monkeypatch):
  ends_before_its_checkpoint(folder)
  with log_repair.opened(folder.parent) as repair:
    fsync = repair._files.fsync

    def fail(name: str) -> None:
      raise OSError(errno.EIO, 'Input/output error')

    monkeypatch.setattr(repair._files, 'fsync', fail)
    with pytest.raises(wal_format.WalBroken):
      repair.cut(repair.look(), 5)
    monkeypatch.setattr(repair._files, 'fsync', fsync)
    assert not wal_recovery.segment_names(repair._files)
    repair.cut(repair.look(), 5)
    assert log_repair.sound(repair.look())


def test_a_folder_without_a_log_is_said(tmp_path):
  with pytest.raises(ValueError, match='there is no log of a syncer in'):
    with log_repair.opened(tmp_path):
      raise AssertionError('it was opened')
