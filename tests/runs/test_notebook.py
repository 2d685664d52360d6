"""Each notebook runs from top to bottom in a kernel of its own, and shows what it promises."""

import pathlib
import re

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import diloco_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / 'experiments' / 'notebooks'
ALL = sorted(path.stem for path in FOLDER.glob('*.ipynb'))
DEADLINE_S = 250  # of a cell


def _cells(name: str) -> list[nbformat.NotebookNode]:
  cells = nbformat.read(FOLDER / f'{name}.ipynb', as_version=4).cells
  return [cell for cell in cells if cell.cell_type == 'code']


@pytest.fixture(name='execute')
def _execute(tmp_path, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setenv('PYTHONWARNINGS', '')
  monkeypatch.delenv('MPLBACKEND')  # the kernel shows its own

  def execute(name: str) -> str:
    """Returns everything that the cells have shown as text, and the types of the rest."""
    notebook = nbformat.read(FOLDER / f'{name}.ipynb', as_version=4)
    where = {'metadata': {'path': tmp_path}}
    NotebookClient(notebook, timeout=DEADLINE_S, kernel_name='python3', resources=where).execute()
    shown = []
    for cell in notebook.cells:
      for output in cell.get('outputs', ()):
        assert output.get('name') != 'stderr', output.text
        shown += [output.text] if 'text' in output else [*output.data, output.data['text/plain']]
    return '\n'.join(shown)

  return execute


@pytest.mark.parametrize('name', ALL)
def test_it_is_kept_without_outputs_installs_first_and_parses_no_file(name):
  first, *rest = _cells(name)
  assert '%pip install -q diloco-jax' in first.source
  assert not any(cell.outputs or cell.execution_count for cell in (first, *rest))
  assert not re.search(r'jsonl?\b|\.read_text|\.loads\(', '\n'.join(cell.source for cell in rest))


@pytest.mark.long
def test_a_first_run_learns_is_shown_and_continues(execute, tmp_path):
  shown = execute('first_run')
  before, after, merged = re.search(
    r'held-out loss (\S+) before, (\S+) after; (\d+)% of the tokens merged', shown
  ).groups()
  assert float(after) < float(before) - 0.2 and int(merged) > 0
  assert '26,848 parameters' in shown and shown.count('<Figure') == 1
  run = diloco_jax.open_run(tmp_path / 'runs' / 'first')
  assert set(run.summary['learners']) == {'l0', 'l1', 'l2'}
  assert 60 < max(run.losses(name).clock.max() for name in ('l0', 'l1', 'l2')) <= 120
  assert run.evaluations.clock[-1] == 120 and (np.diff(run.evaluations.tokens) >= 0).all()
  assert run.summary['tokens_trained'] == (
    run.summary['tokens_merged'] + sum(run.summary['tokens_discarded'].values())
  )


@pytest.mark.full
def test_an_own_model_is_a_task_or_a_loop(execute, tmp_path):
  shown = execute('own_model')
  merged, guess = re.search(r'the merged model: (\S+), a guess: (\S+)', shown).groups()
  assert float(merged) < 1.5 < float(guess)
  assert shown.count('image/png') == 2
  task, loop = (diloco_jax.open_run(tmp_path / 'runs' / name) for name in ('task', 'loop'))
  assert task.evaluations.loss[-1] < 0.5 * task.evaluations.loss[0]
  for learner in ('l0', 'l1'):
    losses = loop.losses(learner).loss
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.full
def test_a_killed_learner_comes_back_and_the_others_go_on(execute, tmp_path):
  assert 'exit code 0' in execute('kill_a_learner')
  summary = diloco_jax.open_run(tmp_path / 'runs' / 'kill').summary
  (kill,) = summary['kills']
  assert kill['learner'] == 'l1' and kill['survivors_step_seconds_after']
  assert summary['learners']['l1']['processes'] == 2


@pytest.mark.full
def test_three_methods_learn_alike_and_only_decoupled_diloco_does_not_wait(execute):
  rows = dict(re.findall(r'^(\w+) +loss (\S+, time +\d+)', execute('three_methods'), re.M))
  loss, time = ({m: float(row.split()[i].strip(',')) for m, row in rows.items()} for i in (0, 2))
  assert max(loss.values()) < 1.1 * min(loss.values())
  assert time['decoupled'] < min(time['diloco'], time['streaming'])


@pytest.mark.full
def test_lora_exchanges_the_adapters_alone(execute):
  shown = execute('lora')
  before, after = re.search(r'loss (\S+) before, (\S+) with the merged', shown).groups()
  assert float(after) < 0.5 * float(before)
  adapters, whole = re.search(r'([\d,]+) of ([\d,]+) numbers were exchanged', shown).groups()
  assert int(adapters.replace(',', '')) < 0.2 * int(whole.replace(',', ''))


@pytest.mark.full
def test_a_run_is_analysed_and_a_fleet_predicted(execute):
  shown = execute('analyse_and_predict')
  rates = dict(re.findall(r'^K=(\d).*every  5 min.* ([\d,]+) a second', shown, re.M))
  assert int(rates['1'].replace(',', '')) > int(rates['8'].replace(',', ''))
