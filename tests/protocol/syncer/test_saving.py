"""When the syncer saves, and what it restores.

Each test opens with the sentence that it checks and its source.
"""

import copy
import dataclasses
from typing import Any

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import recovery
from diloco_jax.verification.sim import engine as engine_lib
from tests.protocol import single
from tests.protocol.recording import Recording
from tests.protocol.talk import Talk

MS = engine_lib.MS


def test_a_busy_syncer_saves_too():
  """A machine state has no half-done merge; merges that always overlap must not prevent a save."""
  seen = Recording(
    learners=1, fragments=8, period=8, overlap=3, quorum=1, total_steps=80, save_syncs=4
  )
  seen.start('l0', step_ms=20)
  seen.world.syncer.merge_ns = 30 * MS
  seen.run(2000)
  saves = [time for time, name, _ in seen.of(actions.Save) if name == 'syncer']
  assert len(saves) >= 5 and saves[0] < 400 * MS, saves


def contributing(talk: Talk) -> Talk:
  """l0 has joined, and its payload of sync 2 is being merged."""
  talk.joins('l0')
  talk.steps('l0', to=2)
  talk.hears('l0', single.contribution(sync=2), payload_id=1)
  return talk


def test_a_syncer_that_dies_before_each_save_still_saves():
  """The records of the log after the checkpoint count, too."""
  talk = Talk('l0', save_syncs=2)
  for unsaved, due in ((0, False), (1, True)):
    following = talk.restarted({**talk.machine.state(), recovery.UNSAVED: unsaved})
    contributing(following).turn(single.merge_done(2))
    assert bool(following.of(actions.Save)) == due


