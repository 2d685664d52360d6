"""From a SIGKILL of the syncer to its first new outer step: medians, and where the time goes.

    python scripts/benchmarks/syncer_restart.py                       # the demo model, 5 kills
    python scripts/benchmarks/syncer_restart.py --variant=tiny --kills=11

A run of real processes under the supervisor; the syncer is killed at random moments under load and
started again at once. Time 0 is the kill. On a machine that has other things to do the wall times
say more about those: `cpu` is the time that the new process has really used by then.
"""

import asyncio
import pathlib
import random
import statistics
import sys
import tempfile

from absl import app
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.runtime import records
from tests.runtime import conductor

_VARIANT = flags.DEFINE_string('variant', 'cpu', 'of experiments/configs/stdlib_lm.py')
_KILLS = flags.DEFINE_integer('kills', 5, 'how often the syncer is killed', 1)
_OVERRIDES = {**conductor.ENDLESS, 'train.eval_every': 100, 'chaos.enabled': False}
PATIENCE_S = 120.0  # per kill
PHASES = ('starting', 'imported', 'assembled', 'listens', 'began', 'restored', 'recovered', 'ready',
          'joined', 'committed')


class Bench(conductor.Conductor):
  """Kills the syncer of a run again and again, and keeps what each of its lives wrote down."""

  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    super().__init__(workdir, recorder, _OVERRIDES, variant=_VARIANT.value)
    self.lives: list[dict[str, tuple[float, float | None]]] = []  # phase: wall s, cpu s

  async def carry_out(self) -> None:
    await self.until(lambda: self.count('syncer', 'outer') >= 10)
    for _ in range(_KILLS.value):
      await asyncio.sleep(1 + random.random())
      await self._kill()
    self.supervisor.retire()

  async def _kill(self) -> None:
    self.look()
    seen = len(self.facts)
    self.supervisor.bring_down('syncer', 0.0, 'killed by the benchmark')
    await self.until(lambda: 'committed' in _phases(self.facts[seen:]))
    self.lives.append(_phases(self.facts[seen:]))


def _phases(facts: list[tuple[str, dict]]) -> dict[str, tuple[float, float | None]]:
  """When a new life came to each phase, in s since the death of the one before."""
  killed_ns, found = None, {}
  for who, fact in facts:
    match fact:
      case {'name': 'process', 'child': 'syncer', 'state': 'down'}:
        killed_ns, found = fact['t_ns'], {}
      case {'name': 'process', 'child': 'syncer', 'state': 'starting'}:
        phase, cpu_s = 'starting', 0.0
        found.setdefault(phase, (fact['t_ns'], cpu_s))
      case {'name': 'startup', 'phase': phase, 'cpu_s': cpu_s}:
        found.setdefault(phase, (fact['t_ns'], cpu_s))
      case {'name': 'member', 'state': 'joined'}:
        found.setdefault('joined', (fact['t_ns'], None))
      case {'name': 'outer'} if who == 'syncer' and 'ready' in found:
        found.setdefault('committed', (fact['t_ns'], None))
  return {phase: ((t_ns - killed_ns) / 1e9, cpu_s) for phase, (t_ns, cpu_s) in found.items()}


def main(argv: list[str]) -> None:
  del argv
  with tempfile.TemporaryDirectory() as folder:
    bench, _ = conductor.play(pathlib.Path(folder), Bench, 60 + PATIENCE_S * _KILLS.value)
  print(f'{_VARIANT.value}: {len(bench.lives)} kills; seconds since the kill (median, longest), '
        'CPU time of the new process (median)')
  for phase in PHASES:
    walls = [life[phase][0] for life in bench.lives if phase in life]
    cpus = [life[phase][1] for life in bench.lives if life.get(phase, (0, None))[1] is not None]
    cpu = f'  cpu {statistics.median(cpus):5.2f}' if cpus else ''
    print(f'  {phase:10} {statistics.median(walls):6.2f} {max(walls):6.2f}{cpu}')


if __name__ == '__main__':
  app.run(main)
