"""Which learner sets the pace, and how far ahead a learner may run.

Each test opens with the sentence that it checks and its source.
"""

import dataclasses

import pytest

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import grace
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import world as world_lib
from tests.protocol.recording import Recording, discarded
from tests.protocol.single import (
  confirm,
  contents,
  contribution,
  join,
  merge_done,
  new_machine,
  progress,
  received,
  two_learners_of,
)

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


def test_a_syncs_step_is_adopted_as_the_clock():
  """A learner that adopts what sync t published sets its clock to max(clock, t)."""
  seen = Recording(learners=2, fragments=4, period=4, overlap=1, quorum=1, total_steps=40)
  seen.start('l0', step_ms=50).start('l1', step_ms=500).run(2500)
  fast = [report for _, report in seen.sent(messages.Progress, 'l0')][-1]
  slow = [report for _, report in seen.sent(messages.Progress, 'l1')][-1]
  assert slow.steps <= 5 and slow.clock > 4 * slow.steps
  assert slow.clock <= fast.clock


def test_kth_step_agrees_with_a_naive_count():
  for steps in ([], [3], [1, 5], [4, 4, 2], [9, 1, 7, 7]):
    for k in range(1, 6):
      naive = max((s for s in range(11) if sum(x >= s for x in steps) >= k), default=0)
      assert pace_lib.kth_step(steps, k) == naive


def _pace(*live: members_lib.Member) -> pace_lib.Pace:
  """That of a syncer with these members."""
  config = config_lib.ProtocolConfig(learners=len(live), period=4, fragments=4, total_steps=5_000)
  books = books_lib.begin(config)
  books.members.by_id = {one.learner: one for one in live}
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
  assert [one.clock for one in back] == [40, pace_lib.SPEED * 40 + 4]
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
  machine = new_machine(
    learners=2, fragments=2, period=8, overlap=overlap, ahead=ahead, quorum=2, total_steps=40
  )
  for session, name in enumerate(('l0', 'l1')):
    machine.handle(0, received(session, join(learner=name, nonce=session)))
    machine.handle(0, received(session, confirm(nonce=session, fragments=2)))
  told: dict[int, int] = {}  # sync: the step of the second learner
  opened: dict[int, int] = {}
  for step in range(1, 9):
    machine.handle(step, received(0, progress(step)))
    out = machine.handle(step, received(1, progress(step)))
    for pull in contents(out, messages.Pull):
      if not pull.now:
        told.setdefault(pull.sync, step)
    for fact in [one.fact for one in out if isinstance(one, actions.Report)]:
      opened[fact.sync] = step
    machine.check()
  assert told[8] == 8 - overlap - ahead
  assert opened[4] == 4, 'and no sync opens before K learners have reached it'


def test_a_learner_that_has_answered_is_not_asked_again_at_the_opening():
  machine = two_learners_of(quorum=2, period=4, overlap=1, total_steps=40)
  for session in (1, 2):
    machine.handle(3, received(session, progress(3)))
  early = contribution(sync=4, tokens_to=20)
  machine.handle(4, received(1, early, payload_id=1))
  for session in (1, 2):
    out = machine.handle(5, received(session, progress(4)))
  asked = [one.session for one in out if isinstance(getattr(one, 'message', None), messages.Pull)]
  assert asked == [2], out
  assert machine._syncs.open.keys() == {4}


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


def test_a_closing_sync_merges_fewer_than_k_payloads():
  """Otherwise what the last learner trained would find no sync."""
  seen = Recording(learners=2, fragments=1, period=4, overlap=1, quorum=2, total_steps=8)
  seen.start('l0', 'l1')
  seen.world.link('l0').up_ns = 60 * MS
  seen.run(20_000)
  closing = [fact for _, fact in seen.facts(facts.Merging) if fact.sync > 8]
  assert closing and discarded(seen) == {}
  assert all(len(fact.participants) == 2 for _, fact in seen.facts(facts.Merging) if fact.sync <= 8)


# --- A learner whose update was refused -----------------------------------------------------------


def test_a_learner_that_was_away_when_its_update_was_refused_keeps_nothing_of_it():
  """Also after a restart of the syncer: its value holds what the merge refused."""
  machine = two_learners_of(quorum=2, total_steps=40)
  machine.handle(3, received(1, contribution(), payload_id=1))
  machine.handle(3, received(2, contribution(shard=1), payload_id=2))
  machine.handle(4, events.Disconnected(session=2, reason='cut'))
  done = dataclasses.replace(merge_done(2), norms=(5, 7), refused=('l1',))
  machine.handle(5, done)
  restarted = syncer_machine.SyncerMachine.restore(
    machine._config, world_lib.AGREEMENT, (network_lib.PAYLOAD_BYTES,), machine.state()
  )
  for syncer in (machine, restarted):
    again = dataclasses.replace(join(learner='l1', nonce=8), run='r0', incarnation=1)
    syncer.handle(6, received(3, again))
    held = (messages.Held(version=1, digest=78),)  # even if it claims the newest version
    claim = dataclasses.replace(confirm(nonce=8), clock=3, steps=3, tokens=30, held=held)
    out = syncer.handle(6, received(3, dataclasses.replace(claim, shard=1, cursor=3)))
    (told,) = contents(out, messages.Joined)
    assert (told.due, told.settled) == ((0,), (20,))
    whole = events.FragmentRead(
      fragment=0, version=1, payload_id=8, digest=78, payload=contribution().payload
    )
    (sent,) = contents(syncer.handle(7, whole), messages.Publish)
    assert (sent.base_version, sent.keep) == (None, False)
    adopted = messages.Adopted(fragment=0, version=1, tokens=30, matched=True, reason='undone')
    syncer.handle(8, received(3, adopted))
    assert not any(copy.spoiled for copy in syncer._members.by_id['l1'].copies)
    assert syncer._ledger.of(syncer._members.by_id['l1']).discarded == {
      'bad_value': 20,
      'undone': 10,
    }
    syncer.check()


def test_a_process_keeps_its_steps_when_an_outer_step_with_the_process_before_it_is_refused():
  """It has trained nothing that the outer step refused: only the other participant starts anew."""
  machine = two_learners_of(quorum=2, total_steps=40, shards=3)
  machine.handle(3, received(1, contribution(), payload_id=1))
  machine.handle(3, received(2, contribution(shard=1), payload_id=2))
  machine.handle(4, events.Disconnected(session=2, reason='killed'))
  machine.handle(5, received(3, join(learner='l1', nonce=9)))
  again = dataclasses.replace(confirm(nonce=9), incarnation=2)
  (told,) = contents(machine.handle(5, received(3, again)), messages.Joined)
  assert told.due == ()
  refused = dataclasses.replace(merge_done(2), payload_id=None, payload=None, failed='not finite')
  machine.handle(6, refused)
  whole = events.FragmentRead(
    fragment=0, version=0, payload_id=8, digest=77, payload=contribution().payload
  )
  sent = [a for a in machine.handle(7, whole) if isinstance(a, actions.Send)]
  fresh = [(one.session, one.message.keep) for one in sent if type(one.message) is messages.Publish]
  assert fresh == [(1, False)]
  assert machine._ledger.totals()['discarded'] == {'bad_value': 40}
  machine.check()
