"""Where the CPU time of an outer round goes: outer_round.py's four learners and syncer, by stage.

    python scripts/benchmarks/stages.py [--quick] [--json=FILE]    # three minutes

CPU time and wall time in ms for each round, of the syncer and of one learner (their mean), with
int8 and with float32 both ways. A stage counts what its own threads use, without the stages that it
calls. While a learner waits for XLA it does nothing else: there the CPU time of all
threads of the process counts. `rest` is what remains of the CPU time of the process:
gRPC's threads, the copies that they make, the kernel, and the machine's turns.

outer_round.py starts this file, with its own flags, for each learner, and for `diloco syncer`; each
process writes its stages to a file.
"""

import collections
import importlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.benchmarks import measured, outer_round

CODECS = ('int8', 'float32')
FOLDER = 'STAGES'  # the environment variable that says where the processes write
STAGES = {  # name: function, or method, of module; 'waits': its result is computed by XLA
  'encode': ('learner.on_device', 'Exchange', 'encode', 'waits'),
  'screen': ('syncer.global_model', 'Theta', 'lengths', ''),
  'merge': ('syncer.outer_step', 'Tiles', 'sums', ''),
  'optimizer, delta': ('syncer.outer_step', 'Tiles', 'merge', ''),
  'log: hash, write': ('storage.wal', 'Wal', 'append', ''),
  'log: fsync': ('storage.wal', 'Wal', 'commit', ''),
  'checksum to announce': ('transport.payloads', '', 'keep', ''),
  'serialise': ('transport.chunks', '', 'split', 'frames'),
  'receive: copy': ('transport.chunks', 'Assembler', 'add', ''),
  'adopt': ('learner.on_device', 'Exchange', 'adopt', 'waits'),
}
NAMES = (*STAGES, 'checksum', 'rest')
INNER_STEP = 'inner step'


class Clock:
  """The exclusive times of stages, in ns: `taken[name]` is [CPU, wall]."""

  def __init__(self):
    self._rounds, self._start = 0, ''
    self.used = collections.defaultdict(lambda: [0, 0])
    self._open, self._lock = threading.local(), threading.Lock()

  def measure(self, name: str, work: Callable[[], Any], waits: bool = False) -> Any:
    stack = self._open.__dict__.setdefault('stack', [])
    stack.append([0, 0])
    clock_ns = time.process_time_ns if waits else time.thread_time_ns
    cpu_ns, wall_ns = clock_ns(), time.perf_counter_ns()
    try:
      return work()
    finally:
      wall_ns = time.perf_counter_ns() - wall_ns
      cpu_ns = clock_ns() - cpu_ns
      inner_cpu_ns, inner_wall_ns = stack.pop()
      if stack:
        stack[-1][0] += cpu_ns
        stack[-1][1] += wall_ns
      self.add(name, cpu_ns - inner_cpu_ns, wall_ns - inner_wall_ns)

  def add(self, name: str, cpu_ns: int, wall_ns: int) -> None:
    with self._lock:
      self.used[name][0] += cpu_ns
      self.used[name][1] += wall_ns

  def round(self, path: str) -> None:
    """A round begins; writes what all since the round WARM have taken, with the process's CPU."""
    now = json.dumps({'rounds': self._rounds, 'process': time.process_time_ns(), **self.used})
    if self._rounds == outer_round.WARM:
      self._start = now
    elif self._start:
      pathlib.Path(path).write_text(f'[{self._start}, {now}]', 'utf-8')
    self._rounds += 1


def install(clock: Clock) -> None:
  """Measures the stages of this process."""
  for name, place in STAGES.items():
    _wrap(clock, name, *place)
  _wrap_checksums(clock)
  _wrap_tiles(clock)


def _wrap(clock: Clock, name: str, module: str, class_: str, attribute: str, how: str) -> None:
  import jax

  owner = importlib.import_module(f'diloco_jax.{module}')
  owner = getattr(owner, class_) if class_ else owner
  call = getattr(owner, attribute)

  def measured_call(*args, **named):
    return clock.measure(name, lambda: call(*args, **named))

  def waiting_call(*args, **named):
    work = lambda: jax.block_until_ready(call(*args, **named))
    return clock.measure(name, work, waits=True)

  def frames(*args, **named) -> Iterator[bytes]:
    made_frames = call(*args, **named)
    while (frame := clock.measure(name, lambda: next(made_frames, None))) is not None:
      yield frame

  how_to = {'waits': waiting_call, 'frames': frames, '': measured_call}
  setattr(owner, attribute, how_to[how])


