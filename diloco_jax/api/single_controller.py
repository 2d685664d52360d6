"""Single-controller mode: one process drives the syncer and every island, as Pathways does.

Each island is a disjoint sub-mesh of `jax.devices()` (by slice where devices have one, by count on
CPU). Machines, work and jitted steps are those of separate processes; only the transport differs.
An island whose devices fail or hang ends alone and comes back (islands.py); every other error ends
the run in order. For tests, notebooks and `diloco train --controller=single`.
"""

import contextlib
import dataclasses
import functools
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from absl import flags

from diloco_jax.api import importing
from diloco_jax.api import islands as islands_lib
from diloco_jax.api import run as run_lib
from diloco_jax.config import build, load, run_config
from diloco_jax.launch import nodes, run_folder, supervisor
from diloco_jax.learner import baseline
from diloco_jax.learner import process as learner_process
from diloco_jax.node import loop, threads
from diloco_jax.protocol import actions, events, ids
from diloco_jax.report import header, summary
from diloco_jax.report import records as records_lib
from diloco_jax.syncer import global_model as global_model_lib
from diloco_jax.syncer import process as syncer_process
from diloco_jax.train import config as config_lib
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.transport import in_process

SPARE = 1  # emulated device for the global model
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
    islands: the mesh of each of the M learners, by id; default: that of the config.
    share: islands of one device each may share it, so that a machine with one accelerator trains
      several learners.

  Attributes:
    devices: of each island, by id; syncer_devices: where the global model lies.
    keepers: of the learners, by id.

  Raises:
    ValueError: there are too few devices, or they do not make these meshes.
  """

  def __init__(
    self,
    config: run_config.Config,
    workdir: pathlib.Path,
    make_recorder: MakeRecorder | None = None,
    alone: bool = False,
    islands: Mapping[str, config_lib.MeshConfig] | None = None,
    share: bool = False,
  ):
    self._share = share
    self._assembled = build.assemble(config.of(supervisor.SYNCER))
    self._config, self._workdir, self._alone = config, workdir, alone
    self._stopping = threading.Event()
    kind = run_lib.CellRecorder if run_lib.in_kernel() else records_lib.Recorder
    self._make_recorder = make_recorder or (lambda name: kind(workdir, name, prefix=f'[{name}] '))
    self._hub = in_process.InProcessHub()
    self._event_queue = loop.EventQueue()  # of the syncer
    self._exits: dict[str, actions.Exit | BaseException] = {}
    self._threads: list[threads.Thread] = []
    self.keepers: dict[str, islands_lib.Keeper] = {}
    self.devices: dict[str, list[Any]] = {}
    names = run_config.learner_ids(1 if alone else config.sync.learners)
    if islands is not None and len(islands) != len(names):
      raise ValueError(
        f'{len(islands)} islands: as many as sync.learners, {len(names)}, must begin'
      )
    self.syncer_devices: list[Any] = []
    self._place(islands or dict.fromkeys(names, config.mesh))
    self.syncer_devices = mesh_lib.syncer_devices(jax.devices(), list(self.devices.values()))

  def _place(self, islands: Mapping[str, config_lib.MeshConfig]) -> None:
    """Gives each of these learners devices that nothing uses, and a keeper. Raises ValueError."""
    configs = {}
    for name, mesh in islands.items():
      if not ids.is_learner(name):
        raise ValueError(f'{name!r} is no id of a learner: {ids.RULE}')
      configs[name] = dataclasses.replace(self._config.of(name), mesh=mesh)
      configs[name].validate()
    gone = set(self._exits)
    used = set(self.syncer_devices)
    used.update(*(its for name, its in self.devices.items() if name not in gone))
    free = [device for device in jax.devices() if device not in used]
    sizes = [config.mesh.num_devices for config in configs.values()]
    if self._share and set(sizes) == {1}:
      first = len(self.devices)
      shared = [device for device in jax.devices() if device not in self.syncer_devices]
      free = [shared[(first + k) % len(shared)] for k in range(len(sizes))]
    if len(free) < (needed := sum(sizes)):
      raise ValueError(
        f'{len(sizes)} learners with meshes of {sizes} devices need {needed}, there are '
        f'{len(free)}: set JAX_NUM_CPU_DEVICES={len(used) + needed + SPARE} before the first use '
        'of jax (in a notebook: restart the kernel), or lower sync.learners'
      )
    for name, devices in zip(configs, mesh_lib.islands(free, sizes)):
      same = configs[name] == self._assembled.config
      assembled = self._assembled if same else build.assemble(configs[name])
      live = functools.partial(self._live, name, assembled, devices)
      self.devices[name], self.keepers[name] = devices, islands_lib.Keeper(name, live)

  def start(self) -> None:
    """Starts each node on its own thread."""

    def run_syncer(recorder: records_lib.Recorder) -> actions.Exit:
      ended = syncer_process.run(
        self._assembled,
        global_model_lib.Theta(self._assembled, self.syncer_devices),
        self._workdir,
        self._event_queue,
        self._hub.syncer_transport,
        recorder,
        self._over,
      )
      self._over()  # it may have been asked to stop
      recorder.ended(0)
      return ended

    if not self._alone:
      self._start(supervisor.SYNCER, run_syncer)
    for name, keeper in self.keepers.items():
      self._start(name, keeper.run)

  def _live(
    self,
    name: str,
    assembled: build.Assembly,
    devices: list[Any],
    life: islands_lib.Life,
    records: Any,
  ) -> actions.Exit:
    """Runs one life of a learner, on the thread of its steps."""
    life.island = learner_process.make_island(assembled, self._workdir, name, devices)
    if self._alone:
      life.busy = False  # nothing tells of its steps
      return baseline.run(assembled.config, life.island, records, self._stopping.is_set)
    return learner_process.run(
      assembled,
      life.island,
      self._workdir,
      name,
      life,
      functools.partial(life.connect, self._hub.learner_transport),
      records,
      own_process=False,
      work_class=life.work(),
    )

  def _start(self, name: str, run: Callable[[records_lib.Recorder], actions.Exit]) -> None:
    def guarded() -> None:
      try:
        with contextlib.ExitStack() as end:
          recorder = end.enter_context(contextlib.closing(self._make_recorder(name)))
          end.push(lambda error, *_: recorder.ended(1) if error else None)
          ended: actions.Exit | BaseException = run(recorder)
        self._require_quorum(name)
      except BaseException as error:
        ended = error
      self._exits[name] = ended
      if isinstance(ended, BaseException):  # `join` raises it in the caller's thread
        self.stop(f'{name} failed')
      self._syncer_last()

    thread = threads.Thread(target=guarded, name=name)
    thread.start()
    self._threads.append(thread)

  def _require_quorum(self, name: str) -> None:
    """Raises IslandsFailed: a learner was given up, and too few are left for an outer step."""
    why = name in self.keepers and self.keepers[name].given_up
    left, quorum = len(self._left()), self._config.sync.quorum
    if why and left < quorum and not self._stopping.is_set():
      raise islands_lib.IslandsFailed(
        f'{name}: {why}. {left} learners are left, and sync.quorum is {quorum}: the run has ended. '
        'What was merged is safe, and so are all checkpoints: once the devices work, the same call '
        'continues the run'
      )

  def _left(self) -> list[str]:
    keepers = list(self.keepers.items())  # `add` may be under way
    return [name for name, one in keepers if not one.given_up and not one.removed]

  def add(self, name: str, mesh: config_lib.MeshConfig) -> None:
    """Adds a learner during the run: it joins like a process that starts later.

    Args:
      name: a new id, or that of a learner that has ended.
      mesh: of devices that neither an island nor the syncer uses.

    Raises:
      ValueError: the name is in use or no id, the run ends, or there are too few devices.
    """
    if name in self.keepers and name not in self._exits:
      raise ValueError(f'there is a learner {name} already: choose another id')
    if self._stopping.is_set() or supervisor.SYNCER in self._exits:
      raise ValueError(f'the run ends: {name} cannot join')
    self._place({name: mesh})
    self._exits.pop(name, None)
    self._start(name, self.keepers[name].run)

  def remove(self, name: str) -> None:
    """Asks a learner to leave during the run: it ends its step, sends what it has, saves and
    ends; then its devices are free. Raises ValueError: there is no such learner, or too few would
    be left for an outer step."""
    if name not in self._left() or len(self._left()) <= self._config.sync.quorum:
      raise ValueError(
        f'{name} cannot leave: there are {self._left()}, and sync.quorum is '
        f'{self._config.sync.quorum}. Add a learner first, or stop the run'
      )
    self.keepers[name].removed = True
    self.keepers[name].stop('it was removed')

  @property
  def progress(self) -> float:
    """The clock of the foremost learner as a share of the run."""
    clocks = [one.life.clock for one in self.keepers.values() if one.life]
    return max(clocks, default=0) / self._config.train.steps

  def _over(self) -> None:
    """Ends the learners after the syncer. Of a run that had ended before, none hears a Finish."""
    for keeper in list(self.keepers.values()):
      keeper.stop('the run is over')

  def stop(self, reason: str) -> None:
    """Asks every learner to end at its next boundary, and then the syncer, which merges what they
    send last; safe to call from a signal handler."""
    self._stopping.set()
    for keeper in list(self.keepers.values()):
      keeper.stop(reason)
    self._syncer_last()

  def _syncer_last(self) -> None:
    if self._stopping.is_set() and self.keepers.keys() <= self._exits.keys():
      self._event_queue.post(events.Stop(reason='every learner has stopped'))

  def join(
    self, timeout_s: float | None = None, tick: Callable[[], None] | None = None
  ) -> dict[str, actions.Exit]:
    """Waits for every node, and calls `tick` every two seconds meanwhile; returns how the last life
    of each has ended. Raises the error of a failed node, IslandsFailed if too few learners were
    left, or TimeoutError."""
    for thread in self._threads:  # also those that are added meanwhile
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

  def outcome(self, tick: Callable[[], None] | None = None) -> supervisor.Outcome:
    """As `join`; how the run has ended: as its syncer, or as a learner if none ended in order."""
    try:
      exits = self.join(tick=tick)
      learners = (one for name, one in exits.items() if name != supervisor.SYNCER)
      best = min(learners, key=lambda one: abs(one.code))
      end = best if best.code else exits[supervisor.SYNCER]
    except islands_lib.IslandsFailed as error:
      end = actions.Exit(code=1, text=str(error))
    return supervisor.Outcome(code=end.code, text=end.text, statuses={}, interrupted=False)

  # --- Faults -------------------------------------------------------------------------------------

  def retire(self) -> None:
    self.stop('the plan was carried out')

  def child(self, name: str) -> islands_lib.Life | None:
    return self.keepers[name].life

  def bring_down(self, name: str, down_s: float, why: str) -> bool:
    """Ends the life of a learner; the next one begins `down_s` later. False: there is none."""
    keeper = self.keepers[name]
    if (life := keeper.life) is None or keeper.leaving.is_set():
      return False
    life.end(why, down_s)
    return True


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
    nodes.prepare_jax(config.mesh.num_devices * config.sync.learners + SPARE)
    # A config that cannot work claims no folder.
    controller = SingleController(config, folder, alone=alone)
    run_folder.open_workdir(config, folder, (folder / load.FILE).is_file(), alone)
  try:
    with importing.uninterrupted():
      controller.start()
    shown = run_lib.Display(folder, config, alone).draw if run_lib.in_kernel() else None
    found = run_lib.Run(folder, controller.join(tick=shown))
    if shown:
      tell = lambda: (line := summary.merged_line(found.summary)) and print(line)
      header.shown(tell, 'the summary', 'diloco_jax.open_run')
    return found
  except BaseException as error:  # else the nodes train on, and the folder stays locked
    controller.stop('interrupted')
    if not isinstance(error, KeyboardInterrupt):
      controller.join()
      raise
    print(_INTERRUPTED, flush=True)
    controller.join()
  raise KeyboardInterrupt('saved; run the same cell to continue')
