"""Carries out a chaos plan on real processes: one syncer, and learners behind faulty proxies.

The plan is the same data that drives the simulated world (plans.py); its clock starts when all
learners have joined. The faults of one learner come one after the other: the next waits until its
victim has been merged again, and none ends before the untouched learners have stepped and been
merged, so a plan means the same on a slow machine. Then the run is healed, and the learners leave.
"""

import asyncio
import pathlib
import time
from collections.abc import Sequence

from diloco_jax.config import run_config
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.process import run_folder
from diloco_jax.protocol import ids
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import live, programs, run_facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.verification import plans
from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.faults import conductor as conductor_lib
from diloco_jax.verification.faults import proxy as proxy_lib

SECOND_NS = plans.SECOND_NS
PATIENCE_S = 120.0  # for a process to start, compile and be merged
EVENTS_AWAITED = 3  # steps of every untouched learner, and merges, that each fault waits for
# Aims at a payload: flipping a byte of gRPC's own frames may have no effect.
FLIP_BYTES = 2048

_NETWORK = {
  'cut_up': (proxy_lib.Toxics(cut=True), proxy_lib.Toxics()),
  'cut_down': (proxy_lib.Toxics(), proxy_lib.Toxics(cut=True)),
  'partition': (proxy_lib.Toxics(cut=True), proxy_lib.Toxics(cut=True)),
}
_LOSES = ('kill', 'preempt', 'freeze', 'replace', 'reset', 'corrupt', *_NETWORK)


