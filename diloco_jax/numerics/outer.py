"""The outer optimizer: an optax transform of the merged outer gradient.

The sign: a pseudo-gradient is anchor - local, it points from the learner back to its anchor. So the
merged outer gradient D is a gradient to descend, and any optax transform fits:

  D = merge({Delta_m}, w);   Theta <- Theta + tx(D)

With SGD and Nesterov momentum, the paper's choice (section 4): b <- mu b + D, then
Theta <- Theta - lr (D + mu b). With avg, lr 1 and no momentum this is the mean of the learners.

An outer step of r periods, as after an outage of the syncer, moves Theta as any other. The state
becomes that of r outer steps with D / r (docs/protocol.md): else the momentum would carry the model
on by the displacement of the whole outage in the next periods.

A config chooses the transform by a spec, a name of OUTERS.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from diloco_jax.numerics import fragments, spec

PyTree = Any

MOST_PERIODS = 256


class Elementwise(optax.GradientTransformation):
  """The update of each value depends on this value's gradient, state and parameter only, so that a
  fragment may be updated in pieces. Any other transform gets whole tensors."""


def periods(steps: Sequence[int], period: int) -> int:
  """How many whole periods an outer step covers, by the inner steps of its participants: of half of
  them at least, so that one that returns, or claims more, does not say it for all.

  >>> periods([12, 13, 11, 480], 12), periods([480, 481, 479, 12], 12), periods([5], 12)
  (1, 39, 1)
  """
  lower = sorted(steps)[(len(steps) - 1) // 2]
  return min(max(1, lower // period), MOST_PERIODS)


def after_periods(
  tx: optax.GradientTransformation, merged: jax.Array, state: PyTree, params: jax.Array, count: Any
) -> PyTree:
  """The state after `count` outer steps that make up `merged` together. For momentum:

  b <- mu^r b + (1 - mu^r) / (1 - mu) D / r
  """
  mean = merged / jnp.asarray(count, merged.dtype)
  return jax.lax.fori_loop(0, count, lambda _, at: tx.update(mean, at, params)[1], state)


def by_tensor(
  tx: optax.GradientTransformation, layout: fragments.Layout, p: int
) -> optax.GradientTransformation:
  """The same transform for the flat vector of fragment p: it sees the tensors."""
  split = lambda flat_N: fragments.split(layout, p, flat_N)

  def update(updates_N: jax.Array, state: PyTree, params_N: jax.Array) -> tuple[jax.Array, PyTree]:
    updates, state = tx.update(split(updates_N), state, split(params_N))
    return fragments.join(layout, p, updates), state

  return optax.GradientTransformation(lambda params_N: tx.init(split(params_N)), update)


def nesterov(learning_rate: float = 0.7, momentum: float = 0.9) -> Elementwise:
  """SGD with Nesterov momentum; the defaults are those of DiLoCo (arXiv 2311.08105)."""
  if not (0 < learning_rate <= 10 and 0 <= momentum < 1):
    raise ValueError('learning_rate must be in (0, 10], usually 0.3 to 1, and momentum in [0, 1)')
  return Elementwise(*optax.sgd(learning_rate, momentum, nesterov=True))


OUTERS: dict[str, Callable[..., optax.GradientTransformation]] = {'nesterov': nesterov}


def make(text: str) -> optax.GradientTransformation:
  """The transform of a spec. Raises ValueError."""
  return spec.make(text, OUTERS, use=lambda tx: tx.init(jnp.zeros(2)))
