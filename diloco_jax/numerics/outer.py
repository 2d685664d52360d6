"""The outer optimizer: a merge rule, then an optax transform.

The sign: a pseudo-gradient is anchor - local, it points from the learner back to its anchor. So the
merged outer gradient D is a gradient to descend, and any optax transform fits:

  D = merge({Delta_m}, w);   Theta <- Theta + tx(D)

With SGD and Nesterov momentum, the paper's choice (section 4): b <- mu b + D, then
Theta <- Theta - lr (D + mu b). With avg, lr 1 and no momentum this is the mean of the learners.

A config chooses the transform by a spec: a name of OUTERS, else any optimizer of optax that takes a
`learning_rate` and needs only gradients: 'sgd(learning_rate=1.0)', 'adam(learning_rate=0.01)'.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diloco_jax.numerics import merge, spec
from diloco_jax.numerics.contrib import delayed

PyTree = Any


class OuterOptimizer(NamedTuple):
  """Updates one fragment of the syncer with the pseudo-gradients of learners.

  Attributes:
    init: params -> state.
    update: (deltas with leading axis M, weights_M, state, params)
      -> (new params, new state, the merged outer gradient).
  """

  init: Callable[[PyTree], 'OuterState']
  update: Callable[[PyTree, jax.Array, 'OuterState', PyTree], tuple[PyTree, 'OuterState', PyTree]]


class OuterState(NamedTuple):
  """The state of the merge rule and that of the optax transform."""

  rule: PyTree
  tx: PyTree


def outer_optimizer(rule: merge.MergeRule, tx: optax.GradientTransformation) -> OuterOptimizer:
  """Composes a merge rule with an optax transform.

  >>> import jax.numpy as jnp
  >>> outer = outer_optimizer(merge.avg(), optax.sgd(1.0))
  >>> anchor, locals_Mx2 = jnp.float32([1, 1]), jnp.float32([[0, 1], [2, 3]])
  >>> deltas = anchor[None] - locals_Mx2
  >>> outer.update(deltas, jnp.ones(2), outer.init(anchor), anchor)[0].tolist()  # the mean
  [1.0, 2.0]
  """

  def init(params: PyTree) -> OuterState:
    return OuterState(rule.init(params), tx.init(params))

  def update(
    deltas: PyTree, weights_M: jax.Array, state: OuterState, params: PyTree
  ) -> tuple[PyTree, OuterState, PyTree]:
    merged, rule_state = rule.merge(deltas, weights_M, state.rule)
    updates, tx_state = tx.update(merged, state.tx, params)
    return optax.apply_updates(params, updates), OuterState(rule_state, tx_state), merged

  return OuterOptimizer(init, update)


def nesterov(learning_rate: float = 0.7, momentum: float = 0.9) -> optax.GradientTransformation:
  """SGD with Nesterov momentum; the defaults are those of DiLoCo (arXiv 2311.08105)."""
  if not (0 < learning_rate <= 10 and 0 <= momentum < 1):
    raise ValueError('learning_rate must be in (0, 10], usually 0.3 to 1, and momentum in [0, 1)')
  return optax.sgd(learning_rate, momentum, nesterov=True)


OUTERS: dict[str, Callable[..., optax.GradientTransformation]] = {
  'nesterov': nesterov,
  'delayed_nesterov': delayed.delayed_nesterov,
}


def make(text: str) -> optax.GradientTransformation:
  """The transform of a spec. Raises ValueError, also if it needs more than gradients."""
  tensor = jax.ShapeDtypeStruct((2,), jnp.float32)
  step = lambda tx: lambda x: tx.update(x, tx.init(x), x)
  return spec.make(text, _of_optax() | OUTERS, use=lambda tx: jax.eval_shape(step(tx), tensor))


def _of_optax() -> dict[str, Callable[..., optax.GradientTransformation]]:
  """Its optimizers. A transform without a learning rate is a part of one, and may not descend."""
  return {
    name: value
    for name, value in vars(optax).items()
    if inspect.isfunction(value)
    and not name.startswith(('_', 'scale_by_'))
    and 'learning_rate' in inspect.signature(value).parameters
  }
