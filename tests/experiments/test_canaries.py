"""Two studies that are short enough for every run of CI: rows that change by themselves have shown
faults that no other test looked for (docs/findings.md).

A schedule is the same on every machine, so its figures are equal to the last digit. A loss is not:
two machines differ by up to 0.8 %. If a change is meant to move a figure, write down the new one.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCHEDULES = {  # of each seed: steps of the run, merged, when due, participants
  'decoupled': [[315, 1.0, 0.9794, 3.9602], [314, 1.0, 0.9849, 3.9693]],
  'without l3': [[165, 1.0, 0.9919, 2.9887], [165, 1.0, 0.9919, 2.9887]],
  'up 4 steps': [[167, 1.0, 0.7485, 3.1955], [165, 1.0, 0.7439, 3.1977]],
}
LOSSES = {'baseline': 1.8312, 'decoupled': 1.9492, 'without l3': 2.8152, 'up 4 steps': 2.8157}
OFF = 0.01  # of a loss, on another machine; of the difference of two, half of it


@pytest.fixture(scope='module', name='rows')
def _rows(tmp_path_factory) -> dict[str, list[dict]]:
  """The rows of each arm, by seed. Processes of their own: as fast as they are compiled for."""
  out = tmp_path_factory.mktemp('canary')
  words = ['-m', 'experiments.studies.run', '--study=canary', f'--out={out}', '--jobs=2']
  plain = {'JAX_DISABLE_MOST_OPTIMIZATIONS': '0', 'JAX_NUM_CPU_DEVICES': '1'}
  done = subprocess.run(
    [sys.executable, *words], cwd=ROOT, env=os.environ | plain, stderr=subprocess.PIPE, text=True
  )
  assert done.returncode == 0, done.stderr
  by_study: dict[str, list[dict]] = {}
  rows = map(json.loads, (out / 'rows.jsonl').read_text('utf-8').splitlines())
  for row in sorted(rows, key=lambda row: row['seed']):
    by_study.setdefault(row['arm'], []).append(row)
  return by_study


def schedule(row: dict) -> list[float]:
  figures = (row[name] for name in ('steps', 'merged', 'when_due', 'participants'))
  return [round(figure, 4) for figure in figures]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize('arm, against', [('decoupled', 'baseline'), ('up 4 steps', 'without l3')])
def test_parity_and_the_worth_of_a_learner_with_a_thin_link_are_what_they_were(rows, arm, against):
  """A payload of l3 takes four steps on its link: it is asked less, and all of its work counts."""
  losses = {name: statistics.mean(row['loss'] for row in rows[name]) for name in (arm, against)}
  behind = losses[arm] / losses[against]
  assert behind == pytest.approx(LOSSES[arm] / LOSSES[against], abs=OFF / 2), losses
  assert losses == pytest.approx({name: LOSSES[name] for name in losses}, rel=OFF), losses
  schedules = {name: [*map(schedule, rows[name])] for name in losses if name in SCHEDULES}
  assert schedules == {name: SCHEDULES[name] for name in schedules}
