"""A sync: its payloads, the grace window, merging and publishing.

Each test opens with the sentence that it checks and its source.
"""

import pytest

from diloco_jax.protocol import actions, messages
from diloco_jax.protocol import tempo as tempo_lib
from diloco_jax.protocol.syncer import grace
from diloco_jax.protocol.syncer import sync as sync_lib
from diloco_jax.verification.sim import engine as engine_lib
from tests.protocol import transcript
from tests.protocol.single import adopted, contribution, merge_done, whole
from tests.protocol.talk import Talk

MS = engine_lib.MS


def two_learners(**settings) -> Talk:
  """With K = 1; sync 2 is open."""
  talk = Talk('l0', 'l1', **settings)
  talk.steps('l0', 'l1', to=2)
  return talk


def test_grace_formula():
  # Paper section 4: xi_slack = tau * xi_step - (xi_quorum + xi_sync),
  # 0 <= xi_grace <= gamma * xi_slack; counted from the opening, so that xi_quorum is its own.
  config = transcript.make_config(
    learners=2, fragments=4, period=4, overlap=2, quorum=1, total_steps=8, grace_permille=750
  )
  window, settings = grace.Grace(), tempo_lib.Tempo(config)
  assert window.window_ns(settings, 100) == 0, 'nothing is known yet'
  window.sync_ns.add(50)
  assert window.window_ns(settings, 100) == (2 * 100 - 50) * 750 // 1000
  assert window.window_ns(settings, 25) == 0, 'no slack: merge at once'
  longer = tempo_lib.Tempo(config, factor=3)
  assert window.window_ns(longer, 100) == (3 * 2 * 100 - 50) * 750 // 1000
  window.sync_ns.add(450)  # now it takes 100
  far = tempo_lib.Tempo(config, delay=4)
  answer_ns = 4 * 100  # it needs no slack
  assert window.window_ns(far, 100) == answer_ns + 2 * 100 * 750 // 1000


@pytest.mark.parametrize('away', [False, True])
def test_a_time_without_learners_is_none_of_a_sync(away):
  """The version is adopted after it; a sample of that length would leave no slack for long."""
  talk = Talk('l0')
  talk.steps('l0', to=2)
  talk.hears('l0', contribution(), 9)
  talk.turn(merge_done(2))
  if away:
    talk.loses('l0')
  talk.now_ns = 1000 * MS
  if away:
    talk.joins('l0', clock=2, steps=2, tokens=20)
    talk.turn(whole(1))
  talk.adopts('l0', version=1, tokens=20)
  assert talk.machine._syncs.grace.sync_ns.samples == (not away)


def test_averages_are_exponential_moving_averages():
  # Paper section 4: "All three xi are exponential moving averages".
  average = grace.Average()
  average.add(800)
  assert average.value == 800
  average.add(0)
  assert average.value == 700
  for _ in range(100):
    average.add(1600)
  assert 1590 <= average.value <= 1600


def test_a_payload_during_the_merge_of_the_late_one_before_counts_for_the_next_sync():
  """The learner gave up waiting (max_misses) while the syncer merged its late payload."""
  talk, merges = two_learners(max_staleness=3), []
  talk.hears('l1', contribution(sync=2, shard=1), 1)
  merges += talk.merges
  talk.hears('l0', contribution(sync=2), 2)  # late
  talk.turn(merge_done(2))
  talk.steps('l0', to=4)
  merges += talk.merges
  second = contribution(sync=4, tokens_from=20, tokens_to=40)
  assert talk.hears('l0', second, 3) == [actions.Measure(fragment=0, payload_id=3)]
  assert talk.hears('l0', contribution(sync=2), 4) == [actions.Drop(payload_id=4)]
  talk.turn(merge_done(4))
  talk.steps('l0', to=6)
  merges += talk.merges
  assert [[row.payload_id for row in merge.participants] for merge in merges] == [[1], [2], [3]]


