"""Systems of experiments/chaos_bench.py as real processes, with two learners and one kill."""

import pathlib

import pytest

from experiments.side_by_side import run, systems


@pytest.mark.full
@pytest.mark.parametrize('system', [systems.RESTART_ALL, systems.ELASTIC])
def test_a_system_trains_on_after_a_kill(system: str, tmp_path: pathlib.Path):
  cell = run.Cell(system=system, seed=27, clean_s=3.0, kills_s=35.0, floor_s=0.05, learners=2)
  row = run.measure(cell, tmp_path / 'run')
  (restart_s,) = row['restarts_s']
  assert row['kills'] == 1 and restart_s > systems.DOWN_S, row
  if system == systems.RESTART_ALL:  # the other process starts again, too
    assert row['waits_s'] > systems.DOWN_S, row
    assert row['token_goodput'] < row['goodput'], 'steps since the checkpoint are made again'
  else:
    assert row['waits_s'] < systems.DOWN_S / 2, row
