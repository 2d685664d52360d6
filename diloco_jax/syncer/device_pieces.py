"""The outer step of a fragment on the devices of a single controller.

The fragments are spread over the devices, each whole on one of them: a payload goes there from the
learner's devices, and the delta from there to those of the learners. What reaches the host are the
lengths of tensors, flags and digests, and the encoded outer gradient, for the log.

Functions and bits are those of outer_step.py. It takes pieces, since its payloads are on the host:
what one call reads stays in a core's cache, and one compiled function serves all fragments. Here
each size of fragment has its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.node import payload as payload_lib
from diloco_jax.numerics import codecs, exchange
from diloco_jax.syncer import outer_step


class DevicePieces(outer_step.Pieces):
  """As Pieces, with payloads that are arrays of jax, wherever they are."""

  _on_host = False

  def __init__(self, *args: Any):
    """As Pieces, without `piece`: at least one device; those beyond the fragments stay empty."""
    super().__init__(*args, piece=None)
    sums = lambda counts, blocks_B: jnp.stack(exchange.tensor_sums(counts, blocks_B))
    self._tensor_sums = jax.jit(sums, static_argnums=0)

  def near(self, p: int, payload: payload_lib.Payload) -> jax.Array:
    if not payload_lib.is_on_devices(payload):  # from the log
      payload = super().near(p, payload)
    return jax.device_put(payload, self.place(p))

  def published(self, p: int, pieces: Sequence[exchange.Values]) -> jax.Array:
    return jnp.copy(pieces[0].published_n)  # the original becomes a buffer

  def _sections(
    self, codec: codecs.Codec, p: int, payload: jax.Array, start: int, n: int
  ) -> list[jax.Array]:
    return [payload]

  def _by_tensor(self, p: int, blocks: Iterable[jax.Array]) -> np.ndarray:
    (blocks_B,) = blocks
    return np.asarray(self._tensor_sums(tuple(self._blocks[p]), blocks_B), np.float64)
