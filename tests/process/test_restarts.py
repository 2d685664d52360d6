"""The pauses between the lives of a program."""

import random

from diloco_jax.process import restarts

SHORT_S, LONG_S = restarts.SHORT_S - 1, restarts.SHORT_S


def test_the_pause_grows_to_its_limit_and_is_drawn(monkeypatch):
  monkeypatch.setattr(restarts, 'MAX_SHORT_PROCESSES', 20)
  pauses = restarts.Restarts(random.Random(0))
  for n in range(11):
    longest = min(30.0, 0.5 * 2**n)
    assert longest / 2 <= pauses.pause_s(SHORT_S) <= longest


def test_a_long_life_or_an_end_on_purpose_begins_the_count_anew():
  pauses = restarts.Restarts(random.Random(0))
  for lived in (lambda: pauses.pause_s(LONG_S), pauses.forget_failures):
    for _ in range(restarts.MAX_SHORT_PROCESSES - 2):
      assert pauses.pause_s(SHORT_S) is not None
    lived()
  failed = [pauses.pause_s(SHORT_S) for _ in range(restarts.MAX_SHORT_PROCESSES - 1)]
  assert None not in failed
  assert pauses.pause_s(SHORT_S) is None
