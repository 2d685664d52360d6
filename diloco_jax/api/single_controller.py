"""Single-controller mode: one process drives the syncer and every island, as Pathways does.

Each island is a disjoint sub-mesh of `jax.devices()` (by slice where devices have one, by count on
CPU). Machines, work and jitted steps are those of separate processes; only the transport differs.
An error of the devices of an island ends that learner alone, as a kill ends a process: it is built
again, with the pauses and limits of a process (process/restarts.py), and rejoins. Every other
error is one of code, settings or files, which it would meet again: it ends the run in order. For
tests, notebooks and `diloco train --controller=single`.
"""

import contextlib
import functools
import os
import pathlib
import random
import threading
import time
from collections.abc import Callable
from typing import Literal

import jax
from absl import flags

from diloco_jax.api import run as run_lib
from diloco_jax.config import brought, build, load, run_config
from diloco_jax.learner import baseline
from diloco_jax.learner import node as learner_node
from diloco_jax.node import loop, threads
from diloco_jax.process import exits, lifecycle, restarts, run_folder
from diloco_jax.protocol import actions, events, ids
from diloco_jax.report import facts as report_facts
from diloco_jax.report import header
from diloco_jax.report import records as records_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.syncer import global_model
from diloco_jax.syncer import node as syncer_node
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.transport import in_process

SPARE = 1  # emulated device for the global model
_INTERRUPTED = (
  'interrupted: each learner ends its step, sends what it has and saves, then the syncer; the same '
  'call continues the run. A second interrupt does not wait.'
)


class IslandsFailed(RuntimeError):
  """Too few learners are left for an outer step; the text has the reason and the remedy."""


