"""Held-out loss of the global model, evaluated on its own thread."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.syncer import global_model
from diloco_jax.train import evaluate
from diloco_jax.train import task as task_lib

Measure = Callable[[Any], Mapping[str, Any]]
"""Figures by name of a model: its held-out `loss`, and others."""

DROP_S = 1.0  # how long `stop` waits for the batch that is being evaluated


class Evaluation:
  """Evaluates copies of the published model, so that merges neither wait for it nor change it. At
  most one copy waits: a newer one replaces it."""

  def __init__(
    self,
    task: task_lib.Task | None,
    theta: global_model.Theta,
    records: records_lib.Recorder,
    total_steps: int,
    measure: Measure | None = None,
  ):
    """`total_steps`: T, the clock of the last model, though its syncs have later numbers.
    `measure`: of a program of the user's own, instead of a task. Without both nothing is evaluated:
    only the user has the data, or the learners evaluate, since only they have the whole model."""
    self._task, self._measure = task, measure
    self._theta = theta
    self._records = records
    self._total_steps = total_steps
    self._well = True
    self._changed = threading.Condition()
    self._waiting: tuple[int, Any] | None = None  # the model of a step
    self._busy = self._stopped = False
    self._thread = threading.Thread(target=self._guarded, name='evaluation', daemon=True)
    self._thread.start()

  def submit(self, sync: int) -> None:
    """Asks for an evaluation of the present model, of this sync. Call it on the thread that changes
    the model."""
    if (self._task or self._measure) and self._well:
      with self._changed:
        self._waiting = min(sync, self._total_steps), self._theta.params()
        self._changed.notify_all()

  def wait(self, timeout_s: float) -> bool:
    """Waits for the submitted evaluations; returns whether they are done."""
    with self._changed:
      return self._changed.wait_for(lambda: self._waiting is None and not self._busy, timeout_s)

  def stop(self) -> None:
    """Drops what is not done."""
    with self._changed:
      self._stopped = True
      self._changed.notify_all()
    self._thread.join(DROP_S)

  def _guarded(self) -> None:
    try:
      self._run()
    except BaseException as error:
      self._well = False
      self._records.say(f'{error!r}: the run continues without held-out losses')
    with self._changed:
      self._waiting, self._busy = None, False
      self._changed.notify_all()

  def _run(self) -> None:
    if self._measure is not None:
      while (waiting := self._next()) is not None:
        self._records.measured(waiting[0], self._measure(waiting[1]))
    if self._task is None:
      return
    waiting = self._next()  # before it prepares: the first evaluation is of the first model
    (device,) = self._theta.sharding.device_set
    held_out = evaluate.HeldOut(self._task, self._theta.shapes, device)
    while waiting is not None:
      step, params = waiting
      if held_out.batches:
        losses = held_out.evaluate(params, lambda: self._stopped)
        if losses is None:
          return
        loss, bits = losses
        self._records.evaluated(report_facts.Eval(step=step, loss=loss, bits_per_byte=bits))
      waiting = self._next()

  def _next(self) -> tuple[int, Any] | None:
    """The model to evaluate next; None: there is none any more."""
    with self._changed:
      self._busy = False
      self._changed.notify_all()
      self._changed.wait_for(lambda: self._waiting is not None or self._stopped)
      if self._stopped:
        return None
      waiting, self._waiting = self._waiting, None
      self._busy = True
      return waiting
