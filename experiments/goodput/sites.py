"""How much bandwidth training between sites needs: the production machines on links of so many
bytes per second, and data-parallel training on a ring.

A *site* has one link to the world, with the same rate in each direction. All learners of a site are
behind it. The *useful* share of a run is that of the learners' time whose tokens are merged in the
sync for which they were due. Learners that wait for one another lose time and merge everything in
time, so it is their compute utilisation. Learners that never wait lose no time: what is late on a
thin link is merged later or not at all.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diloco_jax.config import run_config
from diloco_jax.numerics import codecs
from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import conditions, links
from experiments.goodput import machines

GBIT = 1e9 / 8  # bytes
TOKENS = machines.TOKENS
LIMIT_NS = 10**7 * engine_lib.SECOND
DOUBLINGS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
  """What is trained, and between which sites.

  Attributes:
    parameters: of the model.
    step_s: of an inner step.
    learners: at `sites` sites, as many at each.
    hub: the syncer is behind a link like those of the sites, which then carries all payloads; else
      its own link is no limit.
    delays: latency and the time of work on payloads, by name (verification/virtual/conditions.py).
  """

  parameters: float = 12e9
  step_s: float = 1.0
  learners: int = 8
  sites: int = 8
  hub: bool = False
  delays: str = 'none'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """One kind of training: settings of the machines, and the codec both ways. `waits`: its learners
  wait for one another."""

  codec: str
  waits: bool = True
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)

  def config(self, learners: int) -> config_lib.ProtocolConfig:
    """That of the paper's runs where `settings` do not say otherwise (machines.py)."""
    quorum = learners if self.waits else 1
    return machines.settings(learners, **{'quorum': quorum, 'overlap': 2, **self.settings})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
  """Of the learners' time, in the mean: the share in inner steps, the *useful* share, and the share
  whose tokens are merged at all. `site_bytes`: what a site sends per inner step."""

  computing: float
  useful: float
  merged: float
  site_bytes: float


