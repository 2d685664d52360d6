"""How much bandwidth training between sites needs: the production machines on links of so many bytes
per second, and data-parallel training on a ring.

A *site* has one link to the world, with the same rate in each direction. All learners of a site are
behind it. The *useful* share of a run is that of the learners' time whose tokens are merged in the
sync for which they were due. Learners that wait for one another lose time and merge everything in
time, so it is their compute utilisation. Learners that never wait lose no time: what is late on a
thin link is merged later or not at all.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from diloco_jax.numerics import codecs
from diloco_jax.protocol import config as config_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.virtual import conditions, links

GBIT = 1e9 / 8  # bytes
DOUBLINGS, HALVINGS = 40, 5  # the found rate is at most 2 ** (1 / 2**HALVINGS) times the least


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

  def config(self, learners: int, periods: int) -> config_lib.ProtocolConfig:
    """For a run of so many periods, after the last of which every learner makes one more step."""
    ours = {'fragments': 24, 'period': 24, **self.settings}
    return config_lib.ProtocolConfig(
      learners=learners,
      quorum=learners if self.waits else 1,
      total_steps=periods * ours['period'] + 1,
      save_steps=0,
      **ours,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
  """Shares of the learners' time, in the mean; `site_bytes`: a site sends, per inner step."""

  computing: float
  useful: float
  merged: float
  site_bytes: float


def run(method: Method, where: Where, bytes_per_s: float, periods: int) -> Shares:
  """Runs the machines, without noise and failures, on links of so many bytes per second."""
  config = method.config(where.learners, periods)
  values = -(-round(where.parameters / config.fragments) // codecs.BLOCK) * codecs.BLOCK
  lines = tuple(
    conditions.Line(bytes_per_s, bytes_per_s, 'hub' if where.hub else f'site {which % where.sites}')
    for which in range(where.learners)
  )
  delays = conditions.delays(where.delays, step_s=where.step_s)
  found = links.predict(
    config,
    links.sizes([values] * config.fragments, method.codec, method.codec),
    delays['hardware'],
    dataclasses.replace(delays['network'], up=0.0, down=0.0, lines=lines),
  )
  names = found.computing
  return Shares(
    computing=statistics.fmean(found.computing.values()),
    useful=statistics.fmean(found.computing[name] * found.on_time[name] for name in names),
    merged=statistics.fmean(found.computing[name] * found.merged[name] for name in names),
    site_bytes=sum(found.up_bytes.values()) / where.sites / config.total_steps,
  )


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
  share: Callable[[float], float], targets: Iterable[float], start: float
) -> dict[float, float]:
  """The least rate for each target: `share` reaches it at this one and at all greater tried ones.

  Tries `start` times powers of two, then halves the last factor of two HALVINGS times.

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
    for _ in itertools.repeat(None, HALVINGS):
      middle = (low * high) ** 0.5
      low, high = (low, middle) if share(middle) >= target else (middle, high)
    found[target] = high
  return found
