"""A syncer inside a program of the user's own, for notebooks and tests.

    with diloco_jax.run_syncer(total_steps=1000) as server:
      ... loops that join server.address ...
      params = server.wait()

It listens on a Unix socket of this user, or where `listen` says, and runs on threads of this
process; its arrays are on the CPU.
"""

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from diloco_jax.config import run_config
from diloco_jax.node import threads
from diloco_jax.process import exits, lifecycle, own_model, run_folder
from diloco_jax.process import syncer as syncer_process
from diloco_jax.protocol import actions
from diloco_jax.report import records as records_lib
from diloco_jax.storage import arrays
from diloco_jax.transport import addresses


class Server:
  """A running syncer. Made by `run_syncer`.

  Attributes:
    address: for `diloco_jax.join`.
  """

  def __init__(
    self, syncer: syncer_process.Syncer, make: Callable[[], own_model.ModelDescription] | None
  ):
    self.address = ''
    self._syncer, self._make = syncer, make
    self._listens = threading.Event()
    self._result: actions.Exit | BaseException | None = None
    syncer.listening = self._found
    self._thread = threads.Thread(target=self._run, name='syncer')
    self._thread.start()
    self._listens.wait()

  def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
    """Waits for the end of the run; returns the global model, name -> array of the loop's type.

    Raises:
      TimeoutError: the run has not ended within `timeout_s`; it continues.
    """
    self._thread.join(timeout_s)
    if self._thread.is_alive():
      raise TimeoutError(f'the run has not ended within {timeout_s:g} s')
    self._require_well()
    with jax.set_mesh(None):  # that of the program has other devices
      return self._syncer.theta.params()

  def _stop(self) -> None:
    self._syncer.stop('the program ended')
    self._thread.join()

  def _require_well(self) -> None:
    """Raises the error of the syncer, if it has failed."""
    if isinstance(self._result, BaseException):
      raise self._result

  def _found(self, address: str) -> None:
    self.address = address
    self._listens.set()

  def _run(self) -> None:
    try:
      self._result = self._syncer.run_loops(self._make)
    except BaseException as error:  # `wait` and the end of the `with` raise it
      self._result = error
      if isinstance(error, exits.NeverRetry | exits.DiskFailed):  # ends of a process
        self._result = error.__cause__ or error
      # Learners of this program wait for a syncer meanwhile, and may fail first.
      self._syncer.records.say(f'the syncer has ended: {_describe(self._result)}')
    finally:
      self._syncer.records.ended(int(isinstance(self._result, BaseException)))
      self._listens.set()


@contextlib.contextmanager
def run_syncer(
  init: Any = None,
  *,
  total_steps: int,
  sync: run_config.SyncConfig | None = None,
  label: Callable[[str], str] | None = None,
  shards: int | None = 16,
  listen: str = '',
  tls: str | pathlib.Path | None = None,
  plaintext_loopback: bool = False,
  workdir: str | pathlib.Path | None = None,
  evaluate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> Iterator[Server]:
  """Runs a syncer for the time of the `with`, for learners that `diloco_jax.join`.

  Args:
    init: version 0: a tree of arrays, a function that returns one, or the path of one that Orbax
      wrote. None: the first learner brings it.
    total_steps, sync, label, shards: as for `join`. `sync` None: that of configs/own_loop.py;
      SyncConfig() has other learners, period, fragments, overlap, outer and checkpoint_every_syncs,
      so change a copy: `dataclasses.replace(own_loop.get_config().sync, codec_up='int4')`.
    listen: 'HOST:PORT' to listen on, with `tls`; '': a Unix socket of this user alone.
    tls: the folder with the syncer's certificate (`diloco certs`).
    plaintext_loopback: plain TCP on a loopback address, for debugging.
    workdir: a folder for log, checkpoints and tape, from which the same call continues the run,
      with the model that it has; None: a temporary one.
    evaluate: of the merged model, name -> array, returns numbers by name, for example {'loss': ...,
      'accuracy': ...} on held-out data. Called on a thread of its own at the first and last clock
      and every 60; they become lines, records and curves, and the loss that of the report.

  Raises:
    ValueError: settings or arrays cannot work.
    OSError: the address is in use.
    Any error that ended the syncer, at the end of the `with`.
  """
  config = own_model.config(total_steps, sync, shards)
  config.validate()
  lifecycle.keep_compiled()

  def make() -> own_model.ModelDescription:
    tree = init() if callable(init) else init
    tree = arrays.load(pathlib.Path(tree)) if isinstance(tree, str | pathlib.Path) else tree
    return own_model.describe(own_model.as_arrays(tree, 'init'), label)

  with lifecycle.OwnStack() as cleanup:
    folder = run_folder.or_temporary(workdir, cleanup)
    recorder = records_lib.Recorder(folder, 'syncer', prefix='[syncer] ')
    syncer = syncer_process.Syncer(
      config=config,
      folder=folder,
      records=cleanup.enter_context(contextlib.closing(recorder)),
      address=listen or addresses.in_folder(folder),
      access=addresses.access(tls, plaintext_loopback, 'syncer'),
      measure=evaluate,
    )
    server = Server(syncer, None if init is None else make)
    cleanup.callback(server._stop)
    server._require_well()
    try:
      yield server
    except BaseException as error:
      if cleanup.is_here:
        server._stop()
        if isinstance(server._result, BaseException):
          error.add_note(f'The syncer has ended before: {_describe(server._result)}')
      raise
    if cleanup.is_here:
      server._stop()
      server._require_well()


def _describe(error: BaseException) -> str:
  return f'{type(error).__name__}: {exits.one_line(error)}'
