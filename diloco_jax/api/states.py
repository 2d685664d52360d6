"""What `join` and `sync` take beside a tree of parameters: the whole state of a training loop.

    a TrainState of flax.training, or one of its kind    its `params`, and `batch_stats` if it has
                                                         them
    (model, nnx.Optimizer), as flax.nnx has them         what the optimizer trains, and BatchStat

All else of it is saved and restored as the state of the optimizer is: steps, averages of the
parameters, other variables, streams of random keys. Not so parameters that no optimizer trains, and
what is no array.

An iterator of batches is no such state: it has no position to which a learner that comes back, or
one that takes a shard over, could return. `zip(peer.steps(), batches)` takes one as it is; all
learners read the same batches unless each shuffles by its own `peer.shard`.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.storage import arrays

_SCHEDULES = 'ScaleByScheduleState', 'WrappedScheduleState'  # of optax


class Parts(NamedTuple):
  """The parts of a state.

  Attributes:
    params: what is exchanged.
    opt_state: what checkpoints have; of a whole state {'opt_state': ..., 'rest': by name}.
    rebuild: of these two, the state as the loop has it.
    in_place: `rebuild` has changed the objects of the loop.
    kept: the names of what neither has.
    optimizer: the state of the optimizer in the types of its library, if there is one.
  """

  params: Any
  opt_state: Any
  rebuild: Callable[[Any, Any], Any]
  in_place: bool = False
  kept: tuple[str, ...] = ()
  optimizer: Any = None


def split(given: Any, opt_state: Any = None) -> Parts:
  """The parts of what a loop gives: a state, or parameters and, if it is saved, the state of the
  optimizer. Raises ValueError."""
  nnx = sys.modules.get('flax.nnx')  # a loop that uses it has imported it
  pair = given if isinstance(given, tuple) else (given,)
  if nnx and any(isinstance(one, nnx.Optimizer) for one in pair):
    parts = _of_nnx(nnx, pair)
  elif all(hasattr(given, name) for name in ('params', 'opt_state', 'replace')):
    parts = _of_train_state(given)
  else:
    return Parts(given, opt_state, lambda params, opt_state: params, optimizer=opt_state)
  if opt_state is not None:
    raise ValueError('opt_state is part of the state that is given: leave `opt_state=` out')
  return parts


def told(parts: Parts) -> Iterator[str]:
  """What a learner says of a state when it joins."""
  by_count = lambda node: type(node).__name__ in _SCHEDULES
  if any(map(by_count, jax.tree.leaves(parts.optimizer, is_leaf=by_count))):
    yield (
      'the optimizer has a schedule by its own count of updates, which falls behind the clock of '
      'the run while this learner is slow or away: give it the rate of the clock '
      '(docs/your_model.md, "Schedule by clock")'
    )
  if parts.kept:
    few = ', '.join(parts.kept[:3])
    yield f'{len(parts.kept)} leaves of the state are neither exchanged nor saved: {few}'


def _of_train_state(state: Any) -> Parts:
  names = [name for name in ('params', 'batch_stats') if hasattr(state, name)]
  params = {name: getattr(state, name) for name in names}
  bare = state.replace(opt_state=None, **dict.fromkeys(names))  # holds no arrays of the model
  saved, rest, kept = _rest(bare)

  def rebuild(params: Any, moments: Any) -> Any:
    given = params if names[1:] else {'params': params}
    return rest(moments['rest']).replace(opt_state=moments['opt_state'], **given)

  moments = {'opt_state': state.opt_state, 'rest': saved}
  params = params if names[1:] else state.params
  return Parts(params, moments, rebuild, kept=kept, optimizer=state.opt_state)


def _of_nnx(nnx: Any, pair: tuple[Any, ...]) -> Parts:
  try:
    model, optimizer = pair
    frozen = nnx.Any(nnx.Param, nnx.Intermediate)  # or they come and go
    trained, frozen, others = nnx.state(model, nnx.Any(optimizer.wrt, nnx.BatchStat), frozen, ...)
  except (ValueError, AttributeError):
    raise ValueError('of flax.nnx give (model, optimizer), one model and its Optimizer') from None
  saved, rest, kept = _rest(others)

  def rebuild(params: Any, moments: Any) -> Any:
    nnx.update(model, params, rest(moments['rest']))
    nnx.update(optimizer, moments['opt_state'])
    return pair

  moments = {'opt_state': nnx.state(optimizer), 'rest': saved}
  kept = (*arrays.by_name(frozen), *kept)
  return Parts(trained, moments, rebuild, True, kept, optimizer.opt_state)


def _rest(tree: Any) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any], tuple[str, ...]]:
  """What a tree has beside parameters and moments: its arrays and numbers by name, of a typed key
  its data; the tree again, from these; and the names of its other leaves, which stay."""
  structure, saved, others, impls = jax.tree.structure(tree), {}, {}, {}
  for name, leaf in arrays.by_name(tree).items():
    others[name] = None
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      saved[name], impls[name] = jax.random.key_data(leaf), jax.random.key_impl(leaf)
    elif isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
      saved[name] = leaf
    else:
      others[name] = leaf
  kept = tuple(others.keys() - saved.keys())

  def rebuild(saved: dict[str, Any]) -> Any:
    keys = {name: jax.random.wrap_key_data(saved[name], impl=impl) for name, impl in impls.items()}
    leaves = others | saved | keys
    return jax.tree.unflatten(structure, [leaves[name] for name in others])

  return saved, rebuild, kept
