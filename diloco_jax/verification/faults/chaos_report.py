"""The report of a chaos run: every fault, the pace of the untouched learners, broken promises.

Times are those of the run's facts (report/run_facts.py), which the processes wrote during the run.
"""

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco_jax.protocol import facts
from diloco_jax.report import run_facts


@dataclasses.dataclass(slots=True, kw_only=True)
class FaultRun:
  """One fault as it was carried out. `found`: its victim was running."""

  kind: str
  node: str
  amount: int = 0
  began_s: float = 0.0
  ended_s: float = 0.0
  has_victim: bool = True
  recovered_s: float | None = None  # the first merge with its victim afterwards


def began_s(run: run_facts.RunFacts) -> float | None:
  """The time by which every learner had joined once; None: not every learner has."""
  joined = [learner.joined for learner in run.learners.values()]
  return max(times[0][0] for times in joined) if all(joined) else None


def step_times(run: run_facts.RunFacts, name: str) -> list[float]:
  return [step.at_s for step in run.learners[name].steps]


def within(times: list, began: float, ended: float) -> int:
  """The number of these ordered times in a span.

  >>> within([1, 5, 7, 9], 5, 9)
  3
  """
  return bisect.bisect_right(times, ended) - bisect.bisect_left(times, began)


def untouched(run: run_facts.RunFacts, fault_runs: list[FaultRun]) -> list[str]:
  return [name for name in run.learners if all(fault_run.node != name for fault_run in fault_runs)]


def balance(ledger: Mapping[str, Any]) -> int:
  """Fragment-tokens of a ledger fact that are unaccounted for; 0 if the ledger adds up."""
  settled = ledger['merged'] + sum(ledger['discarded'].values()) + ledger['unsettled']
  return ledger['fragments'] * ledger['trained'] - settled


def text(run: run_facts.RunFacts, fault_runs: list[FaultRun]) -> str:
  """The run in text: the faults, and what the untouched learners did meanwhile."""
  start_s = began_s(run) or 0.0
  lines = ['', 'Faults, in seconds since all learners had joined, and what happened meanwhile:']
  others = untouched(run, fault_runs)
  for fault_run in sorted(fault_runs, key=lambda fault_run: fault_run.began_s):
    lines.append('  ' + _describe_fault_run(run, fault_run, start_s, others))
  return '\n'.join([*lines, *_describe_ledger(run.ledger)])


def _describe_fault_run(
  run: run_facts.RunFacts, fault_run: FaultRun, start_s: float, others: list[str]
) -> str:
  def at(at_s: float) -> str:
    return f'{at_s - start_s:6.1f}'

  what = f'{fault_run.kind} {fault_run.node}'
  if not fault_run.has_victim:
    return f'{at(fault_run.began_s)}         {what:18} found no process'
  span = (fault_run.began_s, fault_run.ended_s)
  steps = ', '.join(f'{name} {within(step_times(run, name), *span)}' for name in others)
  recovery = (
    'was not merged again'
    if fault_run.recovered_s is None
    else (f'was merged again at {at(fault_run.recovered_s).strip()}')
  )
  return (
    f'{at(span[0])} -{at(span[1])} {what:18} {within(run.merges_s, *span)} merges; '
    f'steps: {steps}; {fault_run.node} {recovery}'
  )


def _describe_ledger(ledger: facts.Ledger | None) -> list[str]:
  if ledger is None:
    return ['There is no ledger: the syncer has reported none.']
  discarded = ', '.join(f'{reason} {count}' for reason, count in ledger.discarded.items())
  lines = [
    f'Tokens: {ledger.trained} trained, each in {ledger.fragments} fragments = '
    f'{ledger.merged} merged + {sum(ledger.discarded.values())} discarded ({discarded}) + '
    f'{ledger.unsettled} unsettled',
  ]
  if missing := balance(dataclasses.asdict(ledger)):
    lines.append(f'THE LEDGER DOES NOT ADD UP: {missing} fragment-tokens are unaccounted for')
  return lines


def complaints(run: run_facts.RunFacts, fault_runs: list[FaultRun]) -> list[str]:
  """The broken promises: untouched learners step and are merged during faults, victims recover, no
  token is unaccounted for."""
  lines = []
  for fault_run in fault_runs:
    if not fault_run.has_victim:
      continue
    what, span = f'{fault_run.kind} of {fault_run.node}', (fault_run.began_s, fault_run.ended_s)
    if not within(run.merges_s, *span):
      lines.append(f'no outer step during the {what}')
    lines += [
      f'{name} took no step during the {what}'
      for name in untouched(run, fault_runs)
      if not within(step_times(run, name), *span)
    ]
    if fault_run.recovered_s is None:
      lines.append(f'after the {what} it was not merged again')
  ledger = run.ledger
  if ledger is None or ledger.unsettled or balance(dataclasses.asdict(ledger)):
    lines.append('the ledger does not add up, or has unsettled tokens')
  return lines
