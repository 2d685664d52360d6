"""How this package uses Orbax: what it keeps, how it writes, and what it must not print."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

# Orbax numbers the operations of a process globally. When operations of several nodes overlapped in
# one process, saves finalised each other's folders half written, and a save beside a load waited
# for ever.
ONE_OPERATION = threading.Semaphore(1)


def __getattr__(name: str) -> Any:
  """`ocp` is Orbax, imported when it is first used: that takes as long as all other imports of a
  learner after that of jax."""
  if name != 'ocp':
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from orbax.checkpoint import v1

  _hide_errors_of_saves()
  return globals().setdefault(name, v1)


def kept_numbers(numbers: Sequence[int], newest: int, every: int) -> list[int]:
  """Which checkpoints are kept: the newest ones and the first of every so many numbers.

  Of Orbax's policies EveryNStepsClosest is near to this, but takes the last one *before* a multiple
  if that is closer: then the other nodes' are an interval older.

  >>> kept_numbers([3, 9, 10, 14, 21, 25, 26], newest=2, every=10)
  [3, 10, 21, 25, 26]
  """
  first = {number // every: number for number in reversed(numbers)} if every else {}
  return sorted({*first.values(), *numbers[-newest:]})


@contextlib.contextmanager
def run_operation(alone: bool = False) -> Iterator[None]:
  """Around one operation of Orbax, for which it waits. `alone`: the other hosts of the learner do
  not take part."""
  with ONE_OPERATION, context(alone):
    yield


def checkpointer(root: Any, prefix: str | None) -> Any:
  """Orbax's own saver to <root>/<prefix>_<number>. It removes nothing: it would remove old saves
  before the new one is durable, and a failure of that would count as one of the save. A save by
  `ocp.save_async` would wait for an answer of the bucket."""
  from orbax import checkpoint
  from orbax.checkpoint import v1 as ocp

  return ocp.training.Checkpointer(
    root,
    context=context(),
    preservation_policy=ocp.training.preservation_policies.PreserveAll(),
    step_name_format=checkpoint.path.step.standard_name_format(step_prefix=prefix),
  )


def context(alone: bool = False) -> Any:
  """An Orbax context, as of `run_operation`.

  One replica of each leaf writes it: Orbax's default, which splits a leaf among its replicas, took
  more than half of the time that `save` blocks a small island. Nor does a save look first whether
  its number is taken: in a bucket a step would wait for the answer.
  """
  from orbax.checkpoint import v1 as ocp

  context = ocp.Context()
  context.array.saving.use_replica_parallel = False
  context.file.skip_sync_file_validations = True
  if alone:
    me = jax.process_index()
    context.multiprocessing.primary_host, context.multiprocessing.active_processes = me, {me}
  return context


def _hide_errors_of_saves() -> None:
  """Hides what Orbax and TensorStore print of a save that fails, on a full disk thousands of lines:
  they raise the error in the thread that waits for the save."""
  # Orbax logs the error in each of its threads, with a traceback; gcsfs and fsspec do so, too.
  is_of_orbax = lambda record: record.exc_info and '/orbax/checkpoint/' in record.pathname
  logging.getLogger('absl').addFilter(lambda record: not is_of_orbax(record))
  for name in ('gcsfs', 'fsspec'):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  before = sys.unraisablehook

  def hook(unraisable: Any) -> None:
    # After a failed write Orbax closes its event loop; then threads of TensorStore end the others.
    if unraisable.object is not None or str(unraisable.exc_value) != 'Event loop is closed':
      before(unraisable)

  sys.unraisablehook = hook
