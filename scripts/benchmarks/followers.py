"""What followers cost a run: steps/s and outer steps/s with 20 of them, against without.

    python scripts/benchmarks/followers.py [--turns=3] [--quick] [--json=FILE]    # 20 minutes

The demo's four learners and their syncer, on all cores, with and without followers in turns;
--quick: a smaller model, of which outer steps are far more frequent than in any real run. Ten
followers read what they are sent and drop it; five never read; five are killed after ten outer
steps. They are connections in three processes of the lowest priority, which begin before the first
step: what evaluating a model costs is not counted, as followers are on other machines. Required: at
least 0.97 of the steps/s of the learners and of the outer steps/s without followers. The CPU time
of the syncer for each outer step tells more on a machine that others use, too.
"""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(
  0, os.environ.get('BENCHMARKED') or str(pathlib.Path(__file__).resolve().parents[2])
)

import grpc
import psutil

from diloco_jax.api import load_params
from diloco_jax.nodes import dial
from diloco_jax.syncer import followers
from diloco_jax.transport import addresses, grpc_client, grpc_session, listen
from scripts.benchmarks import learner_overhead, measured, processes

KINDS = {'reads': 10, 'never_reads': 5, 'killed': 5}
LEARNERS, KILLED_AFTER = 4, 10  # outer steps
ALL = ','.join(map(str, learner_overhead.CORES))
READY = 'ready'


def follow(kind: str, workdir: str) -> None:
  """Some followers of a run, until this process is killed."""
  os.nice(19)
  address = dial.resolver(f'file:{workdir}/syncer/address', addresses.LOCAL)
  layout = load_params.assemble(pathlib.Path(workdir)).layout
  request = followers.request(layout.digest(), [followers.NOTHING] * layout.num_fragments)

  def call() -> None:
    while True:
      with contextlib.suppress(grpc.RpcError, OSError):
        with listen.dial(address(), addresses.LOCAL, grpc_client.OPTIONS) as channel:
          method = f'/{grpc_session.SERVICE}/{grpc_session.FOLLOW}'
          frames = channel.unary_stream(method)(request)
          frames.initial_metadata()
          for _ in frames if kind != 'never_reads' else ():
            pass
          while kind == 'never_reads' and frames.is_active():
            time.sleep(1.0)
      time.sleep(1.0)

  for _ in range(KINDS[kind]):
    threading.Thread(target=call, daemon=True).start()
  print(READY, flush=True)
  signal.pause()


def _begin(kind: str, workdir: str) -> subprocess.Popen:
  words = [sys.executable, __file__, f'--follow={kind}', f'--workdir={workdir}']
  process = subprocess.Popen(
    words, cwd=processes.ROOT, env=processes.environment(), stdout=subprocess.PIPE, encoding='utf-8'
  )
  if process.stdout.readline().strip() != READY:
    raise RuntimeError(f'the followers of {workdir} have not begun')
  return process


def run(followed: bool, config: str, steps: int) -> dict[str, float]:
  with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as cleanup:

    def start(*words: str) -> subprocess.Popen:
      overrides = (f'--config.{one}' for one in learner_overhead.QUIET)
      common = [f'--config=stdlib_lm:{config}', f'--workdir={workdir}', *overrides]
      common += [f'--config.train.steps={steps}', f'--config.sync.learners={LEARNERS}']
      return ended(processes.start(ALL, [words[0], *common, *words[1:]], 2))

    def ended(process: subprocess.Popen) -> subprocess.Popen:
      cleanup.callback(process.wait)
      cleanup.callback(process.kill)
      return process

    nodes = [start('syncer')]
    spent = _watch(nodes[0].pid)
    _until(lambda: pathlib.Path(workdir, 'syncer', 'address').exists(), nodes)
    kinds = {kind: ended(_begin(kind, workdir)) for kind in KINDS if followed}
    where = f'--syncer=file:{workdir}/syncer/address'
    nodes += [start('learner', f'--learner=l{k}', where) for k in range(LEARNERS)]
    if followed:
      merged = lambda: len(_times(workdir, 'syncer', 'outer'))
      _until(lambda: merged() >= KILLED_AFTER or nodes[0].poll() == 0, nodes)
      kinds['killed'].kill()
    if codes := [code for one in nodes if (code := one.wait(processes.DEADLINE_S))]:
      raise RuntimeError(f'processes of the demo ended with {codes}')
    names = [f'l{k}' for k in range(LEARNERS)]
    told = [row['count'] for row in processes.facts(workdir, 'syncer', 'followers')]
    return {
      'steps_per_s': _rate(
        sorted(end_ns for name in names for end_ns in _times(workdir, name, 'step'))
      ),
      'outer_steps_per_s': _rate(_times(workdir, 'syncer', 'outer')),
      'syncer_cpu_ms': _cpu_ms(spent, _times(workdir, 'syncer', 'outer')),
      'followers': max(told, default=0),
    }


