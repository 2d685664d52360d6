"""The costs of one syncer as learners, parameters and fragments grow.

    JAX_PLATFORMS=cpu python scripts/benchmarks/scale.py [--quick] [--json=FILE]

**An outer step.** The classes of a real syncer (syncer/work.py, syncer/commit.py), without its
transport, screen, merge and commit the outer steps of one fragment: int8 both ways, RDA, Nesterov,
the log on this disk. The figures are CPU-nanoseconds of the whole process for each parameter,
medians over rounds in which the sizes take turns. A copy of four bytes of each parameter between
warm arrays (memcpy) is measured in the same rounds. The growth is given twice: as an exponent, the
slope through all sizes on logarithmic scales, and as a line a + b x, since a fixed cost a makes an
exponent smaller.

**Memory.** The most that a process with 24 fragments has had resident, in bytes for each parameter:
the slope between two sizes, with the payloads of M = 8 that it is given.

**Control.** CPU time of the syncer's machine for an inner step, M = 8, as P = H grows, in virtual
time: messages, decisions and the ledger, no arrays.

Full: about twenty minutes on two idle cores and 12 GiB.
"""

import contextlib
import functools
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build
from diloco_jax.configs import own_loop
from diloco_jax.process import syncer as syncer_process
from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as config_lib
from diloco_jax.report import records as records_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import outer_log
from diloco_jax.syncer import commit, global_model, stored
from diloco_jax.syncer import work as syncer_work
from diloco_jax.transport import payloads as payloads_lib
from diloco_jax.verification.sim import hardware, no_arrays
from diloco_jax.verification.sim import world as world_lib
from scripts.benchmarks import measured, processes

WIDTH = 1024  # of the square matrices of which the model is made
MILLION = WIDTH * WIDTH
OF = 8  # learners, where something else grows
FRAGMENTS = 24  # where memory is measured
DRAWN = 8  # payloads; further ones are copies of their bytes
CONTROL_STEPS = 200
PARTS = ('screen', 'merge', 'log', 'rest')


class Rig:
  """The work of a syncer without its machine and its transport; `store`: of its run."""

  def __init__(
    self,
    millions: int,
    folder: pathlib.Path,
    fragments: int = 1,
    store: stored.Stored | None = None,
  ):
    config = own_loop.get_config()
    sync = config.sync
    sync.fragments, sync.period, sync.overlap = fragments, max(2, fragments), 1
    config.validate()
    shapes = {
      f'w{k:03}': jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for k in range(millions)
    }
    init = lambda: {name: jnp.zeros(shape.shape) for name, shape in shapes.items()}
    labels = dict.fromkeys(shapes, 'body')
    assembled = build.assemble_own_loop(config, init, shapes, labels)
    self.parameters = assembled.parameters
    layout = assembled.layout
    self._sizes = [layout.size(p) for p in range(layout.num_fragments)]
    self._codec = jax.jit(assembled.codec_up.encode)
    self._folder = store.log_files if store else files_lib.Files(folder)
    log = commit.CommitLog(self._folder, assembled.agreement, print, store=store)
    theta = global_model.Theta(assembled)
    log.recover(theta, {})
    self._store = payloads_lib.PayloadStore()
    self._posted: list[events.Event] = []
    self._records = records_lib.Recorder(folder, 'syncer')
    self._work = syncer_work.SyncerWork(
      assembled, theta, self._posted.append, print, self._store, self._records, None, log, None
    )
    self._spent: Counter[str] = Counter()
    self._log = log
    for name, owner, method in (
      ('screen', theta, 'lengths'),
      ('merge', theta, 'merge'),
      ('log', log, 'write'),
    ):
      setattr(owner, method, self._time(name, getattr(owner, method)))
    self._theta, self._payloads = theta, {}

  def _time(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **named: Any) -> Any:
      began = time.process_time()
      try:
        return call(*args, **named)
      finally:
        self._spent[name] += time.process_time() - began

    return timed

  def _drawn(self, participants: int, fragment: int) -> list[memoryview]:
    """A payload of each participant; those of one fragment are drawn once."""
    payloads, size = self._payloads.setdefault(fragment, []), self._sizes[fragment]
    while len(payloads) < participants:
      if len(payloads) < DRAWN:
        draw = np.random.default_rng(len(payloads))
        values = draw.standard_normal(size, np.float32) * 1e-3
        payloads.append(memoryview(np.asarray(self._codec(values)[0])))
      else:
        payloads.append(memoryview(bytes(payloads[len(payloads) % DRAWN])))
    return payloads[:participants]

  def forget(self) -> None:
    self._payloads.clear()

  def outer_step(self, participants: int, fragment: int = 0) -> dict[str, float]:
    """Carries out one outer step; returns CPU-ns for each parameter, by part, and its seconds."""
    payloads = self._drawn(participants, fragment)
    version = self._theta.versions[fragment] + 1
    merge = actions.Merge(
      sync=sum(self._theta.versions) + 1,
      fragment=fragment,
      version=version,
      participants=tuple(
        actions.Participant(
          learner=f'l{m:03}',
          incarnation=1,
          payload_id=self._store.put(payload),
          tokens=1000 + m,
          steps=8,
        )
        for m, payload in enumerate(payloads)
      ),
      machine_state={},
    )
    self._spent.clear()
    began_s, began = time.perf_counter(), time.process_time()
    self._work._perform(merge)
    cpu_s, seconds = time.process_time() - began, time.perf_counter() - began_s
    done = self._posted.pop()
    assert not done.failed, done.failed
    self._store.drop(done.payload_id)
    outer_log.compact(self._log._wal, [self._log.position] * 2)
    parts = {name: 1e9 * spent / self.parameters for name, spent in self._spent.items()}
    total = 1e9 * cpu_s / self.parameters
    return {**parts, 'rest': total - sum(parts.values()), 'all': total, 'seconds': seconds}

  def close(self) -> None:
    self._records.close()

  def memcpy(self) -> float:
    """CPU-ns for each parameter of a copy between warm arrays."""
    source, target = np.ones(self.parameters, np.float32), np.ones(self.parameters, np.float32)
    began = time.process_time()
    np.copyto(target, source)
    return 1e9 * (time.process_time() - began) / self.parameters


