"""Snapshots of the whole run, as the syncer's machine decides them; more in tests/sim."""

import copy

import pytest

from diloco_jax.protocol import action_list, actions, events, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import checkpoints, recovery
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import members as members_lib

WAIT_NS = 10_000_000
CONFIG = config_lib.ProtocolConfig(
  learners=2,
  fragments=1,
  period=1,
  overlap=0,
  quorum=1,
  total_steps=9,
  snapshot_syncs=2,
  snapshot_wait_ns=WAIT_NS,
)
BOOKS = {'versions': [3]}
SAVED = events.SaveDone(clock=7, checkpoint=9, record_sha256='own')


class Syncer:
  """The syncer's half with joined learners, on sessions 1, 2, ..."""

  def __init__(self, learners=('l0', 'l1')):
    self.members, self.out = members_lib.Members(CONFIG), action_list.ActionList()
    for session, learner in enumerate(learners, 1):
      self.members.bind(learner, session, 1, session, 0).held_versions = [0]
    self.snapshots = checkpoints.Snapshots(CONFIG, self.members, self.out)

  def begin(self) -> list:
    self.out.take()
    self.snapshots.begin(0, 7, BOOKS)
    return self.out.take()

  def answer(self, session: int, error: str = '', snapshot: int = 1) -> None:
    self.snapshots.answered(
      self.members.by_session[session],
      messages.SnapshotSaved(
        snapshot=snapshot, checkpoint=8, record_sha256=f'of {session}', error=error
      ),
    )

  def manifest(self, now_ns: int = 1) -> actions.WriteManifest | None:
    """What is written now, if anything."""
    self.snapshots.advance(now_ns)
    self.snapshots.check()
    written = [one for one in self.out.take() if isinstance(one, actions.WriteManifest)]
    return written[0] if written else None


@pytest.fixture(name='syncer')
def _syncer() -> Syncer:
  return Syncer()


def test_a_snapshot_begins_periodically_or_on_request(syncer):
  for _ in range(CONFIG.snapshot_syncs):
    assert not syncer.snapshots.due
    syncer.snapshots.outer_step()
  assert syncer.snapshots.due
  own, *asked = syncer.begin()
  assert own == actions.Save(clock=7, machine_state=BOOKS, snapshot=1)
  assert [(one.session, one.message.snapshot) for one in asked] == [(1, 1), (2, 1)]
  syncer.snapshots.ask()
  assert not syncer.snapshots.due  # one at a time
  syncer.snapshots.saved(events.SaveDone(clock=7, error='no space'))
  assert syncer.snapshots.due


def test_the_snapshot_period_survives_a_restart(syncer):
  syncer.snapshots.resume([], CONFIG.snapshot_syncs * 7 + 1)
  assert not syncer.snapshots.due
  for _ in range(CONFIG.snapshot_syncs - 1):
    syncer.snapshots.outer_step()
  assert syncer.snapshots.due


def test_the_manifest_comes_after_every_answer(syncer):
  syncer.begin()
  syncer.answer(2)
  syncer.answer(2, snapshot=9)  # of another one
  assert syncer.manifest() is None
  syncer.snapshots.saved(SAVED)
  assert syncer.manifest() is None and syncer.snapshots.deadline_ns == WAIT_NS
  syncer.answer(1)
  written = syncer.manifest()
  assert (written.checkpoint, written.record_sha256, written.missing) == (9, 'own', ())
  assert [(part.learner, part.checkpoint, part.record_sha256) for part in written.parts] == [
    ('l0', 8, 'of 1'),
    ('l1', 8, 'of 2'),
  ]
  assert syncer.manifest() is None  # once


def test_the_manifest_names_lost_late_and_failed_learners_as_missing():
  syncer = Syncer(('l0', 'l1', 'l2'))
  syncer.begin()
  syncer.answer(3)
  syncer.snapshots.saved(SAVED)
  syncer.members.release(1)
  syncer.answer(2, error='no space')
  missing = dict(syncer.manifest().missing)
  assert missing == {
    'l0': 'it disconnected before it had saved',
    'l1': 'it could not save: no space',
  }


def test_a_part_that_the_syncer_cannot_find_does_not_count():
  syncer = Syncer(('l0', 'l1', 'l2'))
  syncer.begin()
  for session in (1, 2, 3):
    syncer.answer(session)
  syncer.snapshots.saved(SAVED)
  assert len(syncer.manifest().parts) == 3
  syncer.snapshots.written(events.ManifestWritten(snapshot=1, unverified=('l1',)))
  said, reported = syncer.out.take()
  assert 'snapshot 1 of 2 learners at sync 7 is complete' in said.text
  assert 'unverified, not in this folder: l1' in said.text
  assert reported.fact.unverified == ('l1',)


