"""What a chaos run looked like to the learners that were not hit: what was promised, and words.

Times are those of the run's facts (report/run_facts.py), which the processes themselves wrote down
while it happened.
"""

import bisect
import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from diloco_jax.protocol import facts
from diloco_jax.report import run_facts


@dataclasses.dataclass(slots=True, kw_only=True)
class FaultRun:
  """One fault as it was carried out. `found`: it found its victim."""

  kind: str
  node: str
  amount: int = 0
  began_s: float = 0.0
  ended_s: float = 0.0
  found: bool = True
  recovered_s: float | None = None  # its victim took part in a merge again


def began_s(run: run_facts.RunFacts) -> float | None:
  """When the last of the learners had joined for the first time; None: not all have."""
  joined = [learner.joined for learner in run.learners.values()]
  return max(times[0][0] for times in joined) if all(joined) else None


def step_times(run: run_facts.RunFacts, name: str) -> list[float]:
  return [step.at_s for step in run.learners[name].steps]


def within(times: list, began: float, ended: float) -> int:
  """How many of these ordered times are in a span.

  >>> within([1, 5, 7, 9], 5, 9)
  3
  """
  return bisect.bisect_right(times, ended) - bisect.bisect_left(times, began)


def untouched(run: run_facts.RunFacts, fault_runs: list[FaultRun]) -> list[str]:
  return [name for name in run.learners if all(fault_run.node != name for fault_run in fault_runs)]


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
  """How a learner stepped in a span: steps, and times between the ends of two of them in s."""

  steps: int
  median_s: float
  longest_s: float


def pace(times: list[float], began_s: float, ended_s: float) -> Pace:
  """The pace in a span, whose borders count as steps: nothing is as long as standing still."""
  inside = [t for t in times if began_s <= t <= ended_s]
  gaps = [b - a for a, b in zip([began_s, *inside], [*inside, ended_s])]
  return Pace(len(inside), statistics.median(gaps), max(gaps))


def balance(ledger: Mapping[str, Any]) -> int:
  """Fragment-tokens of a ledger fact that are unaccounted for; 0 if the books are in order."""
  settled = ledger['merged'] + sum(ledger['discarded'].values()) + ledger['unsettled']
  return ledger['fragments'] * ledger['trained'] - settled


def text(run: run_facts.RunFacts, fault_runs: list[FaultRun], healed_s: float) -> str:
  """The run for a stranger: what was done to whom, and what the others made of it."""
  start_s = began_s(run) or 0.0
  lines = ['', 'What was done, in seconds since all learners had joined, and what happened then:']
  others = untouched(run, fault_runs)
  for fault_run in sorted(fault_runs, key=lambda fault_run: fault_run.began_s):
    lines.append('  ' + _describe_fault_run(run, fault_run, start_s, others))
  lines.append('Learners that nothing was done to, from the first fault to the end of the last:')
  first_s = min((fault_run.began_s for fault_run in fault_runs), default=start_s)
  for name in others:
    found = pace(step_times(run, name), first_s, healed_s)
    lines.append(
      f'  {name}: {found.steps} steps, median {found.median_s * 1e3:.0f} ms apart, '
      f'longest gap {found.longest_s * 1e3:.0f} ms'
    )
  return '\n'.join([*lines, *_books(run.ledger)])


def _describe_fault_run(
  run: run_facts.RunFacts, fault_run: FaultRun, start_s: float, others: list[str]
) -> str:
  def at(at_s: float) -> str:
    return f'{at_s - start_s:6.1f}'

  what = f'{fault_run.kind} {fault_run.node}'
  if not fault_run.found:
    return f'{at(fault_run.began_s)}         {what:18} found no process'
  span = (fault_run.began_s, fault_run.ended_s)
  steps = ', '.join(f'{name} {within(step_times(run, name), *span)}' for name in others)
  back = (
    'never took part again'
    if fault_run.recovered_s is None
    else (f'took part again at {at(fault_run.recovered_s).strip()}')
  )
  return (
    f'{at(span[0])} -{at(span[1])} {what:18} {within(run.merges_s, *span)} merges; '
    f'steps: {steps}; {fault_run.node} {back}'
  )


def _books(ledger: facts.Ledger | None) -> list[str]:
  if ledger is None:
    return ['There is no ledger: the syncer has not told its books.']
  discarded = ', '.join(f'{reason} {count}' for reason, count in ledger.discarded.items())
  lines = [
    f'Tokens: {ledger.trained} trained, each in {ledger.fragments} fragments = '
    f'{ledger.merged} merged + {sum(ledger.discarded.values())} discarded ({discarded}) + '
    f'{ledger.unsettled} not yet settled',
  ]
  if missing := balance(dataclasses.asdict(ledger)):
    lines.append(f'THE BOOKS DO NOT ADD UP: {missing} fragment-tokens are unaccounted for')
  return lines


def complaints(run: run_facts.RunFacts, fault_runs: list[FaultRun]) -> list[str]:
  """What was promised and did not happen, in words: the others go on, victims come back, no token
  is unaccounted for."""
  found = []
  for fault_run in fault_runs:
    if not fault_run.found:
      continue
    what, span = f'{fault_run.kind} of {fault_run.node}', (fault_run.began_s, fault_run.ended_s)
    if not within(run.merges_s, *span):
      found.append(f'nothing was merged during the {what}')
    found += [
      f'{name} took no step during the {what}'
      for name in untouched(run, fault_runs)
      if not within(step_times(run, name), *span)
    ]
    if fault_run.recovered_s is None:
      found.append(f'after the {what} it never took part again')
  ledger = run.ledger
  if ledger is None or ledger.unsettled or balance(dataclasses.asdict(ledger)):
    found.append('the books do not add up, or are not closed')
  return found
