"""A learner alone, message by message. Each test opens with the sentence and its source."""

import dataclasses
from typing import Any

import pytest

from diloco_jax.protocol import action_list, actions, events, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import alone, checkpoints
from diloco_jax.verification.sim import engine as engine_lib
from tests.protocol.single import (
  connect,
  contents,
  encoded,
  new_learner,
  of,
  publish,
  received,
  train,
)

MS = engine_lib.MS


def test_a_capture_of_an_old_session_is_not_sent_on_the_new_one():
  # The syncer dropped the payloads of the old session and asks again; the first capture is void.
  machine = new_learner()
  connect(machine, 1, 0)
  machine.handle(MS, received(1, messages.Pull(sync=2, fragment=0, now=True)))
  assert of(train(machine, 10), actions.Encode)
  machine.handle(11 * MS, events.Disconnected(session=1, reason='cut'))
  connect(machine, 2, 100)
  machine.handle(101 * MS, received(2, messages.Pull(sync=2, fragment=0, now=True)))
  out = train(machine, 110)
  assert not of(out, actions.Encode), 'one at a time with tau = 1'
  first = machine.handle(111 * MS, encoded(2, 0, payload_id=1))
  assert first == [actions.Drop(payload_id=1), actions.Encode(sync=2, fragment=0)]
  second = machine.handle(112 * MS, encoded(2, 0, payload_id=2))
  assert [m.tokens_to for m in contents(second, messages.Contribution)] == [20]


def test_wrong_bits_adopted_while_disconnected_are_reported_later():
  """A learner whose published value differs is repaired and counted."""
  machine = new_learner()
  connect(machine, 1, 0)
  machine.handle(MS, received(1, publish(2, 0, version=1), payload_id=4))
  assert of(train(machine, 10), actions.Adopt)
  machine.handle(11 * MS, events.Disconnected(session=1, reason='cut'))
  machine.handle(12 * MS, events.AdoptDone(fragment=0, version=1, digest=61))
  reports = contents(connect(machine, 2, 100), messages.Adopted)
  assert [(m.fragment, m.version, m.matched) for m in reports] == [(0, 1, False)]


def test_a_learner_does_not_wait_for_a_sync_that_it_has_adopted():
  # Syncs may close out of order; after a reconnect the clock is that of the oldest open one.
  machine = new_learner(max_lag=0)
  connect(machine, 1, 0)
  train(machine, 10)
  machine.handle(11 * MS, received(1, publish(4, 1, version=1), payload_id=4))
  train(machine, 20)
  machine.handle(21 * MS, events.Disconnected(session=1, reason='cut'))
  connect(machine, 2, 100, clock=1)  # sync 2 of fragment 0 is still open, sync 4 is done
  out = machine.handle(101 * MS, received(2, publish(2, 0, version=1), payload_id=5))
  assert of(out, actions.Step)


def test_a_pull_that_no_step_can_precede_is_declined():
  # Both would wait for the other: the learner for the sync (max_lag), the sync for its payload.
  machine = new_learner()
  connect(machine, 1, 0)
  train(machine, 10)
  repair = publish(6, 0, version=1, keep=False)
  machine.handle(11 * MS, received(1, repair, payload_id=4))
  assert not of(train(machine, 20), actions.Step), 'it waits for sync 4'
  out = machine.handle(21 * MS, received(1, messages.Pull(sync=10, fragment=0, now=True)))
  assert [m.reason for m in contents(out, messages.Decline)] == ['empty']


def test_a_cancelled_sync_frees_its_payload_and_nothing_else():
  # One contribution per anchor, but a cancelled sync does not count.
  machine = new_learner(max_lag=None)
  connect(machine, 1, 0)
  machine.handle(MS, received(1, messages.Pull(sync=2, fragment=0, now=True)))
  train(machine, 10)
  machine.handle(11 * MS, encoded(2, 0, payload_id=1))
  for cancelled, pulled, answers in ((6, 10, 0), (2, 14, 1)):
    machine.handle(12 * MS, settled(cancelled, 'cancelled'))
    machine.handle(13 * MS, received(1, messages.Pull(sync=pulled, fragment=0, now=True)))
    out = train(machine, 20)
    if of(out, actions.Encode):
      out = machine.handle(21 * MS, encoded(pulled, 0, payload_id=2))
    assert len(contents(out, messages.Contribution)) == answers, (cancelled, out)
    assert not contents(out, messages.Decline)


# --- Rebase ---------------------------------------------------------------------------------------


