"""The command `diloco`: its commands, and what it says about a wrong one."""

import ast
import itertools
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import diloco_jax
from diloco_jax import __main__, commands
from diloco_jax.launch import cli
from diloco_jax.verification import commands as verification_commands
from tests.launch.lib.command_line import diloco

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_the_list_of_commands_is_that_of_the_folders():
  modules = {
    f'{folder.__name__}.{module.name}'
    for folder in (commands, verification_commands)
    for module in pkgutil.iter_modules(folder.__path__)
  }
  assert modules == set(map(__main__.module, __main__.COMMANDS))


def test_without_a_command_it_lists_them():
  done = diloco()
  assert done.returncode == 0 and not done.stderr
  for name, text in __main__.COMMANDS.items():
    assert name in done.stdout and text in done.stdout
  lines = done.stdout.splitlines()
  assert len(lines) <= 45 and max(map(len, lines)) <= 80
  assert diloco('help').stdout == diloco('--help').stdout == done.stdout


@pytest.mark.parametrize('name', __main__.COMMANDS)
def test_a_command_begins_with_examples_that_keep_their_lines(name: str):
  file = ROOT / (__main__.module(name).replace('.', '/') + '.py')
  assert f'\n    diloco {name}' in ast.get_docstring(ast.parse(file.read_text()))


def test_help_of_a_command_has_two_names():
  assert diloco('help', 'status').stdout == diloco('status', '--help').stdout


LEARNER = 'learner --config=stdlib_lm:tiny --learner=l0 --syncer=x:1 --workdir={folder}'
SYNCER = 'syncer --config=stdlib_lm:tiny --workdir={folder}'
OWN_LOOP = 'syncer --config=own_loop --workdir={folder}'
NO_URL = (
  'error: .*://bucket/run is a URL: only folders .* --config.train.store=gs://'  # what may be one
)


@pytest.mark.parametrize(
  'words, error',
  {
    'trian --workdir=runs/x': "error: there is no command 'trian'; did you mean train\\?$",
    'simulate --story': 'error: --.*appl',
    'train --config=stdlib_lm:tiny --syncer=none --controller=single': 'exclude each other',
    f'{LEARNER} --hosts=two': '--hosts=two: give the number',
    f'{LEARNER} --hosts=2 --host=2 --coordinator=x:1': '--host=2: with --hosts=2 it is 0 to 1',
    f'{LEARNER} --hosts=2 --host=1': '--hosts=2 needs --coordinator',
    f'{LEARNER} --hosts=auto --syncer=none': 'has one host',
    'learner --workdir=x --learner=l0': (
      'error: --syncer is missing: Where the syncer listens: HOST:PORT'
    ),
    'plan --config=stdlib_lm:tiny': 'once for each of l0, l1, ...$',  # without what absl adds
    'train --workdir=gs://bucket/run': NO_URL,
    'train --resume --workdir s3://bucket/run': NO_URL,
    'restore --workdir=gs://bucket/run --to=latest': NO_URL,
    'chaos --workdir=gs://bucket/run': NO_URL,
    'syncer --workdir=gs://bucket/run --config=stdlib_lm:tiny': NO_URL,
    'replay gs://bucket/run': NO_URL,
    f'{OWN_LOOP} --config.model.num_layers=77': (
      '--config.model: a loop of your own has its model in its code, so this would do nothing'
    ),
    f'{OWN_LOOP} --transport_processes=3': 'processes need HOST:PORT',
    f'{SYNCER} --init=there': 'that of its task',
    'train --config=stdlib_lm:tiny --config.data.corpus=/nonexistent': '/nonexistent',
    'restore --workdir={folder}': 'its syncer has written nothing there',
  }.items(),
)
def test_what_cannot_be_or_would_do_nothing_is_refused_in_one_line(words, error, tmp_path):
  done = diloco(*words.format(folder=tmp_path).split())
  assert (done.returncode, done.stdout) == (42, '')
  assert done.stderr.count('\n') == 1 and re.search(error, done.stderr), done.stderr
  assert not (ROOT / 'gs:').exists() and not (ROOT / 's3:').exists()


@pytest.mark.parametrize(
  'words', [f'{SYNCER} --listen=0.0.0.0:0', f'{LEARNER} --syncer=10.0.0.1:7070']
)
def test_an_address_of_a_network_needs_certificates(words, tmp_path):
  done = diloco(*words.format(folder=tmp_path).split())
  assert done.returncode == 42 and done.stderr.count('\n') == 1, done.stderr
  assert 'give tls' in done.stderr


