"""What its links make of a run: the protocol alone, on links of so many bytes per second.

Payloads have the sizes of their codecs and no content (verification/sim/no_arrays.py), so a
prediction takes seconds for a model of any size.
"""

import collections
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from diloco_jax.config import run_config
from diloco_jax.numerics import codecs
from diloco_jax.protocol import actions, events, facts
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import tempo as tempo_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import no_arrays
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import conditions

TOKENS = 1_000  # of an inner step
LIMIT = 1_000  # a run may take so many times its steps


def sizes(values: Sequence[int], up: str, down: str, agreement: str = '{}') -> no_arrays.Arrays:
  """The payloads of fragments of so many values with these codecs; whole fragments are float32."""
  encoded = [tuple(map(codecs.get(name).encoded_size, values)) for name in (up, down)]
  return no_arrays.Arrays(agreement, *encoded, tuple(4 * size for size in values))


class Prediction(NamedTuple):
  """What is made of a run's steps, by learner.

  Attributes:
    steps: that it makes itself.
    computing: the share of the time until its last step in which it is in a step.
    merged, on_time: the share of its tokens that is merged at all, and in the sync for which they
      were due (Counts).
    up_bytes, down_bytes: until the last step of all, on the wire, with the headers of all layers.
    period: that the syncer has chosen at the end, in inner steps.
  """

  steps: dict[str, int]
  computing: dict[str, float]
  merged: dict[str, float]
  on_time: dict[str, float]
  up_bytes: dict[str, int]
  down_bytes: dict[str, int]
  period: int


class Counts(observers.Observer):
  """The steps of each learner, and what is merged of them, in fragment-tokens: at all, and in the
  sync for which it was due. Of a learner that missed k syncs of a fragment, 1 token in k + 1 is on
  time."""

  def __init__(self):
    counters = (collections.Counter[str]() for _ in range(4))
    self.begun, self.steps, self.merged, self.on_time = counters
    self.ended_ns: dict[str, int] = {}  # its last step
    self.period = 0  # of the run, if the syncer has changed it
    self._missed: collections.Counter[tuple[str, int]] = collections.Counter()

  def saw(
    self,
    process: observers.ObservedProcess,
    now_ns: int,
    event: events.Event,
    out: observers.Actions,
  ) -> None:
    name = process.start.node
    if isinstance(event, events.StepDone):
      self.steps[name] += 1
      self.ended_ns[name] = now_ns
    self.begun[name] += sum(isinstance(action, actions.Step) for action in out)
    self.take(out, self.steps)

  def take(self, out: observers.Actions, training: Iterable[str]) -> None:
    """Counts the outer steps of a turn; `training`: the learners that have trained."""
    reported = [action.fact for action in out if isinstance(action, actions.Report)]
    for fact in reported:
      self.period = fact.period if isinstance(fact, facts.Tempo) else self.period
    late = {fact.sync: fact.late for fact in reported if isinstance(fact, facts.Merging)}
    for merge in (action for action in out if isinstance(action, actions.Merge)):
      for name in {*training} - {participant.learner for participant in merge.participants}:
        self._missed[name, merge.fragment] += 1
      for participant in merge.participants:
        missed = self._missed.pop((participant.learner, merge.fragment), 0)
        self.merged[participant.learner] += participant.tokens
        if participant.learner in late[merge.sync]:  # nothing of its payload was due for this sync
          self._missed[participant.learner, merge.fragment] = 1
        else:
          self.on_time[participant.learner] += participant.tokens / (missed + 1)


def predict(
  config: config_lib.ProtocolConfig,
  values: no_arrays.Arrays,
  hardware: conditions.Hardware,
  network: conditions.Network,
  warm_up: int = 0,
  seed: int = 0,
) -> Prediction:
  """Runs all steps of a run with payloads of these sizes. Its learners join and make the `warm_up`
  steps, with the syncs for which they wait then, on links of any speed, and nothing of that counts.
  Raises RuntimeError: the run does not end."""
  names, counts = run_config.learner_ids(config.learners), Counts()
  measured = tempo_lib.are_measured(values.payload_bytes)
  world = world_lib.World(config, seed, (counts,), values, links_measured=measured)

  def run(done: Callable[[], bool]) -> None:
    world.run(world.now_ns + LIMIT * hardware.ns(config.total_steps), done)
    if not done():
      raise RuntimeError(f'the run has not ended in {LIMIT} times its steps: use faster links')

  conditions.furnish(world, names, hardware, dataclasses.replace(network, lines=()), TOKENS)
  for name in names:
    world.start(name)
  run(lambda: all(counts.begun[name] > warm_up for name in names))
  conditions.furnish(world, names, hardware, network, TOKENS)
  since_ns, before = world.now_ns, copy.deepcopy(counts)
  steps_done = lambda name: world.learners[name].machine.clock >= config.total_steps
  run(lambda: all(name in world.done or steps_done(name) for name in names))
  carried = [{name: world.link(name).carried[lane] for name in names} for lane in ('up', 'down')]
  run(lambda: world.finished)
  steps = {name: counts.steps[name] - before.steps[name] for name in names}
  step_ns = itertools.cycle(map(hardware.ns, hardware.slowness))
  share = lambda of, old: {
    name: (of[name] - old[name])
    / (TOKENS * config.fragments * counts.steps[name] - before.merged[name])
    for name in names
  }
  return Prediction(
    steps,
    {
      name: min(1.0, took_ns * steps[name] / (counts.ended_ns[name] - since_ns))
      for name, took_ns in zip(names, step_ns)
    },
    share(counts.merged, before.merged),
    share(counts.on_time, before.on_time),
    *carried,
    counts.period or config.period,
  )
