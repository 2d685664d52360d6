"""An island: one mesh, one inner optimizer, one data shard. It trains alone and knows no syncer.

Its interface is what the protocol needs: a caller may read and replace the state between two steps
(adopt), and switch to another shard (leases). The clock is an argument of every
step; the island does not keep it.

  island = Island(task=decoder.task(ModelConfig(), DataConfig()), optimizer=OptimizerConfig(),
                  mesh=MeshConfig(data=2), total_steps=1000)
  for clock in range(1000):
    print(island.step(clock).loss)

`step` is `dispatch` and `finish`. Between the two a caller may prepare and dispatch the next step,
so that the devices never wait for the host; all programs run in the order of their dispatch. One
thread dispatches, and it should be at most one step ahead: every step that waits holds a batch, and
collectives on emulated devices have aborted when the host ran far ahead.
"""

import collections
import contextlib
import copy
import logging
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.storage import checkpoint
from diloco_jax.storage import files as files_lib
from diloco_jax.train import config as train_config
from diloco_jax.train import evaluate, flops
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import optimizer as optimizer_lib
from diloco_jax.train import step as step_lib
from diloco_jax.train import task as task_lib

MAX_DAMAGED = 8  # batches in a row that cannot be read
MAX_WARNINGS = 20  # about damaged batches, in one process
_LOG = logging.getLogger(__name__)


class StepResult(NamedTuple):
  """The result of one inner step."""

  loss: float | None  # of the batch before the update; None: a user's loop has not passed one
  grad_norm: float | None  # before clipping; None: in a user's loop
  tokens: int  # predicted and trained on
  seconds: float  # wall, from its dispatch or the end of the step before, whichever is later
  data_s: float  # the part of `seconds` until the batch was on the device
  clock: int  # before it
  metrics: dict[str, float]  # what else the task or the loop has measured


class _Dispatched(NamedTuple):
  """A step that may still run."""

  clock: int
  begun_ns: int
  put_ns: int  # its batch was on the device
  metrics: dict[str, jax.Array]
  ended: futures.Future  # the metrics, and when they were there, in ns


