"""ruff check and ruff format find nothing."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize('command', [['check'], ['format', '--check']], ids=' '.join)
def test_ruff_finds_nothing(command):
  done = subprocess.run(
    [sys.executable, '-m', 'ruff', *command, '.'], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout + done.stderr
