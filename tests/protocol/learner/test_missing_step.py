"""A learner that is alive and makes no step says so, and ends when nobody needs its step."""

from typing import Any

import pytest

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from tests.protocol import single
from tests.protocol import talk as talk_lib

SECOND = config_lib.SECOND_NS


def learner(usual_s: float = 0.1, **settings: Any) -> Any:
  """One that has made three steps of usual length, and begins the next one at 0 s."""
  machine = single.new_learner(
    **{'max_lag': None, 'total_steps': 200, 'lease_ms': 10_000, **settings}
  )
  single.connect(machine, 1, 0)
  for _ in range(3):
    machine.handle(0, events.StepDone(tokens=10, step_ns=int(usual_s * SECOND)))
  return machine


def until(machine: Any, end_s: float, doing: str | None, session: int = 1) -> list:
  """Wakes the machine at its deadlines and answers its questions; what it did, by time in s. The
  syncer answers each heartbeat."""
  done, sent = [], 0
  while not done or not isinstance(done[-1][1], actions.Exit):
    now_ns = machine.deadline_ns
    if now_ns is None or now_ns > end_s * SECOND:
      break
    out = machine.handle(now_ns, events.Wake())
    if actions.Examine() in out:
      out += machine.handle(now_ns, events.Examined(doing=doing, where='wait in loop.py:7'))
    done += [(now_ns / SECOND, action) for action in out]
    beats = single.contents([action for _, action in done], messages.Heartbeat)
    if len(beats) > sent:
      sent = len(beats)
      machine.handle(now_ns, single.received(session, messages.Heartbeat()))
  return done


def said(done: list) -> list[tuple[float, str]]:
  return [(at_s, action.text) for at_s, action in done if isinstance(action, actions.Say)]


def reported(done: list) -> list[tuple[float, str]]:
  reports = [(at_s, action.fact) for at_s, action in done if isinstance(action, actions.Report)]
  return [(at_s, fact.doing) for at_s, fact in reports if isinstance(fact, facts.NoStep)]


@pytest.mark.parametrize(('usual_s', 'after_s'), [(0.1, 30), (6.0, 60)])
def test_after_30_s_and_ten_usual_steps_it_says_what_it_does_and_its_heartbeats_too(
  usual_s, after_s
):
  done = until(learner(usual_s), 100, messages.READING)
  (at_s, text), *more = said(done)
  assert after_s <= at_s <= after_s + 2 and [at_s + 60 for _ in more] == [at for at, _ in more]
  assert text.startswith(
    f'no step for {at_s:.0f} s: the learner reads its next batch (wait in loop'
  )
  sent = [(at, send.message) for at, send in done if isinstance(send, actions.Send)]
  beats = [(at, beat) for at, beat in sent if isinstance(beat, messages.Heartbeat)]
  assert all(beat == messages.Heartbeat() for at, beat in beats if at < after_s)
  last_s, last = beats[-1]
  assert last.doing == messages.READING and last_s - 4 <= last.idle_ns / SECOND <= last_s


@pytest.mark.parametrize(
  ('state', 'trains'),
  [('steps', True), ('steps, of lock step', False), ('compiles', False), ('no step yet', False)],
)
def test_the_syncer_says_that_others_train_on_only_if_they_do(state, trains):
  lag = 1 if 'lock' in state else None
  talk = talk_lib.Talk('l0', 'l1', total_steps=200, max_lag=lag)
  talk.steps('l0', to=3)
  if 'step' in state and 'no' not in state:
    talk.steps('l1', to=3)
  if state == 'compiles':
    talk.steps('l1', to=3)
    talk.hears('l1', messages.Heartbeat(doing=messages.COMPILING, idle_ns=40 * SECOND))
  talk.hears('l0', messages.Heartbeat(doing=messages.SYNCING, idle_ns=44 * SECOND))
  (line,) = talk.said
  assert 'l0 on host has made no step for 44 s: it is in peer.sync' in line
  assert ('Other learners that train on: 1.' in line) == trains == ('train on' in line)


