"""The studies: their arms, the book of finished arms, and the command that runs what is missing."""

import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import threading

import pytest

from diloco_jax.train import config as train_config
from diloco_jax.verification.virtual import conditions
from experiments.studies import run
from experiments.studies.lib import arms, report
from experiments.studies.lib import study as study_lib

DOCUMENTS = pathlib.Path(__file__).parents[2] / 'docs' / 'studies'


def tiny(arm: arms.Arm) -> arms.Arm:
  """The arm with the smallest model, in a few steps."""
  config = arm.config
  config.model = train_config.ModelConfig(
    num_layers=1, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, hidden_dim=8
  )
  config.data.batch_size, config.data.eval_batches = 2, 1
  config.train.steps, config.optimizer.warmup_steps = 8, 1
  config.sync.period, config.sync.fragments = 6, 1
  return arms.with_tokens(arm, 0)


def tiny_study() -> study_lib.Study:
  def plan(quick, book):
    planned = [tiny(arms.decoupled('toy', f'seed {seed}', quick, seed=seed)) for seed in (0, 1)]
    return [arms.data_parallel(arm, arm.name) for arm in planned]

  return study_lib.Study(name='toy', title='A toy', plan=plan)


@pytest.mark.parametrize('name', run.STUDIES)
@pytest.mark.parametrize('quick', [True, False])
def test_arms_are_valid_and_have_what_they_are_compared_with(name, quick):
  planned = run.load(name).plan(quick, study_lib.Book())
  names = {(arm.name, arm.seed) for arm in planned}
  assert len(names) == len(planned) == len({arm.key for arm in planned})
  for arm in planned:
    assert arm.study == name and (not arm.against or (arm.against, arm.seed) in names)
    arm.config.validate()


@pytest.mark.parametrize('name', run.STUDIES)
@pytest.mark.parametrize('quick', [True, False])
def test_arms_that_are_compared_train_equally_many_tokens_or_say_how_many(name, quick):
  planned = run.load(name).plan(quick, study_lib.Book())
  by_name = {(arm.name, arm.seed): arm for arm in planned}
  for arm in planned:
    if arm.against:
      other = by_name[arm.against, arm.seed]
      equal = arm.trained == pytest.approx(other.trained, rel=1e-3)
      assert equal != bool(arm.unequal), (arm.name, arm.trained, other.name, other.trained)
  if name.startswith('scale'):  # all arms of a size, and of a length, with one baseline
    alike = collections.defaultdict(list)
    for arm in planned:
      alike[arm.name.split(',')[0]].append(arm.trained)
    for trained in alike.values():
      assert max(trained) == pytest.approx(min(trained), rel=5e-3)


def test_a_quick_report_has_what_it_leaves_out(tmp_path):
  text = report.write(run.load('parity'), True, study_lib.Book(), tmp_path)
  assert 'leaves out' in text and 'streaming, muon' in text and 'diloco, muon' in text
  assert 'leaves out' not in report.write(run.load('parity'), False, study_lib.Book(), tmp_path)


ALIKE = (
  'settings',
  'scale',
  'scale.tuned',
  'scale.delays',
)  # parity's


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=pytest.mark.full if name in ALIKE else pytest.mark.long)
    for name in run.STUDIES
  ],
)
def test_an_arm_of_each_study_runs(name):
  row = arms.run(tiny(run.load(name).plan(True, study_lib.Book())[0]))
  assert row['study'] == name and row['tokens'] > 0


@pytest.mark.long
@pytest.mark.parametrize('kind', [pytest.param('alone', marks=pytest.mark.full), 'train'])
def test_two_runs_of_one_seed_end_with_the_same_bits(kind):
  make = lambda seed: tiny(arms.decoupled('toy', 'a', True, seed=seed))
  rows = []
  for seed in (0, 0, 1):
    arm = arms.data_parallel(make(seed), 'a') if kind == 'alone' else make(seed)
    rows.append(arms.run(arm))
  first, again, other = (row['theta_sha256'] for row in rows)
  assert first == again != other and first
  assert rows[0]['curve'] == rows[1]['curve'] and rows[0]['seconds'] >= 0


