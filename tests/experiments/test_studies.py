"""The studies: their arms, the book of finished arms, and the command that runs what is missing."""

import concurrent.futures
import dataclasses
import json
import pathlib
import threading

import pytest

from diloco_jax.train import config as train_config
from diloco_jax.train import evaluate
from diloco_jax.verification.virtual import conditions
from experiments.studies import accuracies, run
from experiments.studies.lib import arms
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
    made = [tiny(arms.decoupled('toy', f'seed {seed}', quick, seed=seed)) for seed in (0, 1)]
    return [arms.data_parallel(arm, arm.name) for arm in made]

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


WHICH = [*((name, 0) for name in run.STUDIES), ('deaths', -1), ('joining', 1), ('unequal_data', -1)]
ALIKE = (  # as parity's, or as the test of a suite
  'accuracies',
  'headline',
  'batch',
  'learners',
  'adopt',
  'outer',
  'timing',
  'scale',
  'scale.closing',
  'scale.many',
  'scale.tuned',
  'scale.delays',
)


@pytest.mark.parametrize(
  ('name', 'which'),
  [
    pytest.param(name, which, marks=pytest.mark.full if name in ALIKE else pytest.mark.long)
    for name, which in WHICH
  ],
)
def test_an_arm_of_each_study_runs(name, which, monkeypatch):
  monkeypatch.setattr(evaluate, 'SUITE_EXAMPLES', 64)
  row = arms.run(tiny(run.load(name).plan(True, study_lib.Book())[which]))
  assert row['study'] == name and row['tokens'] > 0


def test_points_are_paired_by_question_and_seed_and_their_mean_has_the_error_over_questions():
  """Where an arm of a model lacks all rows, the model is left out."""
  right = {  # of each arm the answers of two seeds
    'data-parallel': ([1, 0, 0, 0], [1, 1, 0, 0]),
    'decoupled': ([1, 1, 0, 0], [1, 1, 1, 0]),
    'decoupled, deaths': ([1, 0, 0, 0], None),  # in progress
  }
  others = {'loss': 2.0, 'seconds': 6.0, 'theta_sha256': 'abc'}
  rows = [
    {'arm': f'{model}, {arm}', 'seed': seed, 'right': {'digits': answers}} | others
    for model in ('vision', 'MoE')
    for arm, found in right.items()
    for seed, answers in enumerate(found)
    if answers and (model == 'vision' or arm != 'decoupled')
  ]
  lines = accuracies.tables(rows).splitlines()
  assert '| vision, decoupled | 1 | 2.0000 | 0 | 0.1 | abc |' in lines
  points = '62.50 | +25.00 ± 12.50 (+25.0, +25.0) | 25.00 | +0.00 ± 0.00 (+0.0)'
  lines = lines[: lines.index('| arm | seed | loss | deaths | minutes | sha256 |')]
  assert [line for line in lines if line.startswith(('| vision', '| MoE,', '| dense,'))] == [
    f'| vision | digits | 37.50 | {points} |',
    '| dense, data-parallel | 70.1 | 58.7 |  | 37.50 |',
    '| dense, decoupled |  |  |  | 62.50 |',
    '| dense, decoupled, deaths | 69.8 | 58.6 |  | 25.00 |',
    '| MoE, data-parallel | 68.4 | 54.9 |  |  |',
    '| MoE, decoupled | 68.4 | 55.1 |  |  |',
    '| MoE, decoupled, deaths |  |  |  |  |',
  ]


@pytest.mark.long
def test_an_arm_with_a_suite_has_the_same_bits_and_answers_again(monkeypatch):
  monkeypatch.setattr(evaluate, 'SUITE_EXAMPLES', 16)
  arm = tiny(run.load('accuracies').plan(True, study_lib.Book())[0])
  rows = [arms.run(arm) for _ in range(2)]
  for name in ('theta_sha256', 'right'):
    assert rows[0][name] == rows[1][name]
  assert len(rows[0]['theta_sha256']) == 64 and len(rows[0]['right']['next_token']) == 16
  assert arm.key != dataclasses.replace(arm, suite=False).key


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
    arm = tiny(run.load('schedule').plan(True, study_lib.Book())[0])
    arm.config.train.seed = seed
    arm.where['faults'] = conditions.Faults(death_every=10.0, down=4.0)
    rows.append(arms.run(arm))
  assert rows[0]['seed'] == 0 and rows[1]['seed'] == 1
  assert rows[0]['time'] != rows[1]['time']


@pytest.mark.parametrize('name', run.STUDIES)
def test_each_study_has_its_document(name):
  [document] = DOCUMENTS.rglob(f'{name.split(".")[-1]}.md')
  assert f'--study={name}' in document.read_text('utf-8')


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
  made = {a.key: a for a in (tiny(arms.decoupled('toy', '', True, seed=one)) for one in range(4))}
  book = study_lib.Book()
  missing = lambda: {key: arm for key, arm in made.items() if book.row(arm) is None}
  with Pool(2) as pool, pytest.raises(ValueError, match='seed 0 fails'):
    run._run_all(pool, missing, book, 2, lambda done, total: None)
  assert [bool(book.row(arm)) for arm in made.values()] == [False, True, False, False]


def test_a_changed_setting_is_another_arm():
  arm = arms.decoupled('toy', 'a', True)
  where = arm.where | {'hardware': dataclasses.replace(arm.where['hardware'], lognormal=0.2)}
  changed = [
    arms.decoupled('toy', 'a', True, gamma=0.5),
    arms.decoupled('toy', 'a', True, seed=1),
    dataclasses.replace(arm, where=where),
    arms.with_tokens(arm, 1),
  ]
  assert len({arm.key, *(one.key for one in changed)}) == 5
  assert arm.key == arms.decoupled('toy', 'another name', True).key
  baselines = [arms.data_parallel(one, 'baseline') for one in (arm, changed[0])]
  assert baselines[0].key == baselines[1].key != arm.key  # it has no exchange


@pytest.mark.parametrize('lowest', [0.02, 0.002, 0.01])
def test_the_best_rate_has_a_worse_one_on_each_side(lowest):
  book = study_lib.Book()
  make = lambda rate: arms.decoupled('toy', str(rate), True, rate=rate)
  while True:
    found, best = study_lib.best_rate(make, (0.005, 0.01), book)
    if best is not None:
      break
    for arm in found:
      loss = abs(arm.config.optimizer.learning_rate - lowest)
      book.add({'key': arm.key, 'loss': loss})
  rates = sorted(arm.config.optimizer.learning_rate for arm in found)
  assert rates[0] < best < rates[-1]
  assert best == min(rates, key=lambda rate: abs(rate - lowest))
