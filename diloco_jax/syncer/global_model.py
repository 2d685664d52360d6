"""Theta on the syncer: master, published value and outer state of each fragment; the outer step.

A value is a flat float32 vector per fragment. A merge and its replay from the log
(storage/outer_log.py) use the same function, jitted once: equal inputs give equal bits.
"""

import copy
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build
from diloco_jax.numerics import codecs, exchange, fragments
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.numerics import merge as merge_lib
from diloco_jax.numerics.contrib import aged
from diloco_jax.protocol import actions
from diloco_jax.protocol.syncer import screening

NOT_FINITE = 'the merged update is not finite; the fragment is unchanged'
ALL_REJECTED = 'every pseudo-gradient was rejected; the fragment is unchanged'


class Merged(NamedTuple):
  """The result of an outer step; if it was refused (`failed` says why), nothing has changed."""

  failed: str
  digest: int  # of the published value after it
  delta: memoryview  # from the version before to this one; not to be sent after a refusal
  norm: float


class Screened(NamedTuple):
  """The norms of the participants and the refused learners (protocol/syncer/screening.py)."""

  norms: tuple[int, ...]
  refused: tuple[str, ...]


class Theta:
  """The global model, by fragment: master, published value, outer state, version."""

  def __init__(self, assembled: build.Assembly):
    """Begins with version 0, the initial parameters. They are made on first use: a syncer with a
    checkpoint does not need them."""
    self._assembled = assembled
    layout = assembled.layout
    count = layout.num_fragments
    self._outer = [assembled.outer_optimizer(p) for p in range(count)]
    # The same sharding as restored arrays, so that one compiled function serves both.
    self.place = jax.sharding.SingleDeviceSharding(jax.local_devices(backend='cpu')[0])
    self._values: dict[str, Any] | None = None
    self._warm = False
    self.versions = [0] * count
    self._outer_step = [
      jax.jit(
        functools.partial(
          exchange.outer_step, layout, p, self._outer[p], assembled.codec_up, assembled.codec_down
        ),
        donate_argnums=(0, 1, 2),
      )
      for p in range(count)
    ]
    self._norm = [
      jax.jit(functools.partial(exchange.payload_norm, assembled.codec_up, layout.size(p)))
      for p in range(count)
    ]
    self._digest = jax.jit(digest_lib.digest)
    self._to_params = jax.jit(self._assemble)

  def twin(self, assembled: build.Assembly) -> 'Theta':
    """Another one at version 0, with the compiled functions of this one: `assembled` has the same
    layout, codecs, merge rules and outer optimizer."""
    other = copy.copy(self)
    other._assembled = assembled
    other.forget()
    return other

  def _version_0(self) -> dict[str, Any]:
    layout = self._assembled.layout
    params = jax.tree.map(jnp.asarray, self._assembled.init())
    published = jax.device_put(
      [codecs.canonical(fragments.gather(layout, p, params)) for p in range(layout.num_fragments)],
      self.place,
    )
    masters = [jnp.copy(value_N) for value_N in published]
    outer = jax.device_put(
      [
        exchange.init_outer(layout, p, self._outer[p], value_N) for p, value_N in enumerate(masters)
      ],
      self.place,
    )
    return {'masters': masters, 'published': published, 'outer': outer}

  def arrays(self) -> dict[str, Any]:
    """All arrays of a checkpoint, as a tree."""
    return {name: list(values) for name, values in self._whole().items()}

  def _whole(self) -> dict[str, Any]:
    if self._values is None:
      self._values = self._version_0()
    return self._values

  @property
  def like(self) -> Any:
    """The shapes of `arrays`, without drawing values."""
    return jax.eval_shape(self._version_0)

  @property
  def masters(self) -> list[jax.Array]:
    return self._whole()['masters']

  @property
  def published(self) -> list[jax.Array]:
    return self._whole()['published']

  @property
  def outer_states(self) -> list[Any]:
    return self._whole()['outer']

  @property
  def shapes(self) -> Any:
    return self._assembled.shapes

  def digest(self, p: int) -> int:
    return digest_lib.as_int(self._digest(self.published[p]))

  def width(self, participants: int) -> int:
    """The rows of the stack for so many participants: M or, for more than M, the next power of two,
    so that jax compiles few shapes."""
    expected = self._assembled.config.sync.learners
    return expected if participants <= expected else 1 << (participants - 1).bit_length()

  def screen(
    self,
    participants: Sequence[actions.Participant],
    payloads: Sequence[memoryview | bytes],
    p: int,
  ) -> Screened:
    """Judges each payload of fragment p alone, independently of the other participants."""
    norms = tuple(self.norm(p, payload) for payload in payloads)
    refused = tuple(
      one.learner
      for one, norm in zip(participants, norms, strict=True)
      if screening.refused(norm, one.least, one.limit)
    )
    return Screened(norms, refused)

  def norm(self, p: int, payload: memoryview | bytes) -> int:
    """The norm of a payload in screening.UNIT, or screening.NOT_FINITE."""
    on_cpu = jax.device_put(np.frombuffer(payload, np.uint8), self.place)
    norm = float(self._norm[p](on_cpu))
    return int(norm * screening.UNIT) if math.isfinite(norm) else screening.NOT_FINITE

  def merge(
    self,
    p: int,
    participants: Sequence[actions.Participant],
    payloads: Sequence[memoryview | bytes],
    refused: Collection[str],
    width: int,
  ) -> Merged:
    """Carries out an outer step of fragment p: makes its next version, unless it is refused.

    Args:
      p: the fragment.
      participants: in the order of learner ids.
      payloads: of the participants, in the same order.
      refused: participants that count as absent learners.
      width: rows of the stack; rows beyond the participants are absent learners. The width is part
        of the input: a sum over more rows may round in another order.
    """
    payloads_MxB = np.zeros((width, self._assembled.payload_bytes[p]), np.uint8)
    tokens_M, steps_M = [0] * width, [0] * width
    for m, (one, payload) in enumerate(zip(participants, payloads, strict=True)):
      if one.learner not in refused:
        payloads_MxB[m] = np.frombuffer(payload, np.uint8)
        tokens_M[m], steps_M[m] = one.tokens, one.steps
    sync = self._assembled.config.sync
    factors_M = aged.factors(steps_M, sync.period, sync.age_decay)
    result = self._outer_step[p](
      self.masters[p],
      self.published[p],
      self.outer_states[p],
      payloads_MxB,
      merge_lib.token_weights(tokens_M, steps_M, factors_M),
    )
    self.masters[p], self.published[p] = result.master_N, result.published_N
    self.outer_states[p] = result.opt_state
    failed = ''
    if not bool(result.ok):
      failed = (
        NOT_FINITE if any(one.learner not in refused for one in participants) else ALL_REJECTED
      )
    if not failed:
      self.versions[p] += 1
    return Merged(
      failed,
      digest_lib.as_int(result.digest),
      exchange.host_bytes(result.delta_bytes),
      float(result.norm),
    )

  def warm_up(self) -> None:
    """Compiles the outer steps for M participants, with empty contributions: all weights are 0, so
    each step is refused and nothing changes."""
    if not self._warm:
      for p, size in enumerate(self._assembled.payload_bytes):
        self.norm(p, bytes(size))
        self.merge(p, (), (), (), self.width(1))
      self._warm = True

  def forget(self) -> None:
    """Frees all arrays and returns to version 0 (drawn on first use); compiled functions stay."""
    self._values, self.versions = None, [0] * len(self.versions)

  def params(self) -> Any:
    """Returns the published model as a parameter tree in new buffers."""
    return self._to_params(self.published)

  def _assemble(self, published: list[jax.Array]) -> Any:
    tree = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes)
    for p, value_N in enumerate(published):
      tree = fragments.scatter(self._assembled.layout, p, tree, value_N)
    return tree

  def restore(self, arrays: dict[str, Any], versions: list[int]) -> None:
    self._values = {name: list(values) for name, values in arrays.items()}
    self.versions = list(versions)
