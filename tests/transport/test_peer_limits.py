"""What the other end of a session may send."""

import pytest

from diloco_jax.protocol import messages
from diloco_jax.transport import link, peer_limits
from tests.transport import samples

LIMITS = link.Limits(contribution_bytes=(10, 20), publish_bytes=(40, 80))


def member():
  learner = peer_limits.LearnerRules(LIMITS)
  (
    learner.on_received(samples.join()),
    learner.on_sent(messages.Offer(run='r0', incarnation=1)),
  )
  learner.on_received(samples.CONFIRM), learner.on_sent(samples.JOINED)
  return learner


def pull(sync, fragment=0):
  return messages.Pull(sync=sync, fragment=fragment, now=True)


def payload_of(size):
  return messages.Payload(size_bytes=size, crc32=0)


def contribution(sync, fragment=0, size=10):
  return samples.contribution(payload_of(size), sync=sync, fragment=fragment)


def decline(sync, fragment=0):
  return messages.Decline(sync=sync, fragment=fragment, reason='empty', tokens_to=0)


def test_a_rate_has_room_for_a_burst_and_then_keeps_its_pace():
  rate = peer_limits.Rate(per_s=10, burst=3)
  for _ in range(4):  # the burst, and the one that is due
    assert rate.wait_s(5.0) == 0
    rate.spend(1, 5.0)
  assert rate.wait_s(5.0) == pytest.approx(0.1)
  assert rate.wait_s(5.1) == pytest.approx(0)
  rate.spend(1, 5.1)
  assert rate.wait_s(5.1) == pytest.approx(0.1) and rate.wait_s(60) == 0


@pytest.mark.parametrize(
  'first',
  [samples.CONFIRM, messages.Heartbeat(), messages.Leave(reason=''), decline(1), contribution(1)],
)
def test_a_session_begins_with_a_join(first):
  with pytest.raises(link.LinkError, match='before Join'):
    peer_limits.LearnerRules(LIMITS).on_received(first)


@pytest.mark.parametrize('message', [samples.join(), samples.CONFIRM])
def test_a_member_joins_once(message):
  with pytest.raises(link.LinkError, match=f'a second {type(message).__name__}'):
    member().on_received(message)


@pytest.mark.parametrize('size', [0, 7, 10])
def test_a_stranger_sends_no_payload(size):
  stranger = peer_limits.LearnerRules(LIMITS)
  stranger.on_received(samples.join())
  stranger.on_sent(messages.Offer(run='r0', incarnation=1))
  assert stranger.stage == 1 and not stranger.member
  with pytest.raises(link.LinkError, match='not asked for'):
    stranger.on_transfer(size)


def test_every_pull_allows_one_payload_of_its_fragment():
  learner = member()
  learner.on_sent(pull(1)), learner.on_sent(pull(1)), learner.on_sent(pull(2, fragment=1))
  learner.on_transfer(20), learner.on_received(contribution(2, fragment=1, size=20))
  learner.on_received(contribution(1)), learner.on_transfer(10)  # in either order
  for again in (10, 20):
    with pytest.raises(link.LinkError, match='not asked for'):
      learner.on_transfer(again)
  with pytest.raises(link.LinkError, match='has not asked'):
    learner.on_received(contribution(1))


@pytest.mark.parametrize(
  'answer, why',
  [
    (contribution(1, size=9), 'announces 9 bytes, 10 were asked for'),
    (contribution(1, fragment=1, size=20), 'has not asked'),
    (contribution(2), 'has not asked'),
    (decline(2), 'has not asked'),
  ],
)
def test_another_answer_is_refused(answer, why):
  learner = member()
  learner.on_sent(pull(1))
  with pytest.raises(link.LinkError, match=why):
    learner.on_received(answer)


def test_a_declined_pull_allows_no_payload():
  learner = member()
  learner.on_sent(pull(1))
  learner.on_received(decline(1))
  with pytest.raises(link.LinkError, match='not asked for'):
    learner.on_transfer(10)
  learner.on_sent(pull(2))
  learner.on_transfer(10)
  with pytest.raises(link.LinkError, match='not asked for'):
    learner.on_received(decline(2))  # although its bytes have begun


def test_what_a_learner_owes_is_bounded():
  learner = member()
  for sync in range(peer_limits.MAX_ASKED + 5):
    learner.on_sent(pull(sync))
  with pytest.raises(link.LinkError, match='has not asked'):
    learner.on_received(contribution(4))
  learner.on_received(contribution(5))
  for _ in range(peer_limits.MAX_ASKED):
    learner.on_transfer(10)
  with pytest.raises(link.LinkError, match='not asked for'):
    learner.on_transfer(10)


def publish(fragment, size):
  return samples.publish(payload_of(size), fragment=fragment, base_version=None)


def test_a_learner_accepts_the_sizes_of_the_layout_only():
  syncer = peer_limits.SyncerRules(LIMITS)
  for message in (publish(0, 40), publish(1, 80), messages.Finish()):
    syncer.on_received(message)
  for message in (publish(0, 41), publish(2, 1)):
    with pytest.raises(link.LinkError, match='the layout allows'):
      syncer.on_received(message)
