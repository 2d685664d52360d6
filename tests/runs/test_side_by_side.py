"""Systems of experiments/chaos_bench.py as real processes, with two learners and one kill."""

import pathlib

import pytest

from diloco_jax.report import records as records_lib
from experiments.side_by_side import run, systems


@pytest.mark.full
@pytest.mark.parametrize('system, starts', [(systems.RESTART_ALL, 2), (systems.ELASTIC, 1)])
def test_a_system_trains_on_after_a_kill(system: str, starts: int, tmp_path: pathlib.Path):
  cell = run.Cell(system=system, seed=27, clean_s=4.0, kills_s=35.0, floor_s=0.05, learners=2)
  (kill,) = cell.plan
  row = run.measure(cell, tmp_path / 'run', rehearse=False)
  assert row['kills'] == 1 and min(row['restarts_s']) > systems.DOWN_S, row
  facts = records_lib.TailAll(tmp_path / 'run').read()
  changes = [fact for _, fact in facts if fact['name'] == 'process']
  began = {
    name: [fact['t_ns'] for fact in changes if (fact['child'], fact['state']) == (name, 'starting')]
    for name in cell.names
  }
  (other,) = set(cell.names) - {kill.node}
  assert len(began[kill.node]) == 2 and len(began[other]) == starts, 'restart-all restarts it, too'
  (killed_ns,) = (change['t_ns'] for change in changes if change['text'].startswith('killed'))
  meanwhile = [
    fact
    for name, fact in facts
    if (name, fact['name']) == (other, 'step') and killed_ns < fact['t_ns'] < began[kill.node][1]
  ]
  assert (len(meanwhile) > 5) == (system == systems.ELASTIC), 'the survivor trains on meanwhile'
