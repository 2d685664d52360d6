"""A fragment on the syncer without a run: payloads in, its next version out."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
import optax

from diloco_jax.numerics import codecs, fragments, merge
from diloco_jax.syncer import outer_step

_encoder = functools.cache(lambda codec: jax.jit(codec.encode))


class Fragment:
  """Fragment p of a layout, at version 0; `gradient`: the encoded outer gradient of its last step.

  Args:
    values_N: its first values.
    rules: label -> merge rule.
    tile: values in a tile.
    devices: the fragments are whole on these.
  """

  def __init__(
    self,
    layout: fragments.Layout,
    p: int,
    values_N: np.ndarray,
    rules: dict[str, merge.MergeRule],
    tx: optax.GradientTransformation,
    up: str = 'float32',
    down: str = 'float32',
    tile: int = 0,
    devices: Sequence[jax.Device] = (),
  ):
    self.codec = codecs.get(up)
    self._p = p
    self._rule = merge.by_label(rules, [piece.label for piece in layout.fragments[p]])
    self._lib = outer_step.Tiles(
      layout,
      self.codec,
      codecs.get(down),
      self.codec,
      tx,
      devices or jax.local_devices(backend='cpu')[:1],
      None if devices else tile,
    )
    self._tiles = self._lib.begin(p, values_N)

  def lengths(self, payload: np.ndarray) -> np.ndarray:
    return self._lib.lengths(self._p, self._lib.near(self._p, payload))

  def cosines(self, payloads: list[np.ndarray]) -> np.ndarray:
    lengths_MxT = np.stack([self.lengths(payload) for payload in payloads])
    near = [self._lib.near(self._p, payload) for payload in payloads]
    return self._lib.cosines(self._p, near, lengths_MxT)

  def step(self, payloads: list[np.ndarray], weights: np.ndarray) -> outer_step.Stepped | None:
    """An outer step; None: it was refused, and nothing has changed."""
    lengths_MxT = np.stack([self.lengths(payload) for payload in payloads])
    cosines = self.cosines(payloads) if self._rule.cosines else None
    rows = merge.Rows(merge.shares(weights), lengths_MxT, cosines)
    factors = self._rule.factors(rows)
    near = [self._lib.near(self._p, payload) for payload in payloads]
    totals, sums_T = self._lib.sums(self._p, list(zip(near, factors, strict=True)))
    stretch_T = self._rule.stretch(rows, sums_T)
    result = self._lib.merge(self._p, self._tiles, totals, stretch_T)
    if result is None:
      return None
    self.gradient, stepped = result
    return self._keep(stepped)

  def redo(self, payload: np.ndarray) -> outer_step.Stepped | None:
    """The outer step of an encoded outer gradient."""
    return self._keep(self._lib.redo(self._p, self._tiles, self._lib.near(self._p, payload)))

  def _keep(self, stepped: outer_step.Stepped | None) -> outer_step.Stepped | None:
    if stepped is not None:
      self._lib.recycle(self._p, self._tiles)
      self._tiles = stepped.tiles
    return stepped

  def merge(self, deltas_MxN: np.ndarray, weights: np.ndarray) -> outer_step.Stepped | None:
    """An outer step of these pseudo-gradients."""
    encode = _encoder(self.codec)
    return self.step([np.asarray(encode(row)[0]) for row in deltas_MxN], weights)

  @property
  def whole(self):
    """Its arrays: master, published value, state of the outer optimizer."""
    return self._lib.join(self._p, self._tiles)

  def restore(self, whole) -> None:
    self._tiles = self._lib.cut(self._p, whole)

  def digest(self) -> int:
    return self._lib.digest(self._p, self._tiles)
