"""Sentences of the paper and of the design, one test each; sentence and source stand first."""

import dataclasses
from typing import Any

import pytest

from diloco_jax.protocol import (
  actions, events, grace, learner, ledger, messages, quorum, schedule, syncer,
)
from tests.protocol import world as world_lib

MS = world_lib.MS


class Tape:
  """Everything that happened in a world: (time, process name, action)."""

  def __init__(self, **settings: Any):
    self.entries: list[tuple[int, str, Any]] = []
    self.world = world_lib.World(world_lib.protocol_config(**settings), self._watch)

  def _watch(self, name: str, action: Any) -> None:
    self.entries.append((self.world.now, name, action))

  def start(self, *names: str, step_ms: int = 100, **how: Any) -> 'Tape':
    for name in names:
      self.world.start(name, **how).step_ns = step_ms * MS
    return self

  def run(self, until_ms: int) -> 'Tape':
    self.world.run(until_ms * MS)
    return self

  def of(self, kind: type) -> list[tuple[int, str, Any]]:
    return [entry for entry in self.entries if isinstance(entry[2], kind)]

  def sent(self, kind: type, sender: str | None = None) -> list[tuple[int, Any]]:
    return [
      (time, action.message) for time, name, action in self.of(actions.Send)
      if isinstance(action.message, kind) and sender in (None, name)
    ]

  def opened(self) -> dict[int, int]:
    """Sync: when it was opened (first Pull)."""
    times: dict[int, int] = {}
    for time, pull in self.sent(messages.Pull):
      times.setdefault(pull.sync, time)
    return times


def discarded(tape: Tape) -> dict[str, int]:
  return tape.world.ledger()['discarded']


# --- Pace -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('quorum_, step_ms', [(1, 50), (2, 100), (3, 300)])
def test_the_kth_fastest_learner_sets_the_pace(quorum_: int, step_ms: int):
  # Design section 4: "So the K-th fastest learner sets the pace".
  tape = Tape(learners=3, fragments=4, period=4, overlap=1, quorum=quorum_, total_steps=16)
  tape.start('l0', step_ms=50).start('l1', step_ms=100).start('l2', step_ms=300).run(1500)
  opened = tape.opened()
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
  tape = Tape(learners=1, fragments=4, period=4, overlap=2, quorum=1, total_steps=40)
  tape.start('l0')
  process = tape.world.learners['l0']
  process.up_ns = process.down_ns = process.bulk_ns = process.encode_ns = process.adopt_ns = 0
  tape.world.syncer.merge_ns = 0
  tape.run(3000)
  between = [
    action.values['steps_between'] for _, _, action in tape.of(actions.Report)
    if action.name == 'adopted' and action.values['version'] > 1
  ]
  assert len(between) >= 20 and set(between) == {4}, between


def test_when_the_fastest_learner_dies_the_next_carries_on_at_once():
  # Design section 4: "when the fastest learner dies the next one carries on at once".
  tape = Tape(learners=2, fragments=2, period=2, overlap=1, quorum=1, total_steps=40)
  tape.start('l0', step_ms=50).start('l1', step_ms=100).run(1000)
  before = max(tape.opened())
  tape.world.end(tape.world.learners['l0'])
  tape.run(1700)
  later = [time for sync, time in tape.opened().items() if sync > before]
  assert later[0] <= 1000 * MS + 3 * 100 * MS
  assert len(later) >= 3


def test_at_most_tau_syncs_are_in_flight_and_never_two_of_one_fragment():
  # Paper section 4: "Up to tau syncs are in flight, always of different fragments".
  for overlap in (1, 2, 3):
    tape = Tape(learners=1, fragments=4, period=4, overlap=overlap, quorum=1, total_steps=24)
    tape.start('l0', step_ms=20)
    tape.world.syncer.merge_ns = 30 * MS
    tape.run(3000)
    flying: dict[int, int] = {}
    most = 0
    for _, name, action in tape.entries:
      if isinstance(action, actions.Send) and isinstance(action.message, messages.Pull):
        assert action.message.fragment not in flying.values()
        flying[action.message.sync] = action.message.fragment
        most = max(most, len(flying))
      elif isinstance(action, actions.Send) and name == 'syncer':
        if isinstance(action.message, messages.Settled):
          flying.pop(action.message.sync, None)
    assert most == overlap


