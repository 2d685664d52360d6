"""Goodput and token goodput with the production machines, on islands that fail.

The world has no disks and no arrays (verification/sim/no_arrays.py): no process dies, chips do.
All checkers watch the warm-up, in which learners also join; what is reported is the time after it.
"""

import collections
import dataclasses
from typing import Any

from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import hardware, no_arrays
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import conditions, links
from experiments.goodput import islands

SECOND = engine_lib.SECOND
STEP_S = 1.0
WARM_UP_S, MEASURED_S = 300, 1_800
TOKENS = 1_000  # of an inner step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """A time after the warm-up; all shares are between 0 and 1.

  Attributes:
    goodput: the share of the chips' time in which they trained.
    able: the share in which their islands were able to.
    uptime: the share of time in which at least one island was able to train.
    longest_gap_s: between two decisions to merge.
    token_goodput: tokens merged, as a share of those that all chips would train in that time
      without failures. Of a token, each fragment is merged by itself.
    merged: the same as a share of the tokens trained, and `merged_of` by learner.
    on_time: the share merged in the sync for which they were due.
    participants: mean number of learners in an outer step.
  """

  goodput: float
  able: float
  uptime: float
  longest_gap_s: float
  token_goodput: float
  merged: float
  merged_of: dict[str, float]
  on_time: float
  participants: float


class _Counts(observers.Observer):
  """What a run does after its warm-up."""

  def __init__(self):
    self.begin(0)

  def begin(self, now_ns: int) -> None:
    self.trained: collections.Counter[str] = collections.Counter()
    self.merges = self.participants = self.longest_gap_ns = 0
    self.counts = links.Counts()
    self._merged_ns = now_ns

  def saw(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    if type(event) is events.StepDone:
      self.trained[life.start.node] += event.tokens
    self.counts.take(out, self.trained)
    for action in out:
      if type(action) is actions.Merge:
        self._merge(now_ns, action)

  def _merge(self, now_ns: int, merge: actions.Merge) -> None:
    self.merges += 1
    self.participants += len(merge.participants)
    self.longest_gap_ns = max(self.longest_gap_ns, now_ns - self._merged_ns)
    self._merged_ns = now_ns


def settings(learners: int, **more: Any) -> config_lib.ProtocolConfig:
  """Those of the paper's runs: P = H = 24, one learner is a quorum, and saves cost nothing."""
  ours = {'quorum': 1, 'fragments': 24, 'period': 24, 'total_steps': 10**6, 'save_steps': 0}
  return config_lib.ProtocolConfig(learners=learners, **{**ours, **more})


def run(
  config: config_lib.ProtocolConfig,
  *,
  slices: hardware.Slices | None = None,
  delays: str = 'none',
  slowness: tuple[float, ...] = (1.0,),
  noise: float = 0.02,
  seed: int = 0,
  warm_up_s: int = WARM_UP_S,
  measured_s: int = MEASURED_S,
  checked: bool = True,
) -> Result:
  """Runs learners with inner steps of STEP_S on equal islands.

  Args:
    config: of the machines; `settings` has those of the paper.
    slices: of each island; None: nothing fails.
    delays: of the links and the syncer, by name (verification/virtual/conditions.py).
    slowness, noise: of the islands' steps: factors, and the standard deviation of a normal one.
    seed: of failures and noise. The failures are those of `islands.alone`.
    checked: whether all checkers watch the warm-up.

  Raises:
    checkers.Violation: an invariant is broken.
  """
  names = [f'l{which}' for which in range(config.learners)]
  counts, checkers = _Counts(), checkers_lib.Checkers(config)
  model = no_arrays.equal(config.fragments)  # the time of a payload is a condition
  watchers = (counts, checkers) if checked else (counts,)
  run_world = world_lib.World(
    config, seed, watchers, model, dict.fromkeys(names, slices) if slices else {}
  )
  where = conditions.delays(delays, step_s=STEP_S, slowness=slowness, gaussian=noise)
  conditions.furnish(run_world, names, where['hardware'], where['network'], TOKENS)
  fleet = islands.Fleet(run_world.engine, [run_world.island(name) for name in names])
  for name in names:
    run_world.start(name)
  run_world.run(warm_up_s * SECOND)
  run_world.unwatch(checkers)
  counts.begin(run_world.now_ns)
  fleet.begin()
  run_world.run((warm_up_s + measured_s) * SECOND)
  return _result(config, counts, fleet, slowness, measured_s)


def _result(
  config: config_lib.ProtocolConfig,
  counts: _Counts,
  fleet: islands.Fleet,
  slowness: tuple[float, ...],
  measured_s: int,
) -> Result:
  speeds = [1 / slowness[which % len(slowness)] for which in range(config.learners)]
  ideal = TOKENS * sum(speeds) * measured_s / STEP_S
  trained = sum(counts.trained.values())
  merged = counts.counts.merged.total() / config.fragments
  return Result(
    goodput=fleet.busy,
    able=fleet.goodput,
    uptime=fleet.uptime(),
    longest_gap_s=counts.longest_gap_ns / SECOND,
    token_goodput=merged / ideal,
    merged=merged / trained,
    merged_of={
      name: counts.counts.merged[name] / config.fragments / tokens
      for name, tokens in sorted(counts.trained.items())
    },
    on_time=counts.counts.on_time.total() / config.fragments / trained,
    participants=counts.participants / max(1, counts.merges),
  )
