"""One run of real processes that serves several files of tests.

`tiny` with two learners and three data shards; the learners' checkpoints are older than the
committed batches. l1 is preempted and rejoins, then the syncer. Then the test kills l1, the syncer,
and all processes.
"""

import asyncio
import dataclasses
import pathlib
import random
import time

from diloco_jax.report import records
from tests.runs.lib import conductor

DEADLINE_S = 280
LEARNERS = ('l0', 'l1')
OVERRIDES = {
  **conductor.ENDLESS,
  'sync.learners': 2,
  'sync.checkpoint_every_syncs': 20,
  'train.checkpoint_every_steps': 40,
  'data.shards': 3,
}


@dataclasses.dataclass
class Day(conductor.Run):
  """Also has the times of each SIGTERM and of the first kill."""

  asked_ns: dict[str, int]
  killed_ns: int

  def end(self, child: str) -> dict:
    """The exit of the process that got SIGTERM."""
    return next(
      fact
      for fact in self.of('supervisor', 'exit')
      if fact['child'] == child and fact['t_ns'] > self.asked_ns[child]
    )


class Conductor(conductor.Conductor):
  """Carries out the day; waits for facts only."""

  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    super().__init__(workdir, recorder, OVERRIDES)
    self._draw = random.Random(3)
    self.asked_ns: dict[str, int] = {}
    self.killed_ns = 0

  async def carry_out(self) -> None:
    await self._merged(3)
    await self._terminate('l1')
    await self._terminate('syncer')
    self.killed_ns = time.monotonic_ns()
    await self._kill('l1')
    await self._kill('syncer')
    await self._kill(*LEARNERS, 'syncer')
    self.supervisor.retire()

  async def _terminate(self, name: str) -> None:
    """Sends SIGTERM at any moment, and waits for the next process."""
    await asyncio.sleep(0.3 * self._draw.random())
    self.asked_ns[name] = time.monotonic_ns()
    starts = self.supervisor.statuses[name].starts
    assert self.supervisor.bring_down(name, 0.0, 'preempted', politely=True)
    await self.until(lambda: self.supervisor.statuses[name].starts == starts + 1)
    await self._merged(3)

  async def _kill(self, *names: str) -> None:
    starts = {name: self.supervisor.statuses[name].starts for name in names}
    for name in names:
      assert self.supervisor.bring_down(name, 0.1, 'killed by the test'), name
    for name in names:
      await self.until(lambda: self.supervisor.statuses[name].starts == starts[name] + 1)
    await self._merged(3)

  async def _merged(self, more: int) -> None:
    """Waits until every learner has had so many contributions merged from now on."""
    self.look()
    at = len(self.facts)
    await self.until(lambda: all(self.merges(name, at) >= more for name in LEARNERS))


def play(workdir: pathlib.Path) -> Day:
  conducted, left = conductor.play(workdir, Conductor, DEADLINE_S)
  return Day(**vars(left), asked_ns=conducted.asked_ns, killed_ns=conducted.killed_ns)
