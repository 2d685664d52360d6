"""A run comes back to a checkpoint of its syncer that is whole, bit for bit; nothing is deleted.

Checkpoints are real ones of a few small arrays: which model they are of does not matter here. The
last tests restore a syncer that has merged and saved (tests/syncer/test_durability.py).
"""

import contextlib
import copy
import errno
import functools
import pathlib
import random
import re
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import load
from diloco_jax.configs import own_loop, stdlib_lm
from diloco_jax.process import exits, own_model, restore, run_folder
from diloco_jax.storage import checkpoint, folders, json_files, outer_log, states, wal
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.transport import addresses
from tests.launch.lib import command_line
from tests.syncer import test_durability as durability

CHAIN = bytes(range(32))
LEARNERS = ('l0', 'l1', 'l2')
assembled = durability._assembled
expected = durability._expected


@pytest.fixture(scope='module', name='config')
def _config():
  return stdlib_lm.get_config('tiny')


def _state(seed: int):
  return {'w': jax.random.normal(jax.random.key(seed), (64,)), 'count': jnp.int32(seed)}


def _books(number: int) -> dict:
  return {
    'log': 10 * number,
    'chain': CHAIN.hex(),
    'members': [{'learner': name, 'left': name == 'l9'} for name in (*LEARNERS, 'l9')],
  }


def _save(node: pathlib.Path, step: int, seed: int, protocol: dict) -> None:
  checkpoints = checkpoint.Checkpoints(str(node / 'ckpt'), keep_every=100)
  checkpoints.save(step, _state(seed), seed, protocol)()
  checkpoints.close()


def _save_all(workdir: pathlib.Path, number: int, learners=LEARNERS[:2]) -> None:
  """The syncer's checkpoint of clock 100 * number + 5, and those of learners a little before."""
  for seed, name in enumerate(learners, 10 * number):
    _save(workdir / 'islands' / name, 100 * number, seed, {})
  _save(workdir / 'syncer', 100 * number + 5, number, _books(number))


def make_run(config, workdir: pathlib.Path) -> pathlib.Path:
  """A run that keeps the checkpoints of clocks 100 and 200, and what came later; l2 has none."""
  run_folder.open_workdir(config, workdir, resume=False)
  for number in (1, 2):
    _save_all(workdir, number)
  _save(workdir / 'islands' / 'l0', 299, 99, {})
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  wal.begin(files, 'the run', 20, CHAIN).append(1, b'an outer step')
  files.close()
  (workdir / 'tapes').mkdir()
  (workdir / 'tapes' / 'l0.1.0.jsonl').write_text('{}\n')
  (workdir / 'model').mkdir()
  (workdir / 'model' / 'array').write_text('of the end')
  return workdir


@pytest.fixture(scope='module', name='whole')
def _whole(config, tmp_path_factory) -> pathlib.Path:
  return make_run(config, tmp_path_factory.mktemp('whole') / 'run')


@pytest.fixture(name='workdir')
def _workdir(whole, tmp_path) -> pathlib.Path:
  return shutil.copytree(whole, tmp_path / 'run')


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


def damage(folder: pathlib.Path) -> None:
  """Flips a bit of what a checkpoint says of its arrays."""
  _flip(folder / states.MANIFEST, 10, 3)


def _restore(config, workdir, to='latest') -> list[str]:
  said = []
  restore.restore(config, workdir, to, said.append)
  return said


def _choose(workdir, at=None) -> restore.Goal:
  return restore.choose((workdir,), at, '', lambda text: None)


