"""Many seeds on all cores, and what a failed one has to say."""

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import os
from typing import Iterator, Sequence

from diloco_jax.protocol import actions
from diloco_jax.protocol import events
from diloco_jax.sim import marks as marks_lib
from diloco_jax.sim import observers
from diloco_jax.sim import seeds as seeds_lib
from diloco_jax.sim import swarm

CHUNK = 25
KEPT = 50


@dataclasses.dataclass
class Summary:
  """What a campaign has seen so far."""

  seeds: int = 0
  events: int = 0
  faults: int = 0
  failed: list[seeds_lib.Outcome] = dataclasses.field(default_factory=list)
  marks: marks_lib.Marks = dataclasses.field(default_factory=marks_lib.Marks)

  def add(self, other: 'Summary') -> None:
    self.seeds += other.seeds
    self.events += other.events
    self.faults += other.faults
    self.failed += other.failed
    self.marks.merge(other.marks)


def run_chunk(seeds: Sequence[int]) -> Summary:
  """Runs some seeds in this process."""
  summary = Summary()
  for seed in seeds:
    outcome = seeds_lib.run_seed(seed, [summary.marks])
    summary.seeds += 1
    summary.events += outcome.events
    summary.faults += len(outcome.faults)
    for kind in outcome.faults:
      summary.marks.fault(kind)
    if outcome.violation is not None:
      summary.failed.append(outcome)
  return summary


def run(seeds: Sequence[int], jobs: int = 0) -> Iterator[Summary]:
  """Runs seeds spread over `jobs` processes (0: one per core); summaries of a few seeds each, as
  they come."""
  chunks = [seeds[start:start + CHUNK] for start in range(0, len(seeds), CHUNK)]
  with concurrent.futures.ProcessPoolExecutor(
    jobs or os.cpu_count(), multiprocessing.get_context('spawn')
  ) as pool:
    try:
      for future in concurrent.futures.as_completed([pool.submit(run_chunk, c) for c in chunks]):
        yield future.result()
    finally:
      pool.shutdown(cancel_futures=True)


class _Last(observers.Observer):
  """Keeps the last turns, in words."""

  def __init__(self):
    self.lines: collections.deque[str] = collections.deque(maxlen=KEPT)

  def saw(self, life: observers.Life, now_ns: int, event: events.Event,
          out: Sequence[actions.Action]) -> None:
    self.lines.append(f'{now_ns / 1e9:10.6f} {life.start.node}: {event} -> {list(out)}')


def explain(outcome: seeds_lib.Outcome, commit: str) -> str:
  """Everything that one needs to look into a violation. Runs the seed once more."""
  last = _Last()
  seeds_lib.run_seed(outcome.seed, [last])
  broken = outcome.violation
  return '\n'.join([
    f'seed {outcome.seed} at commit {commit} breaks {broken.invariant}: {broken.sentence}',
    broken.detail,
    f'config: {swarm.draw(outcome.seed).config}',
    f'the last {len(last.lines)} events:', *last.lines,
    f'replay: python -m experiments.simulate --seed={outcome.seed} --story',
  ])
