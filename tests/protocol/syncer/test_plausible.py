"""The syncer believes no number of a peer: a lie closes the session of the liar, is a strike, and
changes nothing of the run."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.verification.sim import network
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import single

SECOND_NS = config_lib.SECOND_NS
FAR = 2**53


def told(out: list, kind: type) -> list:
  return [one.message for one in out if isinstance(one, actions.Send) and type(one.message) is kind]


def said(out: list) -> list[str]:
  return [one.text for one in out if isinstance(one, actions.Say)]


def member(**settings: Any) -> Any:
  """A syncer with one learner, which has made 4 steps of 10 tokens; sync 2 is open."""
  machine, _ = single.joined(max_step_tokens=10, **settings)
  machine.handle(2, single.received(1, single.progress(4)))
  return machine


PROGRESS, CONTRIBUTION = single.progress(5), single.contribution()
LIES = [
  dataclasses.replace(PROGRESS, clock=FAR),  # D2
  dataclasses.replace(PROGRESS, clock=7),
  dataclasses.replace(PROGRESS, steps=6),
  dataclasses.replace(PROGRESS, tokens=51),
  dataclasses.replace(PROGRESS, tokens=4),
  dataclasses.replace(PROGRESS, finished=True),
  dataclasses.replace(CONTRIBUTION, steps=5),
  dataclasses.replace(CONTRIBUTION, steps=FAR),  # D5
  dataclasses.replace(CONTRIBUTION, tokens_to=41),
  dataclasses.replace(CONTRIBUTION, tokens_from=20),
  dataclasses.replace(CONTRIBUTION, tokens_from=10, tokens_to=0),
  dataclasses.replace(CONTRIBUTION, fragment=9),
  dataclasses.replace(CONTRIBUTION, steps=1),  # 20 tokens in one step
  dataclasses.replace(CONTRIBUTION, cursor=5),
  dataclasses.replace(CONTRIBUTION, sync=FAR),
  dataclasses.replace(CONTRIBUTION, payload=messages.Payload(size_bytes=1, crc32=0)),
  dataclasses.replace(single.decline(), tokens_to=41),
  dataclasses.replace(single.decline(), reason='because'),
  dataclasses.replace(single.decline(), fragment=1),
  messages.Adopted(fragment=0, version=1, tokens=0, matched=True),
  messages.Adopted(fragment=1, version=0, tokens=0, matched=False),
  messages.Adopted(fragment=0, version=0, tokens=41, matched=False),
]


@pytest.mark.parametrize('lie', LIES)
def test_a_lie_closes_the_session_is_a_strike_and_changes_nothing(lie):
  machine = member()
  before = machine.state()
  out = machine.handle(3, single.received(1, lie, 9 if hasattr(lie, 'payload') else None))
  assert isinstance(out[-1], actions.Close)
  assert 'a message that no learner of this run sends' in said(out)[0]
  after = machine.state()
  assert after['members'][0]['strikes'] == 1
  assert {**after, 'members': 0} == {**before, 'members': 0}
  machine.check()


def test_three_lies_in_a_row_are_a_quarantine():
  machine = member()
  for session in (1, 2, 3):
    if session > 1:
      machine.handle(3, single.received(session, single.join()))
      machine.handle(3, single.received(session, single.confirm()))
    out = machine.handle(3, single.received(session, LIES[0]))
  assert [one.code for one in told(out, messages.Refused)] == ['QUARANTINED']


def test_a_deeply_nested_agreement_is_refused():  # D1
  machine = single.new_machine()
  deep = dataclasses.replace(single.join(), agreement='[' * 65_000)
  out = machine.handle(0, single.received(1, deep))
  assert [one.code for one in told(out, messages.Refused)] == ['MISMATCH']


@pytest.mark.parametrize('changes', [{'clock': 99}, {'steps': 1}, {'tokens': 1}])
def test_an_implausible_confirm_is_not_admitted(changes):
  machine = single.new_machine()
  machine.handle(0, single.received(1, single.join()))
  out = machine.handle(0, single.received(1, dataclasses.replace(single.confirm(), **changes)))
  assert isinstance(out[-1], actions.Close) and not machine.state()['members']


def test_a_step_between_confirm_and_joined_of_a_new_incarnation_is_plausible():
  # A process of step 3 is new to a syncer whose log was repaired; its steps count from 0 again.
  machine = single.new_machine()
  machine.handle(0, single.received(1, single.join()))
  machine.handle(0, single.received(1, dataclasses.replace(single.confirm(), clock=3)))
  first = dataclasses.replace(single.progress(0), clock=4)
  assert not said(machine.handle(1, single.received(1, first)))
  assert not said(
    machine.handle(2, single.received(1, dataclasses.replace(PROGRESS, steps=1, tokens=10)))
  )
  out = machine.handle(3, single.received(1, dataclasses.replace(first, clock=9)))
  assert isinstance(out[-1], actions.Close)


# --- Pace -----------------------------------------------------------------------------------------


def three(**settings: Any) -> Any:
  """A syncer with l0, l1 and l2, of a long run; each makes a step per second."""
  more = {'lease_ms': 10_000, **settings}
  machine = single.new_machine(learners=3, total_steps=10**6, period=4, **more)
  for m in range(3):
    machine.handle(0, single.received(m, single.join(learner=f'l{m}', nonce=7 + m)))
    machine.handle(0, single.received(m, single.confirm(nonce=7 + m)))
  for second in range(1, 5):
    for m in range(3):
      machine.handle(second * SECOND_NS, single.received(m, single.progress(second)))
  return machine


def test_one_clock_carries_nobody_to_the_end_of_the_run():
  # D2 in small steps: with K = 1 the fastest learner sets the pace, but not at any speed.
  machine = three()
  leap = single.progress(900_000)
  machine.handle(5 * SECOND_NS, single.received(2, leap))
  assert machine.clock <= 16 * 5
  machine.handle(9 * SECOND_NS, events.Wake())
  assert machine.clock <= 16 * 9


def test_steps_count_by_the_time_in_which_they_were_made():
  """found A1: 900,000 steps in one report were counted, and weighed like 225,000 learners."""
  machine = three()
  leap = dataclasses.replace(single.progress(900_000), clock=900_000)
  out = machine.handle(5 * SECOND_NS, single.received(2, leap))
  assert 'steps, ' in said(out)[0] and 'possible in the time' in said(out)[0]
  assert [m['strikes'] for m in machine.state()['members']] == [0, 0, 1]


def test_a_pause_of_the_reports_is_no_lie():
  """A session that was silent for long has made the steps of that time, and so has one whose
  reports of a lease arrive at once."""
  machine = three()
  now_ns = 5 * SECOND_NS - 1
  for m in range(2):
    for step in range(5, 60):
      out = machine.handle(now_ns, single.received(m, single.progress(step)))
      assert not said(out) and not any(isinstance(one, actions.Close) for one in out)
  steps, now_ns = 100_004, 100_000 * SECOND_NS
  machine.handle(now_ns, events.Disconnected(session=2, reason='closed'))
  machine.handle(now_ns, single.received(9, single.join(learner='l2', nonce=9, incarnation=1)))
  out = machine.handle(
    now_ns,
    single.received(
      9, dataclasses.replace(single.confirm(nonce=9), clock=steps, steps=steps, tokens=steps * 10)
    ),
  )
  assert told(out, messages.Joined)


@pytest.mark.parametrize('away_s', [0, 60])
def test_a_learner_whose_steps_become_fast_is_no_liar(away_s: int):
  """Steps of 3 ms after some of a second, slow by load or since they compiled, as those of the
  others still are: they count, one by one, and at once after the learner was away."""
  machine, steps = three(), 4
  for second in range(5, 12):
    for m in range(2):
      machine.handle(second * SECOND_NS, single.received(m, single.progress(second)))
    for _ in range(300):
      steps += 1
      now_ns = second * SECOND_NS + steps % 300 * 3 * 10**6
      out = machine.handle(now_ns, single.received(2, single.progress(steps)))
      assert not said(out) and not any(isinstance(one, actions.Close) for one in out)
  machine.handle(now_ns, events.Disconnected(session=2, reason='closed'))
  steps, now_ns = steps + 300 * away_s, now_ns + away_s * SECOND_NS
  machine.handle(now_ns, single.received(9, single.join(learner='l2', nonce=9, incarnation=1)))
  back = dataclasses.replace(single.confirm(nonce=9), clock=steps, steps=steps, tokens=steps * 10)
  assert told(machine.handle(now_ns, single.received(9, back)), messages.Joined)


def test_a_process_that_the_syncer_does_not_know_has_no_past():
  """found A1, past.py: it is offered another incarnation than it claims, so an honest one begins
  at 0, and a Confirm that claims steps or a shard is refused."""
  machine = three()
  claim = single.join(learner='x', nonce=99, incarnation=1)
  (offer,) = told(machine.handle(5 * SECOND_NS, single.received(7, claim)), messages.Offer)
  assert offer.incarnation == 2
  past = dataclasses.replace(single.confirm(nonce=99), incarnation=2, clock=4, steps=4, tokens=40)
  out = machine.handle(5 * SECOND_NS, single.received(7, past))
  assert isinstance(out[-1], actions.Close) and 'x' not in machine._members.by_id


def test_after_a_restart_one_clock_waits_for_another():
  """A process of the syncer before may have made any number of steps. Its clock counts for one
  period until a second one has come back, or a lease has passed."""
  machine = three()
  again = syncer_machine.SyncerMachine.restore(
    machine._config, '{}', (64,), {**machine.state(), 'undecided': []}
  )
  for m, clock in ((2, 900_000), (0, 30)):
    again.handle(0, single.received(m, single.join(learner=f'l{m}', nonce=7 + m, incarnation=1)))
    claim = dataclasses.replace(single.confirm(nonce=7 + m), clock=clock)
    again.handle(0, single.received(m, claim))
    assert again.clock <= machine.clock + 4
  again.handle(SECOND_NS, events.Wake())
  assert max(one.clock for one in again._members.by_id.values()) <= 16 * 30 + 4


def test_no_clock_skips_a_closing_sync():
  """Behind the last inner step no later sync makes up for it."""
  machine = single.new_machine(learners=2, quorum=1, total_steps=40, fragments=4, period=4)
  for m in range(2):
    machine.handle(0, single.received(m, single.join(learner=f'l{m}', nonce=7 + m)))
    claim = dataclasses.replace(single.confirm(nonce=7 + m, fragments=4), clock=45 * m)
    machine.handle(0, single.received(m, claim))
  for one in machine._members.by_id.values():
    one.since, one.claimed = None, 45  # as after a restart in which both have come back
  machine.handle(1, single.received(1, dataclasses.replace(single.progress(0), clock=45)))
  assert machine._members.by_id['l1'].clock == 45
  assert machine._pace.skip_overdue() and machine._pace.opening.t <= 40


@pytest.mark.parametrize('published, believed', [(12, True), (11, False)])
def test_a_restart_that_opens_closing_syncs_again_strikes_no_learner(published, believed):
  """A later one may be published already: who adopts it is at its step, and not behind it."""
  machine = single.new_machine(total_steps=8, fragments=4, period=4, overlap=2)
  machine.handle(0, single.received(1, single.join()))
  machine.handle(0, single.received(1, single.confirm(fragments=4)))
  machine.handle(1, single.received(1, single.progress(8)))
  machine._published.last_sync = published  # by the process before
  out = machine.handle(2, single.received(1, dataclasses.replace(single.progress(8), clock=12)))
  assert bool(said(out)) != believed
  assert machine.state()['members'][0]['strikes'] == (0 if believed else 1)


def test_a_learner_that_was_not_heard_for_a_while_counts_with_all_its_steps():
  machine = three(lease_ms=19_000)  # its speed is measured once in 3.8 s
  machine.handle(22 * SECOND_NS, single.received(2, single.progress(22)))
  assert machine.state()['members'][2]['clock'] == 22


# --- Books ----------------------------------------------------------------------------------------


def died(machine: Any, deaths: int, first: int = 1) -> None:
  for life in range(first, first + deaths):
    confirm = dataclasses.replace(single.confirm(nonce=100 + life), incarnation=life)
    machine.handle(life, single.received(life, single.join(nonce=100 + life)))
    machine.handle(life, single.received(life, confirm))
    machine.handle(life, single.received(life, single.progress(3)))
    machine.handle(life, events.Disconnected(session=life, reason='killed'))


def test_ten_thousand_deaths_of_a_learner_take_no_more_room_than_ten():  # D10
  machine = single.new_machine()
  died(machine, 10)
  before = len(json.dumps(machine.state()))
  died(machine, 9_990, first=11)
  assert len(json.dumps(machine.state())) <= before + 40  # the numbers are longer
  totals = machine._ledger.totals()
  assert totals['trained'] == 30 * 10_000
  assert totals['discarded'] == {'lost_with_process': 30 * 9_999}
  machine.check()


def test_a_thousand_invented_ids_are_forgotten():  # D10
  machine = single.new_machine(learners=4, quorum=1)
  for n in range(1_000):
    machine.handle(n, single.received(n, single.join(learner=f'x{n}', nonce=n)))
    machine.handle(n, single.received(n, single.confirm(nonce=n)))
    machine.handle(n, events.Disconnected(session=n, reason='gone'))
  assert len(machine.state()['members']) == len(machine.state()['ledger']) == 8
  machine.check()


def contributing(**settings: Any) -> Any:
  """A syncer of which l0 has contributed once."""
  machine = member(**settings)
  out = machine.handle(3, single.received(1, single.contribution(), 5))
  assert [one for one in out if isinstance(one, actions.Merge)]
  machine.handle(4, single.merge_done(2))
  return machine


def test_newcomers_do_not_take_all_places():
  machine = contributing()
  for n in range(2, 30):
    machine.handle(5, single.received(n, single.join(learner=f'x{n}', nonce=n)))
    out = machine.handle(5, single.received(n, single.confirm(nonce=n)))
  assert [one.code for one in told(out, messages.Refused)] == ['FULL']
  machine.handle(5, events.Disconnected(session=1, reason='killed'))
  machine.handle(5, single.received(40, single.join(nonce=99)))
  confirm = dataclasses.replace(single.confirm(nonce=99), incarnation=2)
  assert not told(machine.handle(5, single.received(40, confirm)), messages.Refused)


def test_a_reader_that_contributes_nothing_gives_its_shard_to_a_learner_that_does():  # D11
  machine = contributing(shards=1)
  machine.handle(5, events.Disconnected(session=1, reason='killed'))
  machine.handle(5, single.received(2, single.join(learner='x', nonce=2)))
  assert told(machine.handle(5, single.received(2, single.confirm(nonce=2))), messages.Joined)
  machine.handle(6, single.received(3, single.join()))
  back = single.received(3, single.confirm())
  assert not told(machine.handle(6, back), messages.Joined)
  later = machine._config.lease_ns + 6
  machine._members.by_id['x'].heard_ns = machine._members.by_id['l0'].heard_ns = later
  out = machine.handle(later, events.Wake())
  assert [one.session for one in out if isinstance(one, actions.Close)] == [2]
  assert told(out, messages.Joined)


def test_a_reader_has_a_lease_from_its_shard_on_to_contribute():
  machine = contributing(shards=1)
  machine.handle(5, single.received(2, single.join(learner='x', nonce=2)))
  assert not told(machine.handle(5, single.received(2, single.confirm(nonce=2))), messages.Joined)
  later = 3 * machine._config.lease_ns
  machine._members.by_id['x'].heard_ns = machine._members.by_id['l0'].heard_ns = later
  out = machine.handle(later, events.Disconnected(session=1, reason='link broke'))
  assert told(out, messages.Joined)  # x
  machine.handle(later + 1, single.received(3, single.join()))
  out = machine.handle(later + 1, single.received(3, single.confirm()))
  assert not [one for one in out if isinstance(one, actions.Close)]


# --- Runs -----------------------------------------------------------------------------------------


def test_a_learner_of_another_run_is_told_so_and_changes_nothing():  # F4
  machine = contributing()
  before = machine.state()
  other = dataclasses.replace(single.join(learner='old', nonce=1), run='r9', incarnation=3)
  out = machine.handle(5, single.received(2, other))
  (refused,) = told(out, messages.Refused)
  assert refused.code == 'OTHER_RUN' and refused.retry_ns is None
  assert 'run r9' in refused.text and 'run r0' in refused.text
  assert machine.state() == before


def test_a_learner_remembers_its_run_and_believes_no_syncer_of_another():
  learner = single.new_learner()
  single.connect(learner, 1, 0)
  assert learner.state()['run'] == 'r0'
  learner.handle(1, events.Disconnected(session=1, reason='gone'))
  learner.handle(10**12, events.Wake())
  (join,) = told(learner.handle(10**12, events.Connected(session=2)), messages.Join)
  assert (join.run, join.incarnation) == ('r0', 1)
  out = learner.handle(10**12, single.received(2, messages.Offer(run='r9', incarnation=1)))
  assert [type(one) for one in out] == [actions.Close]


def test_a_run_keeps_its_name():
  machine = contributing()
  again = syncer_machine.SyncerMachine.restore(
    machine._config, world_lib.AGREEMENT, (network.PAYLOAD_BYTES,), machine.state()
  )
  (offer,) = told(again.handle(0, single.received(1, single.join())), messages.Offer)
  assert offer.run == 'r0'


# --- What people are told (F5) --------------------------------------------------------------------


def test_a_syncer_says_within_a_minute_that_nothing_is_merged():
  machine, _ = single.joined(learners=2, quorum=2, start_wait_ms=0)
  lines = []
  for second in range(1, 131):
    machine._members.by_id['l0'].heard_ns = second * SECOND_NS
    lines += said(machine.handle(second * SECOND_NS, events.Wake()))
  assert len(lines) == 2
  assert '1 learners contribute, an outer step needs 2' in lines[0]


@pytest.mark.parametrize(
  ('entered_s', 'why'),
  [
    (50, '1 learners have only just joined'),
    (0, '1 learners contribute'),
    (None, 'no learner trains'),
  ],
)
def test_a_syncer_without_an_outer_step_says_whether_anybody_trains(entered_s, why):
  machine = member(start_wait_ms=0, lease_ms=100_000)
  machine.handle(20 * SECOND_NS, events.Wake())
  if entered_s is None:
    machine.handle(21 * SECOND_NS, events.Disconnected(session=1, reason='closed'))
  else:
    machine._members.by_id['l0'].entered_ns = entered_s * SECOND_NS
  lines = said(machine.handle(80 * SECOND_NS, events.Wake()))
  assert sum(f'no outer step for 60 s: {why}' in line for line in lines) == 1, lines


def test_a_syncer_says_that_only_zeros_are_merged_unless_the_run_has_just_begun():
  machine = member()
  machine.handle(3, single.received(1, single.contribution(), 5))
  done = dataclasses.replace(single.merge_done(2), norms=(0,))
  again = copy.deepcopy(machine)
  assert not any('merged only zeros' in line for line in said(machine.handle(4, done)))
  again._screening.usual[0].commits = machine._config.norm_warmup
  assert any('merged only zeros' in line for line in said(again.handle(4, done)))


def test_a_learner_says_that_it_is_not_connected():
  learner = single.new_learner()
  lines = []
  for session in range(1, 40):
    now_ns = 10 * session * SECOND_NS
    out = learner.handle(now_ns, events.Wake())
    out += learner.handle(now_ns, events.Disconnected(session=session, reason='refused'))
    lines += [one for one in said(out) if 'not connected: refused' in one]
  assert 5 <= len(lines) <= 8  # at once, and once a minute of six and a half


def test_a_learner_says_that_nothing_of_it_is_merged():
  learner = single.new_learner()
  single.connect(learner, 1, 0)
  late = messages.Settled(sync=1, fragment=0, merged=False, reason='late')
  lines = said(learner.handle(SECOND_NS, single.received(1, late)))
  for second in range(2, 70):
    lines += said(learner.handle(second * SECOND_NS, single.received(1, messages.Heartbeat())))
  assert [
    line for line in lines if 'nothing of this learner was merged' in line and 'late: 1' in line
  ]