def test_a_payload_that_is_due_replaces_a_late_one_that_waits_in_its_sync():
  """The learner was asked for it before its late payload came (seen in a run of processes)."""
  talk = two_learners(max_staleness=3)
  talk.hears('l1', contribution(sync=2, shard=1), 1)
  talk.turn(merge_done(2))
  measure = actions.Measure(fragment=0, payload_id=2)
  assert talk.hears('l0', contribution(sync=2), 2) == [measure]  # late
  talk.steps('l0', to=3)
  assert talk.hears('l0', contribution(sync=4, tokens_to=30), 3) == [
    actions.Drop(payload_id=2),
    actions.Measure(fragment=0, payload_id=3),
  ]
  talk.steps('l0', to=4)
  (merge,) = talk.merges
  assert [participant.payload_id for participant in merge.participants] == [3]
  talk.turn(merge_done(4))
  verdicts = [(settled.sync, settled.merged) for settled in talk.sent(messages.Settled)]
  assert verdicts == [(4, True)]


@pytest.mark.parametrize('staleness, reason', [(0, 'stale'), (1, '')])
def test_an_older_anchor_counts_up_to_max_staleness(staleness: int, reason: str):
  """A payload counts with its own displacement if its anchor is no older."""
  talk = Talk('l0', max_staleness=staleness, learners=2, start_wait_ms=0)
  talk.wakes()
  talk.steps('l0', to=2)
  talk.hears('l0', contribution(sync=2), 1)
  talk.turn(merge_done(2))
  talk.steps('l0', to=4)
  talk.hears('l0', contribution(sync=4, tokens_from=20, tokens_to=40), 2)
  reasons = [settled.reason for settled in talk.sent(messages.Settled)]
  assert reasons[:1] == ([reason] if reason else [])
  assert bool(talk.merges) == (not reason)
  # The newer version is on its way: a whole fragment would only come later.
  assert not talk.of(actions.ReadFragment)


@pytest.mark.parametrize(
  'payloads, waiting, live, needed, verdict',
  [
    (0, 2, 2, 2, 'wait'),  # no learner has answered
    (1, 1, 2, 2, 'wait'),  # there is no quorum yet
    (2, 0, 2, 2, 'merge'),  # all have answered
    (1, 0, 2, 2, 'cancel'),  # all have answered, one without a payload
    (1, 0, 1, 2, 'wait'),  # with K = M a learner may rejoin
    (1, 0, 1, 0, 'merge'),  # but after the last step the sync merges what there is
    (0, 0, 1, 0, 'cancel'),
    (1, 1, 2, 0, 'wait'),  # of all that can still answer
    (0, 1, 1, 0, 'wait'),
  ],
)
def test_quorum_decisions(payloads: int, waiting: int, live: int, needed: int, verdict: str):
  sync = sync_lib.Sync(t=4, fragment=0, opened_ns=0, grace_ns=9)
  sync.payloads = {f'l{n}': None for n in range(payloads)}
  sync.waiting = {f'w{n}' for n in range(waiting)}
  assert sync_lib.decide(sync, 5, needed, live)[0] == verdict


def test_grace_decisions():
  sync = sync_lib.Sync(t=4, fragment=0, opened_ns=0, waiting={'l1'}, payloads={'l0': None})
  sync.state, sync.opened_ns, sync.grace_ns = 'open', 100, 50
  assert sync.deadline_ns(2) is None and sync.deadline_ns(1) == 150
  assert sync_lib.decide(sync, 149, 1, 2)[0] == 'wait'
  assert sync_lib.decide(sync, 150, 1, 2)[0] == 'merge'
  sync.state = 'merging'
  assert sync_lib.decide(sync, 999, 1, 2) == ('wait', 'merging')


def test_a_delta_is_sent_only_to_holders_of_the_version_before():
  """A learner of another version gets the whole fragment."""
  talk = two_learners()
  talk.hears('l0', contribution(), 1)
  talk.hears('l1', contribution(shard=1), 2)
  talk.hears('l1', adopted())  # it does not match: the whole fragment is in flight
  talk.turn(merge_done(2))
  assert talk.sent(messages.Publish, 'l0') and not talk.sent(messages.Publish, 'l1')
  talk.turn(whole(1))
  (publish,) = talk.sent(messages.Publish)
  assert talk.sent(messages.Publish, 'l1') == [publish] and publish.base_version is None
