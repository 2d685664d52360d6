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
LATENCIES = (1.0, 8.0, 15.0)  # of all links, one way, in inner steps
LIMITS = ((1, 2), (2, 4), (4, 8))  # max_staleness, max_misses; the first are the defaults
SCALE = 1_000  # the links carry payloads so many times as large as those of the tiny model
_SIZES: list[int] = []  # of the payloads; computed once


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """All arms of a seed have the same clock: those without l3 train three quarters of the tokens."""
  del book
  found = []
  for seed in (0,) if quick else range(5):
    found += [_arm(quick, seed, WITHOUT, learners=3), _arm(quick, seed, 'four good links')]
    for steps in UP[1:3] if quick else UP:
      found.append(_arm(quick, seed, f'up {steps:g} steps', up=steps))
    for steps in () if quick else UP[2:]:  # no codec fits
      name = f'up {steps:g} steps, slow_age_decay=1'
      found.append(_arm(quick, seed, name, up=steps, slow_age_decay=1.0))
    if not quick:
      found.append(_arm(quick, seed, 'down 2 steps', down=2.0))
    for steps in () if quick else UP[1:3]:
      found.append(_arm(quick, seed, f'up and down {steps:g} steps', up=steps, down=steps))
    for share in OFFLINE[:1] if quick else OFFLINE:
      found.append(_arm(quick, seed, f'offline {share:.0%} of the run', offline=share))
  return found + _late(quick)


def _late(quick: bool) -> list[arms.Arm]:
  """The small model, and payloads that come versions late: merge them, or drop their steps? At a
  latency of a step none comes more than a version late, so only the defaults run."""
  return [
    arms.decoupled(
      'links',
      f'latency {latency:g}, max_staleness={staleness}, max_misses={misses}',
      quick,
      steps=600,
      against=f'latency {latency:g}, max_staleness=1, max_misses=2',
      where={
        'hardware': conditions.Hardware(lognormal=0.3, merge=0.05),
        'network': conditions.Network(latency=latency, up=0.3, down=0.3),
      },
      max_staleness=staleness,
      max_misses=misses,
    )
    for latency in (LATENCIES[1:2] if quick else LATENCIES)
    for staleness, misses in (LIMITS[:1] if latency <= 1 else LIMITS[: 2 if quick else None])
  ]


def _arm(
  quick: bool,
  seed: int,
  name: str,
  *,
  learners: int = 4,
  up: float = 0.0,
  down: float = 0.0,
  offline: float = 0.0,
  **sync: Any,
) -> arms.Arm:
  """An arm of the tiny model; `up`, `down`: inner steps that a payload of mean size takes on the
  link of l3, 0: none; `offline`: the share of the run."""
  steps = STEPS // 3 if quick else STEPS
  made = arms.decoupled(
    'links',
    name,
    False,
    seed=seed,
    steps=steps,
    learners=learners,
    batch=4,
    optimizer='adamw',
    rate=3e-3,
    against=WITHOUT,
    outer='nesterov(learning_rate=0.7, momentum=0.5)',
    codec_up='int8',
    codec_down='int8',
    **sync,
  )
  made.config.model = stdlib_lm.tiny().model
  line = conditions.Line(up=_bytes_per_s(made, up), down=_bytes_per_s(made, down), scale=SCALE)
  fault = plans.Fault(
    at_ns=HARDWARE.ns(steps / 4), kind='partition', node='l3', for_ns=HARDWARE.ns(offline * steps)
  )
  where = {
    'hardware': HARDWARE,
    'network': conditions.Network(latency=0.01, lines=(*3 * (conditions.Line(),), line)),
    'faults': conditions.Faults(plan=(fault,) if offline else ()),
  }
  return dataclasses.replace(made, where=where)


def _bytes_per_s(arm: arms.Arm, steps: float) -> float:
  """The speed of a link on which a payload takes so many inner steps."""
  if not steps:
    return 0.0
  return network_lib.wire_bytes(SCALE * _payload_bytes(arm)) / (steps * HARDWARE.step_s)


def _payload_bytes(arm: arms.Arm) -> int:
  """The mean size of a payload. All arms have the same model."""
  if not _SIZES:
    _SIZES.extend(build.assemble(arm.config).payload_bytes)
  return sum(_SIZES) // len(_SIZES)


STUDY = study_lib.Study(name='links', title='A learner with a thin link, or offline', plan=plan)
