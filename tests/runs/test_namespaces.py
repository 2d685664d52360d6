"""Runs over mutual TLS between network namespaces, where they are allowed."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 'skipped: network namespaces are not allowed here'


@pytest.mark.full
def test_three_namespaces_train_and_one_comes_back():
  words = [sys.executable, ROOT / 'scripts' / 'namespaces.py']
  ended = subprocess.run(words, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stdout + ended.stderr
  (line,) = ended.stdout.splitlines()
  assert line.startswith(SKIPPED) or (
    line.startswith('ok: ') and line.endswith('joined, lost, joined')
  ), line