class ChaosRun(conductor_lib.Conductor):
  """A run with its plan, which waits for facts rather than for times.

  Attributes:
    run: its facts so far.
    fault_runs: the faults as they were carried out.
    healed_s: the end of the last fault; healed_ns: the same on the clock of the tapes.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    recorder: records_lib.Recorder,
    config: run_config.Config,
    config_flags: Sequence[str],
    plan: list[plans.Fault],
    display: live.Display,
  ):
    names = run_config.learner_ids(config.sync.learners)
    super().__init__(workdir, recorder, config, config_flags, self._connect_to_proxy, display)
    address = workdir / run_folder.ADDRESS
    syncer = lambda: address.read_text('utf-8').strip()
    self._proxies = {name: proxy_lib.Proxy(syncer) for name in names}
    self._plan = plan
    self._others = [name for name in names if all(fault.node != name for fault in plan)]
    self._recorder = recorder
    self.run = run_facts.RunFacts(names, config.train.steps)
    self.fault_runs: list[chaos_report.FaultRun] = []
    self.healed_s, self.healed_ns = 0.0, 0

  async def carry_out(self) -> None:
    for name, proxy in self._proxies.items():
      await proxy.start()
      path = _proxy_file(self.workdir, name)
      path.parent.mkdir(exist_ok=True)
      path.write_text(proxy.address + '\n', 'utf-8')
    await self.until(lambda: chaos_report.began_s(self.run) is not None, PATIENCE_S)
    began_s = self._now_s()
    async with asyncio.TaskGroup() as tasks:
      for node in sorted({fault.node for fault in self._plan}):
        tasks.create_task(self._run_faults_of(node, began_s))
    await self.nemesis.heal()
    for proxy in self._proxies.values():
      proxy.heal()
    self.healed_s, self.healed_ns = self._now_s(), time.monotonic_ns()
    await self.until(lambda: self._have_continued([*self.run.learners], self.healed_s), PATIENCE_S)
    self.supervisor.retire()

  async def close(self) -> None:
    await super().close()
    for proxy in self._proxies.values():
      await proxy.close()

  def look(self) -> None:
    seen = len(self.facts)
    super().look()
    self.run.take(self.facts[seen:])

  def verdict(self) -> tuple[str, bool]:
    """The report and the judge's verdict, in text; whether every promise was kept."""
    lines = [chaos_report.text(self.run, self.fault_runs)]
    complaints = chaos_report.complaints(self.run, self.fault_runs)
    try:
      verdict = conductor_lib.judge(self.workdir, self.healed_ns)
    except (ValueError, tape_lib.TapeError) as error:
      return '\n'.join([*lines, f'VIOLATION: {error}']), False
    folders = [self.workdir, *sorted((self.workdir / conductor_lib.SECONDS).glob('*'))]
    replay = f'diloco replay {" ".join(map(str, folders))}'
    lines += [verdict.text(), f'Every machine can be replayed from its tape: {replay}']
    lines += [f'NOT AS PROMISED: {complaint}' for complaint in complaints]
    return '\n'.join(lines), not complaints and verdict.broken is None

  def _connect_to_proxy(self, program: supervisor_lib.LocalProgram) -> supervisor_lib.LocalProgram:
    if program.name == ids.SYNCER:
      host = files_lib.loopback().rpartition(':')[0]
      return conductor_lib.with_more(program, f'--listen={host}:0', '--plaintext_loopback')
    address = f'file:{_proxy_file(self.workdir, program.name)}'
    return conductor_lib.with_more(
      conductor_lib.with_flag(program, 'syncer', address), '--plaintext_loopback'
    )

  def _now_s(self) -> float:
    return time.time() - self.run.began_s

  async def _run_faults_of(self, node: str, began_s: float) -> None:
    """Carries out all faults of one learner, one after the other."""
    for fault in sorted(self._plan, key=lambda fault: fault.at_ns):
      if fault.node == node:
        at_s = began_s + fault.at_ns / SECOND_NS
        await self.until(lambda at_s=at_s: self._now_s() >= at_s)
        fault_run = chaos_report.FaultRun(
          kind=fault.kind, node=node, amount=fault.amount, began_s=self._now_s()
        )
        self.fault_runs.append(fault_run)
        fault_run.has_victim = self._begin(fault)
        if fault_run.has_victim:
          await self._run_fault(fault, fault_run)
        self._recorder.report(fault_run)

  async def _run_fault(self, fault: plans.Fault, fault_run: chaos_report.FaultRun) -> None:
    """Ends a fault that has begun, and waits until its victim has recovered from it."""
    node, victim = fault.node, self.run.learners[fault.node]
    self._listen('chaos', f'{node}: {fault.kind} begins')
    await self.until(lambda: self._now_s() >= fault_run.began_s + fault.for_ns / SECOND_NS)
    await self.until(lambda: self._has_had_effect(fault, fault_run.began_s), PATIENCE_S)
    await self._undo(fault)
    fault_run.ended_s = self._now_s()
    self._listen('chaos', f'{node}: {fault.kind} is over')
    if fault.kind == 'replace':
      await self.until(lambda: victim.processes[-1].ended, PATIENCE_S)
    if await self.until(lambda: self._count_since(victim.merged_s, fault_run.ended_s), PATIENCE_S):
      fault_run.recovered_s = next(t for t in victim.merged_s if t >= fault_run.ended_s)

  def _has_had_effect(self, fault: plans.Fault, began_s: float) -> bool:
    """The fault had its effect, and the untouched learners have continued meanwhile."""
    victim = self.run.learners[fault.node]
    lost = fault.kind not in _LOSES or any(t >= began_s for t, _ in victim.lost)
    second = fault.kind != 'replace' or self._has_taken_over(victim, began_s)
    return lost and second and self._have_continued(self._others, began_s)

  def _has_taken_over(self, victim: programs.LearnerFacts, began_s: float) -> bool:
    joined_s = victim.joined[-1][0]
    return joined_s >= began_s and self._count_since(victim.merged_s, joined_s) > 0

  def _have_continued(self, names: list[str], since_s: float) -> bool:
    """Enough merges since then, each of these learners in enough of them, and the untouched ones
    step."""
    times = [self.run.merges_s, *(self.run.learners[name].merged_s for name in names)]
    times += [chaos_report.step_times(self.run, name) for name in self._others]
    return all(self._count_since(kind, since_s) >= EVENTS_AWAITED for kind in times)

  def _count_since(self, times: list[float], since_s: float) -> int:
    return chaos_report.within(times, since_s, self._now_s())

  def _begin(self, fault: plans.Fault) -> bool:
    """Begins a fault; returns whether its victim is running."""
    node, nemesis, proxy = fault.node, self.nemesis, self._proxies[fault.node]
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
      case 'throttle':
        _set(proxy, *[proxy_lib.Toxics(rate=fault.amount)] * 2)
      case _:
        _set(proxy, *_NETWORK[fault.kind])
    return True

  async def _undo(self, fault: plans.Fault) -> None:
    match fault.kind:
      case 'freeze' | 'replace':
        self.nemesis.thaw(fault.node)
      case 'slow':
        await self.nemesis.unslow(fault.node)
      case _:
        self._proxies[fault.node].heal()


def _set(proxy: proxy_lib.Proxy, up: proxy_lib.Toxics, down: proxy_lib.Toxics) -> None:
  proxy.up.set(up)
  proxy.down.set(down)


def _proxy_file(workdir: pathlib.Path, name: str) -> pathlib.Path:
  return workdir / 'proxies' / name
