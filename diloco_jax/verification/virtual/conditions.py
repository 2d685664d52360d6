"""The conditions of a virtual run: how long everything takes, and what goes wrong.

Times are in units of an inner step, the mean step of a learner of speed 1.
"""

import dataclasses
from typing import Any, NamedTuple

from diloco_jax.verification import plans, random_streams
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import faults as faults_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import world as world_lib

# No faults that need what a virtual run does not have: a disk, a second process, fewer devices,
# wrong arrays.
LEARNER_KINDS = (*(kind for kind in plans.KINDS if kind != 'replace'), 'delay')
SYNCER_KINDS = ('kill', 'freeze', *LEARNER_KINDS[4:])
PERMILLE = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """The islands of the learners and the syncer's host.

  Attributes:
    step_s: an inner step in seconds, to which the protocol's times (heartbeats, leases) refer.
    slowness: a step of learner m takes `slowness[m % len(slowness)]` times as long.
    lognormal: sigma of a log-normal factor of every step, whose mean is 1.
    gaussian: standard deviation of a normal factor of every step.
    encode, adopt: of a fragment, on the learner, beside its next step.
    merge: an outer step on the syncer, with its commit to the log.
    exchange: what the exchange adds to every step, where it shares cores with the step.
  """

  step_s: float = 0.1
  slowness: tuple[float, ...] = (1.0,)
  lognormal: float = 0.0
  gaussian: float = 0.0
  encode: float = 0.0
  adopt: float = 0.0
  merge: float = 0.0
  exchange: float = 0.0

  def __post_init__(self):
    _not_negative(self)
    if not self.step_s > 0 or not self.slowness or min(self.slowness) <= 0:
      raise ValueError(f'step_s and slowness must be more than 0: {self}')

  def ns(self, steps: float) -> int:
    """A time in nanoseconds."""
    return round(steps * self.step_s * engine_lib.SECOND)


