"""AdamW and Muon equal optax's, with the learning rate of the clock."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.train import config as train_config
from diloco_jax.train import decoder
from diloco_jax.train import optimizer as optimizer_lib
from diloco_jax.train import task as task_lib

_CONFIG = train_config.OptimizerConfig(learning_rate=0.5, warmup_steps=10, end_lr_ratio=0.1)
_MUON = dataclasses.replace(_CONFIG, name='muon')
_TASK = task_lib.Task(
  init=lambda seed: {},
  loss=lambda params, batch, sharding: jnp.float32(0),
  batches=lambda shard: [],
  tokens_per_batch=1,
  label=lambda path: {'up': 'expert', 'router': 'router'}.get(path) or task_lib.embeddings(path),
  matrices=(('query', ((0,), (1, 2))), ('up', ((1,), (2,))), ('norms', None)),
)


def test_rate_warms_up_and_decays():
  rates = {0: 0.05, 4: 0.25, 9: 0.5, 10: 0.5, 60: 0.275, 110: 0.05, 500: 0.05}
  rate = optimizer_lib.schedule(_CONFIG, 110)
  assert {clock: rate(clock) for clock in rates} == pytest.approx(rates, rel=1e-5)
  at_once = dataclasses.replace(_CONFIG, warmup_steps=0)
  assert optimizer_lib.schedule(at_once, 100)(0) == pytest.approx(0.5)


def test_equals_optax_adamw_when_the_clock_is_the_count():
  w = np.linspace(-1, 1, 12, dtype=np.float32)
  params = {'w': w.reshape(3, 4), 'b': np.ones(4, np.float32)}
  ours = optimizer_lib.make_optimizer(_CONFIG, _TASK)
  theirs = optax.chain(
    optax.clip_by_global_norm(_CONFIG.clip_norm), _adamw({'w': True, 'b': False})
  )
  _assert_close(_three_steps(ours, params), _three_steps(theirs, params))


def test_muon_is_optax_muon_for_matrices_and_adamw_for_the_rest():
  draw = lambda *shape: np.random.default_rng(shape).standard_normal(shape, np.float32)
  matrices = {'w': draw(6, 10), 'query': draw(8, 4, 3), 'up': draw(3, 6, 4)}
  rest = {
    'embedding': draw(12, 6),
    'head': draw(6, 12),
    'router': draw(6, 3),
    'kernel': draw(3, 3, 2, 4),
    'norm': draw(6),
    'norms': draw(3, 6),  # of three layers
    'bias': draw(3, 6),
  }
  config = dataclasses.replace(_MUON, clip_norm=0.0)
  ours = _three_steps(optimizer_lib.make_optimizer(config, _TASK), matrices | rest)
  muon = optax.contrib.muon(
    _rate,
    beta=config.momentum,
    weight_decay=config.weight_decay,
    muon_weight_dimension_numbers={
      'w': optax.contrib.MuonDimensionNumbers(0, 1),
      'query': optax.contrib.MuonDimensionNumbers(0, (1, 2)),
      'up': optax.contrib.MuonDimensionNumbers(1, 2),
    },
    consistent_rms=0.2,
  )
  adamw = _adamw(
    {name: leaf.ndim > 1 and name not in ('norms', 'bias') for name, leaf in rest.items()}
  )
  _assert_close(ours, _three_steps(muon, matrices) | _three_steps(adamw, rest))


def test_the_newest_gradient_has_the_share_that_the_weight_leaves():
  draw = lambda n: np.random.default_rng(n).standard_normal((6, 10), np.float32)
  grads = [draw(n) for n in range(3)]
  mean, square = np.zeros((6, 10)), np.zeros((6, 10))
  for g in grads:
    mean, square = 0.9 * mean + 0.1 * g, _CONFIG.b2 * square + (1 - _CONFIG.b2) * g**2
  hatted, root = mean / (1 - 0.9**3), np.sqrt(square / (1 - _CONFIG.b2**3))
  plain = {'weight_decay': 0.0, 'clip_norm': 0.0, 'momentum_weight': 0.7, 'momentum': 0.9}
  for base, name, wanted in (
    (_CONFIG, 'embedding', (0.7 * hatted + 0.3 * grads[-1]) / root),
    (_MUON, 'w', _orthogonal(0.7 * hatted + 0.3 * grads[-1]) * 0.2 * np.sqrt(10)),
  ):
    tx = optimizer_lib.make_optimizer(dataclasses.replace(base, **plain), _TASK)
    state = tx.init({name: grads[0]})
    for g in grads:
      update, state = tx.update({name: g}, state, {name: g}, rate=jnp.float32(1))
    np.testing.assert_allclose(-update[name], wanted, rtol=1e-4, atol=1e-5)


def _orthogonal(matrix_AxB: np.ndarray) -> np.ndarray:
  """What Muon makes of it: optax's own Newton-Schulz."""
  muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)
  matrix_AxB = jnp.asarray(matrix_AxB, jnp.float32)
  with jax.numpy_dtype_promotion('standard'):
    return np.asarray(muon.update(matrix_AxB, muon.init(matrix_AxB))[0])


