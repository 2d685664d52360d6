"""M learners of a config as the leading axis of one jitted program, for devices that are faster
than the host: a virtual run (verification/virtual) dispatches each learner's step by itself.

The arithmetic is the product's (numerics/exchange.py, train/step.py), and so is the schedule of
learners that are equally fast, without a fault: sync s is of fragment (s - 1) mod P, is captured at
clock s - 1 and adopted at clock s + 1, and after the last step each fragment is merged once more.
All learners are in each merge, and their weights are equal. P = H, and the merge rules of the
default config only. Its losses are those of the virtual run to the last bit in
tests/scripts/test_accelerator.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build
from diloco_jax.numerics import codecs, exchange, fragments
from diloco_jax.train import config as train_config
from diloco_jax.train import evaluate
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import optimizer as optimizer_lib
from diloco_jax.train import step as step_lib

_AVERAGED = ('embedding', 'head', 'router')  # labels, all others are merged by rda
_FLOOR = 0.01  # of rda (numerics/merge.py)
_AHEAD = 32  # steps that the host may be ahead of the device


class Learners:
  """The learners and the syncer of a run; with one learner, data-parallel training on its batch.

  Args:
    assembled: of a config whose mesh is one device.
  """

  def __init__(self, assembled: build.Assembly):
    config, task = assembled.config, assembled.task
    self._assembled, self._count = assembled, config.sync.learners
    if config.sync.period != config.sync.fragments:
      raise ValueError('P must be H here')
    self._mesh = mesh_lib.make_mesh(train_config.MeshConfig(), jax.local_devices()[:1])
    self._tx = optimizer_lib.make_optimizer(config.optimizer, task)
    _, shardings = step_lib.init_state(task, self._tx, self._mesh, config.train.seed)
    step = step_lib.make_train_step(task, self._tx, self._mesh, shardings)
    self._step = jax.jit(jax.vmap(step, (0, 0, None)), donate_argnums=0)
    self._evaluate = evaluate.make_eval_step(task, self._mesh, shardings.params)
    stack = lambda leaf: jnp.broadcast_to(leaf, (self._count, *leaf.shape))
    self._stack = jax.jit(lambda state: jax.tree.map(stack, state))
    each = range(assembled.layout.num_fragments)
    self._gather = [jax.jit(functools.partial(fragments.gather, assembled.layout, p)) for p in each]
    self._merge = [jax.jit(functools.partial(self._merged, p)) for p in each]
    self._adopt = [jax.jit(functools.partial(self._adopted, p), donate_argnums=0) for p in each]

  def begin(self, assembled: build.Assembly) -> 'Learners':
    """Begins at version 0 of a config that differs in its seeds and its steps only; returns
    itself."""
    self._assembled, task = assembled, assembled.task
    one, _ = step_lib.init_state(task, self._tx, self._mesh, assembled.config.train.seed)
    self._held_out = [mesh_lib.put_batch(self._mesh, batch) for batch in task.eval_batches()]
    self._like, self._state = one.params, self._stack(one)
    together = self._gather if self._count > 1 else ()
    self._published = [gather(one.params) for gather in together]
    init = assembled.transform.init
    self._outer = [exchange.Values(one_N, one_N, init(one_N)) for one_N in self._published]
    return self

  def train(self, on_step: Callable[[int], None] = lambda clock: None) -> None:
    """Trains `train.steps` steps from version 0. `on_step` is called with the clock after each."""
    config = self._assembled.config
    steps, rate = config.train.steps, optimizer_lib.schedule(config.optimizer, config.train.steps)
    shards = [self._assembled.task.batches(shard) for shard in range(self._count)]
    flying: dict[int, tuple[int, Any]] = {}  # by the clock of its adoption
    for clock in range(1, steps + 1):
      batch = np.stack([shard[clock - 1] for shard in shards])
      self._state, metrics = self._step(self._state, batch, np.float32(rate(clock - 1)))
      if self._count > 1:
        self._land(flying.pop(clock, None))
        for sync in (1, 2) if clock == 1 else (clock + 1,):
          flying[sync + 1] = self._sync(sync)
      if clock % _AHEAD == 0:
        jax.block_until_ready(metrics)
      on_step(clock)
    if self._count > 1:
      flying.pop(steps + 2)  # captured for a sync after the end: captured again below
      self._land(flying.pop(steps + 1, None))
      for sync in range(steps + 1, steps + 1 + len(self._published)):
        self._land(self._sync(sync))

  def wait(self) -> None:
    """Until the device has done all that was dispatched."""
    jax.block_until_ready((self._state, self._outer))

  def loss(self) -> float:
    """Held-out loss of the published model, of one learner that of its own."""
    params = self._like
    if self._count == 1:
      params = jax.tree.map(lambda leaf: leaf[0], self._state.params)
    else:
      for p, values in enumerate(self._outer):
        params = fragments.scatter(self._assembled.layout, p, params, values.published_n)
    return evaluate.evaluate(self._evaluate, params, self._held_out)

  def _sync(self, sync: int) -> tuple[int, Any]:
    p = (sync - 1) % len(self._outer)
    captures, result = self._merge[p](self._leaves(p), self._published[p], self._outer[p])
    return p, (captures, result)

  def _land(self, landed: tuple[int, Any] | None) -> None:
    if landed is None:
      return
    p, (captures, result) = landed
    leaves = self._adopt[p](self._leaves(p), self._published[p], result.delta_bytes, captures)
    flat = fragments.by_path(self._state.params) | leaves
    params = jax.tree.unflatten(jax.tree.structure(self._state.params), flat.values())
    self._state = self._state._replace(params=params)
    self._outer[p], self._published[p] = result.tile, result.tile.published_n

  def _leaves(self, p: int) -> dict[str, jax.Array]:
    leaves = fragments.by_path(self._state.params)
    return {piece.path: leaves[piece.path] for piece in self._assembled.layout.fragments[p]}

  def _merged(self, p: int, leaves: Any, anchor_N: jax.Array, values: exchange.Values) -> Any:
    """(the captures uint8[M, B], the outer step) of fragment p."""
    made, pieces = self._assembled, self._assembled.layout.fragments[p]
    size = made.layout.size(p)
    empty = jnp.zeros(made.codec_up.encoded_size(size), jnp.uint8)
    encode = lambda own: exchange.pseudo_gradient(pieces, made.codec_up, empty, own, anchor_N)[0]
    captures_MxB = jax.vmap(encode)(leaves)
    rows_MxN = jax.vmap(lambda data: made.codec_up.decode(data, size))(captures_MxB)
    merged = [
      self._rule(piece.label, rows_MxN[:, start:stop])
      for piece, start, stop in fragments.spans(pieces)
    ]
    counts = [np.full(piece.padded_size // codecs.BLOCK, codecs.BLOCK) for piece in pieces]
    for count, piece in zip(counts, pieces):
      count[-1] -= piece.padded_size - piece.size
    ones_B = np.ones(size // codecs.BLOCK, np.float32)
    count_B = np.concatenate(counts).astype(np.int32)
    _, _, gradient_N = exchange.outer_gradient(
      made.codec_log, jnp.concatenate(merged), ones_B, count_B
    )
    return captures_MxB, exchange.outer_step(
      made.codec_down, made.transform, gradient_N, values, np.uint32(0), np.uint32(size)
    )

  @staticmethod
  def _rule(label: str, rows_Mxn: jax.Array) -> jax.Array:
    """The mean of equally weighted rows of a tensor, or RDA."""
    if label in _AVERAGED:
      return jnp.mean(rows_Mxn, 0)
    lengths_M = jnp.linalg.norm(rows_Mxn, axis=1, keepdims=True)
    mean_n = jnp.mean(jnp.where(lengths_M > 0, rows_Mxn / jnp.maximum(lengths_M, 1e-30), 0.0), 0)
    return mean_n * (jnp.mean(lengths_M) / jnp.maximum(jnp.linalg.norm(mean_n), _FLOOR))

  def _adopted(
    self, p: int, leaves: Any, anchor_N: jax.Array, delta: jax.Array, captures_MxB: jax.Array
  ) -> Any:
    made = self._assembled
    pieces, yes = made.layout.fragments[p], jnp.bool_(True)

    def adopt(own: Any, capture: jax.Array) -> Any:
      published = exchange.Adoption(anchor_N, delta, capture, yes, yes)
      return exchange.adopt(pieces, made.codec_up, made.codec_down, own, anchor_N, published)

    return jax.vmap(adopt)(leaves, captures_MxB)
