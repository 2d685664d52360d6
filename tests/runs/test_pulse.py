"""A stopped process has paused; a process that waits for a CPU has not."""

import signal
import subprocess
import sys
import time

from tests.runs.lib import pulse as pulse_lib

MS = 1_000_000
STEPS = """
import time
while True:
  time.sleep(0.01)
  print(time.monotonic_ns(), flush=True)
"""


def test_a_stopped_process_has_paused():
  process = subprocess.Popen([sys.executable, '-c', STEPS], stdout=subprocess.PIPE, text=True)
  pulse, steps = pulse_lib.Pulse(), []

  def look(count: int) -> None:
    for _ in range(count):
      steps.append(int(process.stdout.readline()))
      pulse.sample(process.pid)

  with process:
    look(50)
    process.send_signal(signal.SIGSTOP)
    ended_s = time.monotonic() + 1.5
    while time.monotonic() < ended_s:
      pulse.sample(process.pid)
    process.send_signal(signal.SIGCONT)
    look(10)
    process.kill()
    process.stdout.read()
  gap = pulse.longest(process.pid, steps)
  assert gap.pause and gap.gap_ns > 1000 * MS, gap


def test_waiting_for_a_cpu_is_no_pause():
  pulse = pulse_lib.Pulse()
  pulse._times[1] = [0, 500 * MS, 1000 * MS]
  pulse._waited[1] = [0, 480 * MS, 900 * MS]
  steps = [0, 10 * MS, 20 * MS, 1000 * MS]
  gap = pulse.longest(1, steps)
  assert (gap.gap_ns, gap.wall_ns, gap.pause) == (80 * MS, 980 * MS, False)
  assert pulse_lib.Pulse().longest(1, steps).pause  # no sample of waiting
