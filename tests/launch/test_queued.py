"""Scripts of the engine queued: golden texts, shellcheck, and the scripts themselves.

They run for real, with a `gcloud` whose hosts are folders of this machine.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from diloco_jax.launch.engines import google_cloud
from tests.launch.lib import command_line, rendered

LIMIT_S = 120
BIN = pathlib.Path(sys.executable).parent

GCLOUD = f"""#!{sys.executable}
import json, os, pathlib, shutil, subprocess, sys
words, root = sys.argv[1:], pathlib.Path(os.environ['ROOT'])
hosts = sorted(root.glob('host*')) if 'tpus' in words else [root / 'host0']
with open(root / 'calls', 'a') as file: print(json.dumps(words), file=file)
verbs = 'describe create delete scp ssh start stop'.split()
verb = next(one for one in words if one in verbs)
state = root / 'state'
if verb == 'describe':
  if not state.exists(): sys.exit('NOT_FOUND')
  now, *later = state.read_text().split()
  if later: state.write_text(' '.join(later))
  print(now)
elif verb == 'create': state.write_text('PROVISIONING ACTIVE')
elif verb == 'delete': state.unlink()
elif verb == 'scp':
  source = pathlib.Path(words[words.index('--recurse') + 1])
  for host in hosts: shutil.copytree(source, host / source.name, dirs_exist_ok=True)
elif verb == 'ssh':
  (command,) = [one.removeprefix('--command=') for one in words if one.startswith('--command=')]
  codes = [subprocess.run(['sh', '-c', command], cwd=host).returncode for host in hosts]
  sys.exit(next((code for code in codes if code), 0))  # as gcloud does
"""
DOCKER = f"""#!{sys.executable}
import json, pathlib, sys
if sys.argv[1] == 'run':
  code, *codes = pathlib.Path('codes').read_text().split()
  pathlib.Path('codes').write_text(' '.join(codes))
  with open('started', 'a') as file: print(json.dumps(sys.argv[2:]), file=file)
  sys.exit(int(code))
"""
SUDO = '#!/bin/sh\n[ "$1" != docker ] || exec "$@"\n'  # files of the machine stay as they are
SLEEP = '#!/bin/sh\n'


class Cloud:
  """A `gcloud` whose hosts are folders; a program there ends with the next of its exit codes."""

  def __init__(self, root: pathlib.Path, codes: list[list[int]]):
    self._root, self._bin = root, root / 'bin'
    self._bin.mkdir()
    for name, text in {'gcloud': GCLOUD, 'docker': DOCKER, 'sudo': SUDO, 'sleep': SLEEP}.items():
      (self._bin / name).write_text(text)
      (self._bin / name).chmod(0o755)
    self._hosts = [root / f'host{number}' for number in range(len(codes))]
    for host, its in zip(self._hosts, codes):
      host.mkdir()
      (host / 'codes').write_text(' '.join(map(str, its)))
    for name in ('syncer', 'l0'):
      (root / 'certs' / name).mkdir(parents=True)
      (root / 'certs' / name / 'key.pem').write_text('')

  def run(self, text: str) -> int:
    path = {**os.environ, 'PATH': f'{self._bin}:{os.environ["PATH"]}', 'ROOT': str(self._root)}
    return subprocess.run(
      ['bash', '-c', text], cwd=self._root, env=path, timeout=LIMIT_S
    ).returncode

  def set_state(self, state: str) -> None:
    (self._root / 'state').write_text(state)

  @property
  def state(self) -> str:
    path = self._root / 'state'
    return path.read_text() if path.exists() else ''

  @property
  def verbs(self) -> list[str]:
    """What was asked of queued resources, but for their state."""
    words = [json.loads(line) for line in (self._root / 'calls').read_text().splitlines()]
    return [one[3] for one in words if one[2] == 'queued-resources' and one[3] != 'describe']

  def started(self, host: int) -> list[list[str]]:
    """The arguments of each `docker run`."""
    path = self._hosts[host] / 'started'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def scripts(**more) -> dict[str, str]:
  return rendered.texts('queued', rendered.request(1, name='run', **more))


def test_the_scripts_of_a_run():
  asked = rendered.request(1, 'v5p:2x2x4', name='run')
  given = {'spot': True, 'service_account': 'trainer@p.iam', 'syncer_zone': 'us-central1-a'}
  found = rendered.texts('queued', asked, **given)
  rendered.require_golden('queued', found)


@pytest.mark.parametrize('engine', ['gke', 'queued'])
def test_shellcheck_has_no_warning(tmp_path, engine):
  asked = rendered.request(1, name='run', tls="it's mine")
  for name, text in rendered.texts(engine, asked).items():
    if name.endswith('.sh'):
      (tmp_path / name).write_text(text)
  scripts = sorted([*tmp_path.iterdir(), *(rendered.GOLDEN / engine).glob('*.sh')])
  done = subprocess.run([BIN / 'shellcheck', *scripts], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def test_a_program_is_started_until_it_must_not_be_or_is_done(tmp_path):
  cloud = Cloud(tmp_path, [[1, 75, 42, 137, 0]])
  script = scripts()['run-l0.sh']
  assert cloud.run(script) == 42
  assert len(cloud.started(0)) == 3
  assert cloud.state == 'ACTIVE'  # for the person who has to decide
  assert cloud.run(script) == 0
  assert len(cloud.started(0)) == 5
  assert cloud.state == ''
  assert cloud.verbs == ['create', 'delete']


def test_42_of_any_host_is_final(tmp_path):
  cloud = Cloud(tmp_path, [[75, 75, 0], [1, 75, 0], [75, 42, 0]])
  assert cloud.run(scripts()['run-l0.sh']) == 42
  assert [len(cloud.started(host)) for host in range(3)] == [2, 2, 2]


def test_a_slice_that_was_taken_back_is_asked_for_again(tmp_path):
  cloud = Cloud(tmp_path, [[0]])
  cloud.set_state('ACTIVE SUSPENDING SUSPENDED')
  # The program never starts on the slice that is going.
  (tmp_path / 'host0' / 'codes').write_text('255 0')
  assert cloud.run(scripts()['run-l0.sh']) == 0
  assert cloud.verbs == ['delete', 'create', 'delete']


def test_the_syncer_keeps_its_machine(tmp_path):
  cloud = Cloud(tmp_path, [[1, 0]])
  assert cloud.run(scripts()['run-syncer.sh']) == 0
  assert len(cloud.started(0)) == 2
  assert cloud.state  # it is stopped, and its disk has the folder of the run


def test_our_command_line_takes_the_commands(tmp_path):
  commands = []
  for number, text in enumerate(scripts().values()):
    (tmp_path / str(number)).mkdir()
    cloud = Cloud(tmp_path / str(number), [[0]])
    assert cloud.run(text) == 0
    (words,) = cloud.started(0)
    begin = words.index('diloco')
    assert words[begin - 4 : begin] == [
      *('--entrypoint=sh', 'registry/diloco:1', '-c', google_cloud.UNTIL_DONE)
    ]
    commands.append(words[begin:])
  syncer, l0 = command_line.read(commands)
  assert (syncer['listen'], syncer['tls']) == ('0.0.0.0:7070', '/certs/syncer')
  assert (l0['tls'], l0['hosts']) == ('/certs/l0', 'auto')
  assert l0['syncer'] == 'run-syncer.us-east5-b.c.p.internal:7070'
