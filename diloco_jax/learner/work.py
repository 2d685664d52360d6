"""The work of a learner: inner steps, encoding, adoptions and saves on one island.

Two threads. The *step thread* (the caller of `run`, or of `next_step` in a loop of the user's own)
takes work first in, first out and is the only one that touches the island: between two steps it
only dispatches encodings and adoptions, all on the device and inside jit. The *egress thread* waits
for the few results that must reach the host (encoded bytes, digests), announces them and posts
their events, so the next step does not wait for a copy, a checksum or the network.
"""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import jax
import numpy as np

from diloco_jax.config import build, run_config
from diloco_jax.learner import held, moments_work
from diloco_jax.node import ports
from diloco_jax.numerics import codecs, exchange, fragments
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as protocol_config
from diloco_jax.report import facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint
from diloco_jax.train import island as island_lib
from diloco_jax.train import optimizer
from diloco_jax.transport import payloads as payloads_lib


class Exchange:
  """The anchors of an island and the functions that exchange its fragments, compiled ahead of use.

  `compile_all` compiles the functions of every sync, in the order of the syncs. A caller whose
  function is not compiled yet waits for that function only.
  """

  def __init__(
    self,
    assembled: build.Assembly,
    island: held.Held,
    compiled: dict[tuple, futures.Future] | None = None,
  ):
    """`compiled`: the functions of an equal model on the same devices, to share them."""
    self._island = island
    self._layout = assembled.layout
    self._fragments = range(self._layout.num_fragments)
    self._codec_up, self._codec_down = assembled.codec_up, assembled.codec_down
    self._rebases = assembled.protocol.rebases
    blends = assembled.protocol.adopt == protocol_config.ADOPT.index('blend')
    self._alpha = None if self._rebases else assembled.config.sync.alpha if blends else 0.0
    # By fragment: the places of its tensors among the leaves of the parameters, by path.
    order = {path: i for i, path in enumerate(fragments.by_path(island.params))}
    self._places = [
      {piece.path: order[piece.path] for piece in self._layout.fragments[p]}
      for p in self._fragments
    ]
    # By fragment: its newest encoded pseudo-gradient, on the device.
    self._captures: dict[int, jax.Array] = {}
    self._compiled = {} if compiled is None else compiled
    self._lock = threading.Lock()
    self._flags = self._put((np.bool_(False), np.bool_(True)))
    # By fragment: the value that follows from its base alone, adopted as it is.
    self._no_delta = [
      exchange.Published(None, zeros[0], zeros[1], *2 * self._flags[:1])
      for zeros in map(self._zeros, self._fragments)
    ]
    self.anchors = self._get(self._lower_gather)(island.params)

  def _zeros(self, p: int) -> list[jax.Array]:
    """An encoded delta of zeros, and an encoded pseudo-gradient."""
    sizes = (one.encoded_size(self._layout.size(p)) for one in (self._codec_down, self._codec_up))
    return [self._put(np.zeros(size_bytes, np.uint8)) for size_bytes in sizes]

  def _put(self, arrays: Any) -> Any:
    return jax.device_put(arrays, self._island.replicated)

  def compile_all(self) -> None:
    for p in self._fragments:
      self._get(self._lower_encode, p)
      self._get(self._lower_adopt, p)
      self._get(self._lower_apply, self._layout.size(p))

  def _get(self, lower: Callable[..., jax.stages.Lowered], *key) -> Callable:
    """Returns a compiled function; the first caller compiles it and later callers wait."""
    with self._lock:
      known = self._compiled.get((lower.__name__, *key))
      if known is None:
        mine = self._compiled[lower.__name__, *key] = futures.Future()
    if known is not None:
      return known.result()
    try:
      mine.set_result(lower(*key).compile())
    except BaseException as error:
      mine.set_exception(error)
      raise
    return mine.result()

  def _lower_gather(self) -> jax.stages.Lowered:
    def gather(params):
      fragments_N = [fragments.gather(self._layout, p, params) for p in self._fragments]
      return [codecs.canonical(fragment_N) for fragment_N in fragments_N]

    abstract = jax.tree.map(_abstract, self._island.params, self._island.shardings.params)
    return jax.jit(gather, out_shardings=self._island.replicated).lower(abstract)

  def _lower_encode(self, p: int) -> jax.stages.Lowered:
    encode = functools.partial(exchange.pseudo_gradient, self._layout, p, self._codec_up)
    return jax.jit(encode, out_shardings=self._island.replicated).lower(
      self._abstract_leaves(p), self._abstract_anchor(self._layout.size(p))
    )

  def _lower_adopt(self, p: int) -> jax.stages.Lowered:
    adopt = functools.partial(
      exchange.adopt, self._layout, p, self._codec_up, self._codec_down, self._alpha
    )
    anchor_N = self._abstract_anchor(self._layout.size(p))
    leaves = self._abstract_leaves(p)
    shardings = {path: leaf.sharding for path, leaf in leaves.items()}
    return jax.jit(adopt, donate_argnums=0, out_shardings=shardings).lower(
      leaves, anchor_N, self._no_delta[p]._replace(base_N=anchor_N)
    )

  def _lower_apply(self, size: int) -> jax.stages.Lowered:
    apply = functools.partial(exchange.apply_delta, self._codec_down)
    data = jax.ShapeDtypeStruct(
      (self._codec_down.encoded_size(size),), np.uint8, sharding=self._island.replicated
    )
    return jax.jit(apply, donate_argnums=0, out_shardings=self._island.replicated).lower(
      self._abstract_anchor(size), data
    )

  def _abstract_anchor(self, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), np.float32, sharding=self._island.replicated)

  def _abstract_leaves(self, p: int) -> dict[str, jax.ShapeDtypeStruct]:
    is_none = lambda sharding: sharding is None
    shardings = jax.tree.leaves(self._island.shardings.params, is_leaf=is_none)
    leaves = self._leaves(p).items()
    return {path: _abstract(leaf, shardings[self._places[p][path]]) for path, leaf in leaves}

  def _leaves(self, p: int) -> exchange.Leaves:
    """The parameters with rows in fragment p."""
    leaves = jax.tree.leaves(self._island.params)
    return {path: leaves[place] for path, place in self._places[p].items()}

  def digests(self) -> tuple[int, ...]:
    """Returns the digest of each anchor as it is now."""
    compute = jax.jit(digest_lib.digest)
    return tuple(digest_lib.as_int(compute(anchor_N)) for anchor_N in self.anchors)

  def encode(self, p: int) -> tuple[jax.Array, jax.Array]:
    """Returns (bytes of the pseudo-gradient, ok) of fragment p, on the device; keeps them for the
    adoption of a version that contains them."""
    data, ok = self._get(self._lower_encode, p)(self._leaves(p), self.anchors[p])
    if self._rebases:
      self._captures[p] = data
    return data, ok

  def adopt(
    self, p: int, data: memoryview | bytes, whole: bool, keep: bool, merged: bool
  ) -> jax.Array:
    """Replaces the anchor of fragment p and adopts it; returns its digest.

    Args:
      p: the fragment.
      data: the value: float32 if `whole`, else an encoded delta to the anchor.
      whole: see `data`.
      keep: carry the steps that are not in the value onto it (exchange.adopt).
      merged: the value contains the newest capture of the fragment.
    """
    value = self._no_delta[p]._replace(keep=self._flags[keep or bool(self._alpha)])
    if whole:
      value = value._replace(base_N=self._put(np.frombuffer(data, np.float32)))
    else:
      value = value._replace(base_N=self.anchors[p], data=self._put(np.frombuffer(data, np.uint8)))
    if merged:
      value = value._replace(capture=self._captures.pop(p), merged=self._flags[True])
    return self._adopt(p, value)

  def rewind(self) -> None:
    """Sets the parameters back to the anchors; the inner optimizer keeps its state."""
    self._captures.clear()
    for p, anchor_N in enumerate(self.anchors):
      self._adopt(p, self._no_delta[p]._replace(base_N=anchor_N))

  def _adopt(self, p: int, value: exchange.Published) -> jax.Array:
    adopted = self._get(self._lower_adopt, p)(self._leaves(p), self.anchors[p], value)
    leaves, tree = jax.tree.flatten(self._island.params)
    for path, leaf in adopted.items():
      leaves[self._places[p][path]] = leaf
    self._island.params = jax.tree.unflatten(tree, leaves)
    apply = self._get(self._lower_apply, self._layout.size(p))
    self.anchors[p], digest = apply(value.base_N, value.data)
    return digest


