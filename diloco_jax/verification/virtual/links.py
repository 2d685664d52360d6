"""What its links make of a run: the protocol alone, on links of so many bytes per second.

    sizes = links.sizes([1 << 20] * 24, 'int8', 'int8')
    line = conditions.Line(up=1.25e6, down=1.25e6)
    links.predict(config, sizes, conditions.Hardware(step_s=0.25),
                  conditions.Network(lines=(line,))).merged

The machines are the production ones; payloads have the sizes of their codecs and no content
(sim/no_arrays.py). So a prediction takes seconds for a model of any size.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence

from diloco_jax.config import run_config
from diloco_jax.numerics import codecs
from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import no_arrays
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import conditions, on_time

TOKENS = 1_000  # of an inner step
LIMIT = 1_000  # a run may take so many times its steps


def sizes(values: Sequence[int], up: str, down: str) -> no_arrays.Model:
  """The payloads of fragments of so many values, with these codecs; whole ones are float32."""
  encoded = (tuple(map(codecs.get(name).encoded_size, values)) for name in (up, down))
  return no_arrays.Model('{}', *encoded, tuple(4 * size for size in values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """What is made of a run's steps; every attribute but `seconds` by learner.

  Attributes:
    steps: that the learner makes itself.
    computing: the share of the time until its last step in which it is in a step.
    merged, on_time: the share of its tokens that is merged at all, and in the sync for which they
      were due (on_time.py).
    up_bytes, down_bytes: until the last step of all, on the wire, with the headers of all layers.
    seconds: of the whole run.
  """

  steps: dict[str, int]
  computing: dict[str, float]
  merged: dict[str, float]
  on_time: dict[str, float]
  up_bytes: dict[str, int]
  down_bytes: dict[str, int]
  seconds: float


def predict(
  config: config_lib.ProtocolConfig,
  model: no_arrays.Model,
  hardware: conditions.Hardware,
  network: conditions.Network,
  warm_up: int = 0,
  seed: int = 0,
) -> Prediction:
  """What happens in a run of `config.total_steps` steps.

  Args:
    config: of the run.
    model: the sizes of its payloads (`sizes`).
    hardware: durations; `step_s` and `slowness` are those of the steps without any exchange.
    network: the links, for example `lines`.
    warm_up: so many steps come first, on links of any speed; nothing of them counts.
    seed: of noise in the durations.

  Raises:
    RuntimeError: the run does not end.
  """
  names = run_config.learner_ids(config.learners)
  counts = _Counts()
  world = world_lib.World(config, seed, (counts,), model)

  def run(done: Callable[[], bool]) -> None:
    world.run(world.now_ns + LIMIT * hardware.ns(config.total_steps), done)
    if not done():
      raise RuntimeError(
        f'the run has not ended in {LIMIT} times its steps: faster links are needed'
      )

  conditions.furnish(world, names, hardware, dataclasses.replace(network, lines=()), TOKENS)
  for name in names:
    world.start(name)
  run(lambda: all(counts.steps[name] >= warm_up for name in names))
  conditions.furnish(world, names, hardware, network, TOKENS)
  since_ns, before = world.now_ns, copy.deepcopy(counts)
  run(lambda: all(world.learners[name].machine.clock >= config.total_steps for name in names))
  carried = [{name: world.link(name).carried[lane] for name in names} for lane in ('up', 'down')]
  run(lambda: world.finished)
  steps = {name: counts.steps[name] - before.steps[name] for name in names}
  useful_ns = {
    name: hardware.ns(hardware.slowness[which % len(hardware.slowness)]) * steps[name]
    for which, name in enumerate(names)
  }
  open_tokens = {
    name: TOKENS * counts.steps[name] * config.fragments - before.merged[name] for name in names
  }
  of = lambda tokens, old: {name: (tokens[name] - old[name]) / open_tokens[name] for name in names}
  return Prediction(
    steps=steps,
    computing={
      name: useful_ns[name] / (counts.ended_ns[name] - max(since_ns, counts.began_ns[name]))
      for name in names
    },
    merged=of(counts.merged, before.merged),
    on_time=of(counts.on_time.of, before.on_time.of),
    up_bytes=carried[0],
    down_bytes=carried[1],
    seconds=world.now_ns / engine_lib.SECOND,
  )


class _Counts(observers.Observer):
  """The steps of each learner, and what is merged of them."""

  def __init__(self):
    self.began_ns: dict[str, int] = {}
    self.ended_ns: dict[str, int] = {}
    self.steps: collections.Counter[str] = collections.Counter()
    self.merged: collections.Counter[str] = collections.Counter()
    self.on_time = on_time.OnTime()

  def saw(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    name = life.start.node
    if isinstance(event, events.StepDone):
      self.steps[name] += 1
      self.ended_ns[name] = now_ns
    if life.start.role == 'syncer':
      self.on_time.turn(out, self.steps)
    for action in out:
      match action:
        case actions.Step():
          self.began_ns.setdefault(name, now_ns)
        case actions.Merge(participants=participants):
          for one in participants:
            self.merged[one.learner] += one.tokens
