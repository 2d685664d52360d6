"""Which learner sets the pace, and how far ahead a learner may run.

Each test opens with the sentence that it checks and its source.
"""

import dataclasses

import pytest

from diloco_jax.protocol import actions, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import grace
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.verification.sim import engine as engine_lib
from tests.protocol.recording import Recording
from tests.protocol.single import (
  confirm,
  contribution,
  join,
  merge_done,
  new_machine,
  progress,
  received,
  whole,
)
from tests.protocol.talk import Talk

MS = engine_lib.MS


def test_a_fast_network_cannot_shrink_h():
  seen = Recording(learners=1, fragments=4, period=4, overlap=2, quorum=1, total_steps=40)
  seen.start('l0')
  link, island = seen.world.link('l0'), seen.world.island('l0')
  link.up_ns = link.down_ns = link.bulk_up_ns = link.bulk_down_ns = 0
  island.encode_ns = island.adopt_ns = 0
  seen.world.syncer.merge_ns = 0
  seen.run(3000)
  between = [
    adopted.steps_between for _, adopted in seen.facts(facts.Adopted) if adopted.version > 1
  ]
  assert len(between) >= 20 and set(between) == {4}, between


def test_when_the_fastest_learner_dies_the_next_one_takes_over_at_once():
  seen = Recording(learners=2, fragments=2, period=2, overlap=1, quorum=1, total_steps=40)
  seen.start('l0', step_ms=50).start('l1', step_ms=100).run(1000)
  before = max(seen.opened())
  seen.world.end(seen.world.learners['l0'])
  seen.run(1700)
  later = [time for sync, time in seen.opened().items() if sync > before]
  assert later[0] <= 1000 * MS + 3 * 100 * MS
  assert len(later) >= 3


def test_kth_step_agrees_with_a_naive_count():
  for steps in ([], [3], [1, 5], [4, 4, 2], [9, 1, 7, 7]):
    for k in range(1, 6):
      naive = max((s for s in range(11) if sum(x >= s for x in steps) >= k), default=0)
      assert pace_lib.kth_step(steps, k) == naive


def _pace(*live: members_lib.Member) -> pace_lib.Pace:
  """That of a syncer with these members."""
  config = config_lib.ProtocolConfig(learners=len(live), period=4, fragments=4, total_steps=5_000)
  books = books_lib.Books(config)
  books.members.by_id = {member.learner: member for member in live}
  books.members.by_session = dict(enumerate(live))
  return pace_lib.Pace(books)


def _reports(name: str, step_ns: int, report_ns: int) -> members_lib.Member:
  return members_lib.Member(
    name, step_ns=grace.Average(step_ns, 1), report_ns=grace.Average(report_ns, 1)
  )


@pytest.mark.parametrize('said, believed', [(100, 100), (1, 25), (10_000, 400)])
def test_a_step_time_is_as_reported_within_what_the_reports_show(said: int, believed: int):
  assert _reports('l0', said, 100).inner_step_ns == believed


def test_the_usual_step_is_that_of_the_median_learner():
  steps = {number: _reports(f'l{number}', number, number) for number in (10, 20, 30)}
  of = members_lib.Members(config_lib.ProtocolConfig(learners=3))
  of.by_session = steps
  assert pace_lib.step_ns(of) == 20


def test_a_clock_that_jumps_counts_at_16_times_the_usual_speed():
  """Also without a further report."""
  fast = _reports('l0', 100, 100)
  fast.session, fast.since, fast.claimed = 1, (0, 0), 1_000
  of = _pace(fast)
  of.measure(100)
  assert fast.clock == 16
  of.measure(200)
  assert fast.clock == 32


def test_the_usual_speed_outlives_the_loss_of_all_learners():
  """Else the first clock that comes back counts for a period only, however long it was away."""
  fast = _reports('l0', 100, 100)
  of = _pace(fast)
  of.measure(100)
  of._members.by_session.clear()
  of.measure(200)
  assert of.usual_ns == 100


def test_after_a_restart_a_clock_counts_as_far_as_another_returned_one_allows():
  back = [members_lib.Member(f'l{n}', claimed=claimed) for n, claimed in enumerate((40, 4_000))]
  of = _pace(*back)
  of._members.began_ns = 0
  of.measure(1)
  assert [member.clock for member in back] == [40, pace_lib.SPEED * 40 + 4]
  del of._members.by_session[0]
  for now_ns, clock in ((1, 4), (2 * of._config.lease_ns, pace_lib.SPEED * 4_000 + 4)):
    back[1].clock = 0
    of.measure(now_ns)
    assert back[1].clock == min(clock, 4_000), 'alone it counts for a period, until a lease is over'


def test_an_event_costs_the_same_with_many_learners():
  """The cost of an event is O(1) but for syncs and sweeps: it serves millions of chips."""
  machine = new_machine(learners=300, quorum=300)
  for n in range(300):
    machine.handle(0, received(n, join(learner=f'l{n}', nonce=n)))
    machine.handle(0, received(n, confirm(nonce=n)))
  walked = []
  members = machine._members

  class Counting(dict):
    def values(self):
      walked.append(1)
      return super().values()

  members.by_session = Counting(members.by_session)
  *before, last = ((n, clock) for clock in (1, 2) for n in range(300))
  for n, clock in before:
    machine.handle(clock, received(n, progress(clock)))
  assert not walked
  machine.handle(last[1], received(last[0], progress(last[1])))  # a sync opens
  assert walked


