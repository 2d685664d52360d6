"""A run comes back to a snapshot that is whole, bit for bit, or to one before; nothing is deleted.

The parts are real checkpoints of a few small arrays: which model they are of does not matter here.
"""

import gc
import json
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.launch import local, restore
from diloco_jax.storage import checkpoint, manifests, outer_log, wal
from diloco_jax.storage import files as files_lib
from diloco_jax.syncer import process as syncer_process
from experiments.configs import stdlib_lm

# Orbax now and then leaves a coroutine of its own unawaited when a read fails; tests that make
# reads fail collect it, so that it complains there.
pytestmark = [
  pytest.mark.filterwarnings('ignore:coroutine:RuntimeWarning'),
  pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
]
FLIPS = 100
CHAIN = bytes(range(32))
LEARNERS = ('l0', 'l1', 'l2')


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


def _part(folder: pathlib.Path, number: int, seed: int, protocol: dict) -> str:
  parts = checkpoint.Checkpoints(str(folder / manifests.FOLDER), keep_all=True)
  seal = parts.save(number, _state(seed), seed, (), protocol)()
  parts.close()
  return seal


def _take(workdir: pathlib.Path, number: int, agreement: str, learners=LEARNERS[:2]) -> None:
  """A snapshot of the syncer and two of its three learners."""
  islands = {name: manifests.island_folder(workdir, name) for name in learners}
  manifests.write(
    workdir,
    {
      'snapshot': number,
      'step': 100 * number,
      'time': 'noon',
      'agreement': agreement,
      'syncer': _part(manifests.syncer_folder(workdir), number, number, _books(number)),
      'learners': {
        name: {'incarnation': 1, 'step': 100 * number + 5, 'seal': _part(folder, number, seed, {})}
        for seed, (name, folder) in enumerate(islands.items(), 10 * number)
      },
      'missing': {'l2': 'it was gone before it had saved'},
    },
  )


@pytest.fixture(name='workdir')
def _workdir(config, agreement, tmp_path) -> pathlib.Path:
  """A run with the snapshots 1 and 2, and what came after them."""
  workdir = local.open_workdir(config, tmp_path / 'run', resume=False)
  for number in (1, 2):
    _take(workdir, number, agreement)
  for node in (manifests.syncer_folder(workdir), manifests.island_folder(workdir, 'l0')):
    checkpoints = checkpoint.Checkpoints(str(node / 'ckpt'))
    checkpoints.save(999, _state(99), 99)
    checkpoints.close()
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  wal.begin(files, 'the run', 20, CHAIN).append(1, b'an outer step')
  files.close()
  (workdir / 'tapes').mkdir()
  (workdir / 'tapes' / 'l0.1.0.jsonl').write_text('{}\n')
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
  """Flips a bit of what a learner's part says of its arrays."""
  part = manifests.island_folder(workdir, 'l1') / manifests.FOLDER / str(number)
  _flip(part / 'record' / 'data.json', 10, 3)


def _restore(config, workdir, which='latest') -> list[str]:
  said = []
  restore.restore(config, workdir, which, said.append)
  return said