def _held(folder: pathlib.Path) -> checkpoint.Restored:
  """What the next process of a node continues from."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with contextlib.closing(checkpoint.Checkpoints(str(folder))) as checkpoints:
    return checkpoints.restore(jax.tree.map(lambda _: place, _state(0)), _state(0))


# --- What is found --------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['folder', 'bucket'])
def test_learners_go_back_in_the_store(kind, config, workdir, bucket, tmp_path):
  config = copy.deepcopy(config)
  config.train.store = f'{bucket.url}/run' if kind == 'bucket' else str(tmp_path / 'store')
  place = folders.place(config.train.store)
  for number in (100, 200, 299):
    _save(place / 'islands' / 'l0', number, number, {})
  said = _restore(config, workdir, '204')
  assert folders.checkpoints(place / 'islands' / 'l0') == [100]
  aside = place / 'aside-1' / 'islands' / 'l0'
  assert folders.checkpoints(aside) == [200, 299]
  assert str(place / 'aside-1') in said[0] and str(workdir / 'aside-1') in said[0]
  states.verify(aside / 'ckpt' / '299')
  _save(place / 'islands' / 'l0', 299, 299, {})
  said = _restore(config, workdir)
  assert str(place / 'aside-2') in said[0] and folders.checkpoints(aside) == [200, 299]


def test_flipped_bits_are_found(config, tmp_path, counts):
  """In arrays and records, wherever they are on the disk."""
  workdir = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  _save_all(workdir, 1, ['l0'])
  roots = [workdir / 'syncer' / 'ckpt', workdir / 'islands' / 'l0' / 'ckpt']
  files = [
    path
    for root in roots
    for path in sorted(root.rglob('*'))
    if path.is_file() and path.stat().st_size
  ]
  draw = random.Random(4)
  for k in range(max(counts.flips, len(files))):
    path = files[k % len(files)]  # each of them, small or large
    whole = path.read_bytes()
    _flip(path, draw.randrange(len(whole)), draw.randrange(8))
    try:
      assert len(_choose(workdir).newest) < 2, path
    except ValueError:
      pass  # that of the syncer
    path.write_bytes(whole)
  assert _choose(workdir).clock == 105


def test_the_newest_at_or_before_a_clock_is_taken_of_each_node(config, workdir):
  """Those of the learners by the clock of the syncer's, not by the one that was asked for."""
  newest = lambda goal: {node.name: number for node, number in goal.newest.items()}
  assert newest(_choose(workdir)) == {'syncer': 205, 'l0': 200, 'l1': 200}
  assert newest(_choose(workdir, 299)) == newest(_choose(workdir, 205)) == newest(_choose(workdir))
  assert newest(_choose(workdir, 204)) == {'syncer': 105, 'l0': 100, 'l1': 100}
  before = _contents(workdir)
  with pytest.raises(ValueError, match='at or before clock 104 .*there are: 105, 205'):
    _restore(config, workdir, '104')
  for to in ('newest', '../1', '-1', '1.0', '', '٣'):
    with pytest.raises(ValueError, match="--to is 'latest' or a clock.*there are: 105, 205"):
      _restore(config, workdir, to)
  assert _contents(workdir) == before


def test_what_is_damaged_is_passed_over_and_said(config, workdir):
  damage(workdir / 'syncer' / 'ckpt' / '205')
  damage(workdir / 'islands' / 'l1' / 'ckpt' / '100')
  said = _restore(config, workdir)
  assert re.search('syncer/ckpt/205.* is passed over', said[0]), said
  assert re.search('islands/l1/ckpt/100.* is passed over', said[1]), said
  assert any('continues from the checkpoint of clock 105' in line for line in said), said
  assert any('l1 starts from the fragments of the syncer' in line for line in said), said
  assert _held(workdir / 'syncer' / 'ckpt').data_state == 1
  assert (workdir / 'aside-1' / 'islands' / 'l1' / 'ckpt' / '100').is_dir()


# --- What is done ---------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_checkpoints_and_nothing_is_deleted(config, workdir):
  before, address = _contents(workdir), workdir / run_folder.ADDRESS
  address.write_text(addresses.ended(3))
  said = _restore(config, workdir)
  assert not address.exists(), 'a learner would believe that the run has ended'
  assert len(_contents(workdir)) == len(before) + 4, 'a log, its settings, two lineages'
  for folder, step, seed in (('syncer', 205, 2), ('islands/l0', 200, 20), ('islands/l1', 200, 21)):
    held = _held(workdir / folder / 'ckpt')
    assert held.step == step and held.data_state == seed
    jax.tree.map(np.testing.assert_array_equal, held.state, _state(seed))
  after = list(_contents(workdir).values())
  assert all(data in after for data in before.values())
  assert (workdir / 'aside-1' / 'tapes' / 'l0.1.0.jsonl').exists()
  assert (workdir / 'aside-1' / 'model' / 'array').exists() and not (workdir / 'model').exists()
  assert (workdir / 'aside-1' / 'islands' / 'l0' / 'ckpt' / '299').exists()
  assert any(re.search('l2 starts from.*no checkpoint of it', line) for line in said), said


def test_fewer_learners_are_told_to_the_syncer_more_are_new(config, workdir):
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = 1
  said = _restore(config, workdir)
  assert lineage_lib.read(workdir).gone == ('l1', 'l2')
  assert any('l1 is not in this config' in line for line in said)
  config.sync.learners = 4
  said = _restore(config, workdir)
  assert lineage_lib.read(workdir).gone == ()
  assert any(re.search('l3 starts from the fragments', line) for line in said)


