"""Which disk has the newest state of a run, where more than one could be it, and what a pause of
the holder may do."""

import copy
import dataclasses
import errno
import pathlib
import re
import shutil
import threading
import time

import pytest

from diloco_jax.config import build
from diloco_jax.node import loop
from diloco_jax.process import restore
from diloco_jax.protocol import actions, events
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files, outer_log, states, wal
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.storage import store as store_lib
from tests.syncer import test_durability as durability
from tests.syncer import test_stored
from tests.syncer.test_durability import DEADLINE_S, bits, drain_lines
from tests.syncer.test_stored import lines_of_loss, run_until, wait

assembled, expected = durability._assembled, durability._expected
_soon, here = test_stored._soon, test_stored._here


def test_a_process_that_cannot_continue_the_run_leaves_it_to_the_disk_that_has_it(
  here, expected, monkeypatch
):
  """As one of other settings, or on another kind of machine, after the store was read."""
  here.run('a', range(1, 6), (2,))

  def fails(*_):
    raise wal.WalUnsupported('of another run')

  with monkeypatch.context() as patch:
    patch.setattr(outer_log, 'recover', fails)
    for _ in range(2):
      with pytest.raises(wal.WalUnsupported):
        here.live('b')
  assert not (here.folder / 'b' / 'aside-1').exists()  # what it has is of the store
  again = here.live('a')
  assert bits(again.theta) == expected[5]
  assert not any('has gone on without this disk' in line for line in drain_lines(again))


def test_another_disk_or_a_copy_of_the_folder_is_refused_also_after_an_orderly_end(
  here, monkeypatch
):
  """The end has released the claim, for which nobody waits; the next process claims the run
  again."""
  life = here.live('a')
  run_until(life, range(1, 3))
  life.end()
  life = here.live('a')
  shutil.copytree(here.folder / 'a', here.folder / 'copied')
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', DEADLINE_S)
  for disk in ('copied', 'b'):
    with pytest.raises(claim_lib.Denied, match='is in use'):
      here.live(disk)
  life.merge(3)


def test_a_renewal_that_was_on_its_way_is_no_sign_of_life(here, expected, monkeypatch):
  """The holder was killed a moment after it had sent it."""
  life = here.run('a', range(1, 4), store_log=True)
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', 0.5)
  looked = threading.Event()
  read = claim_lib.read

  def reads(store):
    content = read(store)
    if not looked.is_set():
      looked.set()
      life.store._claim.renew()
    return content

  monkeypatch.setattr(claim_lib, 'read', reads)
  assert bits(here.live('b', store_log=True).theta) == expected[3]


def test_a_copy_whose_manifest_is_cut_is_passed_over(here, expected):
  here.run('a', range(1, 7), (2, 6))
  (name,) = [name for name in here.store.names('syncer/ckpt/6-') if states.MANIFEST in name]
  here.store.put(name, here.store.read(name).data[:100])
  other = here.live('b')
  assert any(f'{name} does not read back' in line for line in drain_lines(other))
  assert bits(other.theta) == expected[2]


def test_a_copy_that_was_passed_over_is_not_taken_later(here, expected):
  """Else each start of a healthy disk would go back behind it."""
  here.run('a', range(1, 7), (2, 6))
  names = here.store.names('syncer/ckpt/6-')
  (damaged,) = [name for name in names if name.endswith('state/_METADATA')]
  whole = here.store.read(damaged).data
  here.store.put(damaged, b'{}')
  other = here.live('b')
  assert bits(other.theta) == expected[2]
  run_until(other, range(3, 5))
  here.kill()
  here.store.put(damaged, whole)
  again = here.live('b')
  assert again.log.position['log'] == 4
  assert bits(again.theta) == expected[4]


@pytest.mark.parametrize('store_log', [False, True])
def test_a_slow_disk_publishes_nothing_once_the_claim_may_be_taken(here, monkeypatch, store_log):
  """Between the last look at the claim and the end of the commit may lie any time."""
  monkeypatch.setattr(claim_lib, 'FRESH_S', 1.0)
  life = here.live('a', store_log=store_log)
  run_until(life, range(1, 3))
  commit, go = wal.Wal.commit, threading.Event()

  def slow(self):
    assert go.wait(DEADLINE_S)
    return commit(self)

  monkeypatch.setattr(wal.Wal, 'commit', slow)
  life.submit(3)
  wait(lambda: life.log._wal._appended)
  life.store._claim._closed.set()  # it does not renew
  life.store._claim.thread.join()
  wait(lambda: time.monotonic() > life.store._claim._fresh_until_s)
  content, generation = claim_lib.read(here.store)
  taker = claim_lib.Claim(here.store, dataclasses.replace(content, process='b'), generation, print)
  taker.renew()
  drain_lines(life)
  go.set()
  line = life.records.lines.get(timeout=DEADLINE_S)
  assert 'could not be renewed for 1 s' in line and life.posted.empty()
  with pytest.raises(claim_lib.Denied):
    life.store._claim.renew()
  assert isinstance(life.failed.get(timeout=DEADLINE_S), claim_lib.Denied)
  assert life.posted.empty()


