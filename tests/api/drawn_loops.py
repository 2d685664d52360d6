"""An oracle for loops: a plain loop, and the same loop through `join`, make the same bits.

    python -m tests.api.drawn_loops SEED COUNT     # draws these again, or many new ones

One learner, an outer step of rate 1 without momentum, lock step, payloads without loss. A seed
draws the values, their dtypes and shardings, the mesh, the optimizer, the kind of state, donation,
the settings, and whether the loop is left after a sync of all fragments and begun again. A state
has what loops keep: averages (of one of which the first value is the parameters), a reference to
which the gradient pulls, float32 masters, the scale of a loss and its count, random keys, which are
also in the state of an optimizer that adds noise. Of two learners (`pair`) both adopt the mean of
what they gave, and a step whose gradient is zero leaves it; their references stay, bit for bit, and
their averages and keys are moved by no adoption; the z of schedule_free of both come together.

Shapes and optimizers are few, so the draws of one process share their compiled functions.
"""

import contextlib
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state

import diloco_jax
from diloco_jax.learner import on_device

_STEPS = 8
_DEADLINE_S = 240.0
_CLOSE = {True: {'rtol': 2**-7, 'atol': 2**-7}, False: {'rtol': 1e-5, 'atol': 1e-5}}  # of bfloat16?


def masters(rate: float) -> optax.GradientTransformation:
  """SGD that computes the parameters from float32 copies of them in its state."""

  def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    moved = jax.tree.map(lambda p, g: p - rate * g.astype(p.dtype), state['master'], grads)
    # In float32, so that nothing but the last rounding is lost.
    updates = jax.tree.map(lambda new, p: new - p.astype(new.dtype), moved, params)
    return updates, {'master': moved}

  copy = lambda leaf: jnp.array(leaf, jnp.float32)
  return optax.GradientTransformation(lambda params: {'master': jax.tree.map(copy, params)}, update)


def anchored(rate: float) -> optax.GradientTransformation:
  """SGD that pulls towards the first parameters, a reference in its state."""

  def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    pull = lambda g, p, first: g + jnp.asarray(0.125, g.dtype) * (p - first)
    pulled = jax.tree.map(pull, grads, params, state['reference'])
    return jax.tree.map(lambda g: jnp.asarray(-rate, g.dtype) * g, pulled), state

  return optax.GradientTransformation(lambda p: {'reference': jax.tree.map(jnp.copy, p)}, update)


_EPS = 1e-4  # else Adam makes whole steps of a gradient that is rounding, as behind a dead unit
_OPTIMIZERS = {
  'sgd': optax.sgd(0.1, momentum=0.9),
  'adamw': optax.adamw(1e-2, eps=_EPS),
  'lion': optax.lion(1e-3),
  'schedule': optax.adam(optax.cosine_decay_schedule(1e-2, _STEPS), eps=_EPS),
  'steps': optax.MultiSteps(optax.adam(1e-2, eps=_EPS), 2),
  'schedule_free': optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1),
  'noise': optax.chain(optax.add_noise(0.01, 0.55, 7), optax.sgd(0.1)),
  'anchored': anchored(0.1),
  'masters': masters(0.1),
  'madgrad': optax.contrib.madgrad(0.1),
}
_OF_PAIRS = {name: _OPTIMIZERS[name] for name in ('masters', 'schedule_free')}
_OF_PAIRS['plain sgd'] = optax.sgd(0.1)
_MESHES = {
  'none': (0, ''),
  **{f'{n} {kind}': (n, kind) for n in (1, 2) for kind in ('Auto', 'Explicit')},
}


class _State(train_state.TrainState):
  average: Any
  mean: Any
  reference: Any
  scale: jax.Array
  good: jax.Array
  key: jax.Array


class _Named(NamedTuple):
  """The same for `join(..., exchange=)`, as frameworks without a state of their own have it."""

  weights: Any
  moments: Any
  rest: dict[str, Any]


class Draw(NamedTuple):
  """`kind`: 'state' (a TrainState), 'named' (`exchange` picks the parameters), 'parts' (parameters
  and opt_state), 'nnx', or 'pair'.
  `stop`: the clock at which the loop is left, 0: never."""

  seed: int
  kind: str
  dtype: str
  mesh: str
  optimizer: str
  donates: bool
  fragments: int
  period: int
  stop: int


