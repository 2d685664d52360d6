"""Wall clocks that jump (reliability.md, row 11): a run of processes with a new date at every look.

Every process of the run, also one that comes back, is told a time up to a day off, another one each
time it asks. What the run does with time (leases, grace, pauses) is measured on the monotonic clock.
"""

import dataclasses
import os

import pytest

from diloco_jax.runtime import supervisor as supervisor_lib
from tests.runtime import conductor

DEADLINE_S = 120
pytestmark = pytest.mark.timeout(180)
JUMPS = '''
import random, time
_true = time.time
time.time = lambda: _true() + random.uniform(-86_400, 86_400)
'''
OVERRIDES = {**conductor.ENDLESS, 'sync.learners': 2}


class Conductor(conductor.Conductor):
  """l1 is killed on the way and comes back."""

  async def carry_out(self) -> None:
    await self.until(lambda: min(self.merges('l0'), self.merges('l1')) >= 5)
    at = len(self.facts)
    assert self.supervisor.bring_down('l1', 0.1, 'killed by the test')
    await self.until(lambda: self.merges('l1', at) >= 5)
    self.supervisor.retire()


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory) -> conductor.Run:
  folder = tmp_path_factory.mktemp('jumps')
  (folder / 'sitecustomize.py').write_text(JUMPS)

  def jumps(program: supervisor_lib.Program) -> supervisor_lib.Program:
    path = f'{folder}{os.pathsep}{program.environment["PYTHONPATH"]}'
    return dataclasses.replace(program, environment={**program.environment, 'PYTHONPATH': path})

  _, run = conductor.play(
    folder / 'run', lambda workdir, recorder: Conductor(workdir, recorder, OVERRIDES, jumps),
    DEADLINE_S)
  return run


def test_the_clocks_have_jumped(run):
  dates = [fact['time'] for who, fact in run.facts if who != 'supervisor']
  assert max(dates) - min(dates) > 3600


def test_the_run_ends_well_and_the_oracle_finds_nothing(run):
  assert run.outcome.code == 0, '\n'.join(run.said)
  verdict = run.verdict()
  assert verdict.broken is None, verdict.text()


def test_nobody_is_lost_but_who_was_killed(run):
  lost = [fact['learner'] for fact in run.of('syncer', 'member') if fact['state'] == 'lost']
  assert lost == ['l1'], lost
