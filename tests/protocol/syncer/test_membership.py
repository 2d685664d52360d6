"""Joining, incarnations and leases. Each test opens with the sentence and its source."""

import dataclasses
from typing import Any

from diloco_jax.protocol import actions, events, messages
from diloco_jax.verification.sim import engine
from tests.protocol import single
from tests.protocol.recording import Recording
from tests.protocol.single import (
  adopted,
  confirm,
  contribution,
  decline,
  join,
  joined,
  new_machine,
  progress,
  received,
)

MS = engine.MS


def test_a_repeated_join_or_confirm_changes_nothing():
  machine, session = joined()
  before = machine.state()
  assert machine.handle(2, received(session, join())) == []
  assert machine.handle(2, received(session, confirm())) == []
  assert machine.state() == before
  machine.check()


def test_an_offer_holds_nothing():
  """The process holds the id from its Confirm on."""
  machine = new_machine()
  machine.handle(0, received(1, join(nonce=7)))
  out = machine.handle(0, received(2, join(nonce=8)))
  assert [a.message for a in out if isinstance(a, actions.Send)] == [
    messages.Offer(run='r0', incarnation=1)
  ]
  machine.handle(1, received(2, confirm(nonce=8)))
  out = machine.handle(2, received(1, confirm(nonce=7)))
  refused = [a.message for a in out if isinstance(a, actions.Send)]
  assert [message.code for message in refused] == ['ID_IN_USE']
  machine.check()


def test_messages_before_joined_have_no_effect():
  # Reliability I19: nothing is accepted from a peer before Joined except Join, Confirm and Leave.
  machine = new_machine(start_wait_ms=1000, learners=2)
  before = machine.state()
  for session, message in enumerate((contribution(), progress(9), adopted(), decline()) * 2):
    if session >= 4:  # it waits between Confirm and Joined
      machine.handle(0, received(session, join()))
      machine.handle(0, received(session, confirm()))
      before = machine.state()
    payload_id = 5 if isinstance(message, messages.Contribution) else None
    out = machine.handle(0, received(session, message, payload_id))
    assert any(isinstance(a, actions.Close) for a in out)
    assert [a.payload_id for a in out if isinstance(a, actions.Drop)] == ([5] if payload_id else [])
    assert machine.state() == before
    machine.check()


def test_a_live_holder_is_never_displaced():
  # Reliability I13.
  machine, session = joined()
  out = machine.handle(2, received(9, join(nonce=99)))
  assert [a.message.code for a in out if isinstance(a, actions.Send)] == ['ID_IN_USE']
  assert isinstance(out[-1], actions.Close) and out[-1].session == 9


