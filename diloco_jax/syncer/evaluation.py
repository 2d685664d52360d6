"""Held-out loss of the global model, evaluated on its own thread."""

import queue
import threading
from typing import Any

import jax

from diloco_jax.report import facts
from diloco_jax.report import records as records_lib
from diloco_jax.syncer import global_model as global_model_lib
from diloco_jax.train import config as train_config
from diloco_jax.train import evaluate
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import task as task_lib


class Evaluation:
  """Evaluates copies of the published model, so that merges neither wait for it nor change it."""

  def __init__(
    self, task: task_lib.Task | None, theta: global_model_lib.Theta, records: records_lib.Recorder
  ):
    """Without a task nothing is evaluated: the data is the user's own."""
    self._task = task
    self._theta = theta
    self._records = records
    self._error: BaseException | None = None
    self._queue: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
    self._thread = threading.Thread(target=self._guarded, name='evaluation', daemon=True)
    self._thread.start()

  def submit(self, step: int) -> None:
    """Queues an evaluation of the present model. Call it on the thread that changes the model."""
    if self._task is not None:
      self._queue.put((step, self._theta.params()))

  def stop(self) -> None:
    """Waits for all submitted evaluations; raises their first error."""
    self._queue.put(None)
    self._thread.join()
    if self._error is not None:
      raise self._error

  def _guarded(self) -> None:
    try:
      self._run()
    except BaseException as error:  # the run continues without evaluations; `stop` raises the error
      self._error = error
      self._records.say(f'evaluation stopped: {error!r}')

  def _run(self) -> None:
    if self._task is None:
      return
    mesh = mesh_lib.make_mesh(train_config.MeshConfig(), jax.local_devices()[:1])
    shardings = mesh_lib.tree_shardings(mesh, self._theta.shapes, self._task.partition)
    eval_step = evaluate.make_eval_step(self._task, mesh, shardings)
    batches = [mesh_lib.put_batch(mesh, batch) for batch in self._task.eval_batches()]
    while (asked := self._queue.get()) is not None:
      step, params = asked
      if not batches:
        continue
      loss = evaluate.evaluate(eval_step, jax.device_put(params, shardings), batches)
      self._records.report(facts.Eval(step=step, loss=loss))
      self._records.scalars(step, {'evaluation/loss': loss})