class Line(NamedTuple):
  """A link in bytes per second to the syncer and from it, headers included; 0: as many as there
  are. Learners of the same `site` share one, others have their own. A payload counts `scale` times:
  those of a tiny model are no longer than the headers and frames of a real link."""

  up: float = 0.0
  down: float = 0.0
  site: str = ''
  scale: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
  """The links between learners and syncer; every learner has its own.

  Attributes:
    latency: one way.
    up, down: additional time of a fragment's payload to the syncer, and from it. It does not depend
      on the payload's size, so runs with different codecs have one schedule.
    lines: that of learner m is `lines[m % len(lines)]`; the size of a payload then counts instead.
  """

  latency: float = 0.0
  up: float = 0.0
  down: float = 0.0
  lines: tuple[Line, ...] = ()

  def __post_init__(self):
    _not_negative(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
  """Deaths and other faults. The log of the syncer does not fail in virtual runs.

  Attributes:
    death_every: mean time from a start of a learner to its death, drawn for each learner by itself;
      0: no deaths.
    down: how long a learner is away after a death.
    host_lost: the share of deaths after which the learner has no checkpoint.
    shared: whether it then reads the moments in another's newest one; else they are fresh.
    plan: further faults (verification/plans.py).
    flipped: learners that send the opposite of what they have trained.
    noisy: learners that send noise, of the length of what they have trained, tensor by tensor.
  """

  death_every: float = 0.0
  down: float = 24.0
  host_lost: float = 0.0
  shared: bool = True
  plan: tuple[plans.Fault, ...] = ()
  flipped: tuple[str, ...] = ()
  noisy: tuple[str, ...] = ()

  def __post_init__(self):
    _not_negative(self)
    for fault in self.plan:
      kinds = SYNCER_KINDS if fault.node == plans.SYNCER else LEARNER_KINDS
      if fault.kind not in kinds:
        raise ValueError(
          f'a virtual run has no fault {fault.kind!r} of {fault.node}; use one of: '
          f'{", ".join(kinds)}'
        )

  @property
  def odds(self) -> faults_lib.Odds:
    return faults_lib.Odds(power_lost=0, rotten=0, host_lost=round(self.host_lost * PERMILLE))


def delays(name: str, **hardware: Any) -> dict[str, Any]:
  """Hardware and network of a name, as arguments of a virtual run; `hardware`: its other fields.

  'none', 'lan', 'wan' (25 ms, and 0.4 s for a fragment of 12 billion parameters in int8 at 10
  Gbit/s, with steps of 1 s), and 'capped' (a lan with an uplink of 4/3 of the mean rate of the
  payloads, if P = H).

  >>> delays('lan', slowness=(1, 1.5))['hardware'].merge
  0.02

  Raises:
    ValueError: there is no such name.
  """
  if name not in _DELAYS:
    raise ValueError(f'there are no delays {name!r}; use one of: {", ".join(_DELAYS)}')
  latency, up, down, encode, adopt, merge = _DELAYS[name]
  times = {'encode': encode, 'adopt': adopt, 'merge': merge}
  return {
    'hardware': Hardware(**{**times, **hardware}),
    'network': Network(latency=latency, up=up, down=down),
  }


_DELAYS = {  # latency, up, down, encode, adopt, merge
  'none': (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
  'lan': (0.001, 0.02, 0.02, 0.005, 0.005, 0.02),
  'wan': (0.025, 0.4, 0.4, 0.02, 0.02, 0.1),
  'capped': (0.001, 0.75, 0.02, 0.005, 0.005, 0.02),
}


def furnish(
  world: world_lib.World, learners: list[str], hardware: Hardware, network: Network, tokens: int
) -> None:
  """Gives every learner its island and its link, and the syncer its times."""
  ns = hardware.ns
  world.syncer.merge_ns = ns(hardware.merge)
  pipes: dict[tuple[str, str], network_lib.Pipe] = {}
  for which, name in enumerate(learners):
    island, link = world.island(name), world.link(name)
    island.step_ns = ns(hardware.slowness[which % len(hardware.slowness)] + hardware.exchange)
    island.lognormal, island.gaussian = hardware.lognormal, hardware.gaussian
    island.encode_ns, island.adopt_ns = ns(hardware.encode), ns(hardware.adopt)
    island.tokens = tokens
    link.up_ns = link.down_ns = ns(network.latency)
    link.bulk_up_ns, link.bulk_down_ns = ns(network.up), ns(network.down)
    line = network.lines[which % len(network.lines)] if network.lines else Line()
    for lane, bytes_per_s in (('up', line.up), ('down', line.down)):
      if bytes_per_s:
        pipe = network_lib.Pipe(world.engine, bytes_per_s, line.scale)
        link.pipes[lane] = pipes.setdefault((line.site or f'learner {name}', lane), pipe)


def deaths(
  faults: Faults, hardware: Hardware, seed: int, learners: list[str], until_ns: int
) -> list[plans.Fault]:
  """All faults of a run in the order of time: those of the plan, and deaths until a time. Those of
  a longer time begin with those of a shorter one."""
  planned = list(faults.plan)
  for name in learners if faults.death_every else ():
    draw = random_streams.random_stream(seed, 'deaths', name)
    at_ns, down_ns = 0, hardware.ns(faults.down)
    while True:
      at_ns += hardware.ns(draw.expovariate(1 / faults.death_every))
      if at_ns >= until_ns:
        break
      planned.append(plans.Fault(at_ns=at_ns, kind='kill', node=name, for_ns=down_ns))
      at_ns += down_ns
  return sorted(planned, key=lambda fault: (fault.at_ns, fault.node))


def _not_negative(conditions: Any) -> None:
  for field in dataclasses.fields(conditions):
    value = getattr(conditions, field.name)
    if isinstance(value, int | float) and not value >= 0:
      raise ValueError(f'{type(conditions).__name__}.{field.name} is {value}: use 0 or more')
