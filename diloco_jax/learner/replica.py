"""The global model in a process that does not train: what a learner adopts, without steps of its
own to carry on."""

import jax
import numpy as np

from diloco_jax.config import build
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.numerics import exchange, fragments
from diloco_jax.protocol import messages
from diloco_jax.transport import link

NOTHING = (-1, 0)


class Differs(Exception):
  """The value is not what the syncer has published; the fragment is forgotten."""


class Replica:
  """Every fragment at the newest version that has arrived, on the CPU of this process.

  Attributes:
    held: by fragment: version and digest; NOTHING: none has arrived.
    values: by fragment: the published value, float32[N_p], never changed.
  """

  def __init__(self, assembled: build.Assembly):
    self._assembled, self._layout = assembled, assembled.layout
    self.held = [NOTHING] * self._layout.num_fragments
    self.values: list[jax.Array | None] = [None] * self._layout.num_fragments
    self._put = lambda array: jax.device_put(array, jax.local_devices(backend='cpu')[0])
    self._apply = jax.jit(exchange.apply_delta, static_argnums=0)
    self._digest = jax.jit(digest_lib.digest)

  @property
  def whole(self) -> bool:
    """Whether every fragment has arrived."""
    return NOTHING not in self.held

  def adopt(self, publish: messages.Publish, payload: link.Buffer) -> None:
    """Adopts a version. Raises Differs, and ValueError: the layout has no such payload."""
    p, base_N = publish.fragment, self.values[publish.fragment]
    if publish.base_version is None:
      value_N = self._put(np.frombuffer(payload, np.float32))
      if value_N.size != self._layout.size(p):
        raise ValueError(f'fragment {p} has {self._layout.size(p)} values, {value_N.size} came')
      digest = self._digest(value_N)
    else:
      if base_N is None or self.held[p][0] != publish.base_version:
        raise Differs(f'version {publish.version} of fragment {p} has no base here')
      data = self._put(np.frombuffer(payload, np.uint8))
      value_N, digest = self._apply(self._assembled.codec_down, base_N, data)
    if digest_lib.as_int(digest) != publish.digest:
      self.held[p] = NOTHING
      raise Differs(f'version {publish.version} of fragment {p} is not that of the syncer')
    self.held[p], self.values[p] = (publish.version, publish.digest), value_N

  def by_name(self, values: list[jax.Array | None]) -> dict[str, np.ndarray]:
    """New arrays by name, in the types of the run, of `values` of every fragment."""
    exchanged = self._assembled.exchanged
    leaves = {
      path: np.empty(leaf.shape, leaf.dtype) for path, leaf in fragments.by_path(exchanged).items()
    }
    for pieces, value_N in zip(self._layout.fragments, map(np.asarray, values)):
      for piece, start, _ in fragments.spans(pieces):
        rows = leaves[piece.path][piece.start : piece.stop] if piece.shape else leaves[piece.path]
        rows[...] = value_N[start : start + piece.size].reshape(piece.shape)
    return leaves
