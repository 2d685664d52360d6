"""The schedule against its definition, in the words of the paper. Settings: tests/config."""

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import schedule as schedule_lib
from tests.protocol import transcript


def test_schedule_handles_each_fragment_once_per_period():
  # Paper section 4: p is the fragment with (t - t_p) mod H == 0; P = H: p = (t - 1) mod P.
  for period in range(1, 9):
    for fragments in range(1, period + 1):
      plan = schedule_lib.Schedule(
        transcript.make_config(
          learners=1, fragments=fragments, period=period, overlap=0, quorum=1, total_steps=30
        )
      )
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


def test_a_choice_is_written_as_a_word():
  adopt = config_lib.TABLE['adopt']
  for value, word in enumerate(config_lib.ADOPT):
    assert (adopt.written(value), adopt.read(word)) == (word, value)
  config = config_lib.ProtocolConfig()
  assert config.rebases and adopt.written(config.adopt) == 'rebase'
  assert not config_lib.ProtocolConfig(adopt=adopt.read('overwrite')).rebases
  for wrong in ('rebases', 7, -1):
    words = 'sync.adopt is .*; use one of: overwrite, rebase'
    with pytest.raises(ValueError, match=words):
      config_lib.ProtocolConfig(adopt=adopt.read(wrong))


def test_in_lock_step_no_fragment_is_given_ahead():
  assert config_lib.ProtocolConfig(ahead=2, overlap=3).lead == 5
  locked = config_lib.ProtocolConfig(ahead=2, overlap=3, max_lag=1)
  assert (locked.steps_ahead, locked.lead) == (0, 3)


def test_a_closing_sync_needs_no_quorum():
  config = config_lib.ProtocolConfig(learners=3, quorum=2, total_steps=40)
  assert [config.closing(sync) for sync in (40, 41)] == [False, True]
  assert [config.needed(sync) for sync in (40, 41)] == [2, 0]