def _wrap_checksums(clock: Clock) -> None:
  from diloco_jax.transport import chunks

  class Checksums:
    @staticmethod
    def crc32(data: Any, before: int = 0) -> int:
      return clock.measure('checksum', lambda: ISAL.crc32(data, before))

  ISAL, chunks.isal_zlib = chunks.isal_zlib, Checksums


def _wrap_tiles(clock: Clock) -> None:
  """What the threads of `outer_step` use belongs to the stage that waits for them."""
  from diloco_jax.syncer import outer_step

  each = outer_step.Tiles._each

  def counted(tiles: Any, starts: range, work: Callable[[int], Any]) -> list[Any]:
    caller, used = threading.get_ident(), []

    def timed(start: int) -> Any:
      cpu_ns = time.thread_time_ns()
      result = work(start)
      if threading.get_ident() != caller:
        used.append(time.thread_time_ns() - cpu_ns)
      return result

    results = each(tiles, starts, timed)
    clock._open.stack[-1][0] -= sum(used)  # `measure` subtracts what is inner
    return results

  outer_step.Tiles._each = counted


def learner(index: int) -> Callable:
  """The inner step of a learner of outer_round.py, which begins a round, and costs little."""
  import jax

  clock, path = Clock(), f'{os.environ[FOLDER]}/l{index}.json'
  install(clock)
  step = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + 1e-3, params))

  def counted(params: Any, _: int) -> Any:
    clock.round(path)
    return clock.measure(INNER_STEP, lambda: jax.block_until_ready(step(params)), waits=True)

  return counted


def _syncer() -> None:
  from diloco_jax.syncer import work as syncer_work

  clock, merge = Clock(), syncer_work.SyncerWork._merge
  path = f'{os.environ[FOLDER]}/syncer.json'
  install(clock)

  def counted(*args) -> None:
    clock.round(path)
    merge(*args)

  syncer_work.SyncerWork._merge = counted
  from diloco_jax import __main__

  __main__.main()


def _figures(path: pathlib.Path) -> dict[str, list[float]]:
  """CPU and wall time of each stage in ms for each round."""
  start, end = json.loads(path.read_text('utf-8'))
  rounds = end.pop('rounds') - start.pop('rounds')
  process = (end.pop('process') - start.pop('process')) / rounds / 1e6
  nothing = [0, 0]
  figures = {
    name: [(b - a) / rounds / 1e6 for a, b in zip(start.get(name, nothing), times)]
    for name, times in end.items()
  }
  figures['rest'] = [process - sum(cpu for cpu, _ in figures.values()), 0.0]
  return figures


def main() -> None:
  flags = measured.flags(__doc__)
  rounds = 4 if flags.quick else 20
  figures: dict[str, Any] = {}
  for codec in CODECS:
    with tempfile.TemporaryDirectory() as folder:
      os.environ[FOLDER] = folder
      seconds = outer_round.turn('ours', codec, rounds, program=__file__)
      of = {name.stem: _figures(name) for name in pathlib.Path(folder).iterdir()}
    syncer = of.pop('syncer')
    mean = lambda name, which: statistics.fmean(row.get(name, [0, 0])[which] for row in of.values())
    figures[codec] = {
      'seconds': measured.spread(seconds),
      'syncer': syncer,
      'learner': {name: [mean(name, 0), mean(name, 1)] for name in NAMES},
    }
    print(f'{codec}: a round {measured.text(figures[codec]["seconds"])} s', flush=True)
  print(f'{"ms for each round":22}' + ''.join(f'{codec:>32}' for codec in figures))
  print(f'{"":22}' + f'{"syncer":>16}{"a learner":>16}' * len(figures) + '   CPU, wall')
  for name in NAMES:
    cells = [figures[codec][who].get(name) for codec in figures for who in ('syncer', 'learner')]
    text = [f'{cell[0]:.1f}, {cell[1]:.1f}' if cell and any(cell) else '' for cell in cells]
    print(f'{name:22}' + ''.join(f'{cell:>16}' for cell in text))
  measured.write(flags.json, figures)


if __name__ == '__main__':
  if FOLDER not in os.environ:
    main()
  elif 'syncer' in sys.argv:
    _syncer()
  else:
    outer_round.inner_step = learner
    outer_round.main()
