"""What the conditions of a run cost in loss is what the studies say."""

import pathlib

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.verification.virtual import conditions, losses, plan

STUDIES = pathlib.Path(__file__).parents[3] / 'docs/studies'


@pytest.mark.parametrize('name', losses.TABLES)
def test_every_figure_stands_on_its_page(name):
  table = losses.TABLES[name]
  lines = (STUDIES / table.page).read_text().splitlines()
  for at, (row, percent) in table.rows.items():
    [line] = [line for line in lines if line.startswith(f'| {row} |')]
    assert not percent or f'{percent:+.2f} ' in line, (at, line)
    assert name != 'when due' or f'| {at:.1%} |' in line.replace(' %', '%'), (at, line)


def test_the_figures_of_latency_in_the_guide_stand_on_the_page_of_links():
  guide = ' '.join((STUDIES.parent / 'howto/plan.md').read_text().split())
  page = (STUDIES / 'links.md').read_text()
  assert '1.8419 and 1.9323 against 1.7802' in guide
  for row in ('| latency 0 | 1.7802 |', '| latency 2 | 1.8419 |', '| latency 8 | 1.9323 |'):
    assert row in page


def costs(**settings) -> list[str]:
  """Of four learners, l3 with a link that carries half of what is due."""
  config = {'learners': 4, 'fragments': 24, 'period': 24, 'overlap': 4, 'ahead': 3, **settings}
  run = plan.Run(
    protocol=config_lib.ProtocolConfig(**config),
    values=(320_000,) * config['fragments'],
    codecs=('int8', 'int8'),
    step_s=(1.0,),
  )
  half = conditions.Line(up=sum(run.bytes[0]) / run.period_s / 2)
  lines = (*[conditions.Line()] * (config['learners'] - 1), half)
  return plan.loss(plan.dataclasses.replace(run, lines=lines))


def test_a_plan_names_the_cost_of_learners_period_and_a_thin_link():
  said = costs()
  assert said[:2] == [
    'M = 4: +5.91 % against data-parallel (learners.md)',
    'H = 24: +0.98 % against H = 12 (timing.md)',
  ]
  assert 'l3, 2 periods up: +0.24 % against without it (links.md)' in said
  assert not any('down' in one for one in said)


def test_where_most_links_are_thin_or_learners_wait_no_figure_is_given():
  assert not any('l1' in one for one in costs(learners=2))
  assert costs(max_lag=3) == []
