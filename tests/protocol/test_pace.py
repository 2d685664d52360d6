"""Which learner sets the pace, and how far ahead a learner may run.

Each test opens with the sentence that it checks and its source.
"""

import pytest

from diloco_jax.proof.sim import engine
from diloco_jax.protocol import actions, facts, messages
from diloco_jax.protocol.syncer import pace
from tests.protocol.recording import Recording
from tests.protocol.single import confirm, join, new_machine, progress, received

MS = engine.MS


@pytest.mark.parametrize('quorum_, step_ms', [(1, 50), (2, 100), (3, 300)])
def test_the_kth_fastest_learner_sets_the_pace(quorum_: int, step_ms: int):
  # Design section 4: "So the K-th fastest learner sets the pace".
  seen = Recording(learners=3, fragments=4, period=4, overlap=1, quorum=quorum_, total_steps=16)
  seen.start('l0', step_ms=50).start('l1', step_ms=100).start('l2', step_ms=300).run(1500)
  opened = seen.opened()
  # Sync t opens when the K-th fastest has made t steps, 30 ms after the start of the first
  # (joining), and not before; the adoption of clocks may carry slow learners along with K.
  for sync, time in list(opened.items())[:4]:
    if quorum_ == 1:
      assert time >= 30 * MS + sync * step_ms * MS
    assert time >= sync * 50 * MS
  first = min(opened.values())
  assert 30 * MS + step_ms * MS <= first <= 60 * MS + step_ms * MS, opened


def test_a_fast_network_cannot_shrink_h():
  # Design section 4: "a fast network cannot shrink H"; paper-facts section 4, the last remark.
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
  # Design section 4: "when the fastest learner dies the next one carries on at once".
  seen = Recording(learners=2, fragments=2, period=2, overlap=1, quorum=1, total_steps=40)
  seen.start('l0', step_ms=50).start('l1', step_ms=100).run(1000)
  before = max(seen.opened())
  seen.world.end(seen.world.learners['l0'])
  seen.run(1700)
  later = [time for sync, time in seen.opened().items() if sync > before]
  assert later[0] <= 1000 * MS + 3 * 100 * MS
  assert len(later) >= 3


def test_at_most_tau_syncs_are_in_flight_and_never_two_of_one_fragment():
  # Paper section 4: "Up to tau syncs are in flight, always of different fragments".
  for overlap in (1, 2, 3):
    seen = Recording(learners=1, fragments=4, period=4, overlap=overlap, quorum=1, total_steps=24)
    seen.start('l0', step_ms=20)
    seen.world.syncer.merge_ns = 30 * MS
    seen.run(3000)
    flying: dict[int, int] = {}
    most = 0
    for _, name, action in seen.entries:
      if isinstance(action, actions.Report) and isinstance(action.fact, facts.Opened):
        assert action.fact.fragment not in flying.values()
        flying[action.fact.sync] = action.fact.fragment
        most = max(most, len(flying))
      elif isinstance(action, actions.Send) and name == 'syncer':
        if isinstance(action.message, messages.Settled):
          flying.pop(action.message.sync, None)
    assert most == overlap


def test_max_lag_bounds_how_far_a_learner_runs_ahead():
  # Design section 4: "max_lag lets a learner run at most so many steps ahead of the sync it
  # waits for".
  for max_lag in (0, 1, 2):
    seen = Recording(
      learners=2, fragments=1, period=4, overlap=1, quorum=2, max_lag=max_lag, total_steps=12
    )
    seen.start('l0', step_ms=20).start('l1', step_ms=200).run(700)
    steps = [action.clock for _, name, action in seen.of(actions.Step) if name == 'l0']
    assert max(steps) + 1 == 4 + max_lag, steps  # Step(clock=s) runs inner step s + 1


def test_a_syncs_step_is_adopted_as_the_clock():
  # Design section 4: "adopting what sync t published sets it to max(clock, t)".
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
      assert pace.kth_step(steps, k) == naive


def test_an_event_costs_the_same_with_many_learners():
  # Design section 1: the same machines at millions of chips: O(1) but for syncs and sweeps.
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
  for n in range(299):
    machine.handle(1, received(n, progress(1)))
  assert not walked
  machine.check()
