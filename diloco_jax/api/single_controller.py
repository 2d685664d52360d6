"""Single-controller mode: one process drives the syncer and every island, as Pathways does.

Each island is a disjoint sub-mesh of `jax.devices()` (by slice where devices have one, by count on
CPU). Machines, work and jitted steps are those of separate processes; only the transport differs.
For tests, notebooks and `diloco train --controller=single`.
"""

import contextlib
import functools
import pathlib
import threading
from collections.abc import Callable
from typing import Literal

import jax
from absl import flags

from diloco_jax.api import importing
from diloco_jax.api import run as run_lib
from diloco_jax.config import build, load, run_config
from diloco_jax.launch import nodes, run_folder
from diloco_jax.learner import baseline
from diloco_jax.learner import process as learner_process
from diloco_jax.node import loop, threads
from diloco_jax.protocol import actions, events
from diloco_jax.report import records as records_lib
from diloco_jax.report import summary
from diloco_jax.syncer import global_model as global_model_lib
from diloco_jax.syncer import process as syncer_process
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.transport import in_process

_INTERRUPTED = (
  'interrupted: each learner ends its step, sends what it has and saves, then the syncer; the same '
  'call continues the run. A second interrupt does not wait.'
)
MakeRecorder = Callable[[str], records_lib.Recorder]


class SingleController:
  """A syncer and M learners as threads of this process.

  Args:
    config: a validated config.
    workdir: the folder of checkpoints; a run in it is continued.
    make_recorder: returns the recorder of a node, by its name ('syncer', 'l0', ...); by default it
      writes to `workdir`, and each printed line begins with the name.
    alone: one learner and no syncer, the baseline.

  Raises:
    ValueError: the devices do not make M meshes of the config's shape.
  """

  def __init__(
    self,
    config: run_config.Config,
    workdir: pathlib.Path,
    make_recorder: MakeRecorder | None = None,
    alone: bool = False,
  ):
    self._assembled = build.assemble(config.of('syncer'))
    self._config, self._workdir = config, workdir
    self._alone = alone
    self._stopping = threading.Event()
    kind = run_lib.CellRecorder if run_lib.in_kernel() else records_lib.Recorder
    self._make_recorder = make_recorder or (lambda name: kind(workdir, name, prefix=f'[{name}] '))
    self._hub = in_process.InProcessHub()
    names = run_config.learner_ids(1 if alone else config.sync.learners)
    needed = config.mesh.num_devices * len(names)
    devices = jax.devices()
    if len(devices) < needed:
      raise ValueError(
        f'{len(names)} learners with meshes of {config.mesh.num_devices} devices need {needed} '
        f'devices, there are {len(devices)}: set JAX_NUM_CPU_DEVICES={needed} before '
        'jax is first used (in a notebook: restart the kernel), or lower sync.learners'
      )
    self._islands = dict(zip(names, mesh_lib.islands(devices[:needed], len(names))))
    self._syncer_devices = devices[needed:] or devices[:1]
    self._event_queues = {name: loop.EventQueue() for name in ('syncer', *names)}
    self._exits: dict[str, actions.Exit | BaseException] = {}
    self._threads: list[threads.Thread] = []

  def start(self) -> None:
    """Starts each node on its own thread."""

    def run_syncer(recorder: records_lib.Recorder) -> actions.Exit:
      return syncer_process.run(
        self._assembled,
        global_model_lib.Theta(self._assembled, self._syncer_devices),
        self._workdir,
        self._event_queues['syncer'],
        self._hub.syncer_transport,
        recorder,
        self._over,
      )

    def run_learner(name: str, recorder: records_lib.Recorder) -> actions.Exit:
      config = self._config.of(name)
      assembled = self._assembled if config == self._config else build.assemble(config)
      island = learner_process.make_island(assembled, self._workdir, name, self._islands[name])
      if self._alone:
        return baseline.run(config, island, recorder, self._stopping.is_set)
      return learner_process.run(
        assembled,
        island,
        self._workdir,
        name,
        self._event_queues[name],
        self._hub.learner_transport,
        recorder,
        own_process=False,
      )

    if not self._alone:
      self._start('syncer', run_syncer)
    for name in self._islands:
      self._start(name, functools.partial(run_learner, name))

  def _start(self, name: str, run: Callable[[records_lib.Recorder], actions.Exit]) -> None:
    def guarded() -> None:
      try:
        with contextlib.ExitStack() as end:
          recorder = end.enter_context(contextlib.closing(self._make_recorder(name)))
          end.push(lambda error, *_: recorder.ended(int(error is not None)))
          self._exits[name] = run(recorder)
        if name == 'syncer':  # it may have been asked to stop
          self._over()
      except BaseException as error:  # `join` raises it in the caller's thread
        self._exits[name] = error
        self.stop(f'{name} failed')
      self._syncer_last()

    thread = threads.Thread(target=guarded, name=name)
    thread.start()
    self._threads.append(thread)

  def _over(self) -> None:
    """Ends the learners after the syncer. Of a run that had ended before, none hears a Finish."""
    for name in self._islands:
      self._event_queues[name].post(events.Stop(reason='the run is over'))

  def stop(self, reason: str) -> None:
    """Asks every learner to end at its next boundary, and then the syncer, which merges what they
    send last; safe to call from a signal handler."""
    self._stopping.set()
    for name in self._islands:
      self._event_queues[name].post(events.Stop(reason=reason))
    self._syncer_last()

  def _syncer_last(self) -> None:
    learners = {thread.name for thread in self._threads} - {'syncer'}
    if self._stopping.is_set() and learners <= self._exits.keys():
      self._event_queues['syncer'].post(events.Stop(reason='every learner has stopped'))

  def join(
    self, timeout_s: float | None = None, tick: Callable[[], None] | None = None
  ) -> dict[str, actions.Exit]:
    """Waits for every node, and calls `tick` every two seconds meanwhile; raises the error of a
    failed node, or TimeoutError."""
    for thread in self._threads:
      while tick and thread.is_alive():
        thread.join(run_lib.REDRAW_S)
        tick()
      thread.join(timeout_s)
      if thread.is_alive():
        raise TimeoutError(f'{thread.name} has not ended within {timeout_s} s')
    exits = {}
    for name, result in self._exits.items():
      if isinstance(result, BaseException):
        raise result
      exits[name] = result
    return exits


