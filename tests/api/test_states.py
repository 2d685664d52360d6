"""What of a state is exchanged and what is kept; and that a state is not taken for a model."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diloco_jax
from diloco_jax.api import states as loop_states

_MODEL = {'layers': [{'w': jnp.arange(12.0).reshape(4, 3)}, {'w': jnp.ones((3, 2))}]}
_COPY = jax.tree.map(jnp.copy, _MODEL)
_ZEROS = jax.tree.map(jnp.zeros_like, _MODEL)
_ADAM = optax.adam(1e-3).init(_MODEL)


class _Average(NamedTuple):
  of: Any
  decay: float = 0.99


class _State(NamedTuple):
  model: Any
  more: Any
  average: Any = ()
  activation: Any = jax.nn.relu


@pytest.mark.parametrize(
  'more, average, why',
  [
    (_ADAM, (), 'more/0 is a ScaleByAdamState of optax'),
    ({'good': jnp.int32(3)}, (), 'more/good is int32, as a counter'),
    ({'step': 3}, (), 'more/step is int, as a counter'),
    ({'flag': jnp.bool_(True)}, (), 'more/flag is bool, as a counter'),
    ({'scale': jnp.float32(32768.0)}, (), 'more/scale is 32768, as the scale of a loss'),
    ({'key': jax.random.key(0)}, (), 'more/key is a random key'),
    ((), _COPY, 'average has the shapes of model, and its values or zeros'),
    ((), _ZEROS, 'average has the shapes of model, and its values or zeros'),
    ((), _Average(_COPY), 'average/of has the shapes of model, and its values or zeros'),
    ({'best': jnp.float32(jnp.inf), 'n': 3}, (), 'more/n is int, as a counter'),
  ],
  ids=lambda value: value if isinstance(value, str) else '',
)
def test_a_state_is_not_taken_for_a_model_and_the_line_that_joins_it_is_named(more, average, why):
  remedy = re.escape('`diloco_jax.join(state, exchange=lambda state: state.model, ...)`')
  with pytest.raises(ValueError, match=f'^{why}, and no parameter. Nothing was sent.*{remedy}'):
    loop_states.Form(_State(_MODEL, more, average))


class _Layer(NamedTuple):
  w: Any
  heads: int = 4


@pytest.mark.parametrize(
  'params',
  [
    _MODEL,
    {'anchor': {'w': jnp.ones((3, 3)), 'b': jnp.zeros(3)}, 'b': jnp.zeros(3)},
    {'q': {'scale': jnp.ones(3)}, 'v': {'scale': jnp.ones(3)}},
    {'left': _MODEL, 'right': _COPY},
    {'target_head': jnp.ones((3, 3)), 'head': jnp.zeros((3, 3))},
    optax.LookaheadParams.init_synced(_MODEL),
    {'w': jnp.ones((2, 2)), 'temperature': jnp.float32(2.0), 'activation': jax.nn.relu},
    jnp.ones(3),
    {'layers': [_Layer(jnp.ones(3))]},
  ],
  ids=[
    'a model',
    'an anchor',
    'attention',
    'twins',
    'a name',
    'lookahead',
    'a function',
    'a bare array',
    'a setting',
  ],
)
def test_models_are_taken_as_they_are(params):
  form = loop_states.Form(params)
  named, kept = form.split(params)
  assert kept is None and all(isinstance(leaf, jax.Array) for leaf in named.values())
  back, _ = form.rebuild({name: leaf + 1 for name, leaf in named.items()}, None)
  assert jax.tree.structure(back) == jax.tree.structure(params)
  pairs = zip(jax.tree.leaves(params), jax.tree.leaves(back))
  assert all(new is old or np.array_equal(new, old + 1) for old, new in pairs)


def test_what_exchange_returns_is_exchanged_and_all_else_is_kept():
  """Also where two leaves are one array."""
  state = _State(_MODEL, {'opt_state': _ADAM, 'key': jax.random.key(3), 'n': 1}, average=_MODEL)
  form = loop_states.Form(state, exchange=lambda state: state.model)
  named, kept = form.split(state)
  assert list(named) == ['layers/0/w', 'layers/1/w']
  assert {'average/layers/0/w', 'more/key', 'more/n', 'more/opt_state/0/count'} < kept.keys()
  assert form.optimizer == {name for name in kept if name.startswith('more/opt_state/')}
  assert [*form.describe()][:2] == [
    'exchanges 18 parameters (72 B) in 2 arrays: layers/0/w [4, 3], layers/1/w [3, 2]; keeps more, '
    'average',
    'labels of the arrays: 2 body',
  ]
  kept['more/n'] = 2
  back, _ = form.rebuild({name: leaf * 0 for name, leaf in named.items()}, kept)
  assert not back.model['layers'][0]['w'].any() and back.average['layers'][0]['w'].any()
  assert back.more['n'] == 2 and back.activation is jax.nn.relu
  assert jnp.array_equal(*map(jax.random.key_data, (back.more['key'], state.more['key'])))


def test_what_is_exchanged_is_grouped_by_name_and_what_is_kept_is_named_by_its_own_paths():
  """In one line each, for any number of arrays. What is exchanged is never named as kept."""
  layer = {'w': jnp.ones((4, 4)), 'b': jnp.zeros(4, jnp.bfloat16)}
  model = {f'layers_{n}': layer for n in range(500)} | {'embed': jnp.ones((8, 4))}
  state = _State(model, {'gain': jnp.ones(()), 'n': jnp.int32(0), 'm': {'n': np.int32(1)}})
  exchanged, labels, *_ = loop_states.Form(
    state, exchange=lambda state: (state.model, state.more['gain'])
  ).describe()
  assert exchanged == (
    'exchanges 10,033 parameters (36.1 kB) in 1002 arrays: 1001 of [0] (36.1 kB), 1 of [1] (4 B); '
    'keeps more/m, more/n'
  )
  assert labels == 'labels of the arrays: 1 embedding (0/embed), 1001 body'
  line = next(loop_states.Form(state, exchange=lambda state: state.model).describe())
  assert line.endswith(': 1000 of layers_* (36.0 kB), 1 of embed (128 B); keeps more')


@pytest.mark.parametrize(
  'picked, why',
  [
    (lambda s: (s.model, s.average), 'average/of has the shapes of model, and its values or zeros'),
    (lambda s: s.average.of, 'average/of has the shapes of model, and its values or zeros'),
    (lambda s: (s.model, s.more['loss']), 'more/loss/scale is 32768, as the scale of a loss'),
    (lambda s: s.more['both'], 'ema has the shapes of net, and its values or zeros'),
    (lambda s: (s.model, s.more['adam']), '1/0 is a ScaleByAdamState of optax'),
  ],
  ids=['beside its average', 'the average alone', 'a scale', 'a part with an average', 'moments'],
)
def test_what_exchange_returns_is_refused_as_the_same_tree_is_without_it(picked, why):
  more = {
    'loss': {'scale': jnp.float32(32768.0), 'good': jnp.int32(0)},
    'both': {'net': jnp.ones((5, 5)), 'ema': jnp.ones((5, 5))},
    'adam': _ADAM,
  }
  state = _State(_MODEL, more, _Average(_COPY))
  with pytest.raises(ValueError, match=f'^exchange: of what it returns {why}, and no parameter'):
    loop_states.Form(state, exchange=picked)


def test_masters_may_be_exchanged_where_what_they_round_to_and_a_reference_are_kept():
  half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _MODEL)
  state = {'params': half, 'masters': _MODEL, 'reference': _COPY}
  form = loop_states.Form(state, exchange=lambda state: state['masters'])
  kept = form.split(state)[1]
  assert (
    kept is not None and len(kept) == 4 and not any(name.startswith('masters') for name in kept)
  )


@pytest.mark.parametrize(
  'exchange, why',
  [
    (lambda state: jax.tree.map(jnp.copy, state.model), 'has returned arrays that are computed'),
    (lambda state: state.activation, 'has returned no array'),
    (lambda state: state, 'more/0 is a ScaleByAdamState of optax'),
  ],
)
def test_exchange_returns_parts_of_the_state(exchange, why):
  with pytest.raises(ValueError, match=f'^exchange: .*{why}'):
    loop_states.Form(_State(_MODEL, _ADAM), exchange=exchange)


def test_a_learner_draws_with_its_own_random_keys_and_takes_the_moments_of_another(tmp_path):
  """Keys in a field, in the state of an optimizer that adds noise, and as plain numbers."""

  class State(NamedTuple):
    params: Any
    opt_state: Any
    key: Any
    steps: Any

  def make(seed: int) -> State:
    tx = optax.chain(optax.add_noise(0.1, 0.5, seed), optax.adam(1e-2))
    params = {'w': jnp.ones((4, 4))}
    key = jax.random.PRNGKey(seed)
    return State(params, (tx.init(params), {'raw': key}), jax.random.key(seed), jnp.int32(0))

  def keys(state: State) -> list[list[int]]:
    typed = state.opt_state[0][0].rng_key, state.key
    raw = map(jax.random.key_data, typed)
    return [np.asarray(leaf).tolist() for leaf in (*raw, state.opt_state[1]['raw'])]

  sync = diloco_jax.SyncConfig(learners=2, quorum=1, fragments=1, period=2, overlap=1)
  with diloco_jax.run_syncer(total_steps=1_000_000, sync=sync) as server:
    for learner, seed in (('l0', 1), ('l1', 2), ('l0', 3)):
      own = make(seed)
      run = {'syncer': server.address, 'learner': learner, 'workdir': tmp_path}
      with diloco_jax.join(own, exchange=lambda state: state.params, **run) as peer:
        state = peer.params
        counts = int(state.opt_state[0][1][0].count), int(state.steps)
        first = make(1) if seed == 3 else own
        assert keys(state) == keys(first), 'its own, also when it comes back'
        assert counts == {1: (0, 0), 2: (5, 0), 3: (5, 5)}[seed]
        for _ in zip(range(5), peer.steps()):
          (noise, adam), raw = state.opt_state
          adam = adam[0]._replace(count=adam[0].count + 1), *adam[1:]
          state = state._replace(opt_state=((noise, adam), raw), steps=state.steps + 1)
          state = peer.sync(state, tokens=1)
