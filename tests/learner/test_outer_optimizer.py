"""One learner on one machine: the outer step in optax makes the bits of a run through `join`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import diloco_jax
from diloco_jax.storage import arrays

PERIOD, STEPS = 4, 12
NESTEROV = diloco_jax.SyncConfig().outer
INNER = optax.adamw(2.0**-6, weight_decay=0.1)
TX = diloco_jax.outer_optimizer(INNER, period=PERIOD, fragments=2)
WHOLE = ('sgd(learning_rate=1.0)', 1, 'float32'), (NESTEROV, 1, 'float32')
CUT = (NESTEROV, 3, 'float32'), (NESTEROV, 2, 'bfloat16')  # of three one has a part of a leaf
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def usual_promotion():
  """As in a program of a user; optax adds types in its own functions."""
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    yield


def initial(dtype='float32', least=1.0):
  """Values from `least` on, of both signs: from 1 on no period here moves one by half of itself."""
  rng = np.random.default_rng(0)
  value = lambda shape: (least + rng.random(shape)) * rng.choice([-1, 1], shape)
  shapes = {'w': (8, 4), 'b': (4,), 'v': (8, 8)}
  return {name: jnp.asarray(value(shape), dtype) for name, shape in shapes.items()}


@jax.jit
def gradients(params, number):
  return jax.tree.map(lambda leaf: leaf * jnp.sin(number + leaf).astype(leaf.dtype), params)


update = jax.jit(lambda tx, grads, *both: tx.update(grads, *both), static_argnums=0)
add = jax.jit(optax.apply_updates)  # by itself, or a compiler may fuse it with the last product


def trained(tx, params):
  """The parameters after each step of a plain loop."""
  state, seen = tx.init(params), []
  for number in range(STEPS):
    updates, state = update(tx, gradients(params, number), state, params)
    params = add(params, updates)
    seen.append(jax.tree.map(np.float32, params))
  return seen


def joined(params, **sync):
  """The same of a loop through `join`, whose optimizer is the inner one."""
  state, seen = INNER.init(params), []
  sync |= {'codec_up': 'float32', 'codec_down': 'float32'}
  sync = diloco_jax.SyncConfig(learners=1, period=PERIOD, overlap=0, **sync)
  with (
    # A step more, which is not compared: the last sync is a closing one.
    diloco_jax.run_syncer(total_steps=STEPS + 1, sync=sync) as server,
    diloco_jax.join(params, syncer=server.address) as peer,
  ):
    params = peer.params
    for number in peer.steps():
      updates, state = update(INNER, gradients(params, number), state, params)
      params = peer.sync(add(params, updates), tokens=1)
      seen.append(jax.tree.map(np.float32, params))
  return seen[:STEPS]


@pytest.mark.parametrize('outer, fragments, dtype', [*WHOLE, *CUT])
def test_a_loop_makes_the_bits_of_one_through_join(outer, fragments, dtype):
  tx = diloco_jax.outer_optimizer(INNER, period=PERIOD, outer=outer, fragments=fragments)
  engine = joined(initial(dtype), outer=outer, fragments=fragments, merge='avg')
  jax.tree.map(np.testing.assert_array_equal, trained(tx, initial(dtype)), engine)


@pytest.mark.parametrize('merge, least', [('rda', 1.0), ('avg', 0.0)])
def test_rda_and_values_near_zero_differ_in_the_last_bits(merge, least):
  params, tx = initial(least=least), diloco_jax.outer_optimizer(INNER, period=PERIOD)
  jax.tree.map(close, trained(tx, params), joined(params, fragments=1, merge=merge))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_update_misses_the_new_value_by_an_ulp_at_most(dtype):
  rng, size = np.random.default_rng(1), 10_000
  draw = lambda: jnp.asarray(rng.standard_normal(size) * 2.0 ** rng.integers(-9, 9, size), dtype)
  tx, before, grads = diloco_jax.outer_optimizer(optax.sgd(1.0), period=1), draw(), draw()
  updates, state = tx.update(grads, tx.init(before), before)
  after, before = np.float32(optax.apply_updates(before, updates)), np.float32(before)
  new = np.float32(state.masters[0].astype(dtype))
  assert (abs(after - new) <= np.spacing(np.maximum(abs(before), abs(new)))).all()
  near = abs(new - before) <= abs(before) / 2
  assert 1_000 < near.sum() < 9_000 and (after == new)[near].all()


def test_it_works_among_other_transforms_and_with_hyperparameters_in_its_state():
  rated = optax.inject_hyperparams(lambda rate: optax.adamw(rate, weight_decay=0.1))(2.0**-6)
  outer = optax.inject_hyperparams(optax.sgd)(0.5, momentum=0.3, nesterov=True)
  tx = diloco_jax.outer_optimizer(rated, outer=outer, period=PERIOD, fragments=2)
  tx = optax.MultiSteps(optax.chain(optax.identity(), tx), 1)
  state = train_state.TrainState.create(apply_fn=None, params=initial(), tx=tx)
  apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
  for number in range(STEPS):
    state = apply(state, gradients(state.params, number))
  jax.tree.map(close, state.params, trained(TX, initial())[-1])


def test_it_is_an_optimizer_of_nnx():
  model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
  expected = trained(TX, nnx.state(model, nnx.Param))[-1]
  for number in range(STEPS):
    nnx.jit(nnx.Optimizer.update)(optimizer, model, gradients(nnx.state(model, nnx.Param), number))
  jax.tree.map(close, nnx.state(model, nnx.Param), expected)


@pytest.mark.parametrize('kind', ['Auto', 'Explicit'])
def test_the_state_is_split_as_the_parameters_are_and_can_be_saved(kind, tmp_path):
  axes, devices = (jax.sharding.AxisType[kind],), jax.devices()[:2]
  mesh = jax.make_mesh((2,), ('d',), devices=devices, axis_types=axes)
  split = {'w': jax.P('d'), 'b': jax.P(), 'v': jax.P(None, 'd')}
  at = {name: jax.NamedSharding(mesh, spec) for name, spec in split.items()}
  params, state = jax.device_put(initial(), at), TX.init(jax.device_put(initial(), at))
  for number in range(STEPS):
    updates, state = update(TX, gradients(params, number), state, params)
    params = add(params, updates)
    if number == PERIOD:
      arrays.save(tmp_path / 'state', state)
      state = arrays.load(tmp_path / 'state', state)
  masters = {name: leaf for one in state.masters for name, leaf in one.items() if leaf is not None}
  assert all(leaf.sharding.is_equivalent_to(at[name], leaf.ndim) for name, leaf in masters.items())
  jax.tree.map(close, params, trained(TX, initial())[-1])


def test_refusals_say_what_to_do():
  with pytest.raises(ValueError, match='period is 0, it must be between 1 and'):
    diloco_jax.outer_optimizer(INNER, period=0)
  with pytest.raises(ValueError, match='fragments is 3, it must be between 1 and 2'):
    diloco_jax.outer_optimizer(INNER, period=2, fragments=3)
  with pytest.raises(ValueError, match='is int32; parameters must be floats; leave it out'):
    TX.init({'n': jnp.zeros(3, jnp.int32)})
  with pytest.raises(ValueError, match=r'tx.update\(grads, state, params\)'):
    TX.update(initial(), TX.init(initial()))
