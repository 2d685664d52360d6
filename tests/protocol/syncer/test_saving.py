"""When the syncer saves, and what it restores.

Each test opens with the sentence that it checks and its source.
"""

import dataclasses
import functools
from typing import Any

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import recovery
from diloco_jax.verification.sim import engine, network
from diloco_jax.verification.sim import world as world_lib
from tests.protocol.recording import Recording
from tests.protocol.single import (
  advance,
  confirm,
  contents,
  contribution,
  join,
  joined,
  merge_done,
  new_machine,
  progress,
  received,
)

MS = engine.MS


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


def test_a_machine_state_restores_the_machine():
  machine, session = joined()
  advance(machine, session, step=2)
  machine.handle(2, received(session, contribution(sync=2), payload_id=1))
  machine.handle(3, merge_done(2))
  again = type(machine).restore(
    machine._config, world_lib.AGREEMENT, (network.PAYLOAD_BYTES,), machine.state()
  )
  assert again.state() == machine.state()
  again.check()


def test_a_syncer_that_dies_before_each_save_still_saves():
  """The records of the log after the checkpoint count, too."""
  machine, session = joined(save_syncs=2)
  machine_state = machine.state()
  for unsaved, due in ((0, False), (1, True)):
    following = again(machine, {**machine_state, recovery.UNSAVED: unsaved})
    following.handle(0, received(session, join()))
    following.handle(1, received(session, confirm()))
    advance(following, session, step=2)
    following.handle(3, received(session, contribution(sync=2), payload_id=1))
    assert bool(saves(following.handle(4, merge_done(2)))) == due


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


# --- Closing syncs --------------------------------------------------------------------------------


def test_a_closing_sync_that_died_with_its_syncer_is_opened_again():
  """Steps after a fragment's last sync are merged by its closing sync or not at all."""
  machine = new_machine(fragments=2, period=4, total_steps=1, overlap=2)
  machine.handle(0, received(1, join()))
  machine.handle(1, received(1, confirm(fragments=2)))
  machine.handle(2, received(1, progress(4)))
  assert sorted(machine._syncs.open) == [2, 4]
  [merge] = [
    one
    for one in machine.handle(3, received(1, contribution(sync=2), payload_id=1))
    if isinstance(one, actions.Merge)
  ]
  done = events.MergeDone(
    sync=2, fragment=merge.fragment, payload_id=None, payload=None, digest=78, norms=(1,)
  )
  load = functools.partial(
    type(machine).load, machine._config, world_lib.AGREEMENT, (network.PAYLOAD_BYTES,) * 2
  )
  machine_state = recovery.replay_log(load, new_machine(fragments=2).state(), [(merge, done)])
  following = again(machine, machine_state)
  following.handle(0, received(2, join()))
  held = tuple(messages.Held(version=v, digest=d) for v, d in ((1, 78), (0, 77)))
  claim = dataclasses.replace(confirm(), held=held, incarnation=1)
  out = following.handle(1, received(2, claim))
  assert [(one.sync, one.fragment) for one in contents(out, messages.Pull)] == [(4, 1)]
  assert not contents(out, messages.Finish)


# --- The end of the run ---------------------------------------------------------------------------

DISK_FULL = events.SaveDone(clock=2, error='no space')


def over(merged: bool = True) -> tuple[Any, list]:
  """A syncer whose only sync has ended, and its actions then."""
  machine, session = joined(total_steps=1)
  advance(machine, session, step=2)
  if merged:
    machine.handle(3, received(session, contribution(sync=2), payload_id=1))
    return machine, machine.handle(4, merge_done(2))
  empty = messages.Decline(sync=2, fragment=0, reason='empty', tokens_to=20)
  return machine, machine.handle(3, received(session, empty))


def saves(out: list) -> list:
  return [action for action in out if isinstance(action, actions.Save)]


def again(machine: Any, machine_state: dict) -> Any:
  """The next syncer, which starts from this machine state."""
  sizes = (network.PAYLOAD_BYTES,) * machine._config.fragments
  return type(machine).restore(machine._config, world_lib.AGREEMENT, sizes, machine_state)


def test_finish_is_sent_once_the_disk_shows_the_end_of_the_run():
  # Issue 4: no committed outer step is ever lost. A learner exits after Finish, so a syncer that
  # dies after sending it must start again as one that needs no learner.
  machine, out = over()
  [save] = saves(out)
  assert not contents(out, messages.Finish)
  assert contents(machine.handle(9, events.SaveDone(clock=2)), messages.Finish)
  following = again(machine, save.machine_state)
  following.handle(0, received(5, join()))
  out = following.handle(1, received(5, confirm()))
  assert contents(out, messages.Joined) and contents(out, messages.Finish)


def test_a_syncer_started_after_the_end_exits_after_one_lease():
  machine, out = over()
  following = again(machine, saves(out)[0].machine_state)
  assert not saves(following.handle(0, events.Wake()))
  assert saves(following.handle(machine._config.lease_ns, events.Wake()))
  [end] = following.handle(machine._config.lease_ns + 1, events.SaveDone(clock=2))
  assert isinstance(end, actions.Exit) and 'every fragment is closed' in end.text


def test_if_the_last_save_fails_the_log_is_enough():
  """Its last outer step was decided after the last sync had opened."""
  machine, _ = over()
  out = machine.handle(9, DISK_FULL)
  assert contents(out, messages.Finish)
  assert any(
    'every outer step since is in the log' in one.text
    for one in out
    if isinstance(one, actions.Say)
  )


def test_a_cancelled_sync_is_not_in_the_log_so_the_save_is_tried_again():
  machine, out = over(merged=False)
  now_ns = 10
  for _ in range(3):
    [save] = saves(out)
    out = machine.handle(now_ns, DISK_FULL)
    assert not contents(out, messages.Finish) and not saves(out)
    machine._members.by_id['l0'].heard_ns = now_ns = now_ns + 2 * machine._config.heartbeat_ns
    out = machine.handle(now_ns, events.Wake())
  assert saves(out)
  assert saves(machine.handle(now_ns, events.SaveDone(clock=2)))
  assert contents(machine.handle(now_ns, events.SaveDone(clock=2)), messages.Finish)
  assert again(machine, save.machine_state)._pace.over


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
  machine, out = over(merged=False)
  lines = 0
  for second in range(1, 130):
    if saves(out):
      out = machine.handle(second * 1000 * MS, DISK_FULL)
      lines += sum(isinstance(one, actions.Say) for one in out)
    machine._members.by_id['l0'].heard_ns = second * 1000 * MS
    out = machine.handle(second * 1000 * MS, events.Wake())
  assert lines == 3  # of two minutes and ten seconds


def test_a_syncer_stops_on_request_whatever_its_disk_does():
  machine, _ = over(merged=False)
  machine.handle(9, DISK_FULL)
  out = machine.handle(10, events.Stop(reason='SIGTERM'))
  assert saves(out)
  [end] = machine.handle(11, DISK_FULL)
  assert isinstance(end, actions.Exit) and end.code == 0
  assert 'stopped: SIGTERM' in end.text and 'every outer step since is in the log' in end.text
