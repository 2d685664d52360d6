r"""The inner optimizer: AdamW, or Muon and AdamW, with the learning rate of the protocol's clock.

A learner that reconnects adopts the syncer's clock, and the moments of a checkpoint have the count
of when they were saved; a schedule that follows the count would give the learners of one run
different rates. So the rate is an argument: `tx.update(grads, state, params,
rate=schedule(...)(clock))`, and one compiled step serves all schedules. The bias correction of the
moments keeps its own count, which belongs to them and moves with them.

  rate(t) = peak (t + 1) / W                                                    t < W (warm-up)
  rate(t) = peak (r + (1 - r) (1 + cos(pi (t - W) / (T - W))) / 2)              W <= t < T
  rate(t) = peak r                                                              t >= T

Muon (arXiv 2502.16982) replaces the mean gradient of a matrix by a nearly orthogonal matrix, with
singular values around 1, of the same row and column spaces: no direction is learned faster than
another. It needs one average per parameter, where Adam needs two. For a matrix of A inputs and B
outputs it has entries of about 1/sqrt(max(A, B)) and is made as large as an update of Adam, so one
rate and one weight decay serve all tensors:

  m <- mu m + (1 - mu) g;   g' = mu m^ + (1 - mu) g^   (^: bias corrected)
  update = 0.2 sqrt(max(A, B)) NewtonSchulz(g' / ||g'||)

It is for the matrices of the body: in an embedding and a head each row is a thing of its own.

With `momentum_weight` nu an update is nu of the mean and 1 - nu of the newest gradient
(QHM and QHAdam, arXiv 1810.06801). Learners have small batches, so less of the mean is noise that
is carried on for long, and a mean may be long:

  g' = nu m^ + (1 - nu) g                                                       Muon
  update = (nu m^ + (1 - nu) g) / (sqrt(v^) + eps)                              Adam
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from diloco_jax.numerics import fragments, spec
from diloco_jax.train import config as train_config
from diloco_jax.train import task as task_lib

_EPS = 1e-8  # of Adam
_RMS_OF_ADAM = 0.2  # of an update before the rate (arXiv 2502.16982, section 2.2)


def schedule(config: train_config.OptimizerConfig, total_steps: int) -> Callable[[int], float]:
  """The rate by clock (0 for the first inner step).

  Args:
    config: hyperparameters, validated.
    total_steps: T, the clock at which the cosine has reached its end.

  Raises:
    ValueError: the run is not longer than its warm-up.
  """
  peak, warm_up, end = config.learning_rate, config.warmup_steps, config.end_lr_ratio
  if total_steps <= warm_up:
    raise ValueError(
      f'train.steps {total_steps} leaves nothing after optimizer.warmup_steps {warm_up}: lengthen '
      'the run or shorten the warm-up'
    )

  def rate(clock: int) -> float:
    if clock < warm_up:
      return peak * (clock + 1) / warm_up
    progress = min(1.0, (clock - warm_up) / (total_steps - warm_up))
    return peak * (end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)

  return rate


def make_optimizer(
  config: train_config.OptimizerConfig, task: task_lib.Task
) -> optax.GradientTransformationExtraArgs:
  """Clipping by global norm, Adam or Muon or one of the user's own, decoupled weight decay, the
  given rate.

  Args:
    config: hyperparameters, validated.
    task: its `label` and `matrices` name the matrices of the body.

  Returns:
    A transformation whose `update` needs the keyword `rate`, a float32 scalar.

  References:
    Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101.
    Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982.
  """
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  named = {'adamw': lambda: _adam(config), 'muon': lambda: _muon(config, task, _adam(config))}
  init = lambda tx: tx.init({'w': jnp.zeros((2, 2))})
  return _in_float32(
    optax.chain(
      clip,
      _promoting(spec.make(config.name, named, use=init)),
      optax.add_decayed_weights(config.weight_decay, mask=functools.partial(_decay_mask, task)),
      optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), _descend),
    )
  )


def quasi_hyperbolic(decay: float, weight: float) -> optax.GradientTransformation:
  """Momentum that gives the newest gradient a share of its own: weight m^ + (1 - weight) g, with m
  the mean of the gradients by `decay` and ^ the correction of its bias. For any optax chain.

  References:
    Ma and Yarats, Quasi-hyperbolic momentum and Adam for deep learning, arXiv 1810.06801.
  """
  mean = optax.ema(decay, debias=True)

  def update(grads, state, params=None):
    means, state = mean.update(grads, state, params)
    return jax.tree.map(lambda m, g: weight * m + (1 - weight) * g, means, grads), state

  return optax.GradientTransformation(mean.init, update)


def _adam(config: train_config.OptimizerConfig) -> optax.GradientTransformation:
  """Adam, or QHAdam with a weight."""
  adam, weight = optax.scale_by_adam(b2=config.b2, eps=_EPS), config.momentum_weight
  if not weight:
    return adam

  def update(grads, state, params=None):
    scaled, state = adam.update(grads, state, params)
    squares = optax.tree.bias_correction(state.nu, config.b2, state.count)
    return jax.tree.map(
      lambda s, g, v: weight * s + (1 - weight) * g / (jnp.sqrt(v) + _EPS), scaled, grads, squares
    ), state

  return optax.GradientTransformation(adam.init, update)


def _in_float32(
  tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Moments and updates in float32, whatever the parameters have."""
  cast = functools.partial(optax.tree.cast, dtype=jnp.float32)
  return optax.GradientTransformationExtraArgs(
    lambda params: tx.init(cast(params)),
    lambda grads, state, params, **kwargs: tx.update(cast(grads), state, cast(params), **kwargs),
  )


