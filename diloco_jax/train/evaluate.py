"""Held-out loss of parameters with the island's shapes: its own, or the syncer's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diloco_jax.train import config as config_lib
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import model as model_lib


def make_eval_step(
  config: config_lib.ModelConfig, mesh: jax.sharding.Mesh, params_shardings: Any
) -> Callable:
  """Returns jitted (params, batch_BxL1) -> mean loss in nats, a float32 scalar."""
  batch_sharding = mesh_lib.batch_sharding(mesh)

  def eval_step(params: Any, batch_BxL1: jax.Array) -> jax.Array:
    return model_lib.loss(config, params, batch_BxL1.astype(jnp.int32), batch_sharding)

  return jax.jit(
    eval_step,
    in_shardings=(params_shardings, batch_sharding),
    out_shardings=mesh_lib.replicated(mesh),
  )


def evaluate(eval_step: Callable, params: Any, batches: Sequence[jax.Array]) -> float:
  """Mean loss over equally large batches, in nats per token; blocks per batch (see island.py)."""
  if not batches:
    raise ValueError('no evaluation batches: set eval_batches to at least 1')
  return sum(float(eval_step(params, batch)) for batch in batches) / len(batches)
