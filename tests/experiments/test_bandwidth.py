"""Bandwidth between sites: machines on shared links and the ring agree with what can be counted."""

import dataclasses

import pytest

from diloco_jax.verification.sim import network
from experiments.goodput import bandwidth, paper, sites, views

GBIT = sites.GBIT
TWO = sites.Where(parameters=1e9, learners=2, sites=2)
DILOCO, DECOUPLED = bandwidth.METHODS['DiLoCo, bf16'], bandwidth.METHODS['Decoupled, int4']


@pytest.mark.parametrize('where', [TWO, sites.Where()])
def test_a_ring_carries_each_gradient_twice_but_for_the_parts_that_are_there(where):
  rate, layers = 100 * GBIT, 48
  found = {hides: sites.ring(where, rate, layers, hides=hides) for hides in sites.HIDDEN}
  sent_bytes = 2 * (where.sites - 1) / where.sites * network.wire_bytes(2 * int(where.parameters))
  assert all(one.site_bytes == pytest.approx(sent_bytes, rel=1e-4) for one in found.values())
  sent_s = sent_bytes / rate
  nothing, backward, step = (1 / found[hides].computing for hides in sites.HIDDEN)
  assert nothing == pytest.approx(1 + sent_s, rel=1e-4)
  assert step == pytest.approx(max(1, sent_s), rel=1e-4)
  # The layer that is first in the backward pass is the first to be reduced, the last one ends it.
  least = max(1 + sent_s / layers, 1 / 3 + 2 / 3 / layers + sent_s)
  assert step < backward < nothing and backward == pytest.approx(least, rel=1e-4)


def test_lock_step_waits_for_the_payload_up_and_the_delta_down():
  rate = 8 * GBIT
  found = sites.run(DILOCO, TWO, rate, periods=1)
  period_s, payload_s = 24, network.wire_bytes(2 * int(TWO.parameters)) / rate
  assert found.computing == pytest.approx(period_s / (period_s + 2 * payload_s), rel=1e-3)
  assert found.useful == found.merged == pytest.approx(found.computing)
  assert found.site_bytes * period_s == pytest.approx(payload_s * rate, rel=1e-3)


def test_learners_behind_one_link_share_it():
  four, rate = dataclasses.replace(TWO, learners=4), 4 * GBIT
  alone = sites.run(DILOCO, TWO, rate, periods=1)
  at_two_sites = sites.run(DILOCO, four, 2 * rate, periods=1)
  through_the_hub = sites.run(DILOCO, dataclasses.replace(four, hub=True), 4 * rate, periods=1)
  for shared in (at_two_sites, through_the_hub):
    assert shared.computing == pytest.approx(alone.computing, rel=1e-3)
  assert at_two_sites.site_bytes == pytest.approx(2 * alone.site_bytes)


def test_decoupled_learners_compute_at_any_rate_and_need_the_mean_traffic():
  traffic = sites.run(DECOUPLED, TWO, 100 * GBIT, periods=1).site_bytes  # one step takes 1 s
  assert traffic == pytest.approx(network.wire_bytes(int(TWO.parameters * 17 / 32)) / 24, rel=0.03)
  enough, too_thin = (sites.run(DECOUPLED, TWO, traffic * part, 3) for part in (1.1, 0.7))
  assert enough.computing == too_thin.computing == 1
  assert enough.useful > 0.999 and too_thin.useful < 0.9
  # Twice the values in steps of twice the time are the same run.
  double = dataclasses.replace(TWO, parameters=2e9, step_s=2.0)
  assert sites.run(DECOUPLED, double, traffic * 1.1, 3).useful > 0.999


def test_the_search_ends_above_the_greatest_rate_that_is_too_little():
  share = lambda rate: 0.5 if 30 < rate < 50 else min(1.0, rate / 100)
  found = sites.needed(share, (0.6, 0.2), start=1.0)
  assert 20 <= found[0.2] <= 20.5 and 60 <= found[0.6] <= 61.4
  dip = lambda rate: 0.1 if 30 < rate < 50 else min(1.0, rate / 100)
  assert 50 <= sites.needed(dip, (0.2, 0.9), start=1.0)[0.2] <= 51.1
  with pytest.raises(RuntimeError, match='no tried rate reaches 90%'):
    sites.needed(lambda rate: 0.8, (0.9,), start=1.0)
  with pytest.raises(RuntimeError, match='all tried rates reach 90%'):
    sites.needed(lambda rate: 1.0, (0.9,), start=1.0)


@pytest.mark.long
def test_the_quick_table_has_the_published_figures_beside_ours():
  table = bandwidth.table(quick=True)
  figures = [figure for job in table.jobs for figure in job.make()]
  cells = {(one.what, one.row): one for one in figures}
  diloco = cells[bandwidth.BEFORE, 'DiLoCo']
  assert (diloco.column, diloco.paper) == ('90%', 16.0)
  # A collective of two sites sends once what goes up and down through a syncer.
  assert 1.5 < diloco.ours / diloco.paper < 3
  needed = {row: one.ours for (what, row), one in cells.items() if what == bandwidth.SITES}
  assert needed['data-parallel, bf16, 2 sites'] > 50 * needed['Decoupled, int4, 2 sites']
  assert cells[bandwidth.FASTER, 'steps, 5 Gbit/s'].ours > paper.FASTER
  text = views.text_of(table, figures)
  assert '\n10B, DiLoCo: ' in text and ' int4 (236, 61)' in text and 'Assumed for the ring' in text