# --- Announced and closing syncs ------------------------------------------------------------------


@pytest.mark.parametrize('overlap, ahead', [(1, 1), (2, 1), (2, 0), (3, 2)])
def test_a_sync_is_announced_tau_and_ahead_steps_before_it_opens(overlap: int, ahead: int):
  settings = {'fragments': 2, 'period': 8, 'quorum': 2, 'total_steps': 40}
  talk = Talk('l0', 'l1', overlap=overlap, ahead=ahead, **settings)
  announced: dict[int, int] = {}  # sync: the step of the second learner
  opened: dict[int, int] = {}
  for step in range(1, 9):
    talk.now_ns = step
    talk.steps('l0', to=step)
    talk.steps('l1', to=step)
    for pull in talk.sent(messages.Pull):
      if not pull.now:
        announced.setdefault(pull.sync, step)
    for report in talk.of(actions.Report):
      opened[report.fact.sync] = step
  assert announced[8] == 8 - overlap - ahead
  assert opened[4] == 4, 'and no sync opens before K learners have reached it'


def test_a_learner_that_has_answered_is_not_asked_again_at_the_opening():
  talk = Talk('l0', 'l1', quorum=2, period=4, overlap=1, total_steps=40)
  talk.steps('l0', 'l1', to=3)
  talk.hears('l0', contribution(sync=4, tokens_to=20), 1)
  talk.steps('l0', 'l1', to=4)
  assert talk.sent(messages.Pull, 'l1') and not talk.sent(messages.Pull, 'l0')
  assert talk.machine._syncs.open.keys() == {4}


def test_closing_syncs_wait_one_lease_for_a_learner_that_never_finishes():
  seen = Recording(learners=2, fragments=1, period=4, overlap=2, quorum=1, total_steps=8)
  seen.start('l0', step_ms=50).start('l1', step_ms=50).run(200)
  seen.world.island('l1').step_ns = 100_000 * MS  # it lives and makes no step
  seen.run(20_000)
  lease_ms = seen.world.config.lease_ns // MS
  (finished, *_) = [time for time, state in seen.facts(facts.State) if state.state == 'trained']
  (opened,) = [time for sync, time in seen.opened().items() if sync > 8]
  assert lease_ms * MS <= opened - finished <= (lease_ms + 100) * MS
  (closing,) = [fact for _, fact in seen.facts(facts.Merging) if fact.sync > 8]
  assert closing.participants == ('l0',) and closing.waited_ns == lease_ms * MS
  assert seen.sent(messages.Finish)


# --- A learner whose update was refused -----------------------------------------------------------


def merging_both(**settings) -> Talk:
  """Sync 2, with a payload of l0 and of l1, is merging."""
  talk = Talk('l0', 'l1', quorum=2, total_steps=40, **settings)
  talk.steps('l0', 'l1', to=2)
  talk.hears('l0', contribution(), 1)
  talk.hears('l1', contribution(shard=1), 2)
  talk.loses('l1')
  return talk


def test_a_learner_that_was_away_when_its_update_was_refused_keeps_nothing_of_it():
  """Also after a restart of the syncer: its value holds what the merge refused."""
  talk = merging_both()
  talk.turn(dataclasses.replace(merge_done(2), norms=(5, 7), refused=('l1',)))
  for syncer in (talk, talk.restarted()):
    syncer.joins(
      'l1',
      join={'run': 'r0', 'incarnation': 1},
      clock=3,
      steps=3,
      tokens=30,
      held=(messages.Held(version=1, digest=78),),  # even if it claims the newest version
      shard=1,
      cursor=3,
    )
    (joined,) = syncer.sent(messages.Joined)
    assert (joined.due, joined.settled) == ((0,), (20,))
    syncer.turn(whole(1))
    (publish,) = syncer.sent(messages.Publish)
    assert (publish.base_version, publish.keep) == (None, False)
    undone = messages.Adopted(fragment=0, version=1, tokens=30, matched=True, reason='undone')
    syncer.hears('l1', undone)
    member = syncer.machine._members.by_id['l1']
    assert not any(copy.spoiled for copy in member.copies)
    assert syncer.machine._ledger.of(member).discarded == {'bad_value': 20, 'undone': 10}


def test_a_process_keeps_its_steps_when_an_outer_step_with_the_process_before_it_is_refused():
  """It has trained nothing that the outer step refused: only the other participant starts anew."""
  talk = merging_both(shards=3)
  talk.joins('l1', process=2)
  assert [joined.due for joined in talk.sent(messages.Joined)] == [()]
  refused = dataclasses.replace(merge_done(2), payload_id=None, payload=None, failed='not finite')
  talk.turn(refused)
  talk.turn(whole(0))
  assert [publish.keep for publish in talk.sent(messages.Publish, 'l0')] == [False]
  assert not talk.sent(messages.Publish, 'l1')
  assert talk.machine._ledger.totals()['discarded'] == {'bad_value': 40}
