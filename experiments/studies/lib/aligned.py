r"""Nesterov momentum for outer gradients that are turned towards it first, as in HeLoCo
(Al Asif et al., arXiv 2606.00271).

Of each tensor, with c the cosine between the outer gradient D and the momentum b, and
conf = |D| / (|D| + |b|):

  c < 0           D <- D - min(shrink (-c) conf, 1) c |D| b / |b|      less of what points back
  0 <= c < keep   D <- |D| times the unit vector of (1 - l) D / |D| + l b / |b|
  c >= keep       D stays

with l = turn (1 - c) conf. HeLoCo corrects the pseudo-gradient of each worker when it arrives; here
the merged one is corrected. The numbers are not the paper's, and neither is l: no copy of that
formula was at hand.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from diloco_jax.numerics import outer


def aligned_nesterov(
  learning_rate: float = 0.5,
  momentum: float = 0.3,
  keep: float = 0.5,
  shrink: float = 1.0,
  turn: float = 0.5,
) -> optax.GradientTransformation:
  """Nesterov momentum with this correction; keep, shrink, turn in [0, 1], the rest as `nesterov`.

  Raises ValueError: an argument is outside its range."""
  if not all(0 <= share <= 1 for share in (keep, shrink, turn)):
    raise ValueError('keep, shrink and turn must be in [0, 1]')
  nesterov = outer.nesterov(learning_rate, momentum)

  def update(grads: Any, state: Any, params: Any = None):
    momenta = jax.tree.leaves(state)
    leaves, tree = jax.tree.flatten(grads)
    turned = [_turned(d, b, keep, shrink, turn) for d, b in zip(leaves, momenta, strict=True)]
    return nesterov.update(jax.tree.unflatten(tree, turned), state, params)

  return optax.GradientTransformation(nesterov.init, update)


def _turned(d: jax.Array, b: jax.Array, keep: float, shrink: float, turn: float) -> jax.Array:
  length, other = jnp.linalg.norm(d), jnp.linalg.norm(b)
  u, v = (one / jnp.maximum(size, 1e-30) for one, size in ((d, length), (b, other)))
  c, conf = jnp.vdot(u, v), length / jnp.maximum(length + other, 1e-30)
  back = d - jnp.minimum(-shrink * c * conf, 1) * c * length * v
  part = turn * (1 - c) * conf
  mixed = (1 - part) * u + part * v
  weak = length * mixed / jnp.maximum(jnp.linalg.norm(mixed), 1e-30)
  return jnp.where(other == 0, d, jnp.where(c < 0, back, jnp.where(c < keep, weak, d)))
