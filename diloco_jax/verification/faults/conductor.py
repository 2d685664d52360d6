"""Conducts a run of real processes: starts it, injects faults, follows its facts, ends and judges
it.

    class Kills(conductor.Conductor):
      async def carry_out(self):            # what the test does to the run; `retire` ends it
        await self.until(lambda: self.count('syncer', 'outer') >= 4)
        assert self.nemesis.kill('l1', 0.1)
        ...
        self.supervisor.retire()

    kills, run = conductor.play(workdir, make, deadline_s)

A finished run consists of what its processes have written: their facts (report/records.py) and
their tapes, which the judge reads (verification/checks/judge_tapes.py).
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from diloco_jax.config import run_config
from diloco_jax.launch import local_run
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.report import live, run_facts
from diloco_jax.report import records as records_lib
from diloco_jax.verification.checks import judge_tapes
from diloco_jax.verification.faults import inject_faults
from diloco_jax.verification.replay import tape_files

POLL_S = 0.05
SECONDS = 'seconds'  # folder of the disks of second processes of frozen learners


def judge(workdir: pathlib.Path, healed_ns: int | None = None) -> judge_tapes.Verdict:
  """Judges the tapes of all processes of a run; `healed_ns`: the end of the last fault (None:
  liveness is not checked)."""
  node_tapes = []
  for folder in (workdir, *sorted((workdir / SECONDS).glob('*'))):
    for process_tape in tape_files.find(folder):
      reader = tape_files.read(process_tape)
      if reader.header is not None:
        name = process_tape.name if folder == workdir else f'{process_tape.name} (second)'
        node_tapes.append(judge_tapes.Tape(name, reader.header.start, reader))
  return judge_tapes.judge(node_tapes, healed_ns)


@dataclasses.dataclass
class Run:
  """A finished run: facts of every process, in the order of time."""

  workdir: pathlib.Path
  outcome: supervisor_lib.Outcome
  said: list[str]
  facts: list[tuple[str, dict]]

  def of(self, process: str, name: str) -> list[dict]:
    return [fact for who, fact in self.facts if (who, fact['name']) == (process, name)]

  def verdict(self) -> judge_tapes.Verdict:
    """Judges the tapes of all processes."""
    return judge(self.workdir)


class EndedEarly(Exception):
  """The run ended before `carry_out` did; `outcome` says how."""

  def __init__(self, outcome: supervisor_lib.Outcome, said: list[str]):
    super().__init__('\n'.join([*said, f'the run ended early: {outcome.text}']))
    self.outcome = outcome


class Conductor:
  """Starts a run under the supervisor.

  Attributes:
    supervisor: of the run; nemesis: injects faults into its processes.
    facts: (process, fact) of all processes, up to now.
    said: every line of output, after the name of its process.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    recorder: records_lib.Recorder,
    config: run_config.Config,
    config_flags: Sequence[str],
    change: Callable[
      [supervisor_lib.LocalProgram], supervisor_lib.LocalProgram | None
    ] = lambda program: program,
    display: live.Display | None = None,
  ):
    """Plans the programs; `play` runs them.

    Args:
      workdir: the run's folder.
      recorder: of the facts of the supervisor.
      config: of the run; `config_flags`: the same for the command line of its programs.
      change: changes each program before it starts; None: it does not run.
      display: shows the run.
    """
    self.workdir = workdir
    programs = [
      changed
      for program in local_run.programs(local_run.describe(config, workdir, config_flags))
      if (changed := change(program)) is not None
    ]
    self.said: list[str] = []
    self.facts: list[tuple[str, dict]] = []
    self._programs = {program.name: program for program in programs}
    self._tail = records_lib.TailAll(workdir)
    self._display = display
    self.supervisor = supervisor_lib.Supervisor(
      programs,
      workdir,
      run_facts.RunFacts(run_config.learner_ids(config.sync.learners), config.train.steps),
      recorder,
      listen=self._listen,
      tick=display.tick if display else lambda view: None,
      stop_s=max(supervisor_lib.STOP_S, config.train.drain_s),
    )
    self.nemesis = inject_faults.Nemesis(self.supervisor, self.second)

  async def carry_out(self) -> None:
    """The kills and faults of this run; a subclass defines them."""
    raise NotImplementedError

  async def close(self) -> None:
    """After the run, however it ended."""
    await self.nemesis.heal()

  def second(self, name: str) -> supervisor_lib.LocalProgram:
    """Another process for the learner id of this program, on its own disk."""
    second = with_flag(self._programs[name], 'workdir', str(self.workdir / SECONDS / name))
    return dataclasses.replace(second, name=f'{name}-second')

  def look(self) -> None:
    """Reads the facts that the processes have written since."""
    self.facts += self._tail.read()

  async def watch(self) -> None:
    while True:
      self.look()
      await asyncio.sleep(POLL_S)

  async def until(self, condition: Callable[[], object], patience_s: float | None = None) -> bool:
    """Waits until it holds; False if `patience_s` ended first."""
    deadline_s = time.monotonic() + (patience_s or float('inf'))
    while not condition():
      if time.monotonic() > deadline_s:
        return False
      await asyncio.sleep(POLL_S)
    return True

  def since(self, process: str, name: str, at: int = 0) -> list[dict]:
    """Facts of a process from the `at`-th of all facts on."""
    return [fact for who, fact in self.facts[at:] if (who, fact['name']) == (process, name)]

  def count(self, process: str, name: str, **values: Any) -> int:
    return sum(values.items() <= fact.items() for fact in self.since(process, name))

  def _listen(self, name: str, line: str) -> None:
    self.said.append(f'[{name}] {line}')
    if self._display:
      self._display.listen(name, line)


def with_flag(
  program: supervisor_lib.LocalProgram, name: str, value: str
) -> supervisor_lib.LocalProgram:
  """The program with another value of a flag that its command has."""
  command = [
    f'--{name}={value}' if word.startswith(f'--{name}=') else word for word in program.command
  ]
  return dataclasses.replace(program, command=command)


def with_more(program: supervisor_lib.LocalProgram, *words: str) -> supervisor_lib.LocalProgram:
  """The program with more flags."""
  return dataclasses.replace(program, command=[*program.command, *words])


Conducted = TypeVar('Conducted', bound=Conductor)


def play(
  workdir: pathlib.Path,
  make: Callable[[pathlib.Path, records_lib.Recorder], Conducted],
  deadline_s: float | None = None,
) -> tuple[Conducted, Run]:
  """Conducts a run in a new folder to its end.

  Raises:
    EndedEarly: it ended before all was carried out.
    TimeoutError: it did not end in time.
  """
  with contextlib.closing(
    records_lib.Recorder(workdir, local_run.SUPERVISOR, tensorboard=False)
  ) as recorder:
    conducted = make(workdir, recorder)
    outcome = asyncio.run(_play(conducted, deadline_s))
  return conducted, Run(workdir, outcome, conducted.said, records_lib.TailAll(workdir).read())


async def _play(conducted: Conductor, deadline_s: float | None) -> supervisor_lib.Outcome:
  running, playing, watching = tasks = [
    asyncio.create_task(coroutine)
    for coroutine in (conducted.supervisor.run(), conducted.carry_out(), conducted.watch())
  ]
  try:
    async with asyncio.timeout(deadline_s):
      await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
      if watching.done():
        watching.result()  # it raises
      if not playing.done():
        raise EndedEarly(await running, conducted.said)
      playing.result()
      return await running
  finally:
    for task in (playing, watching, *([] if running.done() else [running])):
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await conducted.close()
    conducted.look()
