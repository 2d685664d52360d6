"""The notebook runs from top to bottom in a kernel of its own."""

import ast
import json
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / 'experiments' / 'notebooks' / 'first_run.ipynb'
DEADLINE_S = 250


@pytest.fixture(name='notebook')
def _notebook() -> nbformat.NotebookNode:
  return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_kept_without_outputs(notebook):
  cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert cells and not any(cell.outputs or cell.execution_count for cell in cells)


def test_it_trains_a_run_and_a_loop_of_its_own_and_plots_them(notebook, tmp_path, monkeypatch):
  for name, value in {
    'PYTHONPATH': str(ROOT),
    'PYTHONWARNINGS': '',
  }.items():
    monkeypatch.setenv(name, value)
  monkeypatch.delenv('MPLBACKEND')  # the kernel shows its own
  client = NotebookClient(
    notebook, timeout=DEADLINE_S, kernel_name='python3', resources={'metadata': {'path': tmp_path}}
  )
  client.execute()
  outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == 'code'}
  first, last = ast.literal_eval(_text(outputs['cell-4']))
  assert last[1] < first[1] - 0.2
  assert float(_text(outputs['cell-7'])) < 1.5 < 4.16  # the logarithm of the number of words
  assert 'image/png' in outputs['cell-8'][-1].data

  facts = {
    path.stem: [json.loads(line) for line in path.read_text().splitlines()]
    for path in (tmp_path / 'runs' / 'notebook' / 'records').glob('*.jsonl')
  }
  assert set(facts) == {'syncer', 'l0', 'l1', 'l2'}
  ledger = [fact for fact in facts['syncer'] if fact['name'] == 'ledger'][-1]
  # With K = 1 no sync waits, so the share of each learner depends on the scheduler.
  assert ledger['merged'] > 0 and all(row['tokens'] > 0 for row in ledger['learners'].values())
  assert ledger['trained'] * ledger['fragments'] == (
    ledger['merged'] + sum(ledger['discarded'].values())
  )


def _text(outputs: list[nbformat.NotebookNode]) -> str:
  return outputs[-1].data['text/plain']
