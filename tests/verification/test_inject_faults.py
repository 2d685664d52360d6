"""The primitives of chaos on small real processes under the supervisor.

A child prints `tick` in a tight loop, so its output shows whether it stops, slows down or
continues.
"""

import asyncio
import contextlib
import os
import pathlib
import sys
from collections.abc import Awaitable, Callable

import psutil

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.report import records as records_lib
from diloco_jax.report import run_facts
from diloco_jax.verification.faults import inject_faults

DEADLINE_S = 60.0
_ENVIRONMENT = {'PATH': os.environ['PATH'], 'PYTHONUNBUFFERED': '1'}
# os.write: a handler that prints may interrupt a print.
_TICKS = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda number, frame: (os.write(1, b"bye\\n"), os._exit(0)))
while True:
  os.write(1, b"tick\\n")
  time.sleep(0.002)
"""


def _program(name: str, script: str = _TICKS) -> supervisor_lib.LocalProgram:
  return supervisor_lib.LocalProgram(
    name=name, command=[sys.executable, '-S', '-c', script], environment=_ENVIRONMENT
  )


class Stage:
  """A supervisor with its nemesis, and what the children said."""

  def __init__(self, workdir: pathlib.Path, recorder: records_lib.Recorder):
    self.lines: list[tuple[str, str]] = []
    self.supervisor = supervisor_lib.Supervisor(
      [_program('l0'), _program('l1')],
      workdir,
      run_facts.RunFacts(['l0', 'l1'], 100),
      recorder,
      listen=lambda name, line: self.lines.append((name, line)),
      stop_s=DEADLINE_S,
    )
    self.nemesis = inject_faults.Nemesis(self.supervisor, lambda name: _program(f'{name}-second'))

  def ticks(self, name: str) -> int:
    return self.lines.count((name, 'tick'))

  async def until(self, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
      while not condition():
        await asyncio.sleep(0.01)

  async def ticking(self, name: str) -> None:
    """Until it has said more than it has now."""
    before = self.ticks(name)
    await self.until(lambda: self.ticks(name) > before + 5)

  async def frozen(self, name: str) -> None:
    """Until the kernel says that it stands still and all that it said before has been heard."""
    process = psutil.Process(self.supervisor.child(name).pid)
    await self.until(lambda: process.status() == psutil.STATUS_STOPPED)
    before = -1
    while before != self.ticks(name):
      before = self.ticks(name)
      await self.ticking('l0')


def run(
  tmp_path: pathlib.Path, scenario: Callable[[Stage], Awaitable[None]], retire: bool = True
) -> tuple[supervisor_lib.Outcome, Stage]:
  """Runs a scenario on running children, then ends them."""
  recorder = records_lib.Recorder(tmp_path, 'supervisor', tensorboard=False)

  async def main():
    stage = Stage(tmp_path, recorder)
    running = asyncio.create_task(stage.supervisor.run())
    try:
      await stage.until(lambda: stage.ticks('l0') and stage.ticks('l1'))
      await scenario(stage)
    finally:
      if retire:
        stage.supervisor.retire()
      else:
        stage.supervisor._interrupt()
    return await asyncio.wait_for(running, DEADLINE_S), stage

  with contextlib.closing(recorder):
    return asyncio.run(main())


def test_a_frozen_process_stops_and_continues_when_it_is_thawed(tmp_path):
  async def scenario(stage: Stage) -> None:
    assert stage.nemesis.freeze('l1')
    await stage.frozen('l1')
    before = stage.ticks('l1')
    await stage.ticking('l0')
    assert stage.ticks('l1') == before
    stage.nemesis.thaw('l1')
    await stage.ticking('l1')

  outcome, _ = run(tmp_path, scenario)
  assert outcome.code == 0
  assert {status.starts for status in outcome.statuses.values()} == {1}


def test_a_frozen_process_is_ended_in_order_with_the_others(tmp_path):
  for retire in (True, False):

    async def scenario(stage: Stage) -> None:
      stage.nemesis.freeze('l1')
      await stage.frozen('l1')

    outcome, stage = run(tmp_path / str(retire), scenario, retire)
    assert stage.lines.count(('l1', 'bye')) == 1, 'it was killed'
    assert outcome.statuses['l1'].state == 'done'


def test_a_killed_and_a_preempted_process_are_restarted(tmp_path):
  async def scenario(stage: Stage) -> None:
    assert stage.nemesis.kill('l0', down_s=0.1)
    assert stage.nemesis.terminate('l1', notice_s=DEADLINE_S, down_s=0.1)
    await stage.until(lambda: stage.supervisor.child('l1') is None)
    assert not stage.nemesis.kill('l1', down_s=0.1)  # no process runs
    statuses = stage.supervisor.statuses
    await stage.until(lambda: statuses['l0'].starts == statuses['l1'].starts == 2)
    await stage.ticking('l0')
    await stage.ticking('l1')

  outcome, stage = run(tmp_path, scenario)
  assert stage.lines.count(('l1', 'bye')) == 2  # preempted, and at the end
  assert stage.lines.count(('l0', 'bye')) == 1


def test_a_slowed_process_gets_a_share_of_the_time_and_all_of_it_afterwards(tmp_path):
  async def scenario(stage: Stage) -> None:
    assert stage.nemesis.slow('l1', factor=10)
    assert not stage.nemesis.slow('l1', factor=10)  # it is slow already
    before = stage.ticks('l0'), stage.ticks('l1')
    await stage.until(lambda: stage.ticks('l0') > before[0] + 500)
    fast, slow = stage.ticks('l0') - before[0], stage.ticks('l1') - before[1]
    assert 0 < slow < fast / 2
    await stage.nemesis.unslow('l1')
    await stage.ticking('l1')

  assert run(tmp_path, scenario)[0].code == 0


def test_a_second_process_runs_beside_a_frozen_one_and_the_run_waits_for_it(tmp_path):
  async def scenario(stage: Stage) -> None:
    stage.nemesis.freeze('l1')
    assert stage.nemesis.start_second('l1')
    await stage.ticking('l1-second')

  outcome, stage = run(tmp_path, scenario)
  assert outcome.statuses['l1-second'] == supervisor_lib.Status(state='done', starts=1)
  assert stage.lines.count(('l1-second', 'bye')) == 1


def test_a_retiring_run_does_not_wait_for_dead_processes(tmp_path):
  async def scenario(stage: Stage) -> None:
    stage.nemesis.kill('l1', down_s=100 * DEADLINE_S)
    await stage.until(lambda: stage.supervisor.child('l1') is None)
    await stage.ticking('l0')

  outcome, _ = run(tmp_path, scenario)
  assert outcome.code == 0 and outcome.statuses['l1'].starts == 1


def test_healing_frees_every_process(tmp_path):
  async def scenario(stage: Stage) -> None:
    stage.nemesis.freeze('l0')
    stage.nemesis.slow('l1', factor=100)
    await stage.nemesis.heal()
    await stage.ticking('l0')
    await stage.ticking('l1')

  assert run(tmp_path, scenario)[0].code == 0
