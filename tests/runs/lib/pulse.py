"""Finds pauses of a learner, from its steps and the kernel's counts of waiting for a CPU.

The time between the ends of two steps is a pause if it is longer than 3 times the median and 100
ms. On a machine with too little CPU a process waits for its turn, which is no pause; the kernel
counts that waiting per thread (`run delay`, the second field of /proc/PID/task/TID/schedstat). In
the rest of a gap the process ran or slept: it was stopped, blocked, or waited for another process.
If the kernel does not count, all of a gap counts.
"""

import bisect
import collections
import pathlib
import statistics
import time
from typing import NamedTuple

MEDIANS, SLACK_NS = 3, 100_000_000


class Gap(NamedTuple):
  """The longest time between two steps of a process, without its waiting for a CPU."""

  gap_ns: int
  wall_ns: int  # with it
  at_ns: int  # when it began
  limit_ns: int  # longer than this is a pause

  @property
  def pause(self) -> bool:
    return self.gap_ns > self.limit_ns


class Pulse:
  """Samples of the time that the threads of processes have waited for a CPU."""

  def __init__(self):
    self._times: dict[int, list[int]] = collections.defaultdict(list)
    self._waited: dict[int, list[int]] = collections.defaultdict(list)  # since the first sample
    self._threads: dict[int, dict[str, int]] = {}

  def sample(self, pid: int) -> None:
    """Takes a sample of a process now."""
    now_ns, threads = time.monotonic_ns(), _waits(pid)
    if not threads:
      return
    before = self._threads.get(pid, threads)
    more = sum(max(0, waited - before.get(tid, 0)) for tid, waited in threads.items())
    if self._times[pid]:  # several threads may wait at once
      more = min(more, now_ns - self._times[pid][-1])
    self._times[pid].append(now_ns)
    self._waited[pid].append((self._waited[pid] or [0])[-1] + more)
    self._threads[pid] = {**before, **threads}

  def waited(self, pid: int, began_ns: int, ended_ns: int) -> int:
    """The time that its threads have waited together, between the samples around this time."""
    times, waited = self._times[pid], self._waited[pid]
    if not times:
      return 0
    first = max(bisect.bisect_right(times, began_ns) - 1, 0)
    last = min(bisect.bisect_left(times, ended_ns), len(times) - 1)
    return waited[last] - waited[first]

  def gaps(self, pid: int, steps_ns: list[int]) -> list[Gap]:
    """The gaps between the steps of a process, in order."""
    gaps = [(b - a, a) for a, b in zip(steps_ns, steps_ns[1:])]
    if not gaps:
      return []
    limit_ns = round(MEDIANS * statistics.median(gap for gap, _ in gaps)) + SLACK_NS
    return [
      Gap(max(0, gap - self.waited(pid, at, at + gap)), gap, at, limit_ns) for gap, at in gaps
    ]

  def longest(self, pid: int, steps_ns: list[int]) -> Gap:
    """The longest gap between the steps of a process."""
    return max(self.gaps(pid, steps_ns))


def _waits(pid: int) -> dict[str, int]:
  """Run delay of each thread in ns; empty if the process has ended or the kernel does not count."""
  waits = {}
  for path in pathlib.Path(f'/proc/{pid}/task').glob('*'):
    try:
      waits[path.name] = int((path / 'schedstat').read_text().split()[1])
    except (OSError, IndexError, ValueError):
      pass  # the thread has ended
  return waits
