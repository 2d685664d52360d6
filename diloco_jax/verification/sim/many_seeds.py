"""Many seeds on all cores, and the explanation of a failed one."""

import collections
import concurrent.futures
import dataclasses
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence

from diloco_jax.verification.sim import narrate, random_settings
from diloco_jax.verification.sim import seeds as seeds_lib

CHUNK = 10
LINES_KEPT = 50


@dataclasses.dataclass
class Summary:
  """The results of many seeds so far; `faults`: how many of each kind were carried out."""

  seeds: int = 0
  events: int = 0
  faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  failed: list[seeds_lib.Outcome] = dataclasses.field(default_factory=list)

  def add(self, other: 'Summary') -> None:
    self.seeds += other.seeds
    self.events += other.events
    self.faults += other.faults
    self.failed += other.failed


def run_chunk(seeds: Sequence[int]) -> Summary:
  """Runs some seeds in this process."""
  gc.disable()  # a world lives for milliseconds; its garbage is collected below
  summary = Summary()
  for seed in seeds:
    outcome = seeds_lib.run_seed(seed)
    summary.seeds += 1
    summary.events += outcome.events
    summary.faults.update(outcome.faults)
    if outcome.violation is not None:
      summary.failed.append(outcome)
  gc.enable()
  gc.collect()
  return summary


def run(
  seeds: Sequence[int], jobs: int = 0, initializer: Callable[[], None] | None = None
) -> Iterator[Summary]:
  """Runs seeds on `jobs` processes (0: one per core); yields summaries of a few seeds each, in the
  order in which they are done. Each process calls `initializer` first."""
  chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
  with concurrent.futures.ProcessPoolExecutor(
    jobs or os.cpu_count(), multiprocessing.get_context('spawn'), initializer
  ) as pool:
    try:
      for future in concurrent.futures.as_completed([pool.submit(run_chunk, c) for c in chunks]):
        yield future.result()
    finally:
      pool.shutdown(cancel_futures=True)


def explain(outcome: seeds_lib.Outcome, commit: str) -> str:
  """Everything that a developer needs to investigate a violation. Runs the seed again."""
  last: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
  story, setting = narrate.Story(last.append), random_settings.draw(outcome.seed)
  seeds_lib.run_seed(outcome.seed, [story], story.note)
  broken = outcome.violation
  return '\n'.join(
    [
      f'seed {outcome.seed} at commit {commit} breaks {broken.invariant}: {broken.sentence}',
      broken.detail,
      f'config: {setting.config}',
      f'faults: {len(setting.plan)} until {setting.heal_ns / 1e9:g} s',
      f'the last {len(last)} lines of its story, in ms:',
      *last,
      f'replay: diloco simulate --seed={outcome.seed} --story',
    ]
  )
