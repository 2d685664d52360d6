"""The arrays that the protocol reads and replaces between two inner steps."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from diloco_jax.train import flops


class IslandState(Protocol):
  """The arrays of an island (train/island.py), or of a loop of the user's own (api/peer.py).

  Attributes:
    params: a tree of float arrays; an assigned tree has the same paths, shapes and dtypes.
    moments: the inner optimizer's state, a tree of arrays.
    shardings: `.params` and `.opt_state`, trees of their shardings; None stands for an array that
      is committed to no device.
    replicated: the sharding of an array that is whole on every device, or None.
  """

  params: Any
  moments: Any
  shardings: Any
  replicated: jax.sharding.Sharding | None

  def read_from(self, shard: int, next_index: int = 0) -> None:
    """Switches to a data shard, at its committed cursor."""

  def cost(self) -> flops.Cost:
    """What a step costs."""

  def must_finish(self, ahead: int) -> bool:
    """Whether the caller must call `finish` now: a dispatched step is done, or more than `ahead`
    steps still run."""

  def save(self, clock: int, protocol: dict[str, Any]) -> Callable[[], int]:
    """Starts a save; returns a function that waits for it. Raises StateError."""
