"""Carries out a chaos plan on real processes, and lets an oracle judge their tapes.

    python -m experiments.chaos --plan=kill            # one fault, three learners of `tiny`
    python -m experiments.chaos --plan=freeze,cut_up   # several, in turn against all but the first
    python -m experiments.chaos --plan=storm           # one of each kind
    python -m experiments.chaos --seed=3               # drawn: what the seed says, to all but one

One syncer and M learners, each a process behind a faulty proxy of its own (proof/faults/proxy.py). The
plan is the same data that drives the simulated world (proof/faults/plans.py); its clock starts when all
learners have joined. Faults of one learner come one after the other: the next waits until its
victim has taken part in a merge again, and none ends before the others have shown that they go on,
so a plan means the same on a slow machine. Then everything is healed, the learners leave, and the
oracle (proof/checks/judge_tapes.py) reads every tape.

Exit codes: 0 all invariants held and the others never stood still, 1 not so, 42 a wrong command or
a process that refused to start, 130 interrupted.
"""

import asyncio
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable

from absl import flags

from diloco_jax.config import run_config
from diloco_jax.launch import local
from diloco_jax.launch import program as program_lib
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.proof.checks import judge_tapes
from diloco_jax.proof.faults import chaos_report, plans
from diloco_jax.proof.faults import inject_faults as inject_faults_lib
from diloco_jax.proof.faults import proxy as proxy_lib
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import live
from diloco_jax.report import records as records_lib
from diloco_jax.report import run_state as run_state_lib
from diloco_jax.storage import tapes

_DEFAULT_CONFIG = 'experiments/configs/stdlib_lm.py:tiny'
# Enough steps for any plan (the learners leave when it is over), leases that end during a fault,
# and syncs that have the time to wait for more than one learner (tau = 3).
_DEFAULTS = (
  '--config.train.steps=1000000',
  '--config.train.log_every=200',
  '--config.train.eval_every=0',
  '--config.train.checkpoint_every_steps=100',
  '--config.sync.lease_s=1.5',
  '--config.sync.heartbeat_s=0.3',
  '--config.sync.checkpoint_every_syncs=100',
  '--config.sync.overlap=3',
)
SECOND_NS = plans.SECOND_NS
TICK_S = 0.05
PATIENCE_S = 120.0  # for a process to start, compile and take part; nothing is wrong before that
SHOWS = 3  # steps of every untouched learner, and merges, that each fault waits for
# Aims at a payload: a byte of gRPC's own bookkeeping may be flipped without any effect.
FLIP_BYTES = 2048

_NETWORK = {
  'cut_up': (proxy_lib.Toxics(cut=True), proxy_lib.Toxics()),
  'cut_down': (proxy_lib.Toxics(), proxy_lib.Toxics(cut=True)),
  'partition': (proxy_lib.Toxics(cut=True), proxy_lib.Toxics(cut=True)),
}
_LOSES = ('kill', 'preempt', 'freeze', 'replace', 'reset', 'corrupt', *_NETWORK)

program_lib.define_config()
_WORKDIR = flags.DEFINE_string('workdir', '', 'where the run is kept; default runs/NAME-DATE-TIME')
_SEED = flags.DEFINE_integer('seed', None, 'draw the plan from this seed')
_PLAN = flags.DEFINE_string(
  'plan', plans.STORM, 'faults, joined by commas: ' + ', '.join((*plans.REAL_KINDS, plans.STORM))
)
_FAULT_S = flags.DEFINE_float('fault_s', 4.0, 'how long each fault of --plan lasts at least', 0.1)
_DURATION_S = flags.DEFINE_float('duration_s', 40.0, 'about how long a drawn plan lasts', 1.0)