@pytest.mark.full
@pytest.mark.parametrize('command', __main__.COMMANDS)
def test_help_of_a_command_shows_its_flags_and_is_no_error(command: str):
  done = diloco(command, '--help')
  assert done.returncode == 0 and not done.stderr, done.stderr
  assert f'diloco {command}' in done.stdout
  assert '\n  --' in done.stdout or command in ('example', 'init', 'replay'), 'they have none'
  lines = done.stdout.splitlines()
  assert len(lines) <= 45 and max(map(len, lines)) <= 80, (len(lines), max(lines, key=len))
  assert 'allow_failpoints' not in done.stdout, 'it is for tests'
  assert 'that of --workdir' not in done.stdout or '\n  --workdir=' in done.stdout
  examples = done.stdout.partition('\nFlags:')[0].splitlines()
  for line, following in itertools.pairwise(examples):  # each can be copied to a shell
    assert not following.startswith('      --') or line.endswith('\\'), following
    assert not line.endswith('\\') or len(line.strip(' \\') + following) > 70, 'it fits'
  flags = re.findall(r'^  --\S+: (.*(?:\n      .*)*)', done.stdout, re.M)
  for about in (re.sub(r'\s+', ' ', flag) for flag in flags):  # each a whole sentence
    words = re.sub(r' \(default: .*\)$|^(gke|local|ray|slurm)(, \w+)*: ', '', about)
    assert words.endswith(('.', '...')) and len(words.split()) > 3, about
    assert not words.startswith(('Of ', 'To ', 'Instead ', 'On ', 'That ')), about


def test_the_version():
  assert diloco('--version').stdout == f'diloco {diloco_jax.__version__}\n'


@pytest.fixture(name='beside')
def _beside(tmp_path) -> pathlib.Path:
  """A folder of the start with files that have the names of Python's modules."""
  folder = tmp_path / "it's here"
  folder.mkdir()
  for name in ('secrets', 'token', 'random', 'types'):
    (folder / f'{name}.py').write_text('raise RuntimeError(__file__)', 'utf-8')
  return folder


def test_a_command_that_we_print_works_wherever_it_is_pasted_beside_any_files(beside, monkeypatch):
  monkeypatch.chdir(beside)
  text = f'{cli.command("--version")} && pwd'
  printed = subprocess.check_output(['sh', '-c', text], cwd='/usr', encoding='utf-8')
  assert printed == f'diloco {diloco_jax.__version__}\n{beside}\n'


def test_with_dash_m_the_folder_of_the_start_is_on_no_path(beside):
  """Once Python itself has started: types.py would end that."""
  (beside / 'types.py').unlink()
  command = [sys.executable, '-m', 'diloco_jax', 'train', '--help']
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
  subprocess.run(command, cwd=beside, env=environment, check=True, stdout=subprocess.DEVNULL)


def test_the_programs_of_a_run_find_what_is_beside_a_config(beside):
  """And still no file there is taken for a module of Python's."""
  (beside / 'mine.py').write_text('STEPS = 7', 'utf-8')
  (beside / 'own.py').write_text(
    'import secrets, mine\n'
    'from diloco_jax.configs import stdlib_lm\n'
    'def get_config(variant):\n'
    '  config = stdlib_lm.get_config("tiny")\n'
    '  config.name = f"{secrets.token_hex(1)[:0]}own-{mine.STEPS}"\n'
    '  return config\n',
    'utf-8',
  )
  command = [*cli.PROGRAM, 'launch', '--engine=systemd', '--config=own.py:x', '--workdir=/x']
  done = subprocess.run(command, cwd=beside, capture_output=True, encoding='utf-8')
  assert done.returncode == 0 and 'own-7' in done.stdout, done.stdout + done.stderr


def test_the_processes_of_many_seeds_start_beside_any_files(beside, tmp_path_factory):
  """With the installed command, whose own folder is first on its path."""
  script = tmp_path_factory.mktemp('bin') / 'diloco'
  script.write_text(
    'from diloco_jax import __main__\nif __name__ == "__main__":\n  __main__.main()\n', 'utf-8'
  )
  command = [sys.executable, script, 'simulate', '--seeds=0:2', '--jobs=2']
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
  done = subprocess.run(command, cwd=beside, env=environment, capture_output=True, encoding='utf-8')
  assert done.returncode == 0, done.stdout + done.stderr


def test_a_story_begins_with_what_was_drawn_and_the_unit_of_its_times():
  lines = diloco('simulate', '--seed=17', '--story').stdout.splitlines()
  head = lines.index('    ms node')
  drawn = ' '.join(lines[:head])
  assert drawn.startswith('seed 17: sync.') and 'sync.period=6' in drawn and 'quorum' not in drawn
  assert max(map(len, lines[:head])) <= 80 and lines[head + 1].split()[0].isdecimal()
