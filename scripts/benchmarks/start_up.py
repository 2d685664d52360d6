"""How long the demo takes to start, a learner to return, and the syncer to recover, by phases; and
the fingerprint of a corpus.

    python scripts/benchmarks/start_up.py [--quick] [--json=FILE]     # about 15 minutes
    python scripts/benchmarks/start_up.py --only=corpus     # a minute, 3 GiB of disk

Real processes under the supervisor, the demo's config. Seconds of wall time, median and longest,
and CPU time of the process until then, since wall time depends on the other load of the host:

  cold, warm      from the start of the first process, with an empty compile cache and a full one,
                  of learner l0: the first step, and the first outer step with a payload of it
  learner         from the death of learner l1 (SIGKILL)
  syncer          from the death of the syncer
  corpus          1 GiB (--quick: 64 MiB) in 1, 64 and 2,048 files, which the page cache holds: the
                  first time each byte is read, on all cores, later a memory of it

Kills come at random moments under load, when the process has lived long enough not to count as a
short one.
"""

import asyncio
import collections
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.configs import stdlib_lm
from diloco_jax.process import restarts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import folders
from diloco_jax.train import fingerprint
from diloco_jax.verification.faults import conductor as conductor_lib
from scripts.benchmarks import measured

VARIANT = 'decoupled'  # the demo, without its kill
ENDLESS = ('--config.train.steps=1000000', '--config.train.log_every=1000')
SYNCER, LEARNER, FIRST = 'syncer', 'l1', 'l0'
PATIENCE_S = 120.0  # for a start or a kill
COUNTS = 1, 64, 2048  # of the files of a corpus
OLD_S = 4.0  # what was written just now is not remembered


class At(NamedTuple):
  """When a phase was reached, and the CPU time of the process until then, where it is known."""

  seconds: float
  cpu_s: float | None = None


Life = dict[str, At]  # by phase


class Bench(conductor_lib.Conductor):
  """Starts a run, then kills one process of it again and again.

  Attributes:
    begun: the phases of learner l0 at the start; lives: those of each new process after a kill.
  """

  def __init__(
    self, workdir: pathlib.Path, recorder: records_lib.Recorder, victim: str, kills: int
  ):
    flags = (f'--config=stdlib_lm:{VARIANT}', *ENDLESS)
    super().__init__(workdir, recorder, stdlib_lm.get_config(VARIANT), flags)
    self._victim, self._kills = victim, kills
    self.begun: Life = {}
    self.lives: list[Life] = []

  async def carry_out(self) -> None:
    self.begun = await self._life(FIRST, 0)
    for _ in range(self._kills):
      born_s = self.supervisor.child(self._victim).started_s
      await self.until(lambda: time.monotonic() - born_s > restarts.SHORT_S)
      await asyncio.sleep(random.random())
      self.look()
      seen = len(self.facts)
      os.kill(self.supervisor.child(self._victim).pid, signal.SIGKILL)
      self.lives.append(await self._life(self._victim, seen))
    self.supervisor.retire()

  async def _life(self, child: str, seen: int) -> Life:
    last = 'committed' if child == SYNCER else 'merged'
    await self.until(lambda: last in phases(self.facts[seen:], child))
    return phases(self.facts[seen:], child)


def phases(facts: list[tuple[str, dict]], child: str) -> Life:
  """The phases of a new process, from the death before it, or from the start of the run."""
  began_ns, life = None, {}

  def reached(phase: str, fact: dict, cpu_s: float | None = None) -> None:
    life.setdefault(phase, At((fact['t_ns'] - began_ns) / 1e9, cpu_s))

  for process, fact in facts:
    match fact:
      case {'name': 'exit', 'child': died} if died == child:
        began_ns, life = fact['t_ns'], {}
      case {'name': 'process', 'child': started, 'state': 'starting'}:
        began_ns = began_ns or fact['t_ns']
        if started == child:
          reached('starting', fact, 0.0)
      case _ if began_ns is None:
        pass
      case {'name': 'startup', 'phase': phase, 'cpu_s': cpu_s} if process == child:
        reached(phase, fact, cpu_s)
      case {'name': 'member', 'state': 'joined', 'learner': learner} if child in (SYNCER, learner):
        reached('joined', fact)
      case {'name': 'step'} if process == child:
        reached('first step', fact)
      case {'name': 'outer'} if process == child and 'ready' in life:
        reached('committed', fact)
      case {'name': 'synced', 'participants': merged} if child in merged and 'first step' in life:
        reached('merged', fact)
  return life