def test_a_damaged_lineage_is_written_again_by_the_way_that_its_refusal_names(config, workdir):
  lineage_lib.write(workdir, lineage_lib.Lineage(run='0' * 16))
  _flip(workdir / lineage_lib.FILE, 30, 0)
  with pytest.raises(ValueError, match='does not read back.*Remove it, then run') as refused:
    _restore(config, workdir)
  (pasted,) = re.findall('diloco restore.*latest', str(refused.value))
  (read,) = command_line.read([shlex.split(pasted)])
  assert read['workdir'] == str(workdir)
  (workdir / lineage_lib.FILE).unlink()
  _restore(config, workdir, read['to'])
  assert lineage_lib.read(workdir).log == 20


def test_a_folder_without_a_run_is_refused(config, tmp_path):
  with pytest.raises(ValueError, match='there is no run in'):
    _restore(config, tmp_path)


@pytest.mark.parametrize(
  'section, field, value, error',
  [
    ('sync', 'gamma', 0.1, 'another config: sync.gamma is 0.1 here, 0.9 there'),
    ('data', 'corpus', '/nowhere', 'nowhere'),  # it cannot work
  ],
)
def test_another_config_is_refused_before_anything_moves(workdir, section, field, value, error):
  config = stdlib_lm.get_config('tiny')
  setattr(getattr(config, section), field, value)
  before = _contents(workdir)
  with pytest.raises(ValueError, match=error):
    _restore(config, workdir)
  assert _contents(workdir) == before


def test_a_restore_that_was_cut_short_anywhere_is_done_again(config, whole, tmp_path, monkeypatch):
  """No syncer starts from half of it, and the second restore ends where one would have."""
  calls = [(pathlib.Path, 'rename'), (outer_log, 'begin'), (json_files, 'replace')]

  def state(workdir: pathlib.Path) -> dict[pathlib.Path, bytes]:
    contents = _contents(workdir)
    del contents[pathlib.Path(lineage_lib.FILE)]  # each restore has another id
    return {path: data for path, data in contents.items() if not str(path).startswith('aside-')}

  done = shutil.copytree(whole, tmp_path / 'done')
  _restore(config, done, '299')
  cuts = 0
  for owner, name in calls:
    for nth in range(20):
      workdir = shutil.copytree(whole, tmp_path / f'{name}{nth}')
      real, count = getattr(owner, name), iter(range(100))

      def cut(*args, real=real, count=count, nth=nth):
        if next(count) == nth:
          raise OSError('no space')
        return real(*args)

      with monkeypatch.context() as patch:
        patch.setattr(owner, name, cut)
        try:
          _restore(config, workdir, '299')
        except OSError:
          cuts += 1
        else:
          break
      if (workdir / lineage_lib.FILE).exists():
        with pytest.raises(files_lib.DirectoryError, match='in the middle of a restore'):
          lineage_lib.read(workdir)
      _restore(config, workdir, '299')
      lineage_lib.read(workdir)
      assert state(workdir) == state(done), (name, nth)
  assert cuts >= 8


@pytest.mark.parametrize(
  'role, folder', [('train', ''), ('syncer', 'syncer/wal'), ('learner', 'islands/l1/ckpt')]
)
def test_not_under_a_process_that_runs(config, workdir, role, folder):
  files = files_lib.Files(workdir / folder)
  files.lock(role)
  before = _contents(workdir)
  with pytest.raises(files_lib.DirectoryError, match=f'already used by {role} pid'):
    _restore(config, workdir)
  assert _contents(workdir) == before
  files.close()
  _restore(config, workdir)


@pytest.mark.long
def test_the_command_says_what_it_did_or_why_not_in_one_line(config, workdir):
  """Without --config it takes that of the run."""

  restored = functools.partial(command_line.diloco, 'restore')
  done = restored(f'--workdir={workdir}', '--to=104')
  assert done.returncode == exits.NEVER_RETRY and done.stderr.count('\n') == 1, done.stderr
  assert 'no checkpoint at or before clock 104' in done.stderr
  damage(workdir / 'syncer' / 'ckpt' / '205')
  done = restored(f'--workdir={workdir}', '--to=latest', '--config.sync.learners=2')
  assert done.returncode == 0, done.stderr
  assert 'the run continues from the checkpoint of clock 105' in done.stdout
  again = f' train --resume --workdir={workdir}'
  assert done.stdout.splitlines()[-1].endswith(again)
  assert lineage_lib.read(workdir).log == 10
  assert load.read(workdir).sync.learners == 2
  shutil.rmtree(workdir / 'islands')  # learners on other machines
  done = restored(f'--workdir={workdir}', '--to=latest')
  assert done.stdout.splitlines()[-1].endswith('learners again, with their own commands')
  done = restored(f'--workdir={workdir}')
  assert done.returncode == exits.NEVER_RETRY and '(there are: 105)' in done.stderr


