"""An oracle for loops: a plain loop, and the same loop through `join`, make the same bits.

    python -m tests.api.drawn_loops SEED COUNT     # draws these again, or many new ones

One learner, an outer step of rate 1 without momentum, lock step, payloads without loss. A seed
draws the values, their dtypes and shardings, the mesh, the optimizer, the kind of state, donation,
and the settings.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import diloco_jax

_STEPS = 8
_OPTIMIZERS = {
  'sgd': optax.sgd(0.1, momentum=0.9),
  'adamw': optax.adamw(1e-2),
  'lion': optax.lion(1e-3),
  'schedule': optax.adam(optax.cosine_decay_schedule(1e-2, _STEPS)),
  'steps': optax.MultiSteps(optax.adam(1e-2), 2),
  'schedule_free': optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1),
}
_MESHES = {
  'none': (0, ''),
  **{f'{n} {kind}': (n, kind) for n in (1, 2) for kind in ('Auto', 'Explicit')},
}


class _State(train_state.TrainState):
  average: Any
  key: jax.Array


class Draw(NamedTuple):
  seed: int
  dtype: str
  mesh: str
  optimizer: str
  whole: bool
  donates: bool
  fragments: int
  period: int


def draw(seed: int) -> Draw:
  rng = np.random.default_rng(seed)
  one = lambda choices: choices[rng.integers(len(choices))]
  mesh, optimizer = one(list(_MESHES)), one(list(_OPTIMIZERS))
  return Draw(
    seed, one(['float32', 'bfloat16']), mesh, optimizer,
    one([True, False]), one([True, False]), one([1, 2]), one([2, 4]),
  )  # fmt: skip


def _begin(drawn: Draw) -> Any:
  rng, (devices, kind) = np.random.default_rng(drawn.seed), _MESHES[drawn.mesh]
  value = lambda *shape: rng.standard_normal(shape, np.float32)
  params = {'w': value(8, 4).astype(drawn.dtype), 'b': value(4), 'v': value(8, 8)}
  if devices:
    axes = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((devices,), ('d',), devices=jax.devices()[:devices], axis_types=axes)
    split = {'w': jax.P('d'), 'b': jax.P(), 'v': jax.P(None, 'd')}
    at = {name: jax.NamedSharding(mesh, spec) for name, spec in split.items()}
    params = jax.device_put(params, at)
  params = jax.tree.map(jnp.asarray, params)
  copy = jax.tree.map(lambda leaf: leaf + jnp.zeros((), leaf.dtype), params)
  return _State.create(
    apply_fn=None, params=params, tx=_OPTIMIZERS[drawn.optimizer], average=copy,
    key=jax.random.key(drawn.seed),
  )  # fmt: skip


def _step(state: _State, batch: jax.Array) -> _State:
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    keep = jax.random.bernoulli(state.key, 0.5, ())  # as of dropout
    grads = jax.tree.map(lambda leaf: leaf * batch * (1 + keep) + batch, state.params)
    grads = jax.tree.map(lambda g, leaf: g.astype(leaf.dtype), grads, state.params)
    state = state.apply_gradients(grads=grads)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, state.params)
    average = jax.tree.map(lambda a, p: a.astype(p.dtype), average, state.params)
    return state.replace(average=average, key=jax.random.split(state.key)[0])


def difference(drawn: Draw) -> str:
  """Where the two loops differ, '' if nowhere."""
  read = lambda shard, index: np.float32(np.random.default_rng([shard, index]).standard_normal())
  step = jax.jit(_step, donate_argnums=0 if drawn.donates else ())
  plain = _begin(drawn)
  for index in range(_STEPS):
    plain = step(plain, read(0, index))
  state = _begin(drawn)
  sync = diloco_jax.SyncConfig(
    learners=1, quorum=1, fragments=drawn.fragments, period=drawn.period, overlap=0,
    codec_up='float32', codec_down='float32', outer='sgd(learning_rate=1.0)', merge='avg',
    embedding_merge='avg',
  )  # fmt: skip
  with diloco_jax.run_syncer(total_steps=_STEPS, sync=sync) as server:
    given, moments = (state, None) if drawn.whole else (state.params, state.opt_state)
    with diloco_jax.join(given, syncer=server.address, learner='l0', opt_state=moments) as peer:
      state = (
        peer.params if drawn.whole else state.replace(params=peer.params, opt_state=peer.opt_state)
      )
      for _, batch in peer.steps(read):
        state = step(state, batch)
        if drawn.whole:
          state = peer.sync(state, tokens=1)
        else:
          params = peer.sync(state.params, tokens=1, opt_state=state.opt_state)
          state = state.replace(params=params, opt_state=peer.opt_state)
  mine, its = (dict(jax.tree_util.tree_leaves_with_path(one)) for one in (state, plain))
  bits = lambda leaf: np.asarray(
    jax.random.key_data(leaf) if leaf.dtype == state.key.dtype else leaf
  )
  wrong = [path for path in its if not np.array_equal(bits(mine[path]), bits(its[path]))]
  return ', '.join(jax.tree_util.keystr(path) for path in wrong)


def main(seed: int, count: int) -> None:
  found = {n: text for n in range(seed, seed + count) if (text := difference(draw(n)))}
  for number, text in found.items():
    print(f'{draw(number)}: {text}')
  print(f'{count} loops from seed {seed} on, {len(found)} differ')
  sys.exit(bool(found))


if __name__ == '__main__':
  main(*map(int, sys.argv[1:]))
