"""A run comes back to a snapshot that is whole, bit for bit, or to one before; nothing is deleted.

Checkpoints are real ones of a few small arrays: which model they are of does not matter here. The
last tests damage the log of a syncer that has merged and saved (tests/syncer/test_durability.py).
"""

import copy
import errno
import gc
import pathlib
import random
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import build, load
from diloco_jax.configs import own_loop, stdlib_lm
from diloco_jax.launch import cli, own_model, restore, run_folder
from diloco_jax.protocol import actions, events
from diloco_jax.storage import checkpoint, manifests, outer_log, wal, wal_format
from diloco_jax.storage import files as files_lib
from diloco_jax.syncer import snapshot_work
from diloco_jax.transport import addresses
from tests.syncer import test_durability as durability

# Orbax now and then leaves a coroutine of its own unawaited when a read fails; tests that make
# reads fail collect it, so that it complains there.
pytestmark = [
  pytest.mark.filterwarnings('ignore:coroutine:RuntimeWarning'),
  pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
]
CHAIN = bytes(range(32))
LEARNERS = ('l0', 'l1', 'l2')
assembled = durability._assembled
expected = durability._expected


@pytest.fixture(scope='module', name='config')
def _config():
  return stdlib_lm.get_config('tiny')


@pytest.fixture(scope='module', name='agreement')
def _agreement(config) -> str:
  return build.assemble(config).agreement


def _state(seed: int):
  return {'w': jax.random.normal(jax.random.key(seed), (64,)), 'count': jnp.int32(seed)}


def _books(number: int) -> dict:
  return {
    'log': 10 * number,
    'chain': CHAIN.hex(),
    'members': [{'learner': name, 'left': False} for name in LEARNERS],
  }


def _ckpt(node: pathlib.Path) -> pathlib.Path:
  return node / manifests.CHECKPOINTS


def _pin(
  node: pathlib.Path, snapshot: int, step: int, seed: int, protocol: dict
) -> checkpoint.Saved:
  """Saves for a snapshot."""
  checkpoints = checkpoint.Checkpoints(str(_ckpt(node)))
  saved = checkpoints.save(step, _state(seed), seed, protocol, snapshot, range(snapshot))()
  checkpoints.close()
  return saved


def _take(workdir: pathlib.Path, number: int, agreement: str, learners=LEARNERS[:2]) -> None:
  """A snapshot of the syncer and two of its three learners."""
  islands = {name: manifests.island_folder(workdir, name) for name in learners}
  step = 100 * number
  own = _pin(manifests.syncer_folder(workdir), number, step, number, _books(number))
  parts = []
  for seed, (name, folder) in enumerate(islands.items(), 10 * number):
    saved = _pin(folder, number, step + 5, seed, {})
    parts.append(
      actions.Part(
        learner=name,
        incarnation=1,
        checkpoint=saved.number,
        record_sha256=saved.record_sha256,
      )
    )
  write = actions.WriteManifest(
    snapshot=number,
    clock=step,
    checkpoint=own.number,
    record_sha256=own.record_sha256,
    parts=tuple(parts),
    missing=(('l2', 'it disconnected before it had saved'),),
  )
  assert snapshot_work.write(workdir, agreement, write) == events.ManifestWritten(snapshot=number)


@pytest.fixture(name='workdir')
def _workdir(config, agreement, tmp_path) -> pathlib.Path:
  """A run with the snapshots 1 and 2, and what came after them."""
  workdir = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  for number in (1, 2):
    _take(workdir, number, agreement)
  for node in (manifests.syncer_folder(workdir), manifests.island_folder(workdir, 'l0')):
    checkpoints = checkpoint.Checkpoints(str(_ckpt(node)))
    checkpoints.save(999, _state(99), 99, _books(3))
    checkpoints.close()
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  wal.begin(files, 'the run', 20, CHAIN).append(1, b'an outer step')
  files.close()
  (workdir / 'tapes').mkdir()
  (workdir / 'tapes' / 'l0.1.0.jsonl').write_text('{}\n')
  (workdir / 'model').mkdir()
  (workdir / 'model' / 'array').write_text('of the end')
  return workdir


