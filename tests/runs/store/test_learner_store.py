"""Real processes whose learners save in a store: a bucket of a fake that serves HTTP.

A killed learner comes back with its moments from there, or with those of another learner.
"""

import dataclasses
import pathlib
import re
import sys

import pytest

from diloco_jax.launch import cli, local_run
from diloco_jax.report import records as records_lib
from diloco_jax.storage import folders
from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.faults import conductor as conductor_lib
from tests.launch.lib import command_line
from tests.runs.lib import conductor, promises, records, slow_data

DEADLINE_S = 800
OVERRIDES = {**conductor.ENDLESS, 'sync.learners': 2, 'train.checkpoint_every_steps': 4}


class InBucket(conductor.Conductor):
  def __init__(
    self, workdir, recorder: records_lib.Recorder, bucket, change=conductor.pace, **more
  ):
    self._bucket = bucket
    overrides = {**OVERRIDES, 'train.store': f'{bucket.url}/run', **more}
    super().__init__(workdir, recorder, overrides, change)

  async def trains(self, name: str, life: int) -> None:
    """Waits until a process of this incarnation has joined and contributed."""
    await self.until(lambda: self.count(name, 'state', state='joined', incarnation=life))
    self.look()
    at = len(self.facts)
    await self.until(lambda: self.merges(name, at) >= 2)

  def saved(self, name: str) -> bool:
    start = f'run/islands/{name}/ckpt/'
    ends = [key.removeprefix(start) for key in self._bucket.objects if key.startswith(start)]
    return any(re.fullmatch('[0-9]+/commit_success.txt', end) for end in ends)


def play(kind: type[InBucket], bucket, workdir: pathlib.Path) -> tuple[conductor.Run, str]:
  """Carries out a run, which has to keep every promise; returns it and all that it said."""
  make = lambda workdir, recorder: kind(workdir, recorder, bucket)
  _, run = conductor.play(workdir, make, DEADLINE_S)
  said = '\n'.join(run.said)
  assert run.outcome.code == 0, said
  promises.check(run)
  return run, said


def joined(run: conductor.Run, learner: str) -> list[int]:
  """The incarnations with which a learner has joined."""
  states = run.of(learner, 'state')
  return [fact['incarnation'] for fact in states if fact['state'] == 'joined']


class Kills(InBucket):
  """Kills l1 after its first save; then again, when the store has only checkpoints of l0."""

  async def carry_out(self) -> None:
    for life in (1, 2):
      await self.trains('l1', life)
      await self.until(lambda: self.saved('l0') and self.saved('l1'))
      dies = self.supervisor.child('l1')
      assert self.supervisor.bring_down('l1', 0.1, 'killed')
      await self.until(lambda: not dies.running)
      for name in self._bucket.objects:
        if life == 2 and name.startswith('run/islands/l1/'):
          self._bucket.fake.remove(self._bucket.name, name)
    await self.trains('l1', 3)
    self.supervisor.retire()


@pytest.mark.full
@pytest.mark.timeout(DEADLINE_S + 100)
def test_a_killed_learner_has_its_moments_from_the_bucket_or_another_ones(bucket, tmp_path):
  run, said = play(Kills, bucket, tmp_path / 'run')
  assert joined(run, 'l1') == [1, 2, 3]
  assert 'l1 continues from its checkpoint at clock' in said
  assert re.search('the inner optimizer begins with the moments of l0 at step [1-9]', said)
  left = {path.name for path in (tmp_path / 'run' / 'islands').glob('*/ckpt/*')}
  assert left == {'lock'}, 'the workdir has no checkpoint of a learner'


def diloco(*words: str) -> str:
  done = command_line.diloco(*words, **local_run.environment(1))
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(DEADLINE_S + 100)
def test_a_run_with_a_store_ends_goes_on_and_goes_back(bucket, tmp_path):
  """The last time with one learner fewer, on a smaller mesh."""
  store, workdir = f'{bucket.url}/run', f'--workdir={tmp_path / "run"}'
  words = '--config=stdlib_lm:tiny', '--config.train.steps=12', '--config.sync.keep_every=6'
  diloco('train', *words, f'--config.train.store={store}', workdir)
  place = folders.place(store)
  nodes = [place / 'islands' / name for name in ('l0', 'l1')]
  assert all(folders.checkpoints(node) for node in nodes)
  log = tmp_path / 'run' / 'logs' / 'l0.log'
  diloco('train', '--resume', workdir, '--config.train.steps=24')
  assert log.read_text().count('l0 continues from its checkpoint at clock') == 1
  said = diloco('restore', workdir, '--to=12', '--config.sync.learners=1', '--config.mesh.data=1')
  assert str(place / 'aside-1') in said and 'l1 is not in this config' in said
  diloco('train', '--resume', workdir)
  assert log.read_text().count('l0 continues from its checkpoint at clock') == 2
  ledger = records.facts(tmp_path / 'run', 'syncer', 'ledger')[-1]
  assert chaos_report.balance(ledger) == 0, ledger
  row = ledger['learners'].get('l1')  # closed: none of its tokens is unsettled
  assert row is None or row['tokens'] * ledger['fragments'] == row['merged'] + row['discarded']


OWN_DISK = """
import runpy, sys
if '--host=1' in sys.argv:
  sys.argv = [word.replace('--workdir=', '--workdir={}') for word in sys.argv]
runpy.run_module('diloco_jax', run_name='__main__', alter_sys=True)
"""


class TwoHosts(InBucket):
  """l0 has two hosts, each with a workdir of its own; one is killed after a save."""

  def __init__(self, workdir: pathlib.Path, recorder: records_lib.Recorder, bucket):
    self._disk = workdir.parent / 'other-disk'
    task = slow_data.FLAG.partition('task=')[2]
    more = {'task': task, 'mesh.data': 2, 'mesh.fsdp': 2}
    super().__init__(workdir, recorder, bucket, self._hosts, **more)

  def _hosts(self, program):
    if program.name != 'l0':
      return conductor_lib.with_more(program, '--config.mesh.fsdp=1')
    words = program.command[len(cli.PROGRAM) :]
    command = [sys.executable, '-c', OWN_DISK.format(self._disk), *words]
    return dataclasses.replace(program, command=command, hosts=({}, {}))

  async def carry_out(self) -> None:
    await self.until(lambda: self.saved('l0'))
    assert self.supervisor.bring_down('l0', 0.1, 'killed', host=1)
    await self.until(lambda: self.count('l0', 'state', state='joined', incarnation=2))
    self.look()
    at = len(self.facts)
    await self.until(lambda: len(self.since('l0', 'step', at)) >= 2)
    self.supervisor.retire()


@pytest.mark.full
@pytest.mark.timeout(DEADLINE_S + 100)
def test_hosts_without_a_common_disk_save_and_read_one_checkpoint(bucket, tmp_path):
  run, said = play(TwoHosts, bucket, tmp_path / 'run')
  assert 'l0 continues from its checkpoint at clock' in said
  assert joined(run, 'l0') == [1, 2]
  [other] = (tmp_path / 'other-disk').rglob('islands')
  assert not [path for path in other.rglob('*') if path.is_file()]
