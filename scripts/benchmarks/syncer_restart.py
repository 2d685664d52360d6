"""The time from a SIGKILL of the syncer to its first new outer step, by phases.

    python scripts/benchmarks/syncer_restart.py                       # the demo model, 5 kills
    python scripts/benchmarks/syncer_restart.py --variant=tiny --kills=11
    python scripts/benchmarks/syncer_restart.py --cold                # without a standby process

In a run of real processes under the supervisor, the benchmark sends SIGKILL to the syncer at random
moments under load, each time after a standby process is ready (launch/standby.py) and the syncer
has lived long enough not to count as a short process. Time 0 is its death. On a busy host the wall
times depend on the other load; `cpu` is the CPU time of the new process since it took over.
"""

import asyncio
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.proof.faults import conductor
from diloco_jax.report import records

_VARIANT = flags.DEFINE_string('variant', 'cpu', 'variant of the config stdlib_lm')
_KILLS = flags.DEFINE_integer('kills', 5, 'number of kills of the syncer', 1)
_COLD = flags.DEFINE_bool('cold', False, 'run without a standby process')
_OVERRIDES = (
  '--config.train.steps=1000000',
  '--config.train.log_every=1000',
  '--config.train.eval_every=100',
)
PATIENCE_S = 120.0  # per kill
PHASES = (
  'starting',
  'assembled',
  'listens',
  'restored',
  'recovered',
  'ready',
  'joined',
  'committed',
)


class Bench(conductor.Conductor):
  """Kills the syncer of a run repeatedly and keeps the phases of each of its processes."""

  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    config = stdlib_lm.get_config(_VARIANT.value)
    flag = f'--config=stdlib_lm:{_VARIANT.value}'
    super().__init__(workdir, recorder, config, (flag, *_OVERRIDES), standby=not _COLD.value)
    self.lives: list[dict[str, tuple[float, float | None]]] = []  # phase: wall s, cpu s

  async def carry_out(self) -> None:
    await self.until(lambda: self.count('syncer', 'outer') >= 10)
    for kill in range(1, _KILLS.value + 1):
      born_s = self.supervisor.child('syncer').started_s
      await self.until(lambda: time.monotonic() - born_s > supervisor_lib.SHORT_LIFE_S)
      await self.until(lambda: _COLD.value or self.stood_by() == kill)
      await asyncio.sleep(random.random())
      await self._kill()
    self.supervisor.retire()

  async def _kill(self) -> None:
    self.look()
    seen = len(self.facts)
    os.kill(self.supervisor.child('syncer').pid, signal.SIGKILL)
    await self.until(lambda: 'committed' in _phases(self.facts[seen:]))
    self.lives.append(_phases(self.facts[seen:]))


def _phases(facts: list[tuple[str, dict]]) -> dict[str, tuple[float, float | None]]:
  """The time of each phase of a new process: s since the death before it, and its CPU time."""
  killed_ns, before_s, found = None, None, {}
  for who, fact in facts:
    match fact:
      case {'name': 'exit', 'child': 'syncer'}:
        killed_ns, before_s, found = fact['t_ns'], 0.0 if _COLD.value else None, {}
      case {'name': 'process', 'child': 'syncer', 'state': 'starting'}:
        found.setdefault('starting', (fact['t_ns'], 0.0))
      case {'name': 'startup', 'phase': phase, 'cpu_s': cpu_s}:
        before_s = cpu_s if before_s is None else before_s
        found.setdefault(phase, (fact['t_ns'], cpu_s - before_s))
      case {'name': 'member', 'state': 'joined'}:
        found.setdefault('joined', (fact['t_ns'], None))
      case {'name': 'outer'} if who == 'syncer' and 'ready' in found:
        found.setdefault('committed', (fact['t_ns'], None))
  return {phase: ((t_ns - killed_ns) / 1e9, cpu_s) for phase, (t_ns, cpu_s) in found.items()}


def main(argv: list[str]) -> None:
  del argv
  with tempfile.TemporaryDirectory() as folder:
    bench, _ = conductor.play(pathlib.Path(folder), Bench, 60 + PATIENCE_S * _KILLS.value)
  print(
    f'{_VARIANT.value}: {len(bench.lives)} kills; seconds since the kill (median, longest), '
    'CPU time of the new process (median)'
  )
  for phase in PHASES:
    walls = [life[phase][0] for life in bench.lives if phase in life]
    cpus = [life[phase][1] for life in bench.lives if life.get(phase, (0, None))[1] is not None]
    cpu = f'  cpu {statistics.median(cpus):5.2f}' if cpus else ''
    print(f'  {phase:10} {statistics.median(walls):6.2f} {max(walls):6.2f}{cpu}')


if __name__ == '__main__':
  app.run(main)
