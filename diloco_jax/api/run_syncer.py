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
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.api import peer
from diloco_jax.config import run_config
from diloco_jax.launch import cli, nodes, own_model, run_folder
from diloco_jax.node import loop, threads
from diloco_jax.protocol import actions, events
from diloco_jax.report import records as records_lib
from diloco_jax.storage import arrays
from diloco_jax.syncer import global_model as global_model_lib
from diloco_jax.syncer import process as syncer_process
from diloco_jax.transport import addresses, grpc_server


class Server:
  """A running syncer. Made by `run_syncer`.

  Attributes:
    address: for `diloco_jax.join`.
  """

  def __init__(self):
    self.address = ''
    self._listens = threading.Event()
    self._stopped = threading.Event()
    self._event_queue = loop.EventQueue()
    self._theta: global_model_lib.Theta  # of a run that is not refused
    self._result: actions.Exit | BaseException | None = None
    self._thread: threads.Thread  # set by run_syncer

  def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
    """Waits for the end of the run; returns the global model, name -> array of the loop's type.

    Raises:
      TimeoutError: the run has not ended within `timeout_s`; it continues.
    """
    self._thread.join(timeout_s)
    if self._thread.is_alive():
      raise TimeoutError(f'the run has not ended within {timeout_s:g} s')
    self._require_well()
    return self._theta.params()

  def _stop(self) -> None:
    self._stopped.set()
    self._event_queue.post(events.Stop(reason='the program ended'))
    self._thread.join()

  def _require_well(self) -> None:
    """Raises the error of the syncer, if it has failed."""
    if isinstance(self._result, BaseException):
      raise self._result

  def _found(self, address: str) -> None:
    self.address = address
    self._listens.set()

  def _run(
    self,
    model: own_model.Model | None,
    workdir: pathlib.Path,
    address: str,
    access: addresses.Access,
    config: run_config.Config,
    records: records_lib.Recorder,
  ) -> None:
    given = model  # to be written
    try:
      if model is None:
        model = own_model.obtain(
          workdir, config, address, access, self._found, self._stopped, records.say
        )
      elif known := own_model.read(workdir):  # a run that continues keeps its version 0
        model, given = known, None
      assembled = own_model.complete(model, config)

      def listen(post, payloads):
        transport = grpc_server.GrpcSyncerTransport(
          self.address or address,
          post,
          payloads,
          nodes.limits(assembled),
          records.say,
          access=access,
          about=assembled.about,
        )
        try:  # the log is locked and the address bound: no other syncer has this folder
          if given is not None:
            own_model.write(workdir, given, config)
          run_folder.write_config(workdir, config)
        except BaseException:
          transport.shutdown(0.0)  # no learner may wait for a syncer that will not start
          raise
        self._found(transport.address)
        return transport

      self._theta = global_model_lib.Theta(assembled)
      self._result = syncer_process.run(
        assembled, self._theta, workdir, self._event_queue, listen, records
      )
    except BaseException as error:  # `wait` and the end of the `with` raise it
      self._result = error
    finally:
      records.ended(int(isinstance(self._result, BaseException)))
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
) -> Iterator[Server]:
  """Runs a syncer for the time of the `with`, for learners that `diloco_jax.join`.

  Args:
    init: version 0: a tree of arrays, a function that returns one, or the path of one that Orbax
      wrote. None: the first learner brings it.
    total_steps, sync, label, shards: as for `join`.
    listen: 'HOST:PORT' to listen on, with `tls`; '': a Unix socket of this user alone.
    tls: the folder with the syncer's certificate (`diloco certs`).
    plaintext_loopback: plain TCP on a loopback address, for debugging.
    workdir: a folder for log, checkpoints and tape, from which the same call continues the run,
      with the model that it has; None: a temporary one.

  Raises:
    ValueError: settings or arrays cannot work.
    OSError: the address is in use.
    Any error that ended the syncer, at the end of the `with`.
  """
  server = Server()
  access = cli.make_access(tls, plaintext_loopback)
  config = own_model.config(total_steps, sync, shards)
  config.validate()
  nodes.keep_compiled()
  model = None
  if init is not None:
    tree = init() if callable(init) else init
    tree = arrays.load(pathlib.Path(tree)) if isinstance(tree, str | pathlib.Path) else tree
    model = own_model.describe(own_model.as_arrays(tree, 'init'), label)
  with contextlib.ExitStack() as cleanup:
    folder = peer.folder(workdir, cleanup)
    records = cleanup.enter_context(
      contextlib.closing(records_lib.Recorder(folder, 'syncer', prefix='[syncer] '))
    )
    server._thread = threads.Thread(
      target=server._run,
      args=(model, folder, listen or addresses.in_folder(folder), access, config, records),
      name='syncer',
    )
    cleanup.callback(server._stop)
    server._thread.start()
    server._listens.wait()
    server._require_well()
    yield server
    server._stop()
    if not isinstance(server._result, InterruptedError):  # no learner has come: that is no error
      server._require_well()
