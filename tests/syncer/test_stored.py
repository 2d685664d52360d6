"""The syncer's part of the store: which process continues a run, and from what.

A `Life` is one process of the syncer's work on one disk (a folder), as in test_durability.py, with
a store that outlives them all. `kill` leaves everything as SIGKILL would; tests/runs/ kills real
processes.
"""

import contextlib
import copy
import pathlib
import re
import shutil
import threading
import time

import numpy as np
import pytest

from diloco_jax.configs import own_loop
from diloco_jax.node import loop
from diloco_jax.process import dial, own_model, restore, run_folder
from diloco_jax.protocol import actions, events
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import folders, states, wal
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.storage import store as store_lib
from diloco_jax.syncer import stored
from diloco_jax.transport import addresses
from tests import visits
from tests.runs.lib import failpoints
from tests.storage import fake_gcs
from tests.syncer import test_durability as durability
from tests.syncer.test_durability import DEADLINE_S, SYNCS, bits, drain_lines

assembled, expected = durability._assembled, durability._expected


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
  """The claim of a process that is dead is free at once; one that lives renews it all the time."""
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', 0.0)
  monkeypatch.setattr(claim_lib, 'RENEW_S', 0.05)
  monkeypatch.setattr(claim_lib, 'LOOK_S', 0.05)
  monkeypatch.setattr(stored, '_RETRY_S', 0.05)


class Life(durability.Rig):
  """One process on one disk."""

  def __init__(self, assembled, disk: pathlib.Path, place: str, store_log: bool):
    config = copy.deepcopy(assembled.config)
    config.train.store, config.train.store_log = place, store_log
    records = durability.Records()
    self.disk_folder, self._end = disk, contextlib.ExitStack()
    self.store = self._end.enter_context(stored.open_store(config, disk, records.say))
    try:
      super().__init__(assembled, disk / 'syncer', store=self.store, records=records)
    except BaseException:
      self._end.close()
      raise
    self.ended = False

  def copied(self) -> None:
    """Returns once all is copied."""
    wait(lambda: not self.store._due)

  def kill(self) -> None:
    """Ends the threads; nothing is written, put or released."""
    if not self.ended:
      self.ended = True
      self.store._closed = self.store._claim._closed.set() or True
      with self.store._changed:
        self.store._changed.notify_all()
      self.store._claim.thread.join()
      self.store._thread.join()
      self.crash()
      self.checkpoints.close()

  def end(self) -> None:
    """Ends in order."""
    self.crash()
    self.checkpoints.close()
    self._end.close()
    self.ended = True


def wait(until) -> None:
  deadline_s = time.monotonic() + DEADLINE_S
  while not until():
    assert time.monotonic() < deadline_s
    time.sleep(0.01)


@pytest.fixture(name='place', params=['folder', pytest.param('bucket', marks=pytest.mark.full)])
def _place(request, tmp_path) -> str:
  if request.param == 'folder':
    return str(tmp_path / 'store')
  return f'{request.getfixturevalue("bucket").url}/run'


class Site:
  """Lives of one run, one after the other or side by side."""

  def __init__(self, assembled, folder: pathlib.Path, place: str):
    self.assembled, self.folder, self.place = assembled, folder, place
    self.store = store_lib.Store(place)
    self.lives: list[Life] = []

  def live(self, disk: str, store_log: bool = False, place: str = '') -> Life:
    life = Life(self.assembled, self.folder / disk, place or self.place, store_log)
    self.lives.append(life)
    return life

  def run(self, disk: str, syncs: range, saves: tuple[int, ...] = (), **live) -> Life:
    """A process that makes these outer steps and is killed."""
    life = self.live(disk, **live)
    run_until(life, syncs, saves)
    life.kill()
    return life

  def kill(self) -> None:
    for life in self.lives:
      life.kill()

  def objects(self) -> dict[str, bytes]:
    return {name: self.store.read(name).data for name in self.store.names()}


@pytest.fixture(name='site')
def _site(assembled, tmp_path, place):
  site = Site(assembled, tmp_path, place)
  yield site
  site.kill()


@pytest.fixture(name='here')
def _here(assembled, tmp_path):
  """On a folder only: what does not ask for a network."""
  site = Site(assembled, tmp_path, str(tmp_path / 'store'))
  yield site
  site.kill()


@pytest.fixture(name='online')
def _online(assembled, bucket, tmp_path):
  """On a bucket only: what asks for failures of a network."""
  site = Site(assembled, tmp_path, f'{bucket.url}/run')
  yield site
  site.kill()


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  files = (path for path in folder.rglob('*') if path.is_file())
  return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def run_until(life: Life, syncs: range, saves: tuple[int, ...] = ()) -> None:
  for sync in syncs:
    life.merge(sync)
    if sync in saves:
      assert not life.save(sync).error
      life.copied()