def draw(seed: int) -> Draw:
  rng = np.random.default_rng(seed)
  choose = lambda *choices: choices[rng.integers(len(choices))]
  kind = choose('state', 'named', 'parts', 'nnx', 'pair')
  optimizer = choose(*(_OF_PAIRS if kind == 'pair' else _OPTIMIZERS))
  fragments, period = choose(1, 2), choose(2, 4)
  saves = (
    kind in ('state', 'named', 'nnx') and fragments == 1
  )  # else no sync is one of all, or saves all
  stop = choose(0, period, 2 * period) % _STEPS if saves else 0
  mesh = 'none' if kind == 'nnx' else choose(*_MESHES)
  return Draw(
    seed, kind, choose('float32', 'bfloat16'), mesh, optimizer, choose(True, False), fragments,
    period, stop,
  )  # fmt: skip


# --- Two kinds of state, and their steps ----------------------------------------------------------


def _state(drawn: Draw, seed: int) -> _State:
  rng, (devices, kind) = np.random.default_rng(seed), _MESHES[drawn.mesh]
  value = lambda *shape: rng.standard_normal(shape, np.float32)
  params = {'w': value(8, 4).astype(drawn.dtype), 'b': value(4), 'v': value(8, 8)}
  if devices:
    axes = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((devices,), ('d',), devices=jax.devices()[:devices], axis_types=axes)
    split = {'w': jax.P('d'), 'b': jax.P(), 'v': jax.P(None, 'd')}
    at = {name: jax.NamedSharding(mesh, spec) for name, spec in split.items()}
    params = jax.device_put(params, at)
  params = jax.tree.map(jnp.asarray, params)
  copy = lambda: jax.tree.map(lambda leaf: leaf + jnp.zeros((), leaf.dtype), params)
  state = _State.create(
    apply_fn=None, params=params, tx=(_OPTIMIZERS | _OF_PAIRS)[drawn.optimizer],
    average=copy(), mean=copy(), reference=copy(), scale=jnp.float32(1024.0),
    good=jnp.zeros((), jnp.int32), key=jax.random.key(seed),
  )  # fmt: skip
  # Some of optax.contrib keep the very arrays, which cannot be donated twice.
  state = state.replace(opt_state=jax.tree.map(jnp.copy, state.opt_state))
  if not devices:
    return state
  # Scalars where a step leaves them: XLA rounds those of bfloat16 otherwise in the step that finds
  # them elsewhere.
  everywhere = jax.NamedSharding(mesh, jax.P())
  on_mesh = lambda leaf: leaf if jnp.ndim(leaf) else jax.device_put(leaf, everywhere)
  return jax.tree.map(on_mesh, state)


def _train(state: _State, batch: jax.Array) -> _State:
  keep = jax.random.bernoulli(state.key, 0.5, ())  # as of dropout
  pull = lambda leaf, first: leaf * batch * (1 + keep) + batch + batch * (leaf - first) / 8
  grads = jax.tree.map(pull, state.params, state.reference)
  grads = jax.tree.map(lambda g: g * state.scale / state.scale, grads)
  grads = jax.tree.map(lambda g, leaf: g.astype(leaf.dtype), grads, state.params)
  finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
  good = jnp.where(finite, state.good + 1, 0)
  scale = jnp.where(finite, state.scale * jnp.where(good % 3, 1.0, 2.0), state.scale / 2)
  state = state.apply_gradients(grads=grads)
  near = lambda tree, rate: jax.tree.map(
    lambda a, p: (a + (p - a) * rate).astype(p.dtype), tree, state.params
  )
  return state.replace(
    average=near(state.average, 0.1), mean=near(state.mean, 1 / good), scale=scale, good=good,
    key=jax.random.split(state.key)[0],
  )  # fmt: skip


_TRAIN = {True: jax.jit(_train, donate_argnums=0), False: jax.jit(_train)}


class _Seen(nnx.Variable):
  """How many batches: of a kind that nobody but this model knows."""


class _Model(nnx.Module):
  def __init__(self, seed: int, dtype: str):
    rngs = nnx.Rngs(seed)
    # A bias has no gradient before a BatchNorm, and Adam would make large steps of its rounding.
    self.hidden = nnx.Linear(4, 8, use_bias=False, rngs=rngs, param_dtype=dtype)
    self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    self.head, self.seen = nnx.Linear(8, 2, rngs=rngs), _Seen(jnp.zeros((), jnp.int32))

  def __call__(self, x: jax.Array) -> jax.Array:
    self.seen[...] += 1
    return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


@nnx.jit
def _fit(model: _Model, optimizer: nnx.Optimizer, batch: jax.Array) -> None:
  x = batch + jnp.arange(32.0).reshape(8, 4) / 32
  grads = nnx.grad(lambda model: jnp.square(model(x) - batch).mean())(model)
  optimizer.update(model, grads)


class _Loop(NamedTuple):
  """A state to begin with, and how a step and a sync make the next one of it."""

  state: Any
  step: Callable[[Any, Any], Any]
  given: Callable[[Any], dict[str, Any]]  # to `join` and `sync`
  next_state: Callable[[Any, Any, diloco_jax.Peer], Any]  # the state of what they return
  more: dict[str, Any] = {}  # to `join` alone


