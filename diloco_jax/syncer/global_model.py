"""Theta on the syncer: master, published value and outer state of each fragment; the outer step.

A fragment is a list of tiles of a flat float32 vector (outer_step.py). The merged outer gradient
is encoded before the outer optimizer gets it, so a replay from the log (storage/outer_log.py) has
what the optimizer had, and makes the same bits with the same functions. The rounding error of the
encoding is not carried on to the next outer step: it would be lost with the process, so that a run
with a kill and one without would differ. docs/findings.md has its size.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build
from diloco_jax.node import payload as payload_lib
from diloco_jax.numerics import exchange, fragments, merge, outer
from diloco_jax.protocol import actions
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.syncer import outer_step
from diloco_jax.transport import payloads as payloads_lib

NOT_FINITE = 'the merged update is not finite; the fragment is unchanged'
ALL_REJECTED = 'every pseudo-gradient was rejected; the fragment is unchanged'


class Merged(NamedTuple):
  """The result of an outer step; if it was refused (`failed`: why), nothing has changed."""

  failed: str
  digest: int  # of the published value after it
  delta: payload_lib.Payload  # from the version before to this one; empty after a refusal
  gradient: memoryview  # the encoded outer gradient, from which `redo` repeats it; the same
  norm: float
  cosines: Mapping[str, float] = {}  # by label (merge.mean_cosines)


class Screened(NamedTuple):
  """The norms of the participants and the refused learners (protocol/syncer/screening.py)."""

  norms: tuple[int, ...]
  refused: tuple[str, ...]


class Theta:
  """The global model, by fragment: master, published value, outer state, version."""

  def __init__(self, assembled: build.Assembly, devices: Sequence[jax.Device] = ()):
    """Begins with version 0, the initial parameters. They are made on first use: a syncer with a
    checkpoint does not need them. With `devices` it lies there, and its payloads are arrays of jax
    (outer_step.py); else on the CPU of this process, and they are bytes."""
    self._assembled = assembled
    layout = assembled.layout
    labels = [[tensor.label for tensor in tensors] for tensors in layout.fragments]
    self._labels = labels
    from_spec = lambda make, spec: make(spec) if isinstance(spec, str) else spec
    rules = {label: from_spec(merge.make, rule) for label, rule in assembled.rules.items()}
    self._rules = [merge.by_label(rules, label) for label in labels]
    self._tiles = outer_step.Tiles(
      layout,
      assembled.codec_up,
      assembled.codec_down,
      assembled.codec_log,
      from_spec(outer.make, assembled.transform),
      devices or jax.local_devices(backend='cpu')[:1],
      None if devices else 0,
    )
    self._values: list[list[exchange.Values]] | None = None
    self._warm = False
    self.versions = [0] * layout.num_fragments
    self._shapes = fragments.by_path(assembled.exchanged)
    self._packed = [fragments.pack_pieces(pieces, self._shapes) for pieces in layout.fragments]
    self._to_leaves = jax.jit(self._assemble)

  def twin(self, assembled: build.Assembly) -> 'Theta':
    """Another one at version 0, with the compiled functions of this one: `assembled` has the same
    layout, codecs, merge rules and outer optimizer."""
    other = copy.copy(self)
    other._assembled = assembled
    other.forget()
    return other

  def _version_0(self) -> list[list[exchange.Values]]:
    """Raises ValueError if an initial parameter is not finite: no outer step could mend it."""
    layout = self._assembled.layout
    last = {piece.path: p for p, pieces in enumerate(layout.fragments) for piece in pieces}
    initial = fragments.by_path(self._assembled.init())
    leaves = {path: initial.pop(path) for path in last}
    del initial  # what is never sent takes no memory
    values = []
    for p, pieces in enumerate(layout.fragments):
      value_N = np.zeros(sum(piece.padded_size for piece in pieces), np.float32)
      for piece, start, _ in fragments.spans(pieces):
        piece_n = value_N[start : start + piece.size]
        piece_n[:] = np.asarray(fragments.rows(leaves, piece)).reshape(-1)
        if not np.isfinite(piece_n).all():
          raise ValueError(
            f'{piece.path} has initial values that are not finite (NaN or infinite). Nothing was '
            'trained, nothing is lost: correct the initial parameters and start again'
          )
      value_N[np.abs(value_N) < np.finfo(np.float32).tiny] = 0.0  # as codecs.canonical
      values.append(self._tiles.begin(p, value_N))
      for path in {piece.path for piece in pieces}:
        if last[path] == p:
          del leaves[path]  # so the model is not held twice
    return values

  def arrays(self) -> dict[str, Any]:
    """All arrays of a checkpoint, as a tree, in new buffers."""
    return _tree(self._tiles.join(p, tiles) for p, tiles in enumerate(self._whole()))

  def _whole(self) -> list[list[exchange.Values]]:
    if self._values is None:
      self._values = self._version_0()
    return self._values

  @property
  def like(self) -> Any:
    """The shapes of `arrays`, without drawing values."""
    return _tree(map(self._tiles.like, range(len(self.versions))))

  @property
  def sharding(self) -> jax.sharding.Sharding:
    """Where the arrays of a checkpoint are read, for `restore`."""
    return self._tiles.sharding(0)

  def use_own_device(self) -> contextlib.AbstractContextManager[Any]:
    return self._tiles.use_own_device()

  def near(self, p: int, payload: payload_lib.Payload) -> payload_lib.Payload:
    """A payload of fragment p where `lengths` and `merge` compute with it: itself if it is near."""
    return self._tiles.near(p, payload)

  def published(self, p: int) -> payload_lib.Payload:
    """The published value of fragment p, float32[N_p], a new array."""
    return self._tiles.published(p, self._whole()[p])

  def master(self, p: int) -> np.ndarray:
    """The float32 master of fragment p, a new array."""
    return self._tiles.flat(p, [tile.master_n for tile in self._whole()[p]])

  @property
  def shapes(self) -> Any:
    return self._assembled.exchanged

  def digest(self, p: int) -> int:
    return self._tiles.digest(p, self._whole()[p])

  def lengths(self, p: int, payload: payload_lib.Payload) -> np.ndarray:
    """The length of each tensor of fragment p in a payload, float64[T]. Raises ValueError."""
    return self._tiles.lengths(p, self.near(p, payload))

  def screen(
    self, participants: Sequence[actions.Participant], lengths_MxT: np.ndarray, live: int = 0
  ) -> Screened:
    """Judges the payloads of the participants, by the lengths of their tensors, among so many live
    learners."""
    norms = tuple(map(norm, lengths_MxT))
    factor = self._assembled.protocol.norm_factor
    return Screened(norms, screening_lib.left_out(participants, norms, live, factor))

  def merge(
    self,
    p: int,
    participants: Sequence[actions.Participant],
    payloads: Sequence[payload_lib.Payload],
    refused: Collection[str],
    lengths_MxT: np.ndarray | None = None,
  ) -> Merged:
    """Carries out an outer step of fragment p: makes its next version, unless it is refused.

    Args:
      p: the fragment.
      participants: in the order of learner ids.
      payloads: of the participants, in the same order.
      refused: participants that count as absent learners.
      lengths_MxT: of the payloads' tensors, if they are known.
    """
    rows = [m for m, participant in enumerate(participants) if participant.learner not in refused]
    if not rows:
      return self._failed(p, ALL_REJECTED)
    near = [self.near(p, payloads[m]) for m in rows]
    if lengths_MxT is None:
      lengths_MxT = np.stack([self._tiles.lengths(p, payload) for payload in near])
    else:
      lengths_MxT = lengths_MxT[rows]
    rule, merged = self._rules[p], [participants[m] for m in rows]
    weighed = merge.weigh(
      rule,
      [participant.tokens for participant in merged],
      [participant.steps for participant in merged],
      [participant.slow for participant in merged],
      lengths_MxT,
      self._assembled.config.sync.period,
      self._tiles.cosines(p, near, lengths_MxT) if rule.cosines else None,
    )
    totals, sums_T = self._tiles.sums(p, list(zip(near, weighed.factors_MxT, strict=True)))
    stretch_T = rule.stretch(weighed.rows, sums_T)
    periods = self._periods(participants, refused)
    is_replaced = screening_lib.run_goes_on_from_one(participants)
    result = self._tiles.merge(p, self._whole()[p], totals, stretch_T, periods, is_replaced)
    if not result:
      return self._failed(p, NOT_FINITE)
    length = float(np.sqrt(np.sum(np.square(stretch_T * sums_T))))
    by_label = merge.mean_cosines(weighed.factors_MxT * lengths_MxT, sums_T, self._labels[p])
    return self._next(p, *result, length)._replace(cosines=by_label)

  def _periods(self, participants: Sequence[actions.Participant], refused: Collection[str]) -> int:
    merged = [participant for participant in participants if participant.learner not in refused]
    steps = [participant.steps for participant in merged]
    return outer.periods(steps, self._assembled.config.sync.period)

  def redo(
    self,
    p: int,
    participants: Sequence[actions.Participant],
    refused: Collection[str],
    gradient: memoryview | bytes,
  ) -> Merged:
    """As outer_log.Theta.redo. Raises ValueError: the gradient has another size."""
    if not len(gradient):
      return self._failed(p, ALL_REJECTED)
    data = self.near(p, gradient)
    periods = self._periods(participants, refused)
    is_replaced = screening_lib.run_goes_on_from_one(participants)
    stepped = self._tiles.redo(p, self._whole()[p], data, periods, is_replaced)
    return self._next(p, data, stepped, 0.0) if stepped else self._failed(p, NOT_FINITE)

  def _next(
    self, p: int, data: payload_lib.Payload, stepped: outer_step.Stepped, length: float
  ) -> Merged:
    """Makes the result of an outer step the next version. The encoded outer gradient is copied to
    the host: it is what the log records."""
    values = self._whole()
    self._tiles.recycle(p, values[p])
    values[p] = stepped.tiles
    self.versions[p] += 1
    return Merged('', stepped.digest, stepped.delta, payloads_lib.to_host(data), length)

  def _failed(self, p: int, why: str) -> Merged:
    return Merged(why, self.digest(p), memoryview(b''), memoryview(b''), 0.0)

  def warm_up(self) -> None:
    """Compiles the outer steps, with a payload of zeros whose result is dropped."""
    if not self._warm:
      values = self._whole()
      for p in self._tiles.unlike:
        zeros = [np.zeros(self._assembled.payload_bytes[p], np.uint8)] * sum(outer_step.AT_ONCE)
        lengths = [self.lengths(p, zeros[0])] * len(zeros)
        if self._rules[p].cosines:
          self._tiles.cosines(p, zeros[:2], np.stack(lengths[:2]))
        totals, sums_T = self._tiles.sums(p, list(zip(zeros, lengths)))
        _, stepped = self._tiles.merge(p, values[p], totals, sums_T)
        self._tiles.recycle(p, stepped.tiles)
      self._warm = True

  def forget(self) -> None:
    """Frees all arrays and returns to version 0 (drawn on first use); compiled functions stay."""
    self._values, self.versions = None, [0] * len(self.versions)

  def params(self) -> Any:
    """Returns the published model as a parameter tree in new buffers, with None for what is never
    sent."""
    published = [[tile.published_n for tile in tiles] for tiles in self._whole()]
    leaves = self._to_leaves(jax.device_put(published, self.sharding))
    params = dict(self._shapes)
    for piece, paths, _ in itertools.chain(*self._packed):
      like = [self._shapes[path] for path in paths]
      params.update(zip(paths, fragments.unpack(leaves[piece.path], like)))
    return jax.tree.unflatten(jax.tree.structure(self.shapes), params.values())

  def _assemble(self, published: list[list[jax.Array]]) -> dict[str, jax.Array]:
    packed = itertools.chain(*self._packed)
    leaves = {piece.path: jnp.zeros(leaf.shape, leaf.dtype) for piece, _, leaf in packed}
    for packed, parts in zip(self._packed, published):
      # Copies: an array that is returned as it came would change with the next outer step.
      value_N = jnp.concatenate([jnp.copy(part) for part in parts])
      for piece, start, stop in fragments.spans([piece for piece, *_ in packed]):
        fragments.replace_rows(leaves, piece, fragments.unflatten(piece, value_N[start:stop]))
    return leaves

  def restore(self, arrays: dict[str, Any], versions: list[int]) -> None:
    whole = map(exchange.Values, arrays['masters'], arrays['published'], arrays['outer'])
    self._values = [self._tiles.cut(p, values) for p, values in enumerate(whole)]
    self.versions = list(versions)


def _tree(whole: Iterable[exchange.Values]) -> dict[str, Any]:
  """The arrays of a checkpoint."""
  return dict(zip(('masters', 'published', 'outer'), map(list, zip(*whole)), strict=True))


def norm(lengths_T: np.ndarray) -> int:
  """The norm of a payload in screening.UNIT, or screening.NOT_FINITE, also if its square is too
  large for a float32."""
  square = float(np.sum(np.square(lengths_T)))
  if not square <= np.finfo(np.float32).max:
    return screening_lib.NOT_FINITE
  return int(math.sqrt(square) * screening_lib.UNIT)
