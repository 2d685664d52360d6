"""Which disk has the newest state of a run, where more than one could be it, and what a pause of
the holder may do."""

import copy
import dataclasses
import shutil
import threading
import time

import pytest

from diloco_jax.config import build
from diloco_jax.launch import restore
from diloco_jax.storage import checkpoint, files, lineage, outer_log, wal
from diloco_jax.storage import claim as claim_lib
from diloco_jax.syncer import stored
from tests.syncer import test_durability as durability
from tests.syncer import test_stored
from tests.syncer.test_durability import DEADLINE_S, bits, drain_lines
from tests.syncer.test_stored import gone, run_until, wait

assembled, expected = durability._assembled, durability._expected
_soon, here = test_stored._soon, test_stored._here


def test_a_process_that_cannot_continue_the_run_leaves_it_to_the_disk_that_has_it(
  here, expected, monkeypatch
):
  """As one of other settings, or on another kind of machine, after the store was read."""
  run_until(here.live('a'), range(1, 6), saves=(2,))
  here.kill()

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


def test_a_copy_of_the_folder_on_the_same_host_is_another_disk(here, monkeypatch):
  life = here.live('a')
  run_until(life, range(1, 3))
  shutil.copytree(here.folder / 'a', here.folder / 'copied')
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', DEADLINE_S)
  with pytest.raises(claim_lib.Denied, match='is in use'):
    here.live('copied')
  life.merge(3)


def test_a_run_that_goes_on_after_an_orderly_end_is_claimed_again(here, monkeypatch):
  """The end has released the claim, and nobody waits for a claim that is released."""
  life = here.live('a')
  run_until(life, range(1, 3))
  life.end()
  life = here.live('a')
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', DEADLINE_S)
  with pytest.raises(claim_lib.Denied, match='is in use'):
    here.live('b')
  life.merge(3)


def test_a_renewal_that_was_on_its_way_is_no_sign_of_life(here, expected, monkeypatch):
  """The holder was killed a moment after it had sent it."""
  life = here.live('a', store_log=True)
  run_until(life, range(1, 4))
  here.kill()
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', 0.5)
  looked = threading.Event()
  read = claim_lib.read

  def reads(store):
    found = read(store)
    if not looked.is_set():
      looked.set()
      life.store._claim.renew()
    return found

  monkeypatch.setattr(claim_lib, 'read', reads)
  assert bits(here.live('b', store_log=True).theta) == expected[3]


def test_a_copy_that_was_passed_over_is_not_taken_later(here, expected):
  """Else each start of a healthy disk would go back behind it."""
  run_until(here.live('a'), range(1, 7), saves=(2, 6))
  here.kill()
  names = here.store.names('syncer/ckpt/6-')
  (damaged,) = [name for name in names if name.endswith('data.json')]
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
  commit, taken = wal.Wal.commit, threading.Event()

  def slow(self):
    assert taken.wait(DEADLINE_S)
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
  taken.set()
  line = life.records.lines.get(timeout=DEADLINE_S)
  assert 'could not be renewed for 1 s' in line and life.posted.empty()
  with pytest.raises(claim_lib.Denied):
    life.store._claim.renew()
  assert isinstance(life.failed.get(timeout=DEADLINE_S), claim_lib.Denied)
  assert life.posted.empty()


def test_a_record_of_a_history_that_was_left_is_replaced(here, expected, monkeypatch):
  """The run went on without this store, behind a record that was put there and not committed."""
  run_until(here.live('a', store_log=True), range(1, 4))
  here.kill()
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
  run_until(here.live('a', place=str(here.folder / 'elsewhere')), range(4, 6))
  here.kill()
  assert bits(here.live('a', store_log=True).theta) == expected[5]
  here.kill()
  assert bits(here.live('b', store_log=True).theta) == expected[5]


