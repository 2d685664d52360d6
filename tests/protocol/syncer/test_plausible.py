"""The syncer believes no number of a peer: a lie closes the session of the liar, is a strike, and
changes nothing of the run."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol import config as config_lib
from tests.protocol import single
from tests.protocol.talk import Talk

SECOND_NS = config_lib.SECOND_NS
FAR = 2**53


def member(**settings: Any) -> Talk:
  """A syncer with one learner, which has made 4 steps of 10 tokens; sync 2 is open."""
  talk = Talk('l0', max_step_tokens=10, **settings)
  talk.steps('l0', to=4)
  return talk


PROGRESS, CONTRIBUTION, DECLINE = single.progress(5), single.contribution(), single.decline()
ADOPTED = messages.Adopted(fragment=0, version=0, tokens=0, matched=True)
LIES = [  # a message, what is changed in it, and how the syncer names the lie
  (PROGRESS, {'clock': FAR}, f'step {FAR} after step 4 and 1 more steps'),  # D2
  (PROGRESS, {'clock': 7}, 'step 7 after step 4 and 1 more steps'),
  (PROGRESS, {'steps': 6}, '6 steps at step 5'),
  (PROGRESS, {'tokens': 51}, '51 tokens in 5 steps, at most 50'),
  (PROGRESS, {'tokens': 4}, '4 tokens in 5 steps'),
  (PROGRESS, {'finished': True}, 'finished at step 5 of 8'),
  (CONTRIBUTION, {'steps': 5}, 'a contribution of 5 steps after 4'),
  (CONTRIBUTION, {'steps': FAR}, f'a contribution of {FAR} steps after 4'),  # D5
  (CONTRIBUTION, {'tokens_to': 41}, 'tokens 0 to 41 of 40'),
  (CONTRIBUTION, {'tokens_from': 20}, 'tokens 20 to 20 of 40'),
  (CONTRIBUTION, {'tokens_from': 10, 'tokens_to': 0}, 'tokens 10 to 0 of 40'),
  (CONTRIBUTION, {'fragment': 9}, 'fragment 9 of 1'),
  (CONTRIBUTION, {'steps': 1}, '20 tokens in 1 steps, at most 10'),
  (CONTRIBUTION, {'cursor': 5}, '2 batches up to 5 of shard 0'),
  (CONTRIBUTION, {'sync': FAR}, f'sync {FAR} of a run that ends at 10'),
  (CONTRIBUTION, {'payload': messages.Payload(size_bytes=1, crc32=0)}, '1 bytes of a fragment'),
  (DECLINE, {'tokens_to': 41}, 'token 41 of 40'),
  (DECLINE, {'reason': 'because'}, "reason 'because'"),
  (DECLINE, {'fragment': 1}, 'fragment 1 of 1'),
  (ADOPTED, {'version': 1}, 'version 1 of fragment 0, not 0'),
  (ADOPTED, {'fragment': 1, 'matched': False}, 'fragment 1 of 1'),
  (ADOPTED, {'tokens': 41, 'matched': False}, 'token 41 of 40'),
  (messages.Heartbeat(), {'doing': 'sleeping', 'idle_ns': 1}, "'sleeping' for 1 ns without"),
  (messages.Heartbeat(), {'doing': 'waiting', 'idle_ns': 1}, "'waiting' for 1 ns without"),
  (messages.Heartbeat(), {'doing': 'reading'}, "'reading' for 0 ns without"),
  (messages.Heartbeat(), {'idle_ns': 1}, "'' for 1 ns without a step"),
]


@pytest.mark.parametrize('message, changes, lie', LIES)
def test_a_lie_closes_the_session_is_a_strike_and_changes_nothing(message, changes, lie):
  talk = member()
  before = talk.machine.state()
  payload_id = 9 if message is CONTRIBUTION else None
  talk.hears('l0', dataclasses.replace(message, **changes), payload_id)
  assert isinstance(talk.out[-1], actions.Close)
  assert f'a message that no learner of this run sends: {lie}' in talk.said[0]
  after = talk.machine.state()
  assert talk.member()['strikes'] == 1
  assert {**after, 'members': 0} == {**before, 'members': 0}


def test_three_lies_in_a_row_are_a_quarantine():
  talk = member()
  for again in (False, True, True):
    if again:
      talk.joins('l0')
    talk.hears('l0', dataclasses.replace(PROGRESS, clock=FAR))
  assert talk.refusals == ['QUARANTINED']


def test_a_deeply_nested_agreement_is_refused():  # D1
  talk = Talk(learners=1)
  talk.asks('l0', agreement='[' * 65_000)
  assert talk.refusals == ['MISMATCH']


@pytest.mark.parametrize('changes', [{'clock': 99}, {'steps': 1}, {'tokens': 1}])
def test_an_implausible_confirm_is_not_admitted(changes):
  talk = Talk(learners=1)
  talk.joins('l0', **changes)
  assert isinstance(talk.out[-1], actions.Close) and not talk.machine.state()['members']


def test_a_step_between_confirm_and_joined_of_a_new_incarnation_is_plausible():
  # A process of step 3 is new to a syncer whose log was repaired; its steps count from 0 again.
  talk = Talk(learners=1)
  talk.joins('l0', clock=3)
  for changes, believed in (
    ({'steps': 0, 'tokens': 0, 'clock': 4}, True),
    ({'steps': 1, 'tokens': 10, 'clock': 5}, True),
    ({'steps': 0, 'tokens': 0, 'clock': 9}, False),
  ):
    talk.hears('l0', dataclasses.replace(PROGRESS, **changes))
    assert bool(talk.said) != believed and bool(talk.closed) != believed


# --- Pace -----------------------------------------------------------------------------------------


def three(**settings: Any) -> Talk:
  """A syncer with l0, l1 and l2, of a long run; each makes a step per second."""
  talk = Talk(
    'l0', 'l1', 'l2', **{'total_steps': 10**6, 'period': 4, 'lease_ms': 10_000, **settings}
  )
  for second in range(1, 5):
    talk.now_ns = second * SECOND_NS
    talk.steps('l0', 'l1', 'l2', to=second)
  return talk


def test_one_clock_carries_nobody_to_the_end_of_the_run():
  # D2 in small steps: with K = 1 the fastest learner sets the pace, but not at any speed.
  talk = three()
  talk.now_ns = 5 * SECOND_NS
  talk.steps('l2', to=900_000)
  assert talk.machine.clock <= 16 * 5
  talk.wakes(9 * SECOND_NS)
  assert talk.machine.clock <= 16 * 9


def test_steps_count_by_the_time_in_which_they_were_made():
  """found A1: 900,000 steps in one report were counted, and weighed like 225,000 learners."""
  talk = three()
  talk.now_ns = 5 * SECOND_NS
  talk.steps('l2', to=900_000)
  assert 'steps, ' in talk.said[0] and 'possible in the time' in talk.said[0]
  assert [m['strikes'] for m in talk.machine.state()['members']] == [0, 0, 1]


def test_a_pause_of_the_reports_is_no_lie():
  """A session that was silent for long has made the steps of that time, and so has one whose
  reports of a lease arrive at once."""
  talk = three()
  talk.now_ns = 5 * SECOND_NS - 1
  for step in range(5, 60):
    talk.steps('l0', 'l1', to=step)
    assert not talk.said and not talk.closed
  steps, talk.now_ns = 100_004, 100_000 * SECOND_NS
  talk.loses('l2')
  talk.joins('l2', clock=steps, steps=steps, tokens=steps * 10)
  assert talk.sent(messages.Joined)


@pytest.mark.parametrize('away_s', [0, 60])
def test_a_learner_whose_steps_become_fast_is_no_liar(away_s: int):
  """Steps of 3 ms after some of a second, slow by load or since they compiled, as those of the
  others still are: they count, one by one, and at once after the learner was away."""
  talk, steps = three(), 4
  for second in range(5, 12):
    talk.now_ns = second * SECOND_NS
    talk.steps('l0', 'l1', to=second)
    for number in range(300):
      steps += 1
      talk.now_ns = second * SECOND_NS + number * 3 * 10**6
      talk.steps('l2', to=steps)
      assert not talk.said and not talk.closed
  talk.loses('l2')
  steps, talk.now_ns = steps + 300 * away_s, talk.now_ns + away_s * SECOND_NS
  talk.joins('l2', clock=steps, steps=steps, tokens=steps * 10)
  assert talk.sent(messages.Joined)


def test_a_process_that_the_syncer_does_not_know_has_no_past():
  """found A1, past.py: it is offered another incarnation than it claims, so an honest one begins
  at 0, and a Confirm that claims steps or a shard is refused."""
  talk = three()
  talk.asks('l3', incarnation=1)
  assert [message.incarnation for message in talk.sent(messages.Offer)] == [2]
  talk.confirms('l3', clock=4, steps=4, tokens=40)
  assert isinstance(talk.out[-1], actions.Close) and 'l3' not in talk.machine._members.by_id


def test_after_a_restart_one_clock_waits_for_another():
  """A process of the syncer before may have made any number of steps. Its clock counts for one
  period until a second one has come back, or a lease has passed."""
  talk = three()
  again = talk.restarted({**talk.machine.state(), 'undecided': []})
  for name, clock in (('l2', 900_000), ('l0', 30)):
    again.joins(name, clock=clock)
    assert again.machine.clock <= talk.machine.clock + 4
  again.wakes(SECOND_NS)
  assert max(holder.clock for holder in again.machine._members.by_id.values()) <= 16 * 30 + 4


def test_no_clock_skips_a_closing_sync():
  """Behind the last inner step no later sync makes up for it."""
  talk = Talk(learners=2, total_steps=40, fragments=4, period=4)
  for m in range(2):
    talk.joins(f'l{m}', clock=45 * m)
  for holder in talk.machine._members.by_id.values():
    holder.since, holder.claimed = None, 45  # as after a restart in which both have come back
  talk.steps('l1', to=0, clock=45)
  assert talk.machine._members.by_id['l1'].clock == 45
  assert talk.machine._pace.skip_overdue() and talk.machine._pace.opening.t <= 40


@pytest.mark.parametrize('published, believed', [(12, True), (11, False)])
def test_a_restart_that_opens_closing_syncs_again_strikes_no_learner(published, believed):
  """A later one may be published already: who adopts it is at its step, and not behind it."""
  talk = Talk('l0', total_steps=8, fragments=4, period=4, overlap=2)
  talk.steps('l0', to=8)
  talk.machine._published.last_sync = published  # by the process before
  talk.steps('l0', to=8, clock=12)
  assert bool(talk.said) != believed
  assert talk.member()['strikes'] == (0 if believed else 1)


def test_a_learner_that_was_not_heard_for_a_while_counts_with_all_its_steps():
  talk = three(lease_ms=19_000)  # its speed is measured once in 3.8 s
  talk.now_ns = 22 * SECOND_NS
  talk.steps('l2', to=22)
  assert talk.member('l2')['clock'] == 22


# --- Books ----------------------------------------------------------------------------------------


def died(talk: Talk, deaths: int) -> None:
  for _ in range(deaths):
    talk.joins('l0', process=talk._sessions + 1)
    talk.steps('l0', to=3)
    talk.loses('l0', reason='killed')


def test_ten_thousand_deaths_of_a_learner_take_no_more_room_than_ten():  # D10
  talk = Talk(learners=1)
  died(talk, 10)
  before = len(json.dumps(talk.machine.state()))
  died(talk, 9_990)
  assert len(json.dumps(talk.machine.state())) <= before + 40  # the numbers are longer
  totals = talk.machine._ledger.totals()
  assert totals['trained'] == 30 * 10_000
  assert totals['discarded'] == {'lost_with_process': 30 * 9_999}


def test_a_thousand_invented_ids_are_forgotten():  # D10
  talk = Talk(learners=4)
  for n in range(1_000):
    talk.joins(f'x{n}')
    talk.loses(f'x{n}')
  assert len(talk.machine.state()['members']) == len(talk.machine.state()['ledger']) == 8


def contributing(**settings: Any) -> Talk:
  """A syncer of which l0 has contributed once."""
  talk = member(**settings)
  talk.hears('l0', single.contribution(), 5)
  assert talk.merges
  talk.turn(single.merge_done(2))
  return talk


def test_newcomers_do_not_take_all_places():
  talk = contributing()
  for n in range(2, 30):
    talk.joins(f'x{n}')
  assert talk.refusals == ['FULL']
  talk.loses('l0')
  talk.joins('l0', process=2)
  assert not talk.refusals and not talk.closed


def test_a_reader_that_contributes_nothing_gives_its_shard_to_a_learner_that_does():  # D11
  talk = contributing(shards=1)
  talk.loses('l0')
  talk.joins('x1')
  assert talk.sent(messages.Joined)
  talk.joins('l0')
  assert not talk.sent(messages.Joined)
  later = talk.machine._config.lease_ns + 6
  for holder in talk.machine._members.by_id.values():
    holder.heard_ns = later
  talk.wakes(later)
  assert talk.closed == [talk.session['x1']] and talk.sent(messages.Joined, 'l0')


def test_a_reader_has_a_lease_from_its_shard_on_to_contribute():
  talk = contributing(shards=1)
  talk.joins('x1')
  assert not talk.sent(messages.Joined)
  talk.now_ns = later = 3 * talk.machine._config.lease_ns
  for holder in talk.machine._members.by_id.values():
    holder.heard_ns = later
  talk.loses('l0')
  assert talk.sent(messages.Joined, 'x1')
  talk.joins('l0')
  assert not talk.closed


# --- Runs -----------------------------------------------------------------------------------------


def test_a_learner_of_another_run_is_refused_and_changes_nothing():  # F4
  """A run keeps its name over a restart."""
  talk = contributing().restarted()
  before = talk.machine.state()
  talk.asks('x1', run='r9', incarnation=3)
  (refused,) = talk.sent(messages.Refused)
  assert refused.code == 'OTHER_RUN' and refused.retry_ns is None
  assert 'run r9' in refused.text and 'run r0' in refused.text
  assert talk.machine.state() == before


def test_a_learner_remembers_its_run_and_believes_no_syncer_of_another():
  learner = single.new_learner()
  single.connect(learner, 1, 0)
  assert learner.state()['run'] == 'r0'
  learner.handle(1, events.Disconnected(session=1, reason='gone'))
  learner.handle(10**12, events.Wake())
  (join,) = single.contents(learner.handle(10**12, events.Connected(session=2)), messages.Join)
  assert (join.run, join.incarnation) == ('r0', 1)
  out = learner.handle(10**12, single.received(2, messages.Offer(run='r9', incarnation=1)))
  assert [type(action) for action in out] == [actions.Close]


# --- What people are told (F5) --------------------------------------------------------------------


def said(out: list) -> list[str]:
  return [action.text for action in single.of(out, actions.Say)]


def test_a_syncer_says_within_a_minute_that_nothing_is_merged():
  talk, lines = Talk('l0', learners=2, quorum=2, start_wait_ms=0), []
  for second in range(1, 131):
    talk.machine._members.by_id['l0'].heard_ns = second * SECOND_NS
    talk.wakes(second * SECOND_NS)
    lines += talk.said
  assert len(lines) == 2
  assert '1 learners contribute, an outer step needs 2' in lines[0]


@pytest.mark.parametrize(
  ('entered_s', 'why'),
  [(50, '1 learners have only just'), (0, '1 learners contribute'), (None, 'no learner trains')],
)
def test_a_syncer_without_an_outer_step_says_whether_anybody_trains(entered_s, why):
  talk = member(start_wait_ms=0, lease_ms=100_000)
  talk.wakes(20 * SECOND_NS)
  if entered_s is None:
    talk.loses('l0')
  else:
    talk.machine._members.by_id['l0'].entered_ns = entered_s * SECOND_NS
  talk.wakes(80 * SECOND_NS)
  assert sum(f'no outer step for 60 s: {why}' in line for line in talk.said) == 1, talk.said


def test_a_syncer_says_that_only_zeros_are_merged_unless_the_run_has_just_begun():
  talk = member()
  talk.hears('l0', single.contribution(), 5)
  later = copy.deepcopy(talk)
  later.machine._screening.usual[0].commits = later.machine._config.norm_warmup
  for run, begun in ((talk, True), (later, False)):
    run.turn(dataclasses.replace(single.merge_done(2), norms=(0,)))
    assert any('merged only zeros' in line for line in run.said) != begun


def test_a_learner_says_that_it_is_not_connected():
  learner = single.new_learner()
  lines = []
  for session in range(1, 40):
    now_ns = 10 * session * SECOND_NS
    out = learner.handle(now_ns, events.Wake())
    out += learner.handle(now_ns, events.Disconnected(session=session, reason='refused'))
    lines += [line for line in said(out) if 'not connected: refused' in line]
  assert 5 <= len(lines) <= 8  # at once, and once a minute of six and a half


def test_a_learner_says_that_nothing_of_it_is_merged():
  learner = single.new_learner()
  single.connect(learner, 1, 0)
  late = messages.Settled(sync=1, fragment=0, merged=False, reason='late')
  lines = said(learner.handle(SECOND_NS, single.received(1, late)))
  for second in range(2, 70):
    lines += said(learner.handle(second * SECOND_NS, single.received(1, messages.Heartbeat())))
  lines = [line for line in lines if 'nothing of this learner was merged' in line]
  assert lines and 'late: 1' in lines[0]
