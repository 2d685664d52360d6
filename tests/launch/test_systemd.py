"""Units of the engine systemd: what systemd and our command line read in them."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from diloco_jax.launch import cli
from diloco_jax.process import exits
from tests.certs import mint
from tests.launch.lib import command_line

ODD = '/data/100% of "$HOME"'


def units(folder: pathlib.Path, *flags: str) -> dict[str, str]:
  words = ['launch', '--engine=systemd', '--out=units', f'--workdir={ODD}', *flags]
  done = command_line.diloco(*words, cwd=folder)
  assert done.returncode == 0, done.stderr
  return {path.name: path.read_text() for path in (folder / 'units').iterdir()}


def values(unit: str, key: str) -> list[str]:
  """The words of a key, as systemd.service(5) and systemd.syntax(7) read them."""
  [line] = re.findall(f'^{key}=(.*)$', unit, re.MULTILINE)
  return [word.replace('%%', '%').replace('$$', '$') for word in shlex.split(line)]


@pytest.fixture(name='folder')
def _folder(tmp_path):
  folder = tmp_path / 'a "folder" of 100%'
  mint.owner(folder / 'certs')
  return folder


TWO = '--config=stdlib_lm:tiny', '--config.sync.learners=2', '--topology=cpu'


def test_our_command_line_takes_the_commands(folder):
  files = units(folder, *TWO, '--tls=certs', '--listen=0.0.0.0:7070', '--only=syncer,l0')
  assert sorted(files) == ['tiny-l0.service', 'tiny-syncer.service']
  commands = []
  for unit in files.values():
    words = values(unit, 'ExecStart')
    assert words[: len(cli.PROGRAM)] == list(cli.PROGRAM)
    commands.append(['diloco', *words[len(cli.PROGRAM) :]])
    assert values(unit, 'RestartPreventExitStatus') == [str(exits.NEVER_RETRY)]
    assert 'JAX_PLATFORMS=cpu' in values(unit, 'Environment')
    assert f'WorkingDirectory={folder}\n'.replace('%', '%%') in unit
  l0, syncer = command_line.read([commands[k] for k in map(list(files).index, sorted(files))])
  assert l0['workdir'] == syncer['workdir'] == ODD
  assert (l0['learner'], l0['tls']) == ('l0', str(folder / 'certs' / 'l0'))
  assert (syncer['listen'], syncer['tls']) == ('0.0.0.0:7070', str(folder / 'certs' / 'syncer'))


def test_a_loop_of_ones_own(folder):
  loop = f"{sys.executable} 'my loop.py' {{learner}} {{syncer}} {{workdir}}"
  files = units(folder, '--config=own_loop', f'--loop={loop}', '--only=l1')
  [unit] = files.values()
  address = f'file:{ODD}/syncer/address'
  assert values(unit, 'ExecStart') == [sys.executable, 'my loop.py', 'l1', address, ODD]


@pytest.mark.skipif(not shutil.which('systemd-analyze'), reason='no systemd: apt install systemd')
def test_systemd_finds_no_error(folder):
  units(folder, *TWO)
  checked = [str(path) for path in (folder / 'units').iterdir()]
  command = ['systemd-analyze', 'verify', '--man=no']
  done = subprocess.run([*command, *checked], capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
  assert len(checked) == 3
  wrong = folder / 'units' / 'tiny-l0.service'
  wrong.write_text(wrong.read_text().replace('KillMode=', 'KilMode='))
  done = subprocess.run([*command, str(wrong)], capture_output=True, text=True)
  assert 'KilMode' in done.stderr, 'it reads what is written'


@pytest.mark.parametrize(
  'flags, words',
  [
    (('--config.mesh.hosts=2',), 'a unit is one program of one machine; see --engine=gke'),
    (('--workdir=',), '--workdir=FOLDER'),
  ],
)
def test_what_is_missing_or_wrong_is_named(folder, flags, words):
  done = command_line.diloco('launch', '--engine=systemd', '--workdir=/x', *TWO, *flags, cwd=folder)
  assert done.returncode == exits.NEVER_RETRY and words in done.stderr