@pytest.mark.parametrize('store_log', [False, True])
def test_a_store_without_its_claim_is_not_empty(here, expected, store_log):
  """A person has removed a damaged claim: the disk that has the run writes it again, no other."""
  run_until(here.live('a', store_log), range(1, 4), saves=(2,))
  here.kill()
  here.store.put(claim_lib.NAME, b'{')
  with pytest.raises(
    claim_lib.Denied, match='is no claim.* Remove it, and start the syncer on the'
  ):
    here.live('a', store_log)
  here.store.remove(claim_lib.NAME)
  before = here.objects()
  with pytest.raises(claim_lib.Denied, match='has a run, and no syncer/claim that says which'):
    here.live('b', store_log)
  assert here.objects() == before
  assert bits(here.live('a', store_log).theta) == expected[3]


def test_a_disk_that_is_behind_the_store_writes_no_claim(here):
  old = here.folder / 'old'
  here.live('a')
  here.kill()
  shutil.copytree(here.folder / 'a', old)
  run_until(here.live('a'), range(1, 4), saves=(2,))
  here.kill()
  here.store.remove(claim_lib.NAME)
  with pytest.raises(claim_lib.Denied, match='has a run, and no syncer/claim that says which'):
    here.live('old')


@pytest.mark.parametrize('store_log', [False, True])
def test_the_command_of_damaged_checkpoints_works(here, expected, store_log):
  """All on the disk are damaged, the store is whole."""
  run_until(here.live('my disk', store_log), range(1, 7), saves=(2, 4))
  here.kill()
  for number in ('2', '4'):
    durability._damage(here.folder / 'my disk' / 'syncer' / 'ckpt' / number)
  with pytest.raises(checkpoint.CheckpointError, match='none of the checkpoints') as error:
    here.live('my disk', store_log)
  durability.paste(str(error.value))
  after = here.live('my disk', store_log)
  assert bits(after.theta) == expected[6 if store_log else 4]
  assert bool(gone(after)) == (not store_log)


@pytest.mark.parametrize('store_log', [False, True])
@pytest.mark.parametrize('how', ['cut off', 'another value', 'removed'])
def test_settings_that_are_damaged_in_the_store_are_named(here, expected, store_log, how):
  """Nothing is changed, and once they are put back, or the old disk is back, the run goes on."""
  saves = () if store_log else (2,)
  run_until(here.live('a', store_log), range(1, 4), saves)
  here.kill()
  name = f'syncer/{stored.AGREEMENT}'
  whole = here.store.read(name).data
  here.store.remove(name)
  if how != 'removed':
    here.store.put(name, whole[:-1] if how == 'cut off' else whole.replace(b':2', b':3', 1))
    assert here.store.read(name).data != whole
  with pytest.raises(claim_lib.Denied, match='agreement.json is damaged.* Put a copy of it back'):
    here.live('b', store_log)
  here.store.put(name, (here.folder / 'a' / 'syncer' / 'wal' / stored.AGREEMENT).read_bytes())
  assert bits(here.live('b', store_log).theta) == expected[3 if store_log else 2]


def test_a_take_over_that_was_cut_short_is_done_again_and_no_syncer_starts_before(
  here, expected, monkeypatch
):
  run_until(here.live('a', True), range(1, 5), saves=(2,))
  here.kill()

  def fails(*_):
    raise OSError('no space')

  with monkeypatch.context() as patch:
    patch.setattr(outer_log, 'begin', fails)
    with pytest.raises(OSError, match='no space'):
      here.live('b', True)
  with pytest.raises(files.DirectoryError, match=r'middle of a take-over.*the same train\.store'):
    lineage.begun(here.folder / 'b')
  assert bits(here.live('b', True).theta) == expected[4]
  assert not lineage.begun(here.folder / 'b').changing


def test_a_restore_without_a_learner_is_followed_on_another_disk_too(here):
  """The disk of the restore is lost before its syncer has saved again."""
  life = here.live('a')
  run_until(life, range(1, 4), saves=(2,))
  here.kill()
  config = copy.deepcopy(life.assembled.config)
  config.train.store, config.sync.learners, config.sync.quorum = here.place, 1, 1
  restore.restore(config, here.folder / 'a', 'latest', print)
  here.assembled = build.assemble(config)
  here.live('a')
  here.kill()
  shutil.rmtree(here.folder / 'a')
  other = here.live('b')
  left = {row['learner']: row['left'] for row in other.start.state['members']}
  assert left == {'l0': False, 'l1': True, 'l2': True}
