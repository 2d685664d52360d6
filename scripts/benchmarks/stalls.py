"""No honest learner is refused after stalls: a run of real processes, quorum 1, and its refusals.

    python scripts/benchmarks/stalls.py                      # about 15 minutes
    unshare -m bash -c 'mount -t tmpfs -o size=200m tmpfs /mnt;
        python scripts/benchmarks/stalls.py --workdir=/mnt'  # with full disks

The stalls, in turns, each of 5 to 60 s: the syncer is killed; it is stopped (SIGSTOP); the store is
away, with `train.store_log`; a learner is killed together with the syncer; and, if `--workdir` is a
small file system, the disk is full. Exit code 1: the syncer has refused a payload, an account does
not balance, or the judge of the tapes has found a violation.
"""

import asyncio
import contextlib
import pathlib
import random
import shutil
import sys
import tempfile
import time

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.report import records
from diloco_jax.verification.faults import chaos_report
from tests.runs.lib import conductor

_STALLS = flags.DEFINE_integer('stalls', 30, 'number of stalls', 1)
_SEED = flags.DEFINE_integer('seed', 1, 'seed of their lengths')
_WORKDIR = flags.DEFINE_string('workdir', '', 'a folder; default: a temporary one')
HEALTHY = 40  # outer steps between two stalls
SMALL_BYTES = 1 << 30  # a file system that may be filled
PATIENCE_S = 120.0
OVERRIDES = {
  **conductor.ENDLESS,
  'sync.learners': 2,
  'sync.quorum': 1,
  'sync.checkpoint_every_syncs': 20,
  'train.checkpoint_every_steps': 40,
  'train.store_log': True,
}


class Stalls(conductor.Conductor):
  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    self._store = workdir.with_name('store')
    super().__init__(workdir, recorder, {**OVERRIDES, 'train.store': str(self._store)})

  async def carry_out(self) -> None:
    draw = random.Random(_SEED.value)
    kinds = [self._kill, self._stop, self._store_away, self._kill_both]
    if shutil.disk_usage(self.workdir).total < SMALL_BYTES:
      kinds.append(self._fill)
    await self._healthy()
    for number in range(_STALLS.value):
      kind, seconds = kinds[number % len(kinds)], 5 * 12 ** draw.random()
      before = self.count('syncer', 'outer')
      await kind(seconds)
      during = self.count('syncer', 'outer') - before
      refused = self.count('syncer', 'refused')
      name = kind.__name__.strip('_')
      print(f'{number} {name} {seconds:.0f} s: {during} outer steps, {refused} refused', flush=True)
      await self._healthy()
    self.supervisor.retire()

  async def _healthy(self) -> None:
    due = self.count('syncer', 'outer') + HEALTHY
    assert await self.until(lambda: self.count('syncer', 'outer') >= due, PATIENCE_S), self.said[
      -9:
    ]

  async def _kill(self, seconds: float) -> None:
    self.supervisor.bring_down('syncer', seconds, 'killed')
    await asyncio.sleep(seconds)

  async def _kill_both(self, seconds: float) -> None:
    self.supervisor.bring_down('l1', seconds, 'killed')
    await self._kill(seconds)

  async def _stop(self, seconds: float) -> None:
    self.nemesis.freeze('syncer')
    await asyncio.sleep(seconds)
    self.nemesis.thaw('syncer')

  async def _store_away(self, seconds: float) -> None:
    away = self._store.rename(self._store.with_name('away'))
    self._store.touch()  # or a folder would be made
    await asyncio.sleep(seconds)
    self._store.unlink()
    away.rename(self._store)

  async def _fill(self, seconds: float) -> None:
    rest, until_s = self.workdir.with_name('rest'), time.monotonic() + seconds
    with open(rest, 'wb', buffering=0) as file:
      while time.monotonic() < until_s:  # also what the run frees meanwhile
        with contextlib.suppress(OSError):  # full
          while file.write(bytes(4096)):
            pass
        await asyncio.sleep(0.1)
    rest.unlink()


def main(argv: list[str]) -> int:
  del argv
  began_s = time.monotonic()
  with tempfile.TemporaryDirectory(dir=_WORKDIR.value or None) as folder:
    workdir = pathlib.Path(folder) / 'run'
    workdir.mkdir()
    _, run = conductor.play(workdir, Stalls, 60 + PATIENCE_S * _STALLS.value)
    ledger, refused = run.of('syncer', 'ledger')[-1], run.of('syncer', 'refused')
    balance, verdict = chaos_report.balance(ledger), run.verdict()
  bad = ledger['discarded'].get('bad_value', 0)
  print(f'{_STALLS.value} stalls in {time.monotonic() - began_s:.0f} s: {ledger["synced"]} outer')
  print(f'steps, {len(refused)} refused, {bad} fragment-tokens bad, balance {balance}')
  for one in refused:
    print(one)
  print('no violation' if verdict.broken is None else verdict.text())
  return int(bool(refused or bad or balance or verdict.broken))


if __name__ == '__main__':
  app.run(main)
