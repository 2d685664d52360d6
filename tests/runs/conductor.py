"""A run of real processes that a test conducts: it does things to them, and waits for facts.

    class Kills(conductor.Conductor):
      async def carry_out(self):            # what happens to the run; `retire` ends it
        await self.until(lambda: self.count('syncer', 'outer') >= 4)
        assert self.supervisor.bring_down('l1', 0.1, 'killed by the test')
        ...
        self.supervisor.retire()

    kills, run = conductor.play(workdir, Kills, deadline_s)

A run has the variant `tiny` unless it says otherwise. What is left of it is what its processes have
written down: their facts (report/records.py) and their tapes, which the oracle reads.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from diloco_jax.config import run_config
from diloco_jax.launch import local
from diloco_jax.launch import standby as standby_lib
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.proof.checks import judge_tapes
from diloco_jax.report import records
from diloco_jax.report import run_state as run_state_lib
from diloco_jax.storage import tapes
from experiments.configs import stdlib_lm

POLL_S = 0.05
# Of runs that are ended from outside, with as little else to do as possible.
ENDLESS = {'train.steps': 1_000_000, 'train.log_every': 1_000, 'train.eval_every': 0}


def flags(overrides: dict[str, Any], variant: str = 'tiny') -> list[str]:
  """Of every program of such a run."""
  return [
    f'--config=experiments/configs/stdlib_lm.py:{variant}',
    *(f'--config.{name}={value}' for name, value in overrides.items()),
  ]


@dataclasses.dataclass
class Run:
  """What is left of a run: facts of every process, in the order of time."""

  workdir: pathlib.Path
  outcome: supervisor_lib.Outcome
  said: list[str]
  facts: list[tuple[str, dict]]

  def of(self, process: str, name: str) -> list[dict]:
    return [fact for who, fact in self.facts if (who, fact['name']) == (process, name)]

  def tapes(self) -> list[tapes.Life]:
    return tapes.find(self.workdir)

  def lost_versions(self) -> list[int]:
    """For each recovery of the syncer: how many versions that a learner had seen were not there."""
    seen: dict[int, int] = {}
    lost = []
    for _, fact in self.facts:
      if fact['name'] == 'adopted':
        seen[fact['fragment']] = max(seen.get(fact['fragment'], 0), fact['version'])
      elif fact['name'] == 'recovered':
        lost.append(sum(max(0, one - fact['versions'][p]) for p, one in seen.items()))
    return lost

  def verdict(self) -> judge_tapes.Verdict:
    """Of the oracle, on the tapes of all lives."""
    tales = []
    for life in self.tapes():
      reader = tapes.read(life)
      tales.append(judge_tapes.Tale(life.name, reader.header.start, reader))
    return judge_tapes.judge(tales)


class Conductor:
  """Starts a run under the supervisor.

  Attributes:
    facts: (process, fact) of everybody, up to now.
    said: every line of output, after the name of its process.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    recorder: records.Recorder,
    overrides: dict[str, Any],
    change: Callable[[supervisor_lib.Program], supervisor_lib.Program] = lambda program: program,
    variant: str = 'tiny',
    standby: bool = False,
  ):
    """`overrides`: fields of the config; `change`: what a program becomes before it is started;
    `standby`: a second process of the syncer stands by."""
    config = stdlib_lm.get_config(variant)
    config.sync.learners = overrides.get('sync.learners', config.sync.learners)
    programs = local.programs(config, workdir, flags(overrides, variant), False, standby)
    self.said: list[str] = []
    self.facts: list[tuple[str, dict]] = []
    self._tail = records.TailAll(workdir)
    self.supervisor = supervisor_lib.Supervisor(
      [change(one) for one in programs],
      workdir,
      run_state_lib.RunView(run_config.learner_ids(config.sync.learners), config.train.steps),
      recorder,
      listen=lambda name, line: self.said.append(f'[{name}] {line}'),
    )

  async def carry_out(self) -> None:
    """What happens to the run."""
    raise NotImplementedError

  def look(self) -> None:
    """Takes in what has been written down since."""
    self.facts += self._tail.read()

  async def watch(self) -> None:
    while True:
      self.look()
      await asyncio.sleep(POLL_S)

  async def until(self, condition: Callable[[], object]) -> None:
    while not condition():
      await asyncio.sleep(POLL_S)

  def since(self, process: str, name: str, at: int = 0) -> list[dict]:
    """Facts of a process from the `at`-th of all facts on."""
    return [fact for who, fact in self.facts[at:] if (who, fact['name']) == (process, name)]

  def stood_by(self) -> int:
    """How many processes have."""
    return sum(line.startswith(f'[syncer] {standby_lib.LINE}') for line in self.said)

  def count(self, process: str, name: str, **values: Any) -> int:
    return sum(values.items() <= fact.items() for fact in self.since(process, name))

  def merges(self, learner: str, at: int = 0) -> int:
    """Outer steps with a share of a learner, from the `at`-th of all facts on."""
    return sum(learner in fact['participants'] for fact in self.since('syncer', 'synced', at))


Conducted = TypeVar('Conducted', bound=Conductor)


def play(
  workdir: pathlib.Path,
  make: Callable[[pathlib.Path, records.Recorder], Conducted],
  deadline_s: float,
) -> tuple[Conducted, Run]:
  """Conducts a run in a new folder to its end."""
  with contextlib.closing(
    records.Recorder(workdir, local.SUPERVISOR, tensorboard=False)
  ) as recorder:
    conducted = make(workdir, recorder)
    outcome = asyncio.run(_play(conducted, deadline_s))
  return conducted, Run(workdir, outcome, conducted.said, records.TailAll(workdir).read())


async def _play(conducted: Conductor, deadline_s: float) -> supervisor_lib.Outcome:
  running, playing, watching = tasks = [
    asyncio.create_task(one)
    for one in (conducted.supervisor.run(), conducted.carry_out(), conducted.watch())
  ]
  try:
    async with asyncio.timeout(deadline_s):
      await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
      assert playing.done(), '\n'.join(conducted.said)
      playing.result()
      return await running
  finally:
    for task in (playing, watching, *([] if running.done() else [running])):
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