def copies(site: Site) -> list[int]:
  return [states.number(name) for name in states.copies(site.store, 'syncer/')]


def lines_of_loss(life: Life) -> list[str]:
  return [line for line in drain_lines(life) if 'gone:' in line]


# --- A disk that is lost --------------------------------------------------------------------------


@pytest.mark.parametrize('saves', [(), (2,), (2, 4, 6)])
def test_with_the_log_in_the_store_no_outer_step_is_lost(site, expected, saves):
  site.run('a', range(1, SYNCS + 1), saves, store_log=True)
  other = site.live('b', store_log=True)
  assert bits(other.theta) == expected[SYNCS]
  assert other.start.state['versions'] == other.theta.versions
  assert not lines_of_loss(other)


def test_without_it_the_run_continues_behind_the_last_copy_and_says_what_is_gone(site, expected):
  life = site.live('a')
  run_until(life, range(1, SYNCS + 1), saves=(2, 5))
  life.store._claim.renew()
  life.kill()
  other = site.live('b')
  assert bits(other.theta) == expected[5]
  (line,) = lines_of_loss(other)
  assert line.startswith('outer steps 6 to about 7 are gone: only the disk of ')
  for sync in (6, 7):
    other.merge(sync)
  assert bits(other.theta) == expected[SYNCS]


def test_a_record_that_was_put_and_not_committed_counts(site, expected, monkeypatch):
  """It may have been published: nobody can tell."""

  def dies() -> None:
    raise RuntimeError('before the commit')

  life = site.live('a', store_log=True)
  run_until(life, range(1, 3))
  with monkeypatch.context() as patch:
    failpoints.arm('store.after_put', dies, patch.setattr)
    life.submit(3)
    assert isinstance(life.failed.get(timeout=DEADLINE_S), RuntimeError)
  assert life.log.position['log'] == 2
  site.kill()
  for disk in ('a', 'b'):  # also on its own disk, which lacks it
    other = site.live(disk, store_log=True)
    assert bits(other.theta) == expected[3]
    site.kill()
  visits.saw('failpoints', 'store.after_put')


def test_a_run_of_which_the_store_has_nothing_is_not_started_over(here):
  life = here.live('a')
  run_until(life, range(1, 4))
  life.store._claim.renew()
  here.kill()
  names = here.store.names()
  with pytest.raises(claim_lib.Denied, match='no whole copy of the run .* 3 outer steps are comm'):
    here.live('b')
  assert here.store.names() == names
  again = here.live('a')  # and its own disk still counts
  assert again.log.position['log'] == 3 and not lines_of_loss(again)


def test_a_forgotten_train_steps_does_not_end_the_run(here, expected):
  """A config with fewer steps than the run has made, on a new disk."""
  here.run('a', range(1, SYNCS + 1), store_log=True)
  steps, here.assembled.config.train.steps = here.assembled.config.train.steps, 1
  try:
    with pytest.raises(ValueError, match='the run is at clock 7, and train.steps is 1: it would'):
      here.live('b', store_log=True)
  finally:
    here.assembled.config.train.steps = steps
  assert bits(here.live('b', store_log=True).theta) == expected[SYNCS]


def test_a_run_that_has_not_begun_begins_anywhere(here):
  here.run('a', range(0))
  here.run('b', range(1, 3), store_log=True)


def test_the_store_keeps_two_copies_and_the_records_behind_them(site, expected):
  site.run('a', range(1, SYNCS + 1), (2, 3, 4, 6), store_log=True)
  names = site.store.names('syncer/')
  assert copies(site) == [4, 6]
  uploads = {name.split('/')[2] for name in names if '/ckpt/' in name}
  assert sorted(int(name.split('-')[0]) for name in uploads) == [4, 6]
  records = [name for name in names if name.endswith('.rec')]
  assert [int(name.split('/')[-1].split('.')[0]) for name in records] == [5, 6, 7]
  (damaged,) = [name for name in names if '/ckpt/6-' in name and name.endswith('state/_METADATA')]
  site.store.put(damaged, b'{}')
  other = site.live('b', store_log=True)  # the copy before it, and more records
  assert any('is not what was put there' in line for line in drain_lines(other))
  assert bits(other.theta) == expected[SYNCS]