class SingleController:
  """A syncer and M learners as threads of this process.

  Args:
    config: a validated config.
    workdir: the folder of checkpoints; a run in it is continued.
    alone: one learner and no syncer, the baseline.
    share: islands of one device each may share it, so that a machine with one accelerator trains
      several learners.

  Attributes:
    devices: of each island, by id; syncer_devices: where the global model lies.

  Raises:
    ValueError: there are too few devices, or they do not make these meshes.
  """

  def __init__(
    self,
    config: run_config.Config,
    workdir: pathlib.Path,
    alone: bool = False,
    share: bool = False,
  ):
    self._assembled = build.assemble(config.of(ids.SYNCER))
    self._config, self._workdir, self._alone = config, workdir, alone
    self._leaving = threading.Event()  # the learners have been asked to end
    self._stopping = threading.Event()  # and so will be the syncer
    self._hub = in_process.InProcessHub()
    names = run_config.learner_ids(1 if alone else config.sync.learners)
    self._event_queues = {name: loop.EventQueue() for name in (ids.SYNCER, *names)}
    self._exits: dict[str, actions.Exit | BaseException] = {}
    self._given_up: dict[str, str] = {}  # and why
    self._threads: list[threads.Thread] = []
    self._learners = {name: self._assemble(name) for name in names}
    islands = _islands(len(names), config.mesh.num_devices, share)
    self.devices = dict(zip(names, islands))
    self.syncer_devices = mesh_lib.syncer_devices(jax.devices(), islands)

  def _assemble(self, name: str) -> build.Assembly:
    config = self._config.of(name)
    return self._assembled if config == self._assembled.config else build.assemble(config)

  def start(self) -> None:
    """Starts each node on its own thread."""
    if not self._alone:
      self._start(ids.SYNCER, self._run_syncer)
    for name in self.devices:
      self._start(name, functools.partial(self._keep, name))

  def _run_syncer(self, recorder: records_lib.Recorder) -> actions.Exit:
    over = functools.partial(self._ask_learners, 'the run is over')
    ended = syncer_node.run(
      self._assembled,
      global_model.Theta(self._assembled, self.syncer_devices),
      self._workdir,
      self._event_queues[ids.SYNCER],
      self._hub.syncer_transport,
      recorder,
      over,
    )
    over()  # it may have been asked to stop
    recorder.ended(0)
    return ended

  def _keep(self, name: str, recorder: records_lib.Recorder) -> actions.Exit:
    """Runs a learner, again after an error of its devices, until it ends in order, the run ends, or
    it has ended so too often in a row."""

    def note(state: str, text: str) -> None:
      """Writes a new state of the learner to the records and the console."""
      recorder.report(report_facts.Process(child=name, state=state, text=text, pid=os.getpid()))
      if text:
        recorder.say(text)

    pauses, text = restarts.Restarts(random.Random()), ''
    while True:
      began_s = time.monotonic()
      note('starting', text)
      end = self._live(name, recorder)
      recorder.ended(end.code)
      if exits.outcome(end.code) != exits.RETRY or self._leaving.is_set():
        return end
      pause_s = pauses.pause_s(time.monotonic() - began_s)
      if pause_s is None:
        short = restarts.MAX_SHORT_PROCESSES
        note('failed', f'{end.text}. Given up after {short} short ones in a row')
        self._given_up[name] = end.text
        return end
      note(
        'down',
        f'{end.text}. Merged contributions and checkpoints are safe, its other steps are lost. It '
        f'is built again in {pause_s:.1f} s and rejoins; the other learners train on',
      )
      if self._leaving.wait(pause_s):
        return end
      text = 'is built again'

  def _live(self, name: str, recorder: records_lib.Recorder) -> actions.Exit:
    """Runs a learner to its end; raises errors that are not of its devices."""
    event_queue = self._event_queues[name] = loop.EventQueue()
    if self._leaving.is_set():  # since before its queue was made
      event_queue.post(events.Stop(reason='the run ends'))
    try:
      return self._train(name, event_queue, recorder)
    except BaseException as error:
      cause: BaseException | None = error
      while cause and not isinstance(cause, jax.errors.JaxRuntimeError):
        cause = cause.__cause__ or cause.__context__
      if cause is None:
        raise
      cause.__traceback__ = None  # its frames hold the arrays, and a garbage collection stops all
      text = f'the devices have failed ({exits.one_line(cause)[:300]})'
      return actions.Exit(code=1, text=text)

  def _train(
    self, name: str, event_queue: loop.EventQueue, recorder: records_lib.Recorder
  ) -> actions.Exit:
    assembled = self._learners[name]
    island = learner_node.make_island(assembled, self._workdir, name, self.devices[name])
    if self._alone:
      brought.begin(self._workdir, assembled.things)
      return baseline.run(assembled.config, island, recorder, self._leaving.is_set)
    return learner_node.run(
      assembled,
      island,
      self._workdir,
      name,
      event_queue,
      self._hub.learner_transport,
      recorder,
      own_process=False,
    )

  def _start(self, name: str, run: Callable[[records_lib.Recorder], actions.Exit]) -> None:
    def guarded() -> None:
      try:
        with contextlib.ExitStack() as end:
          recorder = records_lib.Recorder(self._workdir, name, prefix=f'[{name}] ')
          end.enter_context(contextlib.closing(recorder))
          end.push(lambda error, *_: recorder.ended(1) if error else None)
          ended: actions.Exit | BaseException = run(recorder)
        self._require_quorum()
      except BaseException as error:
        ended = error
      self._exits[name] = ended
      if isinstance(ended, BaseException):  # `join` raises it in the caller's thread
        self.stop(f'{name} failed')
      self._syncer_last()

    thread = threads.Thread(target=guarded, name=name)
    thread.start()
    self._threads.append(thread)

  def _require_quorum(self) -> None:
    """Raises IslandsFailed: learners were given up, and too few are left for an outer step."""
    left, quorum = len(self.devices) - len(self._given_up), self._config.sync.quorum
    if self._given_up and left < quorum and not self._leaving.is_set():
      reasons = '; '.join(f'{name}: {why}' for name, why in self._given_up.items())
      raise IslandsFailed(
        f'{reasons}. {left} learners are left, and sync.quorum is {quorum}: the run has ended. '
        'What was merged is safe, and so are all checkpoints: once the devices work, the same call '
        'continues the run'
      )

  def _ask_learners(self, reason: str) -> None:
    """Asks every learner to end at its next boundary."""
    self._leaving.set()
    for name in self.devices:
      self._event_queues[name].post(events.Stop(reason=reason))

  def stop(self, reason: str) -> None:
    """Asks every learner to end at its next boundary, and then the syncer, which merges what they
    send last; safe to call from a signal handler."""
    self._stopping.set()
    self._ask_learners(reason)
    self._syncer_last()

  def _syncer_last(self) -> None:
    if self._stopping.is_set() and self.devices.keys() <= self._exits.keys():
      reason = 'every learner has stopped'
      self._event_queues[ids.SYNCER].post(events.Stop(reason=reason))

  def join(self, timeout_s: float | None = None) -> dict[str, actions.Exit]:
    """Waits for every node; returns how the last process of each has ended. Raises the error of a
    failed node, IslandsFailed if too few learners were left, or TimeoutError."""
    for thread in self._threads:
      thread.join(timeout_s)
      if thread.is_alive():
        raise TimeoutError(f'{thread.name} has not ended within {timeout_s} s')
    ended = {}
    for name, result in self._exits.items():
      if isinstance(result, BaseException):
        raise result
      ended[name] = result
    return ended

  def outcome(self) -> actions.Exit:
    """As `join`; how the run has ended: as its syncer, or as a learner if none ended in order."""
    try:
      ended = self.join()
    except IslandsFailed as error:
      return actions.Exit(code=1, text=str(error))
    best = min((ended[name] for name in self.devices), key=lambda end: abs(end.code))
    return best if best.code else ended[ids.SYNCER]