def _until(condition, nodes: list[subprocess.Popen]) -> None:
  deadline_s = time.monotonic() + processes.DEADLINE_S
  while not condition():
    if time.monotonic() > deadline_s or any(one.poll() for one in nodes):
      raise RuntimeError('a process of the demo has ended, or hangs')
    time.sleep(processes.POLL_S)


def _watch(pid: int) -> list[tuple[int, float]]:
  """(monotonic ns, CPU s so far) of a process, which a thread adds until it ends."""
  found, process = [], psutil.Process(pid)

  def look() -> None:
    with contextlib.suppress(psutil.Error):
      while process.is_running():
        times = process.cpu_times()
        found.append((time.monotonic_ns(), times.user + times.system))
        time.sleep(processes.POLL_S)

  threading.Thread(target=look, daemon=True).start()
  return found


def _cpu_ms(spent: list[tuple[int, float]], ends_ns: list[int]) -> float:
  """CPU time for each outer step, of the last three quarters."""
  ends_ns = ends_ns[len(ends_ns) // 4 :]
  at = lambda end_ns: min(spent, key=lambda one: abs(one[0] - end_ns))[1]
  return 1e3 * (at(ends_ns[-1]) - at(ends_ns[0])) / (len(ends_ns) - 1)


def _times(workdir: str, process: str, name: str) -> list[int]:
  with contextlib.suppress(FileNotFoundError):
    return [row['t_ns'] for row in processes.facts(workdir, process, name)]
  return []


def _rate(ends_ns: list[int]) -> float:
  """Of the last three quarters: at the beginning programs are compiled."""
  ends_ns = ends_ns[len(ends_ns) // 4 :]
  return 1e9 * (len(ends_ns) - 1) / (ends_ns[-1] - ends_ns[0])


def main() -> None:
  parser = measured.parser(__doc__)
  parser.add_argument('--turns', type=int, default=3, help='of each run')
  parser.add_argument('--follow', default='', choices=['', *KINDS], help='of the script itself')
  parser.add_argument('--workdir', default='', help='of the script itself')
  flags = parser.parse_args()
  if flags.follow:
    follow(flags.follow, flags.workdir)
  size, turns = (('tiny', 300), 1) if flags.quick else (('cpu', 240), flags.turns)
  taken = {'without': [], 'with': []}
  for _ in range(turns):
    for way, runs in taken.items():
      runs.append(run(way == 'with', *size))
      print(f'{way}: {json.dumps(runs[-1])}', flush=True)
  ratios = {
    figure: measured.spread([b[figure] / a[figure] for a, b in zip(*taken.values())])
    for figure in ('steps_per_s', 'outer_steps_per_s', 'syncer_cpu_ms')
  }
  for figure, ratio in ratios.items():
    print(f'{figure} with followers, against without: {measured.text(ratio)}')
  least = statistics.median(one['followers'] for one in taken['with'])
  measured.write(flags.json, {'ratios': ratios, 'followers': least, 'runs': taken})


if __name__ == '__main__':
  main()