@pytest.mark.parametrize(
  'failpoint, whole', [('store.in_copy', [1, 2]), ('store.after_copy', [1, 2, 3])]
)
def test_a_death_in_a_copy_or_after_it_costs_at_most_that_copy(
  site, expected, monkeypatch, failpoint, whole
):
  """A copy without its manifest does not exist."""
  life = site.live('a')
  run_until(life, range(1, 3), saves=(1, 2))

  def dies() -> None:
    raise claim_lib.Denied(failpoint)  # ends the thread

  with monkeypatch.context() as patch:
    failpoints.arm(failpoint, dies, patch.setattr)
    life.merge(3)
    life.save(3)
    life.store._thread.join()
  assert any('/ckpt/3-' in name for name in site.store.names()) and copies(site) == whole
  site.kill()
  other = site.live('b')
  assert bits(other.theta) == expected[whole[-1]]
  run_until(other, range(whole[-1] + 1, 5), saves=(3, 4))
  assert copies(site) == [3, 4]
  visits.saw('failpoints', failpoint)


def test_records_of_the_time_before_are_put_once_the_log_goes_to_the_store(site, expected):
  """The folder's log begins behind checkpoint 2, so a copy comes first."""
  site.run('a', range(1, 6), (2, 4), place=str(site.folder / 'another'))
  site.run('a', range(6, 7), store_log=True)
  other = site.live('b', store_log=True)
  assert bits(other.theta) == expected[6]


# --- Two disks ------------------------------------------------------------------------------------


def test_a_second_syncer_is_refused_before_it_changes_anything(site, monkeypatch):
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', DEADLINE_S)
  site.run('a', range(1, 4), (2,), store_log=True)
  site.run('b', range(1, 3), (2,), place=str(site.folder / 'another'))  # a run of its own
  life = site.live('a', store_log=True)
  before = contents(site.folder / 'b'), {**site.objects(), claim_lib.NAME: b''}
  with pytest.raises(claim_lib.Denied, match='holds the run .*, this folder the run'):
    site.live('b', store_log=True)
  shutil.copytree(site.folder / 'a', site.folder / 'c')
  lineage_lib.write(
    site.folder / 'c', lineage_lib.Lineage(run=lineage_lib.read(site.folder / 'c').run)
  )
  copied = contents(site.folder / 'c')
  with pytest.raises(claim_lib.Denied, match=r'is in use: the syncer pid \d+ on .* Nothing was'):
    site.live('c', store_log=True)
  lock = 'syncer/wal/lock'
  assert contents(site.folder / 'c') | {lock: b''} == copied | {lock: b''}
  after = contents(site.folder / 'b'), {**site.objects(), claim_lib.NAME: b''}
  assert before == after
  life.merge(4)


def test_its_own_disk_and_a_process_that_ended_in_order_are_followed_at_once(
  here, expected, monkeypatch
):
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', DEADLINE_S)
  here.run('a', range(1, 4), (2,))
  life = here.live('a')
  assert bits(life.theta) == expected[3]
  assert not life.save(3).error
  life.copied()
  life.end()
  other = here.live('b')
  assert bits(other.theta) == expected[3] and not lines_of_loss(other)


def test_what_an_old_disk_has_moves_aside(here, expected):
  here.run('a', range(1, 6), (2,))
  here.run('b', range(3, 5), (4,))  # 3 to 5 of disk a are gone
  before = contents(here.folder / 'a' / 'syncer')
  again = here.live('a')
  assert bits(again.theta) == expected[4]
  lines = drain_lines(again)
  assert any('has gone on without this disk' in line and 'aside-1' in line for line in lines)
  aside = contents(here.folder / 'a' / 'aside-1' / 'syncer')
  assert {name: data for name, data in before.items() if name != 'wal/lock'} == aside


def test_a_disk_that_went_back_takes_what_is_newer_from_the_store(here, expected):
  """It was restored from a snapshot, with its name."""
  here.run('a', range(1, 3), (1,), store_log=True)
  shutil.copytree(here.folder / 'a', here.folder / 'snapshot')
  here.run('a', range(3, 6), (3, 4), store_log=True)
  shutil.rmtree(here.folder / 'a')
  (here.folder / 'snapshot').rename(here.folder / 'a')
  assert bits(here.live('a', store_log=True).theta) == expected[5]


