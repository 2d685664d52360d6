"""A process that waits for a CPU has not paused. test_syncer_kills.py stops one, which has."""

from tests.runs.lib import pulse as pulse_lib

MS = 1_000_000


def test_waiting_for_a_cpu_is_no_pause():
  pulse = pulse_lib.Pulse()
  pulse._times[1] = [0, 500 * MS, 1000 * MS]
  pulse._waited[1] = [0, 480 * MS, 900 * MS]
  steps = [0, 10 * MS, 20 * MS, 1000 * MS]
  gap = pulse.longest(1, steps)
  assert (gap.gap_ns, gap.wall_ns, gap.pause) == (80 * MS, 980 * MS, False)
  assert pulse_lib.Pulse().longest(1, steps).pause  # no sample of waiting
