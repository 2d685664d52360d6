"""The study of the gap against the size: its grid, the rule for rates, the trend, the report."""

import json
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.verification.virtual import delay_cost
from experiments.studies import scale
from experiments.studies.lib import arms, report
from experiments.studies.lib import study as study_lib
from experiments.studies.scale import delays, fit, records, rungs

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module')
def cheap_keys():
  """Names, which are unique in the study: a key of all settings costs a millisecond."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(arms.Arm, 'key', property(lambda arm: f'{arm.name}, {arm.seed}'))
    yield


def finish(best, gap=lambda case: 0.0, enough=lambda book: False):
  """A book of the grid, where `best(case)` is the best rate, and `gap(case)` what a method is
  behind there. Returns it with the arms in the order in which they ran."""
  book, order = study_lib.Book(), []
  while (missing := scale.STUDY.missing(False, book)) and not enough(book):
    order += missing
    for arm in missing:
      case = of(arm)
      off = math.log2(arm.config.optimizer.learning_rate / best(case))
      book.add({'key': arm.key, 'loss': (2 + 0.1 * off**2) * (1 + gap(case))})
  return book, order


def law(learners: int, parameters: float) -> float:
  """A gap whose trend is known, as of two power laws of the loss."""
  level, fall = {4: (1.09, -0.004), 8: (1.16, -0.0065)}[learners]
  return level * parameters**fall - 1


@pytest.fixture(scope='module')
def whole(cheap_keys):
  """The whole grid: the best rate halves with the size, the gaps those of `law`."""
  gap = lambda result: (
    law(result.learners, scale.parameters(result.size)) if result.learners > 1 else 0.0
  )
  best = {'63k': 0.024, '230k': 0.012, '0.9M': 0.006, '1.8M': 0.006, '6.6M': 0.003}
  return finish(lambda of: best[of.size], gap)


def of(arm):
  """The case of an arm, by its name."""
  size, optimizer, method, *learners, _ = arm.name.split(', ')
  size, ratio = size.split(' x')
  learners = int(learners[0].removeprefix('M=')) if learners else 1
  return scale.Case(size, int(ratio), optimizer, method, learners)


def case(size='63k', ratio=scale.SHORT, method='decoupled', learners=4):
  return scale.Case(size, ratio, 'muon', method, learners)


def test_a_size_has_as_many_parameters_as_its_model():
  for size in list(scale.SIZES)[:3]:
    assembled = build.assemble(scale.arm(case(size), 0.01, 0).config)
    counted = sum(leaf.size for leaf in jax.tree.leaves(assembled.init()))
    assert counted == scale.parameters(size)


def test_all_methods_train_the_same_tokens_in_the_same_number_of_steps():
  for size in scale.SIZES:
    configs = [scale.arm(case(size, 20, *method), 0.01, 0).config for method in scale.METHODS]
    together = {
      config.train.steps * config.data.batch_size * config.sync.learners for config in configs
    }
    assert len(together) == 1 and len({config.train.steps for config in configs}) == 1
    tokens = together.pop() * scale.LENGTH
    assert tokens == pytest.approx(20 * scale.parameters(size), rel=0.01)


def test_the_rate_moves_on_with_the_size_and_its_neighbours_are_tried(whole):
  book, order = whole
  rates = lambda size, ratio=scale.SHORT: scale.rates(case(size, ratio), book)[1]
  assert rates('63k') == 0.024 and rates('230k') == 0.012
  tried = {arm.config.optimizer.learning_rate for arm in order if of(arm) == case('0.9M')}
  assert tried == {0.012, 0.006, 0.003} and rates('0.9M') == 0.006
  assert rates('0.9M', scale.LONG) == 0.006 and rates('230k', scale.LONG) == 0.012


def test_the_rate_of_each_method_moves_on_as_that_of_the_baseline(cheap_keys):
  best = lambda of: {'63k': 0.024}.get(of.size, 0.012) if of.learners == 1 else 0.048
  book, _ = finish(best, enough=lambda book: scale.rates(case('0.9M'), book)[0])
  assert scale.rates(case('0.9M'), book)[0][0].config.optimizer.learning_rate == 0.024


def test_a_neighbour_is_used_where_it_is_better(cheap_keys):
  best = lambda book: scale.rates(case('0.9M'), book)[1]
  book, _ = finish(lambda of: 0.012 if of.size == '0.9M' else 0.024, enough=best)
  assert best(book) == 0.012


def test_the_grid_ends_with_every_method_at_every_size(whole):
  book, order = whole
  keys = [arm.key for arm in order]
  assert len(keys) == len(set(keys))
  for size in (scale.SMALL, scale.MIDDLE, '0.9M', '1.8M'):
    for ratio in (scale.SHORT, scale.LONG):
      for optimizer in scale.BOTH:
        for method in scale.METHODS:
          planned = scale.Case(size, ratio, optimizer, *method)
          rate = scale.rates(planned, book)[1]
          seeds = [book.row(scale.arm(planned, rate, seed)) is not None for seed in range(3)]
          assert sum(seeds) == (2 if size == '1.8M' else 3)


@pytest.mark.long
def test_the_trend_of_two_power_laws_is_their_quotient(whole, tmp_path):
  book, _ = whole
  results = [
    result for result in scale.results(False, book) if result.case == case(result.case.size)
  ]
  far, decade = fit.trend(results)
  assert len(results) == 5 and sum(len(result.gaps) for result in results) == 12
  assert far == pytest.approx([law(4, fit.FAR)] * 3, abs=1e-6)
  assert decade == pytest.approx([10**-0.004 - 1] * 3, abs=1e-6)
  text = scale.conclude(False, book, tmp_path)
  assert f'{law(4, fit.FAR):+.2%}' in text and (tmp_path / 'scale.png').stat().st_size


def test_a_power_law_of_the_gap_is_found_and_none_of_a_gap_below_zero():
  make = lambda size, gap: fit.Result(case(), size, [0.0, 0.0], [(2 * (1 + gap), 2.0)] * 2)
  measured = [make(size, 0.08 * (size / 1e5) ** -0.25) for size in (1e5, 1e6)]
  far, decade = fit.trend(measured, power=True)
  assert far == pytest.approx([0.008] * 3) and decade == pytest.approx([10**-0.25 - 1] * 3)
  assert fit.trend([*measured, make(1e7, -0.01)], power=True) is None


def test_the_interval_holds_the_true_gap_in_19_of_20_fits():
  """Of 400 fits with noise of 0.5 points, the interval at 1B covers in 91 to 98 of 100."""
  rng, covered = np.random.default_rng(0), 0
  for _ in range(400):
    results = [
      fit.Result(
        None,
        size,
        [0.0, 0.0],
        [(2 * (1 + law(4, size)) * math.exp(noise), 2.0) for noise in 0.005 * draws],
      )
      for size, draws in zip((63e3, 228e3, 909e3), rng.standard_normal((3, 3)), strict=True)
    ]
    (_, low, high), _ = fit.trend(results)
    covered += low <= law(4, fit.FAR) <= high
  assert 0.91 <= covered / 400 <= 0.98
  assert fit.trend(results[:1]) is None


def test_a_report_of_a_part_of_the_grid(cheap_keys, tmp_path):
  """A study that was interrupted reports what it has."""
  book = study_lib.Book()
  report.write(scale.STUDY, False, book, tmp_path)
  for arm in scale.STUDY.missing(False, book)[:3]:
    book.add({'key': arm.key, 'study': 'scale', 'seed': arm.seed, 'loss': 2.0, 'curve': []})
  text = report.write(scale.STUDY, False, book, tmp_path)
  assert text.count('| 63k x5') == 3


@pytest.mark.full
@pytest.mark.timeout(1_800)  # three minutes on two quiet cores
def test_the_quick_study_runs_to_its_trend(tmp_path):
  studies = (
    '--study=scale,scale.tuned,scale.delays',
    '--quick',
    f'--out={tmp_path}',
  )
  subprocess.run([sys.executable, '-m', 'experiments.studies.run', *studies], cwd=ROOT, check=True)
  text = (tmp_path / 'scale.md').read_text('utf-8')
  assert all(
    f'| 13k 30k 63k x2, {optimizer}, decoupled, M=4 | 3 |' in text for optimizer in scale.BOTH
  )
  book = study_lib.Book(tmp_path / 'rows.jsonl')
  rows = [book.row(arm) for arm in scale.STUDY.plan(True, book)]
  assert len(rows) == 42 and len({row['theta_sha256'] for row in rows}) == 42
  assert all(len(row['curve']) >= 5 and row['seconds'] > 0 for row in rows)


@pytest.mark.parametrize(
  'study',
  [scale.STUDY, delays.STUDY, rungs.STUDY],
  ids=lambda study: study.name,
)
def test_the_document_has_the_tables_of_its_rows(study, cheap_keys, tmp_path):
  book, documents = study_lib.Book(), ROOT / 'docs/studies'
  for name in ('scale', 'delays', 'rungs'):
    for row in map(json.loads, (documents / f'rows/{name}.jsonl').read_text('utf-8').splitlines()):
      book.add(row | {'key': f'{row["arm"]}, {row["seed"]}'})
  document = (documents / f'scale/{study.name.split(".")[-1]}.md').read_text('utf-8')
  lines = study.conclude(False, book, tmp_path).splitlines()
  assert len(lines) > 4 and all(line in document for line in lines)


def test_the_plan_has_the_laws_that_the_runs_of_delays_give(cheap_keys):
  """`diloco plan` says what these rows say, and so of the runs that no law has seen."""
  book, rows = study_lib.Book(), ROOT / 'docs/studies/rows/delays.jsonl'
  for row in map(json.loads, rows.read_text('utf-8').splitlines()):
    book.add(row | {'key': f'{row["arm"]}, {row["seed"]}'})
  assert delays.fit(delays.costs(False, book)) == delay_cost.LAWS


@pytest.mark.parametrize('size', list(records.BASELINES)[1:])
def test_a_new_record_of_each_size_is_an_entry_and_gets_its_row(size, monkeypatch):
  fields = records.WEIGHT | records.exchange('int2', 3, 2)
  monkeypatch.setattr(records, 'RECORDS', (records.Record(size, 4, 7e-3, fields, 2),))
  book = study_lib.Book()
  missing = [
    absent for absent in records.STUDY.missing(False, book) if absent.name.startswith(size)
  ]
  assert len(missing) == 2 + records.BASELINES[size].seeds
  for arm in missing:
    loss = 1.5 if arm.kind == 'alone' else 1.53
    sent = {'up_bytes': 3e6, 'down_bytes': 5e6, 'theta_sha256': 'ab' * 32}
    book.add({'key': arm.key, 'loss': loss, **sent})
  *_, row = records.conclude(False, book, pathlib.Path()).strip().splitlines()
  settings = 'rate 0.007, momentum_weight 0.7, codec_up int2'
  assert row.startswith(f'| {size}, M=4 | +2.00% ± 0.00% (+2.00%, +2.00%) | {settings}')
  assert row.endswith('| 2.0 | 2 | `abababababab` |')


def test_the_rungs_add_up_to_the_gap(cheap_keys):
  """With the losses of all seeds: what each costs, times what the others cost, is the gap."""
  book, cost = study_lib.Book(), dict.fromkeys(rungs.LADDER, 1.01)
  best = {rates[0] for of in rungs.RATES.values() for rates in of.values()}
  while missing := rungs.STUDY.missing(False, book):
    for arm in missing:
      names = [rungs.BASE, *rungs.LADDER]
      words = [word for word in arm.name.split(', ') if word in names] or [rungs.BASE]
      above = names[1 : names.index(words[-1]) + 1]
      loss = (2 + 0.01 * arm.seed) * math.prod(cost[name] for name in above)
      at_best = arm.config.optimizer.learning_rate in best
      book.add({'key': arm.key, 'loss': loss if at_best else 1.1 * loss})
  text = rungs.conclude(False, book, pathlib.Path())
  lines = {
    cells[0]: cells
    for cells in (row.strip('| ').split(' | ') for row in text.splitlines())
    if cells
  }
  _, base, *added, gap = lines['63k, muon, M=8, x0.5'][:8]
  assert base == '2.0100' and [cell.split()[0] for cell in added] == ['+1.00%'] * len(rungs.LADDER)
  assert gap.startswith(f'{1.01 ** len(rungs.LADDER) - 1:+.2%}')