def test_a_late_record_of_the_process_before_is_no_gap(here, expected):
  """It was on its way while another took over, which finds it in the store and starts again."""
  here.run('a', range(1, 4), store_log=True)
  late = f'syncer/wal/{wal.name_of(3)}'
  data = here.store.read(late).data
  here.store.remove(late)
  other = here.live('b', store_log=True)
  assert bits(other.theta) == expected[2]
  here.store.put(late, data)
  merge = durability.merge_of(other.assembled, 3, other.payloads)
  merge.machine_state['opened'] = 99  # another record
  other.work.submit(merge)
  error = other.failed.get(timeout=DEADLINE_S)
  assert isinstance(error, wal.WalBroken) and 'Nothing is lost: start again' in str(error)
  here.kill()
  assert bits(here.live('b', store_log=True).theta) == expected[3]


def test_a_store_that_may_not_be_written_is_refused_one_that_fails_is_not(bucket, online):
  bucket.door.refuses_with = 403
  with pytest.raises(claim_lib.Denied, match='PERMISSION_DENIED.*check train.store'):
    online.live('a')
  bucket.door.refuses_with = 503
  with pytest.raises(store_lib.StoreError, match='UNAVAILABLE|attempts failed'):
    online.live('a')
  bucket.door.refuses_with = 0
  with pytest.raises(claim_lib.Denied, match='NOT_FOUND'):
    online.live('a', place=f'{bucket.url}-of-no-name/run')


@pytest.mark.parametrize(
  'workdir, store',
  [('run', 'run'), ('run', 'run/store'), ('all/run', 'all'), ('run', 'link'), ('link', 'run/x/..')],
)
def test_a_store_and_a_folder_that_hold_each_other_are_refused(assembled, tmp_path, workdir, store):
  """By the syncer, by learners and by who starts them all; both paths are named, and the remedy."""
  (tmp_path / 'run' / 'within').mkdir(parents=True)
  (tmp_path / 'link').symlink_to(tmp_path / 'run' / 'within')
  config, folder = copy.deepcopy(assembled.config), tmp_path / workdir
  config.train.store = str(tmp_path / store)
  for start in (
    lambda: Life(assembled, folder, config.train.store, False),
    lambda: folders.of_learners(folder, config.train.store),
    lambda: run_folder.open_workdir(config, folder, resume=False),
  ):
    with pytest.raises(ValueError, match='Nothing was started. Choose a store beside') as refused:
      start()
    assert {str(folder.resolve()), str((tmp_path / store).resolve())} <= set(
      re.findall(r'[^ :]*/[^ :]*', str(refused.value))
    )
  assert not [path for path in tmp_path.rglob('*') if path.is_file()]


# --- A holder that loses the claim ----------------------------------------------------------------


def test_a_holder_whose_claim_was_taken_ends_and_changes_nothing(site):
  life = site.live('a', store_log=True)
  run_until(life, range(1, 3), saves=(2,))
  life.store._claim._closed.set()  # it does not renew
  life.store._claim.thread.join()
  site.live('b', store_log=True)
  with pytest.raises(claim_lib.Denied, match='has lost its claim .* has taken it'):
    life.store._claim.renew()
  before = {**site.objects(), claim_lib.NAME: b''}
  life.submit(3)
  assert isinstance(life.failed.get(timeout=DEADLINE_S), claim_lib.Denied)
  assert life.posted.empty() and life.log.position['log'] == 2
  assert before == {**site.objects(), claim_lib.NAME: b''}


def test_a_holder_that_is_cut_off_commits_nothing_until_it_is_back(bucket, online, monkeypatch):
  monkeypatch.setattr(claim_lib, 'FRESH_S', 1.0)
  life = online.live('a')
  life.merge(1)
  drain_lines(life)
  bucket.door.shut = True
  wait(lambda: time.monotonic() > life.store._claim._fresh_until_s)
  life.submit(2)
  line = ''
  while 'No outer step is committed' not in line:
    line = life.records.lines.get(timeout=DEADLINE_S)
  assert 'could not be renewed for 1 s' in line and life.posted.empty()
  assert life.log.position['log'] == 1
  bucket.door.shut = False
  assert life.posted.get(timeout=DEADLINE_S).sync == 2


# --- Copies ---------------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_copied_and_no_outer_step_waits(here, monkeypatch):
  """A network that is slower than the saves: the one that is under way ends all the same."""
  go, put = threading.Event(), store_lib.Store.put
  begun = []

  def slow(self, name: str, data: bytes) -> None:
    if '/ckpt/' in name:
      begun.append(name)
      assert go.wait(DEADLINE_S)
    put(self, name, data)

  monkeypatch.setattr(store_lib.Store, 'put', slow)
  life = here.live('a')
  for sync in range(1, 6):
    life.merge(sync)
    assert not life.save(sync).error
    wait(lambda: begun)
  assert life.checkpoints.numbers == [1, 4, 5]
  go.set()
  life.copied()
  assert copies(here) == [1, 5]


