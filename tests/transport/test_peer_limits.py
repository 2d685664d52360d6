"""What the other end of a session may send."""

import pytest

from diloco_jax.protocol import messages
from diloco_jax.transport import link, peer_limits
from tests.transport import samples

LIMITS = link.Limits(contribution_bytes=(10, 20), publish_bytes=(40, 80))


def member():
  of_learner = peer_limits.OfLearner(LIMITS)
  of_learner.received(samples.join()), of_learner.sent(messages.Offer(run='r0', incarnation=1))
  of_learner.received(samples.CONFIRM), of_learner.sent(samples.JOINED)
  return of_learner


def pull(sync, fragment=0):
  return messages.Pull(sync=sync, fragment=fragment, now=True)


def announced(size):
  return messages.Payload(size_bytes=size, crc32=0)


def contribution(sync, fragment=0, size=10):
  return samples.contribution(announced(size), sync=sync, fragment=fragment)


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
    peer_limits.OfLearner(LIMITS).received(first)


@pytest.mark.parametrize('message', [samples.join(), samples.CONFIRM])
def test_a_member_joins_once(message):
  with pytest.raises(link.LinkError, match=f'a second {type(message).__name__}'):
    member().received(message)


@pytest.mark.parametrize('size', [0, 7, 10])
def test_a_stranger_sends_no_payload(size):
  stranger = peer_limits.OfLearner(LIMITS)
  stranger.received(samples.join())
  stranger.sent(messages.Offer(run='r0', incarnation=1))
  assert stranger.stage == 1 and not stranger.member
  with pytest.raises(link.LinkError, match='not asked for'):
    stranger.begins(size)


def test_every_pull_allows_one_payload_of_its_fragment():
  learner = member()
  learner.sent(pull(1)), learner.sent(pull(1)), learner.sent(pull(2, fragment=1))
  learner.begins(20), learner.received(contribution(2, fragment=1, size=20))
  learner.received(contribution(1)), learner.begins(10)  # in either order
  for again in (10, 20):
    with pytest.raises(link.LinkError, match='not asked for'):
      learner.begins(again)
  with pytest.raises(link.LinkError, match='has not asked'):
    learner.received(contribution(1))


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
  learner.sent(pull(1))
  with pytest.raises(link.LinkError, match=why):
    learner.received(answer)


def test_a_declined_pull_allows_no_payload():
  learner = member()
  learner.sent(pull(1))
  learner.received(decline(1))
  with pytest.raises(link.LinkError, match='not asked for'):
    learner.begins(10)
  learner.sent(pull(2))
  learner.begins(10)
  with pytest.raises(link.LinkError, match='not asked for'):
    learner.received(decline(2))  # although its bytes have begun


def test_what_a_learner_owes_is_bounded():
  learner = member()
  for sync in range(peer_limits.MAX_ASKED + 5):
    learner.sent(pull(sync))
  with pytest.raises(link.LinkError, match='has not asked'):
    learner.received(contribution(4))
  learner.received(contribution(5))
  for _ in range(peer_limits.MAX_ASKED):
    learner.begins(10)
  with pytest.raises(link.LinkError, match='not asked for'):
    learner.begins(10)


def publish(fragment, size):
  return samples.publish(announced(size), fragment=fragment, base_version=None)


def test_a_learner_accepts_the_sizes_of_the_layout_only():
  of_syncer = peer_limits.OfSyncer(LIMITS)
  for message in (publish(0, 40), publish(1, 80), messages.Finish()):
    of_syncer.received(message)
  for message in (publish(0, 41), publish(2, 1)):
    with pytest.raises(link.LinkError, match='the layout allows'):
      of_syncer.received(message)
