r"""Mixture of Experts: a router chooses a few of E feed-forward blocks for each token.

  p = softmax(x W)                             over the experts, in float32
  y = sum over the chosen e of p_e GeGLU_e(x)  chosen: the C experts of the largest p
  balance = E sum_e f_e mean(p_e)              f_e: the share of all choices that chose e

This is the switch layer (Fedus et al., arXiv 2101.03961, equations 1, 2 and 4 to 6) with C choices
as in GShard (arXiv 2006.16668). p is not divided by its sum over the chosen: with C = 1 the router
would get no gradient. `balance` is 1 if all experts are used alike, and E if one is always chosen
with certainty. f has no gradient: descending on `balance` lowers p of the experts with large f.

An expert has no capacity, so no token is dropped, and what a token gets depends on no other token.
The rows of all tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies each run of rows by
the matrix of its expert. On a mesh each device sorts the tokens that it has, for a sort of the
whole batch would move all of it.

Axes as in decoder.py, and: E experts, C choices per token, R = B L C rows. The tensors of the
experts are stacked along E, which is what `ragged_dot` takes; fragments are cut between experts
(numerics/fragments.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from diloco_jax.train import config as train_config
from diloco_jax.train import initial

PARTITION = (
  (r'experts/(gate|up)', P(None, 'fsdp', 'tensor')),  # E D F
  (r'experts/down', P(None, ('tensor', 'fsdp'), None)),  # E F D
)
MATRICES = ((r'experts/(gate|up|down)', ((1,), (2,))),)  # of each expert
_ROUTER_STD = 0.02  # p is nearly uniform at first


class Experts(nnx.Module):
  """The feed-forward half of a layer: a router and its experts."""

  def __init__(self, config: train_config.ModelConfig, residual: float):
    """`residual`: a factor of the standard deviation of `down` (decoder.Block)."""
    E, D, F = config.num_experts, config.embed_dim, config.hidden_dim
    self.choices = config.experts_per_token
    self.router = nnx.Param(initial.Normal((D, E), _ROUTER_STD))
    self.gate = nnx.Param(initial.Normal((E, D, F), D**-0.5))
    self.up = nnx.Param(initial.Normal((E, D, F), D**-0.5))
    self.down = nnx.Param(initial.Normal((E, F, D), F**-0.5 * residual))

  def __call__(
    self, x_BxLxD: jax.Array, sharding: jax.sharding.NamedSharding | None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns y_BxLxD and `routing`, float32[3]. `sharding`: of x_BxLxD, None for one device;
    its mesh has an axis 'tensor', over which F is split."""
    probabilities_BxLxE = jax.nn.softmax((x_BxLxD @ self.router[...]).astype(jnp.float32))
    weights_BxLxC, chosen_BxLxC = jax.lax.top_k(probabilities_BxLxE, self.choices)
    experts = self.gate[...], self.up[...], self.down[...]
    apply = mix
    if sharding is not None:
      tokens, columns, rows = sharding.spec, P(None, None, 'tensor'), P(None, 'tensor')
      apply = jax.shard_map(
        lambda *arrays: jax.lax.psum(mix(*arrays), 'tensor'),
        mesh=sharding.mesh,
        in_specs=(tokens, tokens, tokens, columns, columns, rows),
        out_specs=tokens,
      )
    y_BxLxD = apply(x_BxLxD, weights_BxLxC.astype(x_BxLxD.dtype), chosen_BxLxC, *experts)
    return y_BxLxD, routing(probabilities_BxLxE, chosen_BxLxC)


def mix(
  x_BxLxD: jax.Array,
  weights_BxLxC: jax.Array,
  chosen_BxLxC: jax.Array,
  gate_ExDxF: jax.Array,
  up_ExDxF: jax.Array,
  down_ExFxD: jax.Array,
) -> jax.Array:
  """y_BxLxD: the outputs of each token's chosen experts, weighted and summed."""
  (B, L, D), (E, C) = x_BxLxD.shape, (gate_ExDxF.shape[0], chosen_BxLxC.shape[-1])
  expert_R = chosen_BxLxC.reshape(-1)
  order_R = jnp.argsort(expert_R)
  sizes_E = jnp.bincount(expert_R, length=E)
  x_RxD = jnp.repeat(x_BxLxD.reshape(-1, D), C, axis=0)[order_R]
  gate_RxF = jax.nn.gelu(jax.lax.ragged_dot(x_RxD, gate_ExDxF, sizes_E))
  hidden_RxF = gate_RxF * jax.lax.ragged_dot(x_RxD, up_ExDxF, sizes_E)
  y_RxD = jax.lax.ragged_dot(hidden_RxF, down_ExFxD, sizes_E)[jnp.argsort(order_R)]
  return jnp.einsum('blcd,blc->bld', y_RxD.reshape(B, L, C, D), weights_BxLxC)


def routing(probabilities_BxLxE: jax.Array, chosen_BxLxC: jax.Array) -> jax.Array:
  """`balance`, and two entropies in units of ln E: the mean one of the probabilities of a token (0:
  the router is certain), and that of the shares of the experts in all choices (1: all are used
  alike). float32[3]; only `balance` has a gradient.

  >>> certain = jnp.eye(4)[None]
  >>> [round(float(one), 3) for one in routing(certain, jnp.zeros((1, 4, 1), int))]
  [1.0, 0.0, 0.0]
  """
  num_experts = probabilities_BxLxE.shape[-1]
  shares_E = jnp.mean(jax.nn.one_hot(chosen_BxLxC, num_experts), axis=(0, 1, 2))
  entropy = lambda p_xE: (
    jnp.mean(jax.scipy.special.entr(p_xE).sum(axis=-1)) / np.log(max(num_experts, 2))
  )
  watched = jax.lax.stop_gradient((entropy(probabilities_BxLxE), entropy(shares_E)))
  return jnp.stack([balance(probabilities_BxLxE, chosen_BxLxC), *watched])


def balance(probabilities_BxLxE: jax.Array, chosen_BxLxC: jax.Array) -> jax.Array:
  """The load-balance loss (top of this file), a float32 scalar.

  >>> certain = jnp.eye(4)[None]  # four tokens, each sure of an expert of its own
  >>> float(balance(certain, jnp.arange(4)[None, :, None]))
  1.0
  """
  num_experts = probabilities_BxLxE.shape[-1]
  shares_E = jnp.mean(jax.nn.one_hot(chosen_BxLxC, num_experts), axis=(0, 1, 2))
  return num_experts * jnp.sum(shares_E * jnp.mean(probabilities_BxLxE, axis=(0, 1)))
