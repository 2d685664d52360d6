"""Joining, incarnations and leases. Each test opens with the sentence and its source."""

from diloco_jax.protocol import actions, events, messages
from diloco_jax.verification.sim import engine as engine_lib
from tests.protocol import single
from tests.protocol.talk import Talk

MS = engine_lib.MS


def test_a_repeated_join_or_confirm_changes_nothing():
  talk = Talk('l0')
  before = talk.machine.state()
  for message in (single.join(), single.confirm()):
    assert talk.hears('l0', message) == []
  assert talk.machine.state() == before


def test_an_offer_holds_nothing():
  """The process holds the id from its Confirm on."""
  talk = Talk(learners=1)
  talk.asks('l0', process=1)
  talk.asks('l0', process=2)
  assert talk.sent() == [messages.Offer(run='r0', incarnation=1)]
  talk.confirms('l0')
  talk.hears(1, single.confirm(nonce=107))
  assert talk.refusals == ['ID_IN_USE']


def test_messages_before_joined_have_no_effect():
  # Reliability I19: nothing is accepted from a peer before Joined except Join, Confirm and Leave.
  early = single.contribution(), single.progress(9), single.adopted(), single.decline()
  for message in early:
    for waits in (False, True):  # between Confirm and Joined
      talk = Talk(*(['l0'] if waits else []), start_wait_ms=1000, learners=2)
      before = talk.machine.state()
      payload_id = 5 if isinstance(message, messages.Contribution) else None
      talk.hears(1, message, payload_id)
      assert talk.closed == [1]
      assert [drop.payload_id for drop in talk.of(actions.Drop)] == ([5] if payload_id else [])
      assert talk.machine.state() == before


def test_a_joiner_is_told_of_cancelled_syncs():
  # Joined gives the clock of the oldest open sync; a lock-step learner would wait for later ones.
  talk = Talk('l0', learners=3, fragments=2, period=3, overlap=2)
  talk.steps('l0', to=3)
  talk.hears('l0', messages.Decline(sync=3, fragment=1, reason='empty', tokens_to=0))
  talk.joins('l1')
  joined, *others = talk.sent()
  assert isinstance(joined, messages.Joined) and joined.clock == 0
  assert messages.Settled(sync=3, fragment=1, merged=False, reason='cancelled') in others


def test_another_value_of_the_same_version_is_due():
  """After a restore a learner of the line before may hold the version number of this one."""
  talk = Talk(learners=1, fragments=2)
  talk.joins('l0', held=tuple(messages.Held(version=0, digest=digest) for digest in (77, 78)))
  assert [message.due for message in talk.sent(messages.Joined)] == [(1,)]
  assert actions.ReadFragment(fragment=1) in talk.out


def test_the_shard_of_a_learner_that_left_is_handed_out_before_those_read_further():
  """The next learner would take it in the end, if it were kept: once no other shard is free. But
  then its text would wait, although it is the least read."""
  talk = Talk('l0', learners=2, shards=3)
  talk.hears('l0', messages.Leave(reason='done'))
  talk.joins('l1')
  talk.joins('l2')
  assert [message.shard for message in talk.sent(messages.Joined)] == [1]
  assert [row[1] for row in talk.machine.state()['data']['holders']] == ['l1', 'l2']


def test_the_start_waits_for_the_expected_learners():
  # Config start_wait_ns. A process that died while it waited does not count.
  talk = Talk('l0', learners=2, start_wait_ms=300)
  assert [a for a in talk.out if not isinstance(a, actions.Report)] == [actions.Admit(session=1)]
  talk.now_ns = 2
  talk.loses('l0')
  talk.joins('l0', process=2, held=(messages.Held(version=-1, digest=0),))
  assert talk.machine.deadline_ns <= 300 * MS
  talk.wakes(300 * MS)
  assert talk.sent() == [
    messages.Joined(incarnation=2, clock=0, shard=0, cursor=0, due=(0,), settled=(0,))
  ]


def test_a_new_incarnation_starts_at_step_zero():
  # Members: another process under the id has made no step yet.
  talk = Talk('l0', learners=2, quorum=2)
  talk.steps('l0', to=8)
  talk.loses('l0')
  talk.joins('l0', process=2)
  member = talk.member()
  assert (member['incarnation'], member['clock']) == (2, 0)


def test_a_process_joins_under_the_id_that_it_has_proved_and_no_other():
  """The nonce of a live process takes nothing without its proof either."""
  talk = Talk('l0')
  for name in ('l2', 'l0'):
    talk.asks(name, proved='l1')
    (refused,) = talk.sent()
    assert refused.code == 'NOT_YOURS' and refused.retry_ns is None
    assert talk.closed == [talk.session[name]]
  holder = talk.machine._members.by_id['l0']
  assert holder.live and holder.session == 1
  talk.asks('l1', proved='l1')
  assert [type(message) for message in talk.sent()] == [messages.Offer]


def test_a_second_process_of_one_certificate_waits_for_the_lease_of_the_first():
  """It is the same owner's, so its learner tries again as long as it takes, and never exits."""
  talk = Talk('l0')
  talk.asks('l0', process=2, proved='l0')
  (refused,) = talk.sent()
  assert refused.code == 'YOUR_ID_IN_USE' and refused.retry_ns > 0
  learner = single.new_learner()
  for session in range(1, 6):
    now_ns = session * 100_000 * MS
    learner.handle(now_ns, events.Wake())
    learner.handle(now_ns, events.Connected(session=session))
    out = learner.handle(now_ns, single.received(session, refused))
    assert not single.of(out, actions.Exit)
    learner.handle(now_ns, events.Disconnected(session=session, reason='refused'))
