"""The engine `ray` without Ray: what its drivers read, and the process of a host."""

import ast
import dataclasses
import os
import pathlib
import signal
import sys
import threading
import time

import pytest
from absl.testing import flagsaver

from diloco_jax.config import load
from diloco_jax.launch import children
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch.engines import ray, ray_driver
from diloco_jax.process import exits
from diloco_jax.storage import folders
from tests.launch.lib import command_line
from tests.runs.lib import ray_cluster

NEVER = exits.NEVER_RETRY
DEADLINE_S = 60


@pytest.fixture
def request_of_a_run(tmp_path):
  """A syncer, and two learners of two hosts each."""
  config = load.load('stdlib_lm:tiny')
  config.sync.learners, config.mesh.data, config.mesh.hosts = 2, 2, 2
  certs = ray_cluster.certify(tmp_path / 'certs', 'l0', 'l1')
  config.train.store = 'gs://bucket/x'
  flags = ['--config=stdlib_lm:tiny', '--config.mesh.hosts=2']
  return spec_lib.Request(config=config, config_flags=flags, tls=str(certs))


def test_what_the_drivers_read(request_of_a_run):
  asked = request_of_a_run
  with flagsaver.flagsaver(
    ray_python=sys.executable,
    ray_address='head:6379',
    node_python='/env/bin/python',
    ray_resources='{"learner": {"GPU": 8}, "l1": {"TPU": 4}}',
  ):
    described = spec_lib.make(asked, ray.choose(asked))
    read = ray.describe(described, asked.tls, '$SCRATCH/run')
  programs = read.pop('programs')
  assert read.pop('tether').startswith('"""Runs a command that must not outlive')
  assert read.pop('cwd') == str(pathlib.Path.cwd())
  assert read == {'address': 'head:6379', 'workdir': '$SCRATCH/run', 'never_retry': 42}
  start = '/env/bin/python', '-P', '-X', 'utf8', '-m', 'diloco_jax'
  common = '--config=stdlib_lm:tiny', '--config.mesh.hosts=2', '--workdir={workdir}'
  environment = {**spec_lib.ENVIRONMENT, 'PYTHONPATH': str(folders.CHECKOUT)}
  files = ['ca.pem', 'cert.pem', 'key.pem']
  assert programs['syncer'] == {
    'name': 'syncer',
    'argv': [*start, 'syncer', *common, '--tls={workdir}/certs/syncer', '--listen={ip}:0'],
    'environment': environment,
    'hosts': 1,
    'resources': {'CPU': 1},
    'secrets': [f'{asked.tls}/syncer/{name}' for name in (*files, 'allowlist.json')],
  }
  for name, resources in (('l0', {'GPU': 8}), ('l1', {'TPU': 4})):
    learner = (f'--tls={{workdir}}/certs/{name}', f'--learner={name}')
    meet = '--hosts={hosts}', '--host={host}', '--coordinator={coordinator}'
    assert programs[name] == {
      'name': name,
      'argv': [*start, 'learner', *common, *learner, '--syncer=file:{workdir}/address', *meet],
      'environment': environment,
      'hosts': 2,
      'resources': resources,
      'secrets': [f'{asked.tls}/{name}/{file}' for file in files],
    }


def test_what_is_missing_is_named(request_of_a_run):
  asked = request_of_a_run
  described = spec_lib.make(asked, ray.choose(asked))
  needs = lambda: [text for text, is_met in ray.needs(described, asked).items() if not is_met]
  for python in ('', 'no/such/python'):
    with flagsaver.flagsaver(ray_python=python):
      (text,) = needs()
      assert f"--ray_python, a Python with Ray, and not '{python}': `python3 -m venv RAY" in text
  with flagsaver.flagsaver(ray_python=sys.executable, ray_resources='{"l0":'):
    with pytest.raises(ValueError, match='--ray_resources={"l0": is not JSON: Expecting value'):
      ray.describe(described, asked.tls, 'run')
  with flagsaver.flagsaver(ray_python=sys.executable):
    asked.config.train.store = ''
    asked = dataclasses.replace(asked, tls='')
    tls, store = needs()
    assert tls.startswith('--tls') and 'no common disk' in store


def test_an_environment_without_ray_is_refused(request_of_a_run, tmp_path):
  words = (
    *('--engine=ray', f'--ray_python={sys.executable}', f'--tls={request_of_a_run.tls}'),
    f'--workdir={tmp_path / "run"}',
    '--config.sync.learners=2',
    '--config.sync.quorum=2',
  )
  ended = [tmp_path / 'run' / name for name in ('address', ray_driver.PLACED)]
  for resume in ('--noresume', '--resume'):  # the second time with files of an ended run
    done = command_line.diloco('launch', '--config=stdlib_lm:tiny', resume, *words)
    assert done.returncode == NEVER, done.stderr
    assert f'error: {sys.executable} has no Ray: {sys.executable} -m pip install' in done.stderr
    assert not any(file.exists() for file in ended), 'learners would dial a syncer that is gone'
    for file in ended:
      file.touch()


