"""The cells of the bench: a method, a link, and how long it is measured."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

LEARNERS = 4
PERIOD = 24  # H, and P where the method has fragments
FLOOR_S = 0.25
AHEAD = 2  # steps that a payload has to arrive: at 50 Mbit/s it takes 0.7, and loops differ by one
THINNEST = 10
LINKS = (THINNEST, 50, 200, 1000, 0)  # 10^6 bits per second; 0: not shaped
TASK, TORCHFT, DATA_PARALLEL = 'own loop', 'torchft', 'data-parallel'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """What is measured.

  Attributes:
    program: that of its processes: a loop of one's own under the syncer (TASK), or another.
    sync: settings that differ from those of `decoupled`.
    period: inner steps from exchange to exchange.
    rounds: link -> how many exchanges are measured; those of the shared settings are one fragment
      of one learner a step, so for them it is periods.
  """

  name: str
  program: str
  period: int
  rounds: Callable[[float], int]
  sync: dict[str, Any] = dataclasses.field(default_factory=dict)


def decoupled(codec: str) -> dict[str, Any]:
  return {
    'learners': LEARNERS,
    'quorum': 1,
    'fragments': PERIOD,
    'period': PERIOD,
    'overlap': 2,
    'ahead': AHEAD,
    'codec_up': codec,
    'codec_down': codec,
    'lease_s': 60.0,
    'checkpoint_every_syncs': 10**6,  # a save of all values every 25 s would be measured, too
  }


def lock_step(codec: str) -> dict[str, Any]:
  more = {'quorum': LEARNERS, 'fragments': 1, 'overlap': 0, 'max_lag': 0}
  return decoupled(codec) | more


def _thin(thin: int, *rest: int) -> Callable[[float], int]:
  """Rounds by link, those of LINKS in order; the last one is for all that are wider."""
  found = dict(zip(LINKS, (thin, *rest)))
  return lambda mbit: found.get(mbit, rest[-1] if rest else thin)


INT8, INT4 = 'Decoupled int8', 'Decoupled int4'
LOCK_STEP = 'DiLoCo in lock step, int8'
ALL_REDUCE = 'data-parallel float32'
TORCHFT_24, TORCHFT_128 = "torchft's DiLoCo, H=24", "torchft's DiLoCo, H=128"
METHODS = {
  one.name: one
  for one in (
    Method(name=INT8, program=TASK, period=PERIOD, rounds=_thin(8, 8, 4), sync=decoupled('int8')),
    Method(name=INT4, program=TASK, period=PERIOD, rounds=_thin(5, 5, 4), sync=decoupled('int4')),
    Method(name=LOCK_STEP, program=TASK, period=PERIOD, rounds=_thin(2, 3), sync=lock_step('int8')),
    Method(name=ALL_REDUCE, program=DATA_PARALLEL, period=1, rounds=_thin(1, 2, 4, 10, 20)),
    Method(name=TORCHFT_24, program=TORCHFT, period=24, rounds=_thin(1, 2, 2, 3)),
    Method(name=TORCHFT_128, program=TORCHFT, period=128, rounds=_thin(1)),
  )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """One run. `steps`: inner steps of each learner that are measured."""

  method: str
  mbit: float
  steps: int

  @property
  def key(self) -> str:
    """Changes with every setting of the run."""
    method = METHODS[self.method]
    spec = [dataclasses.asdict(self), method.program, method.period, method.sync, FLOOR_S]
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]

  @property
  def name(self) -> str:
    return f'{self.method}, {link_name(self.mbit)}'


def link_name(mbit: float) -> str:
  """
  >>> link_name(50), link_name(0)
  ('50 Mbit/s', 'not shaped')
  """
  return f'{mbit:g} Mbit/s' if mbit else 'not shaped'


def plan(short: bool) -> list[Cell]:
  """Int8 first, since the others are compared with it. Short: one link, and what is needed for the
  verdicts."""
  if short:
    chosen = {INT8: (THINNEST, 50, 0), LOCK_STEP: (50,), ALL_REDUCE: (50,), TORCHFT_24: (50,)}
    most = {INT8: 3}
    return [
      Cell(method=name, mbit=mbit, steps=METHODS[name].period * most.get(name, 1))
      for name, links in chosen.items()
      for mbit in links
    ]
  return [
    Cell(method=name, mbit=mbit, steps=method.period * method.rounds(mbit))
    for name, method in METHODS.items()
    for mbit in LINKS
    if mbit or method.program != TORCHFT  # which is nearly as fast at 1000 Mbit/s
  ]
