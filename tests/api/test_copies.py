"""Copies of the parameters in a user's loop move with what it adopts (docs/your_model.md).

The gradients do not depend on the parameters, so a loop that adopts goes on along the path of a
loop without a syncer, moved by what it has adopted: one whose copies undo a merge leaves it.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import diloco_jax
from diloco_jax.api import copies
from diloco_jax.api import states as loop_states
from diloco_jax.storage import arrays
from tests.api import drawn_loops

_DEADLINE_S = 240.0
_STALE = 'is a copy of a parameter, and has stayed where it was'
_BACK = 'the first step after the adoption of a merged value has gone back'


_RUN = {  # each merged value is halfway between the one before and that of the learner
  'total_steps': 12,
  'sync': diloco_jax.SyncConfig(
    learners=1, fragments=1, period=4, overlap=0, codec_down='float32', codec_up='float32',
    outer='sgd(learning_rate=0.5)',
  ),
}  # fmt: skip


def _draw(*shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


_TREE = {'w': _draw(8, 8), 'b': _draw(8)}
_HALF = {**_TREE, 'w': _TREE['w'].astype(jnp.bfloat16)}


_LOOKAHEAD = optax.lookahead(optax.sgd(0.1), sync_period=3, slow_step_size=0.5)


def _lookahead() -> optax.GradientTransformation:
  """With the slow parameters in its state, beside the documented way."""

  def init(params: Any) -> Any:
    both = optax.LookaheadParams.init_synced(params)
    return {'inner': _LOOKAHEAD.init(both), 'slow': params}

  def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    both = optax.LookaheadParams(params, state['slow'])
    updates, inner = _LOOKAHEAD.update(grads, state['inner'], both)
    return updates.fast, {'inner': inner, 'slow': optax.apply_updates(both, updates).slow}

  return optax.GradientTransformation(init, update)


def _of(first: optax.GradientTransformation, other: optax.GradientTransformation) -> Any:
  """One optimizer for w and another one for b."""
  return optax.partition({'w': first, 'b': other}, {'w': 'w', 'b': 'b'})


class _Kind(NamedTuple):
  tx: optax.GradientTransformation
  params: Any
  leaf: str = ''  # the copy that the line names
  evaluated: Callable[[Any, Any], Any] = lambda opt_state, params: params
  free: bool = False  # it is schedule_free
  label: Callable[[str], str] | None = None


_FREE = optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1)
_EVAL = optax.contrib.schedule_free_eval_params
_ZEROS = jax.tree.map(jnp.zeros_like, _TREE)
_KINDS = {
  'moments': _Kind(optax.sgd(0.1, momentum=0.9), _TREE),
  'schedule_free': _Kind(_FREE, _TREE, 'z/b', _EVAL, True),
  'lookahead': _Kind(_lookahead(), _TREE, 'slow/b', lambda state, params: state['slow']),
  'masters': _Kind(drawn_loops.masters(0.1), _HALF, 'master/b'),
  'masters of some': _Kind(
    _of(drawn_loops.masters(0.1), optax.sgd(0.1)), _HALF, 'inner_states/w/inner_state/master/w'
  ),
  'the rest is frozen': _Kind(
    _of(_FREE, optax.set_to_zero()), _TREE, 'inner_states/w/inner_state/z/w', free=True,
    label=lambda name: 'frozen' if name == 'b' else 'body',
  ),
  'accumulated': _Kind(optax.MultiSteps(_FREE, 2), _TREE, 'inner_opt_state/z/b', free=True),
  'a bare array': _Kind(_FREE, _TREE['w'], 'z', _EVAL, True),
  'madgrad from zeros': _Kind(optax.contrib.madgrad(0.1), _ZEROS, '1/x0/b'),
}  # fmt: skip


class _Held(NamedTuple):
  """What a loop goes on with: by its fields a whole state."""

  params: Any
  opt_state: Any

  def replace(self, **fields: Any) -> Any:
    return self._replace(**fields)


def _plus(first: Any, other: Any, sign: int = 1) -> Any:
  return jax.tree.map(lambda a, b: np.float32(a) + sign * np.float32(b), first, other)


def _farthest(tree: Any) -> float:
  return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


class _Followed(NamedTuple):
  moved: float  # by adoptions
  off: float  # how far the loop, and what it evaluates, is from the plain one that is so moved
  merged: float  # how far the run's model is from the loop's


def _follow(kind: _Kind, way: str) -> _Followed:
  """Trains alone, and through `join`: the 'parts' or the 'whole' state, or the parts 'apart', which
  keeps an opt_state of its own. What is merged is halfway, as half the gradient would have led; so
  the loop alone has half of it, if schedule_free is to go on from there."""

  @functools.partial(jax.jit, static_argnums=1)
  def step(held: _Held, size: float = 0.5) -> _Held:
    grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, size), kind.params)
    updates, opt_state = kind.tx.update(grads, held.opt_state, held.params)
    return _Held(optax.apply_updates(held.params, updates), opt_state)

  def begin() -> tuple[_Held, dict[str, Any]]:
    held = _Held(kind.params, kind.tx.init(kind.params))
    return held, {'params': held} if way == 'whole' else held._asdict()

  def off() -> float:
    pairs = [(joined.params, alone.params)]
    pairs.append(tuple(kind.evaluated(loop.opt_state, loop.params) for loop in (joined, alone)))
    return max(_farthest(_plus(_plus(tree, moved, -1), plain, -1)) for tree, plain in pairs)

  (alone, given), worst = begin(), 0.0
  moved, adopted = _plus(alone.params, alone.params, -1), 0.0
  with diloco_jax.run_syncer(**_RUN) as server:
    with diloco_jax.join(**given, syncer=server.address, label=kind.label) as peer:
      first = peer.params
      joined = first if way == 'whole' else _Held(first, peer.opt_state)
      for _ in peer.steps():
        joined, alone = step(joined), step(alone, 0.25 if kind.free else 0.5)
        worst = worst if kind.free else max(worst, off())
        trained = jax.tree.map(np.float32, joined.params)
        if way == 'whole':
          joined = peer.sync(joined, tokens=1)
        else:
          params = peer.sync(**joined._asdict(), tokens=1)
          joined = _Held(params, peer.opt_state if way == 'parts' else joined.opt_state)
        if not kind.free:
          moved = _plus(moved, _plus(joined.params, trained, -1))
        adopted += _farthest(_plus(joined.params, trained, -1))
        if not (kind.free and peer.clock and peer.clock % 4):
          worst = max(worst, off())
    merged = server.wait(_DEADLINE_S)
  named = {name: leaf for name, leaf in arrays.by_name(joined.params).items() if name in merged}
  return _Followed(adopted, worst, _farthest(_plus(named, dict(merged), -1)))


@pytest.fixture(autouse=True)
def _usual_promotion():
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):  # as of users
    yield


_CLOSE = 2**-5  # what bfloat16 rounds; adoptions move more than twice as far


def _lanes(names: Iterable[str], *default: str) -> list[Any]:
  long = [name for name in names if name not in default]
  return [*default, *(pytest.param(name, marks=pytest.mark.long) for name in long)]


def _require_silent(capfd) -> None:
  said = capfd.readouterr().out
  assert _STALE not in said and _BACK not in said


@pytest.mark.parametrize('name', _lanes(_KINDS, 'schedule_free', 'masters of some'))
def test_copies_of_parameters_move_with_what_is_adopted(name, capfd):
  """The documented ways: nothing is undone, and what is evaluated is of the adopted model."""
  seen = _follow(_KINDS[name], 'whole' if name in ('lookahead', 'masters of some') else 'parts')
  assert seen.off < _CLOSE < seen.moved / 2
  assert seen.merged < _CLOSE
  _require_silent(capfd)


@pytest.mark.parametrize('name', _lanes(_KINDS, 'masters'))
def test_a_loop_that_keeps_its_own_state_is_told_once_with_the_name_of_a_leaf(name, capfd):
  leaf = _KINDS[name].leaf
  seen = _follow(_KINDS[name], 'apart')
  assert (seen.off > _CLOSE / 2) == bool(leaf)
  assert re.findall(rf'opt_state: (\S*) {_STALE}', capfd.readouterr().out) == [leaf] * bool(leaf)


@pytest.mark.long
def test_fast_and_slow_parameters_of_lookahead_are_adopted_alike(capfd):
  """Its steps are zero once the fourth is made."""
  params = optax.LookaheadParams.init_synced(_TREE)
  opt_state, adopted = _LOOKAHEAD.init(params), 0
  with diloco_jax.run_syncer(**_RUN) as server:
    with diloco_jax.join(params, opt_state=opt_state, syncer=server.address) as peer:
      params = peer.params
      for clock in peer.steps():
        grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, 5.0 * (clock < 4)), _TREE)
        updates, opt_state = _LOOKAHEAD.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        if adopted and opt_state.steps_since_sync:  # else it draws the two together
          assert _farthest(_plus(new, params, -1)) == 0
        params = peer.sync(jax.tree.map(jnp.copy, new), tokens=1, opt_state=opt_state)
        adopted += min(_farthest(_plus(first, two, -1)) for first, two in zip(params, new)) > 0.1
    merged = server.wait(_DEADLINE_S)
  assert adopted
  for name, leaf in params.slow.items():
    np.testing.assert_allclose(leaf, merged[f'slow/{name}'], atol=1e-5)
  _require_silent(capfd)


class _Keeps(train_state.TrainState):
  kept: Any


def _kept_after(kept: dict[str, Any], steps: int) -> dict[str, Any]:
  """One step of a loop that computes its parameters from `master`. The mean of all values is the
  first one after a step; what is refreshed now and then was the parameters at that step."""
  master = jax.tree.map(lambda leaf: leaf - 0.0625, kept['master'])
  return {
    'master': master,
    'reference': kept['reference'],
    'ema': optax.incremental_update(master, kept['ema'], 0.25),
    'mean': jax.tree.map(lambda m, p: m + (p - m) / steps, kept['mean'], master),
    'late': optax.incremental_update(master, kept['late'], 0.25) if steps > 3 else kept['late'],
  }


@pytest.mark.parametrize('place', _lanes(('field', 'opt_state'), 'field'))
def test_of_what_a_loop_keeps_only_that_moves_of_which_its_parameters_are_made(place, capfd):
  """A reference stays bit for bit, averages follow by their own steps. The first step is one with
  a rate of zero, as at the start of a warm-up: it shows nothing."""
  kept = dict.fromkeys(('master', 'reference', 'ema', 'mean', 'late'), _TREE)
  state = _Keeps.create(apply_fn=None, params=_TREE, tx=optax.identity(), kept=kept)
  if place == 'opt_state':
    state = state.replace(opt_state=kept, kept=None)
  moved = 0.0
  with diloco_jax.run_syncer(**_RUN) as server:
    with diloco_jax.join(state, syncer=server.address) as peer:
      state = peer.params
      for step, _ in enumerate(peer.steps()):
        kept = jax.tree.map(jnp.copy, getattr(state, 'kept' if place == 'field' else 'opt_state'))
        kept = _kept_after(kept, step) if step else kept
        trained = jax.tree.map(jnp.copy, kept['master'])
        field = {'kept' if place == 'field' else 'opt_state': jax.tree.map(jnp.copy, kept)}
        state = peer.sync(state.replace(params=trained, **field), tokens=1)
        after = getattr(state, 'kept' if place == 'field' else 'opt_state')
        moved += _farthest(_plus(after['master'], kept['master'], -1))
        jax.tree.map(np.testing.assert_array_equal, after['reference'], _TREE)
        for name in ('ema', 'mean', 'late'):
          jax.tree.map(np.testing.assert_array_equal, after[name], kept[name])
        jax.tree.map(np.testing.assert_allclose, after['master'], state.params)
    merged = server.wait(_DEADLINE_S)
  assert moved > 0.1
  jax.tree.map(lambda p, m: np.testing.assert_allclose(p, m, atol=1e-5), state.params, dict(merged))
  _require_silent(capfd)


def test_a_reference_that_a_newcomer_has_brought_is_its_own_again_after_its_first_step():
  """It cannot be told from masters before that."""
  tree = {'w': _draw(8, 8)}
  state = {'params': tree, 'reference': tree}
  with diloco_jax.run_syncer({'w': tree['w'] + 1}, **_RUN | {'total_steps': 100}) as server:
    with diloco_jax.join(
      state, syncer=server.address, exchange=lambda state: state['params']
    ) as peer:
      state = peer.params
      np.testing.assert_allclose(state['params']['w'], tree['w'] + 1, atol=1e-6)
      for _ in zip(range(3), peer.steps()):
        params = {'w': state['params']['w'] - 0.1}
        reference = {'w': jnp.copy(state['reference']['w'])}
        state = peer.sync({'params': params, 'reference': reference}, tokens=1)
        np.testing.assert_array_equal(state['reference']['w'], tree['w'])


_LOOPS = {  # of an array that the loop keeps, what `sync` has returned, and the clock, the next one
  'writes': lambda own, returned, clock: returned + 1,
  'keeps': lambda own, returned, clock: own + 1,
  'warms up': lambda own, returned, clock: returned + 1 + clock,
  'arrives at once': lambda own, returned, clock: np.full_like(own, 8.0),
}


@pytest.mark.parametrize('name', _lanes(_LOOPS, 'keeps', 'warms up'))
def test_a_loop_whose_long_step_undoes_what_it_adopts_is_told_once(name, capfd):
  """A loop that arrives with each step looks like one that keeps a tree of its own, of which `join`
  knows nothing, so the line names both. The fifth step of one that warms up is as long as what the
  first adoption has undone, and no longer than its steps are."""
  with diloco_jax.run_syncer(**_RUN) as server:
    own = {'w': np.zeros(64, np.float32), 'b': np.zeros(4, np.float32)}
    with diloco_jax.join(own, syncer=server.address) as peer:
      held = jax.tree.map(np.array, peer.params)
      for clock in peer.steps():
        own = jax.tree.map(functools.partial(_LOOPS[name], clock=clock), own, held)
        held = jax.tree.map(np.array, peer.sync(own, tokens=1))
  lines = re.findall(f'w: {_BACK}.*', capfd.readouterr().out)
  assert len(lines) == (name in ('keeps', 'arrives at once'))
  for line in lines:
    assert 'If each step of the loop reaches its goal at once, nothing is wrong' in line
    assert 'write what `peer.sync` returns into that tree' in line


@pytest.mark.long
def test_masters_of_an_optimizer_follow_what_was_merged_while_their_learner_was_away(tmp_path):
  params = {'w': jnp.ones(64, jnp.bfloat16)}
  state = {'master': {'w': jnp.ones(64)}}
  sync = diloco_jax.SyncConfig(learners=2, quorum=1, fragments=1, period=2, overlap=0)
  with diloco_jax.run_syncer(total_steps=1_000_000, sync=sync) as server:

    def learn(learner: str, step: float) -> None:
      where = {'syncer': server.address, 'workdir': tmp_path / learner}
      with diloco_jax.join(params, learner=learner, opt_state=state, **where) as peer:
        w, master = peer.params['w'], peer.opt_state['master']['w']
        np.testing.assert_allclose(np.asarray(w, np.float32), master, rtol=0.01)
        for _, _ in zip(range(6), peer.steps()):
          master += step
          given = {'w': master.astype(np.float32).astype(jnp.bfloat16)}
          peer.sync(given, tokens=1, opt_state={'master': {'w': master}})
          master = peer.opt_state['master']['w']

    for learner in ('l0', 'l1', 'l0'):
      learn(learner, 1.0)


@pytest.mark.parametrize(
  'tx, copy',
  [
    (optax.adamw(1e-2), ''),
    (optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1), 'z'),
    (optax.contrib.prodigy(), 'params0'),
    (optax.contrib.cocob(), 'init_particles'),
    (optax.contrib.madgrad(0.1), 'x0'),
    (optax.contrib.mechanize(optax.sgd(0.1)), 'x0'),
  ],
  ids=lambda value: value if isinstance(value, str) else '',
)
def test_copies_of_parameters_are_found_in_the_states_of_optax(tx, copy):
  """By their types, also if all values are zeros."""
  params = {'w': jnp.zeros((4, 4)), 'b': jnp.zeros(4)}
  _, kept, kinds = _moving(params, jax.tree.map(jnp.asarray, tx.init(params)))
  new = jax.tree.map(lambda leaf: leaf + 1, params)
  kinds.take(new, kept)  # a step that has moved the parameters, and nothing else
  moving = {name.split('/')[-2] for name in kept if kinds.moves(name)}
  assert moving == ({copy} if copy else set())


def test_copies_of_parameters_are_found_in_an_optimizer_of_nnx():
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  _, kept, kinds = _moving((model, nnx.Optimizer(model, _FREE, wrt=nnx.Param)))
  assert {name.split('/z/')[-1] for name in kept if kinds.moves(name)} == {'kernel', 'bias'}


def _moving(*given: Any) -> tuple[dict[str, Any], dict[str, Any], copies.Copies]:
  form = loop_states.Form(*given)
  params, kept = form.split(*given)
  return params, kept, copies.Copies(params, kept, form.nodes)