def test_a_snapshot_waits_no_longer_than_the_settings_allow(syncer):
  syncer.begin()
  syncer.snapshots.saved(SAVED)
  syncer.answer(2)
  assert syncer.manifest(99) is None
  assert set(dict(syncer.manifest(WAIT_NS).missing)) == {'l0'}
  assert syncer.snapshots.deadline_ns is None
  syncer.answer(1)  # too late
  syncer.snapshots.written(events.ManifestWritten(snapshot=1))
  assert not syncer.snapshots.due


def test_snapshot_numbers_increase_and_two_are_kept(syncer):
  syncer.snapshots.resume([3, 4, 7], 0)
  for number, keep in ((8, (4, 7)), (9, (7, 8)), (10, (8, 9))):
    own, *asked = syncer.begin()
    assert (own.snapshot, own.keep) == (number, keep)
    assert {one.message.keep for one in asked} == {keep}
    syncer.snapshots.saved(SAVED)
    syncer.answer(1, snapshot=number)
    assert syncer.manifest(WAIT_NS)
    syncer.snapshots.written(events.ManifestWritten(snapshot=number))


def test_without_its_manifest_a_snapshot_does_not_exist(syncer):
  syncer.begin()
  syncer.snapshots.saved(SAVED)
  syncer.answer(1)
  assert syncer.manifest(WAIT_NS)
  syncer.snapshots.written(events.ManifestWritten(snapshot=1, error='no space'))
  assert any(
    'snapshot 1 is abandoned: its manifest' in one.text
    for one in syncer.out.take()
    if isinstance(one, actions.Say)
  )
  assert syncer.begin()[0].keep == ()


def test_a_snapshot_without_learners_does_not_replace_a_better_one(syncer):
  syncer.begin()
  syncer.snapshots.saved(SAVED)
  assert syncer.manifest(WAIT_NS) is None
  for session in (1, 2):
    syncer.members.release(session)
  syncer.snapshots.ask()
  assert not syncer.snapshots.due


def test_learners_without_a_session_count_as_left():
  account = {
    'cursors': [5, 10],
    'trained': 10,
    'steps': 1,
    'merged': 15,
    'discarded': {},
    'closed': False,
  }
  snapshot = {
    'members': [{'learner': 'l0', 'left': False}, {'learner': 'l1', 'left': False}],
    'ledger': [['l0', 1, copy.deepcopy(account)], ['l1', 1, copy.deepcopy(account)]],
    'data': {'holders': [[0, 'l1'], [1, 'l0']]},
  }
  state = recovery.without(snapshot, ['l1'])
  assert [row['left'] for row in state['members']] == [False, True]
  assert state['ledger'][0] == snapshot['ledger'][0] and not snapshot['members'][1]['left']
  assert state['ledger'][1][2] == {
    **account,
    'cursors': [10, 10],
    'discarded': {'left': 5},
    'closed': True,
  }
  assert state['data']['holders'] == [[1, 'l0']], 'its session is free'
  assert recovery.without(state, ['l1']) == state


def test_a_learner_ahead_of_a_rolled_back_run_is_told_and_starts_again():
  """It holds version 5, the run is at version 0 again: everything is due to it, whole."""
  fresh = syncer_machine.SyncerMachine(CONFIG, '{}', 'r0', (100,), (64,))
  machine = syncer_machine.SyncerMachine.restore(CONFIG, '{}', (64,), fresh.state())
  join = messages.Join(
    run='r0',
    incarnation=0,
    protocol=messages.PROTOCOL_VERSION,
    learner='l0',
    nonce=7,
    agreement='{}',
    host='h',
    pid=1,
  )
  confirm = messages.Confirm(
    nonce=7,
    incarnation=1,
    clock=9,
    steps=0,
    tokens=0,
    shard=None,
    cursor=0,
    held=(messages.Held(version=5, digest=999),),
  )
  for event in (
    events.Connected(session=1),
    events.Received(session=1, message=join),
    events.Received(session=1, message=confirm),
  ):
    out = machine.handle(0, event)
  (joined,) = [
    one.message for one in out if isinstance(getattr(one, 'message', None), messages.Joined)
  ]
  assert joined.due == (0,)
  assert actions.ReadFragment(fragment=0) in out
  assert any(
    'l0 holds version 5 of fragment 0, this run is at 0' in one.text
    for one in out
    if isinstance(one, actions.Say)
  )
