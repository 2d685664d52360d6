"""Machines train as long as their islands can; tables agree with the paper and with formulas."""

import csv

import pytest

from diloco_jax.protocol import config as protocol_config
from diloco_jax.verification.sim import hardware
from experiments.goodput import formulas, islands, machines, paper, tables, views


def _by(figures, what, made=tables.MACHINES):
  return {(o.row, o.column): o.ours for o in figures if (o.what, o.made) == (what, made)}


@pytest.mark.parametrize(('row', 'chips'), [('M=4', 2_400_000), ('M=8', 600_000)])
def test_machines_train_exactly_as_long_as_their_islands_can(row, chips):
  figures = tables.machines_of(row, chips, 'wan', warm_up_s=30, measured_s=120)
  shares = [o.ours for o in figures if o.what == 'goodput of the same minutes, %']
  assert len(shares) == 2 and abs(shares[0] - shares[1]) <= tables.EQUAL
  assert 50 < shares[0] < 99
  (tokens,) = _by(figures, 'token goodput of the same minutes, %').values()
  assert shares[0] - 6 < tokens < shares[0] + 6


def test_learners_that_wait_for_one_another_train_less_than_their_islands_can():
  config = machines.settings(4, quorum=4, overlap=0)
  slices = hardware.of_chips(600_000)
  result = machines.run(config, slices=slices, delays='lan', warm_up_s=30, measured_s=120)
  assert result.goodput < result.able - 0.1
  alone = islands.alone(slices, 4, 120 / 3_600, warm_up_s=30)
  assert result.able == pytest.approx(alone.goodput, abs=1e-9)


@pytest.mark.long
def test_unequal_learners_give_what_the_paper_prints():
  rows = {'K=8': tables.BARRIER, 'alone': {**tables.OVERWRITE, 'grace_permille': 0}, 'ours': {}}
  found = {row: tables.unequal(row, 'none', 60, None, **more) for row, more in rows.items()}
  goodput = {row: _by(f, tables.GOODPUT)[row, 'none'] for row, f in found.items()}
  merged = {row: _by(f, 'merged, % of the trained')[row, 'none'] for row, f in found.items()}
  assert abs(goodput['K=8'] - 83.7) < 1 and min(goodput['alone'], goodput['ours']) >= 99.5
  assert merged['alone'] <= 20 and merged['ours'] >= 94


def test_the_closed_forms_agree_with_the_published_goodput():
  for row, published in paper.GOODPUT.items():
    for chips, theirs in zip(paper.CHIPS, published):
      learners = int(row.removeprefix('M=')) if row.startswith('M=') else 1
      slices = hardware.of_chips(chips / learners, rigid=row == paper.RIGID)
      ours = (formulas.rigid if slices.rigid else formulas.elastic)(slices)
      assert abs(100 * ours - theirs) <= 4, (row, chips)


def test_scavenging_agrees_with_the_published_figures():
  (job,) = tables.TABLES['scavenging'](quick=True).jobs
  assert all(abs(one.difference) < 0.02 for one in job.make())


def test_a_report_has_every_figure_and_says_how_it_was_made(tmp_path):
  figures = [
    *tables.islands_of(paper.RIGID, 150_000, hours=2),
    *tables.islands_of('M=4', 150_000, hours=2),
  ]
  table = tables.Table(
    title='a title', jobs=(), notes='a note', verdicts=lambda all_: iter([f'{len(all_)} figures'])
  )
  lines = views.text_of(table, figures).splitlines()
  assert lines[:2] == ['a title', 'a note'] and lines[-1] == '6 figures'
  head = lines.index('goodput, % (islands; paper / ours, difference)')
  assert lines[head + 1].split() == ['150k']
  assert lines[head + 2].startswith('DP, rigid') and ' 72 / 7' in lines[head + 2]
  views.write_csv(figures, tmp_path / 'table.csv')
  rows = list(csv.DictReader((tmp_path / 'table.csv').read_text('utf-8').splitlines()))
  assert {row['made'] for row in rows} == {'islands', 'formula'} and len(rows) == 6
  views.plot(table, figures, tmp_path / 'table.png')
  assert (tmp_path / 'table.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.long
@pytest.mark.parametrize(('delays', 'overlap', 'flight'), [('lan', 2, 1), ('wan', 3, 2)])
def test_tokens_that_are_overwritten_follow_a_formula(delays, overlap, flight):
  """Learners that give a fragment when it is due, and overwrite what they trained since, lose
  `flight` steps of every H; and of a pause all steps since the fragments were given before it."""
  adopt = protocol_config.ADOPT.index('overwrite')
  config = machines.settings(4, adopt=adopt, ahead=0, overlap=overlap)
  slices = hardware.of_chips(150_000)
  result = machines.run(config, slices=slices, delays=delays, warm_up_s=60, measured_s=600)
  paused = islands.alone(slices, 4, 600 / 3_600, warm_up_s=60).paused
  period_s = config.period * machines.STEP_S
  formula = result.goodput * (1 - flight / config.period) - paused * (
    1 - slices.downscale_s / (2 * period_s)
  )
  assert paused > 0.05 and result.token_goodput == pytest.approx(formula, abs=0.015)