def run(
  config: run_config.Config | str,
  workdir: str | pathlib.Path,
  syncer: Literal['local', 'none'] = 'local',
) -> run_lib.Run:
  """Runs a whole experiment in this process, for notebooks: `diloco_jax.run`.

  A notebook shows the table of `diloco train` meanwhile.

  Args:
    config: of the run, or its name as for `diloco train --config`: 'stdlib_lm:tiny'.
    workdir: its folder; if it holds this run already, the run is continued.
    syncer: 'local', or 'none': one learner trains alone, the baseline.

  Returns:
    What the run has recorded, with the exit of each node.

  Raises:
    ValueError: a setting cannot work, the folder holds another run, or there are too few devices.
    DirectoryError: a syncer runs in the folder.
    KeyboardInterrupt: the cell was interrupted; every node has saved its state and ended, and the
      same call continues the run. A second interrupt does not wait for that.
  """
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # grain reads absl flags
  if syncer not in ('local', 'none'):
    raise ValueError(f"syncer is {syncer!r}: give 'local' or 'none'")
  alone = syncer == 'none'
  folder = pathlib.Path(workdir).absolute()
  with importing.uninterrupted():
    if isinstance(config, str):
      config = load.load(config)
    config.validate()
    # Of a baseline, too: a kernel has the devices that it was given first.
    nodes.prepare_jax(config.mesh.num_devices * config.sync.learners)
    # A config that cannot work claims no folder.
    controller = SingleController(config, folder, alone=alone)
    run_folder.open_workdir(config, folder, (folder / load.FILE).is_file(), alone)
  try:
    with importing.uninterrupted():
      controller.start()
    shown = run_lib.Display(folder, config, alone).draw if run_lib.in_kernel() else None
    found = run_lib.Run(folder, controller.join(tick=shown))
    if shown and (line := summary.merged_line(found.summary)):
      print(line)
    return found
  except BaseException as error:  # else the nodes train on, and the folder stays locked
    controller.stop('interrupted')
    if not isinstance(error, KeyboardInterrupt):
      controller.join()
      raise
    print(_INTERRUPTED, flush=True)
    controller.join()
  raise KeyboardInterrupt('saved; run the same cell to continue')