def test_max_lag_bounds_how_far_a_learner_runs_ahead():
  # Design section 4: "max_lag lets a learner run at most so many steps ahead of the sync it
  # waits for".
  for max_lag in (0, 1, 2):
    tape = Tape(
      learners=2, fragments=1, period=4, overlap=1, quorum=2, max_lag=max_lag, total_steps=12)
    tape.start('l0', step_ms=20).start('l1', step_ms=200).run(700)
    steps = [action.step for _, name, action in tape.of(actions.Step) if name == 'l0']
    assert max(steps) + 1 == 4 + max_lag, steps  # Step(step=s) runs inner step s + 1


def test_a_syncs_step_is_adopted_as_the_clock():
  # Design section 4: "adopting what sync t published sets it to max(step, t)".
  tape = Tape(learners=2, fragments=4, period=4, overlap=1, quorum=1, total_steps=40)
  tape.start('l0', step_ms=50).start('l1', step_ms=500).run(2500)
  fast = [report for _, report in tape.sent(messages.Progress, 'l0')][-1]
  slow = [report for _, report in tape.sent(messages.Progress, 'l1')][-1]
  assert slow.steps <= 5 and slow.step > 4 * slow.steps
  assert slow.step <= fast.step


# --- Gather and grace -----------------------------------------------------------------------------


def test_grace_formula():
  # Paper section 4: xi_slack = tau * xi_step - (xi_quorum + xi_sync),
  # 0 <= xi_grace <= gamma * xi_slack.
  config = world_lib.protocol_config(
    learners=2, fragments=4, period=4, overlap=2, quorum=1, total_steps=8, grace_permille=750)
  window = grace.Grace()
  assert window.window_ns(config, 100) == 0, 'nothing is known yet'
  window.quorum_ns.add(30)
  window.sync_ns.add(50)
  assert window.window_ns(config, 100) == (2 * 100 - 30 - 50) * 750 // 1000
  assert window.window_ns(config, 40) == 0, 'no slack: merge at once'


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
  # Design section 4: "When K payloads are there, the grace window runs; then what has arrived is
  # merged".
  tape = Tape(learners=2, fragments=1, period=4, overlap=3, quorum=1, total_steps=24)
  tape.start('l0').start('l1', step_ms=100)
  tape.world.learners['l1'].encode_ns = 2000 * MS
  tape.run(2200)
  merges = [action for _, _, action in tape.of(actions.Report) if action.name == 'synced']
  graces = [report.values['grace_ns'] for report in merges]
  assert graces[0] == 0 and graces[1] > 0, graces
  answers = dict(
    (message.sync, time) for time, message in tape.sent(messages.Contribution, 'l0'))
  for time, _, report in tape.of(actions.Report):
    if report.name == 'synced':
      waited = time - answers[report.values['sync']]
      assert waited <= report.values['grace_ns'] + 10 * MS


def test_a_payload_after_the_merge_is_late():
  # Design section 4: "A late payload is discarded with its reason".
  tape = Tape(learners=2, fragments=1, period=4, overlap=1, quorum=1, total_steps=8)
  tape.start('l0', 'l1')
  tape.world.learners['l1'].encode_ns = 60 * MS
  tape.run(20_000)
  assert discarded(tape)['late'] == 50
  settled = [m.reason for _, m in tape.sent(messages.Settled) if not m.merged]
  assert 'late' in settled


def test_only_trained_fragments_are_contributed_and_counts_start_at_the_adoption():
  # Paper section 2: c_steps, c_tokens = "steps and tokens since it last received fragment p".
  tape = Tape(learners=1, fragments=2, period=4, overlap=1, quorum=1, total_steps=20)
  tape.start('l0').run(20_000)
  adopted: dict[int, int] = {}
  for _, name, action in tape.entries:
    if isinstance(action, actions.Send) and isinstance(action.message, messages.Adopted):
      adopted[action.message.fragment] = action.message.tokens
    if isinstance(action, actions.Send) and isinstance(action.message, messages.Contribution):
      message = action.message
      assert message.tokens_from == adopted.get(message.fragment, 0)
      assert message.tokens_to - message.tokens_from == 10 * message.steps
      assert message.steps >= 1


@pytest.mark.parametrize('slow', ['l0', 'l1', 'l2'])
def test_participants_are_in_id_order_whatever_the_arrival(slow: str):
  # Design section 4: "folded in the order of learner ids, never of arrival".
  tape = Tape(learners=3, fragments=1, period=2, overlap=1, quorum=3, total_steps=6)
  tape.start('l2', 'l0', 'l1')
  tape.world.learners[slow].up_ns = 60 * MS
  tape.run(20_000)
  merges = [[one.learner for one in m.participants] for _, _, m in tape.of(actions.Merge)]
  assert merges and all(names == ['l0', 'l1', 'l2'] for names in merges)


