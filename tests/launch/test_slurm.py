"""A real run on a Slurm cluster, whose nodes are all this machine."""

import fcntl
import os
import re
import signal
import sys
import time

import pytest

from diloco_jax.process import run_folder
from tests.launch.lib import command_line
from tests.runs.lib import ray_cluster, records, slow_data, slurm_cluster

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

LEARNERS = 'l0', 'l1', 'l2'
OFTEN = '--config.train.checkpoint_every_steps=8', '--config.sync.checkpoint_every_syncs=40'


@pytest.fixture(name='cluster')
def _cluster(tmp_path):
  with slurm_cluster.start(['n1', 'n2', 'n3', 'n4', 'n5']) as cluster:
    yield cluster
  for log in tmp_path.glob('*/logs/*.log'):
    print(log.name, *log.read_text().splitlines()[-30:], sep='\n')


class Run(records.Watched):
  """A run that its script submits.

  Attributes:
    syncer, learners: the numbers of their jobs.
  """

  def __init__(self, cluster, folder, *flags: str, config: str = 'stdlib_lm:tiny'):
    self.cluster, self.workdir = cluster, folder / 'a run of 100% "$HOME"'
    certs = ray_cluster.certify(folder / 'certs', *LEARNERS)
    done = command_line.diloco(
      *('launch', '--engine=slurm', f'--config={config}', '--topology=cpu', f'--tls={certs}'),
      *(
        '--config.sync.learners=3',
        '--config.mesh.data=1',
        '--config.train.drain_s=25',
        f'--workdir={self.workdir}',
      ),
      *(f'--out={folder}', '--name=tiny', *flags),
    )
    assert done.returncode == 0, done.stderr
    cluster.environment['GATE'] = str(folder / 'gate')
    self._script = str(folder / 'tiny.sh')

  def submit(self) -> None:
    said = self.cluster.call('bash', self._script)
    self.syncer, self.learners = re.findall('job (.*):', said)

  def task(self, learner: str) -> str:
    """The job of one learner."""
    return f'{self.learners}_{learner[1:]}'

  def until_merged(self, *learners: str) -> None:
    """Waits until each of them has been in some more outer steps."""
    at = {learner: self.merges(learner) for learner in learners}
    self.cluster.until(lambda: all(self.merges(learner) >= at[learner] + 3 for learner in learners))

  def text(self, process: str) -> str:
    return (self.workdir / 'logs' / f'{process}.log').read_text()

  def said(self, process: str, words: str) -> int:
    return self.text(process).count(words)

  def address(self) -> str:
    return (self.workdir / run_folder.ADDRESS).read_text()

  def jobs(self) -> list[dict[str, str]]:
    """What Slurm says about those of the syncer and of the learners."""
    return [self.cluster.job(job) for job in (self.syncer, *map(self.task, LEARNERS))]

  def end(self) -> list[str]:
    """Waits for the end of all jobs; returns their states and exit codes."""
    over = 'COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT'
    self.cluster.until(lambda: all(job['JobState'] in over for job in self.jobs()))
    return [f'{job["JobState"]} {job["ExitCode"]}' for job in self.jobs()]


def test_a_run_whose_jobs_are_requeued_ends_in_order(cluster, tmp_path):
  run = Run(cluster, tmp_path, slow_data.GATED, '--config.train.steps=1000', *OFTEN)
  run.submit()
  run.until_merged(*LEARNERS)

  # A learner alone; the last task has the number of the whole array.
  cluster.call('scontrol', 'requeue', run.task('l2'))
  cluster.start_again(run.task('l2'))
  run.until_merged(*LEARNERS)

  # A job of higher priority takes the node of another one.
  node = cluster.job(run.task('l1'))['NodeList']
  urgent = '--partition=urgent', f'--nodelist={node}', '--output=/dev/null', '--wrap=true'
  cluster.call('sbatch', *urgent)
  cluster.start_again(run.task('l1'))

  # The time of the job of the third one ends.
  hours, minutes, _ = map(int, cluster.job(run.task('l0'))['RunTime'].split(':'))
  soon = hours * 60 + minutes + 2
  cluster.call('scontrol', 'update', f'JobId={run.task("l0")}', f'TimeLimit={soon}')
  cluster.start_again(run.task('l0'), 'TimeLimit=60')
  run.until_merged(*LEARNERS)
  for learner in LEARNERS:
    assert run.said(learner, 'preempted at clock') == 1
    assert run.said(learner, f'{learner} continues from its checkpoint at clock') == 1, 'moments'
  assert run.said('l0', 'l0 has ended with 143, and is to start again') == 1

  # The node of the syncer is lost; learners find its address on the next one.
  node, address = cluster.job(run.syncer)['NodeList'], run.address()
  cluster.call('scontrol', 'update', f'NodeName={node}', 'State=DOWN', 'Reason=test')
  cluster.start_again(run.syncer)
  run.until_merged(*LEARNERS)
  assert run.facts('syncer', 'recovered')
  assert cluster.job(run.syncer)['NodeList'] != node and run.address() != address

  (tmp_path / 'gate').touch()
  assert run.end() == ['COMPLETED 0:0'] * 4
  assert [job['Restarts'] for job in run.jobs()] == ['1'] * 4
  assert (run.workdir / 'report' / 'report.txt').is_file()
  assert (run.workdir / 'model').is_dir()


