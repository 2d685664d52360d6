"""The commands of the README work as written."""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text()


def test_the_notebook_cell_trains_three_learners_in_one_process(tmp_path):
  """Single-controller mode: the islands of one process train, are merged, and end in order. With
  fewer steps than in the README."""
  (cell,) = re.findall(r'```python\n(.*?)```', README, re.S)
  cell, replaced = re.subn(r'train\.steps = \d+', 'train.steps = 24', cell)
  assert replaced == 1
  ended = subprocess.run(
    [sys.executable, '-c', cell],
    cwd=tmp_path,
    check=True,
    text=True,
    stdout=subprocess.PIPE,
    timeout=250,
    env={
      **os.environ,
      'PYTHONPATH': str(ROOT),
      'JAX_PLATFORMS': 'cpu',
      'PYTHONWARNINGS': '',
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    },
  )
  lines = ended.stdout.splitlines()
  assert all(line.startswith(('[syncer] ', '[l0] ', '[l1] ', '[l2] ')) for line in lines), lines
  facts = {
    path.stem: [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for path in (tmp_path / 'runs' / 'notebook' / 'records').glob('*.jsonl')
  }
  assert set(facts) == {'syncer', 'l0', 'l1', 'l2'}
  ledger = [fact for fact in facts['syncer'] if fact['name'] == 'ledger'][-1]
  # With K = 1 no sync waits, so the share of each learner depends on the scheduler.
  assert ledger['merged'] > 0 and all(row['tokens'] > 0 for row in ledger['learners'].values())
  assert ledger['trained'] * ledger['fragments'] == (
    ledger['merged'] + sum(ledger['discarded'].values())
  )
  losses = [fact['loss'] for fact in facts['syncer'] if fact['name'] == 'eval']
  assert losses[-1] < losses[0] - 0.2


def test_files_that_the_readme_names_exist():
  for target in re.findall(r'\]\((?!https?:|#)([^)#]+)\)', README):
    assert (ROOT / target).exists(), target
  for program in re.findall(r'python -m ([\w.]+)', README):
    assert (ROOT / (program.replace('.', '/') + '.py')).exists(), program


def test_no_placeholder_is_left():
  assert not re.search(r'@[A-Z]+@', README)
