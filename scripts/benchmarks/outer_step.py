"""The CPU time of an outer step on the syncer, by part, for each parameter.

    JAX_PLATFORMS=cpu python scripts/benchmarks/outer_step.py [--short] [--json=FILE]

The classes of a real syncer (syncer/work.py, syncer/commit.py) screen, merge and commit the outer
steps of one fragment: int8 both ways, RDA, Nesterov, the log on this disk. The figures are
CPU-nanoseconds of the whole process for each parameter, medians over rounds in which the sizes take
turns; the exponents are the growth from the least to the largest size. A copy of four bytes of
each parameter between warm arrays (memcpy) is measured in the same rounds. Full: about six minutes
on two idle cores.
"""

import argparse
import contextlib
import functools
import math
import pathlib
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
from diloco_jax.protocol import actions, events
from diloco_jax.report import records as records_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.syncer import commit, global_model
from diloco_jax.syncer import work as syncer_work
from diloco_jax.transport import payloads as payloads_lib
from scripts.benchmarks import measured

WIDTH = 1024  # of the square matrices of which the model is made
MILLION = WIDTH * WIDTH
PARTS = ('screen', 'merge', 'log', 'rest')


class Rig:
  """The work of a syncer without its machine and its transport, for a model of one fragment."""

  def __init__(self, millions: int, folder: pathlib.Path):
    config = own_loop.get_config()
    sync = config.sync
    sync.fragments, sync.period, sync.overlap = 1, 2, 1
    config.validate()
    shapes = {
      f'w{k:03}': jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for k in range(millions)
    }
    init = lambda: {name: jnp.zeros(one.shape) for name, one in shapes.items()}
    labels = dict.fromkeys(shapes, 'body')
    assembled = build.assemble_own_loop(config, init, shapes, labels, {})
    self.parameters = assembled.parameters
    self._codec = jax.jit(assembled.codec_up.encode)
    self._folder = files_lib.Files(folder)
    log = commit.CommitLog(self._folder, assembled.agreement, print)
    theta = global_model.Theta(assembled)
    log.recover(theta, {})
    self._store = payloads_lib.PayloadStore()
    self._posted: list[events.Event] = []
    records = records_lib.Recorder(folder, 'syncer')
    self._work = syncer_work.SyncerWork(
      assembled, theta, self._posted.append, print, self._store, records, None, log, None, folder
    )
    self._spent: Counter[str] = Counter()
    self._log = log
    for name, owner, method in (
      ('screen', theta, 'screen'),
      ('merge', theta, 'merge'),
      ('log', log, 'write'),
    ):
      setattr(owner, method, self._timed(name, getattr(owner, method)))
    self._theta, self._payloads = theta, []

  def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **named: Any) -> Any:
      began = time.process_time()
      try:
        return call(*args, **named)
      finally:
        self._spent[name] += time.process_time() - began

    return timed

  def outer_step(self, participants: int) -> dict[str, float]:
    """Carries out one outer step; returns CPU-ns for each parameter, by part, and its seconds."""
    while len(self._payloads) < participants:
      draw = np.random.default_rng(len(self._payloads))
      values = draw.standard_normal(self.parameters, np.float32) * 1e-3
      self._payloads.append(memoryview(np.asarray(self._codec(values)[0])))
    sync = self._theta.versions[0] + 1
    merge = actions.Merge(
      sync=sync,
      fragment=0,
      version=sync,
      participants=tuple(
        actions.Participant(
          learner=f'l{m:03}',
          incarnation=1,
          payload_id=self._store.put(payload),
          tokens=1000 + m,
          steps=8,
        )
        for m, payload in enumerate(self._payloads[:participants])
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
    self._log.compact([self._log.position] * 2)
    found = {name: 1e9 * spent / self.parameters for name, spent in self._spent.items()}
    total = 1e9 * cpu_s / self.parameters
    return {**found, 'rest': total - sum(found.values()), 'all': total, 'seconds': seconds}

  def memcpy(self) -> float:
    """CPU-ns for each parameter of a copy between warm arrays."""
    source, target = np.ones(self.parameters, np.float32), np.ones(self.parameters, np.float32)
    began = time.process_time()
    np.copyto(target, source)
    return 1e9 * (time.process_time() - began) / self.parameters


@contextlib.contextmanager
def rigs(sizes: set[int]) -> Iterator[dict[int, Rig]]:
  with tempfile.TemporaryDirectory() as folder:
    yield {size: Rig(size, pathlib.Path(folder) / str(size)) for size in sorted(sizes)}


def exponent(sizes: list[int], times: list[float]) -> float:
  """Of the growth of the times with the sizes, from the first to the last."""
  return math.log(times[-1] / times[0]) / math.log(sizes[-1] / sizes[0])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--short', action='store_true', help='small sizes, few rounds: a minute')
  parser.add_argument('--json', default='', help='a file for the figures')
  flags = parser.parse_args()
  learners, millions, rounds = [4, 8, 16, 32, 64], [1, 4, 16, 64], 5
  at, of = 16, 8  # the size at which M grows, and the M at which the size grows
  if flags.short:
    learners, millions, rounds, at = [4, 8, 16], [1, 4, 16], 3, 4
  cells = [(m, at) for m in learners] + [(of, size) for size in millions if size != at]
  taken: dict[tuple[int, int], list[dict[str, float]]] = {cell: [] for cell in cells}
  copies = []
  with rigs({size for _, size in cells}) as made:
    for m, size in cells:
      made[size].outer_step(m)  # compiles, and touches the pages
    for _ in range(rounds):
      for m, size in cells:
        taken[m, size].append(made[size].outer_step(m))
      copies.append(made[at].memcpy())
  copy = measured.spread(copies)['median']
  found = {
    cell: {name: measured.spread([one[name] for one in runs]) for name in runs[0]}
    for cell, runs in taken.items()
  }
  print(f'memcpy of 4 bytes: {copy:.2f} CPU-ns for each parameter')
  print('  M  parameters ' + ''.join(f'{name:>8}' for name in (*PARTS, 'all')) + '  spread of all')
  for (m, size), one in found.items():
    row = ''.join(f'{one[name]["median"]:8.1f}' for name in (*PARTS, 'all'))
    seconds, all_ = one['seconds']['median'], one['all']
    print(
      f'{m:3} {size:9} Mi {row}  {all_["least"]:.1f} to {all_["greatest"]:.1f}, {seconds:.3f} s, '
      f'{all_["median"] / copy:.0f} times memcpy'
    )
  cost = lambda cell: found[cell]['all']['median'] * cell[1]
  in_m = exponent(learners, [cost((m, at)) for m in learners])
  in_n = exponent(millions, [cost((of, size)) for size in millions])
  print(f'exponent in M {in_m:.2f}, in parameters {in_n:.2f}')
  measured.write(
    flags.json,
    {
      'memcpy_ns': measured.spread(copies),
      'cells': [{'learners': m, 'mi': size, **one} for (m, size), one in found.items()],
      'exponent_in_learners': in_m,
      'exponent_in_parameters': in_n,
    },
  )


if __name__ == '__main__':
  main()
