"""What the work of a learner with a thin link, or of one long offline, is worth (links.md)."""

import dataclasses
from typing import Any

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.verification import plans
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

STEPS = 480
WITHOUT = 'without l3'
UP = (1.5, 2.0, 4.0, 8.0)  # inner steps that a payload of codec_up takes on the up-link of l3
OFFLINE = (0.25, 0.5)  # of the run; it begins after a quarter of it
HARDWARE = conditions.Hardware(lognormal=0.2, merge=0.02, encode=0.005, adopt=0.005)
LATENCIES = (2.0, 8.0)  # of all links, one way, in inner steps
THIN = (
  3.4,
  17.0,
)  # inner steps that a payload takes on all links, as 25M values at 10 and 2 Mbit/s
ALL_GOOD = 'four good links, P=H=4'
BOUNDS: dict[str, dict[str, Any]] = {'': {}, ', the period as set': {'longest_period': 0}}
SCALE = 1_000  # the links carry payloads so many times as large as those of the tiny model
_SIZES: dict[tuple[int, str], int] = {}  # of a payload, by the number of fragments and the codec


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """All arms of a seed have the same clock: those without l3 train three quarters of the tokens."""
  del book
  planned = []
  for seed in (0,) if quick else range(5):
    planned += [_arm(quick, seed, WITHOUT, learners=3), _arm(quick, seed, 'four good links')]
    for steps in UP[1:3] if quick else UP:
      planned.append(_arm(quick, seed, f'up {steps:g} steps', up=steps))
    if not quick:
      planned.append(_arm(quick, seed, 'down 2 steps', down=2.0))
    for steps in () if quick else UP[1:3]:
      planned.append(_arm(quick, seed, f'up and down {steps:g} steps', up=steps, down=steps))
    for share in OFFLINE[:1] if quick else OFFLINE:
      planned.append(_arm(quick, seed, f'offline {share:.0%} of the run', offline=share))
  return planned + _all_links(quick)


def _all_links(quick: bool) -> list[arms.Arm]:
  """All links thin, and all far: with the period that the syncer chooses, and as it is set."""
  lines = []
  for seed in (0,) if quick else range(3):
    for steps in (0.0, *(THIN[:1] if quick else THIN)):
      name = f'all up and down {steps:g} steps' if steps else ALL_GOOD
      for text, bound in BOUNDS.items() if steps else (('', {}),):
        shape = {'fragments': 4, 'period': 4}
        arm = _arm(quick, seed, name + text, of_all=steps, against=ALL_GOOD, **shape, **bound)
        lines.append(arm)
    if not quick:  # a payload of int4 takes 17 steps, a delta of int8 about twice as many
      more = {'of_all': 17.0, 'against': ALL_GOOD, 'codec_up': 'int4', **shape}
      lines.append(_arm(quick, seed, 'all 17 steps, int4 up', **more))
    for latency in (0.0, *(LATENCIES[1:] if quick else LATENCIES)):
      for text, bound in BOUNDS.items() if latency else (('', {}),):
        lines.append(_far(quick, seed, latency, text, **bound))
  return lines


def _far(quick: bool, seed: int, latency: float, text: str, **sync: Any) -> arms.Arm:
  """The small model, and a network with this latency."""
  return arms.decoupled(
    'links',
    f'latency {latency:g}{text}',
    quick,
    seed=seed,
    steps=600,
    against='latency 0',
    where={
      'hardware': conditions.Hardware(lognormal=0.3, merge=0.05),
      'network': conditions.Network(latency=latency, up=0.3, down=0.3),
    },
    **sync,
  )


def _arm(
  quick: bool,
  seed: int,
  name: str,
  *,
  learners: int = 4,
  up: float = 0.0,
  down: float = 0.0,
  of_all: float = 0.0,
  offline: float = 0.0,
  against: str = WITHOUT,
  **sync: Any,
) -> arms.Arm:
  """An arm of the tiny model; `up`, `down`: inner steps that a payload of mean size takes on the
  link of l3, `of_all` on all links and both ways, 0: none; `offline`: the share of the run."""
  steps = STEPS // 3 if quick else STEPS
  planned = arms.decoupled(
    'links',
    name,
    False,
    seed=seed,
    steps=steps,
    learners=learners,
    batch=4,
    optimizer='adamw',
    rate=3e-3,
    against=against,
    outer='nesterov(learning_rate=0.7, momentum=0.5)',
    **({'codec_up': 'int8', 'codec_down': 'int8'} | sync),
  )
  planned.config.model = stdlib_lm.tiny().model
  up, down = of_all or up, of_all or down
  line = conditions.Line(
    up=_bytes_per_s(planned, up), down=_bytes_per_s(planned, down), scale=SCALE
  )
  others = line if of_all else conditions.Line()
  fault = plans.Fault(
    at_ns=HARDWARE.ns(steps / 4), kind='partition', node='l3', for_ns=HARDWARE.ns(offline * steps)
  )
  where = {
    'hardware': HARDWARE,
    'network': conditions.Network(latency=0.01, lines=(*3 * (others,), line)),
    'faults': conditions.Faults(plan=(fault,) if offline else ()),
  }
  more = 'four learners against three' if against == WITHOUT and learners > 3 else ''
  return dataclasses.replace(planned, where=where, unequal=more)


def _bytes_per_s(arm: arms.Arm, steps: float) -> float:
  """The speed of a link on which a payload takes so many inner steps."""
  if not steps:
    return 0.0
  return network_lib.wire_bytes(SCALE * _payload_bytes(arm)) / (steps * HARDWARE.step_s)


def _payload_bytes(arm: arms.Arm) -> int:
  """The mean size of a payload. All arms have the same model."""
  count = arm.config.sync.fragments
  key = count, arm.config.sync.codec_up
  if key not in _SIZES:
    _SIZES[key] = sum(build.assemble(arm.config).payload_bytes) // count
  return _SIZES[key]


STUDY = study_lib.Study(name='links', title='A learner with a thin link, or offline', plan=plan)
