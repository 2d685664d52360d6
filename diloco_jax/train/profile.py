"""A trace of some inner steps, which `xprof --logdir=FOLDER` and TensorBoard open."""

import logging
import pathlib

import jax

_LOG = logging.getLogger(__name__)


class Profile:
  """Traces the steps of one process, counted from 0; what is dispatched between them is in it, too.

  Args:
    folder: a new folder in it gets the trace.
    steps: those to trace; none if empty.
  """

  def __init__(self, folder: pathlib.Path, steps: range):
    self._folder, self._steps = folder, steps
    self._running = False

  def begins(self, step: int) -> None:
    """The next step to be dispatched is `step`."""
    if step == self._steps.start and self._steps:
      try:
        jax.profiler.start_trace(self._folder)
        self._running = True
      # Another island of this process is traced; or Pathways, which writes to buckets alone.
      except (RuntimeError, ValueError) as error:
        _LOG.warning('the steps of %s are not traced: %s', self._folder, error)

  def ended(self, step: int) -> None:
    """`step` is complete, or (the last one) no step will follow."""
    if self._running and step + 1 >= self._steps.stop:
      self.close()

  def close(self) -> None:
    """Writes what was traced so far."""
    if self._running:
      self._running = False
      try:
        jax.profiler.stop_trace()
        _LOG.warning('a trace is in %s: xprof --logdir=%s', self._folder, self._folder)
      except (OSError, RuntimeError) as error:
        _LOG.warning('no trace could be written to %s: %s', self._folder, error)
