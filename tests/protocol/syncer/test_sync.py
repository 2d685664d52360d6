"""A sync: its payloads, the grace window, merging and publishing.

Each test opens with the sentence that it checks and its source.
"""

import dataclasses

import pytest

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import tempo as tempo_lib
from diloco_jax.protocol.syncer import grace
from diloco_jax.protocol.syncer import sync as sync_lib
from diloco_jax.verification.sim import engine as engine_lib
from tests.protocol import transcript
from tests.protocol.recording import Recording, discarded
from tests.protocol.single import (
  adopted,
  advance,
  confirm,
  contents,
  contribution,
  join,
  joined,
  merge_done,
  progress,
  received,
  two_learners,
  two_learners_of,
)

MS = engine_lib.MS


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
  answer_ns = 4 * 100
  assert window.window_ns(far, 100) == answer_ns + 2 * 100 * 750 // 1000, (
    'no slack is needed for it'
  )


@pytest.mark.parametrize('away', [False, True])
def test_a_time_without_learners_is_none_of_a_sync(away):
  """The version is adopted after it; a sample of that length would leave no slack for long."""
  machine, session = joined()
  advance(machine, session, 2)
  machine.handle(3, received(session, contribution(), payload_id=9))
  machine.handle(4, merge_done(2))
  if away:
    machine.handle(5, events.Disconnected(session=session, reason='cut'))
    session = 2
    machine.handle(1000 * MS, received(session, join()))
    again = dataclasses.replace(confirm(), clock=2, steps=2, tokens=20)
    machine.handle(1000 * MS, received(session, again))
    read = events.FragmentRead(
      fragment=0, version=1, digest=78, payload_id=51, payload=merge_done(2).payload
    )
    machine.handle(1000 * MS, read)
  done = messages.Adopted(fragment=0, version=1, tokens=20, matched=True)
  machine.handle(1000 * MS, received(session, done))
  machine.check()
  assert machine._syncs.grace.sync_ns.samples == (not away)


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


def test_the_grace_window_ends_in_time():
  # Paper section 4: 0 <= xi_grace <= gamma * xi_slack; here from the opening, and not before K
  # payloads.
  seen = Recording(learners=2, fragments=1, period=4, overlap=3, quorum=1, total_steps=24)
  seen.start('l0').start('l1', step_ms=100)
  seen.world.learners['l1'].island.encode_ns = 2000 * MS
  seen.run(2200)
  graces = [fact.grace_ns for _, fact in seen.facts(facts.Merging)]
  assert graces[0] == 0 and graces[1] > 0, graces
  opened = seen.opened()
  answers = {message.sync: time for time, message in seen.sent(messages.Contribution, 'l0')}
  for time, merging in seen.facts(facts.Merging):
    assert merging.waited_ns == time - opened[merging.sync]
    answered = answers[merging.sync] + 10 * MS - opened[merging.sync]
    assert merging.waited_ns <= max(merging.grace_ns, answered)


@pytest.mark.parametrize('adopt', ['overwrite', 'rebase'])
def test_a_payload_after_the_merge_is_late(adopt: str):
  # Paper section 2: a learner that is not in the quorum has weight 0. With rebase its payload
  # counts for the next sync of the fragment.
  seen = Recording(
    learners=2,
    fragments=1,
    period=4,
    overlap=1,
    quorum=1,
    total_steps=8,
    adopt=config_lib.ADOPT.index(adopt),
  )
  seen.start('l0', 'l1')
  island = seen.world.learners['l1'].island
  usual_ns, island.encode_ns = island.encode_ns, 160 * MS
  seen.run(400)
  island.encode_ns = usual_ns
  seen.run(20_000)
  verdicts = {m.sync: m for _, m in seen.sent(messages.Settled) if m.sync == 4 and not m.merged}
  if adopt == 'overwrite':
    assert verdicts[4].reason == 'late' and discarded(seen)['late'] == 30
    return
  assert not verdicts and discarded(seen) == {}
  made = {fact.sync: fact for _, fact in seen.facts(facts.Synced)}
  assert made[4].participants == ('l0',)
  assert (made[8].participants, made[8].late) == (('l0', 'l1'), ('l1',))
  given = [m for _, m in seen.sent(messages.Contribution, 'l1')]
  assert (given[0].sync, given[0].tokens_from) == (4, 0)
  assert given[1].tokens_from == given[0].tokens_to, 'none of them again'


