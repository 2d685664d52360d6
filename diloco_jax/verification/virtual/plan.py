"""What a run needs before it starts: bandwidth, settings that fit its links, and its syncer.

Shares come from the protocol in virtual time (links.py), the other coefficients from measurements
(docs/performance.md).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from diloco_jax.protocol import config as config_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.virtual import conditions, links

FITS = 0.95  # of each learner's tokens are merged in the syncs for which they were due
COMPUTES = 0.9  # of what it computes on links of any speed
SPARE = 4 / 3  # a link of so many times the mean rate loses nothing
HOPELESS = 20  # times what a link carries: not predicted
PERIODS = 6  # in a prediction
MEMORY_BYTES = 14.2  # of the syncer, for each parameter
STEP_NS, GROWTH = 6.3, 0.56  # an outer step, for each parameter with M = 8; exponent in M
THREADS = 4  # of an outer step (syncer/global_model.py)
BYTE_NS = 0.73  # of the syncer's CPUs, for each byte to or from it
PROCESS_BYTES_PER_S = 1.2e9  # through a syncer's process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run to plan.

  Attributes:
    protocol: its settings.
    values: of each fragment.
    up, down: the codecs.
    step_s: an inner step of learner m without any exchange, `step_s[m % len(step_s)]`.
    lines: the links, in the same way; (): of any speed.
    latency_s: one way.
  """

  protocol: config_lib.ProtocolConfig
  values: tuple[int, ...]
  up: str
  down: str
  step_s: tuple[float, ...]
  lines: tuple[conditions.Line, ...] = ()
  latency_s: float = 0.0

  @property
  def bytes(self) -> tuple[list[int], list[int]]:
    """The payloads of a period on the wire, up and down, by fragment."""
    model = links.sizes(self.values, self.up, self.down)
    up, down = model.payload_bytes, model.delta_bytes
    return [*map(network_lib.wire_bytes, up)], [*map(network_lib.wire_bytes, down)]

  @property
  def mean_bytes_per_s(self) -> float:
    """To or from a learner, whichever is more."""
    return max(map(sum, self.bytes)) / (self.protocol.period * min(self.step_s))

  @property
  def rates(self) -> tuple[float, float]:
    """The least bytes per second that a learner has, up and down; a site's learners share its."""
    lines = [self.lines[m % len(self.lines)] for m in range(self.protocol.learners) if self.lines]
    shares = [(one, sum(one == other for other in lines) if one.site else 1) for one in lines]
    return tuple(
      min(((one[way] or math.inf) / count for one, count in shares), default=math.inf)
      for way in (0, 1)
    )

  @property
  def step_cpu_ns(self) -> float:
    """Of the syncer, an outer step, for each parameter."""
    return STEP_NS * (self.protocol.learners / 8) ** GROWTH

  @functools.cache  # noqa: B019, a command's few runs
  def predict(self) -> links.Prediction:
    """PERIODS of it in virtual time."""
    steps = min(self.protocol.total_steps, PERIODS * self.protocol.period)
    config = dataclasses.replace(self.protocol, total_steps=steps, save_steps=0, save_syncs=0)
    step_s = min(self.step_s)
    hardware = conditions.Hardware(
      step_s=step_s,
      slowness=tuple(one / step_s for one in self.step_s),
      gaussian=0.02,
      merge=self.step_cpu_ns * 1e-9 * max(self.values) / (THREADS * step_s),
    )
    network = conditions.Network(latency=self.latency_s / step_s, lines=self.lines)
    return links.predict(config, links.sizes(self.values, self.up, self.down), hardware, network)

  def fits(self) -> bool:
    """Whether its links carry all payloads in time."""
    if self.mean_bytes_per_s > HOPELESS * min(self.rates):
      return False
    found, free = self.predict(), dataclasses.replace(self, lines=()).predict()
    computes = all(found.computing[name] >= COMPUTES * free.computing[name] for name in found.steps)
    return computes and min(found.on_time.values()) >= FITS


def needed(run: Run) -> float:
  """The bytes per second each way, within 10 %, of links of their own with which the run fits;
  infinite if none are enough."""
  fits = lambda rate: dataclasses.replace(run, lines=(conditions.Line(rate, rate),)).fits()
  low, high = run.mean_bytes_per_s, 64 * run.mean_bytes_per_s
  if not fits(high):
    return math.inf
  while high > 1.1 * low:
    middle = (low * high) ** 0.5
    low, high = (low, middle) if fits(middle) else (middle, high)
  return high