@pytest.mark.parametrize(
  'ends, code',
  [
    ([(0, 0)], 0),
    ([(1, 0), (0, 0)], 0),
    ([(0, 75), (1, NEVER)], NEVER),  # a led host that is refused
    ([(1, -signal.SIGKILL), (0, 75)], 137),
    ([(0, 0), (1, ray_driver.LOST)], ray_driver.LOST),
  ],
)
def test_the_exit_code_of_hosts(ends, code):
  assert ray_driver.verdict(ends, NEVER) == code


def test_the_driver_needs_ray_alone():
  tree = ast.parse(pathlib.Path(ray_driver.__file__).read_text(encoding='utf-8'))
  packages = {
    name.partition('.')[0]
    for node in ast.walk(tree)
    if isinstance(node, ast.Import | ast.ImportFrom)
    for name in (
      [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
    )
  }
  assert packages - sys.stdlib_module_names == {'ray'}


class Program:
  """A host of learner l0 that runs a shell command, as an actor on a machine would."""

  def __init__(self, folder: pathlib.Path, command: str, name: str = 'l0'):
    run = {'workdir': '$MACHINE/run', 'cwd': str(folder), 'tether': children.TETHER.read_text()}
    self.host = ray_driver.Host(name, run)
    argv = ['/bin/sh', '-c', command]
    self._program = {'name': name, 'argv': argv, 'environment': {'GIVEN': 'yes'}}
    self.codes: list[int] = []
    self.lines: list[str] = []
    self.thread = threading.Thread(target=self._work, daemon=True)

  def _work(self) -> None:
    words = {'ip': '10.0.0.1', 'host': '1'}
    self.codes.append(self.host.work(self._program, words, {'key.pem': b'secret'}))

  def until_said(self, line: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while line not in self.lines:
      assert time.monotonic() < end_s, self.lines
      self.lines += self.host.exchange('10.0.0.2:7070')[0]
      time.sleep(0.02)

  def end(self) -> int:
    self.thread.join(DEADLINE_S)
    self.lines += self.host.exchange('')[0]
    [code] = self.codes
    return code


@pytest.fixture
def machine(tmp_path, monkeypatch):
  monkeypatch.setenv('MACHINE', str(tmp_path / 'disk'))
  monkeypatch.setenv('RAY_ADDRESS', 'of the user')
  return tmp_path


def test_a_host_gives_its_process_what_it_needs(machine):
  program = Program(
    machine, 'echo {ip} {host} $GIVEN ${RAY_ADDRESS-none}; pwd; echo err >&2; exit 42'
  )
  program.thread.start()
  assert program.end() == NEVER
  assert program.lines == ['10.0.0.1 1 yes none', str(machine), 'err']
  key = machine / 'disk' / 'run' / 'certs' / 'l0' / 'key.pem'
  assert key.read_bytes() == b'secret'
  assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_host_ends_its_process_in_order_and_copies_its_records(machine):
  run = machine / 'disk' / 'run'
  (run / 'records').mkdir(parents=True)
  records = run / 'records' / 'l0.jsonl'
  records.write_text('{"of": "an earlier process"}\n')
  program = Program(machine, 'trap "exit 75" TERM; echo up; while :; do sleep 0.05; done')
  records.write_text(records.read_text() + '{"n": 1}\n{"n": ')
  program.thread.start()
  program.until_said('up')
  assert (run / 'address').read_text() == '10.0.0.2:7070'
  assert program.host.exchange('')[1] == b'', 'the whole lines were taken before'
  with open(records, 'a', encoding='utf-8') as file:
    file.write('2}\n')
  assert program.host.exchange('')[1] == b'{"n": 2}\n'
  program.host.end()
  assert program.end() == 75


def test_a_process_waits_for_the_end_of_an_earlier_one(machine):
  first = Program(machine, 'echo up; trap "" TERM; read line < gate')
  second = Program(machine, 'echo up')
  os.mkfifo(machine / 'gate')
  first.thread.start()
  first.until_said('up')
  second.thread.start()
  with open(machine / 'gate', 'w', encoding='utf-8') as gate:
    assert not second.host.exchange('')[0] and not second.codes
    gate.write('go on\n')
  assert (first.end(), second.end()) == (0, 0)
  assert second.lines == ['up']


def test_a_process_that_is_to_end_before_it_runs_ends(machine):
  program = Program(machine, 'sleep 1000')
  program.host.end()
  program.thread.start()
  assert program.end() == -signal.SIGTERM


def test_the_host_of_the_syncer_gives_its_address(machine):
  file = machine / 'disk' / 'run' / 'syncer' / 'address'
  file.parent.mkdir(parents=True)
  file.write_text('of an earlier process')
  program = Program(machine, f'echo 10.0.0.1:7 > {file}', name='syncer')
  assert program.host.exchange('10.0.0.9:7')[2] == ''
  program.thread.start()
  assert program.end() == 0
  assert program.host.exchange('10.0.0.9:7')[2] == '10.0.0.1:7\n'
