r"""AdamW whose learning rate follows the protocol's clock, not the optimizer's own count.

A learner that reconnects adopts the syncer's clock, and a donor's moments arrive with the donor's
count; a schedule that follows the count would give the learners of one run different rates. So the
clock is an argument: `tx.update(grads, state, params, step=clock)`. Adam's bias correction keeps
its own count, which belongs to the moments and moves with them.

  rate(t) = peak (t + 1) / W                                                    t < W (warm-up)
  rate(t) = peak (r + (1 - r) (1 + cos(pi (t - W) / (T - W))) / 2)              W <= t < T
  rate(t) = peak r                                                              t >= T
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from diloco_jax.train import config as config_lib


def learning_rate(
  config: config_lib.OptimizerConfig, total_steps: int, step: jax.Array | int
) -> jax.Array:
  """The rate at clock `step` (0 for the first inner step), a float32 scalar."""
  t = jnp.asarray(step, jnp.float32)
  warm_up = (t + 1) / max(config.warmup_steps, 1)
  progress = (t - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
  cosine = (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1))) / 2
  decay = config.end_lr_ratio + (1 - config.end_lr_ratio) * cosine
  return config.learning_rate * jnp.where(t < config.warmup_steps, warm_up, decay)


def make_optimizer(
  config: config_lib.OptimizerConfig, total_steps: int
) -> optax.GradientTransformationExtraArgs:
  """Clipping by global norm, Adam, decoupled weight decay, the clock's rate.

  Args:
    config: hyperparameters, validated.
    total_steps: T, the clock at which the cosine has reached its end.

  Returns:
    A transformation whose `update` needs the keyword `step`, an int32 scalar.

  References:
    Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101.
  """
  if total_steps <= config.warmup_steps:
    raise ValueError(
      f'total_steps {total_steps} leaves nothing after warmup_steps '
      f'{config.warmup_steps}: lengthen the run or shorten the warm-up'
    )
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  return optax.chain(
    clip,
    _promoting(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)),
    optax.add_decayed_weights(config.weight_decay, mask=_is_matrix),
    _descend_by_clock(config, total_steps),
  )


def _promoting(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """Lets optax's own bias correction (float ** int32) pass where promotion is strict."""

  def update(updates, state, params=None):
    with jax.numpy_dtype_promotion('standard'):
      return tx.update(updates, state, params)

  return optax.GradientTransformation(tx.init, update)


def _is_matrix(params: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _descend_by_clock(
  config: config_lib.OptimizerConfig, total_steps: int
) -> optax.GradientTransformationExtraArgs:

  def update(updates, state, params=None, *, step, **extra_args):
    del params, extra_args
    rate = learning_rate(config, total_steps, step)
    return jax.tree.map(lambda u: -rate * u, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
