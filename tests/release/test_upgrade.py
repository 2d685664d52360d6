"""The upgrade drill: a run begun by the release before is continued by the code of today, a process
at a time, and back again."""

import dataclasses
import pathlib
import sys

import pytest

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.protocol import formats
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import records as records_lib
from diloco_jax.verification.faults import conductor as conductor_lib
from diloco_jax.verification.replay import tape_files
from tests.release import releases
from tests.runs.lib import conductor

DEADLINE_S = 280
LEARNERS = ('l0', 'l1')
OVERRIDES = {
  **conductor.ENDLESS,
  'sync.learners': 2,
  'sync.checkpoint_every_syncs': 20,
  'train.checkpoint_every_steps': 40,
}
# Starts the release whose folder a file names, so that the next start may be of another one.
_START = """
import os, pathlib, sys
home = pathlib.Path(sys.argv[1]).read_text('utf-8')
program = [sys.executable, '-P', '-X', 'utf8', f'{home}/diloco_jax/__main__.py', *sys.argv[2:]]
os.execv(sys.executable, program)
"""


class Drill(conductor.Conductor):
  """Restarts each program with the other release, and waits for facts only."""

  def __init__(
    self, workdir: pathlib.Path, recorder: records_lib.Recorder, homes: tuple[pathlib.Path, ...]
  ):
    self._homes, self._releases = homes, workdir.parent / 'releases'
    self._releases.mkdir()
    super().__init__(workdir, recorder, OVERRIDES, self._of_release)

  async def carry_out(self) -> None:
    await self._merged()
    for home in self._homes[1:]:
      for name in (*LEARNERS, 'syncer'):
        (self._releases / name).write_text(str(home), 'utf-8')
        starts = self.supervisor.statuses[name].starts
        assert self.supervisor.bring_down(name, 0.0, 'upgraded', politely=True)
        await self.until(lambda: self.supervisor.statuses[name].starts == starts + 1)
        await self._merged()
    self.supervisor.retire()

  def _of_release(self, program: supervisor_lib.LocalProgram) -> supervisor_lib.LocalProgram:
    file = self._releases / program.name
    file.write_text(str(self._homes[0]), 'utf-8')
    words = program.command[program.command.index('utf8') + 2 :]
    command = [sys.executable, '-P', '-c', _START, str(file), *words]
    environment = {**program.environment, 'PYTHONPATH': ''}
    return dataclasses.replace(program, command=command, environment=environment)

  async def _merged(self, more: int = 3) -> None:
    """Waits until every learner has had so many contributions merged from now on."""
    self.look()
    at = len(self.facts)
    await self.until(lambda: all(self.merges(name, at) >= more for name in LEARNERS))


@pytest.fixture(scope='module', name='homes')
def _homes(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
  folder = tmp_path_factory.mktemp('releases')
  return releases.before(folder), releases.after(folder)


def test_both_releases_have_the_numbers_of_today(homes):
  assert [releases.numbers(home) for home in homes] == [formats.NUMBERS] * 2
  assert releases.version_of(homes[0]) != releases.version_of(homes[1])


def _wrote(workdir: pathlib.Path) -> dict[str, list[str]]:
  """The releases of the processes of each node, by their tapes, in the order of their lives."""
  programs: dict[str, list[str]] = {}
  for life in tape_files.find(workdir):
    program = tape_files.read(life).header.versions[tape_lib.PROGRAM]
    programs.setdefault(life.node, []).append(program)
  return programs


@pytest.mark.full
def test_a_run_under_way_is_upgraded_and_back_again_a_process_at_a_time(homes, tmp_path):
  first, second = homes
  there_and_back = (first, second, first)
  make = lambda workdir, recorder: Drill(workdir, recorder, there_and_back)
  _, run = conductor.play(tmp_path / 'run', make, DEADLINE_S)
  assert run.outcome.code == 0, run.said
  versions = [releases.version_of(home) for home in there_and_back]
  assert _wrote(run.workdir) == dict.fromkeys((*LEARNERS, 'syncer'), versions)
  assert run.lost_versions() == [0, 0]
  verdict = conductor_lib.judge(run.workdir)
  assert verdict.broken is None and not verdict.unread, verdict.text()
