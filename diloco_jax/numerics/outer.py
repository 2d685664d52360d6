"""The outer optimizer: an optax transform of the merged outer gradient.

The sign: a pseudo-gradient is anchor - local, it points from the learner back to its anchor. So the
merged outer gradient D is a gradient to descend, and any optax transform fits:

  D = merge({Delta_m}, w);   Theta <- Theta + tx(D)

With SGD and Nesterov momentum, the paper's choice (section 4): b <- mu b + D, then
Theta <- Theta - lr (D + mu b). With avg, lr 1 and no momentum this is the mean of the learners.

An outer step of r periods, as after an outage of the syncer, moves Theta as any other. The state
becomes that of r outer steps with D / r (docs/protocol.md): else the momentum would carry the model
on by the displacement of the whole outage in the next periods.

A config chooses the transform by a spec: a name of OUTERS, else any optimizer of optax that takes a
`learning_rate` and needs only gradients: 'sgd(learning_rate=1.0)', 'adam(learning_rate=0.01)'.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import optax

from diloco_jax.numerics import fragments, spec

PyTree = Any

MOST_PERIODS = 256

# The primitives of jax that compute each value from the values at the same index.
_BY_VALUE = frozenset(
  'abs add add_any and broadcast_in_dim ceil clamp convert_element_type copy div eq exp floor ge '
  'gt integer_pow is_finite le log log1p lt max min mul ne neg not or pow round rsqrt select_n '
  'sign sqrt square sub tanh'.split()
)


def elementwise(tx: optax.GradientTransformation) -> bool:
  """Whether the update of each value depends on this value's gradient, state and parameter only, so
  that a fragment may be updated in tiles. False for a transform that looks at whole tensors, as
  lamb, and for one that this module does not know to be elementwise.

  >>> elementwise(optax.adam(0.1)), elementwise(optax.lamb(0.1)), elementwise(optax.sm3(0.1))
  (True, False, False)
  """
  for shape in ((2,), (2, 3)):  # sm3 has another way for vectors
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    jaxpr = jax.make_jaxpr(tx.update)(like, jax.eval_shape(tx.init, like), like)
    if not _elementwise(jaxpr.jaxpr, shape):
      return False
  return True


def _elementwise(jaxpr: jax.extend.core.Jaxpr, shape: tuple[int, ...]) -> bool:
  for equation in jaxpr.eqns:
    inner = jax.extend.core.jaxprs_in_params(equation.params)
    known = (
      all(_elementwise(part, shape) for part in inner)
      if inner
      else (equation.primitive.name in _BY_VALUE)
    )
    if not known or any(out.aval.shape not in ((), shape) for out in equation.outvars):
      return False
  return True


def periods(steps: Sequence[int], period: int) -> int:
  """How many whole periods an outer step covers, by the inner steps of its participants: of half of
  them at least, so that one that returns, or claims more, does not decide for all.

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
  return jax.lax.fori_loop(0, count, lambda _, carried: tx.update(mean, carried, params)[1], state)


def by_tensor(
  tx: optax.GradientTransformation, layout: fragments.Layout, p: int
) -> optax.GradientTransformation:
  """The same transform for the flat vector of fragment p: it sees the tensors."""
  split = lambda flat_N: fragments.split(layout, p, flat_N)

  def update(updates_N: jax.Array, state: PyTree, params_N: jax.Array) -> tuple[jax.Array, PyTree]:
    updates, state = tx.update(split(updates_N), state, split(params_N))
    return fragments.join(layout, p, updates), state

  return optax.GradientTransformation(lambda params_N: tx.init(split(params_N)), update)


def nesterov(learning_rate: float = 0.7, momentum: float = 0.9) -> optax.GradientTransformation:
  """SGD with Nesterov momentum; the defaults are those of DiLoCo (arXiv 2311.08105)."""
  if not (0 < learning_rate <= 10 and 0 <= momentum < 1):
    raise ValueError('learning_rate must be in (0, 10], usually 0.3 to 1, and momentum in [0, 1)')
  return optax.sgd(learning_rate, momentum, nesterov=True)


OUTERS: dict[str, Callable[..., optax.GradientTransformation]] = {'nesterov': nesterov}


@functools.cache  # to try one compiles it
def make(text: str) -> optax.GradientTransformation:
  """The transform of a spec. Raises ValueError, also if it needs more than gradients, or makes of
  zeros, as in the padding of a fragment, what is not finite."""
  return spec.make(text, _of_optax() | OUTERS, use=_try)


def _try(tx: optax.GradientTransformation) -> None:
  step = jax.jit(lambda zeros: tx.update(zeros, tx.init(zeros), zeros))
  for leaf in jax.tree.leaves(step(jnp.zeros(2))):
    if not bool(jnp.all(jnp.isfinite(leaf))):
      raise ValueError('its step on a gradient of zeros is not finite; an eps must be above 0')


def _of_optax() -> dict[str, Callable[..., optax.GradientTransformation]]:
  """The optimizers of optax; a transform without a learning rate is a part, and may not descend."""
  return {
    name: value
    for name, value in vars(optax).items()
    if inspect.isfunction(value)
    and not name.startswith(('_', 'scale_by_'))
    and 'learning_rate' in inspect.signature(value).parameters
  }
