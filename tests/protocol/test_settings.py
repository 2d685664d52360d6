"""The schedule against its definition, in the words of the paper. Settings: tests/config."""

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
