"""The syncer as a node on gRPC: of a process (`diloco syncer`), and of a program of the user's own
(api/run_syncer.py). Errors and exit codes are those of exits.py.

The model of a run without a task, whose learners are loops of the user's own, is in the run's
folder, or else is given, or else the first learner brings it (bring.py); then the folder keeps
it, and the store.
"""

import contextlib
import dataclasses
import os
import pathlib
import threading
from collections.abc import Callable

from diloco_jax.config import build, run_config
from diloco_jax.node import loop
from diloco_jax.process import bring, dial, exits, lifecycle, own_model, run_folder
from diloco_jax.protocol import actions, events, messages
from diloco_jax.report import records as records_lib
from diloco_jax.storage import arrays, json_files, states, wal
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.storage import store as store_lib
from diloco_jax.syncer import evaluation as evaluation_lib
from diloco_jax.syncer import followers as followers_lib
from diloco_jax.syncer import global_model, outer_step, stored
from diloco_jax.syncer import node as syncer_node
from diloco_jax.train import task as task_lib
from diloco_jax.transport import addresses, grpc_server
from diloco_jax.transport.processes import parent

_SAFE = (
  'The log holds every outer step that the syncer has acknowledged or published. Start the syncer '
  'again: it continues from the log, and learners send unmerged contributions again. If its disk '
  'is full, make space first.'
)
_ANSWER_S = 1.0
_PASSING = wal.WalBroken, wal.WalFull, claim_lib.Denied  # another start, or syncer, continues


@dataclasses.dataclass(kw_only=True)
class Syncer:
  """A syncer in this process.

  Attributes:
    folder: of the run.
    address: where to listen (transport/addresses.py), and then where it listens.
    processes: that serve its sessions (transport/processes/); 0: this one does so itself.
    listening: called with the address, also before there is a model.
    measure: of the published model (syncer/evaluation.py), where there is no task.
  """

  config: run_config.Config
  folder: pathlib.Path
  records: records_lib.Recorder
  address: str
  access: addresses.Access
  processes: int = 0
  listening: Callable[[str], object] = lambda address: None
  measure: evaluation_lib.Measure | None = None
  stopped: threading.Event = dataclasses.field(default_factory=threading.Event)
  event_queue: loop.EventQueue = dataclasses.field(default_factory=loop.EventQueue)
  theta: global_model.Theta = dataclasses.field(init=False)

  def stop(self, reason: str) -> None:
    """Asks it to end in order, at any moment."""
    self.stopped.set()
    self.event_queue.post(events.Stop(reason=reason))

  def run_loops(self, make: Callable[[], own_model.ModelDescription] | None = None) -> actions.Exit:
    """Runs the syncer of loops of the user's own to its end. `make`: the model of a run that has
    none. Raises ValueError, OSError, StateError, and as `run`."""
    with contextlib.ExitStack() as cleanup:
      store = cleanup.enter_context(stored.open_store(self.config, self.folder, self.records.say))
      door = None
      with exits.never_retry(ValueError, OSError, states.StateError):
        addresses.check(self.address, self.access)
        build.require_own(self.config)
        if self.processes:
          parent.require_port(self.address)
        if make and own_model.read(self.folder) is None:
          own_model.write(self.folder, make(), self.config)
        if own_model.read(self.folder) is None:
          own_model.require_no_run(self.folder)
          door = self._receive(cleanup)
        if not self.stopped.is_set():  # else there may be no model
          # The values are read from the folder when they are asked for, not held for the whole run.
          assembled = own_model.complete(own_model.read(self.folder), self.config)
          self.theta = global_model.Theta(assembled)
      if self.stopped.is_set():  # while the model was awaited, read, written or built
        return actions.Exit(code=0, text='stopped before the run began')
      return self.run(assembled, store, door)

  def _receive(self, cleanup: contextlib.ExitStack) -> grpc_server.Door:
    """Waits until the first learner has brought the model, or the syncer is stopped."""
    keep = lambda model: own_model.write(self.folder, model, self.config)
    brought = bring.Brought(keep, own_model.Terms.of(self.config).encode())
    door = self._listen(brought)
    cleanup.callback(door.close)
    self.records.say(
      f'the syncer waits on {door.address} for the first learner, which brings the model'
    )
    self._announce(door.address)
    brought.wait(self.stopped)
    return door

  def _listen(self, *brought: bring.Brought) -> grpc_server.Door:
    seats = sum(dial.seats(self.config.sync).values()) + followers_lib.SEATS
    return grpc_server.Door(self.address, seats, self.records.say, *brought, access=self.access)

  def _announce(self, address: str) -> None:
    self.address = address
    self._write_address(address)
    self.listening(address)

  def run(
    self,
    assembled: build.Assembly,
    store: stored.Stored | None = None,
    door: grpc_server.Door | None = None,
  ) -> actions.Exit:
    """Runs a syncer whose model is known, with `theta`. Raises as syncer/node.py, and
    NeverRetry: it cannot listen. `door`: through which the model has come."""
    records_lib.report_startup(self.records, 'assembled')
    rate = 0 if self.processes else self.config.sync.follow_bytes_per_s
    followed = followers_lib.Followers(rate, assembled.layout) if rate else None

    def listen(post, payloads):
      with exits.never_retry(ValueError, OSError):
        ports = post, payloads, dial.limits(assembled)
        terms = own_model.Terms(assembled.agreement)
        if assembled.about:
          terms = own_model.Terms.decode(assembled.about)
        about = terms._replace(run=lineage_lib.begin(self.folder).run).encode()
        if self.processes:
          if door:  # the learner may not have its answer yet
            door.close(_ANSWER_S)
          where = self.processes, self.address, *ports, self.records.say
          transport = parent.ProcessesTransport(*where, access=self.access, about=about)
        else:
          transport = grpc_server.GrpcSyncerTransport(
            door or self._listen(), *ports, about=about, followers=followed
          )
        try:
          run_folder.write_config(self.folder, self.config)
          self._announce(transport.address)
        except BaseException:
          transport.shutdown(0.0)  # no learner may wait for a syncer that will not start
          raise
      self.records.say(f'the syncer listens on {transport.address}')
      return transport

    def finished() -> None:
      with contextlib.suppress(OSError):  # of a full disk: learners wait for no more than an hour
        self._write_address(addresses.ended(self.config.train.steps))
      with contextlib.suppress(store_lib.StoreError):
        if store:
          store.record_end()

    def last_word(error: BaseException | None) -> str:
      final = isinstance(error, wal.WalError | ValueError) and not isinstance(error, _PASSING)
      if not final or exits.refusal(error) is not exits.NeverRetry:
        return ''
      word = f'{messages.GONE}: {exits.one_line(error)}'
      with contextlib.suppress(OSError):
        self._write_address(word)  # it is ours: a learner that dials again reads it
      return word

    return syncer_node.run(
      assembled,
      self.theta,
      self.folder,
      self.event_queue,
      listen,
      self.records,
      finished,
      store,
      self.measure,
      followed,
      last_word,
    )

  def _write_address(self, address: str) -> None:
    """Writes the address file atomically, so that no learner reads half of it."""
    json_files.replace(self.folder / run_folder.ADDRESS, os.fsencode(address) + b'\n')