def test_a_record_of_a_history_that_was_left_is_replaced(here, expected, monkeypatch):
  """The run went on without this store, behind a record that was put there and not committed."""
  here.run('a', range(1, 4), store_log=True)
  other = here.folder / 'other'
  shutil.copytree(here.folder / 'a', other)
  life = here.live('a', store_log=True)
  merge = durability.merge_of(life.assembled, 4, life.payloads)
  merge.machine_state['opened'] = 99  # another record
  life.work.submit(merge)
  life.posted.get(timeout=DEADLINE_S)
  here.kill()
  shutil.rmtree(here.folder / 'a')
  other.rename(here.folder / 'a')  # it lacks record 4
  here.run('a', range(4, 6), place=str(here.folder / 'elsewhere'))
  assert bits(here.live('a', store_log=True).theta) == expected[5]
  here.kill()
  assert bits(here.live('b', store_log=True).theta) == expected[5]


@pytest.mark.parametrize('store_log', [False, True])
def test_a_store_without_its_claim_is_not_empty(here, expected, store_log):
  """A person has removed a damaged claim: the disk that has the run writes it again, no other, and
  none that is behind the store."""
  here.run('a', range(0), store_log=store_log)
  shutil.copytree(here.folder / 'a', here.folder / 'old')
  here.run('a', range(1, 4), (2,), store_log=store_log)
  here.store.put(claim_lib.NAME, b'{')
  with pytest.raises(
    claim_lib.Denied, match='is no claim.* Remove it, and start the syncer on the'
  ):
    here.live('a', store_log)
  here.store.remove(claim_lib.NAME)
  before = here.objects()
  for disk in ('b', 'old'):
    with pytest.raises(claim_lib.Denied, match='has a run, and no syncer/claim that says which'):
      here.live(disk, store_log)
  assert here.objects() == before
  assert bits(here.live('a', store_log).theta) == expected[3]


@pytest.mark.parametrize('store_log', [False, True])
def test_the_command_of_damaged_checkpoints_works(here, expected, store_log):
  """All on the disk are damaged, the store is whole."""
  here.run('my disk', range(1, 7), (2, 4), store_log=store_log)
  for number in ('2', '4'):
    durability._damage(here.folder / 'my disk' / 'syncer' / 'ckpt' / number)
  with pytest.raises(states.StateError, match='none of the checkpoints') as error:
    here.live('my disk', store_log)
  durability.paste(str(error.value))
  after = here.live('my disk', store_log)
  assert bits(after.theta) == expected[6 if store_log else 4]
  assert bool(lines_of_loss(after)) == (not store_log)


def test_a_take_over_that_was_cut_short_is_done_again_and_no_syncer_starts_before(
  here, expected, monkeypatch
):
  here.run('a', range(1, 5), (2,), store_log=True)

  def fails(*_):
    raise OSError('no space')

  with monkeypatch.context() as patch:
    patch.setattr(outer_log, 'begin', fails)
    with pytest.raises(OSError, match='no space'):
      here.live('b', True)
  with pytest.raises(
    files_lib.DirectoryError, match=r'middle of a take-over.*the same train\.store'
  ):
    lineage_lib.begin(here.folder / 'b')
  assert bits(here.live('b', True).theta) == expected[4]
  assert not lineage_lib.begin(here.folder / 'b').changing


def test_a_restore_without_a_learner_is_followed_on_another_disk_too(here):
  """The disk of the restore is lost before its syncer has saved again."""
  life = here.run('a', range(1, 4), (2,))
  config = copy.deepcopy(life.assembled.config)
  config.train.store, config.sync.learners, config.sync.quorum = here.place, 1, 1
  restore.restore(config, here.folder / 'a', 'latest', print)
  here.assembled = build.assemble(config)
  here.run('a', range(0))
  shutil.rmtree(here.folder / 'a')
  other = here.live('b')
  left = {row['learner']: row['left'] for row in other.start.state['members']}
  assert left == {'l0': False, 'l1': True, 'l2': True}


# --- A store that is away -------------------------------------------------------------------------


@pytest.mark.parametrize('store_log', [False, True])
def test_a_store_that_is_away_gets_nothing_and_the_run_goes_on_once_it_is_back(
  here, monkeypatch, store_log
):
  """As a network file system that is not mounted for a moment: an empty folder is in its place."""
  monkeypatch.setattr(claim_lib, 'FRESH_S', 1.0)
  place, away = pathlib.Path(here.place), here.folder / 'away'
  life = here.live('a', store_log)
  run_until(life, range(1, 3), saves=(1,))
  drain_lines(life)
  place.rename(away)
  place.mkdir()
  wait(lambda: time.monotonic() > life.store._claim._fresh_until_s)
  life.submit(3)
  lines = ''
  while 'No outer step is committed' not in lines:
    lines += life.records.lines.get(timeout=DEADLINE_S)
  assert 'is away: it has neither syncer nor config.json' in lines
  assert life.posted.empty() and not list(place.iterdir())
  place.rmdir()
  away.rename(place)
  assert life.posted.get(timeout=DEADLINE_S).sync == 3
  life.copied()
  here.kill()

  place.rename(away)
  for is_empty in (False, True):
    if is_empty:
      place.mkdir()
    with pytest.raises(store_lib.StoreError, match='is away.* Nothing was started or made there'):
      here.live('a', store_log)
    assert place.exists() == is_empty and not list(place.glob('*'))
  place.rmdir()
  away.rename(place)
  run_until(here.live('a', store_log), range(4, 5))


