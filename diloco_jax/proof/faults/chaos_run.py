"""Carries out a chaos plan on real processes: one syncer, and learners behind faulty proxies.

The plan is the same data that drives the simulated world (plans.py); its clock starts when all
learners have joined. Faults of one learner come one after the other: the next waits until its
victim has taken part in a merge again, and none ends before the others have shown that they go on,
so a plan means the same on a slow machine. Then everything is healed, and the learners leave.
"""

import asyncio
import pathlib
import time
from collections.abc import Sequence

from diloco_jax.config import run_config
from diloco_jax.launch import local
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.proof import plans
from diloco_jax.proof.faults import chaos_report, conductor
from diloco_jax.proof.faults import proxy as proxy_lib
from diloco_jax.protocol.tape import tape
from diloco_jax.report import live, records, run_facts

SECOND_NS = plans.SECOND_NS
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


class ChaosRun(conductor.Conductor):
  """A run with its plan, which waits for facts rather than for times.

  Attributes:
    run: its facts so far.
    fault runs: the faults as they were carried out.
    healed_s: from when on nothing was broken on purpose, and healed_ns: on the clock of the tapes.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    recorder: records.Recorder,
    config: run_config.Config,
    config_flags: Sequence[str],
    plan: list[plans.Fault],
    display: live.Display,
  ):
    names = run_config.learner_ids(config.sync.learners)
    super().__init__(
      workdir, recorder, config, config_flags, change=self._behind_its_proxy, display=display
    )
    address = workdir / local.ADDRESS
    self._proxies = {name: proxy_lib.Proxy(lambda: address.read_text().strip()) for name in names}
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
      path.write_text(proxy.address + '\n')
    await self.until(lambda: chaos_report.began_s(self.run) is not None, PATIENCE_S)
    began_s = self._now_s()
    async with asyncio.TaskGroup() as tasks:
      for node in sorted({fault.node for fault in self._plan}):
        tasks.create_task(self._torment(node, began_s))
    await self.nemesis.heal()
    for proxy in self._proxies.values():
      proxy.heal()
    self.healed_s, self.healed_ns = self._now_s(), time.monotonic_ns()
    await self.until(lambda: self._go_on(list(self._proxies), self.healed_s), PATIENCE_S)
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
    """What happened and what the oracle says of it, in words; whether all was as promised."""
    lines = [chaos_report.text(self.run, self.fault_runs, self.healed_s)]
    complaints = chaos_report.complaints(self.run, self.fault_runs)
    try:
      verdict = conductor.judge(self.workdir, self.healed_ns)
    except (ValueError, tape.TapeError) as error:
      return '\n'.join([*lines, f'VIOLATION: {error}']), False
    replay = f'python -m experiments.replay {self.workdir}'
    lines += [verdict.text(), f'Every machine can be replayed from its tape: {replay}']
    lines += [f'NOT AS PROMISED: {complaint}' for complaint in complaints]
    return '\n'.join(lines), not complaints and verdict.broken is None

  def _behind_its_proxy(self, program: supervisor_lib.Program) -> supervisor_lib.Program:
    if program.name == supervisor_lib.SYNCER:
      return program
    address = f'file:{_proxy_file(self.workdir, program.name)}'
    return conductor.with_flag(program, 'syncer', address)

  def _now_s(self) -> float:
    return time.time() - self.run.began_s

  async def _torment(self, node: str, began_s: float) -> None:
    """All faults of one learner, one after the other."""
    for fault in sorted(self._plan, key=lambda fault: fault.at_ns):
      if fault.node == node:
        at_s = began_s + fault.at_ns / SECOND_NS
        await self.until(lambda at_s=at_s: self._now_s() >= at_s)
        fault_run = chaos_report.FaultRun(
          kind=fault.kind, node=node, amount=fault.amount, began_s=self._now_s()
        )
        self.fault_runs.append(fault_run)
        fault_run.found = self._begin(fault)
        if fault_run.found:
          await self._one(fault, fault_run)
        self._recorder.report(fault_run)

  async def _one(self, fault: plans.Fault, fault_run: chaos_report.FaultRun) -> None:
    """A fault that has begun, until its victim has recovered from it."""
    node, victim = fault.node, self.run.learners[fault.node]
    self._listen('chaos', f'{node}: {fault.kind} begins')
    await self.until(lambda: self._now_s() >= fault_run.began_s + fault.for_ns / SECOND_NS)
    await self.until(lambda: self._shown(fault, fault_run.began_s), PATIENCE_S)
    await self._undo(fault)
    fault_run.ended_s = self._now_s()
    self._listen('chaos', f'{node}: {fault.kind} is over')
    if fault.kind == 'replace':
      await self.until(lambda: victim.processes[-1].ended, PATIENCE_S)
    if await self.until(lambda: self._since(victim.merged_s, fault_run.ended_s), PATIENCE_S):
      fault_run.recovered_s = next(t for t in victim.merged_s if t >= fault_run.ended_s)

  def _shown(self, fault: plans.Fault, began_s: float) -> bool:
    """The fault has had its effect, and the other learners have gone on meanwhile."""
    victim = self.run.learners[fault.node]
    lost = fault.kind not in _LOSES or any(t >= began_s for t, _ in victim.lost)
    second = fault.kind != 'replace' or self._took_over(victim, began_s)
    return lost and second and self._go_on(self._others, began_s)

  def _took_over(self, victim: run_facts.Learner, began_s: float) -> bool:
    joined_s = victim.joined[-1][0]
    return joined_s >= began_s and self._since(victim.merged_s, joined_s) > 0

  def _go_on(self, names: list[str], since_s: float) -> bool:
    """Merges go on, these learners are merged, and the untouched ones step."""
    times = [self.run.merges_s, *(self.run.learners[name].merged_s for name in names)]
    times += [chaos_report.step_times(self.run, name) for name in self._others]
    return all(self._since(one, since_s) >= SHOWS for one in times)

  def _since(self, times: list[float], since_s: float) -> int:
    return chaos_report.within(times, since_s, self._now_s())

  def _begin(self, fault: plans.Fault) -> bool:
    """Does it; whether it found its victim."""
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
      case 'delay':
        _set(proxy, *[proxy_lib.Toxics(delay_s=amount_s)] * 2)
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
