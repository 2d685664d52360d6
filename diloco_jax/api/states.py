"""What `join` and `sync` take beside a tree of parameters: the whole state of a training loop.

    a TrainState of flax.training, or one of its kind    its `params`, and `batch_stats` if it has
                                                         them; its `opt_state`
    (model, nnx.Optimizer), as flax.nnx has them         what the optimizer trains, and BatchStat;
                                                         the variables of the optimizer

An iterator of batches is no such state: it has no place to which a learner that comes back, or one
that takes a shard over, could return. `zip(peer.steps(), batches)` takes one as it is.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Parts(NamedTuple):
  """The parts of a state.

  Attributes:
    params: what is exchanged.
    opt_state: what checkpoints have.
    rebuild: of these two, the state as the loop has it.
    in_place: `rebuild` has changed the objects of the loop.
  """

  params: Any
  opt_state: Any
  rebuild: Callable[[Any, Any], Any]
  in_place: bool = False


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
    return Parts(given, opt_state, lambda params, opt_state: params)
  if opt_state is not None:
    raise ValueError('opt_state is part of the state that is given: leave `opt_state=` out')
  return parts


def _of_train_state(state: Any) -> Parts:
  names = [name for name in ('params', 'batch_stats') if hasattr(state, name)]
  params = {name: getattr(state, name) for name in names}
  bare = state.replace(opt_state=None, **dict.fromkeys(names))  # holds no arrays of the model

  def rebuild(params: Any, opt_state: Any) -> Any:
    return bare.replace(opt_state=opt_state, **(params if names[1:] else {'params': params}))

  return Parts(params if names[1:] else state.params, state.opt_state, rebuild)


def _of_nnx(nnx: Any, pair: tuple[Any, ...]) -> Parts:
  try:
    model, optimizer = pair
    trained = nnx.state(model, nnx.Any(optimizer.wrt, nnx.BatchStat))
  except (ValueError, AttributeError):
    raise ValueError('of flax.nnx give (model, optimizer), one model and its Optimizer') from None

  def rebuild(params: Any, opt_state: Any) -> Any:
    nnx.update(model, params)
    nnx.update(optimizer, opt_state)
    return pair

  return Parts(trained, nnx.state(optimizer), rebuild, in_place=True)
