"""The work of a learner: inner steps, snapshots, adoptions and saves on one island.

Two threads. The *step thread* (whoever calls `run`) takes work first in, first out and is the only
one that touches the island: at a boundary it only dispatches what was pulled and adopted, all of it
on the device and inside jit. The *egress thread* waits for the few results that must reach the host
(encoded bytes, digests), announces them and posts their events, so the next step does not wait for
a copy, a checksum or the network.
"""

import functools
import queue
import threading
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.node import ports
from diloco_jax.numerics import codecs
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.numerics import exchange
from diloco_jax.numerics import fragments
from diloco_jax.protocol import actions
from diloco_jax.protocol import events
from diloco_jax.runtime import assembly
from diloco_jax.runtime import config as config_lib
from diloco_jax.runtime import records as records_lib
from diloco_jax.train import checkpoint
from diloco_jax.train import island as island_lib
from diloco_jax.train import optimizer


# A whole fragment is its float32 values: a "delta" to zero, whatever the codec of deltas is.
WHOLE = codecs.get('float32')


class Exchange:
  """The anchors of an island and the jitted functions that exchange its fragments."""

  def __init__(self, assembled: assembly.Assembly, island: island_lib.Island):
    self._island = island
    self._layout, sync = assembled.layout, assembled.config.sync
    count = self._layout.num_fragments
    place, shardings = island.replicated, island.shardings.params
    self._codec_down = assembled.codec_down

    def adopt(p: int, codec: codecs.Codec, params, anchor_N, data):
      start_N = jnp.zeros_like(anchor_N) if codec is WHOLE else anchor_N
      published_N, digest = exchange.apply_delta(codec, start_N, data)
      params, anchor_N = exchange.adopt(self._layout, p, params, anchor_N, published_N, sync.alpha)
      return params, anchor_N, digest

    def jit_adopt(p: int, codec: codecs.Codec):
      return jax.jit(
        functools.partial(adopt, p, codec), donate_argnums=(0, 1),
        out_shardings=(shardings, place, place),
      )

    self._encode = [
      jax.jit(
        functools.partial(exchange.pseudo_gradient, self._layout, p, assembled.codec_up),
        out_shardings=place,
      )
      for p in range(count)
    ]
    self._adopt = {
      (p, is_whole): jit_adopt(p, WHOLE if is_whole else assembled.codec_down)
      for p in range(count) for is_whole in (False, True)
    }
    self.anchors = [self._initial(p) for p in range(count)]

  def _initial(self, p: int) -> jax.Array:
    return jax.jit(
      lambda params: codecs.canonical(fragments.gather(self._layout, p, params)),
      out_shardings=self._island.replicated,
    )(self._island.params)

  def warm_up(self) -> None:
    """Compiles what every sync needs before the first step, so that none waits for a compiler."""
    params = self._island.params
    for p, anchor_N in enumerate(self.anchors):
      self._encode[p] = self._encode[p].lower(params, anchor_N).compile()
      size = self._codec_down.encoded_size(anchor_N.shape[0])
      data = jax.ShapeDtypeStruct((size,), np.uint8)
      self._adopt[p, False] = self._adopt[p, False].lower(params, anchor_N, data).compile()

  def digests(self) -> tuple[int, ...]:
    """Of the anchors as they are now."""
    compute = jax.jit(digest_lib.digest)
    return tuple(assembly.as_int(compute(anchor_N)) for anchor_N in self.anchors)

  def encode(self, p: int) -> tuple[jax.Array, jax.Array]:
    """(bytes of the pseudo-gradient, ok) of fragment p, on the device."""
    return self._encode[p](self._island.params, self.anchors[p])

  def adopt(self, p: int, data: memoryview | bytes, whole: bool) -> jax.Array:
    """Replaces anchor and parameters of fragment p; the digest of the new anchor."""
    data = np.frombuffer(data, np.uint8)
    params, self.anchors[p], digest = self._adopt[p, whole](
      self._island.params, self.anchors[p], data
    )
    self._island.params = params
    return digest


