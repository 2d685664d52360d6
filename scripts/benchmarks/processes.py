"""Processes of the command `diloco` for benchmarks: each on its own cores, its threads' CPU time.

`processes.py CORES TIMES COMMAND --flag ...`: `diloco COMMAND --flag ...` on some cores (0 or 0,1),
with threads that have their Python names in /proc. A learner writes to the file TIMES, if it is not
'', how long each encoding, each adoption and each dispatch of an inner step kept its step thread,
and the CPU time of that thread, in seconds.
"""

import atexit
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from diloco_jax.launch import local_run
from diloco_jax.learner import on_device
from diloco_jax.report import records as records_lib
from diloco_jax.train import island as island_lib

DEADLINE_S = 1200
POLL_S = 0.25
TIMED = (
  (on_device.Exchange, 'encode'),
  (on_device.Exchange, 'adopt'),
  (island_lib.Island, 'dispatch'),
)
STEP, XLA = 'step thread', 'tf_XLAEigen'  # the threads of an inner step


class Sample(NamedTuple):
  """The threads of a process at a moment: CPU time and time without a core, in ns, by name."""

  t_ns: int
  cpu_ns: Counter[str]
  waits_ns: Counter[str]


def environment(devices: int = 1) -> dict[str, str]:
  """The environment of a process, on emulated devices unless JAX_PLATFORMS names others."""
  return {'JAX_PLATFORMS': 'cpu'} | local_run.environment(devices)


def start(
  cores: int | str, words: Sequence[str], devices: int = 1, times: pathlib.Path | str = ''
) -> subprocess.Popen:
  """Starts `diloco *words` on a core, or on several ('0,1'); with so many emulated
  devices."""
  return subprocess.Popen(
    [sys.executable, __file__, str(cores), str(times), *words],
    cwd=ROOT,
    env=environment(devices),
    stdout=subprocess.DEVNULL,
  )


def sample(pid: int) -> Sample:
  """Reads the CPU time of each thread from /proc."""
  cpu_ns, waits_ns = Counter(), Counter()
  process = pathlib.Path(f'/proc/{pid}')
  own = (process / 'comm').read_text('utf-8').strip()
  for task in (process / 'task').iterdir():
    try:
      name = (task / 'comm').read_text('utf-8').strip()
      ran_ns, waited_ns, _ = map(int, (task / 'schedstat').read_text('utf-8').split())
    except OSError:
      continue  # the thread has ended
    if name == own:  # also one of XLA's, which runs a step whose arguments are not ready yet
      name = STEP
    cpu_ns[name] += ran_ns
    waits_ns[name] += waited_ns
  return Sample(time.monotonic_ns(), cpu_ns, waits_ns)


def watch(process: subprocess.Popen) -> list[Sample]:
  """Samples a process until it ends; raises RuntimeError if it fails."""
  samples, deadline_s = [], time.monotonic() + DEADLINE_S
  while process.poll() is None:
    try:
      samples.append(sample(process.pid))
    except OSError:
      pass  # it has just ended
    if time.monotonic() > deadline_s:
      raise RuntimeError(f'a process has not ended within {DEADLINE_S} s')
    time.sleep(POLL_S)
  if process.returncode:
    raise RuntimeError(f'a process ended with {process.returncode}')
  return samples


def between(samples: Sequence[Sample], begin_ns: int, end_ns: int) -> Sample:
  """The use of the threads between two moments; `t_ns` is the time between the two samples."""
  inside = [sample for sample in samples if begin_ns <= sample.t_ns <= end_ns]
  first, last = inside[0], inside[-1]
  return Sample(last.t_ns - first.t_ns, last.cpu_ns - first.cpu_ns, last.waits_ns - first.waits_ns)


def facts(workdir: str | os.PathLike, process: str, name: str) -> list[dict]:
  """The facts of one kind in the records of a process."""
  path = pathlib.Path(workdir) / records_lib.RECORDS / f'{process}.jsonl'
  return [fact for fact in records_lib.Tail(path).read() if fact['name'] == name]


def _name_threads() -> None:
  started = threading.Thread.start

  def start_named(thread: threading.Thread) -> None:
    started(thread)
    try:
      pathlib.Path(f'/proc/self/task/{thread.native_id}/comm').write_text(thread.name[:15], 'utf-8')
    except OSError:
      pass  # it has already ended

  threading.Thread.start = start_named


def _time_calls(path: str) -> None:
  times = {name: [] for _, name in TIMED}
  for owner, name in TIMED:
    setattr(owner, name, _time(getattr(owner, name), times[name]))
  atexit.register(lambda: pathlib.Path(path).write_text(json.dumps(times), 'utf-8'))


def _time(call, times: list[tuple[float, float]]):
  def timed(*args, **named):
    began_s, cpu_s = time.perf_counter(), time.thread_time()
    result = call(*args, **named)
    times.append((time.perf_counter() - began_s, time.thread_time() - cpu_s))
    return result

  return timed


def main() -> None:
  cores, times, *words = sys.argv[1:]
  os.sched_setaffinity(0, set(map(int, cores.split(','))))
  _name_threads()
  if times:
    _time_calls(times)
  sys.argv = ['diloco', *words]
  from diloco_jax import __main__

  __main__.main()


if __name__ == '__main__':
  main()
