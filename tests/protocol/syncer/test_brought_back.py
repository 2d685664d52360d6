"""What the syncer does with a run that a restore brought back (process/restore.py)."""

import copy

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import recovery

CONFIG = config_lib.ProtocolConfig(
  learners=2, fragments=1, period=1, overlap=0, quorum=1, total_steps=9
)


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