def captured() -> Any:
  """A learner that has given its first step to sync 2 and made one more."""
  machine = new_learner(max_lag=None, ahead=0)
  connect(machine, 1, 0)
  machine.handle(MS, received(1, messages.Pull(sync=2, fragment=0, now=True)))
  train(machine, 10)
  machine.handle(11 * MS, encoded(2, 0, payload_id=1))
  train(machine, 20)
  return machine


def settled(sync: int, reason: str) -> events.Received:
  return received(1, messages.Settled(sync=sync, fragment=0, merged=not reason, reason=reason))


def test_a_boundary_gives_before_it_adopts():
  """What is captured first needs no adoption, and the syncer waits for it."""
  machine = new_learner(max_lag=None)
  connect(machine, 1, 0)
  machine.handle(MS, received(1, messages.Pull(sync=6, fragment=0, now=True)))
  machine.handle(2 * MS, received(1, publish(2, 0, version=1), payload_id=4))
  work = [type(action) for action in train(machine, 10) if isinstance(action, actions.Work)]
  assert work == [actions.Encode, actions.Adopt, actions.Step]


def test_a_boundary_adopts_before_it_gives_again():
  """While a capture may still be merged there is nothing to give."""
  machine = captured()
  machine.handle(21 * MS, settled(2, ''))
  machine.handle(22 * MS, received(1, messages.Pull(sync=6, fragment=0, now=True)))
  new = publish(2, 0, version=1, settled_to=10)
  machine.handle(23 * MS, received(1, new, payload_id=4))
  work = of(train(machine, 30), actions.Work)
  assert [type(action) for action in work] == [actions.Adopt, actions.Encode, actions.Step]
  assert (work[0].keep, work[0].merged) == (True, True)
  (contribution,) = contents(
    machine.handle(31 * MS, encoded(6, 0, payload_id=2)), messages.Contribution
  )
  assert (contribution.tokens_from, contribution.tokens_to, contribution.steps) == (10, 30, 2)


def test_tokens_of_a_late_payload_are_in_the_next_one():
  machine = captured()
  machine.handle(21 * MS, settled(2, 'late'))
  machine.handle(22 * MS, received(1, messages.Pull(sync=6, fragment=0, now=True)))
  assert of(train(machine, 30), actions.Encode)
  (contribution,) = contents(
    machine.handle(31 * MS, encoded(6, 0, payload_id=2)), messages.Contribution
  )
  assert (contribution.tokens_from, contribution.tokens_to) == (0, 30)


@pytest.mark.parametrize('reason', ['bad_value', 'duplicate'])
def test_no_payload_begins_among_tokens_that_were_refused(reason):
  machine = captured()
  machine.handle(21 * MS, settled(2, reason))
  machine.handle(22 * MS, received(1, messages.Pull(sync=6, fragment=0, now=True)))
  out = train(machine, 30)  # the pull waits for the version after the refusal
  assert not contents(out, messages.Decline) and not of(out, actions.Encode)
  machine.handle(31 * MS, received(1, messages.Pull(sync=10, fragment=0, now=True)))
  fresh = publish(2, 0, version=1, settled_to=10, keep=False)
  machine.handle(32 * MS, received(1, fresh, payload_id=4))
  work = of(train(machine, 40), actions.Work)
  assert [type(action) for action in work] == [actions.Adopt, actions.Step] and not work[0].keep
  assert of(train(machine, 50), actions.Encode)
  (contribution,) = contents(
    machine.handle(51 * MS, encoded(10, 0, payload_id=2)), messages.Contribution
  )
  assert (contribution.tokens_from, contribution.tokens_to) == (40, 50)


def test_a_version_that_drops_steps_is_adopted_before_anything_is_given_or_declined():
  machine = new_learner(max_lag=None)
  connect(machine, 1, 0)
  train(machine, 10)
  machine.handle(11 * MS, received(1, messages.Pull(sync=6, fragment=0, now=True)))
  machine.handle(12 * MS, received(1, publish(2, 0, version=1, keep=False), payload_id=4))
  out = train(machine, 20)
  work = [type(action) for action in out if isinstance(action, actions.Work)]
  assert work == [actions.Adopt, actions.Step] and not contents(out, messages.Decline)
  assert of(train(machine, 30), actions.Encode), 'the pull is not lost'


def test_another_process_saves_after_as_many_steps_as_the_first():
  """Its steps begin at 0: counted from the last save of the process before it would not save."""
  saving = checkpoints.LearnerSaves(
    config_lib.ProtocolConfig(save_steps=5), action_list.ActionList()
  )
  saving.begin(clock=40, steps=40, machine_state={})
  saving.saved(0, events.SaveDone(clock=40))
  saving.begin_incarnation()
  assert [saving.due(40 + steps, steps) for steps in (4, 5)] == [False, True]
  assert saving.unsaved(1)


