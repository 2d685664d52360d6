"""A Slurm cluster on this machine: Debian's munged and slurmctld, and a slurmd for each node.

They run as this user, on ports that the kernel chooses, with their files in a folder of their own,
and the kernel ends them with the test. A node has one CPU, so one job.
Those of the partition `urgent` go first.
"""

import contextlib
import getpass
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from diloco_jax.launch import children

DEADLINE_S = 300
_TOOLS = 'munged', 'slurmctld', 'slurmd', 'sbatch'
_PATH = f'{os.environ["PATH"]}:/usr/sbin'
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
KillWait=45
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class Cluster:
  """Made by `start`."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.environment = {**os.environ, 'PATH': _PATH, 'SLURM_CONF': str(folder / 'slurm.conf')}

  def call(self, *words: str) -> str:
    """Runs a command of Slurm; returns what it prints."""
    done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout

  def says(self, *words: str) -> str:
    """The same of one that may fail."""
    return subprocess.run(words, env=self.environment, capture_output=True, text=True).stdout

  def job(self, job: str) -> dict[str, str]:
    """What Slurm says about a job, or a task of an array; also about one that has ended."""
    return dict(re.findall(r'(\w+)=(\S+)', self.call('scontrol', 'show', 'job', job)))

  def until(self, true: Callable[[], Any]) -> Any:
    """Waits for a true value and returns it."""
    end_s = time.monotonic() + DEADLINE_S
    while not (value := true()):
      assert time.monotonic() < end_s, self.call('squeue', '--array', '--long')
      time.sleep(0.1)
    return value

  def start_again(self, job: str, *changes: str) -> None:
    """Waits until a job is in the queue again, and starts it without Slurm's two minutes."""
    self.until(lambda: self.job(job)['JobState'] == 'PENDING')
    self.call('scontrol', 'update', f'JobId={job}', 'StartTime=now', *changes)
    self.until(lambda: self.job(job)['JobState'] == 'RUNNING')


@contextlib.contextmanager
def start(nodes: Sequence[str]) -> Iterator[Cluster]:
  """The machine may have no Slurm: then the test is left out, and says so."""
  if not all(shutil.which(tool, path=_PATH) for tool in _TOOLS):
    pytest.skip('no Slurm: apt install slurm-wlm munge')
  with contextlib.ExitStack() as cleanup:  # the paths of sockets are short
    folder = pathlib.Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix='slurm-')))
    cluster, (port, *ports) = Cluster(folder), _free_ports(1 + len(nodes))
    here = f'NodeHostname={os.uname().nodename} NodeAddr=127.0.0.1 CPUs=1'
    known = [f'NodeName={name} {here} Port={at}\n' for name, at in zip(nodes, ports)]
    fill = {'folder': folder, 'port': port, 'user': getpass.getuser(), 'host': os.uname().nodename}
    (folder / 'slurm.conf').write_text(''.join(known) + _CONFIG.format(**fill))
    (folder / 'key').write_bytes(os.urandom(128))
    (folder / 'key').chmod(0o400)
    files = [f'--{name}={folder}/{name}' for name in ('pid-file', 'log-file', 'seed-file')]
    files += [f'--socket={folder}/munge', f'--key-file={folder}/key']
    _run(cleanup, cluster, 'munged', '--foreground', '--force', *files)
    cluster.until((folder / 'munge').exists)
    _run(cleanup, cluster, 'slurmctld', '-D')
    for name in nodes:
      _run(cleanup, cluster, 'slurmd', '-D', '-N', name)
    cluster.until(lambda: cluster.says('sinfo', '-h', '-o', '%D %t') == f'{len(nodes)} idle\n')
    try:
      yield cluster
    finally:
      cluster.call('scancel', f'--user={getpass.getuser()}')
      cluster.until(lambda: not cluster.call('squeue', '--noheader'))


def _free_ports(count: int) -> list[int]:
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for endpoint in sockets:
      endpoint.bind(('127.0.0.1', 0))
    return [endpoint.getsockname()[1] for endpoint in sockets]


def _run(cleanup: contextlib.ExitStack, cluster: Cluster, *words: str) -> None:
  """Starts a daemon."""
  process = subprocess.Popen(
    [sys.executable, '-I', '-S', children.TETHER, str(os.getpid()), 'all', *words],
    env=cluster.environment,
    stdin=subprocess.DEVNULL,
    start_new_session=True,
  )
  cleanup.callback(process.wait, DEADLINE_S)
  cleanup.callback(process.terminate)
