"""The start and the end of each process that is a node: jax, the folder, signals, the exit code."""

import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from diloco_jax.process import accelerators, exits, run_folder
from diloco_jax.protocol import actions
from diloco_jax.report import records as records_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, states
from diloco_jax.storage import store as store_lib
from diloco_jax.transport import grpc_session


class OwnStack(contextlib.ExitStack):
  """An ExitStack of this process alone: one that was forked has neither its threads nor its
  connections, and would wait for them for ever."""

  def __init__(self):
    super().__init__()
    self._process = os.getpid()

  @property
  def is_here(self) -> bool:
    return os.getpid() == self._process

  def __exit__(self, *raised: object) -> bool:
    if not self.is_here:  # nor may its generators end, as they would when nothing holds them
      ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pop_all()))
    return bool(super().__exit__(*raised))


def prepare_jax(devices: int, ahead: bool = False) -> None:
  """Emulates as many devices as the mesh needs. A CPU device computes at the dispatch of a program,
  but with `ahead` after it: programs with collectives have aborted when the host ran ahead of the
  emulated devices. Raises NeverRetry: jax finds no device, or does not compile."""
  if jax.config.jax_disable_jit:
    raise exits.NeverRetry(accelerators.NO_JIT)
  # A config of the user's may have imported jax before the variable was set.
  count = int(os.environ.get('JAX_NUM_CPU_DEVICES', devices))
  with contextlib.suppress(RuntimeError):  # in a notebook jax may have its devices already
    jax.config.update('jax_num_cpu_devices', count)
  jax.config.update('jax_cpu_enable_async_dispatch', ahead)
  keep_compiled()
  try:
    jax.local_devices()
  except Exception as error:  # of several types, also an AssertionError without a text
    raise exits.NeverRetry(accelerators.no_device(error)) from error


def keep_compiled() -> None:
  """Keeps compiled functions on disk for the next process, unless the user has chosen a folder."""
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update('jax_compilation_cache_dir', str(folders.compiled()))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
    compilation_cache.reset_cache()  # else, after a first compilation, it stays off


def open_folder(workdir: str, name: str) -> tuple[pathlib.Path, records_lib.Recorder]:
  """The folder of the run, claimed, and the recorder of the process `name` in it."""
  folder = pathlib.Path(workdir).absolute()
  try:
    run_folder.make_private(folder)
    return folder, records_lib.Recorder(folder, name)
  except ValueError as error:
    raise exits.NeverRetry(exits.one_line(error)) from error
  except OSError as error:
    raise exits.refusal(error)(
      f'cannot write to --workdir={workdir}: {error.strerror}. Nothing was started. Make space, or '
      'choose a folder that this user may write to.'
    ) from error


@contextlib.contextmanager
def errors_as_exits() -> Iterator[None]:
  """Ends the process with one line: exit code 74 if a checkpoint or the store fails, 42 after a
  ValueError or DirectoryError."""
  try:
    with exits.never_retry(ValueError, files_lib.DirectoryError):
      yield
  except (states.StateError, store_lib.StoreError) as error:
    raise exits.DiskFailed(exits.one_line(error)) from error


@contextlib.contextmanager
def ending_on_signals(
  stop: Callable[[str], None], drain_s: float, safe: str, code: int = exits.NOT_IN_TIME
) -> Iterator[None]:
  """SIGTERM, Ctrl-C and a closed terminal end the process in order; a second signal, half a second
  later, at once.

  Args:
    stop: asks the process to end; called with the reason, in the main thread, between any two
      instructions.
    drain_s: the time that an orderly end may take. After it the process exits with `code`.
    safe: the sentence about the state that is safe in that case.
  """
  requests = exits.EndRequests()
  timers: list[threading.Timer] = []

  def exit_late(name: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
      print(
        f'error: the process has not ended within {drain_s:g} s of {name} and exits now. {safe}',
        file=sys.stderr,
        flush=True,
      )
    os._exit(code)

  def handle(number: int, frame: object) -> None:
    del frame
    if not requests.add():
      return
    if requests.count > 1:
      os._exit(128 + number)
    name = signal.Signals(number).name
    timers.append(grpc_session.start_timer(drain_s, exit_late, name))
    stop('preempted' if number == signal.SIGTERM else f'stopped by {name}')

  before = {number: signal.signal(number, handle) for number in exits.end_signals()}
  try:
    yield
  finally:
    for timer in timers:
      timer.cancel()
    for number, handler in before.items():
      signal.signal(number, handler)


def finish(result: actions.Exit, records: records_lib.Recorder) -> int:
  """Prints and records how the node has ended; returns the exit code, or raises the refusal."""
  with recording_end(records):
    for refusal in (exits.NeverRetry, exits.NotInTime):
      if result.code == refusal.code:
        raise refusal(result.text)
    records.say(result.text)
    if isinstance(records, records_lib.Recorder):
      records.ended(result.code)
  records.close()
  return result.code


@contextlib.contextmanager
def recording_end(records: records_lib.Recorder) -> Iterator[None]:
  """Records that an error ends the process: there may be no supervisor that does."""
  try:
    yield
  except BaseException as error:
    if isinstance(records, records_lib.Recorder):
      # Of several hosts an unknown error ends all with 75 (learner.py `crashing_at_once`).
      unknown = exits.NOT_IN_TIME if jax.distributed.is_initialized() else 1
      records.ended(getattr(error, 'code', None) or unknown)
    records.close()
    raise