def _contents(workdir: pathlib.Path) -> dict[pathlib.Path, bytes]:
  """Every file there is; who holds the lock is no content."""
  return {
    path.relative_to(workdir): path.read_bytes()
    for path in sorted(workdir.rglob('*'))
    if path.is_file() and path.name != files_lib.LOCK
  }


def _flip(path: pathlib.Path, byte: int, bit: int) -> None:
  data = bytearray(path.read_bytes())
  data[byte] ^= 1 << bit
  path.write_bytes(data)


def _damage(workdir: pathlib.Path, number: int) -> None:
  """Flips a bit of what a learner's checkpoint says of its arrays."""
  pinned = _ckpt(manifests.island_folder(workdir, 'l1')) / str(100 * number + 5)
  _flip(pinned / 'record' / 'data.json', 10, 3)


def _damage_syncer(workdir: pathlib.Path, number: int) -> None:
  """The same with the syncer's checkpoint of a snapshot."""
  _flip(_ckpt(workdir / 'syncer') / str(100 * number) / 'record' / 'data.json', 10, 3)


def _restore(config, workdir, which='latest', **asked) -> list[str]:
  said = []
  restore.restore(config, workdir, restore.Asked(which, **asked), said.append)
  return said


def _held(folder: pathlib.Path) -> checkpoint.Restored:
  """What the next process of a node continues from."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  checkpoints = checkpoint.Checkpoints(str(folder))
  try:
    return checkpoints.restore(jax.tree.map(lambda _: place, _state(0)), _state(0))
  finally:
    checkpoints.close()


def _same(one: checkpoint.Restored, other: checkpoint.Restored) -> bool:
  bits = [
    [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(held.state)] for held in (one, other)
  ]
  return bits[0] == bits[1] and (one.data_state, one.protocol) == (other.data_state, other.protocol)


# --- What is found --------------------------------------------------------------------------------


def test_flipped_bits_are_found(config, agreement, tmp_path, counts):
  """In arrays, records and manifest, wherever they are on the disk. What is not found does not
  matter: everything reads back as it was."""
  workdir = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  _take(workdir, 1, agreement, ['l0'])
  roots = [_ckpt(workdir / 'syncer'), _ckpt(workdir / 'islands' / 'l0')]
  truth = [_held(root) for root in roots]
  files = [
    path
    for root in (*roots, workdir / 'snapshots')
    for path in sorted(root.rglob('*'))
    if path.is_file() and path.stat().st_size
  ]
  draw, found, harmless = random.Random(4), 0, 0
  while found < counts.flips:
    path = files[(found + harmless) % len(files)]  # each of them, small or large
    whole = path.read_bytes()
    _flip(path, draw.randrange(len(whole)), draw.randrange(8))
    try:
      restore.choose(config, workdir, restore.Asked('1'), lambda text: None)
    except ValueError:
      found += 1
    else:
      harmless += 1
      assert all(_same(_held(root), before) for root, before in zip(roots, truth)), path
    path.write_bytes(whole)
  gc.collect()
  asked = restore.Asked('latest')
  assert restore.choose(config, workdir, asked, print).manifest.snapshot == 1
  for which in ('latest', 'checkpoint'):  # more than the model of the run can take
    with pytest.raises(ValueError, match='whole'):
      find = restore.choose if which == 'latest' else restore.newest_checkpoint
      find(config, workdir, restore.Asked(which, most_bytes=lambda: 8), lambda text: None)
  assert harmless < 3 * counts.flips, 'it looks at next to nothing'


@pytest.mark.parametrize('where', ['manifest', 'syncer', 'gone'])
def test_a_damaged_snapshot_is_passed_over_and_the_one_before_is_taken(config, workdir, where):
  syncer = _ckpt(manifests.syncer_folder(workdir))
  match where:
    case 'manifest':
      _flip(workdir / manifests.FOLDER / '2.json', 40, 0)
      words = 'its manifest .*2.json'
    case 'syncer':
      record = syncer / '200' / 'record' / 'data.json'
      record.write_text(record.read_text().replace('"log": 20', '"log": 21'))
      words = 'syncer/ckpt/200 .* its record is not the one that was saved'
    case 'gone':
      (syncer / '200').rename(syncer / 'elsewhere')
      words = 'syncer/ckpt/200 is missing'
  said = _restore(config, workdir)
  assert re.search(f'snapshot 2 is damaged or partial.*{words}', said[0]), said
  assert any('continues from snapshot 1, sync 100' in line for line in said), said
  assert _held(workdir / 'syncer' / 'ckpt').data_state == 1
  assert (workdir / 'aside-1' / manifests.FOLDER / '2.json').exists()
  gc.collect()


@pytest.mark.parametrize('where', ['another', 'damaged', 'gone'])
def test_a_part_that_is_missing_is_named_and_left_out_only_if_asked(config, workdir, where):
  """Without that consent nothing changes; with it the learner starts from the fragments."""
  island = _ckpt(manifests.island_folder(workdir, 'l1'))
  match where:
    case 'another':  # whole in itself, but not what the manifest names
      shutil.copytree(island / '105', island / '205', dirs_exist_ok=True)
    case 'damaged':
      _damage(workdir, 2)
    case 'gone':
      (island / '205').rename(island / 'elsewhere')
  before = _contents(workdir)
  for which in ('latest', '2'):
    with pytest.raises(ValueError, match='l1: .*islands/l1/ckpt/205 .*--without=l1 ') as refused:
      _restore(config, workdir, which)
    assert '1 of the 2 parts of snapshot 2' in str(refused.value)
  with pytest.raises(ValueError, match='--without=l7: snapshot 2 has parts of l0, l1'):
    _restore(config, workdir, without=('l7', 'l1'))
  assert _contents(workdir) == before
  said = _restore(config, workdir, without=('l1',))
  assert any('continues from snapshot 2, sync 200' in line for line in said), said
  assert any(re.search('l1 starts from the fragments.*left out', line) for line in said), said
  assert manifests.read_restored(workdir).back == ('l0',)
  assert not manifests.checkpoints(manifests.island_folder(workdir, 'l1'))
  assert _held(workdir / 'islands' / 'l0' / 'ckpt').data_state == 20
  gc.collect()


def test_a_snapshot_that_was_named_is_the_one_or_none(config, workdir):
  _damage_syncer(workdir, 2)
  before = _contents(workdir)
  with pytest.raises(ValueError, match='snapshot 2 is not whole, nothing was .*; there are: 1'):
    _restore(config, workdir, '2')
  for which in ('3', 'newest', '../1'):
    with pytest.raises(ValueError, match='there is no snapshot .* there are: 1, 2'):
      _restore(config, workdir, which)
  _damage_syncer(workdir, 1)
  with pytest.raises(ValueError, match='no snapshot in .* is whole .* train --resume continues'):
    _restore(config, workdir)
  _damage_syncer(workdir, 1)  # the same bit once more
  gc.collect()
  assert _contents(workdir) == before


# --- What is done ---------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_snapshot_and_nothing_is_deleted(config, workdir):
  before, address = _contents(workdir), workdir / run_folder.ADDRESS
  address.write_text(addresses.ENDED)
  said = _restore(config, workdir)
  assert not address.exists(), 'a learner would believe that the run has ended'
  assert len(_contents(workdir)) == len(before) + 2, 'nothing is copied: a log and a note are new'
  for folder, step, seed in (('syncer', 200, 2), ('islands/l0', 205, 20), ('islands/l1', 205, 21)):
    held = _held(workdir / folder / 'ckpt')
    assert held.step == step and held.data_state == seed
    jax.tree.map(np.testing.assert_array_equal, held.state, _state(seed))
  after = list(_contents(workdir).values())
  assert all(data in after for data in before.values())
  assert (workdir / 'aside-1' / 'tapes' / 'l0.1.0.jsonl').exists()
  assert (workdir / 'aside-1' / 'model' / 'array').exists() and not (workdir / 'model').exists()
  assert (workdir / 'aside-1' / 'islands' / 'l0' / 'ckpt' / '999').exists()
  assert any(re.search('l2 starts from.*it disconnected', line) for line in said), said


def test_its_log_begins_behind_the_snapshot(config, agreement, workdir):
  _restore(config, workdir)
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  log = wal.open_log(files, outer_log.run_of(agreement), 20, CHAIN)
  assert (log.last, list(log.records(20))) == (20, [])
  files.close()


def test_the_snapshot_stays_and_can_be_restored_again(config, workdir):
  _restore(config, workdir, '1')
  assert manifests.numbers(workdir) == [1]
  _restore(config, workdir)
  assert _held(workdir / 'syncer' / 'ckpt').data_state == 1
  assert _held(workdir / 'islands' / 'l1' / 'ckpt').data_state == 11


def test_fewer_learners_are_told_to_the_syncer_more_are_new(config, workdir):
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = 1
  said = _restore(config, workdir)
  assert manifests.read_restored(workdir).gone == ('l1', 'l2')
  assert any('l1 is not in this config' in line for line in said)
  config.sync.learners = 4
  said = _restore(config, workdir)
  assert manifests.read_restored(workdir).gone == ()
  assert any(re.search('l3 starts from the fragments.*it is new', line) for line in said)


def test_another_config_is_refused(workdir):
  config = stdlib_lm.get_config('tiny')
  config.sync.alpha = 0.1
  before = _contents(workdir)
  with pytest.raises(ValueError, match='another config: sync.alpha is 0.1 here, 0.5 there'):
    _restore(config, workdir)
  assert _contents(workdir) == before


def test_a_restore_that_was_cut_short_is_done_again(config, workdir, monkeypatch):
  """Nothing starts from half of it."""

  def cut(*_) -> None:
    raise OSError('no space')

  with monkeypatch.context() as patch:
    patch.setattr(restore.outer_log, 'begin', cut)
    with pytest.raises(OSError, match='no space'):
      _restore(config, workdir)
  with pytest.raises(files_lib.DirectoryError, match='in the middle of a restore'):
    manifests.require_no_restore(workdir)
  _restore(config, workdir)
  manifests.require_no_restore(workdir)
  assert _held(workdir / 'syncer' / 'ckpt').data_state == 2


@pytest.mark.parametrize(
  'role, folder', [('train', ''), ('syncer', 'syncer/wal'), ('learner', 'islands/l1/ckpt')]
)
def test_not_under_a_process_that_runs(config, workdir, role, folder):
  files = files_lib.Files(workdir / folder)
  files.lock(role)
  before = _contents(workdir)
  for which in ('latest', 'checkpoint'):
    with pytest.raises(files_lib.DirectoryError, match=f'already used by {role} pid'):
      _restore(config, workdir, which)
  assert _contents(workdir) == before
  files.close()
  _restore(config, workdir)


def test_the_command_says_what_it_did_or_why_not_in_one_line(config, workdir):
  """Without --config it takes that of the run."""

  def diloco(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
      [sys.executable, '-m', 'diloco_jax', 'restore', *words],
      cwd=pathlib.Path(__file__).parents[2],
      text=True,
      capture_output=True,
      check=False,
    )

  load.write(workdir, config)
  _damage_syncer(workdir, 2)
  done = diloco(f'--workdir={workdir}', '--to=2')
  assert done.returncode == cli.NEVER_RETRY and done.stderr.count('\n') == 1, done.stderr
  assert 'snapshot 2 is not whole' in done.stderr
  _damage(workdir, 1)
  words = (f'--workdir={workdir}', '--to=latest', '--config.sync.learners=2')
  done = diloco(*words)
  assert done.returncode == cli.NEVER_RETRY and '--without=l1 ' in done.stderr
  done = diloco(*words, '--without=l1')
  assert done.returncode == 0, done.stderr
  assert 'the run continues from snapshot 1' in done.stdout
  again = f'diloco_jax train --resume --workdir={workdir}'
  assert done.stdout.splitlines()[-1].endswith(again)
  assert manifests.read_restored(workdir).log == 10
  assert load.read(workdir).sync.learners == 2
  done = diloco(f'--workdir={workdir}/nowhere', '--to=latest', '--config=stdlib_lm:tiny')
  assert done.returncode == cli.NEVER_RETRY and 'there is no run in' in done.stderr


@pytest.mark.parametrize(
  'call, number', [('create', errno.ENOSPC), ('fsync', errno.EIO)], ids=['full', 'failed']
)
def test_a_disk_that_takes_no_new_log_is_one_line_and_74(config, workdir, call, number):
  script = f"""