class Conductor:
  """Carries out a plan on a running supervisor, waiting for facts rather than for times."""

  def __init__(
    self,
    plan: list[plans.Fault],
    workdir: pathlib.Path,
    nemesis: inject_faults_lib.Nemesis,
    proxies: dict[str, proxy_lib.Proxy],
    recorder: records_lib.Recorder,
    say: Callable[[str], None],
  ):
    self._plan = plan
    self._nemesis = nemesis
    self._proxies = proxies
    self._recorder = recorder
    self._say = say
    self._tails = records_lib.TailAll(workdir)
    self.facts = chaos_report.Facts(list(proxies))
    self.episodes: list[chaos_report.Episode] = []
    self.healed_ns: int | None = None

  async def run(self) -> None:
    """Returns when the plan is over, everything is healed, and everybody has taken part again."""
    await self._until(lambda: self.facts.began_ns is not None, PATIENCE_S)
    began_ns = time.monotonic_ns()
    nodes = sorted({fault.node for fault in self._plan})
    self._others = [name for name in self._proxies if name not in nodes]
    async with asyncio.TaskGroup() as tasks:
      for node in nodes:
        tasks.create_task(self._torment(node, began_ns))
    await self._nemesis.heal()
    for proxy in self._proxies.values():
      proxy.heal()
    self.healed_ns = time.monotonic_ns()
    await self._until(lambda: self._go_on(list(self._proxies), self.healed_ns), PATIENCE_S)

  def look(self) -> None:
    """Takes what the processes have written down since."""
    for process, fact in self._tails.read():
      self.facts.take(process, fact)

  async def _torment(self, node: str, began_ns: int) -> None:
    """All faults of one learner, one after the other."""
    for fault in sorted(self._plan, key=lambda fault: fault.at_ns):
      if fault.node == node:
        await self._until(lambda f=fault: time.monotonic_ns() >= began_ns + f.at_ns)
        episode = chaos_report.Episode(
          kind=fault.kind, node=node, amount=fault.amount, began_ns=time.monotonic_ns()
        )
        self.episodes.append(episode)
        episode.found = self._begin(fault)
        if episode.found:
          await self._one(fault, episode)
        self._recorder.report('fault', dataclasses.asdict(episode))

  async def _one(self, fault: plans.Fault, episode: chaos_report.Episode) -> None:
    """A fault that has begun, until its victim has recovered from it."""
    node, facts = fault.node, self.facts
    self._say(f'{node}: {fault.kind} begins')
    await self._until(lambda: time.monotonic_ns() >= episode.began_ns + fault.for_ns)
    await self._until(lambda: self._shown(fault, episode.began_ns), PATIENCE_S)
    await self._undo(fault)
    episode.ended_ns = time.monotonic_ns()
    self._say(f'{node}: {fault.kind} is over')
    if fault.kind == 'replace':
      await self._until(lambda: facts.exits[node], PATIENCE_S)
    if await self._until(lambda: _since(facts.merged[node], episode.ended_ns), PATIENCE_S):
      episode.recovered_ns = next(t for t in facts.merged[node] if t >= episode.ended_ns)

  def _shown(self, fault: plans.Fault, began_ns: int) -> bool:
    """The fault has had its effect, and everybody else has gone on meanwhile."""
    lost = fault.kind not in _LOSES or any(t >= began_ns for t, _ in self.facts.lost[fault.node])
    second = fault.kind != 'replace' or self._took_over(fault.node, began_ns)
    return lost and second and self._go_on(self._others, began_ns)

  def _took_over(self, node: str, began_ns: int) -> bool:
    joined_ns = self.facts.joined[node][-1][0]
    return joined_ns >= began_ns and _since(self.facts.merged[node], joined_ns) > 0

  def _go_on(self, names: list[str], since_ns: int) -> bool:
    """Merges go on, and everybody of these steps and is merged."""
    counts = [self.facts.merges, *(self.facts.merged[name] for name in names)]
    counts += [self.facts.steps[name] for name in self._others]
    return all(_since(times_ns, since_ns) >= SHOWS for times_ns in counts)

  def _begin(self, fault: plans.Fault) -> bool:
    """Does it; whether it found its victim."""
    node, nemesis, proxy = fault.node, self._nemesis, self._proxies[fault.node]
    down_s, amount_s = fault.for_ns / SECOND_NS, fault.amount / SECOND_NS
    match fault.kind:
      case 'kill':
        return nemesis.kill(node, down_s)
      case 'preempt':
        return nemesis.terminate(node, amount_s, down_s)
      case 'freeze':
        return nemesis.freeze(node)
      case 'replace':
        return nemesis.freeze(node) and nemesis.start_second(node)
      case 'slow':
        return nemesis.slow(node, fault.amount)
      case 'reset':
        proxy.reset()
      case 'corrupt':
        proxy.up.flip(FLIP_BYTES)
      case 'delay':
        self._set(proxy, *[proxy_lib.Toxics(delay_s=amount_s)] * 2)
      case 'throttle':
        self._set(proxy, *[proxy_lib.Toxics(rate=fault.amount)] * 2)
      case _:
        self._set(proxy, *_NETWORK[fault.kind])
    return True

  def _set(self, proxy: proxy_lib.Proxy, up: proxy_lib.Toxics, down: proxy_lib.Toxics) -> None:
    proxy.up.set(up)
    proxy.down.set(down)

  async def _undo(self, fault: plans.Fault) -> None:
    match fault.kind:
      case 'freeze' | 'replace':
        self._nemesis.thaw(fault.node)
      case 'slow':
        await self._nemesis.unslow(fault.node)
      case _:
        self._proxies[fault.node].heal()

  async def _until(self, condition: Callable[[], object], patience_s: float | None = None) -> bool:
    """Until it holds; False if patience ended before."""
    deadline_s = time.monotonic() + (patience_s or float('inf'))
    self.look()
    while not condition():
      if time.monotonic() > deadline_s:
        return False
      await asyncio.sleep(TICK_S)
      self.look()
    return True