def fitting(run: Run) -> Run | None:
  """The run with settings that fit its links, found in the order of what they cost: time for a
  payload, narrower codecs (0.1 % of the loss), longer periods (1 % for twice as long). None: none
  of them do."""
  return next((one for one in (run, *_candidates(run)) if one.fits()), None)


def _candidates(run: Run) -> Iterator[Run]:
  """Others with traffic that the links carry, and as much overlap as a payload takes."""
  codecs = dict.fromkeys(((run.up, run.down), ('int4', run.down), ('int4', 'int4')))
  for factor, (up, down), most in itertools.product((1, 2, 4, 8, 16), codecs, (0, 24)):
    period, step_s = run.protocol.period * factor, min(run.step_s)
    count = max(run.protocol.fragments, min(most, period))
    each = -(-sum(run.values) // (32 * count)) * 32
    values = run.values if count == len(run.values) else (each,) * count
    one = dataclasses.replace(run, up=up, down=down, values=values)
    busy, takes = (
      max(part(sizes) / rate for sizes, rate in zip(one.bytes, run.rates)) / step_s
      for part in (sum, max)
    )
    more = {
      'period': period,
      'fragments': count,
      'ahead': max(run.protocol.ahead, math.ceil(takes)),
      'overlap': max(run.protocol.overlap, math.ceil(takes) + 2),
    }
    if SPARE * busy <= period > max(more['ahead'], more['overlap']):
      yield dataclasses.replace(one, protocol=dataclasses.replace(run.protocol, **more))


def facts(run: Run, step_tokens: float | None, tokens: float | None) -> dict[str, Any]:
  """The plan of a run. Bytes are those on the wire, rates in bytes per second.

  Args:
    run: the run.
    step_tokens: of a learner's inner step; None: not known.
    tokens: to train on; None: `total_steps` steps.

  Raises:
    ValueError: tokens without step_tokens.
  """
  protocol, found, (up, down) = run.protocol, run.predict(), run.bytes
  if tokens and not step_tokens:
    raise ValueError('--tokens needs the tokens of an inner step: add --step_tokens')
  names, learners, parameters = list(found.steps), protocol.learners, sum(run.values)
  step_s = [run.step_s[m % len(run.step_s)] for m in range(learners)]
  per_s = sum(found.computing[name] / one for name, one in zip(names, step_s))
  seconds = tokens / (step_tokens * per_s) if tokens else protocol.total_steps * min(step_s)
  traffic = learners * (sum(up) + sum(down)) / (protocol.period * min(step_s))
  payloads = learners * protocol.lead * max(*up, *down)
  ring = 4 * (learners - 1) / learners * parameters  # bfloat16 gradients, to and from a learner
  groups: dict[Any, list[int]] = {}
  for m in range(learners):
    line = run.lines[m % len(run.lines)] if run.lines else conditions.Line()
    groups.setdefault((line, step_s[m]), []).append(m)
  least = lambda shares, of: min(shares[names[m]] for m in of)
  return {
    'parameters': parameters,
    'up_bytes': sum(up),
    'down_bytes': sum(down),
    'needed_bytes_per_s': needed(run),
    'data_parallel': {'bytes': ring, 'bytes_per_s': ring / min(step_s)},
    'syncer': {
      'memory_bytes': MEMORY_BYTES * parameters + payloads,
      'cores': (traffic * BYTE_NS + parameters * run.step_cpu_ns / (protocol.period * min(step_s)))
      / 1e9,
      'bytes_per_s': traffic,
    },
    'seconds': seconds,
    'what': f'{tokens:.3g} tokens' if tokens else f'{protocol.total_steps:,} steps',
    'links': {
      names[of[0]] + (f' to {names[of[-1]]}' if len(of) > 1 else ''): {
        'up': line.up,
        'down': line.down,
        'computing': least(found.computing, of),
        'merged': least(found.merged, of),
        'on_time': least(found.on_time, of),
      }
      for (line, _), of in groups.items()
    },
    **_verdict(run),
  }


def _verdict(run: Run) -> dict[str, Any]:
  """Whether a run fits, and what to change if it does not."""
  if run.fits():
    return {'fits': True, 'change': ''}
  other = fitting(run)
  if other is None:
    return {'fits': False, 'change': 'no longer period helps. Use faster links or fewer parameters'}
  settings = lambda one: {
    **{name: getattr(one.protocol, name) for name in ('period', 'fragments', 'overlap', 'ahead')},
    'codec_up': one.up,
    'codec_down': one.down,
  }
  changed = dict(settings(other).items() - settings(run).items())
  words = [f'--config.sync.{name}={value}' for name, value in sorted(changed.items())]
  return {'fits': False, 'change': f'use {" ".join(words)}'}