import sys
from diloco_jax import __main__
from diloco_jax.storage import files
def fail(self, name):
  raise OSError({number}, 'the disk')
files.Files.{call} = fail
__main__.main()
"""
  words = (f'--workdir={workdir}', '--to=2')
  ended = subprocess.run(
    [sys.executable, '-c', script, 'restore', *words],
    cwd=pathlib.Path(__file__).parents[2],
    text=True,
    capture_output=True,
    check=False,
  )
  assert ended.returncode == cli.DISK_FAILED, ended.stderr
  assert ended.stderr.count('\n') == 1 and 'restore again, with the same --to' in ended.stderr
  with pytest.raises(files_lib.DirectoryError, match='in the middle of a restore'):
    manifests.require_no_restore(workdir)
  _restore(config, workdir, '2')
  manifests.require_no_restore(workdir)


def test_a_config_that_cannot_work_is_refused_before_anything_moves(config, workdir):
  """Its corpus is gone."""
  config = copy.deepcopy(config)
  config.data.corpus = str(workdir / 'nowhere')
  before = _contents(workdir)
  for which in ('latest', 'checkpoint'):
    with pytest.raises(ValueError, match='nowhere'):
      _restore(config, workdir, which)
  assert _contents(workdir) == before


@pytest.mark.parametrize('which', ['latest', 'checkpoint'])
def test_a_run_of_own_loops_goes_back_too(tmp_path, which):
  """Its model is the one that the first learner brought; here it donates no moments."""
  config, workdir = own_loop.get_config(), tmp_path / 'run'
  config.sync.fragments = 1
  load.write(workdir, config)
  _pin(manifests.syncer_folder(workdir), 1, 100, 1, _books(1))
  with pytest.raises(ValueError, match='loops of one'):
    _restore(config, workdir, 'checkpoint')
  manifests.require_no_restore(workdir)
  model = own_model.describe({'w': jnp.ones((8, 8))}, lambda name: 'body')
  own_model.write(workdir, model, config)
  agreement = own_model.complete(model, config).agreement
  _take(workdir, 2, agreement, learners=())
  said = _restore(config, workdir, which)
  assert said[1].startswith('the run continues from')
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  assert wal.open_log(files, outer_log.run_of(agreement), 20, CHAIN).last == 20
  files.close()
  assert load.read(workdir) == config


# --- A damaged log --------------------------------------------------------------------------------


@pytest.fixture(scope='module', name='past')
def _past(assembled, tmp_path_factory) -> pathlib.Path:
  """The folder of a run whose syncer was killed after seven outer steps, saved after 2 and 5."""
  workdir = run_folder.open_workdir(assembled.config, tmp_path_factory.mktemp('past'), resume=False)
  life = durability.Rig(assembled, workdir / 'syncer')
  for sync in range(1, durability.SYNCS + 1):
    life.merge(sync)
    if sync in (2, 5):
      assert not life.save(sync).error
  life.crash()
  life.checkpoints.close()
  return workdir


@pytest.fixture(name='damaged')
def _damaged(assembled, past, tmp_path) -> pathlib.Path:
  """A copy of it in which a byte of record 6 has rotted: the syncer refuses it."""
  workdir = shutil.copytree(past, tmp_path / 'run')
  log = max((workdir / 'syncer' / 'wal').glob('*.wal'))
  entries = wal_format.entries_in(log.read_bytes())
  place = next(place for place, entry in entries if entry.kind and entry.number == 6)
  _flip(log, place + wal_format.ENTRY_HEADER_BYTES + 100, 0)
  with pytest.raises(
    cli.NeverRetry, match='is damaged at byte.*restore --to=checkpoint'
  ) as refused:
    with cli.log_failures():
      durability.Rig(assembled, workdir / 'syncer')
  assert log.name in str(refused.value)
  return workdir


def _goes_on(assembled, workdir, expected, sync: int) -> None:
  """The syncer is behind that sync, merges the next one, and would come back there."""
  for behind in (sync, sync + 1):
    life = durability.Rig(assembled, workdir / 'syncer')
    assert durability.bits(life.theta) == expected[behind]
    if behind == sync:
      assert not life.merge(sync + 1).failed
    life.crash()
    life.checkpoints.close()


def test_the_restore_that_the_refusal_names_makes_it_start_again(assembled, damaged, expected):
  before = _contents(damaged)
  said = _restore(assembled.config, damaged, 'checkpoint')
  assert any(
    'continues from checkpoint 5 of the syncer, which holds record 5' in one for one in said
  )
  after = list(_contents(damaged).values())
  assert all(data in after for data in before.values()), 'something was deleted'
  assert list((damaged / 'aside-1' / 'syncer' / 'wal').glob('*.wal'))
  _goes_on(assembled, damaged, expected, 5)


def test_a_damaged_checkpoint_is_passed_over_and_set_aside(assembled, damaged, expected):
  durability._damage(damaged / 'syncer' / 'ckpt' / '5')
  said = _restore(assembled.config, damaged, 'checkpoint')
  assert 'checkpoint 5 is damaged and is skipped' in said[0]
  assert (damaged / 'aside-1' / 'syncer' / 'ckpt' / '5').is_dir()
  _goes_on(assembled, damaged, expected, 2)
  gc.collect()


def test_no_checkpoint_that_is_whole_is_refused_and_none_at_all_is_the_beginning(
  assembled, damaged, expected
):
  ckpt = damaged / 'syncer' / 'ckpt'
  for number in ('2', '5'):
    durability._damage(ckpt / number)
  before = _contents(damaged)
  with pytest.raises(ValueError, match=r'no checkpoint in .*ckpt is whole \(\[2, 5\]\)'):
    _restore(assembled.config, damaged, 'checkpoint')
  assert _contents(damaged) == before
  ckpt.rename(damaged / 'elsewhere')
  _restore(assembled.config, damaged, 'checkpoint')
  _goes_on(assembled, damaged, expected, 0)
  gc.collect()


def test_learners_keep_their_checkpoints_and_snapshots_stay(config, workdir):
  """Snapshot 2 pins a checkpoint of the syncer that does not read back, so 1 is whole."""
  for number in ('200', '999'):
    _flip(_ckpt(workdir / 'syncer') / number / 'record' / 'data.json', 10, 3)
  _restore(config, workdir, 'checkpoint')
  assert _held(_ckpt(workdir / 'syncer')).data_state == 1
  assert _held(_ckpt(workdir / 'islands' / 'l0')).data_state == 99
  said = _restore(config, workdir)
  assert 'snapshot 2 is damaged or partial' in said[0]
  assert any('continues from snapshot 1' in line for line in said)
  gc.collect()
