"""The picture shows what the state of a run has: losses on an axis, lives, deaths, pauses."""

import itertools

import pytest

from diloco_jax.report import picture
from diloco_jax.report import state as state_lib

NAN = float('nan')


def _run(**changed) -> dict:
  """l0 was killed and came back, l1 was lost, l2 never had a finite loss."""
  lives = [[0.0, 10.0, 40.0, 'killed'], [50.0, 60.0, 100.0, 'ended']]
  curve = ([1e3, 2e3, 2e3, 3e3], [None, 4.0, None, 2.0], ['', 'killed', '', ''])
  lost = {'lives': [[0.0, 5.0, 30.0, 'lost']], 'curve': ([1e3], [3.0], ['lost'])}
  never = {'lives': [[0.0, None, 20.0, 'ended']], 'curve': ([1e3], [NAN], ['killed'])}
  learners = {
    'l0': {'lives': lives, 'curve': curve, 'merges_s': [20.0, 70.0]},
    'l1': lost | {'merges_s': []},
    'l2': never | {'merges_s': []},
    'l3': {'lives': [], 'curve': ([], [], []), 'merges_s': []},
  }
  for learner in learners.values():
    learner['held_out'] = ([], [])  # of learners with models of their own
  return {
    'name': 'a run',
    'folder': '',
    'began_s': 0.0,
    'end_s': 100.0,
    'syncer_lives': [[0.0, 1.0, 100.0, 'ended']],
    'learners': learners,
    'held_out': ([1e3, 3e3], [4.5, 2.5]),
    'loss_unit': 'nats per byte',
    'pauses': [],
  } | changed


def _places(axes, marker: str) -> list[tuple[float, float]]:
  marks = [line for line in axes.get_lines() if line.get_marker() == marker]
  return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in marks]


def test_losses_with_gaps_are_on_a_logarithmic_axis_and_losses_below_0_are_not():
  axes = picture.draw(_run()).axes[0]
  assert axes.get_yscale() == 'log' and axes.get_ylabel() == 'loss, nats per byte'
  assert len([x for x in axes.get_yticks() if 2 <= x <= 4.5]) >= 3
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == [
    'learner l0, training loss',
    'learner l1, training loss',
    'global model, held-out loss',
  ]
  below = picture.draw(_run(held_out=([1e3, 2e3], [-1.0, None]))).axes[0]
  assert below.get_yscale() == 'linear'


@pytest.mark.parametrize(
  'losses', [[7.1, 6.7], [5.5, 4.3], [2.5, 0.01], [4.5, 4.5], [4.5]], ids=str
)
def test_the_axis_of_the_losses_has_three_numbers_that_do_not_touch(losses):
  learner = {'lives': [[0.0, 1.0, 9.0, 'killed']], 'held_out': ([], []), 'merges_s': []}
  learner['curve'] = ([1e3, 2e3][: len(losses)], losses, ['', 'killed'][-len(losses) :])
  figure = picture.draw(_run(learners={'l0': learner}, held_out=([], [])))
  figure.draw_without_rendering()
  axes = figure.axes[0]
  shown = [tick.label1.get_window_extent() for tick in axes.yaxis.get_major_ticks()]
  assert len(shown) >= 3 and all(a.y1 < b.y0 for a, b in itertools.pairwise(shown))
  low, high = axes.get_ylim()
  assert low < min(losses) and max(losses) < high < 2 * max(losses)
  name, numbers = axes.texts[0].get_window_extent(), axes.xaxis.get_tightbbox()
  assert name.y0 > numbers.y1, 'the name of the killed one is no number of the axis below'


def test_a_death_is_marked_on_the_curve_and_in_the_lane():
  top, bottom = picture.draw(_run()).axes
  assert _places(top, 'X') == [(2e3, 4.0), (1e3, 3.0)]
  assert [text.get_text().strip() for text in top.texts] == ['l0 killed', 'l1 lost']
  assert _places(bottom, 'X') == [(40.0, 1.0), (30.0, 2.0)]
  assert _places(bottom, '>') == [(60.0, 1.0)], 'the first start is no return'
  assert [text.get_text() for text in bottom.get_yticklabels()] == ['syncer', 'l0', 'l1', 'l2']


def test_a_life_is_a_faint_bar_until_its_first_step_and_a_full_one_after_it():
  bars = picture.draw(_run()).axes[1].patches
  spans = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_alpha()) for bar in bars]
  assert spans[2:6] == [(0, 10, 0.25), (10, 40, None), (50, 60, 0.25), (60, 100, None)]
  assert spans[-2:] == [(0, 20, 0.25), (20, 20, None)], 'l2 made no step'


def test_a_long_pause_is_short_in_the_lanes_and_said():
  pause = (40.0, 1000.0)
  run = _run(pauses=[pause], end_s=1100.0)
  run['learners']['l0']['lives'][1] = [1045.0, 1050.0, 1100.0, 'ended']
  bottom = picture.draw(run).axes[1]
  short = [state_lib.shorten([pause], at_s) for at_s in (1050.0, 1100.0)]
  assert _places(bottom, '>') == [(pytest.approx(short[0]), 1.0)] and short[1] < 200
  assert bottom.get_xlim()[1] == pytest.approx(short[1] * 1.01)
  assert bottom.get_xlabel() == 'seconds since the start, with shorter pauses'
