"""A cell of the bench on shaped links, where network namespaces are allowed."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / 'experiments' / 'bandwidth_bench.py'


@pytest.mark.full
def test_learners_train_over_shaped_links(tmp_path: pathlib.Path):
  words = [sys.executable, SCRIPT, '--short', '--only=Decoupled int8, 50', f'--out={tmp_path}']
  ended = subprocess.run(words, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stdout + ended.stderr
  if ended.stdout.startswith('skipped: network namespaces are not allowed here'):
    return
  (row,) = json.loads((tmp_path / 'cells.json').read_text())['cells']
  assert all(45 <= rate <= 55 for rate in row['checked_mbit'].values())
  assert row['merged'] > 0.9 and 0 < row['on_time'] <= 1.01
  for way in ('bytes_up', 'bytes_down'):  # a payload of 1.08 MB a step; a busy machine makes fewer
    assert 0.8e6 < row[way] < 1.4e6
