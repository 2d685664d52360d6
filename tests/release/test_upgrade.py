"""The upgrade drill: a run begun by the release before is continued by the code of today, a process
at a time, and back again."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from diloco_jax.launch import run_folder
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.protocol import formats
from diloco_jax.protocol.tape import tape
from diloco_jax.report import records
from diloco_jax.storage import files
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
    self, workdir: pathlib.Path, recorder: records.Recorder, homes: tuple[pathlib.Path, ...]
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

  def _of_release(self, program: supervisor_lib.Program) -> supervisor_lib.Program:
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
  found: dict[str, list[str]] = {}
  for life in tape_files.find(workdir):
    found.setdefault(life.node, []).append(tape_files.read(life).header.versions[tape.PROGRAM])
  return found


def _require_sound(workdir: pathlib.Path) -> None:
  verdict = conductor_lib.judge(workdir)
  assert verdict.broken is None and not verdict.unread, verdict.text()


# --- A whole run at a time ------------------------------------------------------------------------


def _diloco(home: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
  environment = {**os.environ, 'PYTHONPATH': ''}
  return subprocess.run(
    releases.command(home, *words), env=environment, capture_output=True, text=True, check=False
  )


ALONE = '--config=stdlib_lm:tiny', '--config.sync.learners=1', '--config.sync.quorum=1'


@pytest.fixture(scope='module', name='ended')
def _ended(homes, tmp_path_factory) -> pathlib.Path:
  """A run that the first release began, the second continued, and the first has ended."""
  workdir = tmp_path_factory.mktemp('ended') / 'run'
  for steps, home in ((24, homes[0]), (48, homes[1]), (72, homes[0])):
    _train(home, workdir, steps)
  return workdir


def _train(home: pathlib.Path, workdir: pathlib.Path, steps: int) -> None:
  """A syncer and a learner of a release train up to so many steps."""
  address = workdir / run_folder.ADDRESS
  address.unlink(missing_ok=True)  # it says that the run has ended
  given = *ALONE, f'--config.train.steps={steps}', f'--workdir={workdir}'
  learner = 'learner', *given, '--learner=l0', f'--syncer=file:{address}'
  environment = {**os.environ, 'PYTHONPATH': ''}
  with contextlib.ExitStack() as ends:
    programs = []
    for words in (('syncer', *given), learner):
      programs.append(subprocess.Popen(releases.command(home, *words), env=environment))
      ends.callback(programs[-1].kill)
    assert [program.wait(DEADLINE_S) for program in programs] == [0, 0]


@pytest.mark.full
def test_a_run_that_has_ended_gets_more_steps_from_another_release_and_back_again(ended, homes):
  versions = [releases.version_of(home) for home in (*homes, homes[0])]
  assert _wrote(ended) == {'l0': versions, 'syncer': versions}
  facts = list(records.records(ended))
  before = [fact for fact in facts if fact['name'] == 'synced']
  for back in (fact for fact in facts if fact['name'] == 'recovered'):
    seen = [one for one in before if one['time'] < back['time']]
    assert sum(back['versions']) == len(seen) > 0
  assert max(fact['step'] for fact in facts if fact['name'] == 'step') >= 72


@pytest.mark.full
def test_a_release_with_other_numbers_refuses_the_run_and_changes_nothing(ended, tmp_path):
  other, before = releases.with_other_formats(tmp_path), _bytes(ended)
  for words in (
    ('train', '--resume', f'--workdir={ended}'),
    ('syncer', *ALONE, '--config.train.steps=72', f'--workdir={ended}'),
    ('report', str(ended)),
  ):
    done = _diloco(other, *words)
    assert done.returncode == 42, done.stderr
    assert 'Use the release that reads it: ' in done.stderr and 'Traceback' not in done.stderr
    assert f'diloco_jax {releases.version_of(other)} reads ' in done.stderr
  assert _bytes(ended) == before


def _bytes(workdir: pathlib.Path) -> dict[pathlib.Path, bytes]:
  """What a run has written of its state; not its locks, nor the words of the refused start."""
  state = 'config.json', 'syncer', 'islands', 'model', 'tapes'
  paths = (path for name in state for path in (workdir / name, *(workdir / name).rglob('*')))
  ours = (path for path in paths if path.is_file() and path.name not in (files.LOCK, 'address'))
  return {path: path.read_bytes() for path in ours}


# --- A process at a time --------------------------------------------------------------------------


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
  _require_sound(run.workdir)
