"""A new engine is one file: this one writes batch scripts."""

import os
import pathlib
import subprocess
import sys

import pytest

from diloco_jax.launch import cli
from tests.certs import mint
from tests.launch.lib import command_line

_ENGINE = """
from absl import flags
from diloco_jax.launch import spec as spec_lib

_PARTITION = flags.DEFINE_string('partition', '', 'batch: where the programs run.')

def places(request):
  if not _PARTITION.value:
    raise ValueError('--engine=batch needs --partition')
  return spec_lib.Places(
    workdir='/scratch', syncer='head:7070', listen='0.0.0.0:7070', tls=request.tls
  )

def render(described, request, places):
  head = f'#SBATCH --partition={_PARTITION.value}'
  return {
    f'{one.name}.sh': f'{head} --nodes={one.hosts}\\n' + ' '.join(one.argv) + '\\n'
    for one in described.programs
  }
"""
_MAIN = """
import sys
from diloco_jax import __main__
from diloco_jax.launch import engines
engines.__path__.append(sys.argv.pop(1))
__main__.main()
"""
_ASKED = ('--config=gemma:1b', '--config.sync.learners=1', '--tls=certs')
_SYNCER = """\
#SBATCH --partition=p --nodes=1
diloco syncer --config=gemma:1b --config.sync.learners=1 --workdir=/scratch --tls=certs/syncer \
--listen=0.0.0.0:7070
"""
_LEARNER = """\
#SBATCH --partition=p --nodes=1
diloco learner --config=gemma:1b --config.sync.learners=1 --workdir=/scratch --tls=certs/l0 \
--learner=l0 --syncer=head:7070
"""


def launch(folder: pathlib.Path, *words: str) -> subprocess.CompletedProcess:
  (folder / 'batch.py').write_text(_ENGINE)
  if not (folder / 'certs').exists():
    mint.owner(folder / 'certs')
  command = [sys.executable, '-c', _MAIN, str(folder), 'launch', *words]
  env = {**os.environ, 'PYTHONPATH': str(command_line.ROOT)}
  return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_its_texts_are_printed_or_written(tmp_path):
  words = ('--engine=batch', '--partition=p', *_ASKED)
  done = launch(tmp_path, *words)
  assert done.returncode == 0, done.stderr
  assert done.stdout == f'# syncer.sh\n{_SYNCER}\n# l0.sh\n{_LEARNER}\n'
  done = launch(tmp_path, *words, f'--out={tmp_path}/out')
  assert done.stdout == ''.join(f'wrote {tmp_path}/out/{name}.sh\n' for name in ('syncer', 'l0'))
  assert (tmp_path / 'out' / 'syncer.sh').read_text() == _SYNCER
  assert (tmp_path / 'out' / 'l0.sh').read_text() == _LEARNER


def test_its_flags_are_listed(tmp_path):
  assert '--partition: batch: where the programs run.' in launch(tmp_path, '--help').stdout


@pytest.mark.parametrize(
  'words, error',
  [
    (['--engine=batch'], '--engine=batch needs --partition'),
    (
      ['--engine=local', '--partition=p'],
      '--partition applies to --engine=batch only, and this is --engine=local',
    ),
    (
      ['--engine=local', '--image=x'],
      '--image applies to --engine=gke only, and this is --engine=local',
    ),
    (
      ['--engine=batch', '--partition=p', '--out=/dev/null/x'],
      'cannot write /dev/null/x/syncer.sh',
    ),
  ],
)
def test_what_it_lacks_is_one_line(words, error, tmp_path):
  done = launch(tmp_path, *words, *_ASKED)
  assert (done.returncode, done.stdout) == (cli.NEVER_RETRY, '')
  assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
  assert error in done.stderr
