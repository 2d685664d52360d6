"""The scripts set up what they need, once; `scripts/diloco` is the command of a checkout."""

import pathlib
import shutil
import subprocess
import sys

import pytest

import diloco_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOCKS = ('requirements.lock', 'requirements-test.lock')
PYTHON = """#!/bin/sh
case "$*" in
  *"-m pip "*) echo "$@" >> {folder}/installed; exit ;;
  *"-m compileall "*) exit ;;
esac
exec {python} "$@"
"""


@pytest.fixture(name='checkout')
def _checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  """A checkout whose Python only writes down what pip would install."""
  folder = tmp_path / 'a checkout'
  shutil.copytree(
    ROOT / 'scripts', folder / 'scripts', ignore=shutil.ignore_patterns('__pycache__')
  )
  for name in LOCKS:
    shutil.copy(ROOT / name, folder)
  (folder / 'diloco_jax').symlink_to(ROOT / 'diloco_jax')
  python = folder / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  (folder / '.venv' / 'lib').mkdir()
  python.write_text(PYTHON.format(folder=f'"{folder}"', python=sys.executable))
  python.chmod(0o755)
  return folder


def run(checkout: pathlib.Path, script: str, *words: str) -> tuple[str, list[str]]:
  """What a script prints in another folder, and the locks that it installs."""
  log = checkout / 'installed'
  log.write_text('')
  done = subprocess.run(
    [checkout / 'scripts' / script, *words],
    cwd=checkout.parent,
    capture_output=True,
    text=True,
    check=True,
  )
  return done.stdout, [line.split()[-1] for line in log.read_text().splitlines()]


def test_each_script_installs_what_it_needs_and_only_once(checkout: pathlib.Path):
  version = f'diloco {diloco_jax.__version__}\n'
  assert run(checkout, 'diloco', '--version') == (version, ['requirements.lock'])
  assert run(checkout, 'diloco', '--version') == (version, [])
  assert run(checkout, 'test.sh', '--version')[1] == ['requirements-test.lock']
  assert run(checkout, 'train.sh', '--help')[1] == [], 'the lock of the tests has both'


def test_the_command_runs_where_it_is_called(checkout: pathlib.Path):
  text, _ = run(checkout, 'diloco', 'certs', 'init', '--name=tiny', '--tls=keys')
  assert 'keys' in text and (checkout.parent / 'keys').is_dir()


def test_what_running_needs_is_locked_alike_for_the_tests():
  pins = [
    {line.split(' ;')[0] for line in (ROOT / name).read_text().splitlines()} for name in LOCKS
  ]
  assert pins[0] < pins[1]