def test_muon_keeps_one_average_of_each_matrix_and_adamw_two():
  model = train_config.ModelConfig()
  task = decoder.task(model, train_config.DataConfig())
  params = task.init(0)
  matrices = sum(leaf.size for leaf in jax.tree.leaves(params['layers']) if leaf.ndim > 1)
  total = sum(leaf.size for leaf in jax.tree.leaves(params))
  state = lambda config: jax.eval_shape(optimizer_lib.make_optimizer(config, task).init, params)
  size = lambda config: sum(
    leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state(config))
  )
  assert size(_CONFIG) == 4 * 2 * total + 4  # a count
  muon = 4 * (2 * total - matrices) + 8 + 12  # two counts, coefficients of optax
  assert size(_MUON) == muon >= size(dataclasses.replace(_MUON, momentum_weight=0.7))


@pytest.mark.parametrize('config', [_CONFIG, _MUON], ids=lambda config: config.name)
def test_the_rate_is_that_of_the_argument_and_not_of_the_count(config):
  params = {'w': jnp.ones((2, 2))}
  tx = optimizer_lib.make_optimizer(config, _TASK)
  update = lambda rate: tx.update(params, tx.init(params), params, rate=jnp.float32(rate))[0]['w']
  np.testing.assert_allclose(update(0.275) / update(0.05), jnp.full((2, 2), 5.5), rtol=1e-5)


def test_a_run_shorter_than_its_warm_up_is_refused():
  with pytest.raises(ValueError, match='train.steps 10 .*warmup_steps 10'):
    optimizer_lib.schedule(_CONFIG, 10)


def _rate(count):
  """The rate of the first clocks, as a schedule of optax."""
  return jnp.asarray(_rates())[count]


@functools.cache
def _rates():
  with jax.ensure_compile_time_eval():
    rate = optimizer_lib.schedule(_CONFIG, 110)
    return np.asarray([rate(clock) for clock in range(3)])


def _adamw(mask):
  c = _CONFIG
  return optax.adamw(_rate, b2=c.b2, weight_decay=c.weight_decay, mask=mask)


def _three_steps(tx, params, grads=None):
  """The parameters after clocks 0, 1 and 2; optax's own transforms do not see the rate."""
  grads, state = grads or jax.tree.map(lambda leaf: 3 * leaf + 1, params), tx.init(params)
  update = jax.jit(optax.with_extra_args_support(tx).update)
  for clock in range(3):
    with jax.numpy_dtype_promotion('standard'):
      updates, state = update(grads, state, params, rate=_rate(clock))
    params = optax.apply_updates(params, updates)
  return params


def _assert_close(ours, theirs):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
