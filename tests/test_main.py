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
  found = {
    f'{folder.__name__}.{one.name}'
    for folder in (commands, verification_commands)
    for one in pkgutil.iter_modules(folder.__path__)
  }
  assert found == set(map(__main__.module, __main__.COMMANDS))


@pytest.mark.parametrize('words', [[], ['help'], ['--help']], ids=str)
def test_without_a_command_it_lists_them(words: list[str]):
  done = diloco(*words)
  assert done.returncode == 0 and not done.stderr
  for name, text in __main__.COMMANDS.items():
    assert name in done.stdout and text in done.stdout
  lines = done.stdout.splitlines()
  assert len(lines) <= 45 and max(map(len, lines)) <= 80


@pytest.mark.parametrize('name', __main__.COMMANDS)
def test_a_command_begins_with_examples_that_keep_their_lines(name: str):
  file = ROOT / (__main__.module(name).replace('.', '/') + '.py')
  assert f'\n    diloco {name}' in ast.get_docstring(ast.parse(file.read_text()))


def test_help_of_a_command_has_two_names():
  assert diloco('help', 'status').stdout == diloco('status', '--help').stdout


def test_an_unknown_command_is_one_line_and_42():
  done = diloco('trian', '--workdir=runs/x')
  assert (done.returncode, done.stdout) == (42, '')
  assert done.stderr == "error: there is no command 'trian'; did you mean train?\n"


def test_a_flag_that_would_do_nothing_is_refused():
  done = diloco('simulate', '--story')
  assert (done.returncode, done.stdout) == (42, '')
  assert done.stderr.startswith('error: --') and 'appl' in done.stderr


def test_ways_to_train_that_exclude_each_other_are_refused():
  done = diloco('train', '--config=stdlib_lm:tiny', '--syncer=none', '--controller=single')
  assert (done.returncode, done.stdout) == (42, '')
  assert 'exclude each other' in done.stderr


@pytest.mark.parametrize(
  'hosts, words',
  {
    '--hosts=two: give the number': ['--hosts=two'],
    '--host=2: with --hosts=2 it is 0 to 1': ['--hosts=2', '--host=2', '--coordinator=x:1'],
    '--hosts=2 needs --coordinator': ['--hosts=2', '--host=1'],
    'has one host': ['--hosts=auto', '--syncer=none'],
  }.items(),
)
def test_hosts_that_cannot_meet_are_refused(hosts: str, words: list[str], tmp_path):
  common = ['--config=stdlib_lm:tiny', '--learner=l0', '--syncer=x:1', f'--workdir={tmp_path}']
  done = diloco('learner', *common, *words)
  assert (done.returncode, done.stdout) == (42, '')
  assert hosts in done.stderr and done.stderr.count('\n') == 1


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


@pytest.mark.parametrize(
  'words',
  [
    ['train', '--workdir=gs://bucket/run'],
    ['train', '--resume', '--workdir', 's3://bucket/run'],
    ['restore', '--workdir=gs://bucket/run', '--to=latest'],
    ['chaos', '--workdir=gs://bucket/run'],
    ['syncer', '--workdir=gs://bucket/run', '--config=stdlib_lm:tiny'],
    ['replay', 'gs://bucket/run'],
  ],
  ids=lambda words: words[0],
)
def test_a_url_is_refused_in_one_line(words: list[str]):
  done = diloco(*words)
  assert done.returncode == 42 and done.stderr.count('\n') == 1, done.stderr
  assert '://bucket/run is a URL' in done.stderr
  assert '--config.train.store=gs://' in done.stderr, 'what may be one'
  assert not (ROOT / 'gs:').exists() and not (ROOT / 's3:').exists()


@pytest.mark.parametrize(
  'words, error',
  [
    (
      ['syncer', '--config=own_loop', '--config.model.num_layers=77'],
      '--config.model: a loop of your own has its model in its code, so this would do nothing',
    ),
    (['syncer', '--config=own_loop', '--transport_processes=3'], 'processes need HOST:PORT'),
    (['restore'], 'its syncer has written nothing there'),
  ],
)
def test_what_would_do_nothing_is_refused_at_once(words: list[str], error: str, tmp_path):
  done = diloco(*words, f'--workdir={tmp_path}')
  assert done.returncode == 42 and error in done.stderr.splitlines()[-1], done.stderr


def test_the_version():
  assert diloco('--version').stdout == f'diloco {diloco_jax.__version__}\n'


@pytest.mark.parametrize('here', [ROOT, '/usr'])
def test_a_command_that_we_print_works_wherever_it_is_pasted(here, tmp_path, monkeypatch):
  monkeypatch.chdir(here)
  text = f'{cli.command("--version")} && pwd'
  printed = subprocess.check_output(['sh', '-c', text], cwd=tmp_path, text=True)
  assert printed == f'diloco {diloco_jax.__version__}\n{here}\n'


@pytest.fixture(name='beside')
def _beside(tmp_path) -> pathlib.Path:
  """A folder of the start with files that have the names of Python's modules."""
  folder = tmp_path / "it's here"
  folder.mkdir()
  for name in ('secrets', 'token', 'random', 'types'):
    (folder / f'{name}.py').write_text('raise RuntimeError(__file__)', 'utf-8')
  return folder


def test_a_command_that_we_print_works_beside_any_files(beside, monkeypatch):
  monkeypatch.chdir(beside)
  printed = subprocess.check_output(['sh', '-c', cli.command('--version')], encoding='utf-8')
  assert printed == f'diloco {diloco_jax.__version__}\n'


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
  command = [*cli.PROGRAM, 'plan', '--config=own.py:x', '--step_s=1']
  done = subprocess.run(command, cwd=beside, capture_output=True, encoding='utf-8')
  assert done.returncode == 0 and 'own-7' in done.stdout, done.stdout + done.stderr


def test_the_processes_of_many_seeds_start_beside_any_files(beside, tmp_path_factory):
  """With the installed command, whose own folder is first on its path."""
  script = tmp_path_factory.mktemp('bin') / 'diloco'
  script.write_text(
    'from diloco_jax import __main__\nif __name__ == "__main__":\n  __main__.main()\n', 'utf-8'
  )
  command = [sys.executable, script, 'simulate', '--seeds=0:4', '--jobs=2']
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
  done = subprocess.run(command, cwd=beside, env=environment, capture_output=True, encoding='utf-8')
  assert done.returncode == 0, done.stdout + done.stderr


def test_a_flag_that_is_missing_is_explained():
  done = diloco('learner', '--workdir=x', '--learner=l0')
  assert done.returncode == 42
  assert done.stderr.startswith('error: --syncer is missing: Where the syncer listens: HOST:PORT')
  done = diloco('plan', '--config=stdlib_lm:tiny')
  assert done.stderr.endswith('once for each of l0, l1, ...\n'), 'without what absl adds'


def test_a_story_begins_with_what_was_drawn_and_the_unit_of_its_times():
  lines = diloco('simulate', '--seed=17', '--story').stdout.splitlines()
  head = lines.index('    ms node')
  drawn = ' '.join(lines[:head])
  assert drawn.startswith('seed 17: sync.') and 'sync.period=6' in drawn and 'quorum' not in drawn
  assert max(map(len, lines[:head])) <= 80 and lines[head + 1].split()[0].isdecimal()
