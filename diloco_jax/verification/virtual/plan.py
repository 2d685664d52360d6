"""What a run needs before it starts: bandwidth, settings that fit its links, and its syncer.

Shares come from the protocol in virtual time (links.py), coefficients from docs/performance.md.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import tempo as tempo_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.virtual import conditions, delay_cost, links

FITS = 0.95  # of the tokens that are merged when due on links of any speed
COMPUTES = 0.9  # of what it computes on links of any speed
SPARE = 4 / 3  # times the mean rate, for a link that loses nothing
PERIODS, LONG = 6, 60  # in a prediction, and in one of the period that the syncer chooses
FACTORS = 1 / 4, 1 / 3, 1 / 2, 1, 2, 4, 8, 16  # of the period, in what fits
SHORTEST = 3  # inner steps of a period, unless the run has less
# A codec costs as much loss as a period so many times as long (docs/studies/scale/rungs.md).
AS_LONG = {'int4': 1.05, 'int2': 1.3}
MEMORY_BYTES = 14.2  # of the syncer, for each parameter
STEP_NS, GROWTH, THREADS = 6.3, 0.56, 4  # CPU of an outer step, M = 8; exponent in M; its threads
BYTE_NS, PROCESSES_BYTE_NS = 0.8, 1.0  # of its CPUs, for each byte; with transport processes
PROCESS_BYTES_PER_S = 1.2e9  # through the process of a syncer, or a transport process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run to plan. `values`: of each fragment; `codecs`: up and down. Learner m has the step time
  `step_s[m % len(step_s)]` and the line `lines[m % len(lines)]`, of any speed without lines; each
  message takes `latency_s` more, one way."""

  protocol: config_lib.ProtocolConfig
  values: tuple[int, ...]
  codecs: tuple[str, str]
  step_s: tuple[float, ...]
  lines: tuple[conditions.Line, ...] = ()
  latency_s: float = 0.0

  @property
  def bytes(self) -> list[list[int]]:
    """The payloads of a period on the wire, up and down, by fragment."""
    model = links.sizes(self.values, *self.codecs)
    return [[*map(network_lib.wire_bytes, of)] for of in (model.payload_bytes, model.delta_bytes)]

  @property
  def period_s(self) -> float:
    return self.protocol.period * min(self.step_s)

  @property
  def syncer_bytes_per_s(self) -> float:
    """To and from the syncer."""
    return self.protocol.learners * sum(map(sum, self.bytes)) / self.period_s

  @property
  def parts(self) -> list[tuple[float, ...]]:
    """By learner the bytes per second, up and down; a site's learners have equal parts."""
    given = self.lines or (conditions.Line(),)
    lines = list(itertools.islice(itertools.cycle(given), self.protocol.learners))
    shared = [lines.count(line) if line.site else 1 for line in lines]
    return [tuple((rate or math.inf) / n for rate in line[:2]) for line, n in zip(lines, shared)]

  @property
  def rates(self) -> list[float]:
    """The least bytes per second of a learner, up and down."""
    return [*map(min, zip(*self.parts))]

  @property
  def round_trip_s(self) -> float:
    """A message, and its answer."""
    return 2 * self.latency_s

  @property
  def delayed(self) -> bool:
    """Whether the syncer waits a round trip longer for payloads: it does not wait a short one."""
    return self.round_trip_s * config_lib.SECOND_NS >= tempo_lib.LEAST_DELAY_NS

  @property
  def delays(self) -> dict[str, float]:
    """Their strength by kind, as of delay_cost, where they count: thin are most of its links."""
    slots = [
      max(sum(of) / rate for of, rate in zip(self.bytes, part)) / self.period_s
      for part in self.parts
    ]
    thin = sorted(slots)[(len(slots) - 1) // 2]
    latency = self.latency_s / min(self.step_s)
    return {k: v for k, v, least in (('latency', latency, 0), ('thin', thin, 1)) if v > least}

  def loss(self, steps: int) -> dict[str, delay_cost.Cost | None]:
    """The expected cost of its delays in so many steps, by kind; None: no law holds."""
    few = lambda strength: steps < delay_cost.LEAST_PERIODS * self.protocol.period * strength
    cost = lambda kind, strength: delay_cost.expected(
      delay_cost.LAWS[kind], strength, steps, sum(self.values)
    )
    return {
      kind: None if kind == 'thin' and few(strength) else cost(kind, strength)
      for kind, strength in self.delays.items()
    }

  @property
  def transport_processes(self) -> int:
    """The transport processes for its bytes; 0: the syncer has none. Twice as many as they would
    fill, since the kernel spreads learners over them by chance, and no more than learners."""
    filled = self.syncer_bytes_per_s / PROCESS_BYTES_PER_S
    return 0 if filled <= 1 else min(self.protocol.learners, math.ceil(2 * filled))

  @property
  def outer_step_cores(self) -> float:
    """The cores that all outer steps of the syncer fill."""
    return self.outer_step_s * sum(self.values) / self.period_s

  @property
  def outer_step_s(self) -> float:
    """CPU time of the syncer for each parameter."""
    return STEP_NS * 1e-9 * (self.protocol.learners / 8) ** GROWTH

  @functools.cache  # noqa: B019, a command plans few
  def predict(self, adapts: bool = False) -> links.Prediction:
    """PERIODS of it in virtual time. `adapts`: the syncer may change the period; on lines they are
    LONG ones."""
    period, step_s = self.protocol.period, min(self.step_s)
    steps = min(self.protocol.total_steps, (LONG if adapts and self.lines else PERIODS) * period)
    # Until the syncer has measured the latency, most payloads are late: a few periods of a run.
    measured_s = self.protocol.heartbeat_ns / config_lib.SECOND_NS + 4 * self.round_trip_s
    warm_up = 2 * period + math.ceil(measured_s / step_s) if self.delayed else 0
    bound = {} if adapts else {'longest_period': 0}
    return links.predict(
      dataclasses.replace(
        self.protocol, total_steps=steps + warm_up, save_steps=0, save_syncs=0, **bound
      ),
      links.sizes(self.values, *self.codecs),
      conditions.Hardware(
        step_s=step_s,
        slowness=tuple(seconds / step_s for seconds in self.step_s),
        gaussian=0.02,
        merge=self.outer_step_s * max(self.values) / (THREADS * step_s),
      ),
      conditions.Network(latency=self.latency_s / step_s, lines=self.lines),
      warm_up=int(warm_up * step_s / max(self.step_s)),  # steps of the slowest
    )

  def in_time(self) -> bool:
    """Whether its links carry all payloads in time, and the latency leaves the period as it is."""
    free = lambda run: dataclasses.replace(run, lines=(), latency_s=0.0).predict()
    enough = lambda shares, of, least: all(shares[name] >= least * of[name] for name in shares)
    # A learner with longer steps is late on any link, more or less by chance: equal ones judge it.
    even = dataclasses.replace(self, step_s=(min(self.step_s),))
    computes = enough(self.predict().computing, free(self).computing, COMPUTES)
    far = self.delayed and dataclasses.replace(self, lines=()).predict(adapts=True)
    kept = not far or far.period <= self.protocol.period
    return computes and kept and enough(even.predict().on_time, free(even).on_time, FITS)

  def misfit(self) -> str:
    """What it does not fit; '' if it fits."""
    if self.syncer_bytes_per_s > self.protocol.learners * PROCESS_BYTES_PER_S:
      return f'syncer ({PROCESS_BYTES_PER_S * 8e-9:.1f} Gbit/s for each learner)'
    if self.outer_step_cores > THREADS:
      return f'syncer (outer steps fill {self.outer_step_cores:.1f} cores, it uses {THREADS})'
    return '' if self.in_time() else 'links'


def needed(run: Run) -> float | None:
  """The bytes per second each way, within 10 %, of own links with which the run is in time; None:
  none are enough."""
  enough = lambda rate: dataclasses.replace(run, lines=(conditions.Line(rate, rate),)).in_time()
  low = max(map(sum, run.bytes)) / run.period_s
  high = 64 * low
  if not enough(high):
    return None
  while high > 1.1 * low:
    middle = (low * high) ** 0.5
    low, high = (low, middle) if enough(middle) else (middle, high)
  return high


def fitting(run: Run) -> Run | None:
  """The run with those settings of exchanges that fit and cost the least loss: a shorter or longer
  period, with fewer fragments if it has to, and narrower codecs, which buy a shorter one. The
  overlap is as much as a payload takes, and the round trip, or, if the syncer waits it, the period
  includes it. None: none fit."""
  up, down = run.codecs
  codecs = dict.fromkeys(((up, down), ('int4', down), ('int4', 'int4'), ('int2', 'int2')))
  lengths = dict.fromkeys(round(run.protocol.period * factor) for factor in FACTORS)
  shortest = min(SHORTEST, run.protocol.period)
  tried = itertools.product((length for length in lengths if length >= shortest), codecs)
  for period, codecs in sorted(tried, key=lambda pair: _loss_as(*pair)):
    if (planned := _with(run, period, codecs)) and not planned.misfit():
      return planned
  return None


def _loss_as(period: int, codecs: tuple[str, str]) -> float:
  """The period with int8 that costs as much loss."""
  return period * max(AS_LONG.get(codec, 1.0) for codec in codecs)


def _with(run: Run, period: int, codecs: tuple[str, str]) -> Run | None:
  """The run with these, None if its links have less than the mean rate."""
  fragments, total = min(run.protocol.fragments, period), sum(run.values)
  values = run.values
  if fragments < len(values):
    values = (-(-total // (fragments * 32)) * 32,) * fragments
  planned = dataclasses.replace(run, codecs=codecs, values=values)
  busy, takes = (
    max(part(of) / rate for of, rate in zip(planned.bytes, run.rates)) / min(run.step_s)
    for part in (sum, max)
  )
  trip = math.ceil(run.round_trip_s / min(run.step_s))
  ahead = max(run.protocol.ahead, math.ceil(takes))
  lasts = (math.ceil(takes) if takes > 0.5 else 0) + 2 + (0 if run.delayed else trip)
  overlap = max(min(run.protocol.overlap, period - 1), lasts)
  waits = overlap + trip + 1 if run.delayed else overlap
  if SPARE * busy > period or period <= max(ahead, waits):
    return None
  settings = {'period': period, 'fragments': fragments, 'ahead': ahead, 'overlap': overlap}
  return dataclasses.replace(planned, protocol=dataclasses.replace(run.protocol, **settings))


def facts(run: Run, step_tokens: int, tokens: float | None) -> dict[str, Any]:
  """The plan of a run, in bytes on the wire and seconds: for so many tokens (None: `total_steps`
  steps) with so many in a learner's inner step. `fits`: whether its links and its syncer do;
  `period`: that the syncer chooses, in inner steps; `change`: what it does not fit, and which
  settings do; `better`: which ones fit its links, too, and cost less; `loss`: what its delays are
  expected to cost, by kind; None: no law holds."""
  protocol, predicted, parameters = run.protocol, run.predict(), sum(run.values)
  rates = [share / s for share, s in zip(predicted.computing.values(), itertools.cycle(run.step_s))]
  up_bytes, down_bytes = map(sum, run.bytes)
  ring = 4 * (1 - 1 / protocol.learners) * parameters  # of bfloat16 to a learner, and from it
  misfit = run.misfit()
  byte_ns = PROCESSES_BYTE_NS if run.transport_processes else BYTE_NS
  steps = round(tokens / (step_tokens * protocol.learners)) if tokens else protocol.total_steps
  return {
    'parameters': parameters,
    'up_bytes': up_bytes,
    'down_bytes': down_bytes,
    'needed_bytes_per_s': needed(run),
    'data_parallel_bytes_per_s': ring / min(run.step_s),
    'syncer_memory_bytes': MEMORY_BYTES * parameters
    + protocol.learners * protocol.lead * max(map(max, run.bytes)),
    'syncer_cores': run.syncer_bytes_per_s * byte_ns * 1e-9 + run.outer_step_cores,
    'transport_processes': run.transport_processes,
    'syncer_bytes_per_s': run.syncer_bytes_per_s,
    'seconds': tokens / (step_tokens * sum(rates)) if tokens else protocol.total_steps / max(rates),
    'learners': {name: of for name, of in predicted._asdict().items() if name != 'period'},
    'loss': {kind: cost and cost._asdict() for kind, cost in run.loss(steps).items()},
    'fits': not misfit,
    'period': run.predict(adapts=True).period if misfit == 'links' else protocol.period,
    'change': misfit and f'{misfit}{_change(run)}',
    'better': _better(run) if run.lines and not misfit else '',
  }


def _change(run: Run) -> str:
  """Which settings of a run would fit."""
  if (other := fitting(run)) is None:
    return ', nor with a period 16 times as long'
  return f'; use {_changes(run, other)}'


def _better(run: Run) -> str:
  """Which settings fit these links, too, and cost less loss; '' if none do."""
  cost = lambda planned: _loss_as(planned.protocol.period, planned.codecs)
  other = fitting(run)
  return _changes(run, other) if other and cost(other) < cost(run) else ''


def _changes(run: Run, other: Run) -> str:
  settings = lambda planned: {
    **dict(zip(('codec_up', 'codec_down'), planned.codecs)),
    **{
      name: getattr(planned.protocol, name) for name in ('period', 'fragments', 'overlap', 'ahead')
    },
  }
  changed = sorted(settings(other).items() - settings(run).items())
  return ' '.join(f'--config.sync.{name}={value}' for name, value in changed)
