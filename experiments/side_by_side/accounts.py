"""Where the time of the chips went in a run with kills: pure functions of the facts of its run.

Every learner's time in the window with kills is the time of its steps, at its own rate without
failures, and the time that it lost: to its own kills, or waiting for others. So always

    goodput = steps / (rate * window) = 1 - lost to its own kills - lost waiting for others
"""

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

Facts = Sequence[tuple[str, dict[str, Any]]]
SECOND_NS = 1_000_000_000
LEAST_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
  """When it was measured, in ns of the facts: failure-free from `begin_ns` to `kills_ns`, with
  kills from there to `end_ns`; `kills` are (time, learner)."""

  begin_ns: int
  kills_ns: int
  end_ns: int
  kills: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
  """Of all learners together.

  Attributes:
    rate: steps a second without failures.
    cycle_s: from one step of a learner to the next, without failures; the floor, on a machine that
      is not busy.
    exchange_s: the part of it outside the step: the exchange and the barrier.
    steps: trained in the window.
    goodput: steps / (rate * seconds of the window).
    own, others: the shares of the time that were lost to a learner's own kills, and waiting for
      other learners.
    restarts_s: of each kill, the time to the next step of its learner, for those that had one.
    waits_s: a kill, the time that each other learner waited because of it.
    curve: the steps done by each second of the measurement.
  """

  rate: float
  cycle_s: float
  exchange_s: float
  steps: int
  goodput: float
  own: float
  others: float
  restarts_s: tuple[float, ...]
  waits_s: float
  curve: tuple[int, ...]


def account(facts: Facts, learners: Sequence[str], window: Window) -> Account:
  """Accounts for the steps of a run. Raises ValueError: too few of them without failures."""
  times = {name: _steps(facts, name) for name in learners}
  before = {name: _within(times[name], window.begin_ns, window.kills_ns) for name in learners}
  if least := [name for name, t in before.items() if len(t) < LEAST_STEPS]:
    raise ValueError(
      f'{least[0]} made {len(before[least[0]])} steps without failures, a rate needs '
      f'{LEAST_STEPS}: the machine is too busy, or the time without kills too short'
    )
  usual_ns = {name: (t[-1] - t[0]) / (len(t) - 1) for name, t in before.items()}
  step_s = statistics.mean(
    fact['seconds']
    for _, fact in facts
    if fact['name'] == 'step' and window.begin_ns <= fact['t_ns'] < window.kills_ns
  )
  cycle_s = statistics.mean(usual_ns.values()) / SECOND_NS
  span_ns = window.end_ns - window.kills_ns
  during = {name: _within(times[name], window.kills_ns, window.end_ns) for name in learners}
  own_ns = others_ns = 0.0
  for name in learners:
    killed = [at_ns for at_ns, victim in window.kills if victim == name]
    for since_ns, upto_ns in _gaps(during[name], window):
      excess_ns = upto_ns - since_ns - (usual_ns[name] if upto_ns < window.end_ns else 0)
      if any(since_ns <= at_ns < upto_ns for at_ns in killed):
        own_ns += excess_ns
      else:
        others_ns += excess_ns
  rate = sum(SECOND_NS / step_ns for step_ns in usual_ns.values())
  steps = sum(map(len, during.values()))
  chips_ns = span_ns * len(learners)
  useful_ns = sum(len(during[name]) * usual_ns[name] for name in learners)
  others = max(1, len(window.kills)) * max(1, len(learners) - 1)
  return Account(
    rate=rate,
    cycle_s=cycle_s,
    exchange_s=cycle_s - step_s,
    steps=steps,
    goodput=useful_ns / chips_ns,
    own=own_ns / chips_ns,
    others=others_ns / chips_ns,
    restarts_s=tuple(_restarts_s(times, window)),
    waits_s=others_ns / SECOND_NS / others,
    curve=tuple(_curve(times, window)),
  )


def merged(facts: Facts, fragments: int, window: Window) -> float:
  """The tokens that outer steps have brought into the model in the window with kills."""
  synced = (fact for _, fact in facts if fact['name'] == 'synced')
  inside = (fact for fact in synced if window.kills_ns <= fact['t_ns'] < window.end_ns)
  return sum(fact['tokens'] for fact in inside) / fragments


def clock_at(facts: Facts, at_ns: int) -> int:
  """The clock of the last step before a time."""
  steps = (fact for _, fact in facts if fact['name'] == 'step' and fact['t_ns'] < at_ns)
  return max(steps, key=lambda fact: fact['t_ns'])['step']


def _steps(facts: Facts, learner: str) -> list[int]:
  return sorted(f['t_ns'] for name, f in facts if name == learner and f['name'] == 'step')


def _within(times: list[int], since_ns: int, upto_ns: int) -> list[int]:
  return times[bisect.bisect_left(times, since_ns) : bisect.bisect_left(times, upto_ns)]


def _gaps(times: list[int], window: Window) -> Iterator[tuple[int, int]]:
  """From each step to the next; the first gap begins, and the last one ends, with the window."""
  yield from itertools.pairwise([window.kills_ns, *times, window.end_ns])


def _restarts_s(times: dict[str, list[int]], window: Window) -> Iterator[float]:
  for at_ns, learner in window.kills:
    later = _within(times[learner], at_ns, window.end_ns)
    if later:
      yield (later[0] - at_ns) / SECOND_NS


def _curve(times: dict[str, list[int]], window: Window) -> Iterator[int]:
  everything = sorted(itertools.chain(*times.values()))
  first = bisect.bisect_left(everything, window.begin_ns)
  for at_ns in range(window.begin_ns, window.end_ns + 1, SECOND_NS):
    yield bisect.bisect_left(everything, at_ns) - first
