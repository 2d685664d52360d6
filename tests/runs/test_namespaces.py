"""Runs over mutual TLS between network namespaces, where they are allowed."""

import json
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


@pytest.mark.full
def test_learners_train_over_shaped_links(tmp_path: pathlib.Path):
  script = ROOT / 'experiments' / 'bandwidth_bench.py'
  words = [sys.executable, script, '--quick', '--only=^Decoupled int8, 50', f'--out={tmp_path}']
  ended = subprocess.run(words, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stdout + ended.stderr
  if ended.stdout.startswith(SKIPPED):
    return
  (row,) = json.loads((tmp_path / 'cells.json').read_text())['cells']
  assert all(45 <= rate <= 55 for rate in row['checked_mbit'].values())
  assert row['merged'] > 0.9 and 0 < row['on_time'] <= 1.05
  for way in ('bytes_up', 'bytes_down'):  # a payload has 1.08 MB; a busy machine syncs less often
    assert 0.8e6 < row[way] < 1.4e6
