"""Held-out loss of parameters: of an island's own, or of the global model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import task as task_lib


def make_eval_step(task: task_lib.Task, mesh: jax.sharding.Mesh, params_shardings: Any) -> Callable:
  """Returns jitted (params, batch) -> mean loss, a float32 scalar."""
  batch_sharding = mesh_lib.batch_sharding(mesh)
  return jax.jit(
    lambda params, batch: task.measured(params, batch, batch_sharding)[0],
    in_shardings=(params_shardings, batch_sharding),
    out_shardings=mesh_lib.replicated(mesh),
  )


def evaluate(
  eval_step: Callable,
  params: Any,
  batches: Sequence[task_lib.Batch],
  stopped: Callable[[], bool] = lambda: False,
) -> float | None:
  """Mean loss over equally large batches; blocks per batch (see island.py). None: there are no
  batches, or `stopped`, which is asked before every batch, said so."""
  if not batches:
    return None
  total = 0.0
  for batch in batches:
    if stopped():
      return None
    total += float(eval_step(params, batch))
  return total / len(batches)