_REST = 'step', 'average', 'mean', 'reference', 'scale', 'good', 'key'


def _name(state: _State) -> _Named:
  return _Named(state.params, state.opt_state, {name: getattr(state, name) for name in _REST})


def _unname(state: _State, named: _Named) -> _State:
  return state.replace(params=named.weights, opt_state=named.moments, **named.rest)


def _loop(drawn: Draw, seed: int) -> _Loop:
  if drawn.kind == 'nnx':
    model = _Model(seed, drawn.dtype)
    pair = model, nnx.Optimizer(model, _OPTIMIZERS[drawn.optimizer], wrt=nnx.Param)
    step = lambda pair, batch: _fit(*pair, batch) or pair
    return _Loop(pair, step, lambda pair: {'params': pair}, lambda pair, new, peer: pair)
  if drawn.kind == 'named':
    return _Loop(
      _state(drawn, seed),
      _TRAIN[drawn.donates],
      lambda state: {'params': _name(state)},
      lambda state, new, peer: _unname(state, new),
      {'exchange': lambda named: named.weights},
    )
  whole = drawn.kind == 'state' or (drawn.kind == 'pair' and drawn.donates)
  if whole:
    given, next_state = (lambda state: {'params': state}), (lambda state, new, peer: new)
  else:
    given = lambda state: {'params': state.params, 'opt_state': state.opt_state}
    next_state = lambda state, new, peer: state.replace(params=new, opt_state=peer.opt_state)
  return _Loop(_state(drawn, seed), _TRAIN[drawn.donates], given, next_state)


def _bits(state: Any) -> dict[str, np.ndarray]:
  """The leaves of a state by path; also of objects of nnx."""
  if isinstance(state, tuple) and isinstance(state[0], nnx.Module):
    state = [nnx.state(part) for part in state]
  is_key = lambda leaf: jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
  raw = lambda leaf: np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf)
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {jax.tree_util.keystr(path): raw(leaf) for path, leaf in leaves}


# --- The two oracles ------------------------------------------------------------------------------


def _read(shard: int, index: int) -> np.float32:
  return np.float32(np.random.default_rng([shard, index]).standard_normal())


def _sync(drawn: Draw, learners: int) -> diloco_jax.SyncConfig:
  return diloco_jax.SyncConfig(
    learners=learners, quorum=learners, fragments=drawn.fragments, period=drawn.period, overlap=0,
    codec_up='float32', codec_down='float32', outer='sgd(learning_rate=1.0)', merge='avg',
    embedding_merge='avg', **({'adopt': 'overwrite'} if drawn.stop or learners > 1 else {}),
  )  # fmt: skip


_COMPILED: dict[str, dict[Any, Any]] = {'': {}, 'overwrite': {}}  # by what they depend on


@contextlib.contextmanager
def _shared(sync: diloco_jax.SyncConfig) -> Iterator[None]:
  """Learners of equal settings and shapes have one set of compiled functions, as the learners of
  one process may: to compile them anew would be most of the time of a draw."""
  compiled = _COMPILED[sync.adopt if sync.adopt == 'overwrite' else '']
  make = functools.partialmethod(on_device.Exchange.__init__, compiled=compiled)
  with mock.patch.object(on_device.Exchange, '__init__', make):
    yield


@contextlib.contextmanager
def _usual_promotion() -> Iterator[None]:
  """As in a program of a user; optax adds types in its own functions."""
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    yield


def _joined(drawn: Draw, stops: tuple[int, ...], server: Any, workdir: pathlib.Path) -> Any:
  """The state at the end of the loop, which is left at each of these clocks and begun again."""
  for stop in stops:
    loop = _loop(drawn, drawn.seed)
    state, where = loop.state, {'syncer': server.address, 'learner': 'l0'}
    where |= {'workdir': workdir} if drawn.stop else {}
    with diloco_jax.join(**loop.given(state), **loop.more, **where) as peer:
      state = loop.next_state(state, peer.params, peer)
      for _, batch in peer.steps(_read):
        state = loop.step(state, batch)
        state = loop.next_state(state, peer.sync(**loop.given(state), tokens=1), peer)
        if peer.clock == stop:
          break
  return state