def test_a_copy_that_fails_is_tried_again_and_said_once(bucket, online):
  life = online.live('a')
  life.merge(1)
  drain_lines(life)
  only = lambda request: '/ckpt/' in str(request)
  bucket.door.faults = fake_gcs.Faults(1, 1.0, ('503',), most=7, only=only)
  life.save(1)
  life.copied()
  lines = [line for line in drain_lines(life) if 'checkpoint 1 is not in the store yet' in line]
  assert len(lines) == 1 and bucket.door.faults.injected.total() == 7
  life.kill()
  assert online.live('b').theta.versions == life.theta.versions


@pytest.mark.parametrize('finished', [False, True])
def test_an_end_says_what_is_not_copied(here, monkeypatch, finished):
  life = here.live('a')
  life.store._config.train.drain_s = 0.2
  run_until(life, range(1, 3), saves=(2,))

  def fails(*_):
    raise store_lib.StoreError('no network')

  monkeypatch.setattr(store_lib.Store, 'put', fails)
  states.save(here.folder / 'a' / folders.MODEL, folders.MODEL, {'w': np.ones(3)}, {})
  life.store.copy()
  done, queue = actions.Exit(code=0, text='done'), loop.EventQueue()
  queue.post(events.Stop(reason='preempted'))
  ended = life.store.finish(done, queue, False, finished)
  if finished:
    assert ended.code == actions.NOT_IN_TIME and 'the trained model is not in' in ended.text
  else:
    assert ended == done
    assert any('the trained model is not in' in line for line in drain_lines(life))


def test_an_end_waits_for_the_last_copy(here):
  life = here.live('a')
  life.merge(1)
  life.save(1)
  done = actions.Exit(code=0, text='done')
  assert life.store.finish(done, loop.EventQueue(), False, True) == done
  assert any('/ckpt/1-' in name for name in here.store.names())


def test_a_learner_that_was_down_at_the_end_of_the_run_hears_of_it(here, monkeypatch):
  monkeypatch.setattr(dial, 'CLAIM_TRUSTED_S', 0.0)
  resolve = dial.resolver('127.0.0.1:7070', addresses.Access(plaintext_loopback=True), here.place)
  life = here.live('a')
  assert resolve() == '127.0.0.1:7070'
  life.store.record_end()
  with pytest.raises(addresses.RunEnded, match='the run has ended: the claim in .*store says so'):
    resolve()
  here.kill()
  here.live('a')  # the run continues, with more steps
  assert resolve() == '127.0.0.1:7070'
  monkeypatch.setattr(dial, 'CLAIM_TRUSTED_S', 1e6)
  here.kill()
  here.live('a').store.record_end()
  late = dial.resolver('127.0.0.1:7070', addresses.Access(plaintext_loopback=True), here.place)
  assert late() == '127.0.0.1:7070'  # its syncer may be about to start again


def test_the_model_of_a_loop_is_in_the_store_also_for_a_disk_whose_own_is_damaged(site):
  model = own_model.describe({'w': np.arange(32, dtype=np.float32)}, None)
  own_model.write(site.folder / 'a', model, own_loop.get_config())
  site.run('a', range(0))
  site.run('b', range(0))
  durability._damage(site.folder / 'b' / folders.OWN_MODEL)
  site.run('b', range(0))
  assert (site.folder / 'b' / 'aside-1' / folders.OWN_MODEL).is_dir()
  fetched = own_model.read(site.folder / 'b')
  assert fetched.header() == model.header()
  assert np.array_equal(fetched.values()['w'], np.arange(32, dtype=np.float32))


# --- A restore ------------------------------------------------------------------------------------


def test_a_restore_is_not_undone_by_the_store(site, expected):
  life = site.run('a', range(1, SYNCS + 1), (2, 4), store_log=True)
  before = site.objects()
  restore.restore(life.assembled.config, site.folder / 'a', '2', print)
  life = site.live('a', store_log=True)
  assert bits(life.theta) == expected[2]
  life.merge(3)
  site.kill()
  other = site.live('b', store_log=True)
  assert bits(other.theta) == expected[3]
  del before[claim_lib.NAME]
  assert before.items() <= site.objects().items()
  site.kill()
  again = site.live('a', store_log=True)  # the restore was followed: it is not followed twice
  assert bits(again.theta) == expected[3]
  restores = [lineage_lib.read(site.folder / disk).restored for disk in 'ab']
  assert len(restores[0]) == 1 and restores[0] == restores[1]