def test_the_syncer_saves_at_each_multiple_of_keep_every():
  """At its first clock there or behind, once no merge is in progress, and not at its start."""
  seen = Recording(learners=1, fragments=2, period=4, quorum=1, total_steps=60, keep_every=7)
  seen.start('l0', step_ms=20)
  seen.run(3000)
  saved = [(who, save.clock) for _, who, save in seen.of(actions.Save) if save.clock < 60]
  for node, late in (('syncer', 2), ('l0', 1)):
    clocks = [clock for who, clock in saved if who == node]
    assert [clock // 7 for clock in clocks] == list(range(1, 1 + len(clocks))) and len(clocks) > 6
    assert all(clock % 7 < late for clock in clocks), (node, clocks)


# --- A run that a restore brought back (process/restore.py) ---------------------------------------


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


def test_a_learner_ahead_of_a_rolled_back_run_starts_again():
  """It holds version 5, the run is at version 0 again: everything is due to it, whole."""
  talk = Talk(learners=1).restarted()
  held = (messages.Held(version=5, digest=999),)
  talk.joins('l0', join={'run': 'r0'}, clock=9, held=held)
  assert [message.due for message in talk.sent(messages.Joined)] == [(0,)]
  assert actions.ReadFragment(fragment=0) in talk.out
  assert any('l0 holds version 5 of fragment 0, this run is at 0' in line for line in talk.said)


# --- Closing syncs --------------------------------------------------------------------------------


def test_a_closing_sync_that_died_with_its_syncer_is_opened_again():
  """Steps after a fragment's last sync are merged by its closing sync or not at all."""
  settings = {'fragments': 2, 'period': 4, 'total_steps': 1, 'overlap': 2}
  talk = Talk('l0', **settings)
  talk.steps('l0', to=4)
  assert sorted(talk.machine._syncs.open) == [2, 4]
  talk.hears('l0', single.contribution(sync=2), payload_id=1)
  (merge,) = talk.merges
  done = dataclasses.replace(single.merge_done(2), fragment=merge.fragment, norms=(1,))
  fresh = single.new_machine(fragments=2).state()
  following = talk.restarted(talk.recovered(fresh, (merge, done)))
  held = tuple(messages.Held(version=v, digest=d) for v, d in ((1, 78), (0, 77)))
  following.joins('l0', held=held)
  assert [(message.sync, message.fragment) for message in following.sent(messages.Pull)] == [(4, 1)]
  assert not following.sent(messages.Finish)


# --- The end of the run ---------------------------------------------------------------------------

DISK_FULL = events.SaveDone(clock=2, error='no space')


def over(merged: bool = True) -> Talk:
  """A syncer whose only sync has ended, in the last turn."""
  if merged:
    talk = contributing(Talk(learners=1, total_steps=1))
    talk.turn(single.merge_done(2))
    return talk
  talk = Talk('l0', total_steps=1)
  talk.steps('l0', to=2)
  talk.hears('l0', messages.Decline(sync=2, fragment=0, reason='empty', tokens_to=20))
  return talk


def saved(talk: Talk) -> dict[str, Any]:
  """The machine state that it has asked to save."""
  (save,) = talk.of(actions.Save)
  return save.machine_state


def lives_on(talk: Talk, now_ns: int) -> None:
  """The learner is heard until then."""
  talk.machine._members.by_id['l0'].heard_ns = now_ns
  talk.wakes(now_ns)


def test_finish_is_sent_once_the_disk_shows_the_end_of_the_run():
  # Issue 4: no committed outer step is ever lost. A learner exits after Finish, so a syncer that
  # dies after sending it must start again as one that needs no learner.
  talk = over()
  following = talk.restarted(saved(talk))
  assert not talk.sent(messages.Finish)
  talk.turn(events.SaveDone(clock=2))
  assert talk.sent(messages.Finish)
  following.joins('l0')
  assert following.sent(messages.Joined) and following.sent(messages.Finish)


def test_a_syncer_started_after_the_end_exits_after_one_lease():
  talk = over()
  following = talk.restarted(saved(talk))
  following.wakes(0)
  assert not following.of(actions.Save)
  following.wakes(talk.machine._config.lease_ns)
  assert following.of(actions.Save)
  (end,) = following.turn(events.SaveDone(clock=2))
  assert isinstance(end, actions.Exit) and 'every fragment is closed' in end.text


def test_if_the_last_save_fails_the_log_is_enough():
  """Its last outer step was decided after the last sync had opened."""
  talk = over()
  talk.turn(DISK_FULL)
  assert talk.sent(messages.Finish)
  assert any('every outer step since is in the log' in line for line in talk.said)


def test_a_cancelled_sync_is_not_in_the_log_so_the_save_is_tried_again():
  talk = over(merged=False)
  for number in range(1, 4):
    state = saved(talk)
    talk.turn(DISK_FULL)
    assert not talk.sent(messages.Finish) and not talk.of(actions.Save)
    lives_on(talk, 2 * number * talk.machine._config.heartbeat_ns)
  assert talk.of(actions.Save)
  talk.turn(events.SaveDone(clock=2))
  assert talk.of(actions.Save)
  talk.turn(events.SaveDone(clock=2))
  assert talk.sent(messages.Finish) and talk.restarted(state).machine._pace.over


def test_a_syncer_that_loses_its_newest_checkpoint_waits_for_no_learner_that_has_left():
  """Simulator, seed 363: a bit of it flips once all have finished, and the closing sync of the run
  was cancelled, so that the log does not show the end."""
  seen = Recording(learners=1, fragments=4, period=4, overlap=1, quorum=1, total_steps=8)
  world = seen.start('l0', step_ms=20).world
  world.run(60_000 * MS, lambda: 'l0' in world.done)
  world.end(world.syncer)
  numbers = [name for name in world.disk('syncer').names() if name.isdecimal()]
  world.disk('syncer')._files[max(numbers)].data[40] ^= 1
  assert world.start_syncer()
  seen.run(120_000)
  assert world.finished and 'l0' in world.done


def test_a_full_disk_is_reported_once_a_minute():
  talk, lines = over(merged=False), 0
  for second in range(1, 130):
    if talk.of(actions.Save):
      talk.now_ns = second * 1000 * MS
      talk.turn(DISK_FULL)
      lines += len(talk.said)
    lives_on(talk, second * 1000 * MS)
  assert lines == 3  # of two minutes and ten seconds


def test_a_syncer_stops_on_request_whatever_its_disk_does():
  talk = over(merged=False)
  talk.turn(DISK_FULL)
  talk.turn(events.Stop(reason='SIGTERM'))
  assert talk.of(actions.Save)
  (end,) = talk.turn(DISK_FULL)
  assert isinstance(end, actions.Exit) and end.code == 0
  assert 'stopped: SIGTERM' in end.text and 'every outer step since is in the log' in end.text
