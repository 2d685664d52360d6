"""The work of the syncer: outer steps, whole fragments, saves and held-out loss, on the CPU.

Theta, the published values and the outer optimizer's state live here, a flat float32 vector per
fragment. One *work thread* changes them, first in first out, so a save or a whole fragment sees
what every merge before it has made. The *evaluation thread* works on copies and delays nobody.
"""

import functools
import queue
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.node import ports
from diloco_jax.numerics import codecs
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.numerics import exchange
from diloco_jax.numerics import fragments
from diloco_jax.numerics import weights
from diloco_jax.protocol import actions
from diloco_jax.protocol import events
from diloco_jax.runtime import assembly
from diloco_jax.runtime import records as records_lib
from diloco_jax.train import checkpoint
from diloco_jax.train import config as train_config
from diloco_jax.train import data
from diloco_jax.train import evaluate
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import model as model_lib


class Theta:
  """The global model, by fragment: master, published value, outer state, version."""

  def __init__(self, assembled: assembly.Assembly):
    """Version 0 from the config's seed, the same that every learner draws."""
    self._assembled = assembled
    layout, seed = assembled.layout, assembled.config.train.seed
    count = layout.num_fragments
    params = jax.tree.map(jnp.asarray, model_lib.init_params(assembled.config.model, seed))
    self._outer = [assembled.outer_optimizer(p) for p in range(count)]
    self.published = [codecs.canonical(fragments.gather(layout, p, params)) for p in range(count)]
    self.masters = [jnp.copy(value_N) for value_N in self.published]
    self.outer_states = [
      exchange.init_outer(layout, p, self._outer[p], self.masters[p]) for p in range(count)
    ]
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
    self._digest = jax.jit(digest_lib.digest)
    self._to_params = jax.jit(self._assemble)

  @property
  def shapes(self) -> Any:
    return self._assembled.shapes

  def digest(self, p: int) -> int:
    return assembly.as_int(self._digest(self.published[p]))

  def outer_step(
    self, p: int, payloads_MxB: np.ndarray, tokens_M: np.ndarray, steps_M: np.ndarray
  ) -> exchange.OuterResult:
    """Merges into fragment p; the state is replaced (by itself, if the result is not ok)."""
    result = self._outer_step[p](
      self.masters[p], self.published[p], self.outer_states[p], payloads_MxB,
      weights.token_weights(jnp.asarray(tokens_M), jnp.asarray(steps_M)),
    )
    self.masters[p], self.published[p] = result.master_N, result.published_N
    self.outer_states[p] = result.opt_state
    return result

  def warm_up(self, p: int, width: int) -> None:
    """Compiles the outer step of fragment p for `width` participants, by an empty contribution:
    nobody has a weight, so nothing changes."""
    none = np.zeros(width, np.int32)
    self.outer_step(p, np.zeros((width, self._assembled.payload_bytes[p]), np.uint8), none, none)

  def params(self) -> Any:
    """The published model as a parameter tree, in buffers of its own."""
    return self._to_params(self.published)

  def _assemble(self, published: list[jax.Array]) -> Any:
    tree = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.shapes)
    for p, value_N in enumerate(published):
      tree = fragments.scatter(self._assembled.layout, p, tree, value_N)
    return tree

  def arrays(self) -> dict[str, Any]:
    """Everything a checkpoint needs; a tree of arrays."""
    return {
      'masters': self.masters, 'published': self.published, 'outer': self.outer_states,
    }

  def restore(self, arrays: dict[str, Any], versions: list[int]) -> None:
    self.masters, self.published = list(arrays['masters']), list(arrays['published'])
    self.outer_states = list(arrays['outer'])
    self.versions = list(versions)


class Evaluation:
  """Held-out loss of the published model on copies of it, beside the work and in no one's way."""

  def __init__(self, assembled: assembly.Assembly, theta: Theta, records: records_lib.Recorder):
    self._config = assembled.config
    self._theta = theta
    self._records = records
    self._error: BaseException | None = None
    self._queue: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
    self._thread = threading.Thread(target=self._guarded, name='evaluation', daemon=True)
    self._thread.start()

  def submit(self, step: int) -> None:
    """Evaluates the model as it is now (called on the thread that changes it)."""
    self._queue.put((step, self._theta.params()))

  def stop(self) -> None:
    """Waits for what was submitted; raises what went wrong."""
    self._queue.put(None)
    self._thread.join()
    if self._error is not None:
      raise self._error

  def _guarded(self) -> None:
    try:
      self._run()
    except BaseException as error:  # training goes on without a held-out loss; the end tells it
      self._error = error
      self._records.say(f'evaluation stopped: {error!r}')

  def _run(self) -> None:
    config = self._config
    mesh = mesh_lib.make_mesh(train_config.MeshConfig(), jax.local_devices()[:1])
    shardings = mesh_lib.tree_shardings(mesh, self._theta.shapes)
    eval_step = evaluate.make_eval_step(config.model, mesh, shardings)
    corpus = data.load_corpus(config.data.corpus)
    batches = [mesh_lib.put_batch(mesh, batch) for batch in data.eval_batches(corpus, config.data)]
    while (task := self._queue.get()) is not None:
      step, params = task
      loss = evaluate.evaluate(eval_step, jax.device_put(params, shardings), batches)
      self._records.report('eval', {'step': step, 'loss': loss, 'which': 'global'})
      self._records.scalars(step, {'evaluation/loss': loss})