def test_incarnations_count_the_processes_of_an_id():
  # Reliability I12: for each learner 1, 2, 3, ...
  seen = Recording(learners=1, fragments=1, period=2, overlap=1, quorum=1, total_steps=40)
  for life in range(1, 4):
    seen.start('l0').run(seen.world.now_ns // MS + 300)
    assert seen.sent(messages.Joined)[-1][1].incarnation == life
    seen.world.end(seen.world.learners['l0'])


def test_a_joiner_is_told_of_cancelled_syncs():
  # Joined gives the clock of the oldest open sync; a lock-step learner would wait for later ones.
  machine = new_machine(learners=3, fragments=2, period=3, overlap=2)
  machine.handle(0, received(1, join()))
  machine.handle(0, received(1, confirm(fragments=2)))
  machine.handle(1, received(1, progress(3)))
  machine.handle(2, received(1, messages.Decline(sync=3, fragment=1, reason='empty', tokens_to=0)))
  machine.handle(3, received(2, join(learner='l1', nonce=8)))
  out = machine.handle(3, received(2, confirm(nonce=8, fragments=2)))
  told = [a.message for a in out if isinstance(a, actions.Send)]
  assert isinstance(told[0], messages.Joined) and told[0].clock == 0
  assert messages.Settled(sync=3, fragment=1, merged=False, reason='cancelled') in told


def test_another_value_of_the_same_version_is_due():
  """After a restore a learner of the line before may hold the version number of this one."""
  machine = new_machine(fragments=2)
  held = tuple(messages.Held(version=0, digest=digest) for digest in (77, 78))
  machine.handle(0, received(1, join()))
  out = machine.handle(0, received(1, dataclasses.replace(confirm(), held=held)))
  told = [a.message for a in out if isinstance(a, actions.Send)]
  assert [one.due for one in told if isinstance(one, messages.Joined)] == [(1,)]
  assert actions.ReadFragment(fragment=1) in out


def test_the_shard_of_a_learner_that_left_is_handed_out_before_those_read_further():
  """The next learner would take it in the end, if it were kept: once no other shard is free. But
  then its text would wait, although it is the least read."""
  machine = new_machine(learners=2, shards=3)
  for session, (learner, nonce) in enumerate([('l0', 7), ('l1', 8), ('l2', 9)], 1):
    machine.handle(0, received(session, join(learner=learner, nonce=nonce)))
    out = machine.handle(0, received(session, confirm(nonce=nonce)))
    joined_at = [
      a.message.shard for a in out if isinstance(getattr(a, 'message', None), messages.Joined)
    ]
    if session == 1:
      machine.handle(0, received(1, messages.Leave(reason='done')))
  assert joined_at == [1]
  assert [row[1] for row in machine.state()['data']['holders']] == ['l1', 'l2']


def test_the_start_waits_for_the_expected_learners():
  # Config start_wait_ns. A process that died while it waited does not count.
  machine = new_machine(learners=2, start_wait_ms=300)
  machine.handle(0, received(1, join()))
  out = machine.handle(0, received(1, confirm()))
  assert [a for a in out if not isinstance(a, actions.Report)] == [actions.Admit(session=1)]
  machine.handle(1, events.Disconnected(session=1, reason='gone'))
  machine.handle(2, received(2, join(nonce=9)))
  late = dataclasses.replace(
    confirm(nonce=9), incarnation=2, held=(messages.Held(version=-1, digest=0),)
  )
  machine.handle(2, received(2, late))
  assert machine.deadline_ns <= 300 * MS
  out = machine.handle(300 * MS, events.Wake())
  told = [a.message for a in out if isinstance(a, actions.Send)]
  assert told == [
    messages.Joined(incarnation=2, clock=0, shard=0, cursor=0, due=(0,), settled=(0,))
  ]


def test_a_new_incarnation_starts_at_step_zero():
  # Members: another process under the id has made no step yet.
  machine, session = joined(learners=2, quorum=2)
  machine.handle(2, received(session, progress(8)))
  machine.handle(3, events.Disconnected(session=session, reason='gone'))
  machine.handle(4, received(5, join(nonce=9)))
  machine.handle(4, received(5, dataclasses.replace(confirm(nonce=9), incarnation=2)))
  member = machine.state()['members'][0]
  assert (member['incarnation'], member['clock'], member['nonce']) == (2, 0, 9)


def connected_as(proved: str, **fields: Any) -> tuple[Any, list]:
  """A syncer whose session 7 has proved an id, and its answer to a Join there."""
  machine, _ = joined()
  machine.handle(2, events.Connected(session=7, learner=proved))
  return machine, machine.handle(3, received(7, join(**fields)))


def test_a_process_joins_under_the_id_that_it_has_proved_and_no_other():
  machine, out = connected_as('l1', learner='l2', nonce=99)
  (refused,) = [a.message for a in out if isinstance(a, actions.Send)]
  assert refused.code == 'NOT_YOURS' and refused.retry_ns is None
  assert isinstance(out[-1], actions.Close) and out[-1].session == 7
  machine, out = connected_as('l1', learner='l1', nonce=99)
  assert [type(a.message) for a in out if isinstance(a, actions.Send)] == [messages.Offer]


def test_the_nonce_of_a_live_process_takes_nothing_without_its_proof():
  machine, _ = joined()
  holder = machine._members.by_id['l0']
  machine.handle(2, events.Connected(session=7, learner='l1'))
  out = machine.handle(3, received(7, join(learner='l0', nonce=holder.nonce)))
  assert [a.message.code for a in out if isinstance(a, actions.Send)] == ['NOT_YOURS']
  assert holder.live and holder.session != 7


def test_a_second_process_of_one_certificate_waits_for_the_lease_of_the_first():
  """It is the same owner's, so its learner tries again as long as it takes, and never exits."""
  _, out = connected_as('l0', learner='l0', nonce=99)
  (refused,) = [a.message for a in out if isinstance(a, actions.Send)]
  assert refused.code == 'YOUR_ID_IN_USE' and refused.retry_ns > 0
  learner = single.new_learner()
  for session in range(1, 6):
    now_ms = session * 100_000
    learner.handle(now_ms * single.MS, events.Wake())
    learner.handle(now_ms * single.MS, events.Connected(session=session))
    told = learner.handle(now_ms * single.MS, received(session, refused))
    assert not [action for action in told if isinstance(action, actions.Exit)]
    learner.handle(now_ms * single.MS, events.Disconnected(session=session, reason='refused'))