def test_every_process_that_lives_tells_its_records_so_once_per_heartbeat():
  """Else a long step, or a wait for others, and a death would look alike."""
  done = reported(until(learner(), 60, messages.READING))
  assert [at for at, _ in done] == list(range(2, 61, 2))
  assert {doing for at, doing in done if at < 30} == {''}
  assert {doing for at, doing in done if at >= 30} == {messages.READING}
  waits = single.new_learner(lease_ms=10_000)
  waits.handle(0, events.Wake())
  assert {doing for _, doing in reported(until(waits, 9, None))} == {messages.WAITING}


@pytest.mark.parametrize('doing', [messages.COMPILING, messages.SAVING, ''])
def test_compiling_and_saves_are_no_missing_step(doing):
  done = until(learner(end_stuck_ns=40 * SECOND), 290, doing)
  assert not said(done) and not any(isinstance(action, actions.Exit) for _, action in done)
  assert reported(done)[-1][1] == doing


def test_a_save_that_never_ends_is_said():
  assert 'saves a checkpoint' in said(until(learner(), 310, messages.SAVING))[0][1]


def test_the_next_step_ends_it():
  machine = learner()
  until(machine, 50, messages.STEPPING)
  out = machine.handle(51 * SECOND, events.StepDone(tokens=10, step_ns=51 * SECOND))
  assert any('makes steps again, after 51 s' in getattr(action, 'text', '') for action in out)
  assert not single.contents([action for _, action in until(machine, 54, '')], messages.Heartbeat)[
    0
  ].doing


def test_the_setting_ends_it_with_75_so_that_whoever_starts_it_again_helps():
  *_, (at_s, end) = until(learner(end_stuck_ns=120 * SECOND), 400, messages.LOOPING)
  assert 120 <= at_s <= 122 and (end.code, end.abandons) == (75, True)
  assert 'sync.end_stuck_s' in end.text and 'start the learner again' in end.text
  done = until(learner(), 400, messages.LOOPING)
  assert not any(isinstance(action, actions.Exit) for _, action in done)


@pytest.mark.parametrize(
  ('doing', 'ends_s'),
  [
    (messages.READING, 5),
    (messages.STEPPING, 30),
    (messages.SYNCING, 30),
    (messages.LOOPING, None),
  ],
)
def test_a_learner_whose_run_is_over_ends_without_a_step_that_nobody_needs(doing, ends_s):
  """A loop of the user's own may evaluate in its step: it goes on."""
  machine = learner()
  machine.handle(1, single.received(1, messages.Finish()))
  done = until(machine, 100, doing)
  ends = [(at_s, action) for at_s, action in done if isinstance(action, actions.Exit)]
  if ends_s is None:
    assert not ends
  else:
    ((at_s, end),) = ends
    assert ends_s <= at_s <= ends_s + 2 and (end.code, end.abandons) == (0, True)
    assert end.text.startswith('done at clock 3 of 200: 3 steps, 30 tokens; it ends without')
    assert single.contents([action for _, action in done], messages.Leave)


@pytest.mark.parametrize(
  ('reason', 'code'),
  [
    ('the run has ended: run/syncer/address says so', 0),
    ('the syncer has ended for good: the log is damaged', 42),
  ],
)
def test_a_learner_whose_run_or_syncer_has_ended_ends_and_says_which(reason, code):
  machine = learner()
  out = machine.handle(SECOND, events.Disconnected(session=1, reason=reason))
  out += machine.handle(SECOND, events.StepDone(tokens=10, step_ns=SECOND))
  out += machine.handle(SECOND, events.SaveDone(clock=4))
  assert not any('unreachable' in getattr(action, 'text', '') for action in out)
  assert out[-1].code == code and out[-1].text.startswith(reason) and not out[-1].abandons


def test_what_may_come_back_is_unreachable_also_a_syncer_that_ended_before_it_was_joined():
  machine = learner()
  out = machine.handle(SECOND, events.Disconnected(session=1, reason='Socket closed'))
  assert any(
    'unreachable (Socket closed). Training continues' in getattr(o, 'text', '') for o in out
  )
  stranger = single.new_learner()
  stranger.handle(0, events.Wake())
  reason = f'{messages.GONE}: the log is damaged'  # left behind by a process before
  out = stranger.handle(SECOND, events.Disconnected(session=1, reason=reason))
  assert not single.of(out, actions.Exit)
