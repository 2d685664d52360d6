"""The supervisor starts the processes of a local run, restarts failed ones, carries out the chaos
plan, and leaves no process behind.

The states of a program::

    waiting --the run begins--> running
    running --exit 0--> done
    running --exit 42--> refused              never retried; the other programs continue
    running --killed to end the run--> stopped
    running --any other exit--> down --back-off--> running
    running --bring_down--> down --the requested pause--> running
    down --MAX_SHORT_PROCESSES short processes in a row--> failed

A process that cannot be started, for want of memory, say, counts as a short one.

The run is over when its syncer is done, refused or failed, or when no learner is left; without a
learner here, when the syncer has ended. The remaining processes then have FINISH_S to end by
themselves (learners save); after that the supervisor sends SIGTERM, and `stop_s` later SIGKILL. The
syncer of a run that has reached its last step has all the time that it needs: it writes the trained
model. Ctrl-C, SIGTERM or the end of the terminal (SIGHUP) starts the same ending at once; a second
signal, half a second later, kills at once. `retire` ends a run in order: all learners leave, then
the syncer ends.

Faults come from outside: from kills, at fractions of the run's progress, so that they mean the same
on a fast and a slow machine; or from the fault injector (verification/faults), which calls `child`,
`bring_down` and `add`.

A learner of several hosts is one program: its processes end together, and are restarted together
(process_group.py).

The supervisor does not import jax: it starts programs and reads records (report/run_facts.py).
"""

import asyncio
import contextlib
import dataclasses
import math
import pathlib
import random
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from diloco_jax.launch import children, process_group
from diloco_jax.process import exits, restarts, run_folder
from diloco_jax.protocol import ids
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.report import run_facts