class Island:
  """The training half of a learner.

  Args:
    task: the model and its data.
    optimizer, mesh: configurations, validated.
    total_steps: the clock at which the learning rate reaches its end.
    devices: exactly as many as the mesh has; default: all local ones.
    seed: of the initial parameters; the same for every learner of a run.
    shard: the shard to start on, of the task's data.
    checkpoint_dir: this island's own folder, locked until `close`; None = `save` and `restore` are
      refused.
    saves_to: where its checkpoints are instead, a folder or gs://BUCKET/PREFIX.
    store: of the run, in which that is.
    keep_every: of its checkpoints (storage/checkpoint.py).

  Raises:
    DirectoryError: another process has the folder of checkpoints. Two that save in one folder would
      remove each other's unfinished saves.
  """

  def __init__(
    self,
    *,
    task: task_lib.Task,
    optimizer: train_config.OptimizerConfig,
    mesh: train_config.MeshConfig,
    total_steps: int,
    devices: Sequence[jax.Device] | None = None,
    seed: int = 0,
    shard: int = 0,
    checkpoint_dir: str | None = None,
    saves_to: str | None = None,
    store: str = '',
    keep_every: int = 0,
  ):
    self._task = task
    self.read_from(shard)
    self._dispatched: collections.deque[_Dispatched] = collections.deque()
    self._watcher = futures.ThreadPoolExecutor(1)  # sees when a step ends, whatever others do then
    self._ended_ns = 0
    self.mesh = mesh_lib.make_mesh(mesh, devices)
    tx = optimizer_lib.make_optimizer(optimizer, task)
    self._rate = optimizer_lib.schedule(optimizer, total_steps)
    self._init = lambda: step_lib.init_state(task, tx, self.mesh, seed)
    self._state, self.shardings = self._init()
    self._train_step = step_lib.make_train_step(task, tx, self.mesh, self.shardings)
    self._eval_step = evaluate.make_eval_step(task, self.mesh, self.shardings.params)
    self._eval_batches = None
    self._damaged: set[tuple[int, int]] = set()  # batches with a warning
    self._folder = self._checkpoints = None
    if checkpoint_dir:
      self._folder = files_lib.Files(checkpoint_dir)
      try:
        if jax.process_index() == 0:  # for all hosts of the island
          self._folder.lock('learner')
        root = saves_to or checkpoint_dir
        self._checkpoints = checkpoint.Checkpoints(root, keep_every, store=store)
      except BaseException:
        self._folder.close()
        raise

  def twin(
    self, task: task_lib.Task | None = None, rate: Callable[[int], float] | None = None
  ) -> 'Island':
    """Another island with the same compiled functions and a copy of the state; it has no folder of
    checkpoints.

    Args:
      task: the same model with other data.
      rate: another schedule of the learning rate (optimizer.schedule).
    """
    other = copy.copy(self)
    other._state = jax.tree.map(jnp.copy, self._state)
    other._folder = other._checkpoints = None
    other._dispatched, other._watcher = collections.deque(), futures.ThreadPoolExecutor(1)
    other._rate = rate or self._rate
    if task is not None:
      other._task, other._eval_batches = task, None
    other.read_from(0)
    return other

  # Training.

  @property
  def tokens_per_step(self) -> int:
    return self._task.tokens_per_batch

  def warm_up(self) -> None:
    """Compiles the step without running it, and what a save computes. Optional, before the first
    step."""
    batch = jax.eval_shape(self._read)
    rate = jax.ShapeDtypeStruct((), np.float32)
    self._train_step = self._train_step.lower(self._state, batch, rate).compile()
    if self._checkpoints is not None:
      self._checkpoints.warm_up(self._state)

  def cost(self) -> flops.Cost:
    """What the steps of this island cost; the memory is that held until now."""
    devices, leaves = self.mesh.devices.size, jax.tree.leaves(self.params)
    kind = self.mesh.devices.flat[0].device_kind
    used, limit = flops.memory(self.mesh.local_devices)
    return flops.Cost(
      parameters=sum(leaf.size for leaf in leaves),
      tokens=self.tokens_per_step,
      devices=devices,
      kind=kind,
      flops=self._task.flops_per_token * self.tokens_per_step / devices,
      peak_flops=flops.peak(kind),
      memory_bytes=used,
      memory_limit_bytes=limit,
    )

  def step(self, clock: int) -> StepResult:
    """Trains on the next batch of the shard at the learning rate of `clock`; blocks until done.

    Raises:
      RuntimeError: a task's batches or arithmetic raised ValueError, which elsewhere means a wrong
        setting.
    """
    self.dispatch(clock)
    return self.finish()

  def dispatch(self, clock: int) -> futures.Future:
    """Starts the step; returns what is done once the step is. Raises RuntimeError, as `step`."""
    begun_ns = time.monotonic_ns()
    try:
      batch = mesh_lib.put_batch(self.mesh, self._read())
      put_ns = time.monotonic_ns()
      rate = mesh_lib.put(np.float32(self._rate(clock)), self.replicated)
      with jax.profiler.StepTraceAnnotation('inner step', step_num=clock):
        self._state, metrics = self._train_step(self._state, batch, rate)
    except ValueError as error:
      raise RuntimeError(f'the inner step at clock {clock} failed: {error}') from error
    self._next_index += 1
    if _are_ready(metrics):  # CPUs that compute at the dispatch
      ended = futures.Future()
      ended.set_result(_await(metrics))
    else:
      ended = self._watcher.submit(_await, metrics)
    self._dispatched.append(_Dispatched(clock, begun_ns, put_ns, metrics, ended))
    return ended

  def must_finish(self, ahead: int) -> bool:
    """Whether `finish` is due: a dispatched step is done, or there are more than `ahead` others."""
    steps = self._dispatched
    return len(steps) > ahead or bool(steps and steps[0].ended.done())

  def finish(self) -> StepResult:
    """Blocks until the oldest dispatched step is done."""
    clock, begun_ns, put_ns, _, ended = self._dispatched.popleft()
    metrics, ended_ns = ended.result()
    start_ns = max(begun_ns, self._ended_ns)
    if self._dispatched and _are_ready((after := self._dispatched[0]).metrics):
      after_ns = after.ended.result()[1]
      if after_ns < ended_ns:  # computed at its dispatch, and the watcher is late
        ended_ns = after.begun_ns
      elif 4 * (after_ns - ended_ns) < ended_ns - start_ns:  # it was late, and saw both at once
        ended_ns = (start_ns + after_ns) // 2
    self._ended_ns = ended_ns = max(ended_ns, start_ns + 1)
    return StepResult(
      metrics.pop('loss'),
      metrics.pop('grad_norm'),
      self.tokens_per_step,
      (ended_ns - start_ns) / 1e9,
      max(0, put_ns - start_ns) / 1e9,
      clock,
      metrics,
    )

  def _read(self) -> task_lib.Batch:
    """The next batch of the shard. For one that cannot be read, twice, one after it is read: else
    a damaged record would end each process of the learner at the same step. Raises the error if
    none of the next ones can be read: then it is no matter of a record."""
    try:
      return self._shard[self._next_index]
    except Exception as error:
      for ahead in range(1 + MAX_DAMAGED):  # first the same again: the disk may have failed once
        with contextlib.suppress(Exception):
          batch = self._shard[self._next_index + ahead]
          if ahead:
            self._warn_of_damage(error, ahead)
          return batch
      raise

  def _warn_of_damage(self, error: Exception, ahead: int) -> None:
    position = self._shard_index, self._next_index
    if position not in self._damaged and len(self._damaged) < MAX_WARNINGS:
      self._damaged.add(position)
      _LOG.warning(
        'batch %d of shard %d cannot be read (%s: %s): batch %d is trained on instead, once more; '
        'nothing else is lost. Mend or remove the record',
        self._next_index,
        self._shard_index,
        type(error).__name__,
        ' '.join(str(error).split())[:200],
        self._next_index + ahead,
      )

  def evaluate(self, params: Any = None) -> float | None:
    """Held-out loss of the island's parameters or of `params`; None: the task has no batches for
    it."""
    if self._eval_batches is None:  # most islands of a run never evaluate
      batches = self._task.eval_batches()
      self.bits_per_byte = evaluate.bits_per_byte(self._task, batches)
      self._eval_batches = [mesh_lib.put_batch(self.mesh, batch) for batch in batches]
    params = self.params if params is None else self._put_params(params)
    return evaluate.evaluate(self._eval_step, params, self._eval_batches)

  # State, between steps.

  @property
  def state(self) -> step_lib.TrainState:
    """Parameters and optimizer state on the mesh. The next step donates their buffers, also the
    buffers of assigned arrays: keep a copy, not a reference."""
    return self._state

  @state.setter
  def state(self, state: step_lib.TrainState) -> None:
    self._state = _put_tree(state, self._state, self.shardings)

  @property
  def params(self) -> Any:
    return self._state.params

  @params.setter
  def params(self, params: Any) -> None:
    """Replaces parameters and keeps the optimizer's moments (adopt)."""
    self._state = self._state._replace(params=self._put_params(params))

  def _put_params(self, params: Any) -> Any:
    return _put_tree(params, self._state.params, self.shardings.params)

  @property
  def moments(self) -> Any:
    """The inner optimizer's state: one or two averages per parameter, and their step counts."""
    return self._state.opt_state

  @moments.setter
  def moments(self, moments: Any) -> None:
    """Replaces the optimizer's state and keeps the parameters."""
    self._state = self._state._replace(
      opt_state=_put_tree(moments, self._state.opt_state, self.shardings.opt_state)
    )

  @property
  def replicated(self) -> jax.sharding.NamedSharding:
    """The sharding of an array that is whole on every device of this island."""
    return mesh_lib.replicated(self.mesh)

  # Data.

  @property
  def shard(self) -> int:
    return self._shard_index

  @property
  def data_state(self) -> int:
    """Index of the next batch of the shard."""
    return self._next_index

  @data_state.setter
  def data_state(self, next_index: int) -> None:
    if next_index < 0:
      raise ValueError(f'next index {next_index} is negative: a shard starts at 0')
    self._next_index = int(next_index)

  def read_from(self, shard: int, next_index: int = 0) -> None:
    """Switches to a shard, at its committed cursor."""
    self._shard = self._task.batches(shard)
    self._shard_index = shard
    self.data_state = next_index

  # Checkpoints.

  def save(self, clock: int, protocol: dict[str, Any] | None = None) -> Callable[[], int]:
    """Starts an asynchronous checkpoint of the island; returns a function that waits for it."""
    record = {'shard': self._shard_index, 'protocol': protocol or {}}
    return self._require_checkpoints().save(clock, self._state, self._next_index, record)

  def restore(self) -> checkpoint.Restored | None:
    """Loads the newest verified checkpoint; returns what else is in it, without the state, whose
    arrays would live on beside those that replace them. None, without a change: there is none."""
    checkpoints, restored = self._require_checkpoints(), None
    if not checkpoints.numbers:
      return None
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._state)
    self._state = None  # a device may not have room for both
    try:
      restored = checkpoints.restore(self.shardings, like)
    finally:
      self._state = self._init()[0] if restored is None else restored.state
    if restored is None:
      return None
    self.read_from(restored.protocol['shard'], restored.data_state)
    return restored._replace(state=None, protocol=restored.protocol['protocol'])

  def close(self) -> None:
    self._watcher.shutdown(wait=False)
    if self._checkpoints:
      try:
        self._checkpoints.close()
      finally:
        self._folder.close()

  def _require_checkpoints(self) -> checkpoint.Checkpoints:
    if self._checkpoints is None:
      raise ValueError('this island has no checkpoint folder: pass checkpoint_dir')
    return self._checkpoints


