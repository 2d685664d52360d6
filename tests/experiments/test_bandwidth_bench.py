"""The bench on shaped links: its cells, its accounts of tokens, its tables."""

import pathlib
import types

import pytest

from diloco_jax.protocol import actions, facts
from diloco_jax.verification.checks import judge_tapes
from experiments.links import cells, measure, report, small

TOKENS = 24_000  # of a fragment's sync and a learner, in period after period


@pytest.mark.parametrize('short', [True, False])
def test_every_cell_of_a_plan_is_there_once(short: bool):
  planned = [*cells.plan(short), *small.plan(short)]
  assert len({cell.key for cell in planned}) == len({cell.name for cell in planned}) == len(planned)
  for cell in cells.plan(short):
    period = cells.METHODS[cell.method].period
    assert cell.steps and cell.steps % period == 0, 'the cells end after whole exchanges'


@pytest.mark.parametrize('mbit', [2, 10])
def test_a_payload_of_the_small_model_takes_as_many_steps(mbit: float):
  large_s = 25_165_824 / 24 / mbit
  tiny_s = small.VALUES / small.PERIOD / small.scaled_mbit(mbit)
  assert tiny_s / small.FLOOR_S == pytest.approx(large_s / cells.FLOOR_S)


# --- Accounts -------------------------------------------------------------------------------------


def turn(now_s: int, *out: actions.Action) -> types.SimpleNamespace:
  return types.SimpleNamespace(now_ns=now_s, index=1, event=None, actions=out)


def outer_step(sync: int, learners: dict[str, int]) -> list:
  names = tuple(learners)
  common = {'sync': sync, 'fragment': 0, 'version': sync}
  merging = facts.Merging(
    **common,
    participants=names,
    late=(),
    waited_ns=0,
    grace_ns=0,
    tokens=0,
    why='',
    staleness=0,
  )
  participants = tuple(
    actions.Participant(learner=name, incarnation=1, payload_id=1, tokens=tokens, steps=1)
    for name, tokens in learners.items()
  )
  merge = actions.Merge(**common, participants=participants, machine_state={})
  return [actions.Report(fact=merging), merge]


def opened(sync: int) -> actions.Report:
  return actions.Report(fact=facts.Opened(sync=sync, fragment=0))


def ledger(trained: int, merged: int) -> actions.Report:
  found = dict.fromkeys(('unsettled', 'synced', 'cancelled', 'repaired', 'skipped', 'sync'), 0)
  lost = {'late': trained - merged} if trained != merged else {}
  fact = facts.Ledger(
    **found, fragments=1, trained=trained, merged=merged, discarded=lost, learners={}
  )
  return actions.Report(fact=fact)


def account(*turns: types.SimpleNamespace, steps: int) -> measure.Row:
  start = types.SimpleNamespace(role='syncer', config=types.SimpleNamespace(learners=2))
  return measure.merged([judge_tapes.Tape('syncer', start, turns)], 10, 20, steps)


def test_what_was_merged_before_the_links_were_shaped_does_not_count():
  found = account(
    turn(5, opened(1), *outer_step(1, {'l0': TOKENS, 'l1': TOKENS})),
    turn(15, opened(2), *outer_step(2, {'l0': TOKENS, 'l1': TOKENS})),
    turn(30, ledger(5 * TOKENS, 4 * TOKENS)),
    steps=48,
  )
  assert found['merged'] == pytest.approx(2 / 3) and found['on_time'] == 1.0
  assert found['discarded'] == {'late': TOKENS}


def test_tokens_that_were_late_are_merged_but_not_when_due():
  found = account(
    turn(11, opened(1), *outer_step(1, {'l0': TOKENS})),  # l1 misses it
    turn(15, opened(2), *outer_step(2, {'l0': TOKENS, 'l1': 2 * TOKENS})),
    turn(25, opened(3), *outer_step(3, {'l0': TOKENS, 'l1': TOKENS})),  # after the window
    turn(30, ledger(6 * TOKENS, 6 * TOKENS)),
    steps=96,
  )
  assert found['merged'] == 1.0 and found['on_time'] == pytest.approx(3 / 4)


# --- Reports --------------------------------------------------------------------------------------


def test_a_bandwidth_is_interpolated_over_its_logarithm_and_never_extrapolated():
  points = [(10, 0.1), (50, 0.3), (200, 0.5), (1000, 0.9)]
  assert report.needed(points, 0.5) == '200'
  assert float(report.needed(points, 0.7)) == pytest.approx(447, abs=0.5)
  assert report.needed(points[::-1], 0.75) == report.needed(points, 0.75)
  assert report.needed(points, 0.1) == '< 10' and report.needed(points, 0.99) == '> 1000'
  assert report.needed([], 0.5) == ''


def row(method: str, mbit: float, computes: float) -> measure.Row:
  checked = {f'{way}_{which}': 0.96 * mbit for way in ('up', 'down') for which in ('least', 'most')}
  found = {
    'method': method,
    'mbit': mbit,
    'computes': computes,
    'bytes_up': 1.1e6,
    'bytes_down': 1.2e6,
    'checked_mbit': checked,
    'load': 1.0,
    'seconds': 60.0,
  }
  ours = cells.METHODS[method].program == cells.TASK
  return found | ({'merged': 0.999, 'on_time': 0.94} if ours else {})


def tiny_row(method: str, mbit: float, loss: float, kind: str = small.TOKENS) -> measure.Row:
  cell = small.Cell(method=method, mbit=mbit, steps=480, kind=kind)
  merged = None if method == small.ALONE else 0.98
  return {
    'small': cell.name,
    'method': method,
    'mbit': mbit,
    'kind': kind,
    'steps': 480,
    'loss': loss,
    'merged': merged,
    'wall_s': 50.0,
  }


def test_the_report_has_every_figure_and_what_does_not_hold(tmp_path: pathlib.Path):
  rows = [
    row(cells.INT8, 0, 0.98),
    row(cells.INT8, 50, 0.97),
    row(cells.INT8, 10, 0.94),
    row(cells.ALL_REDUCE, 50, 0.009),
    row(cells.TORCHFT_24, 50, 0.31),
    tiny_row(cells.INT8, 0, 2.00),
    tiny_row(cells.INT4, 10, 2.01),
    tiny_row(cells.INT4, 2, 2.20),
    tiny_row(small.ALONE, 0, 2.10),
    tiny_row(cells.INT8, 10, 1.0, small.TIME),
  ]
  text = report.table(rows)
  assert '| Decoupled int8 | 94 % | 97 % | 98 % | < 10 | < 10 | < 10 | > 50 |' in text
  assert '| Decoupled int8 | 99.9, 94.0 % |' in text and 'Published, of other hardware' in text
  lines = [one for one in text.splitlines() if one.startswith('* ')]
  assert [one.startswith('* holds') for one in lines] == [1, 1, 0, 0, 1, 0, 1, 0]
  assert 'DOES NOT HOLD: ... and at 10 Mbit/s 95.9%' in text and '+0.50%' in text
  report.plot(rows, tmp_path / 'plot.png')
  assert (tmp_path / 'plot.png').stat().st_size
  assert all(report.line(one) for one in rows)


def test_a_method_makes_whole_exchanges_in_equal_time():
  rows = [row(cells.LOCK_STEP, 10, 0.132), row(cells.ALL_REDUCE, 10, 0.002)]
  rows = [one | {'period': cells.METHODS[one['method']].period} for one in rows]
  planned = small.plan_time(rows)
  assert [cell.steps for cell in planned] == [60, 1]