def test_a_payload_during_the_merge_of_the_late_one_before_counts_for_the_next_sync():
  """The learner gave up waiting (max_misses) while the syncer merged its late payload."""
  machine = two_learners_of(quorum=1, max_staleness=3)
  other = contribution(sync=2, shard=1)
  merges = [machine.handle(3, received(2, other, payload_id=1))]
  machine.handle(4, received(1, contribution(sync=2), payload_id=2))  # late
  machine.handle(5, merge_done(2))
  merges += [machine.handle(6, received(1, progress(4)))]
  second = contribution(sync=4, tokens_from=20, tokens_to=40)
  measure = actions.Measure(fragment=0, payload_id=3)
  assert machine.handle(7, received(1, second, payload_id=3)) == [measure]
  assert machine.handle(7, received(1, contribution(sync=2), payload_id=4)) == [
    actions.Drop(payload_id=4)
  ]
  machine.handle(8, merge_done(4))
  merges += [machine.handle(9, received(1, progress(6)))]
  made = [action for out in merges for action in out if isinstance(action, actions.Merge)]
  assert [[participant.payload_id for participant in merge.participants] for merge in made] == [
    [1],
    [2],
    [3],
  ]
  machine.check()


def test_a_payload_that_is_due_replaces_a_late_one_that_waits_in_its_sync():
  """The learner was asked for it before its late payload came (seen in a run of processes)."""
  machine = two_learners_of(quorum=1, max_staleness=3)
  machine.handle(3, received(2, contribution(sync=2, shard=1), payload_id=1))
  machine.handle(4, merge_done(2))
  measure = actions.Measure(fragment=0, payload_id=2)
  assert machine.handle(5, received(1, contribution(sync=2), payload_id=2)) == [measure]  # late
  machine.handle(6, received(1, progress(3)))
  newer = contribution(sync=4, tokens_from=0, tokens_to=30)
  assert machine.handle(7, received(1, newer, payload_id=3)) == [
    actions.Drop(payload_id=2),
    actions.Measure(fragment=0, payload_id=3),
  ]
  made = machine.handle(8, received(1, progress(4)))
  (merge,) = [action for action in made if isinstance(action, actions.Merge)]
  assert [participant.payload_id for participant in merge.participants] == [3]
  answers = machine.handle(9, merge_done(4))
  settled = [
    a.message for a in answers if isinstance(getattr(a, 'message', None), messages.Settled)
  ]
  assert [(one.sync, one.merged) for one in settled] == [(4, True)]
  machine.check()


def test_only_trained_fragments_are_contributed_and_counts_start_at_the_adoption():
  # Paper section 2: c_steps, c_tokens = "steps and tokens since it last received fragment p".
  seen = Recording(learners=1, fragments=2, period=4, overlap=1, quorum=1, total_steps=20)
  seen.start('l0').run(20_000)
  adopted: dict[int, int] = {}
  for _, _name, action in seen.entries:
    if isinstance(action, actions.Send) and isinstance(action.message, messages.Adopted):
      adopted[action.message.fragment] = action.message.tokens
    if isinstance(action, actions.Send) and isinstance(action.message, messages.Contribution):
      message = action.message
      assert message.tokens_from == adopted.get(message.fragment, 0)
      assert message.tokens_to - message.tokens_from == 10 * message.steps
      assert message.steps >= 1


@pytest.mark.parametrize('staleness, reason', [(0, 'stale'), (1, '')])
def test_an_older_anchor_counts_up_to_max_staleness(staleness: int, reason: str):
  """A payload counts with its own displacement if its anchor is no older."""
  machine, session = joined(max_staleness=staleness, learners=2, quorum=1)
  advance(machine, session, step=2)
  machine.handle(2, received(session, contribution(sync=2), payload_id=1))
  machine.handle(3, merge_done(2))
  advance(machine, session, step=4)
  old = contribution(sync=4, tokens_from=20, tokens_to=40)
  out = machine.handle(5, received(session, old, payload_id=2))
  settled = [m.reason for m in contents(out, messages.Settled)]
  assert settled[:1] == ([reason] if reason else [])
  assert any(isinstance(a, actions.Merge) for a in out) == (not reason)
  # The newer version is on its way: a whole fragment would only come later.
  assert not any(isinstance(a, actions.ReadFragment) for a in out)
  machine.check()


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
  machine = two_learners(quorum=1)
  machine.handle(3, received(1, contribution(), payload_id=1))
  machine.handle(3, received(2, contribution(shard=1), payload_id=2))
  machine.handle(3, received(2, adopted()))  # it does not match: the whole fragment is in flight
  out = machine.handle(4, merge_done(2))
  to = [a.session for a in out if isinstance(getattr(a, 'message', None), messages.Publish)]
  assert to == [1]
  out = machine.handle(
    5,
    events.FragmentRead(
      fragment=0,
      version=1,
      payload_id=8,
      digest=78,
      payload=messages.Payload(size_bytes=4, crc32=0),
    ),
  )
  (whole,) = [a for a in out if isinstance(getattr(a, 'message', None), messages.Publish)]
  assert (whole.session, whole.message.base_version) == (2, None)