def main(
  config: run_config.Config,
  workdir: str,
  listen: str,
  access: addresses.Access,
  init: str = '',
  processes: int = 0,
) -> int:
  """Runs the syncer process and returns its exit code.

  Args:
    config: of the run.
    workdir: its folder.
    listen: where to; '': the Unix socket of the run.
    access: how it proves its name.
    init: of loops of the user's own, the model: a tree of arrays that Orbax wrote; '': the first
      learner brings it.
    processes: see Syncer.
  """
  prepare()
  assembled = None
  if config.task != run_config.OWN_LOOP:
    with exits.never_retry(ValueError):
      build.require_own(config)
      assembled = build.assemble(config.of('syncer'))
  folder, records = lifecycle.open_folder(workdir, 'syncer')
  with exits.never_retry(OSError):
    address = listen or addresses.in_folder(folder)
  syncer = Syncer(
    config=config,
    folder=folder,
    records=records,
    address=address,
    access=access,
    processes=processes,
  )
  make_model = lambda: own_model.describe(arrays.load(pathlib.Path(init)), task_lib.embeddings)
  with (
    lifecycle.recording_end(records),
    lifecycle.ending_on_signals(syncer.stop, config.train.drain_s, _SAFE, exits.DISK_FAILED),
    exits.log_failures(),
    lifecycle.errors_as_exits(),
  ):
    if assembled is None:
      result = syncer.run_loops(make_model if init else None)
    else:
      syncer.theta = global_model.Theta(assembled)
      result = syncer.run(assembled)
  return lifecycle.finish(result, records)


def prepare() -> None:
  """As prepare_jax, for a process that is nothing but a syncer."""
  outer_step.share_cores()
  lifecycle.prepare_jax(1)
