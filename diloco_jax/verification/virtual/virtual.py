"""Training in virtual time: a real run's machines and arithmetic, one process, no waiting.

    from diloco_jax.verification.virtual import conditions, virtual
    config = stdlib_lm.get_config('tiny')
    result = virtual.train(config, **conditions.delays('wan', lognormal=0.3), seed=1)
    result.final_loss, result.merged_share, result.participants

The machines, the messages and every array operation are those of a real run with this config; what
is simulated is how long everything takes and which learners die (conditions.py). So a run takes as
long as its arithmetic, and equal arguments give equal bits: `Result.theta_sha256`.

The order of the events decides everything, and it does not depend on the arrays unless a payload is
refused. So `schedule` runs the protocol alone, in seconds, and runs that differ only in arithmetic
(codecs, rates, merge rules) can be compared on one schedule.
"""

import collections
import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from diloco_jax.config import build, run_config
from diloco_jax.protocol import actions, events, facts
from diloco_jax.protocol.tape import observers
from diloco_jax.verification import plans
from diloco_jax.verification.sim import faults as faults_lib
from diloco_jax.verification.sim import no_arrays
from diloco_jax.verification.sim import processes as sim_processes
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import arrays, conditions, links

Progress = Callable[[int, int], None]
LIMIT = 100  # a run may take so many times its steps, with all waits of the protocol
WAITS_NS = 10**13


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """An evaluation of the global model: after `tokens` trained by all learners, at `time` steps."""

  time: float
  tokens: int
  loss: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge:
  """An outer step, decided at `time` (in steps). `late`: the participants whose payloads were late
  for the sync before; `live`: learners with a process then; `waited`: since the sync opened, in
  steps."""

  time: float
  sync: int
  fragment: int
  participants: tuple[str, ...]
  late: tuple[str, ...]
  live: int
  waited: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """A virtual run. Times are in units of an inner step.

  Attributes:
    config: as it ran: `train.steps` is the T that was found.
    tokens: trained by all learners.
    steps: inner steps of each learner, over all its processes.
    curve: held-out loss of the global model; () without arrays or held-out batches, or if parts of
      the model are never sent.
    merges: every outer step in order.
    ledger: the last one (protocol/facts.py), in fragment-tokens.
    up_bytes, down_bytes: payloads on the wire.
    deaths: of learners.
    origins: how many processes that began in a run in progress had the moments of their own
      checkpoint, of an `other` learner's, or `fresh` ones; {} without arrays.
    time: of the whole run.
    seconds: on this machine.
    theta_sha256: of the syncer's arrays; '' without arrays.
    params: the published model at the end, a tree on the host; None without arrays.
  """

  config: run_config.Config
  tokens: int
  steps: dict[str, int]
  curve: tuple[Point, ...]
  merges: tuple[Merge, ...] = ()
  ledger: facts.Ledger | None = None
  up_bytes: int = 0
  down_bytes: int = 0
  deaths: int = 0
  origins: dict[str, int] = dataclasses.field(default_factory=dict)
  time: float = 0.0
  seconds: float = 0.0
  theta_sha256: str = ''
  params: Any = dataclasses.field(default=None, repr=False, compare=False)

  @property
  def final_loss(self) -> float | None:
    """Held-out loss of the global model at the end."""
    return self.curve[-1].loss if self.curve else None

  @property
  def merged_share(self) -> float:
    """Merged fragment-tokens, as a share of the trained ones."""
    return self.ledger.merged / (self.ledger.fragments * self.ledger.trained)

  @property
  def discarded_shares(self) -> dict[str, float]:
    """The rest, by reason."""
    trained = self.ledger.fragments * self.ledger.trained
    return {reason: count / trained for reason, count in self.ledger.discarded.items()}

  @property
  def participants(self) -> float:
    """Mean number of learners in an outer step."""
    return sum(len(merge.participants) for merge in self.merges) / len(self.merges)

  @property
  def waits(self) -> list[float]:
    """From the opening of each sync to the decision of its outer step, sorted."""
    return sorted(merge.waited for merge in self.merges)