def _single(drawn: Draw) -> str:
  plain, step, *_ = _loop(drawn, drawn.seed)
  for index in range(_STEPS):
    plain = step(plain, _read(0, index))
  plain = _bits(plain)
  with contextlib.ExitStack() as end:
    workdir = pathlib.Path(end.enter_context(tempfile.TemporaryDirectory()))
    server = end.enter_context(diloco_jax.run_syncer(total_steps=_STEPS, sync=_sync(drawn, 1)))
    stops = (drawn.stop, 0) if drawn.stop else (0,)
    joined = _bits(_joined(drawn, stops, server, workdir))
  wrong = [path for path, value in plain.items() if not _same(drawn, path, joined[path], value)]
  return ', '.join(wrong)


_EXACT = '.reference', '.key', '.scale', '.good', '.step'  # of a _State


def _same(drawn: Draw, path: str, joined: np.ndarray, plain: np.ndarray) -> bool:
  """The same bits. What a loop takes from the syncer and keeps nothing beside, in a second life or
  as a statistic, is A - (A - theta), and float32 rounds the difference of a small and a large
  value."""
  rounds = drawn.stop or "['mean']" in path or "['var']" in path
  if not rounds or path.startswith(_EXACT):
    return np.array_equal(joined, plain)
  return np.allclose(
    np.float32(joined), np.float32(plain), **_CLOSE[str(joined.dtype) == 'bfloat16']
  )


def _of_pair(drawn: Draw, number: int, server: Any) -> list[dict[str, np.ndarray]]:
  """The state that a learner has given, adopted and kept."""
  with _usual_promotion():
    loop, seen = _loop(drawn, drawn.seed), []
    where = {'syncer': server.address, 'learner': f'l{number}'}
    with diloco_jax.join(**loop.given(loop.state), **where) as peer:
      state = loop.next_state(loop.state, peer.params, peer)
      for clock in peer.steps():
        batch = np.float32((number + 0.5) * (clock < drawn.period))
        state = loop.step(state, batch)
        if clock in (drawn.period - 1, drawn.period):
          seen.append(_bits(state))
        state = loop.next_state(state, peer.sync(**loop.given(state), tokens=1), peer)
        if clock == drawn.period - 1:
          seen.append(_bits(state))
    return seen


def _pair(drawn: Draw) -> str:
  drawn = drawn._replace(fragments=1)  # so that one sync is of all
  with (
    diloco_jax.run_syncer(total_steps=2 * drawn.period, sync=_sync(drawn, 2)) as server,
    futures.ThreadPoolExecutor(2) as pool,
  ):
    calls = [pool.submit(_of_pair, drawn, number, server) for number in range(2)]
    ours, others = (call.result(_DEADLINE_S) for call in calls)
  # What moves a float32 copy leaves it within the rounding of the value that it had.
  close = _CLOSE[drawn.dtype == 'bfloat16']
  exact = drawn.optimizer == 'plain sgd'
  wrong = []
  for path in ours[0]:
    if path.startswith(('.average', '.mean', '.reference', '.key')):
      moved = [path for seen in (ours, others) if not np.array_equal(seen[0][path], seen[1][path])]
      wrong += [f'{path} that an adoption has moved'] * bool(moved)
    if drawn.optimizer == 'schedule_free' and '.z[' in path:
      gaps = [
        np.abs(np.float32(joined[path]) - plain[path]).max() for joined, plain in zip(ours, others)
      ]
      wrong += [f'{path} that are apart'] * bool(gaps[1] > gaps[0] / 2)
  for path, adopted in ours[1].items():
    if not path.startswith('.params'):
      continue
    (gave, _, kept), (gave_too, adopted_too, kept_too) = (
      [np.float32(bits[path]) for bits in seen] for seen in (ours, others)
    )
    wrong += [f'{path} of both'] * (not np.array_equal(np.float32(adopted), adopted_too))
    mean = (gave + gave_too) / 2
    wrong += [f'{path} as the mean'] * (not np.allclose(adopted_too, mean, **close))
    if drawn.optimizer == 'schedule_free':  # a step without a gradient goes towards z
      continue
    same = np.array_equal if exact else functools.partial(np.allclose, **close)
    wrong += [f'{path} as kept'] * (not (same(adopted_too, kept) and same(adopted_too, kept_too)))
  return ', '.join(wrong)


def difference(drawn: Draw) -> str:
  """Where the loops differ, '' if nowhere."""
  with _usual_promotion(), _shared(_sync(drawn, 1 + (drawn.kind == 'pair'))):
    return _pair(drawn) if drawn.kind == 'pair' else _single(drawn)


def main(seed: int, count: int) -> None:
  differences = {n: text for n in range(seed, seed + count) if (text := difference(draw(n)))}
  for number, text in differences.items():
    print(f'{draw(number)}: {text}')
  print(f'{count} loops from seed {seed} on, {len(differences)} differ')
  sys.exit(bool(differences))


if __name__ == '__main__':
  jax.config.update('jax_num_cpu_devices', 2)
  main(*map(int, sys.argv[1:]))
