"""How Orbax saves and reads the checkpoints of this package (checkpoint.py)."""

from collections.abc import Sequence
from typing import Any

from orbax.checkpoint import v1 as ocp


class KeepAll:
  """Tells Orbax to keep every checkpoint: it would remove old ones before the new one is durable,
  and a failure of that would count as one of the save."""

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    return [True] * len(checkpoints)


def make() -> ocp.Context:
  """Stores the record as one JSON file; Orbax would take a dict for a tree of arrays.

  One replica of each leaf writes it: Orbax's default, which splits a leaf among its replicas, took
  more than half of the time that `save` blocks a small island.
  """
  registry = ocp.handlers.local_registry()
  registry.add(ocp.handlers.JsonHandler, checkpointable_name='record')
  context = ocp.Context()
  context.checkpointables.registry = registry
  context.array.saving.use_replica_parallel = False
  return context
