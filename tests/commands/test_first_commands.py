"""What a newcomer types first: diloco init, ./run.sh, report without a folder, completion."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from diloco_jax import __main__
from diloco_jax.commands import init
from diloco_jax.launch import cli
from diloco_jax.process import exits
from diloco_jax.report import folder as folder_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 280
ENVIRONMENT = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHON': sys.executable}


def run(*words: str | pathlib.Path, cwd: pathlib.Path) -> subprocess.CompletedProcess:
  """A command that ends; of a failure pytest shows the output."""
  done = subprocess.run(
    words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE_S
  )
  print(done.stdout, done.stderr)
  return done


def diloco(*words: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
  return run(*cli.PROGRAM, *words, cwd=cwd)


# --- diloco init ----------------------------------------------------------------------------------


@pytest.fixture(name='project')
def _project(tmp_path) -> pathlib.Path:
  assert diloco('init', 'project', cwd=tmp_path).returncode == 0
  return tmp_path / 'project'


def test_a_new_project_is_five_short_files(project):
  texts = {path.name: path.read_text('utf-8') for path in project.iterdir()}
  assert texts.keys() == {'.gitignore', 'README.md', 'config.py', 'loop.py', 'run.sh'}
  assert all(text.count('\n') < 80 for text in texts.values())
  assert texts['README.md'].startswith('# project\n') and 'runs/' in texts['.gitignore'].split()
  assert os.access(project / 'run.sh', os.X_OK)


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.full
def test_it_trains_two_learners_and_ends_with_the_report(project):
  done = run('./run.sh', '--config.train.steps=40', cwd=project)
  assert done.returncode == 0
  assert re.search(r'^http://127\.0\.0\.1:\d+/$', done.stdout, re.M), 'the page'
  (run_folder,) = (project / 'runs').iterdir()
  rows = re.findall(r'^learner (\S+) +(\d+) steps', done.stdout, re.M)
  assert len(dict(rows)) == 2 and all(int(steps) > 5 for _, steps in rows)
  assert 'T = 40 inner' in done.stdout and (run_folder / 'report' / 'index.html').is_file()
  again = diloco('report', '--noplot', cwd=project)
  assert again.returncode == 0 and rows[0][0] in again.stdout
  assert again.stderr == f'runs/{run_folder.name}, the newest of 1 in runs/\n'


def test_it_ends_at_once_and_says_why_if_the_syncer_does_not_start(project):
  done = run('./run.sh', '--config.sync.qourum=2', cwd=project)
  assert done.returncode == 1 and 'http' not in done.stdout
  assert 'the syncer has ended' in done.stderr and 'sync.quorum?' in done.stderr


@pytest.mark.parametrize('name', ['README.md', '.gitignore', 'run.sh', 'file'])
def test_a_file_that_is_there_is_kept_and_nothing_is_written(tmp_path, monkeypatch, name: str):
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_text('kept')
  why = 'file cannot be written' if name == 'file' else f'{name} is there already'
  with pytest.raises(exits.NeverRetry, match=why):
    init.main(['init', 'file' if name == 'file' else '.'])
  assert [path.name for path in tmp_path.iterdir()] == [name]
  assert (tmp_path / name).read_text() == 'kept'


def test_other_files_may_be_there(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'notes.txt').write_text('kept')
  init.main(['init', '.'])
  assert (tmp_path / 'README.md').read_text().startswith(f'# {tmp_path.name}\n')


# --- The newest run -------------------------------------------------------------------------------


def _record(path: pathlib.Path, time_s: int) -> None:
  path.parent.mkdir(parents=True)
  path.touch()
  os.utime(path, (time_s, time_s))


def test_without_a_folder_it_is_the_run_with_the_newest_record(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  _record(tmp_path / 'runs/z/records/syncer.jsonl', 100)
  _record(tmp_path / 'runs/a/records/syncer.jsonl', 200)
  _record(tmp_path / 'runs/l0/records/l0.jsonl', 300)  # the folder of a learner of one of them
  (tmp_path / 'runs/empty').mkdir()
  assert folder_lib.choose(None) == 'runs/a'
  assert capsys.readouterr() == ('', 'runs/a, the newest of 2 in runs/\n')
  (tmp_path / 'runs/l0/config.json').touch()  # it has trained alone
  assert folder_lib.choose(None) == 'runs/l0'
  assert folder_lib.choose('runs/z') == 'runs/z'


@pytest.mark.parametrize('command', ['status', 'report', 'evaluate', 'sample'])
def test_where_no_run_is_a_command_says_so(command: str, tmp_path):
  done = diloco(command, cwd=tmp_path)
  assert (done.returncode, done.stdout) == (42, '')
  assert 'there is no run in runs/ here: name its folder' in done.stderr
  assert done.stderr.count('\n') == 1


def test_where_the_syncer_is_matters_only_to_who_follows(tmp_path):
  done = diloco('evaluate', '--workdir=x', '--syncer=unix:x', cwd=tmp_path)
  assert done.returncode == 42 and 'matters with --follow only' in done.stderr


# --- Completion -----------------------------------------------------------------------------------


def test_bash_completes_the_names_of_commands(tmp_path):
  script = diloco('completion', 'bash', cwd=tmp_path).stdout
  ask = 'COMP_WORDS=(diloco "$1"); COMP_CWORD=1; _diloco; echo "${COMPREPLY[@]}"'
  for begun, completed in {'sta': 'status', 're': 'report replay restore', 'x': ''}.items():
    done = run('bash', '-c', f'{script}\n{ask}', 'bash', begun, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f'{completed}\n', '')


def test_bash_completes_flags_configs_and_runs(tmp_path):
  (tmp_path / 'runs/x').mkdir(parents=True)
  (tmp_path / 'runs/x/config.json').touch()
  script = diloco('completion', 'bash', cwd=tmp_path).stdout
  call = f'diloco() {{ {shlex.join(cli.PROGRAM)} "$@"; }}; compopt() {{ :; }}'
  ask = 'COMP_WORDS=(diloco "$@"); COMP_CWORD=$#; _diloco; echo "${COMPREPLY[@]}"'
  for words, completed in {
    ('train', '--wo'): '--workdir= --workdir=runs/x',
    ('train', '--config', '=', 'stdlib_lm:t'): 'stdlib_lm:tiny',
    ('report', '--workdir', '='): 'runs/x',
    ('report', 'ru'): 'runs/x',
    ('help', 'sta'): 'status',
    ('completion', 'z'): 'zsh',
  }.items():
    done = run('bash', '-c', f'{call}\n{script}\n{ask}', 'bash', *words, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f'{completed}\n', ''), words


@pytest.mark.parametrize('shell', ['bash', 'zsh', 'fish'])
def test_the_script_of_a_shell_has_every_command(shell: str, tmp_path):
  words = set(re.findall(r'[\w-]+', diloco('completion', shell, cwd=tmp_path).stdout))
  assert words >= __main__.COMMANDS.keys()


def test_completion_of_another_shell_is_refused(tmp_path):
  done = diloco('completion', 'csh', cwd=tmp_path)
  assert (done.returncode, done.stdout) == (42, '') and 'bash, zsh, fish' in done.stderr
