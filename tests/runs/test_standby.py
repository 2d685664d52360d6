"""Real syncers that are killed while another process stands by: it goes on where they were."""

import os
import signal

import pytest

from tests.runs import conductor

DEADLINE_S = 240
pytestmark = pytest.mark.timeout(300)
KILLS = 2
OVERRIDES = {
  **conductor.ENDLESS, 'sync.learners': 2, 'sync.checkpoint_every_syncs': 20,
}


class Conductor(conductor.Conductor):
  """Kills the syncer as soon as somebody stands by, again and again."""

  async def carry_out(self) -> None:
    for kill in range(1, KILLS + 1):
      await self.until(lambda: self.stood_by() == kill)
      at = len(self.facts)
      os.kill(self.supervisor.child('syncer').pid, signal.SIGKILL)
      await self.until(lambda: self.since('syncer', 'recovered', at))
      await self.until(lambda: min(self.merges('l0', at), self.merges('l1', at)) >= 2)
    self.supervisor.retire()


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory) -> conductor.Run:
  _, run = conductor.play(
    tmp_path_factory.mktemp('standby') / 'run',
    lambda workdir, recorder: Conductor(workdir, recorder, OVERRIDES, standby=True), DEADLINE_S)
  return run


def test_each_takes_over_and_the_run_ends_well(run):
  assert run.outcome.code == 0, '\n'.join(run.said)
  assert sum('who stood by takes over' in line for line in run.said) == KILLS
  codes = [fact['code'] for fact in run.of('supervisor', 'exit') if fact['child'] == 'syncer']
  assert codes == [-signal.SIGKILL] * KILLS + [0]


def test_it_goes_on_where_the_last_one_was(run):
  """No version that a learner has seen is missing, and the oracle finds nothing."""
  assert run.lost_versions() == [0] * KILLS
  verdict = run.verdict()
  assert verdict.broken is None, verdict.text()
