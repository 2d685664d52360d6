"""Merge rules and optimizers of the user's own, named by module or file in a config."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diloco_jax
from diloco_jax import testing
from diloco_jax.config import build, load
from diloco_jax.configs import own_loop, stdlib_lm
from diloco_jax.numerics import merge
from diloco_jax.process import own_model
from diloco_jax.train import optimizer as optimizer_lib

_DEADLINE_S = 240.0
_CODE = """
import optax
from diloco_jax.numerics import merge

def mine(a=1.0):
  if a <= 0:
    raise ValueError('a must be above 0')
  return merge.avg()._replace(stretch=lambda rows, sums_T: a + 0 * sums_T)

def nothing():
  return None

def slow(learning_rate=0.5):
  return optax.sgd(learning_rate)

def inner():
  return optax.scale_by_lion(b1=0.5)
"""


@pytest.fixture(name='own')
def _own(tmp_path, monkeypatch) -> pathlib.Path:
  """A file with rules, also importable as a module."""
  (tmp_path / 'my_rules.py').write_text(_CODE)
  monkeypatch.syspath_prepend(tmp_path)
  yield tmp_path / 'my_rules.py'
  sys.modules.pop('my_rules', None)


def test_a_rule_of_a_module_and_of_a_file_is_made_with_its_arguments(own):
  rows = merge.Rows(np.ones(1), np.ones((1, 1)), np.ones((1, 1, 1)))
  for where in ('my_rules', own):
    rule = merge.make(f'{where}:mine(a=3.0)')
    assert rule.stretch(rows, np.ones(1)).tolist() == [3.0]
    testing.check_merge_rule(f'{where}:mine')
    testing.check_outer(f'{where}:slow(learning_rate=0.25)')
  with jax.numpy_dtype_promotion('standard'):  # as in a program of a user
    testing.check_outer('optax:adam(learning_rate=0.1)')


@pytest.mark.parametrize(
  'text, why',
  [
    ('no_such_module:mine', "ModuleNotFoundError: No module named 'no_such_module'"),
    ('nowhere.py:mine', 'FileNotFoundError'),
    ('my_rules:other', "my_rules has no 'other'"),
    ('my_rules:mine(b=1)', 'it is mine'),
    ('my_rules:mine(a=-1)', 'a must be above 0'),
    ('my_rules:nothing', 'it is nothing'),
    ('my_rules:mine(a=open)', 'neither a name nor a name with keyword arguments'),
  ],
)
def test_a_wrong_one_is_refused_with_its_reason(own, text, why):
  with pytest.raises(ValueError, match=why):
    merge.make(text)


@pytest.mark.parametrize('scale, sentence', [(0.0, 'descends'), (-1.0, 'descends')])
def test_the_battery_finds_an_outer_optimizer_that_does_not_descend(scale, sentence):
  with pytest.raises(AssertionError, match=sentence):
    testing.check_outer(optax.scale(-scale))


def test_the_config_of_a_run_has_the_whole_path_and_learners_may_have_another(own, tmp_path):
  config = own_loop.get_config()
  config.sync.merge, config.sync.outer = f'{own}:mine(a=2.0)', 'my_rules:slow'
  other = own_loop.get_config()
  other.sync.merge, other.sync.outer = 'my_rules.py:mine(a=2.0)', 'my_rules:slow'
  assert config.agreement() == other.agreement()
  load.write(tmp_path, other)
  assert load.read(tmp_path).sync.merge == f'{pathlib.Path.cwd()}/my_rules.py:mine(a=2.0)'
  other.sync.merge = 'my_rules.py:mine(a=3.0)'
  assert config.agreement() != other.agreement()


def test_a_loop_needs_no_code_of_the_rule_and_the_syncer_merges_by_it(own, tmp_path):
  """A rule that stretches to half, with an outer step of rate 1: the run's model moves by half of
  what the learner has given, and a syncer that continues it has the rule, too."""
  sync = own_loop.get_config('alone').sync
  sync.merge, sync.period = f'{own}:mine(a=0.5)', 2
  sync.embedding_merge = sync.merge
  params = {'w': jnp.zeros(8)}
  trained = 0
  for steps in (4, 20):
    with diloco_jax.run_syncer(total_steps=steps, sync=sync, workdir=tmp_path / 'run') as server:
      terms = own_model.Terms.of(server._syncer.config)
      config = terms.applied_to(own_loop.get_config())
      own_model.complete(own_model.describe(params, None), config)  # without the file
      with diloco_jax.join(params, learner='l0', syncer=server.address) as peer:
        local = peer.params
        for _ in peer.steps():
          local = peer.sync({'w': local['w'] + 1}, tokens=1)
          trained += 1
      merged = server.wait(_DEADLINE_S)
    np.testing.assert_allclose(merged['w'], trained / 2)
  assert trained > 4
  np.testing.assert_allclose(diloco_jax.load_params(tmp_path / 'run')['w'], trained / 2)


def test_a_syncer_refuses_a_rule_that_it_cannot_make_before_it_waits_for_a_model():
  sync = own_loop.get_config('alone').sync
  sync.outer = 'no_such_module:slow'
  with pytest.raises(ValueError, match="sync.outer: 'no_such_module:slow': ModuleNotFound"):
    with diloco_jax.run_syncer(total_steps=2, sync=sync) as server:
      server.wait(_DEADLINE_S)


def test_an_inner_optimizer_of_ones_own_takes_the_place_of_adam(own):
  config = stdlib_lm.get_config('tiny')
  task = build.make_task(config)
  params = {'w': jnp.ones((4, 4))}
  updates = []
  for name in ('adamw', 'my_rules:inner', 'optax:scale_by_lion(b1=0.5)'):
    config.optimizer.name = name
    config.validate()
    tx = optimizer_lib.make_optimizer(config.optimizer, task)
    update, _ = tx.update({'w': 2 * params['w']}, tx.init(params), params, rate=jnp.float32(0.1))
    updates.append(update['w'])
  np.testing.assert_array_equal(updates[1], updates[2])
  assert not jax.numpy.array_equal(updates[0], updates[1])
  config.optimizer.name = 'sgd'
  with pytest.raises(ValueError, match="optimizer 'sgd' is unknown.*or MODULE:FUNCTION"):
    config.validate()
