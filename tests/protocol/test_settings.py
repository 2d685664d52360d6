"""The schedule against its definition, and settings that do not start.

Each test opens with the sentence that it checks and its source.
"""

import pytest

from diloco_jax.protocol import schedule
from tests.protocol import transcript


def test_schedule_handles_each_fragment_once_per_period():
  # Paper section 4: p is the fragment with (t - t_p) mod H == 0; P = H: p = (t - 1) mod P.
  for period in range(1, 9):
    for fragments in range(1, period + 1):
      plan = schedule.Schedule(
        transcript.protocol_config(
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


@pytest.mark.parametrize(
  'field, value, words',
  [
    ('quorum', 3, 'quorum is 3, it must be between 1 and 2'),
    ('fragments', 5, 'fragments is 5, it must be between 1 and 4'),
    ('overlap', 4, 'overlap is 4, it must be between 0 and 3'),
    ('max_lag', 4, 'max_lag is 4, it must be between 0 and 3'),
    ('grace_permille', 1000, 'grace_permille is 1000'),
    ('total_steps', 0, 'total_steps is 0'),
  ],
)
def test_impossible_configs_do_not_start(field: str, value: int, words: str):
  # Style section 4: "Make wrong configurations impossible to start", both values and the remedy.
  settings = {
    'learners': 2,
    'fragments': 2,
    'period': 4,
    'overlap': 1,
    'quorum': 1,
    'total_steps': 8,
  }
  with pytest.raises(ValueError, match=words):
    transcript.protocol_config(**{**settings, field: value})