@contextlib.contextmanager
def rigs(sizes: set[int]) -> Iterator[dict[int, Rig]]:
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    make = lambda size: contextlib.closing(Rig(size, pathlib.Path(folder) / str(size)))
    yield {size: stack.enter_context(make(size)) for size in sorted(sizes)}


def growth(sizes: list[int], times: list[float]) -> dict[str, float]:
  """Of times with sizes: the exponent, and the line fixed + slope * size, least squares."""
  exponent = np.polyfit(np.log(sizes), np.log(times), 1)[0]
  relative = np.reciprocal(times)  # so that each size counts alike
  slope, fixed = np.polyfit(sizes, times, 1, w=relative)
  return {'exponent': float(exponent), 'fixed': float(fixed), 'slope': float(slope)}


# --- Memory ---------------------------------------------------------------------------------------


def print_resident(millions: int) -> None:
  """Prints the most memory that this process has had resident after some outer steps, in bytes."""
  with tempfile.TemporaryDirectory() as folder:
    rig = Rig(millions, pathlib.Path(folder), FRAGMENTS)
    for fragment in range(FRAGMENTS):
      rig.outer_step(OF, fragment)
      rig.forget()
  status = pathlib.Path('/proc/self/status').read_text('utf-8')
  print(int(status.partition('VmHWM:')[2].split()[0]) << 10)  # ru_maxrss may be the parent's


def memory(sizes: list[int]) -> dict[str, float]:
  """Bytes for each parameter, of them the payloads of one fragment, and the limit."""
  most = []
  for millions in sizes:
    words = [sys.executable, __file__, 'resident', str(millions)]
    child = subprocess.run(words, env=processes.environment(), check=True, capture_output=True)
    most.append(int(child.stdout))
  bytes_ = (most[-1] - most[0]) / ((sizes[-1] - sizes[0]) * MILLION)
  fragment = 4 / FRAGMENTS
  return {'bytes': bytes_, 'payloads': OF * fragment / 4, 'limit': 16 + 2 * fragment}


# --- Control --------------------------------------------------------------------------------------


