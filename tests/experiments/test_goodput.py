"""Machines train as long as their islands can, and the closed forms agree with the paper."""

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.verification.sim import hardware
from experiments.goodput import failures, islands, machines


@pytest.mark.parametrize('cell', [('M=4', 2_400_000), ('M=8', 600_000)])
def test_machines_train_exactly_as_long_as_their_islands_can(cell):
  """Else it raises. Of a token goodput the time of the islands is about the most."""
  tokens = failures.token_goodput(cell, 'wan', warm_up_s=30, measured_s=120)
  assert abs(tokens - failures.goodput(cell, hours=48)) < 6


def test_learners_that_wait_for_one_another_train_less_than_their_islands_can():
  config = machines.settings(4, quorum=4, overlap=0)
  slices = hardware.of_chips(600_000)
  result = machines.run(config, slices=slices, delays='lan', warm_up_s=30, measured_s=120)
  assert result.goodput < result.able - 0.1
  alone = islands.alone(slices, 4, 120 / 3_600, warm_up_s=30)
  assert result.able == pytest.approx(alone.goodput, abs=1e-9)


def test_the_closed_forms_agree_with_the_published_goodput():
  for row, published in failures.PAPER.items():
    for chips, theirs in zip(failures.CHIPS, published):
      assert abs(failures.closed_form((row, chips)) - theirs) <= 4, (row, chips)


def test_the_table_has_the_published_figures_beside_ours(capsys):
  shares = {(row, chips): 50.0 for row in (failures.RIGID, 'M=4') for chips in failures.CHIPS}
  failures.show('a title', shares, published=True)
  _, title, head, rigid, decoupled = capsys.readouterr().out.splitlines()
  assert title == 'a title' and head.split() == [f'{chips:,}' for chips in failures.CHIPS]
  assert rigid.startswith('DP, rigid ') and '72 / 50.00' in rigid and '96 / 50.00' in decoupled


@pytest.mark.long
@pytest.mark.parametrize(('delays', 'overlap', 'flight'), [('lan', 2, 1), ('wan', 3, 2)])
def test_tokens_that_are_overwritten_follow_a_formula(delays, overlap, flight):
  """Learners that give a fragment when it is due, and overwrite what they trained since, lose
  `flight` steps of every H; and of a pause all steps since the fragments were given before it."""
  adopt = config_lib.ADOPT.index('overwrite')
  config = machines.settings(4, adopt=adopt, ahead=0, overlap=overlap)
  slices = hardware.of_chips(150_000)
  result = machines.run(config, slices=slices, delays=delays, warm_up_s=60, measured_s=600)
  paused = islands.alone(slices, 4, 600 / 3_600, warm_up_s=60).paused
  period_s = config.period * machines.STEP_S
  formula = result.goodput * (1 - flight / config.period) - paused * (
    1 - slices.downscale_s / (2 * period_s)
  )
  assert paused > 0.05 and result.token_goodput == pytest.approx(formula, abs=0.015)