def _abstract(leaf: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class LearnerWork:
  """The Work port of a learner (node.ports.Work). `run` on the step thread, `submit` from any."""

  def __init__(
    self,
    assembled: build.Assembly,
    island: held.Held,
    post: ports.Post,
    payloads: ports.Payloads,
    records: records_lib.Recorder,
    exchange: Exchange | None = None,
  ):
    self._config = assembled.config
    self._island = island
    self._post = post
    self._payloads = payloads
    self._records = records
    self.exchange = exchange or Exchange(assembled, island)
    self._moments = moments_work.Moments(island, post, payloads, records)
    self._queue: queue.SimpleQueue[actions.Work | None] = queue.SimpleQueue()
    self._egress: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._steps = 0
    self._tokens = 0
    self._lock_step = assembled.protocol.lag is not None
    self._saving_ns = self._idle_ns = 0  # since the last step

  def compile_all(self) -> None:
    """Compiles the functions of every exchange, ahead of use."""
    self.exchange.compile_all()
    self._moments.compile()

  def submit(self, action: actions.Work) -> None:
    self._queue.put(action)

  def stop(self) -> None:
    """Ends `run` after all work submitted before."""
    self._queue.put(None)

  def run(self) -> None:
    """Performs work until `stop`, on an Island. An exception ends it and reaches the caller."""
    with self.egress():
      while (clock := self.next_step()) is not None:
        self._step(clock)

  @contextlib.contextmanager
  def egress(self) -> Iterator[None]:
    """Runs the egress thread."""
    thread = threading.Thread(target=self._drain, name='egress', daemon=True)
    thread.start()
    try:
      yield
    finally:
      self._egress.put(None)
      thread.join()

  def next_step(self) -> int | None:
    """Performs work until the machine asks for an inner step; returns the step's clock, None after
    `stop`."""
    while (action := self._take()) is not None:
      if isinstance(action, actions.Step):
        return action.clock
      self._perform(action)
    return None

  def _take(self) -> actions.Work | None:
    begun_ns = time.monotonic_ns()
    action = self._queue.get()
    self._idle_ns += time.monotonic_ns() - begun_ns
    return action

  def _drain(self) -> None:
    while (task := self._egress.get()) is not None:
      task()

  def _perform(self, action: actions.Work) -> None:
    match action:
      case actions.Encode(sync=sync, fragment=fragment):
        data, ok = self.exchange.encode(fragment)
        self._egress.put(functools.partial(self._encoded, sync, fragment, data, ok))
      case actions.Adopt():
        self._adopt(action)
      case actions.UseShard():
        self._use_shard(action)
      case actions.ReadMoments(transfer=transfer):
        self._moments.read(transfer)
      case actions.TakeMoments():
        self._moments.take(action)
      case actions.Save():
        self._save(action)
      case _:
        raise TypeError(f'a learner has no such work: {action}')

  def _adopt(self, adopt: actions.Adopt) -> None:
    data = self._payloads.get(adopt.payload_id)
    digest = self.exchange.adopt(adopt.fragment, data, adopt.whole, adopt.keep, adopt.merged)
    self._payloads.drop(adopt.payload_id)
    self._egress.put(functools.partial(self._adopted, adopt.fragment, adopt.version, digest))

  def _use_shard(self, use: actions.UseShard) -> None:
    """Reads on from the committed cursor of a shard, even if the checkpoint has another position:
    training beyond that cursor was lost with its process, so its batches are read again."""
    if use.rewind:
      self.exchange.rewind()
    self._island.read_from(use.shard, use.cursor)

  def _step(self, step: int) -> None:
    result = self._island.step(step)
    self._steps += 1
    self._tokens += result.tokens
    saving_ns, idle_ns = self.take_between()
    self._post(
      events.StepDone(
        tokens=result.tokens,
        step_ns=int(result.seconds * 1e9),
        data_ns=int(result.data_s * 1e9),
        saving_ns=saving_ns,
      )
    )
    record_step(
      self._records,
      self._config,
      step + 1,
      self._steps,
      self._tokens,
      result,
      saving_s=saving_ns / 1e9,
      waited_s=idle_ns / 1e9 if self._lock_step else 0.0,
    )

  def take_between(self) -> tuple[int, int]:
    """Time in ns since the last step that saves took on this thread, and without any work."""
    found = self._saving_ns, self._idle_ns
    self._saving_ns = self._idle_ns = 0
    return found

  def _encoded(self, sync: int, fragment: int, data: jax.Array, ok: jax.Array) -> None:
    if not bool(ok):
      self._post(events.Encoded(sync=sync, fragment=fragment, payload_id=None, payload=None))
      return
    view = exchange.host_bytes(data)
    payload = payloads_lib.announce(view)
    self._post(
      events.Encoded(
        sync=sync, fragment=fragment, payload_id=self._payloads.put(view), payload=payload
      )
    )

  def _adopted(self, fragment: int, version: int, digest: jax.Array) -> None:
    self._post(
      events.AdoptDone(fragment=fragment, version=version, digest=digest_lib.as_int(digest))
    )

  def _save(self, save: actions.Save) -> None:
    """Starts an asynchronous save; a separate thread waits for its end."""
    begun_ns = time.monotonic_ns()
    try:
      wait = self._island.save(
        save.clock, self.exchange.anchors, save.machine_state, save.snapshot, save.keep
      )
    except checkpoint.CheckpointError as error:
      self._post(events.SaveDone(clock=save.clock, error=str(error)))
      return
    finally:
      self._saving_ns += time.monotonic_ns() - begun_ns
    threading.Thread(target=self._saved, args=(save.clock, wait), name='save', daemon=True).start()

  def _saved(self, step: int, wait: Callable[[], checkpoint.Saved]) -> None:
    try:
      saved = wait()
    except checkpoint.CheckpointError as error:
      self._post(events.SaveDone(clock=step, error=str(error)))
    else:
      self._post(
        events.SaveDone(clock=step, checkpoint=saved.number, record_sha256=saved.record_sha256)
      )


def record_step(
  records: records_lib.Recorder,
  config: run_config.Config,
  step: int,
  steps: int,
  tokens: int,
  result: island_lib.StepResult,
  saving_s: float = 0.0,
  waited_s: float = 0.0,
) -> None:
  """Records one inner step; every log_every steps also writes curves and a line for people.

  `step` is the clock after it, `steps` and `tokens` are the totals of this process; for the others
  see facts.Step.
  """
  records.report(
    facts.Step(
      step=step,
      steps=steps,
      tokens=tokens,
      loss=result.loss,
      seconds=result.seconds,
      data_s=result.data_s,
      saving_s=saving_s,
      waited_s=waited_s,
    )
  )
  if steps % config.train.log_every:
    return
  rate = optimizer.schedule(config.optimizer, config.train.steps)(step - 1)
  records.scalars(
    step,
    {
      'perf/step_time_seconds': result.seconds,
      'perf/tokens_per_second': result.tokens / result.seconds,
      'learning/loss': result.loss,
      'learning/grad_norm': result.grad_norm,
      'learning/learning_rate': rate,
    },
  )
  records.completed(step, result.seconds, result.tokens, result.loss)
