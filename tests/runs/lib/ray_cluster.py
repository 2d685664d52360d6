"""A Ray cluster of several machines on this one, and `diloco launch --engine=ray` on it.

A machine is a raylet with a folder of its own (ray_machines.py); when it dies, everything that runs
on it dies at once. Ray has an environment of its own, made once in .cache/.
"""

import contextlib
import fcntl
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import psutil

from diloco_jax.certs import authority, proofs
from tests import programs
from tests.runs.lib import records, slow_data

VERSION = '2.60.0'
DEADLINE_S = 600
_ENVIRONMENT = programs.ROOT / '.cache' / f'ray-{VERSION}'
_PATIENCE = 'raylet_start_wait_time_s = '  # a constant of Ray: on a busy machine 30 s are too few


def python() -> str:
  """The Python of an environment with Ray and nothing else; makes it the first time."""
  _ENVIRONMENT.parent.mkdir(exist_ok=True)
  with open(f'{_ENVIRONMENT}.lock', 'w', encoding='utf-8') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    ready = _ENVIRONMENT / 'ready'
    interpreter = str(_ENVIRONMENT / 'bin' / 'python')
    if not ready.exists():
      subprocess.run([sys.executable, '-m', 'venv', '--clear', _ENVIRONMENT], check=True)
      subprocess.run([interpreter, '-m', 'pip', 'install', '-q', f'ray=={VERSION}'], check=True)
      [node] = _ENVIRONMENT.glob('lib/python*/site-packages/ray/_private/node.py')
      text = node.read_text()
      assert text.count(f'{_PATIENCE}30\n') == 1
      node.write_text(text.replace(f'{_PATIENCE}30\n', f'{_PATIENCE}600\n'))
      ready.touch()
  return interpreter


class Cluster:
  """Machines with the resources of each by its name. Made by `start`."""

  def __init__(self, folder: pathlib.Path, address: str):
    self.folder, self.address = folder, address

  def processes(self, machine: str, words: str = '') -> list[psutil.Process]:
    """Those that run on a machine and have `words` on their command line."""
    mark, processes = str(self.folder / machine), []
    for process in psutil.process_iter():
      with contextlib.suppress(psutil.Error):
        is_there = process.environ().get('MACHINE') == mark
        if is_there and words in ' '.join(process.cmdline()) and process.status() != 'zombie':
          processes.append(process)
    return processes

  def where(self, name: str) -> str:
    """The machine on which a program runs now; '' if none does."""
    for machine in self.folder.iterdir():
      if self.programs(machine.name, name):
        return machine.name
    return ''

  def programs(self, machine: str, name: str) -> list[psutil.Process]:
    """The processes of a program on a machine."""
    words = 'diloco_jax syncer' if name == 'syncer' else f'--learner={name} '
    return [
      process for process in self.processes(machine, words) if process.cmdline()[1:2] == ['-P']
    ]

  def raylet(self, machine: str) -> psutil.Process:
    [raylet] = [process for process in self.processes(machine) if process.name() == 'raylet']
    return raylet

  def kill(self, machine: str) -> None:
    """Kills a machine with everything on it."""
    while left := self.processes(machine):
      for process in left:
        with contextlib.suppress(psutil.Error):
          process.kill()


@contextlib.contextmanager
def start(folder: pathlib.Path, machines: dict[str, dict[str, int]]) -> Iterator[Cluster]:
  for name in machines:
    (folder / name).mkdir(parents=True)
  process = subprocess.Popen(
    [python(), pathlib.Path(__file__).with_name('ray_machines.py'), folder, json.dumps(machines)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  cluster = Cluster(folder, process.stdout.readline().strip())
  try:
    assert cluster.address
    yield cluster
  finally:
    process.communicate(timeout=DEADLINE_S)
    for name in machines:
      cluster.kill(name)


class Launched(programs.Program, records.Watched):
  """`diloco launch --engine=ray`, and what it has written. Made by `launch`."""

  def __init__(self, machine: pathlib.Path, *words: str):
    super().__init__(*programs.diloco('launch', '--engine=ray', *words), MACHINE=str(machine))
    self.workdir = machine / 'run'

  def end(self, deadline_s: float = DEADLINE_S) -> int:
    return super().end(deadline_s)

  def said(self, words: str) -> list[str]:
    return [line for line in self.lines if words in line]

  def joined(self, learner: str) -> list[int]:
    """The incarnations with which a learner has joined, as the syncer says."""
    return [
      fact['incarnation']
      for fact in self.facts('syncer', 'member')
      if fact['learner'] == learner and fact['state'] == 'joined'
    ]


def certify(folder: pathlib.Path, *learners: str) -> pathlib.Path:
  """Makes the certificates of a run."""
  owner = authority.init(folder, 'tiny', proofs.utc_now())
  for name in learners:
    owner.issue(name, proofs.utc_now())
  return folder


@contextlib.contextmanager
def launch(
  cluster: Cluster,
  certs: pathlib.Path,
  resources: dict[str, dict[str, int]],
  *flags: str,
  name: str,
) -> Iterator[Launched]:
  """Runs `tiny` with slow data; `resources`: of its programs. At the end everything is killed."""
  launched = Launched(
    cluster.folder.parent / name,
    *('--config=stdlib_lm:tiny', slow_data.FLAG),
    *('--config.mesh.data=1', '--config.train.log_every=1000', '--workdir=$MACHINE/run'),
    *(f'--tls={certs}', f'--ray_python={python()}', f'--ray_address={cluster.address}'),
    *(f'--ray_resources={json.dumps(resources)}', *flags),
  )
  try:
    yield launched
  finally:
    launched.kill()
    print(launched.text)
