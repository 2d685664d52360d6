r"""Delayed Nesterov (Liu et al., arXiv 2401.09135): momentum for old gradients.

When gradients are old, momentum on every one of them drives the model past the places that they
were measured at. So the momentum b learns from the mean of N outer gradients D at a time, and acts
when it has learned. With a share `spread` in [0, 1] of it that acts on every outer step instead:

  in every N-th outer step    b <- mu b + mean of the last N D
                              Theta <- Theta - lr (D + (N (1 - spread) + spread) mu b)
  in the others               Theta <- Theta - lr (D + spread mu b)

N = 1 is Nesterov momentum. The paper writes epsilon for N lr and c for spread / N, because there a
step has the gradient of one learner; here it has the merged one, and lr compares with nesterov's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class DelayedState(NamedTuple):
  """The momentum, and the outer gradients that it has not learned from."""

  count: jax.Array  # of these gradients, int32
  total: PyTree  # their sum
  momentum: PyTree


def delayed_nesterov(
  learning_rate: float = 0.7, momentum: float = 0.9, every: int = 4, spread: float = 0.0
) -> optax.GradientTransformation:
  """Nesterov momentum that is updated every N outer steps.

  Args:
    learning_rate: lr, in (0, 10].
    momentum: mu, in [0, 1).
    every: N, the paper's number of learners.
    spread: the share of the momentum that acts on each outer step, in [0, 1].

  Raises:
    ValueError: an argument is outside its range.
  """
  counts = type(every) is int and every >= 1
  if not (0 < learning_rate <= 10 and 0 <= momentum < 1 and counts and 0 <= spread <= 1):
    raise ValueError(
      'learning_rate must be in (0, 10], momentum in [0, 1), every at least 1 and whole, spread in '
      '[0, 1]'
    )

  def init(params: PyTree) -> DelayedState:
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)  # no two share a buffer: it is donated
    return DelayedState(jnp.zeros((), jnp.int32), zeros(), zeros())

  def update(grads: PyTree, state: DelayedState, params: PyTree = None):
    del params
    full = state.count + 1 == every
    total = jax.tree.map(jnp.add, state.total, grads)
    learn = lambda b, d: jnp.where(full, momentum * b + d / every, b)
    learned = jax.tree.map(learn, state.momentum, total)
    share = jnp.where(full, every * (1 - spread) + spread, spread)
    updates = jax.tree.map(lambda d, b: -learning_rate * (d + share * momentum * b), grads, learned)
    rest = jax.tree.map(lambda d: jnp.where(full, 0.0, d), total)
    return updates, DelayedState(jnp.where(full, 0, state.count + 1), rest, learned)

  return optax.GradientTransformation(init, update)