FINISH_S = 30.0
STOP_S = 8.0
TICK_S = 0.25
SAY_S = 3.0  # of waiting, before a line says for which programs
_KILL = re.compile(r'(?P<victim>\w+)@(?P<at>[01](\.\d+)?)(\+(?P<down>\d+(\.\d+)?))?', re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
  """A program of a spec on this machine: it runs here, or its driver does (launch/engines/ray.py).

  Attributes:
    cpus: the numbers of the CPUs that it may use, () for all.
    hosts: for each host of the program, the environment variables that its process needs beside
      `environment`; a learner may have several hosts (commands/learner.py).
  """

  name: str
  command: Sequence[str]
  environment: Mapping[str, str]
  cpus: Sequence[int] = ()
  hosts: Sequence[Mapping[str, str]] = ({},)


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
  """SIGKILL `victim` once `at_fraction` of the run is done; start it again `down_s` later."""

  victim: str
  at_fraction: float
  down_s: float


def parse_kills(texts: Sequence[str], names: Sequence[str]) -> list[Kill]:
  """The kills of programs with these names, as `--kill` has them. Raises ValueError.

  >>> parse_kills(['l0@0.5+3'], ['l0', 'syncer'])
  [Kill(victim='l0', at_fraction=0.5, down_s=3.0)]
  """
  kills = []
  for text in texts:
    match = _KILL.fullmatch(text)
    if not match or match['victim'] not in names or float(match['at']) > 1:
      raise ValueError(
        f'--kill={text}: use NAME@FRACTION+SECONDS, as {names[0]}@0.45+8, for a kill when 45 % of '
        f'the run is done and a start 8 s later, with one of the names {", ".join(names)}'
      )
    kills.append(Kill(match['victim'], float(match['at']), float(match['down'] or 0)))
  return kills


@dataclasses.dataclass(slots=True)
class Status:
  """The state of a program (top of this file), and the number of its processes."""

  state: str = 'waiting'
  starts: int = 0
  last_error: str = ''


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
  """How a run ended: the exit code, one line, and the status of each program."""

  code: int
  text: str
  statuses: dict[str, Status]
  interrupted: bool


class Supervisor:
  """Runs programs to their end. `listen` gets each line of output; `tick` gets the view every
  TICK_S."""

  def __init__(
    self,
    programs: Sequence[LocalProgram],
    workdir: pathlib.Path,
    view: run_facts.RunFacts,
    recorder: records_lib.Recorder,
    kills: Sequence[Kill] = (),
    listen: children.Listen = lambda name, line: None,
    tick: Callable[[run_facts.RunFacts], None] = lambda view: None,
    finish_s: float = FINISH_S,
    stop_s: float = STOP_S,
  ):
    self._programs = {program.name: program for program in programs}
    self._learners = [name for name in self._programs if name != ids.SYNCER]
    self._workdir = workdir
    self._view = view
    self._recorder = recorder
    self._kills = list(kills)
    self._listen, self._tick = listen, tick
    self._finish_s, self._stop_s = finish_s, stop_s
    self._tails = records_lib.TailAll(workdir)
    self._running: dict[str, process_group.Group] = {}
    self._runners: dict[str, asyncio.Task] = {}
    self._pauses: dict[str, float] = {}  # seconds until the restart of a program, by bring_down
    self._draw = random.Random()
    self._stopping = asyncio.Event()  # no process is started any more
    self._cut_off: set[str] = set()  # programs whose process was killed to end the run
    self._retiring = asyncio.Event()  # no learner process is started; also set when stopping
    self._retired = False  # by `retire`
    self._interrupts = exits.EndRequests()
    self.statuses = {name: Status() for name in self._programs}

  async def run(self) -> Outcome:
    """Returns once every process has ended. Raises DirectoryError: the run has a supervisor."""
    with run_folder.lock(self._workdir):
      return await self._run()

  async def _run(self) -> Outcome:
    loop = asyncio.get_running_loop()
    for number in exits.end_signals():
      loop.add_signal_handler(number, self._interrupt)
    self._look()  # reads the records of earlier runs in this folder
    for program in list(self._programs.values()):
      self._begin(program)
    watcher = asyncio.create_task(self._watch())
    try:
      await self._until_over()
      await self._end()
    finally:
      self._stop()
      for child in list(self._running.values()):
        child.kill()
      watcher.cancel()
      await asyncio.gather(watcher, return_exceptions=True)
    for runner in self._runners.values():
      runner.result()
    self._look()
    interrupted = self._interrupts.count > 0
    # Of few more steps than before all may have been merged: no learner makes one.
    progress = 1.0 if self._retired else max(self._view.foremost, self._view.progress)
    learners = [self.statuses[name] for name in self._learners]
    code, text = _verdict(self.statuses.get(ids.SYNCER), learners, interrupted, progress)
    return Outcome(code=code, text=text, statuses=self.statuses, interrupted=interrupted)

  # --- Fault injection ----------------------------------------------------------------------------

  def child(self, name: str) -> process_group.Group | None:
    """The running process of a program; None if there is none."""
    return self._running.get(name)

  def add(self, program: LocalProgram) -> None:
    """Runs one more learner like the others; the run waits for its end, too."""
    assert program.name not in self._programs, program.name
    self._programs[program.name] = program
    self._learners.append(program.name)
    self.statuses[program.name] = Status()
    self._begin(program)

  def bring_down(
    self, name: str, down_s: float, why: str, politely: bool = False, host: int | None = None
  ) -> bool:
    """Ends a program's process, with SIGTERM if `politely`, else with SIGKILL, and restarts the
    program `down_s` later. Returns False if it has no process or the run is ending. `host`: of a
    learner of several, the one to end; the others follow it."""
    child = self._running.get(name)
    if child is None or not child.running or self._retiring.is_set():
      return False
    child = child if host is None else child.hosts[host]
    self._pauses[name] = down_s
    self._note(name, 'down', f'{why}, restart in {down_s:g} s')
    if politely:
      child.terminate()
    else:
      child.kill()
    return True

  def retire(self) -> None:
    """Ends the run: sends SIGTERM to every learner; the syncer ends after the last of them."""
    self._retired = True
    self._retiring.set()
    for name in self._learners:
      if name in self._running:
        self._running[name].terminate()

  # --- One program --------------------------------------------------------------------------------

  def _begin(self, program: LocalProgram) -> None:
    self._runners[program.name] = asyncio.create_task(self._keep(program))

  async def _keep(self, program: LocalProgram) -> None:
    """Runs the processes of a program, one after the other, until it has ended or the run stops."""
    pauses = restarts.Restarts(self._draw)
    while not self._ending(program.name).is_set():
      code, why, lived_s = await self._run_process(program)
      pause_s = self._pauses.pop(program.name, None)
      end = exits.outcome(code)
      ended = end == exits.NEVER or (end == exits.DONE and pause_s is None)
      if ended or self._ending(program.name).is_set():
        self._note_end(program.name, code, why)
        return
      if pause_s is None:
        pause_s = pauses.pause_s(lived_s)
        if pause_s is None:
          short = restarts.MAX_SHORT_PROCESSES
          self._note(
            program.name, 'failed', f'{why}; failed after {short} short processes in a row'
          )
          return
        self._note(program.name, 'down', f'{why}; restart in {pause_s:.1f} s')
      else:
        pauses.forget_failures()
      await self._pause(program.name, pause_s)

  async def _run_process(self, program: LocalProgram) -> tuple[int | None, str, float]:
    """Runs one process, or one for each host; returns the exit code, how it ended, and its running
    time in seconds. The code is None if the process could not be started."""
    name, status = program.name, self.statuses[program.name]
    try:
      child = await process_group.start(
        name,
        program.command,
        [{**program.environment, **host} for host in program.hosts],
        self._workdir / 'logs',
        self._listen,
        program.cpus,
      )
    except OSError as error:  # no memory, processes, descriptors or disk: maybe only for now
      return None, f'could not be started: {error}', 0.0
    self._look()  # reads the last records of the previous process before the new one writes
    self._running[name] = child
    status.starts += 1
    again = f'restarted (process {status.starts})' if status.starts > 1 else ''
    self._note(name, 'starting', again, pid=child.pid)
    if self._ending(name).is_set():
      child.terminate()
    try:
      code, how = await child.wait()
    finally:
      del self._running[name]
    status.last_error = child.last_error or status.last_error
    stopped = self._was_stopped(name, code)
    self._recorder.report(report_facts.Exit(child=name, pid=child.pid, code=code, stopped=stopped))
    return code, how, time.monotonic() - child.started_s

  def _ending(self, name: str) -> asyncio.Event:
    """The event that forbids another process of this program."""
    return self._stopping if name == ids.SYNCER else self._retiring

  def _was_stopped(self, name: str, code: int | None) -> bool:
    """Whether the supervisor has killed a process to end the run: also by SIGTERM, if the process
    had only begun, and had no handler of signals yet."""
    return name in self._cut_off or (code == -signal.SIGTERM and self._ending(name).is_set())

  def _note_end(self, name: str, code: int | None, why: str) -> None:
    end = exits.outcome(code)
    if end == exits.NEVER:
      self._note(name, 'refused', self.statuses[name].last_error or why)
    elif end == exits.DONE:
      self._note(name, 'done', '')
    else:
      self._note(name, *(('stopped', '') if self._was_stopped(name, code) else ('down', why)))

  def _note(self, name: str, state: str, text: str, pid: int | None = None) -> None:
    """Writes a new state of a program to the records and the console."""
    self.statuses[name].state = state
    self._recorder.report(report_facts.Process(child=name, state=state, text=text, pid=pid))
    if text:
      self._listen('local', f'{name}: {text}')

  async def _pause(self, name: str, seconds: float) -> None:
    """Waits for `seconds`, or until the run ends."""
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._ending(name).wait(), seconds)

  # --- The run ------------------------------------------------------------------------------------

  async def _watch(self) -> None:
    """Reads new records, carries out the kills and refreshes the display, every TICK_S."""
    while True:
      self._look()
      self._tick(self._view)
      await asyncio.sleep(TICK_S)

  def _look(self) -> None:
    self._view.take(self._tails.read())
    for kill in [kill for kill in self._kills if kill.at_fraction <= self._view.foremost]:
      if self.bring_down(kill.victim, kill.down_s, 'killed by --kill'):  # it has a process
        self._kills.remove(kill)

  async def _until_over(self) -> None:
    """Waits until the syncer has ended, no learner is left, or a signal interrupts the run."""
    stop = asyncio.create_task(self._stopping.wait())
    ends = {stop}
    if ids.SYNCER in self._runners:
      ends.add(self._runners[ids.SYNCER])
    names = self._learners or [ids.SYNCER]
    while left := {self._runners[name] for name in names if not self._runners[name].done()}:
      done, _ = await asyncio.wait(ends | left, return_when=asyncio.FIRST_COMPLETED)
      if done & ends:
        break
    stop.cancel()

  async def _end(self) -> None:
    """Ends every process: on its own, on SIGTERM, or by SIGKILL."""
    asked = self._interrupts.count or self._retiring.is_set()
    # One program is done: the others may end by themselves.
    natural = not asked and any(status.state == 'done' for status in self.statuses.values())
    self._stop()
    for child in self._running.values():
      child.thaw()
    self._look()  # the last records of the learners
    if natural:
      # One of the learners has ended at the last step. Before it, all may have been stopped from
      # outside: then the syncer would wait for them for ever.
      complete = self._running.keys() == {ids.SYNCER} and self._view.foremost >= 1.0
      await self._wait(math.inf if complete else self._finish_s, interrupts=0)
    # The learners first: the syncer merges what they send last.
    for names in ([name for name in self._running if name != ids.SYNCER], [ids.SYNCER]):
      for name in names:
        if name in self._running:
          self._running[name].terminate()
      await self._wait(self._stop_s, interrupts=1, names=names)
    for name, child in list(self._running.items()):
      self._listen('local', f'{name}: did not end on SIGTERM; killed')
      self._cut(name, child)
    await asyncio.wait(self._runners.values())

  async def _wait(
    self, seconds: float, interrupts: int, names: Sequence[str] | None = None
  ) -> None:
    """Waits until no process is left, or none of `names`, for `seconds`, or until there are more
    than `interrupts`."""
    deadline_s, say_s = time.monotonic() + seconds, time.monotonic() + SAY_S
    left = lambda: self._running.keys() if names is None else self._running.keys() & names
    while left() and time.monotonic() < deadline_s and self._interrupts.count <= interrupts:
      await asyncio.sleep(0.05)
      if time.monotonic() >= say_s:
        say_s = math.inf
        most = '' if seconds == math.inf else f', at most {seconds - SAY_S:.0f} s more'
        programs = (f'{name} ({self._view.condition(name).brief})' for name in sorted(left()))
        self._listen('local', f'the run ends: it waits for {", ".join(programs)}{most}')

  def _interrupt(self) -> None:
    if not self._interrupts.add():
      return
    if self._interrupts.count == 1:
      self._stop()
      self._listen('local', 'stopping (interrupt again to kill at once)')
    else:
      for name, child in list(self._running.items()):
        self._cut(name, child)

  def _cut(self, name: str, child: process_group.Group) -> None:
    """Kills a process to end the run."""
    self._cut_off.add(name)
    child.kill()

  def _stop(self) -> None:
    self._stopping.set()
    self._retiring.set()


def _verdict(
  syncer: Status | None, learners: list[Status], interrupted: bool, progress: float
) -> tuple[int, str]:
  """Returns (exit code, one line) of a run from the statuses of its programs and its progress, a
  share of its steps. Programs end with 0, too, when they are asked to end before the last step."""
  if interrupted:
    return exits.INTERRUPTED, 'interrupted'
  if syncer is not None and syncer.state == 'refused':
    return exits.NEVER_RETRY, syncer.last_error or 'the syncer refused to start'
  if learners and all(status.state == 'refused' for status in learners):
    return exits.NEVER_RETRY, learners[0].last_error or 'no learner could start'
  if syncer is not None and syncer.state != 'done':
    return 1, f'the syncer is {syncer.state} (see its log)'
  if learners and not any(status.state == 'done' for status in learners):
    return 1, 'no learner finished the run (see their logs)'
  if 0 < progress < 1:
    return 1, f'the run was stopped from outside at {progress:.0%} of its steps'
  return 0, 'done'