def _held(folder: pathlib.Path) -> checkpoint.Restored:
  """What the next process of a node goes on from."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  checkpoints = checkpoint.Checkpoints(str(folder))
  try:
    return checkpoints.restore(jax.tree.map(lambda _: place, _state(0)), place, _state(0))
  finally:
    checkpoints.close()


def _same(one: checkpoint.Restored, other: checkpoint.Restored) -> bool:
  bits = [
    [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(held.state)] for held in (one, other)
  ]
  return bits[0] == bits[1] and (one.data_state, one.protocol) == (other.data_state, other.protocol)


# --- What is found --------------------------------------------------------------------------------


def test_a_hundred_flipped_bits_are_found(config, agreement, tmp_path):
  """In arrays, records and manifest, wherever they are on the disk. What is not found does not
  matter: everything reads back as it was."""
  workdir = local.open_workdir(config, tmp_path / 'run', resume=False)
  _take(workdir, 1, agreement, ['l0'])
  roots = [workdir / 'syncer' / 'snapshots', workdir / 'islands' / 'l0' / 'snapshots']
  truth = [_held(root) for root in roots]
  files = [
    path
    for root in (*roots, workdir / 'snapshots')
    for path in sorted(root.rglob('*'))
    if path.is_file() and path.stat().st_size
  ]
  draw, found, harmless = random.Random(4), 0, 0
  while found < FLIPS:
    path = files[(found + harmless) % len(files)]  # each of them, small or large
    whole = path.read_bytes()
    _flip(path, draw.randrange(len(whole)), draw.randrange(8))
    try:
      restore.choose(config, workdir, '1', lambda text: None)
    except ValueError:
      found += 1
    else:
      harmless += 1
      assert all(_same(_held(root), before) for root, before in zip(roots, truth)), path
    path.write_bytes(whole)
  gc.collect()
  assert restore.choose(config, workdir, 'latest', print)[0]['snapshot'] == 1
  assert harmless < 3 * FLIPS, 'it looks at next to nothing'


@pytest.mark.parametrize('where', ['manifest', 'syncer', 'l0', 'gone'])
def test_a_damaged_snapshot_is_passed_over_and_the_one_before_is_taken(config, workdir, where):
  island = manifests.island_folder(workdir, 'l0') / manifests.FOLDER
  match where:
    case 'manifest':
      _flip(workdir / manifests.FOLDER / '2.json', 40, 0)
      words = 'its manifest .*2.json'
    case 'syncer':
      record = manifests.syncer_folder(workdir) / manifests.FOLDER / '2' / 'record' / 'data.json'
      record.write_text(record.read_text().replace('"log": 20', '"log": 21'))
      words = 'syncer/snapshots/2 .* its record is not the one that was saved'
    case 'l0':  # whole in itself, but not what the manifest names
      for path in sorted((island / '1').rglob('*')):
        if path.is_file():
          (island / '2' / path.relative_to(island / '1')).write_bytes(path.read_bytes())
      words = 'islands/l0/snapshots/2 does not read back'
    case 'gone':
      (island / '2').rename(island / 'elsewhere')
      words = 'islands/l0/snapshots/2 is not there'
  said = _restore(config, workdir)
  assert re.search(f'snapshot 2 is damaged or partial.*{words}', said[0]), said
  assert any('goes on from snapshot 1, sync 100' in line for line in said), said
  assert _held(workdir / 'syncer' / 'ckpt').data_state == 1
  assert (workdir / 'aside-1' / manifests.FOLDER / '2.json').exists()
  gc.collect()


def test_a_snapshot_that_was_named_is_the_one_or_none(config, workdir):
  _damage(workdir, 2)
  before = _contents(workdir)
  with pytest.raises(ValueError, match='snapshot 2 is not whole, nothing was .*; there are: 1'):
    _restore(config, workdir, '2')
  for which in ('3', 'newest', '../1'):
    with pytest.raises(ValueError, match='there is no snapshot .* there are: 1, 2'):
      _restore(config, workdir, which)
  _damage(workdir, 1)
  with pytest.raises(ValueError, match='no snapshot in .* is whole .* --resume goes on from'):
    _restore(config, workdir)
  _damage(workdir, 1)  # the same bit once more
  gc.collect()
  assert _contents(workdir) == before


# --- What is done ---------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_snapshot_and_nothing_is_deleted(config, workdir):
  before = _contents(workdir)
  said = _restore(config, workdir)
  for folder, step, seed in (('syncer', 200, 2), ('islands/l0', 205, 20), ('islands/l1', 205, 21)):
    held = _held(workdir / folder / 'ckpt')
    assert held.step == step and held.data_state == seed
    jax.tree.map(np.testing.assert_array_equal, held.state, _state(seed))
  after = list(_contents(workdir).values())
  assert all(data in after for data in before.values())
  assert (workdir / 'aside-1' / 'tapes' / 'l0.1.0.jsonl').exists()
  assert (workdir / 'aside-1' / 'islands' / 'l0' / 'ckpt' / '999').exists()
  assert any(re.search('l2 starts from the fragments.*it was gone', line) for line in said), said


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
  assert (workdir / 'aside-2' / 'syncer' / 'ckpt' / '100').exists()


def test_fewer_learners_are_told_to_the_syncer_more_are_new(config, workdir):
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = 1
  said = _restore(config, workdir)
  assert syncer_process.restored(workdir)['gone'] == ['l1', 'l2']
  assert not (workdir / 'islands' / 'l1' / 'ckpt').exists()
  assert any('l1 has no place any more' in line for line in said)
  config.sync.learners = 4
  said = _restore(config, workdir)
  assert syncer_process.restored(workdir)['gone'] == []
  assert any(re.search('l3 starts from the fragments.*it is new', line) for line in said)


def test_another_config_is_refused(workdir):
  config = stdlib_lm.get_config('tiny')
  config.sync.alpha = 0.1
  before = _contents(workdir)
  with pytest.raises(ValueError, match='another config: sync.alpha is 0.1 here, 0.0 there'):
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


def test_not_under_a_syncer_that_runs(config, workdir):
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  files.lock()
  before = _contents(workdir)
  with pytest.raises(files_lib.DirectoryError, match='already used by syncer pid'):
    _restore(config, workdir)
  assert _contents(workdir) == before
  files.close()


def test_from_the_launcher(config, workdir, capfd):
  """A process of its own says what it did, or why not, in one line."""
  _damage(workdir, 2)
  with pytest.raises(ValueError, match='snapshot 2 is not whole'):
    local.restore(config, workdir, '2')
  local.restore(config, workdir, 'latest')
  assert 'the run goes on from snapshot 1' in capfd.readouterr().out
  assert json.loads((workdir / 'syncer' / 'restored.json').read_text())['snapshot'] == 1
  with pytest.raises(ValueError, match='there is no run in'):
    local.restore(config, workdir / 'nowhere', 'latest')