def run(method: Method, where: Where, bytes_per_s: float, periods: int) -> Shares:
  """Runs the machines without noise and failures, with links of so many bytes per second.

  Args:
    periods: that count, after half as many that do not. On a link that is too thin for learners
      that never wait, queues grow and are cut for longer than that: longer runs differ.

  Raises:
    RuntimeError: the learners make no steps.
  """
  config = method.config(where.learners)
  values = -(-round(where.parameters / config.fragments) // codecs.BLOCK) * codecs.BLOCK
  model = links.sizes([values] * config.fragments, method.codec, method.codec)
  names = run_config.learner_ids(where.learners)
  counts = _Counts(names)
  world = world_lib.World(config, 0, (counts,), model)
  lines = tuple(
    conditions.Line(bytes_per_s, bytes_per_s, 'hub' if where.hub else f'site {which % where.sites}')
    for which in range(where.learners)
  )
  delays = conditions.delays(where.delays, step_s=where.step_s)
  network = dataclasses.replace(delays['network'], up=0.0, down=0.0, lines=lines)
  conditions.furnish(world, names, delays['hardware'], network, TOKENS)
  for name in names:
    world.start(name)
  warm_up = -(-periods // 2) * config.period
  steps = periods * config.period
  since_ns, before = _until(world, counts, warm_up), counts.totals()
  until_ns, after = _until(world, counts, warm_up + steps), counts.totals()
  made, on_time, merged, sent_bytes = (new - old for new, old in zip(after, before))
  computing = made / len(names) * where.step_s * engine_lib.SECOND / (until_ns - since_ns)
  return Shares(
    computing=computing,
    useful=computing * on_time / (made * TOKENS * config.fragments),
    merged=computing * merged / (made * TOKENS * config.fragments),
    site_bytes=sent_bytes / where.sites / steps,
  )


def _until(world: world_lib.World, counts: '_Counts', steps: int) -> int:
  """Runs until every learner has made so many steps; returns when."""
  limit_ns = world.now_ns + LIMIT_NS
  done = lambda: min(counts.steps.values()) >= steps
  world.run(limit_ns, done)
  if not done():
    raise RuntimeError(f'the learners make no steps: {world.stuck()}')
  return world.now_ns


class _Counts(links.Counts):
  """The steps of the learners of a run, what was merged of them, and what was sent."""

  def __init__(self, names: Sequence[str]):
    super().__init__()
    self.steps.update(dict.fromkeys(names, 0))
    self._sent_bytes = 0

  def totals(self) -> tuple[float, ...]:
    """So far: steps, fragment-tokens merged in time and at all, bytes of payloads sent upward."""
    return self.steps.total(), self.on_time.total(), self.merged.total(), self._sent_bytes

  def saw(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    super().saw(life, now_ns, event, out)
    for action in () if life.start.role == 'syncer' else out:
      if type(action) is actions.Send and action.payload_id is not None:
        self._sent_bytes += network_lib.wire_bytes(action.message.payload.size_bytes)


# --- Data-parallel training -----------------------------------------------------------------------

FORWARD = 1 / 3  # of a step; the backward pass takes twice as long
HIDDEN = ('nothing', 'the backward pass', 'the whole step')


def ring(
  where: Where, bytes_per_s: float, layers: int, value_bytes: int = 2, hides: str = HIDDEN[1]
) -> Shares:
  """Data-parallel training: an all-reduce of the gradients of every step between the sites.

  Sites are a ring. A layer's gradients go round it twice, in parts: each site sends
  `2 * (sites - 1)` parts of `1 / sites` of them to the next one, all sites at the same time. One
  layer after the other, in the order of the backward pass, as soon as its gradients are there; all
  layers have as many parameters and take as long. Learners of a site have summed theirs before, for
  nothing.

  Args:
    hides: what the all-reduce runs beside: nothing (it begins after the step), the backward pass
      (the next step begins once it has ended), or the whole step (gradients are applied one step
      later, which is another method: the least that any schedule needs).
  """
  parts = 2 * (where.sites - 1)
  part_bytes = network_lib.wire_bytes(
    -(-round(where.parameters * value_bytes) // (layers * where.sites))
  )
  layer_s = parts * part_bytes / bytes_per_s
  if hides == 'the whole step':
    took_s = max(where.step_s, layers * layer_s)
  else:
    free_s = 0.0  # when the ring is free
    for layer in range(1, layers + 1):
      done = FORWARD + (1 - FORWARD) * layer / layers if hides == 'the backward pass' else 1.0
      free_s = max(free_s, done * where.step_s) + layer_s
    took_s = free_s
  share = where.step_s / took_s
  return Shares(
    computing=share, useful=share, merged=share, site_bytes=float(layers * parts * part_bytes)
  )


# --- Search ---------------------------------------------------------------------------------------


def needed(
  share: Callable[[float], float], targets: Iterable[float], start: float, halvings: int = 5
) -> dict[float, float]:
  """The least rate for each target: `share` reaches it at this one and at all greater tried ones.

  Tries `start` times powers of two, then halves the last factor of two so many times: 5 find a rate
  that is at most 2.2 % too high.

  Raises:
    RuntimeError: no rate is enough, or none is too little.
  """
  share = functools.cache(share)
  targets = sorted(targets)
  rates = (start * 2.0**power for power in range(DOUBLINGS))
  top = next((rate for rate in rates if min(share(rate), share(2 * rate)) >= targets[-1]), None)
  if top is None:
    raise RuntimeError(f'no tried rate reaches {targets[-1]:.0%}')
  found = {}
  for target in targets:
    ladder = (top / 2.0**power for power in range(DOUBLINGS))
    low = next((rate for rate in ladder if share(rate) < target), None)
    if low is None:
      raise RuntimeError(f'all tried rates reach {target:.0%}')
    high = 2 * low
    for _ in range(halvings):
      middle = (low * high) ** 0.5
      low, high = (low, middle) if share(middle) >= target else (middle, high)
    found[target] = high
  return found
