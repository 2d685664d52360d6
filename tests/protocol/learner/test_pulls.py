"""When a learner answers a pull: where it is due, or at once if the sync has opened."""

import pytest

from diloco_jax.protocol import messages
from diloco_jax.protocol.learner import pulls as pulls_lib
from tests.protocol import transcript


def pulls(**settings) -> pulls_lib.Pulls:
  return pulls_lib.Pulls(
    transcript.make_config(
      learners=2, fragments=2, period=6, overlap=2, quorum=1, total_steps=20, **settings
    )
  )


def pull(sync: int, fragment: int = 0, now: bool = False) -> messages.Pull:
  return messages.Pull(sync=sync, fragment=fragment, now=now)


@pytest.mark.parametrize(
  'settings, sync, given_at',
  [
    ({'ahead': 0}, 6, 6),
    ({'ahead': 1}, 6, 5),
    ({'ahead': 2}, 6, 4),
    ({'ahead': 2, 'max_lag': 1}, 6, 6),  # in lock step at its sync
    ({}, 24, 20),  # a closing one after the last step
  ],
)
def test_an_announced_sync_is_answered_where_it_is_due(settings, sync, given_at):
  waiting = pulls(**settings)
  waiting.add(pull(sync))
  for clock in range(given_at):
    assert not waiting.due(clock, ends=False)
  assert waiting.due(given_at, ends=False) == [(0, sync)]


def test_an_open_sync_is_answered_at_the_next_boundary():
  waiting = pulls()
  waiting.add(pull(6))
  waiting.add(pull(6, now=True))
  assert waiting.due(0, ends=False) == [(0, 6)]
  waiting.add(pull(12))
  assert not waiting.due(0, ends=False), 'the next sync of the fragment has not opened'


def test_a_learner_that_makes_no_more_steps_answers_all():
  waiting = pulls()
  waiting.add(pull(6))
  waiting.add(pull(8, fragment=1))
  assert waiting.due(0, ends=True) == [(0, 6), (1, 8)]


def test_a_repeated_pull_is_not_answered_again():
  waiting = pulls()
  waiting.add(pull(6))
  waiting.answered(0)
  waiting.add(pull(6))
  waiting.add(pull(6, now=True))
  assert not waiting.due(9, ends=True)
  waiting.forget()  # on another session the syncer asks anew
  waiting.add(pull(6))
  assert waiting.due(9, ends=False) == [(0, 6)]


def test_the_end_of_a_sync_ends_its_pull_and_no_later_one():
  waiting = pulls()
  waiting.add(pull(6, now=True))
  waiting.ended(0, upto=5)
  assert waiting.due(0, ends=False)
  waiting.ended(0, upto=6)
  assert not waiting.due(9, ends=True)
