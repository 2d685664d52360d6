"""The inner step: one jitted function, the same for a lone learner and for one with a syncer.

The learner may overwrite parameters with a published fragment between two steps; the step does not
depend on it. The state is donated, so a step allocates no second copy of parameters and moments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from diloco_jax.numerics import fragments
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import task as task_lib


class TrainState(NamedTuple):
  """The arrays that an inner step changes. Clock, counters and cursor are integers elsewhere."""

  params: Any
  opt_state: Any  # of what is not frozen; moments have the sharding of their parameters


def init_state(
  task: task_lib.Task, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh, seed: int
) -> tuple[TrainState, TrainState]:
  """Puts initial parameters and moments onto the mesh; a split leaf is never whole on one device.

  Returns:
    The state, and a tree of the same structure of NamedShardings.
  """
  params = task.init(seed)
  abstract = jax.eval_shape(lambda tree: TrainState(tree, tx.init(task.trained(tree))), params)
  shardings = mesh_lib.tree_shardings(mesh, abstract, task.partition)
  # The task may write its arrays again; a large frozen one is an np.memmap.
  own = lambda leaf: leaf.copy() if type(leaf) is np.ndarray else leaf
  params = jax.tree.map(lambda leaf, at: mesh_lib.put(own(leaf), at), params, shardings.params)
  opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(task.trained(params))
  return TrainState(params, opt_state), shardings


def make_train_step(
  task: task_lib.Task,
  tx: optax.GradientTransformationExtraArgs,
  mesh: jax.sharding.Mesh,
  shardings: TrainState,
) -> Callable:
  """Returns jitted (state, batch, rate float32) -> (state, metrics).

  Metrics are replicated scalars: `loss`, `grad_norm` before clipping, both float32, and those of
  the task.
  """
  batch_sharding, scalar = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)

  def train_step(state: TrainState, batch: task_lib.Batch, rate: jax.Array):
    whole = lambda trained: fragments.fill(trained, state.params)
    measure = lambda trained: task.measured(whole(trained), batch, batch_sharding)
    trained = task.trained(state.params)
    (loss, others), grads = jax.value_and_grad(measure, has_aux=True)(trained)
    updates, opt_state = tx.update(grads, state.opt_state, trained, rate=rate)
    add = lambda leaf, update: (leaf.astype(update.dtype) + update).astype(leaf.dtype)
    params = whole(jax.tree.map(add, trained, updates))
    norm = optax.tree.norm(optax.tree.cast(grads, np.float32))
    return TrainState(params, opt_state), {**others, 'loss': loss, 'grad_norm': norm}

  return jax.jit(
    train_step,
    donate_argnums=0,
    in_shardings=(shardings, batch_sharding, scalar),
    out_shardings=(shardings, scalar),
  )