class LearnerWork:
  """The Work port of a learner (node.ports.Work). `run` on the step thread, `submit` from any."""

  def __init__(
    self,
    assembled: assembly.Assembly,
    island: island_lib.Island,
    post: ports.Post,
    payloads: ports.Payloads,
    records: records_lib.Recorder,
    restored: bool = False,
  ):
    self._config = assembled.config
    self._island = island
    self._post = post
    self._payloads = payloads
    self._records = records
    self._restored = restored
    self.exchange = Exchange(assembled, island)
    self._queue: queue.SimpleQueue[actions.Work | None] = queue.SimpleQueue()
    self._egress: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._steps = 0
    self._tokens = 0

  def submit(self, action: actions.Work) -> None:
    self._queue.put(action)

  def stop(self) -> None:
    """Ends `run` after what was submitted before."""
    self._queue.put(None)

  def run(self) -> None:
    """Does the work until `stop`; an exception ends it and belongs to the caller."""
    egress = threading.Thread(target=self._drain, name='egress', daemon=True)
    egress.start()
    try:
      while (action := self._queue.get()) is not None:
        self._perform(action)
    finally:
      self._egress.put(None)
      egress.join()

  def _drain(self) -> None:
    while (task := self._egress.get()) is not None:
      task()

  def _perform(self, action: actions.Work) -> None:
    match action:
      case actions.Step(step=step):
        self._step(step)
      case actions.Encode(sync=sync, fragment=fragment):
        data, ok = self.exchange.encode(fragment)
        self._egress.put(functools.partial(self._encoded, sync, fragment, data, ok))
      case actions.Adopt(fragment=fragment, version=version, handle=handle, whole=whole):
        digest = self.exchange.adopt(fragment, self._payloads.get(handle), whole)
        self._payloads.drop(handle)
        self._egress.put(functools.partial(self._adopted, fragment, version, digest))
      case actions.UseStream(stream=stream):
        self._use_stream(stream)
      case actions.Save(step=step, snapshot=snapshot):
        self._save(step, snapshot)
      case _:
        raise TypeError(f'not the work of a learner: {action}')

  def _use_stream(self, stream: int) -> None:
    """A process that comes back to its stream goes on reading where its checkpoint was."""
    stream %= self._config.data.streams
    if not (self._restored and self._island.stream == stream):
      self._island.lease(stream)

  def _step(self, step: int) -> None:
    result = self._island.step(step)
    self._steps += 1
    self._tokens += result.tokens
    self._post(events.StepDone(tokens=result.tokens, step_ns=int(result.seconds * 1e9)))
    record_step(self._records, self._config, step + 1, self._steps, self._tokens, result)

  def _encoded(self, sync: int, fragment: int, data: jax.Array, ok: jax.Array) -> None:
    if not bool(ok):
      self._post(events.Encoded(sync=sync, fragment=fragment, handle=None, payload=None))
      return
    view = assembly.host_bytes(data)
    payload = assembly.announce(view)
    self._post(events.Encoded(
      sync=sync, fragment=fragment, handle=self._payloads.put(view), payload=payload
    ))

  def _adopted(self, fragment: int, version: int, digest: jax.Array) -> None:
    self._post(events.AdoptDone(
      fragment=fragment, version=version, digest=assembly.as_int(digest)
    ))

  def _save(self, step: int, snapshot: dict) -> None:
    """Starts an asynchronous save; a thread of its own waits for its end."""
    try:
      wait = self._island.save(step, self.exchange.anchors, snapshot)
    except checkpoint.CheckpointError as error:
      self._post(events.SaveDone(step=step, error=str(error)))
      return
    threading.Thread(target=self._saved, args=(step, wait), name='save', daemon=True).start()

  def _saved(self, step: int, wait: Callable[[], None]) -> None:
    try:
      wait()
    except checkpoint.CheckpointError as error:
      self._post(events.SaveDone(step=step, error=str(error)))
    else:
      self._post(events.SaveDone(step=step))


def record_step(
  records: records_lib.Recorder, config: config_lib.Config, step: int, steps: int, tokens: int,
  result: island_lib.StepResult,
) -> None:
  """One inner step in the records; every log_every steps also curves and a line for people.

  `step` is the clock after it, `steps` and `tokens` the totals of this process.
  """
  records.report('step', {
    'step': step, 'steps': steps, 'tokens': tokens, 'loss': result.loss,
    'grad_norm': result.grad_norm, 'seconds': result.seconds,
  })
  if steps % config.train.log_every:
    return
  rate = optimizer.learning_rate(config.optimizer, config.train.steps, step - 1)
  records.scalars(step, {
    'perf/step_time_seconds': result.seconds,
    'perf/tokens_per_second': result.tokens / result.seconds,
    'learning/loss': result.loss, 'learning/grad_norm': result.grad_norm,
    'learning/learning_rate': float(rate),
  })
  records.completed(step, result.seconds, result.tokens, result.loss)