def test_the_answer_to_a_closing_sync_waits_for_the_verdict_on_the_last_capture():
  machine = captured()
  machine.handle(21 * MS, received(1, messages.Pull(sync=22, fragment=0, now=True)))
  out = train(machine, 30)
  assert not contents(out, messages.Decline)
  machine.handle(31 * MS, settled(2, 'late'))
  assert of(train(machine, 40), actions.Encode)


# --- Asked to end ---------------------------------------------------------------------------------


def preempted() -> tuple:
  """A learner that was asked to end in the middle of a step, with a pull to answer; it has
  saved."""
  machine = new_learner(max_lag=None)
  connect(machine, 1, 0)
  machine.handle(MS, received(1, messages.Pull(sync=2, fragment=0, now=True)))
  machine.handle(2 * MS, events.Stop(reason='preempted'))
  out = train(machine, 10)
  assert of(out, actions.Encode)  # first the answer to the pull
  assert of(out, actions.Save)
  assert not of(out, actions.Step)
  assert contents(machine.handle(11 * MS, encoded(2, 0, payload_id=1)), messages.Contribution)
  return machine, machine.handle(12 * MS, events.SaveDone(clock=1))


def test_a_preempted_learner_leaves_after_its_contribution_is_merged():
  # Issue 4, preemption: push, save, leave. A syncer drops the payload of a learner that leaves.
  machine, out = preempted()
  assert not contents(out, messages.Leave)
  waits = machine.handle(13 * MS, received(1, messages.Pull(sync=6, fragment=0, now=True)))
  assert not contents(waits, messages.Decline)
  out = machine.handle(20 * MS, settled(2, ''))
  assert [m.reason for m in contents(out, messages.Leave)] == ['preempted']
  assert isinstance(out[-1], actions.Exit) and out[-1].code == 0
  assert machine.deadline_ns is None


def test_a_learner_that_ends_before_it_has_joined_tells_no_clock():
  """That of the run may be any; its own begins at 0."""
  (*_, end) = new_learner().handle(MS, events.Stop(reason='the run is over'))
  assert end == actions.Exit(code=0, text='the run is over: 0 steps, 0 tokens')


def test_a_preempted_learner_stops_waiting_in_time():
  """Also if it is asked again."""
  machine, _ = preempted()
  machine.handle(20 * MS, events.Stop(reason='preempted once more'))
  leave_ns = 2 * MS + machine._config.drain_ns
  while machine.deadline_ns < leave_ns:
    assert not contents(machine.handle(machine.deadline_ns, events.Wake()), messages.Leave)
    machine.handle(machine.deadline_ns - 1, received(1, messages.Heartbeat()))
  assert machine.deadline_ns == leave_ns
  assert contents(machine.handle(leave_ns, events.Wake()), messages.Leave)


def test_a_preempted_learner_does_not_wait_for_a_verdict_that_cannot_arrive():
  machine, _ = preempted()
  out = machine.handle(13 * MS, events.Disconnected(session=1, reason='cut'))
  assert isinstance(out[-1], actions.Exit) and out[-1].code == 0


def test_a_preempted_learner_does_not_wait_for_a_withdrawn_contribution():
  """A repair replaces the anchor of the contribution."""
  machine, out = preempted()
  assert not contents(out, messages.Leave)
  repair = publish(sync=2, fragment=0, version=1, keep=False)
  repair = dataclasses.replace(repair, base_version=None)
  out = machine.handle(13 * MS, received(1, repair, payload_id=2))
  assert contents(out, messages.Leave), out


def _unanswered(machine: Any, session: int, from_ns: int, every_s: int = 10) -> tuple[int, Any]:
  """Lets every attempt from `session` on fail; the time of the learner's end, and the Exit."""
  for number in range(1, 1000):
    now_ns = from_ns + number * every_s * config_lib.SECOND_NS
    out = machine.handle(now_ns, events.Wake())
    if actions.Dial(session=session) in out:
      out += machine.handle(now_ns, events.Disconnected(session=session, reason='nothing listens'))
      session += 1
    for save in of(out, actions.Save):
      out = out + machine.handle(now_ns, events.SaveDone(clock=save.clock))
    if ends := of(out, actions.Exit):
      return now_ns - from_ns, ends[0]
  raise AssertionError('it dials for ever')