def control(fragments: int) -> float:
  """Microseconds of the syncer's machine for an inner step."""
  config = config_lib.ProtocolConfig(
    learners=OF, fragments=fragments, period=fragments, total_steps=10**6, save_steps=0
  )
  world = world_lib.World(config, values=no_arrays.equal(fragments))
  spent_ns, handle = 0, world.syncer.machine.handle

  def timed(now_ns: int, event: events.Event) -> list[actions.Action]:
    nonlocal spent_ns
    began_ns = time.process_time_ns()
    try:
      return handle(now_ns, event)
    finally:
      spent_ns += time.process_time_ns() - began_ns

  world.syncer.machine.handle = timed
  for which in range(OF):
    world.island(f'l{which}').step_ns = hardware.SECOND
    world.start(f'l{which}')
  world.run(2 * fragments * hardware.SECOND)
  spent_ns = 0
  world.run((2 * fragments + CONTROL_STEPS) * hardware.SECOND)
  return spent_ns / 1e3 / CONTROL_STEPS


# --- Turns ----------------------------------------------------------------------------------------


def main() -> None:
  flags = measured.flags(__doc__)
  learners, millions, rounds = [4, 8, 16, 32, 64, 256], [1, 4, 16, 64, 96], 5
  at = 16  # the size in Mi at which M grows; the size grows at M = 8
  held, fragments = [16, 64], [6, 24, 96, 384]
  if flags.quick:
    learners, millions, rounds, at = [4, 8, 16, 32, 64], [1, 4, 16], 3, 4
    fragments = [6, 24, 96]
  figures = outer_steps(learners, millions, rounds, at)
  figures['memory'] = used = memory(held)
  print(
    f'memory: {used["bytes"]:.1f} bytes for each parameter, of them {used["payloads"]:.1f} '
    f'payloads; the limit is {used["limit"]:.1f}'
  )
  spent = {size: [control(size) for _ in range(rounds)] for size in fragments}
  figures['control_us'] = {size: measured.spread(times) for size, times in spent.items()}
  for size, figure in figures['control_us'].items():
    print(
      f'control, P = H = {size:3}: {measured.text(figure)} us of CPU for an inner step, M = {OF}'
    )
  measured.write(flags.json, figures)


def outer_steps(learners: list[int], millions: list[int], rounds: int, at: int) -> dict[str, Any]:
  cells = [(m, at) for m in learners] + [(OF, size) for size in millions if size != at]
  times: dict[tuple[int, int], list[dict[str, float]]] = {cell: [] for cell in cells}
  copies = []
  with rigs({size for _, size in cells}) as rig_of:
    for m, size in cells:
      rig_of[size].outer_step(m)  # compiles, and touches the pages
    for _ in range(rounds):
      for m, size in cells:
        times[m, size].append(rig_of[size].outer_step(m))
      copies.append(rig_of[at].memcpy())
  copy = measured.spread(copies)['median']
  figures = {
    cell: {name: measured.spread([run[name] for run in runs]) for name in runs[0]}
    for cell, runs in times.items()
  }
  print(f'memcpy of 4 bytes: {copy:.2f} CPU-ns for each parameter')
  print('  M  parameters ' + ''.join(f'{name:>8}' for name in (*PARTS, 'all')) + '  spread of all')
  for (m, size), parts in figures.items():
    row = ''.join(f'{parts[name]["median"]:8.1f}' for name in (*PARTS, 'all'))
    seconds, all_ = parts['seconds']['median'], parts['all']
    print(
      f'{m:3} {size:9} Mi {row}  {all_["least"]:.1f} to {all_["greatest"]:.1f}, {seconds:.3f} s, '
      f'{all_["median"] / copy:.0f} times memcpy'
    )
  cost = lambda cell: figures[cell]['all']['median'] * cell[1] * MILLION / 1e6  # ms of CPU
  in_m = growth(learners, [cost((m, at)) for m in learners])
  in_n = growth(millions, [cost((OF, size)) for size in millions])
  for what, unit, line in (('M', 'learner', in_m), ('parameters', 'Mi', in_n)):
    print(
      f'growth in {what}: exponent {line["exponent"]:.2f}; {line["fixed"]:.2f} ms of CPU and '
      f'{line["slope"]:.3f} ms for each {unit}'
    )
  sys.stdout.flush()
  return {
    'memcpy_ns': measured.spread(copies),
    'cells': [{'learners': m, 'mi': size, **parts} for (m, size), parts in figures.items()],
    'in_learners': in_m,
    'in_parameters': in_n,
  }


if __name__ == '__main__':
  syncer_process.prepare()
  if sys.argv[1:2] == ['resident']:
    print_resident(int(sys.argv[2]))
  else:
    main()