def _are_ready(metrics: dict[str, jax.Array]) -> bool:
  return all(value.is_ready() for value in metrics.values())


def _await(metrics: dict[str, jax.Array]) -> tuple[dict[str, float], int]:
  """The metrics of a step once it is done, and when that was."""
  jax.block_until_ready(metrics)
  ended_ns = time.monotonic_ns()
  return {name: float(value) for name, value in metrics.items()}, ended_ns


def _put_tree(tree: Any, like: Any, shardings: Any) -> Any:
  """Puts each leaf where the compiled step expects it; costs nothing for a leaf already there.

  Raises:
    ValueError: a leaf does not fit this island's model and optimizer.
  """
  if not _fits(tree, like):
    given, expected = _shapes(tree), _shapes(like)
    for path in sorted(given.keys() | expected.keys()):
      if given.get(path) != expected.get(path):
        raise ValueError(
          f'{path} is {given.get(path, "absent")}, this island has '
          f'{expected.get(path, "no such leaf")}: it must come from a learner with '
          'the same model and optimizer'
        )
  return jax.tree.map(_put, tree, shardings)


def _fits(tree: Any, like: Any) -> bool:
  """Whether two trees have the same structure, shapes and dtypes."""
  ours, structure = jax.tree.flatten(tree)
  theirs, expected = jax.tree.flatten(like)
  return structure == expected and all(
    (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(ours, theirs)
  )


def _put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  if not isinstance(leaf, jax.Array):
    return mesh_lib.put(leaf, sharding)
  is_in_place = leaf.committed and leaf.sharding == sharding
  return leaf if is_in_place else jax.device_put(leaf, sharding)


def _shapes(tree: Any) -> dict[str, tuple]:
  return {
    jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