@pytest.mark.parametrize('state', ['never admitted', 'trained', 'in lock step'])
def test_a_learner_without_a_step_to_make_waits_an_hour_for_a_syncer(state):
  """The run may have ended while it was cut off."""
  machine, session, from_ns = new_learner(total_steps=2, max_lag=0), 1, 0
  if state != 'never admitted':
    machine = new_learner(total_steps=2 if state == 'trained' else 20, max_lag=0)
    connect(machine, 1, 0)
    for number in range(2):
      out = train(machine, 10 * (number + 1))
    assert not of(out, actions.Step)
    session, from_ns = 2, 7 * config_lib.SECOND_NS
    machine.handle(from_ns, received(1, messages.Heartbeat()))
    machine.handle(from_ns, events.Disconnected(session=1, reason='cut'))
  after_ns, end = _unanswered(machine, session, from_ns)
  assert alone.ALONE_NS <= after_ns < alone.ALONE_NS + 30 * config_lib.SECOND_NS
  assert end.code == 75 and 'No syncer has answered for 60 min (nothing listens)' in end.text


def test_a_learner_that_trains_waits_for_no_syncer():
  machine = new_learner(total_steps=4, max_lag=None)
  connect(machine, 1, 0)
  machine.handle(MS, events.Disconnected(session=1, reason='cut'))
  for session in (2, 3):
    now_ns = session * alone.ALONE_NS
    machine.handle(now_ns, events.Wake())
    out = machine.handle(now_ns, events.Disconnected(session=session, reason='cut'))
    assert not of(out, actions.Exit)
  from_ns = 4 * alone.ALONE_NS  # the hour begins with its last step
  for _ in range(4):
    machine.handle(from_ns, events.StepDone(tokens=10, step_ns=MS))
  machine.handle(from_ns, events.Disconnected(session=4, reason='cut'))
  after_ns, _ = _unanswered(machine, 5, from_ns)
  assert after_ns >= alone.ALONE_NS


def test_a_syncer_that_answers_is_waited_for():
  """With a refusal for now, say: a learner may wait for its place for days."""
  machine = new_learner()
  full = messages.Refused(code='FULL', text='Nothing is lost.', retry_ns=config_lib.SECOND_NS)
  for session in range(1, 500):
    now_ns = session * 60 * config_lib.SECOND_NS
    out = machine.handle(now_ns, events.Wake())
    out += machine.handle(now_ns, events.Connected(session=session))
    out += machine.handle(now_ns, received(session, full))
    out += machine.handle(now_ns, events.Disconnected(session=session, reason='FULL'))
    kinds = {type(action) for action in out}
    assert actions.Dial in kinds and actions.Exit not in kinds


def test_a_learner_whose_certificate_is_refused_says_so_and_ends_with_42_after_ten_minutes():
  """It has trained for nothing meanwhile; but a revocation may be taken back."""
  machine = new_learner(max_lag=None)
  refused = messages.unproved('learner l0 is not on the allowlist')

  def is_refused(session: int, now_s: int) -> list[actions.Action]:
    now_ns = now_s * config_lib.SECOND_NS
    out = machine.handle(now_ns, events.Wake())
    out += machine.handle(now_ns, received(session, refused))
    return out + machine.handle(now_ns, events.Disconnected(session=session, reason='refused'))

  lines = lambda out: [action.text for action in of(out, actions.Say)]
  connect(machine, 1, 0)
  out = is_refused(1, 1)  # the session ends
  assert any('Nothing that it trains is merged' in line for line in lines(out))
  assert not any('nothing is lost' in line for line in lines(out))
  out = [action for number in range(2, 30) for action in is_refused(number, 20 * number)]
  assert 8 <= len(lines(out)) <= 11, 'once a minute'
  assert not of(out, actions.Exit)
  connect(machine, 30, 600_000)  # it was let in again: the ten minutes are others
  machine.handle(601 * config_lib.SECOND_NS, events.Disconnected(session=30, reason='cut'))
  out = [action for number in range(31, 60) for action in is_refused(number, 20 * number)]
  assert not of(out, actions.Exit)
  out = is_refused(60, 2_000)
  (end,) = of(out, actions.Exit)
  assert end.code == 42 and 'refused this learner for 10 min: learner l0 is not' in end.text


# --- Saves ----------------------------------------------------------------------------------------


def test_failing_saves_are_one_line_a_minute():
  """On a full disk each of them fails, several in a second."""
  machine = new_learner()
  said = []
  for second in range(0, 130, 5):
    failed = events.SaveDone(clock=second, error='no space')
    out = machine.handle(second * 1_000 * MS, failed)
    said += [action.text for action in of(out, actions.Say)]
  assert said == [
    'checkpoint of step 0 failed: no space',
    'checkpoint of step 60 failed: no space (11 more since the last such line)',
    'checkpoint of step 120 failed: no space (11 more since the last such line)',
  ]