def play(cache: str, victim: str = '', kills: int = 0) -> Bench:
  os.environ['JAX_COMPILATION_CACHE_DIR'] = cache
  with tempfile.TemporaryDirectory() as folder:
    make = lambda *where: Bench(*where, victim, kills)
    bench, _ = conductor_lib.play(pathlib.Path(folder), make, PATIENCE_S * (kills + 2))
  return bench


def _fingerprints(size: int, rounds: int) -> dict[str, Any]:
  """The times of the fingerprints of corpora of random bytes, by how many files they have."""
  data, times = os.urandom(size // max(COUNTS)), collections.defaultdict(list)
  with tempfile.TemporaryDirectory() as place:
    os.environ['XDG_CACHE_HOME'] = f'{place}/cache'
    for count in COUNTS:
      (folder := pathlib.Path(place, str(count))).mkdir()
      for number in range(count):
        with open(folder / f'{number}.txt', 'wb') as file:
          file.writelines([data] * (max(COUNTS) // count))
    time.sleep(OLD_S)
    for _ in range(rounds):
      for count in COUNTS:
        shutil.rmtree(folders.cache(), ignore_errors=True)
        for turn in ('first', 'later'):
          began_s, cpu_s = time.perf_counter(), time.process_time()
          fingerprint.of(pathlib.Path(place, str(count)))
          times[f'{turn}, {count} files, s'].append(time.perf_counter() - began_s)
          times[f'{turn}, {count} files, s of CPU'].append(time.process_time() - cpu_s)
  figures = {name: measured.spread(values) for name, values in times.items()}
  print(f'corpus of {size >> 20} MiB')
  for name, figure in figures.items():
    print(f'  {name:32}{measured.text(figure)}', flush=True)
  return figures


def main() -> None:
  parser = measured.parser(__doc__)
  parser.add_argument('--only', default='', help='corpus')
  flags = parser.parse_args()
  corpus = _fingerprints(1 << (26 if flags.quick else 30), 3 if flags.quick else 7)
  if flags.only:
    measured.write(flags.json, {'corpus': corpus})
    return
  starts, kills = (1, 1) if flags.quick else (3, 5)
  lives_of: dict[str, list[Life]] = collections.defaultdict(list)
  with tempfile.TemporaryDirectory() as caches:
    for which in range(starts):
      cache = f'{caches}/{which}'
      lives_of['cold'].append(play(cache).begun)
      lives_of['warm'].append(play(cache).begun)
    for name, victim in (('learner', LEARNER), ('syncer', SYNCER)):
      lives_of[name] = play(cache, victim, kills).lives
  rows = {name: _report(name, lives) for name, lives in lives_of.items()}
  measured.write(flags.json, {'corpus': corpus, **rows})


def _report(name: str, lives: list[Life]) -> dict[str, Any]:
  print(f'{name} ({len(lives)}): seconds of wall time, median and longest; CPU time, median')
  rows = {}
  for phase in lives[0]:
    times = [life[phase] for life in lives if phase in life]
    rows[phase] = {'seconds': measured.spread([at.seconds for at in times])}
    wall, cpu = rows[phase]['seconds'], ''
    if times[0].cpu_s is not None:
      rows[phase]['cpu_s'] = measured.spread([at.cpu_s for at in times])
      cpu = f'  cpu {rows[phase]["cpu_s"]["median"]:5.2f}'
    print(f'  {phase:10} {wall["median"]:6.2f} {wall["greatest"]:6.2f}{cpu}', flush=True)
  return rows


if __name__ == '__main__':
  main()