def _muon(
  config: train_config.OptimizerConfig, task: task_lib.Task, rest: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Muon for the matrices of the task's body and `rest` for its other tensors."""
  by_path, axes = jax.tree_util.tree_map_with_path, functools.partial(_matrix_axes, task)
  kinds = lambda tree: by_path(lambda *leaf: 'matrix' if axes(*leaf) else 'rest', tree)
  of_decay = functools.partial(
    optax.contrib.scale_by_muon, weight_dimension_numbers=lambda tree: by_path(axes, tree)
  )
  muon = of_decay(beta=config.momentum)
  if config.momentum_weight:
    last = of_decay(beta=0.0, nesterov=False)  # its input is the mean, which is all of its state
    orthogonal = optax.stateless(lambda mean, _: last.update(mean, last.init(mean))[0])
    muon = optax.chain(quasi_hyperbolic(config.momentum, config.momentum_weight), orthogonal)
  sized = optax.stateless(
    lambda tree, _: by_path(lambda *leaf: _as_large_as_adams(leaf[1], axes(*leaf)), tree)
  )
  return optax.partition({'matrix': optax.chain(muon, sized), 'rest': rest}, kinds)


def _matrix_axes(
  task: task_lib.Task, path: jax.tree_util.KeyPath, leaf: jax.Array
) -> optax.contrib.MuonDimensionNumbers | None:
  """The input and output axes of a matrix of the body, else None."""
  if task.label(_text(path)) not in ('body', fragments.EXPERT, fragments.LAYER):
    return None
  is_matrix = leaf.ndim == 2 and not _is_vectors(path)
  axes = task_lib.first_match(task.matrices, _text(path), ((0,), (1,)) if is_matrix else None)
  return optax.contrib.MuonDimensionNumbers(*axes) if axes else None


def _as_large_as_adams(update: jax.Array, axes: optax.contrib.MuonDimensionNumbers) -> jax.Array:
  """Scales a nearly orthogonal matrix, whose entries are about 1/sqrt of its longer side."""
  sides = [math.prod(update.shape[axis] for axis in side) for side in axes]
  return update * (_RMS_OF_ADAM * math.sqrt(max(sides)))


def _promoting(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """Lets optax's own bias correction (float ** int32) pass where promotion is strict."""

  def update(updates, state, params=None):
    with jax.numpy_dtype_promotion('standard'):
      return tx.update(updates, state, params)

  return optax.GradientTransformation(tx.init, update)


def _decay_mask(task: task_lib.Task, params: Any) -> Any:
  """Which tensors decay: tensors of several axes, except vectors (`matrices` decides first)."""

  def decays(path: jax.tree_util.KeyPath, leaf: jax.Array) -> bool:
    is_matrix = leaf.ndim > 1 and not _is_vectors(path)
    return bool(task_lib.first_match(task.matrices, _text(path), is_matrix))

  return jax.tree_util.tree_map_with_path(decays, params)


def _is_vectors(path: jax.tree_util.KeyPath) -> bool:
  """Whether a tensor is the scales or biases of layers or heads, one beside the other."""
  return task_lib.first_match([(r'(scale|bias)(.value)?', True)], _text(path), False)


def _text(path: jax.tree_util.KeyPath) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _descend(updates, state, params=None, *, rate, **extra_args):
  del params, extra_args
  return jax.tree.map(lambda u: -rate * u, updates), state