def _islands(learners: int, size: int, share: bool) -> list[list[jax.Device]]:
  """The devices of each learner, `size` of them; see SingleController. Raises ValueError."""
  devices = jax.devices()
  if share and size == 1:
    devices = [devices[number % len(devices)] for number in range(learners)]
  if len(devices) < learners * size:
    raise ValueError(
      f'{learners} learners with meshes of {size} devices need {learners * size}, there are '
      f'{len(devices)}: set JAX_NUM_CPU_DEVICES={learners * size + SPARE} before the first use '
      'of jax (in a notebook: restart the kernel), or lower sync.learners'
    )
  return mesh_lib.islands(devices, [size] * learners)


def run(
  config: run_config.Config | str,
  workdir: str | pathlib.Path,
  syncer: Literal['local', 'none'] = 'local',
) -> run_lib.Run:
  """Runs a whole experiment in this process, for notebooks: `diloco_jax.run`.

  Args:
    config: of the run, or its name as for `diloco train --config`: 'stdlib_lm:tiny'.
    workdir: its folder; if it holds this run already, the run is continued; if that has ended and
      `config` has no more steps, a line says so, and nothing is started.
    syncer: 'local', or 'none': one learner trains alone, the baseline.

  Returns:
    What the run has recorded, with the exit of each node that was started.

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
  if isinstance(config, str):
    config = load.load(config)
  config.validate()
  # Of a baseline, too: a kernel has the devices that it was given first.
  lifecycle.prepare_jax(config.mesh.num_devices * config.sync.learners + SPARE)
  # A config that cannot work claims no folder.
  controller = SingleController(config, folder, alone=alone)
  try:
    run_folder.open_workdir(config, folder, (folder / load.FILE).is_file(), alone)
  except run_folder.NothingLeft as ended:
    print(ended)
    return run_lib.Run(folder, {})
  try:
    controller.start()
    recorded = run_lib.Run(folder, controller.join())
    tell = lambda: (line := summary_lib.merged_line(recorded.summary)) and print(line)
    header.try_to_show(tell, 'the summary', 'diloco_jax.open_run')
    return recorded
  except BaseException as error:  # else the nodes train on, and the folder stays locked
    controller.stop('interrupted')
    if not isinstance(error, KeyboardInterrupt):
      controller.join()
      raise
    print(_INTERRUPTED, flush=True)
    controller.join()
  raise KeyboardInterrupt('saved; run the same cell to continue')