def _since(times_ns: list[int], since_ns: int) -> int:
  return chaos_report.within(times_ns, since_ns, time.monotonic_ns())


# --- The processes --------------------------------------------------------------------------------


def _programs(
  config: run_config.Config, workdir: pathlib.Path, config_flags: list[str]
) -> dict[str, supervisor_lib.Program]:
  """Syncer and learners, each learner behind its own proxy."""
  found = {}
  for program in local.programs(config, workdir, config_flags, alone=False):
    address = f'file:{_proxy_file(workdir, program.name)}'
    found[program.name] = _with_flag(program, 'syncer', address)
  return found


def _second(program: supervisor_lib.Program, workdir: pathlib.Path) -> supervisor_lib.Program:
  """Another process for the learner id of this program, on a disk of its own."""
  folder = _second_folder(workdir) / program.name
  second = _with_flag(program, 'workdir', str(folder))
  return dataclasses.replace(second, name=f'{program.name}-second')


def _with_flag(program: supervisor_lib.Program, name: str, value: str) -> supervisor_lib.Program:
  command = [
    f'--{name}={value}' if word.startswith(f'--{name}=') else word for word in program.command
  ]
  return dataclasses.replace(program, command=command)


def _second_folder(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / 'seconds'


def _proxy_file(workdir: pathlib.Path, name: str) -> pathlib.Path:
  return workdir / 'proxies' / name


async def _start_proxies(workdir: pathlib.Path, names: list[str]) -> dict[str, proxy_lib.Proxy]:
  address = workdir / local.ADDRESS
  proxies = {name: proxy_lib.Proxy(lambda: address.read_text().strip()) for name in names}
  for name, proxy in proxies.items():
    await proxy.start()
    path = _proxy_file(workdir, name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(proxy.address + '\n')
  return proxies


async def _run(
  config: run_config.Config,
  workdir: pathlib.Path,
  plan: list[plans.Fault],
  recorder: records_lib.Recorder,
  display: live.Display,
) -> tuple[supervisor_lib.Outcome, Conductor]:
  """The run with its plan, to its end."""
  names = run_config.learner_ids(config.sync.learners)
  programs = _programs(config, workdir, program_lib.config_flags_of_this_process())
  proxies = await _start_proxies(workdir, names)
  supervisor = supervisor_lib.Supervisor(
    list(programs.values()),
    workdir,
    run_state_lib.RunView(names, config.train.steps),
    recorder,
    listen=display.listen,
    tick=display.tick,
  )
  nemesis = inject_faults_lib.Nemesis(supervisor, lambda name: _second(programs[name], workdir))
  conductor = Conductor(
    plan, workdir, nemesis, proxies, recorder, lambda text: display.listen('chaos', text)
  )
  running = asyncio.create_task(supervisor.run())
  conducting = asyncio.create_task(conductor.run())
  await asyncio.wait({running, conducting}, return_when=asyncio.FIRST_COMPLETED)
  conducting.cancel()
  await nemesis.heal()
  supervisor.retire()
  outcome = await running
  for proxy in proxies.values():
    await proxy.close()
  await asyncio.gather(conducting, return_exceptions=True)
  if not conducting.cancelled() and conducting.exception():
    raise conducting.exception()
  conductor.look()
  return outcome, conductor


# --- What came of it ------------------------------------------------------------------------------


def judge(workdir: pathlib.Path, healed_ns: int | None) -> judge_tapes.Verdict:
  """The oracle's verdict on all tapes of a run."""
  tales = []
  for folder in (workdir, *sorted(_second_folder(workdir).glob('*'))):
    for life in tapes.find(folder):
      reader = tapes.read(life)
      if reader.header is not None:
        name = life.name if folder == workdir else f'{life.name} (second)'
        tales.append(judge_tapes.Tale(name, reader.header.start, reader))
  return judge_tapes.judge(tales, healed_ns)


def main(argv: list[str]) -> int:
  del argv
  config = program_lib.config()
  names = run_config.learner_ids(config.sync.learners)
  with program_lib.never_retry(ValueError):
    if len(names) < 2:
      raise ValueError(f'sync.learners is {len(names)}, chaos needs 2: one to hit, one to go on')
    if _SEED.value is None:
      plan = plans.named(_PLAN.value, names, round(_FAULT_S.value * SECOND_NS))
    else:
      plan = plans.draw(_SEED.value, names, round(_DURATION_S.value * SECOND_NS))
    config.name = f'chaos-{_PLAN.value if _SEED.value is None else _SEED.value}'
    workdir = local.open_workdir(
      config, pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None, resume=False
    )
  print(f'chaos in {workdir}: {len(plan)} faults', flush=True)
  display = live.make()
  recorder = records_lib.Recorder(workdir, local.SUPERVISOR, tensorboard=False)
  try:
    outcome, conductor = asyncio.run(_run(config, workdir, plan, recorder, display))
  finally:
    display.close()
    recorder.close()
  if outcome.code:
    print(f'the run did not come to its end: {outcome.text}', file=sys.stderr)
    return outcome.code
  if conductor.healed_ns is None:
    print(
      f'the run ended before its plan did: raise --config.train.steps={config.train.steps}',
      file=sys.stderr,
    )
    return 1
  return _tell(workdir, conductor)


def _tell(workdir: pathlib.Path, conductor: Conductor) -> int:
  """Prints what happened and the verdict; the exit code."""
  print(chaos_report.text(conductor.facts, conductor.episodes, conductor.healed_ns))
  complaints = chaos_report.complaints(conductor.facts, conductor.episodes)
  try:
    verdict = judge(workdir, conductor.healed_ns)
  except (ValueError, tape_lib.TapeError) as error:
    print(f'VIOLATION: {error}')
    return 1
  print(verdict.text())
  print(f'Every machine can be replayed from its tape: python -m experiments.replay {workdir}')
  for complaint in complaints:
    print(f'NOT AS PROMISED: {complaint}')
  return int(bool(complaints or verdict.broken))


if __name__ == '__main__':
  sys.argv[1:1] = _DEFAULTS  # what the command line says comes later and wins
  program_lib.run_main(main, default_config=_DEFAULT_CONFIG)