def test_a_claim_that_was_removed_alone_is_made_again(here):
  """As by a rule of a bucket that removes old objects."""
  life = here.live('a')
  life.merge(1)
  here.store.put('config.json', b'{}')
  here.store.remove(claim_lib.NAME)
  life.store._claim.renew()
  assert claim_lib.read(here.store)[0].process == life.store._claim.content.process
  life.merge(2)


def test_a_record_that_is_damaged_in_the_store_is_named_there_with_the_way_on(here, expected):
  here.run('a', range(1, 6), (1, 2), store_log=True)
  name = f'syncer/wal/{wal.name_of(4)}'
  data = bytearray(here.store.read(name).data)
  data[len(data) // 2] ^= 1
  here.store.put(name, bytes(data))
  for _ in range(2):
    with pytest.raises(claim_lib.Denied, match=f'{here.place}/{name} is damaged') as error:
      here.live('b', store_log=True)
  (command,) = re.findall('diloco restore --workdir=.* --to=latest', str(error.value))
  assert f'--workdir={here.folder / "b"} ' in command
  restore.restore(here.lives[0].assembled.config, here.folder / 'b', 'latest', print)
  life = here.live('b', store_log=True)
  assert bits(life.theta) == expected[2]
  run_until(life, range(3, 5))


def test_a_full_disk_takes_nothing_over_and_costs_the_store_nothing(here, expected, monkeypatch):
  """What cannot be written here is whole in the store."""
  here.run('a', range(1, 7), (2, 6))
  before, full = here.objects(), [OSError(errno.ENOSPC, 'No space left on device')]
  replace = json_files.replace

  def replaces(path, data):
    if 'from-store' in path.parts and full:
      raise full.pop()
    replace(path, data)

  monkeypatch.setattr(json_files, 'replace', replaces)
  with pytest.raises(states.StateError, match='cannot write .*No space left'):
    here.live('b')
  assert here.objects().keys() == before.keys()
  assert bits(here.live('b').theta) == expected[6]


@pytest.mark.parametrize('finished', [False, True])
def test_what_is_damaged_here_is_said_and_not_waited_for(here, monkeypatch, finished):
  """The next process goes on from an older checkpoint, and saves again."""
  life, put = here.live('a'), states.put
  life.merge(1)

  def puts(store, at, folder, proceed):
    (folder / 'state' / '_METADATA').write_bytes(b'{}')
    put(store, at, folder, proceed)

  monkeypatch.setattr(states, 'put', puts)
  life.save(1)
  done, queue = actions.Exit(code=0, text='done'), loop.EventQueue()
  late = threading.Timer(DEADLINE_S, queue.post, [events.Stop(reason='it waits for ever')])
  late.start()
  ended = life.store.finish(done, queue, False, finished)
  late.cancel()
  assert any('checkpoint 1 is damaged, so it is not in' in line for line in drain_lines(life))
  assert ended.code == (actions.NOT_IN_TIME if finished else 0)
  assert not finished or ended.text.endswith('it goes on from what is whole, and copies that')


def test_a_copy_of_another_run_is_none_of_this(here, expected, tmp_path):
  here.run('a', range(1, 7), (2, 6))
  other = test_stored.Site(here.assembled, tmp_path / 'other', str(tmp_path / 'other_store'))
  other.run('a', range(1, 8), (7,))
  for name, data in other.objects().items():
    if '/ckpt/7-' in name:
      here.store.put(name, data)
  again = here.live('a')
  assert not any('has gone on without this disk' in line for line in drain_lines(again))
  assert bits(again.theta) == expected[6]


def test_a_damaged_checkpoint_behind_a_restore_is_refused_with_the_way_on(here, expected):
  """The log begins behind it, so no older one would do: another start could not help."""
  here.run('a', range(1, 7), (2, 6), store_log=True)
  restored = here.lives[0].assembled.config, here.folder / 'a'
  restore.restore(*restored, '6', print)
  durability._damage(here.folder / 'a' / 'syncer' / folders.CHECKPOINTS / '6')
  with pytest.raises(wal.WalError, match='diloco restore'):
    here.live('a', store_log=True)
  restore.restore(*restored, 'latest', print)
  assert bits(here.live('a', store_log=True).theta) == expected[2]