def train(
  config: run_config.Config,
  *,
  hardware: conditions.Hardware = conditions.Hardware(),  # noqa: B008, immutable
  network: conditions.Network = conditions.Network(),  # noqa: B008
  faults: conditions.Faults = conditions.Faults(),  # noqa: B008
  seed: int = 0,
  trained_tokens: int | None = None,
  progress: Progress | None = None,
  only_schedule: bool = False,
) -> Result:
  """Trains a run in virtual time; `schedule` carries it out without arrays, in seconds.

  Args:
    config: of the run, as for real processes. Not used are its mesh (each island has one device of
      this process), chaos and times of saves of the syncer.
    hardware, network, faults: how long everything takes, and what goes wrong.
    seed: draws noise and deaths; not the initial parameters, which `config.train.seed` draws.
    trained_tokens: how many tokens the learners train together, as near as one can get: at least so
      many, and at most one step of each learner more. The run's `train.steps` is then searched with
      the protocol alone, whose schedule is that of the run. Default: the run ends at
      `config.train.steps`, and learners that skipped steps of the clock have trained less.
    progress: called after inner steps with (tokens trained, tokens at the end or 0).
    only_schedule: everything but losses and Theta.

  Raises:
    ValueError: the config cannot work.
    RuntimeError: the run does not end.
  """
  where = _Conditions(hardware, network, faults, seed)
  assembled = _assemble(config, where, trained_tokens)
  book = _Book(where, progress, trained_tokens or 0)
  if only_schedule:
    return _run(assembled, _no_arrays(assembled), where, book)
  curve: list[Point] = []

  def evaluate(sync: int) -> None:
    if held_out:
      curve.append(Point(time=book.time, tokens=book.tokens, loss=values.evaluate()))

  held_out = bool(assembled.task.eval_batches()) and not assembled.never_sent
  lies = dict.fromkeys(faults.flipped, np.negative) | {
    name: arrays.noise(np.random.default_rng([seed, index]))
    for index, name in enumerate(faults.noisy)
  }
  keep_moments = bool(faults.death_every or faults.plan)
  values = arrays.Arrays(assembled, evaluate, keep_moments, lies, faults.shared)
  evaluate(0)
  result = _run(assembled, values, where, book)
  evaluate(assembled.config.train.steps)
  return dataclasses.replace(
    result,
    curve=tuple(curve),
    origins=dict(+values.origins),
    theta_sha256=values.theta_sha256(),
    params=values.params(),
  )


schedule = functools.partial(train, only_schedule=True)


def alone(config: run_config.Config, progress: Progress | None = None) -> Result:
  """Trains one learner of a config without a syncer, with the same jitted step, for `train.steps`
  steps. With one learner's batch it is the lone learner, with `data_parallel(config)` the baseline
  that sees all tokens."""
  assembled = _assemble(config)
  config, begun = assembled.config, time.monotonic()
  island = arrays.fresh_island(assembled)
  every, per_step, total = config.train.eval_every, island.tokens_per_step, config.train.steps
  held_out = bool(assembled.task.eval_batches())
  curve = []
  for clock in range(total + 1):
    if held_out and (clock in (0, total) or (every and clock % every == 0)):
      curve.append(Point(time=clock, tokens=clock * per_step, loss=island.evaluate()))
    if clock < total:
      island.step(clock)
      if progress is not None:
        progress((clock + 1) * per_step, total * per_step)
  return Result(
    config=config,
    tokens=total * per_step,
    steps={'l0': total},
    curve=tuple(curve),
    time=total,
    seconds=time.monotonic() - begun,
    params=jax.device_get(island.params),
  )


def data_parallel(config: run_config.Config) -> run_config.Config:
  """The config of one learner that trains on the batches of all learners of `config`."""
  config = copy.deepcopy(config)
  config.data.batch_size *= config.sync.learners
  config.sync.learners = config.sync.quorum = config.data.shards = 1
  return config


# --- One run --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Conditions:
  hardware: conditions.Hardware
  network: conditions.Network
  faults: conditions.Faults
  seed: int