def test_what_is_refused_or_cancelled_is_not_started_again(cluster, tmp_path):
  key = tmp_path / 'certs' / 'syncer' / 'key.pem'
  run = Run(cluster, tmp_path, slow_data.GATED, '--config.train.steps=1000')
  key.rename(tmp_path / 'key.pem')
  run.submit()
  syncer, *learners = run.end()
  assert syncer == 'FAILED 42:0'
  assert all(learner.startswith('CANCELLED') for learner in learners)
  (tmp_path / 'key.pem').rename(key)
  run.submit()
  run.until_merged(*LEARNERS)
  cluster.call('scancel', run.syncer, run.learners)
  assert all(job.startswith('CANCELLED') for job in run.end())
  assert all(run.said(name, 'preempted at clock') == 1 for name in LEARNERS)
  assert [job['Restarts'] for job in run.jobs()] == ['0'] * 4


_LOOP = """
import os, sys, time
import jax.numpy as jnp
import diloco_jax

learner, syncer, tls, workdir = sys.argv[1:]
params, state = {'w': jnp.zeros(64)}, {'steps': jnp.int32(0)}
run = {'learner': learner, 'syncer': syncer, 'tls': tls, 'workdir': workdir}
with diloco_jax.join(params, opt_state=state, checkpoint_every_steps=8, **run) as peer:
  params, state = peer.params, peer.opt_state
  for clock in peer.steps():
    time.sleep(0.01 if os.path.exists(os.environ['GATE']) else 0.3)
    params, state = {'w': params['w'] + 1}, {'steps': state['steps'] + 1}
    params = peer.sync(params, tokens=1, opt_state=state)
  print('has made', int(state['steps']), 'steps', flush=True)
"""


def test_own_loops_behind_a_controller_that_is_away_at_the_start(cluster, tmp_path):
  """One of them is preempted, and comes back with all that it had done."""
  (tmp_path / 'my loop.py').write_text(_LOOP)
  words = '{learner} {syncer} {tls} {workdir}'
  python = f'env PYTHONPATH={command_line.ROOT} {sys.executable} -P'
  loop = f"--loop={python} '{tmp_path}/my loop.py' {words}"
  run = Run(cluster, tmp_path, loop, '--config.train.steps=600', config='own_loop')
  (run.workdir / 'logs').mkdir(parents=True)
  controller = int((cluster.folder / 'slurmctld.pid').read_text())
  with open(run.workdir / 'logs' / 'syncer.log', 'w', encoding='utf-8') as log:
    fcntl.flock(log, fcntl.LOCK_EX)  # the job of the syncer waits for it before all else
    run.submit()
    cluster.until(lambda: cluster.job(run.syncer)['JobState'] == 'RUNNING')
    os.kill(controller, signal.SIGSTOP)
  time.sleep(20.0)  # so long is it away, and no shorter
  os.kill(controller, signal.SIGCONT)
  run.until_merged(*LEARNERS)

  node = cluster.job(run.task('l1'))['NodeList']
  urgent = '--partition=urgent', f'--nodelist={node}', '--output=/dev/null', '--wrap=true'
  cluster.call('sbatch', *urgent)
  cluster.start_again(run.task('l1'))
  run.until_merged(*LEARNERS)
  assert run.said('l1', 'preempted at clock') == 1
  assert run.said('l1', 'l1 continues with the moments of its checkpoint at step') == 1
  (tmp_path / 'gate').touch()
  assert run.end() == ['COMPLETED 0:0'] * 4
  [first, second] = re.findall(r'has made (\d+) steps', run.text('l1'))
  [steps] = re.findall(r'preempted at clock \d+ of \d+: (\d+) steps', run.text('l1'))
  assert int(first) == int(steps), 'it has saved all that it had trained'
  assert int(second) > int(first)