class SyncerWork:
  """The Work port of the syncer (node.ports.Work)."""

  def __init__(
    self,
    assembled: assembly.Assembly,
    theta: Theta,
    post: ports.Post,
    payloads: ports.Payloads,
    records: records_lib.Recorder,
    checkpoints: checkpoint.Checkpoints,
    evaluation: Evaluation,
  ):
    self._assembled = assembled
    self._theta = theta
    self._post = post
    self._payloads = payloads
    self._records = records
    self._checkpoints = checkpoints
    self._evaluation = evaluation
    self._evaluated = 0
    self._queue: queue.SimpleQueue[actions.Work | None] = queue.SimpleQueue()
    self._thread = threading.Thread(target=self._run, name='work', daemon=True)
    self.error: BaseException | None = None

  def start(self) -> None:
    """Compiles the outer steps, so that no sync waits for a compiler (nor teaches the grace window
    a time that no later sync needs), then takes work."""
    for p in range(self._assembled.layout.num_fragments):
      self._theta.warm_up(p, self.width(1))
    self._thread.start()

  def submit(self, action: actions.Work) -> None:
    self._queue.put(action)

  def stop(self) -> None:
    """Ends the thread after what was submitted before."""
    self._queue.put(None)
    self._thread.join()

  def _run(self) -> None:
    try:
      while (action := self._queue.get()) is not None:
        self._perform(action)
    except BaseException as error:  # the main thread must learn of it: without work nothing merges
      self.error = error
      self._post(events.Stop(reason=f'the work thread failed: {error!r}'))

  def _perform(self, action: actions.Work) -> None:
    match action:
      case actions.Merge():
        self._merge(action)
      case actions.ReadFragment(fragment=fragment):
        self._read(fragment)
      case actions.Save(step=step, snapshot=snapshot):
        self._save(step, snapshot)
      case _:
        raise TypeError(f'not the work of a syncer: {action}')

  def _merge(self, merge: actions.Merge) -> None:
    """Stacks the payloads, padded with absent learners to a fixed width: it compiles once."""
    p, participants = merge.fragment, merge.participants
    width = self.width(len(participants))
    payloads_MxB = np.zeros((width, self._assembled.payload_bytes[p]), np.uint8)
    tokens_M, steps_M = np.zeros(width, np.int32), np.zeros(width, np.int32)
    for m, participant in enumerate(participants):
      payloads_MxB[m] = np.frombuffer(self._payloads.get(participant.handle), np.uint8)
      tokens_M[m], steps_M[m] = participant.tokens, participant.steps
      self._payloads.drop(participant.handle)
    result = self._theta.outer_step(p, payloads_MxB, tokens_M, steps_M)
    digest = assembly.as_int(result.digest)
    if not bool(result.ok):
      self._post(events.MergeDone(
        sync=merge.sync, fragment=p, handle=None, payload=None, digest=digest,
        failed='the merged update is not finite; the fragment is unchanged',
      ))
      return
    self._theta.versions[p] = merge.version
    data = assembly.host_bytes(result.delta_bytes)
    self._post(events.MergeDone(
      sync=merge.sync, fragment=p, handle=self._payloads.put(data),
      payload=assembly.announce(data), digest=digest,
    ))
    self._records.report('outer', {
      'sync': merge.sync, 'fragment': p, 'version': merge.version, 'norm': float(result.norm),
    })
    every = self._assembled.config.train.eval_every
    if every and merge.sync // every > self._evaluated // every:
      self._evaluated = merge.sync
      self._evaluation.submit(merge.sync)

  def width(self, participants: int) -> int:
    """M, or the next power of two once more have joined."""
    expected = self._assembled.config.sync.learners
    return expected if participants <= expected else 1 << (participants - 1).bit_length()

  def _read(self, p: int) -> None:
    data = memoryview(np.asarray(self._theta.published[p])).cast('B')
    self._post(events.FragmentRead(
      fragment=p, version=self._theta.versions[p], handle=self._payloads.put(bytes(data)),
      payload=assembly.announce(data), digest=self._theta.digest(p),
    ))

  def _save(self, step: int, snapshot: dict) -> None:
    try:
      self._checkpoints.save(step, self._theta.arrays(), 0, (), snapshot)
      self._checkpoints.wait()
    except checkpoint.CheckpointError as error:
      self._post(events.SaveDone(step=step, error=str(error)))
    else:
      self._post(events.SaveDone(step=step))