class _Book(observers.Observer):
  """Counts what happens in a run."""

  def __init__(self, where: _Conditions, progress: Progress | None = None, target: int = 0):
    self._step_ns = where.hardware.ns(1)
    self._progress, self._target = progress, target
    self.world: world_lib.World | None = None
    self.tokens = self.deaths = self.up_bytes = self.down_bytes = 0
    self.steps: collections.Counter[str] = collections.Counter()
    self.merges: list[Merge] = []

  @property
  def time(self) -> float:
    return self.world.now_ns / self._step_ns if self.world else 0.0

  def died(self, now_ns: int, process: observers.ObservedProcess, killed: bool) -> None:
    self.deaths += killed

  def saw(
    self,
    process: observers.ObservedProcess,
    now_ns: int,
    event: events.Event,
    out: observers.Actions,
  ) -> None:
    syncer = process.start.role == 'syncer'
    if isinstance(event, events.StepDone):
      self.steps[process.start.identity.learner] += 1
      self.tokens += event.tokens
      if self._progress is not None:
        self._progress(self.tokens, self._target)
    for action in out:
      if isinstance(action, actions.Send):
        if action.payload_id is not None:
          size_bytes = action.message.payload.size_bytes
          self.down_bytes += size_bytes if syncer else 0
          self.up_bytes += 0 if syncer else size_bytes
      elif syncer and isinstance(action, actions.Report) and isinstance(action.fact, facts.Merging):
        self._merging(now_ns, action.fact)

  def _merging(self, now_ns: int, merging: facts.Merging) -> None:
    self.merges.append(
      Merge(
        time=now_ns / self._step_ns,
        sync=merging.sync,
        fragment=merging.fragment,
        participants=merging.participants,
        late=merging.late,
        live=len(self.world.learners),
        waited=merging.waited_ns / self._step_ns,
      )
    )


def _assemble(
  config: run_config.Config, where: _Conditions | None = None, trained_tokens: int | None = None
) -> build.Assembly:
  """Builds the objects of a copy of the config, with as many steps as the tokens need."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # grain reads absl flags
  config = copy.deepcopy(config)
  config.validate()
  assembled = build.assemble(config)
  if trained_tokens is None:
    return assembled
  config.train.steps = _steps_for(assembled, where, trained_tokens)
  return build.assemble(config)


def _no_arrays(assembled: build.Assembly) -> no_arrays.Arrays:
  """The model of an assembled run, without its arrays."""
  layout, sync = assembled.layout, assembled.config.sync
  values = [layout.size(p) for p in range(layout.num_fragments)]
  return links.sizes(values, sync.codec_up, sync.codec_down, assembled.agreement)


def _run(
  assembled: build.Assembly, values: sim_processes.Arrays, where: _Conditions, book: _Book
) -> Result:
  begun = time.monotonic()
  config, hardware, faults = assembled.config, where.hardware, where.faults
  learners = run_config.learner_ids(config.sync.learners)
  world = book.world = world_lib.World(assembled.protocol, where.seed, (book,), values)
  conditions.furnish(world, learners, hardware, where.network, assembled.task.tokens_per_batch)
  limit_ns = hardware.ns(LIMIT * assembled.protocol.total_steps * max(hardware.slowness)) + WAITS_NS
  nodes = (*learners, plans.SYNCER)
  named = {fault.node for fault in faults.plan} | {*faults.flipped, *faults.noisy}
  if strangers := sorted(named - set(nodes)):
    raise ValueError(f'the plan has faults of {strangers}; this run has {", ".join(nodes)}')
  plan = conditions.deaths(faults, hardware, where.seed, learners, limit_ns)
  faults_lib.Nemesis(world, plan, odds=faults.odds)
  for name in learners:
    world.engine.at(0, functools.partial(world.start, name))
  world.run(limit_ns, done=lambda: world.finished)
  if not world.finished:
    raise RuntimeError(f'the virtual run has not ended in {limit_ns / 1e9} s:\n{world.stuck()}')
  return Result(
    config=config,
    tokens=book.tokens,
    steps=dict(sorted(book.steps.items())),
    curve=(),
    merges=tuple(book.merges),
    ledger=world.ledger(),
    up_bytes=book.up_bytes,
    down_bytes=book.down_bytes,
    deaths=book.deaths,
    time=book.time,
    seconds=time.monotonic() - begun,
  )


def _steps_for(assembled: build.Assembly, where: _Conditions, tokens: int) -> int:
  """A `train.steps` with which the learners train so many tokens, and less than one step of each
  learner more, or the least that is enough."""
  together = assembled.task.tokens_per_batch * assembled.config.sync.learners
  short, enough = 0, 1 << 40
  steps = max(1, -(-tokens // together))
  while True:
    protocol = dataclasses.replace(assembled.protocol, total_steps=steps)
    run = dataclasses.replace(assembled, protocol=protocol)
    trained = _run(run, _no_arrays(run), where, _Book(where)).tokens
    if trained < tokens:
      short = steps
    else:
      enough = steps
    if enough - short == 1 or tokens <= trained < tokens + together:
      return enough
    ideal = steps + round((tokens - trained + together / 2) / (trained / steps))
    steps = min(max(ideal, short + 1), enough - 1)