@pytest.mark.parametrize(
  'call, number', [('write', errno.ENOSPC), ('fsync', errno.EIO)], ids=['full', 'failed']
)
def test_a_disk_that_takes_no_new_log_is_one_line_and_74(config, workdir, call, number):
  script = f"""
import sys
from diloco_jax import __main__
from diloco_jax.storage import files
def fail(self, name, *pieces):
  raise OSError({number}, 'the disk')
files.Files.{call} = fail
__main__.main()
"""
  words = (f'--workdir={workdir}', '--to=299')
  ended = command_line.python('-c', script, 'restore', *words)
  assert ended.returncode == exits.DISK_FAILED, ended.stderr
  assert ended.stderr.count('\n') == 1 and 'restore again, with this --to' in ended.stderr
  with pytest.raises(files_lib.DirectoryError, match='in the middle of a restore'):
    lineage_lib.read(workdir)
  _restore(config, workdir, '299')
  lineage_lib.read(workdir)


def test_a_run_of_own_loops_goes_back_too(tmp_path):
  """Its model is the one that the first learner brought."""
  config, workdir = own_loop.get_config(), tmp_path / 'run'
  config.sync.fragments = 1
  load.write(workdir, config)
  _save(workdir / 'syncer', 100, 1, _books(1))
  with pytest.raises(ValueError, match='loops of one'):
    _restore(config, workdir)
  assert lineage_lib.read(workdir) is None
  model = own_model.describe({'w': jnp.ones((8, 8))}, lambda name: 'body')
  own_model.write(workdir, model, config)
  agreement = own_model.complete(model, config).agreement
  said = _restore(config, workdir)
  assert said[0].startswith('the run continues from')
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  assert wal.open_log(files, outer_log.run_of(agreement), 10, CHAIN).committed == 10
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
  workdir = shutil.copytree(past, tmp_path / 'a run')
  log = workdir / 'syncer' / 'wal' / wal.name_of(6)
  _flip(log, wal.HEADER_BYTES + 100, 0)
  with pytest.raises(exits.NeverRetry, match='is damaged.* --to=latest') as refused:
    with exits.log_failures():
      durability.Rig(assembled, workdir / 'syncer')
  assert log.name in str(refused.value)
  (pasted,) = re.findall('diloco restore.*', str(refused.value))
  (read,) = command_line.read([shlex.split(pasted)])
  assert read['workdir'] == str(workdir) and read['to'] == 'latest'
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
  said = _restore(assembled.config, damaged)
  assert any('the run continues from the checkpoint of clock 5' in line for line in said)
  after = list(_contents(damaged).values())
  assert all(data in after for data in before.values()), 'something was deleted'
  assert list((damaged / 'aside-1' / 'syncer' / 'wal').glob('*.rec'))
  _goes_on(assembled, damaged, expected, 5)


def test_no_checkpoint_that_is_whole_is_refused_and_none_at_all_is_the_beginning(
  assembled, damaged, expected
):
  ckpt = damaged / 'syncer' / 'ckpt'
  for number in ('2', '5'):
    durability._damage(ckpt / number)
  before = _contents(damaged)
  with pytest.raises(ValueError, match='no checkpoint in .*ckpt is whole .*2, 5'):
    _restore(assembled.config, damaged)
  assert _contents(damaged) == before
  ckpt.rename(damaged / 'elsewhere')
  _restore(assembled.config, damaged)
  _goes_on(assembled, damaged, expected, 0)


def test_theta_versions_and_ledger_are_those_of_a_kept_clock(assembled, tmp_path, expected):
  """Bit for bit, and again after a restore to a later clock than that of the log."""
  workdir = run_folder.open_workdir(assembled.config, tmp_path / 'run', resume=False)
  life = durability.Rig(assembled, workdir / 'syncer')
  life.checkpoints._keep_every = 2
  saved = {}
  for sync in range(1, durability.SYNCS + 1):
    life.merge(sync)
    if sync in (2, 4, 5, 6, 7):
      assert not life.save(sync).error
      saved[sync] = life.checkpoints.protocol(sync)
  life.crash()
  life.checkpoints.close()
  for clock, checkpoint_clock in ((7, 7), (5, 4), (3, 2)):
    _restore(assembled.config, workdir, str(clock))
    life = durability.Rig(assembled, workdir / 'syncer')
    assert durability.bits(life.theta) == expected[checkpoint_clock]
    assert life.log.position == {name: saved[checkpoint_clock][name] for name in life.log.position}
    for name in ('versions', 'digests', 'ledger', 'data', 'counts', 'members'):
      assert life.start.state[name] == saved[checkpoint_clock][name], name
    life.crash()
    life.checkpoints.close()