@pytest.mark.parametrize('staleness, reason', [(0, 'stale'), (1, '')])
def test_an_older_anchor_counts_up_to_max_staleness(staleness: int, reason: str):
  # Design section 4: "counts with its own displacement if it is at most max_staleness versions
  # old".
  machine, session = joined(max_staleness=staleness, learners=2, quorum=1)
  advance(machine, session, step=2)
  machine.handle(2, received(session, contribution(sync=2), handle=1))
  machine.handle(3, merge_done(2))
  advance(machine, session, step=4)
  old = contribution(sync=4, tokens_from=20, tokens_to=40)
  out = machine.handle(5, received(session, old, handle=2))
  settled = [m.reason for m in contents(out, messages.Settled)]
  assert settled[:1] == ([reason] if reason else [])
  assert any(isinstance(a, actions.Merge) for a in out) == (not reason)
  assert any(isinstance(a, actions.ReadFragment) for a in out) == bool(reason)
  machine.check()


# --- Membership -----------------------------------------------------------------------------------


def test_a_repeated_join_or_confirm_changes_nothing():
  # Reliability section 2.1: "A Join or Confirm repeated with the holder's nonce is idempotent".
  machine, session = joined()
  before = machine.snapshot()
  assert machine.handle(2, received(session, join())) == []
  assert machine.handle(2, received(session, confirm())) == []
  assert machine.snapshot() == before
  machine.check()


def test_an_offer_holds_nothing():
  # Reliability section 2.1: Offer is "not durable"; the id is held from Confirm on.
  machine = new_machine()
  machine.handle(0, received(1, join(nonce=7)))
  out = machine.handle(0, received(2, join(nonce=8)))
  assert [a.message for a in out if isinstance(a, actions.Send)] == [messages.Offer(incarnation=1)]
  machine.handle(1, received(2, confirm(nonce=8)))
  out = machine.handle(2, received(1, confirm(nonce=7)))
  refused = [a.message for a in out if isinstance(a, actions.Send)]
  assert [message.code for message in refused] == ['ID_IN_USE']
  machine.check()


def test_nothing_before_joined_touches_the_run():
  # Reliability I19: nothing is accepted from a peer before Joined except Join, Confirm and Leave.
  machine = new_machine(start_wait_ms=1000, learners=2)
  before = machine.snapshot()
  for session in (1, 2):
    for message in (contribution(), progress(9), adopted(), decline()):
      handle = 5 if isinstance(message, messages.Contribution) else None
      out = machine.handle(0, received(session, message, handle))
      assert any(isinstance(a, actions.Close) for a in out)
      assert [a.handle for a in out if isinstance(a, actions.Drop)] == ([5] if handle else [])
    assert machine.snapshot() == before
    machine.check()
    if session == 1:  # the second waits in the room between Confirm and Joined
      machine.handle(0, received(2, join()))
      machine.handle(0, received(2, confirm()))
      before = machine.snapshot()


@pytest.mark.parametrize('message', [
  messages.Contribution(sync=2, fragment=9, version=0, steps=1, tokens_from=0, tokens_to=10,
                        payload=messages.Payload(size_bytes=64, crc32=0)),
  messages.Contribution(sync=2, fragment=0, version=0, steps=1, tokens_from=10, tokens_to=0,
                        payload=messages.Payload(size_bytes=64, crc32=0)),
  messages.Adopted(fragment=1, version=0, tokens=0, matched=False),
  messages.Decline(sync=2, fragment=1, reason='bad_value', tokens_to=0),
])
def test_impossible_messages_close_the_stream_and_change_nothing(message: Any):
  # Reliability T7: compared with what was joined before anything is done with it.
  machine, session = joined()
  before = machine.snapshot()
  handle = 3 if isinstance(message, messages.Contribution) else None
  out = machine.handle(2, received(session, message, handle))
  assert isinstance(out[-1], actions.Close)
  assert machine.snapshot() == before
  machine.check()


def test_a_live_holder_is_never_displaced():
  # Reliability I13.
  machine, session = joined()
  out = machine.handle(2, received(9, join(nonce=99)))
  assert [a.message.code for a in out if isinstance(a, actions.Send)] == ['ID_IN_USE']
  assert isinstance(out[-1], actions.Close) and out[-1].session == 9