@pytest.mark.long
def test_arms_of_two_seeds_have_schedules_of_their_own():
  rows = []
  for seed in (0, 1):
    arm = dataclasses.replace(tiny(arms.decoupled('toy', 'a', True, seed=seed)), kind='schedule')
    arm.where['faults'] = conditions.Faults(death_every=10.0, down=4.0)
    rows.append(arms.run(arm))
  assert rows[0]['seed'] == 0 and rows[1]['seed'] == 1
  assert rows[0]['time'] != rows[1]['time']


@pytest.mark.parametrize('name', run.STUDIES)
def test_each_study_has_its_document(name):
  assert any(
    f'--study={name}' in page.read_text('utf-8') for page in DOCUMENTS.parent.rglob('*.md')
  )


def test_only_what_is_missing_runs(tmp_path):
  rows = tmp_path / 'rows.jsonl'
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    run.run([tiny_study()], tmp_path, quick=True, pool=pool, jobs=2)
    first = rows.read_text('utf-8')
    run.run([tiny_study()], tmp_path, quick=True, pool=pool, jobs=2)
    assert rows.read_text('utf-8') == first
    rows.write_text(first[:-40], 'utf-8')  # a process was killed while it wrote
    run.run([tiny_study()], tmp_path, quick=True, pool=pool, jobs=2)
  losses = lambda text: {row['key']: row['loss'] for row in map(json.loads, text.splitlines())}
  assert losses(rows.read_text('utf-8')) == losses(first) and len(losses(first)) == 2
  for suffix in ('csv', 'md', 'png'):
    assert (tmp_path / f'toy.{suffix}').stat().st_size


def test_an_arm_that_fails_loses_no_row_of_the_arms_beside_it(monkeypatch):
  """Its error is raised when they have ended; no other arm begins."""
  begun, futures, run_arm = threading.Event(), [], arms.run

  class Pool(concurrent.futures.ThreadPoolExecutor):
    def submit(self, function, arm):
      futures.append(super().submit(function, arm))
      return futures[-1]

  def run_or_fail(arm):
    if arm.seed == 0:
      assert begun.wait(20)
      raise ValueError('seed 0 fails')
    begun.set()
    assert futures[0].exception(20)
    return run_arm(arm)

  monkeypatch.setattr(arms, 'run', run_or_fail)
  planned = {
    a.key: a for a in (tiny(arms.decoupled('toy', '', True, seed=seed)) for seed in range(4))
  }
  book = study_lib.Book()
  missing = lambda: {key: arm for key, arm in planned.items() if book.row(arm) is None}
  with Pool(2) as pool, pytest.raises(ValueError, match='seed 0 fails'):
    run._run_all(pool, missing, book, 2, lambda done, total: None)
  assert [bool(book.row(arm)) for arm in planned.values()] == [False, True, False, False]


def test_a_changed_setting_is_another_arm():
  arm = arms.decoupled('toy', 'a', True)
  where = arm.where | {'hardware': dataclasses.replace(arm.where['hardware'], lognormal=0.2)}
  changed = [
    arms.decoupled('toy', 'a', True, gamma=0.5),
    arms.decoupled('toy', 'a', True, seed=1),
    dataclasses.replace(arm, where=where),
    arms.with_tokens(arm, 1),
  ]
  assert len({arm.key, *(other.key for other in changed)}) == 5
  assert arm.key == arms.decoupled('toy', 'another name', True).key
  baselines = [arms.data_parallel(other, 'baseline') for other in (arm, changed[0])]
  assert baselines[0].key == baselines[1].key != arm.key  # it has no exchange


@pytest.mark.parametrize('lowest', [0.02, 0.002, 0.01])
def test_the_best_rate_has_a_worse_one_on_each_side(lowest):
  book = study_lib.Book()
  make = lambda rate: arms.decoupled('toy', str(rate), True, rate=rate)
  while True:
    searched, best = study_lib.best_rate(make, (0.005, 0.01), book)
    if best is not None:
      break
    for arm in searched:
      loss = abs(arm.config.optimizer.learning_rate - lowest)
      book.add({'key': arm.key, 'loss': loss})
  rates = sorted(arm.config.optimizer.learning_rate for arm in searched)
  assert rates[0] < best < rates[-1]
  assert best == min(rates, key=lambda rate: abs(rate - lowest))