def test_incarnations_count_the_processes_of_an_id():
  # Reliability I12: for each learner 1, 2, 3, ...
  tape = Tape(learners=1, fragments=1, period=2, overlap=1, quorum=1, total_steps=40)
  for life in range(1, 4):
    tape.start('l0').run(tape.world.now // MS + 300)
    assert tape.sent(messages.Joined)[-1][1].incarnation == life
    tape.world.end(tape.world.learners['l0'])


def test_a_frozen_process_loses_its_lease():
  # Reliability fault 5: the lease expires, the quorum goes on.
  tape = Tape(learners=2, fragments=1, period=2, overlap=1, quorum=1, total_steps=60)
  tape.start('l0', 'l1').run(500)
  tape.world.learners['l1'].freeze()
  tape.run(2000)
  members = [a.values for _, _, a in tape.of(actions.Report) if a.name == 'member']
  lost = [values['reason'] for values in members if values['state'] == 'lost']
  assert lost == ['lease expired']
  assert max(tape.opened()) >= 17


# --- Ledger ---------------------------------------------------------------------------------------


def test_the_ledger_settles_ranges_once():
  # Design section 4: "Every token trained is merged or discarded with a reason".
  account = ledger.Ledger(2).open('l0', 1)
  account.train(10, 100)
  assert account.settle(0, 20, 50, '')
  account.check()
  assert (account.merged, account.discarded) == (30, {'overwritten': 20})
  assert not account.settle(0, 40, 60, ''), 'it overlaps what is settled'
  assert account.merged == 30 and account.discarded['duplicate'] == 10
  account.close('left')
  account.check()
  assert account.merged + sum(account.discarded.values()) == 2 * 100


def test_tokens_of_a_killed_process_are_lost_with_it():
  # Reliability fault 1: "counted lost_with_process".
  tape = Tape(learners=1, fragments=1, period=10, overlap=1, quorum=1, total_steps=40)
  tape.start('l0').run(450)
  tape.world.end(tape.world.learners['l0'])
  tape.start('l0').run(900)
  assert discarded(tape) == {'lost_with_process': 40}


def test_a_repeated_contribution_counts_once():
  # Reliability I1: each contribution at most once.
  machine = two_learners(quorum=2)
  machine.handle(3, received(1, contribution(), handle=1))
  again = machine.handle(3, received(1, contribution(), handle=2))
  assert again == [actions.Drop(handle=2)]
  out = machine.handle(3, received(2, contribution(), handle=3))
  merge, = [a for a in out if isinstance(a, actions.Merge)]
  assert [one.handle for one in merge.participants] == [1, 3]


def test_tokens_of_a_cancelled_sync_stay_to_be_sent_again():
  # messages.Settled: of a cancelled sync no version comes, so nothing would replace the anchor.
  machine, session = joined()
  advance(machine, session, step=2)
  machine.handle(3, received(session, messages.Decline(
    sync=2, fragment=0, reason='contributed', tokens_to=20)))
  machine.handle(4, received(session, contribution(sync=2), handle=1))  # it was under way
  advance(machine, session, step=4)
  out = machine.handle(5, received(session, contribution(sync=4, tokens_to=40), handle=2))
  merge, = [a for a in out if isinstance(a, actions.Merge)]
  assert merge.participants[0].tokens == 40
  machine.check()


def test_a_range_that_overlaps_is_refused_and_the_learner_gets_a_fresh_anchor():
  # Ledger: ranges never overlap, so no token counts twice; and it must not be refused for ever.
  machine, session = joined()
  advance(machine, session, step=2)
  machine.handle(2, received(session, messages.Decline(
    sync=2, fragment=0, reason='bad_value', tokens_to=20)))
  machine.handle(3, events.FragmentRead(
    fragment=0, version=0, handle=8, digest=77, payload=messages.Payload(size_bytes=4, crc32=0)))
  advance(machine, session, step=4)
  out = machine.handle(4, received(session, contribution(sync=4, tokens_to=40), handle=2))
  assert actions.ReadFragment(fragment=0) in out and actions.Drop(handle=2) in out
  assert not any(isinstance(a, actions.Merge) for a in out)
  machine.check()


def test_a_process_that_outlives_the_end_of_a_run_is_counted_in_the_next():
  # Design section 4: "the ledger adds up, always", also across a restart of a finished run.
  tape = Tape(learners=1, fragments=1, period=2, overlap=1, quorum=1, total_steps=4)
  tape.start('l0').run(250)
  tape.world.partition('l0')
  process = tape.world.learners['l0']
  tape.world.syncer.machine._finished = True  # a run that was closed without this learner
  tape.world.syncer.machine._linger_ns = tape.world.now
  tape.run(2000)
  assert tape.world.syncer.exit is not None
  tape.world.start_syncer()
  tape.world.heal('l0')
  tape.run(20_000)
  assert process.exit is not None and tape.world.syncer.exit is not None
  assert tape.world.ledger()['trained'] == 40


def test_a_payload_whose_anchor_was_replaced_is_withdrawn():
  # Ledger: what a learner trained before it adopts is overwritten, so it cannot be merged too.
  machine = two_learners(quorum=2)
  machine.handle(3, received(1, contribution(), handle=1))
  out = machine.handle(3, received(1, dataclasses.replace(adopted(), tokens=30, matched=True)))
  assert actions.Drop(handle=1) in out
  out = machine.handle(3, received(2, contribution(), handle=3))
  assert not any(isinstance(a, actions.Merge) for a in out)
  machine.check()


def test_a_delta_goes_only_to_who_holds_the_version_before():
  # Design section 4: "a learner of another version gets the whole fragment".
  machine = two_learners(quorum=1)
  machine.handle(3, received(1, contribution(), handle=1))
  machine.handle(3, received(2, contribution(), handle=2))
  machine.handle(3, received(2, adopted()))  # it does not match: the whole is on its way
  out = machine.handle(4, merge_done(2))
  to = [a.session for a in out if isinstance(getattr(a, 'message', None), messages.Publish)]
  assert to == [1]
  out = machine.handle(5, events.FragmentRead(
    fragment=0, version=1, handle=8, digest=78, payload=messages.Payload(size_bytes=4, crc32=0)))
  whole, = [a for a in out if isinstance(getattr(a, 'message', None), messages.Publish)]
  assert (whole.session, whole.message.base_version) == (2, None)


def test_who_joins_hears_of_syncs_that_were_cancelled():
  # Joined gives the clock of the oldest open sync; a lock-step learner would wait for later ones.
  machine = new_machine(learners=3, fragments=2, period=3, overlap=2)
  machine.handle(0, received(1, join()))
  machine.handle(0, received(1, confirm(fragments=2)))
  machine.handle(1, received(1, progress(3)))
  machine.handle(2, received(1, messages.Decline(
    sync=3, fragment=1, reason='contributed', tokens_to=0)))
  machine.handle(3, received(2, join(learner='l1', nonce=8)))
  out = machine.handle(3, received(2, confirm(nonce=8, fragments=2)))
  told = [a.message for a in out if isinstance(a, actions.Send)]
  assert isinstance(told[0], messages.Joined) and told[0].step == 0
  assert messages.Settled(sync=3, fragment=1, merged=False, reason='cancelled') in told


def test_the_start_waits_for_those_who_are_expected_and_takes_them_as_they_are():
  # Config start_wait_ns. A process that died in the waiting room speaks for nobody after it.
  machine = new_machine(learners=2, start_wait_ms=300)
  machine.handle(0, received(1, join()))
  assert not [a for a in machine.handle(0, received(1, confirm())) if isinstance(a, actions.Send)]
  machine.handle(1, events.Disconnected(session=1, reason='gone'))
  machine.handle(2, received(2, join(nonce=9)))
  late = dataclasses.replace(
    confirm(nonce=9), incarnation=2, held=(messages.Held(version=-1, digest=0),))
  machine.handle(2, received(2, late))
  assert machine.deadline_ns <= 300 * MS
  out = machine.handle(300 * MS, events.Wake())
  told = [a.message for a in out if isinstance(a, actions.Send)]
  assert told == [messages.Joined(incarnation=2, step=0, stream=0, due=(0,))]


def test_a_new_life_starts_anew():
  # Members: another process under the id has made no step yet.
  machine, session = joined(learners=2, quorum=2)
  machine.handle(2, received(session, progress(8)))
  machine.handle(3, events.Disconnected(session=session, reason='gone'))
  machine.handle(4, received(5, join(nonce=9)))
  machine.handle(4, received(5, dataclasses.replace(confirm(nonce=9), incarnation=2)))
  member = machine.snapshot()['members'][0]
  assert (member['incarnation'], member['step'], member['replaced']) == (2, 0, [7])


# --- A learner alone, message by message ----------------------------------------------------------


def new_learner(**settings: Any) -> Any:
  config = world_lib.protocol_config(**{
    'learners': 2, 'fragments': 2, 'period': 4, 'overlap': 1, 'quorum': 2, 'max_lag': 0,
    'total_steps': 20, **settings})
  identity = learner.Identity(
    learner='l0', nonce=1, agreement=world_lib.AGREEMENT, host='host', pid=1)
  return learner.LearnerMachine(config, identity, (50, 51))


def connect(machine: Any, session: int, now_ms: int, clock: int = 0, due: tuple = ()) -> list:
  machine.handle(now_ms * MS, events.Wake())
  machine.handle(now_ms * MS, events.Connected(session=session))
  machine.handle(now_ms * MS, received(session, messages.Offer(incarnation=1)))
  return machine.handle(now_ms * MS, received(session, messages.Joined(
    incarnation=1, step=clock, stream=0, due=due)))


def train(machine: Any, now_ms: int) -> list:
  return machine.handle(now_ms * MS, events.StepDone(tokens=10, step_ns=MS))


def encoded(sync: int, fragment: int, handle: int) -> events.Encoded:
  return events.Encoded(sync=sync, fragment=fragment, handle=handle,
                        payload=messages.Payload(size_bytes=64, crc32=0))


def publish(sync: int, fragment: int, version: int) -> messages.Publish:
  return messages.Publish(
    sync=sync, fragment=fragment, version=version, base_version=version - 1, digest=60,
    payload=messages.Payload(size_bytes=64, crc32=0))


def contents(out: list, kind: type) -> list:
  return [a.message for a in out if isinstance(a, actions.Send) and isinstance(a.message, kind)]


def test_a_snapshot_of_an_old_stream_is_not_sent_on_the_new_one():
  # The syncer dropped what the old stream brought and asks again; the first snapshot is void.
  machine = new_learner()
  connect(machine, 1, 0)
  machine.handle(MS, received(1, messages.Pull(sync=2, fragment=0)))
  assert any(isinstance(a, actions.Encode) for a in train(machine, 10))
  machine.handle(11 * MS, events.Disconnected(session=1, reason='cut'))
  connect(machine, 2, 100)
  machine.handle(101 * MS, received(2, messages.Pull(sync=2, fragment=0)))
  assert any(isinstance(a, actions.Encode) for a in train(machine, 110))
  first = machine.handle(111 * MS, encoded(2, 0, handle=1))
  assert first == [actions.Drop(handle=1)]
  second = machine.handle(112 * MS, encoded(2, 0, handle=2))
  assert [m.tokens_to for m in contents(second, messages.Contribution)] == [20]


def test_bits_that_went_wrong_while_the_stream_was_away_are_told_later():
  # Design section 4: "a learner whose published value differs is repaired and counted".
  machine = new_learner()
  connect(machine, 1, 0)
  machine.handle(MS, received(1, publish(2, 0, version=1), handle=4))
  assert any(isinstance(a, actions.Adopt) for a in train(machine, 10))
  machine.handle(11 * MS, events.Disconnected(session=1, reason='cut'))
  machine.handle(12 * MS, events.AdoptDone(fragment=0, version=1, digest=61))
  told = contents(connect(machine, 2, 100), messages.Adopted)
  assert [(m.fragment, m.version, m.matched) for m in told] == [(0, 1, False)]


def test_a_learner_does_not_wait_for_a_sync_that_it_has_adopted_already():
  # Syncs may close out of order; after a reconnect the clock is that of the oldest open one.
  machine = new_learner(max_lag=0)
  connect(machine, 1, 0)
  train(machine, 10)
  machine.handle(11 * MS, received(1, publish(4, 1, version=1), handle=4))
  train(machine, 20)
  machine.handle(21 * MS, events.Disconnected(session=1, reason='cut'))
  connect(machine, 2, 100, clock=1)  # sync 2 of fragment 0 is open still, sync 4 is done
  out = machine.handle(101 * MS, received(2, publish(2, 0, version=1), handle=5))
  assert any(isinstance(a, actions.Step) for a in out)


def test_a_pull_that_no_step_can_precede_is_declined():
  # Both would wait for the other: the learner for the sync (max_lag), the sync for its payload.
  machine = new_learner()
  connect(machine, 1, 0)
  train(machine, 10)
  machine.handle(11 * MS, received(1, publish(6, 0, version=1), handle=4))
  assert not any(isinstance(a, actions.Step) for a in train(machine, 20)), 'it waits for sync 4'
  out = machine.handle(21 * MS, received(1, messages.Pull(sync=10, fragment=0)))
  assert [m.reason for m in contents(out, messages.Decline)] == ['empty']


def test_a_cancelled_sync_frees_its_payload_and_nothing_else():
  # Once per anchor, but a sync of which nothing came does not use the anchor up.
  machine = new_learner(max_lag=None)
  connect(machine, 1, 0)
  machine.handle(MS, received(1, messages.Pull(sync=2, fragment=0)))
  train(machine, 10)
  machine.handle(11 * MS, encoded(2, 0, handle=1))
  for cancelled, answer in ((6, messages.Decline), (2, messages.Contribution)):
    machine.handle(12 * MS, received(1, messages.Settled(
      sync=cancelled, fragment=0, merged=False, reason='cancelled')))
    machine.handle(13 * MS, received(1, messages.Pull(sync=10, fragment=0)))
    out = train(machine, 20)
    if any(isinstance(a, actions.Encode) for a in out):
      out = machine.handle(21 * MS, encoded(10, 0, handle=2))
    assert contents(out, answer), (cancelled, out)


# --- Schedule and quorum: pure parts against naive versions ---------------------------------------


def test_schedule_handles_each_fragment_once_per_period():
  # Paper section 4: p is the fragment with (t - t_p) mod H == 0; P = H: p = (t - 1) mod P.
  for period in range(1, 9):
    for fragments in range(1, period + 1):
      plan = schedule.Schedule(world_lib.protocol_config(
        learners=1, fragments=fragments, period=period, overlap=0, quorum=1, total_steps=30))
      due = {t: plan.fragment(t) for t in range(1, 60)}
      for start in range(1, 50):
        window = [due[t] for t in range(start, start + period) if due.get(t) is not None]
        assert start + period > 59 or sorted(window) == list(range(fragments))
      for t in range(40):
        assert plan.next(t) == min(u for u in due if u > t and due[u] is not None)
        for p in range(fragments):
          assert plan.due(p, t) == min(u for u in due if u > t and due[u] == p)
      if fragments == period:
        assert all(due[t] == (t - 1) % fragments for t in due)


def test_kth_step_is_the_naive_one():
  for steps in ([], [3], [1, 5], [4, 4, 2], [9, 1, 7, 7]):
    for k in range(1, 6):
      naive = max((s for s in range(11) if sum(x >= s for x in steps) >= k), default=0)
      assert quorum.kth_step(steps, k) == naive


@pytest.mark.parametrize('payloads, waiting, live, closing, verdict', [
  (0, 2, 2, False, 'wait'),  # nobody has answered
  (1, 1, 2, False, 'wait'),  # the quorum is not there yet
  (2, 0, 2, False, 'merge'),  # all have answered
  (1, 0, 2, False, 'cancel'),  # all have answered, one without a payload
  (1, 0, 1, False, 'wait'),  # with K = M one may come back
  (1, 0, 1, True, 'cancel'),  # but after the last step nobody is waited for
])
def test_quorum_decisions(payloads: int, waiting: int, live: int, closing: bool, verdict: str):
  gather = quorum.Gather(sync=4, fragment=0, opened_ns=0)
  gather.payloads = {f'l{n}': None for n in range(payloads)}
  gather.waiting = {f'w{n}' for n in range(waiting)}
  assert quorum.decide(gather, 5, 2, live, closing)[0] == verdict


def test_grace_decisions():
  gather = quorum.Gather(sync=4, fragment=0, opened_ns=0, waiting={'l1'}, payloads={'l0': None})
  gather.quorum_at_ns, gather.grace_ns = 100, 50
  assert quorum.decide(gather, 149, 1, 2, False)[0] == 'wait'
  assert quorum.decide(gather, 150, 1, 2, False)[0] == 'merge'
  gather.merging = True
  assert quorum.decide(gather, 999, 1, 2, False) == ('wait', 'merging')


@pytest.mark.parametrize('field, value, words', [
  ('quorum', 3, 'quorum is 3, it must be between 1 and 2'),
  ('fragments', 5, 'fragments is 5, it must be between 1 and 4'),
  ('overlap', 4, 'overlap is 4, it must be between 0 and 3'),
  ('max_lag', 4, 'max_lag is 4, it must be between 0 and 3'),
  ('grace_permille', 1000, 'grace_permille is 1000'),
  ('total_steps', 0, 'total_steps is 0'),
])
def test_impossible_configs_do_not_start(field: str, value: int, words: str):
  # Style section 4: "Make wrong configurations impossible to start", both values and the remedy.
  settings = {
    'learners': 2, 'fragments': 2, 'period': 4, 'overlap': 1, 'quorum': 1, 'total_steps': 8}
  with pytest.raises(ValueError, match=words):
    world_lib.protocol_config(**{**settings, field: value})


# --- Bounded work ---------------------------------------------------------------------------------


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


def test_a_busy_syncer_saves_too():
  # design section 4, Durability: a snapshot is of no half-done merge; merges that always overlap
  # must not keep it from being taken.
  tape = Tape(
    learners=1, fragments=8, period=8, overlap=3, quorum=1, total_steps=80, save_syncs=4)
  tape.start('l0', step_ms=20)
  tape.world.syncer.merge_ns = 30 * MS
  tape.run(2000)
  saves = [time for time, name, _ in tape.of(actions.Save) if name == 'syncer']
  assert len(saves) >= 5 and saves[0] < 400 * MS, saves


def test_a_snapshot_restores_the_machine():
  # Design section 1: snapshot(), restore(): the same state again.
  machine, session = joined()
  advance(machine, session, step=2)
  machine.handle(2, received(session, contribution(sync=2), handle=1))
  machine.handle(3, merge_done(2))
  again = type(machine).restore(
    machine._config, world_lib.AGREEMENT, (world_lib.PAYLOAD_BYTES,), machine.snapshot())
  assert again.snapshot() == machine.snapshot()
  again.check()


# --- A syncer alone, message by message -----------------------------------------------------------


def new_machine(**settings: Any) -> Any:
  config = world_lib.protocol_config(**{
    'learners': 1, 'fragments': 1, 'period': 2, 'overlap': 1, 'quorum': 1, 'total_steps': 8,
    **settings})
  count = config.fragments
  return syncer.SyncerMachine(
    config, world_lib.AGREEMENT, (77,) * count, (world_lib.PAYLOAD_BYTES,) * count)


def joined(**settings: Any) -> tuple[Any, int]:
  machine = new_machine(**settings)
  machine.handle(0, received(1, join()))
  out = machine.handle(1, received(1, confirm()))
  assert any(isinstance(getattr(a, 'message', None), messages.Joined) for a in out)
  return machine, 1


def two_learners(quorum: int) -> Any:
  """A syncer with l0 on session 1 and l1 on session 2, and sync 2 open."""
  machine, _ = joined(learners=2, quorum=quorum)
  machine.handle(1, received(2, join(learner='l1', nonce=8)))
  machine.handle(1, received(2, confirm(nonce=8)))
  for number in (1, 2):
    machine.handle(2, received(number, progress(2)))
  return machine


def advance(machine: Any, session: int, step: int) -> None:
  out = machine.handle(2, received(session, progress(step)))
  assert any(isinstance(getattr(a, 'message', None), messages.Pull) for a in out), out


def received(session: int, message: Any, handle: int | None = None) -> events.Received:
  return events.Received(session=session, message=message, handle=handle)


def join(learner: str = 'l0', nonce: int = 7) -> messages.Join:
  return messages.Join(protocol=messages.PROTOCOL_VERSION, learner=learner, nonce=nonce,
                       agreement=world_lib.AGREEMENT, host='host', pid=1)


def confirm(nonce: int = 7, fragments: int = 1) -> messages.Confirm:
  return messages.Confirm(nonce=nonce, incarnation=1, step=0, steps=0, tokens=0,
                          held=(messages.Held(version=0, digest=77),) * fragments)


def progress(step: int) -> messages.Progress:
  return messages.Progress(step=step, steps=step, tokens=10 * step, step_ns=1, finished=False)


def contribution(sync: int = 2, tokens_from: int = 0, tokens_to: int = 20) -> messages.Contribution:
  return messages.Contribution(
    sync=sync, fragment=0, version=0, steps=2, tokens_from=tokens_from, tokens_to=tokens_to,
    payload=messages.Payload(size_bytes=world_lib.PAYLOAD_BYTES, crc32=0))


def adopted() -> messages.Adopted:
  return messages.Adopted(fragment=0, version=0, tokens=0, matched=False)


def decline() -> messages.Decline:
  return messages.Decline(sync=2, fragment=0, reason='bad_value', tokens_to=10)


def merge_done(sync: int) -> events.MergeDone:
  return events.MergeDone(sync=sync, fragment=0, handle=50, digest=78,
                          payload=messages.Payload(size_bytes=64, crc32=0))
