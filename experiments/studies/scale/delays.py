"""The cost of delays, as a share of the loss, in longer runs and of larger models (delays.md)."""

import itertools
import math
import pathlib
import statistics
from typing import NamedTuple

import numpy as np
import scipy.stats

from diloco_jax.verification import plans
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.virtual import conditions, delay_cost
from experiments.studies import scale
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

NAME = 'scale.delays'
RATES = {'13k': 4.8e-2, scale.SMALL: 4.8e-2, scale.MIDDLE: 2.4e-2, '0.9M': 1.2e-2}
OUTAGE = 0.1  # of the run, from its middle on, without the syncer
LINE_SCALE = 1_000  # payloads of so small models are shorter than a frame


class Delay(NamedTuple):
  """`latency`: inner steps one way; `thin`: inner steps of a payload on each link, of which one is
  due in each step; `outage`: the share of the run."""

  latency: float = 0.0
  thin: float = 0.0
  outage: float = 0.0

  def __str__(self) -> str:
    return ', '.join(f'{name} {value:g}' for name, value in self._asdict().items() if value)


WITHOUT = Delay()
DELAYS = (
  Delay(latency=2),
  Delay(latency=8),
  Delay(thin=2),
  Delay(thin=4),
  Delay(thin=8),
  Delay(outage=OUTAGE),
)
SEEDS = {  # by size and trained tokens for each parameter
  (scale.SMALL, 5): 3,
  (scale.SMALL, 10): 3,
  (scale.MIDDLE, 5): 2,
  (scale.SMALL, 20): 2,
  ('0.9M', 2): 1,
  (scale.SMALL, 40): 2,
}
HELD_OUT = (scale.SMALL, 40), ('0.9M', 2)  # the laws are fitted without them
THIN_ALSO = {2: (5, 10), 8: (10, 20)}  # with which tokens for each parameter
LEAST = 0.002  # a lower cost counts as this: seeds differ by as much


def _arm(size: str, ratio: int, delay: Delay, seed: int) -> arms.Arm:
  arm = scale.arm(scale.Case(size, ratio, 'muon', 'decoupled', 4), RATES[size], seed)
  config, name = arm.config, f'{size} x{ratio}'
  config.optimizer.momentum_weight = 0.7
  ns, step_s = arms.USUAL['hardware'].ns, arms.USUAL['hardware'].step_s
  where, against = dict(arms.USUAL), ''
  if delay != WITHOUT:
    name, against = f'{name}, {delay}', name
  if delay.latency:
    where['network'] = conditions.Network(latency=delay.latency, up=0.3, down=0.3)
  if delay.thin:
    payload = LINE_SCALE * 4 * scale.parameters(size) // config.sync.fragments
    rate = network_lib.wire_bytes(payload) / (delay.thin * step_s)
    where['network'] = conditions.Network(
      latency=0.01, lines=(conditions.Line(rate, rate, scale=LINE_SCALE),)
    )
  if delay.outage:
    steps = config.train.steps
    fault = plans.Fault(
      at_ns=ns(steps / 2), kind='kill', node=plans.SYNCER, for_ns=ns(delay.outage * steps)
    )
    where['faults'] = conditions.Faults(plan=(fault,))
  return arms.Arm(study=NAME, name=name, config=config, where=where, against=against)


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """All delays of a size and length, paired by seed with the run without."""
  del book
  return [
    _arm(size, ratio, delay, seed)
    for (size, ratio), seeds in _cases(quick).items()
    for seed in range(seeds)
    for delay in (WITHOUT, *_delays(size, ratio))
  ]


def _cases(quick: bool) -> dict[tuple[str, int], int]:
  return {('13k', scale.QUICK): 1} if quick else SEEDS


def _delays(size: str, ratio: int) -> tuple[Delay, ...]:
  """Other thin links at the small size alone, in runs of six and more of the longer periods."""
  thin = {4}
  if size == scale.SMALL:
    thin |= {strength for strength, ratios in THIN_ALSO.items() if ratio in ratios}
  return tuple(delay for delay in DELAYS if not delay.thin or delay.thin in thin)


def conclude(quick: bool, book: study_lib.Book, out: pathlib.Path) -> str:
  """The costs by size and length, the laws, and what they say of the runs that are not in them."""
  del out
  measured = costs(quick, book)
  laws = fit(measured)
  lines = ['| | T | ' + ' | '.join(map(str, DELAYS)) + ' |', '|---|---|' + '---|' * len(DELAYS)]
  for size, ratio in dict.fromkeys((size, ratio) for size, ratio, _ in measured):
    cells = [measured.get((size, ratio, delay), []) for delay in DELAYS]
    text = [', '.join(f'{change:+.2%}' for change in cell) for cell in cells]
    lines.append(f'| {size} x{ratio} | {_steps(size, ratio)} | ' + ' | '.join(text) + ' |')
  lines += ['', '| kind | ln c | strength | T | N | spread |', '|---|---|---|---|---|---|']
  for kind, law in laws.items():
    cells = [*(f'{factor:.3f}' for factor in law.line), f'{math.exp(law.spread):.2f}']
    lines.append(f'| {kind} | ' + ' | '.join(cells) + ' |')
  lines += ['', '| not in the fit | cost | expected | |', '|---|---|---|---|']
  for (size, ratio, delay), seeds in measured.items():
    law, cost = laws.get(_kind(delay)), statistics.mean(seeds)
    if (size, ratio) not in HELD_OUT or law is None:
      continue
    expected = delay_cost.expected(
      law, _strength(delay), _steps(size, ratio), scale.parameters(size)
    )
    inside = 'inside' if expected.low <= cost <= expected.high else '**outside**'
    lines.append(
      f'| {size} x{ratio}, {delay} | {cost:+.2%} '
      f'| {expected.mean:+.2%} ({expected.low:.2%} to {expected.high:.2%}) | {inside} |'
    )
  return '\n'.join([*lines, ''])


def fit(costs: dict[tuple[str, int, Delay], list[float]]) -> dict[str, delay_cost.Law]:
  """The law of each kind, without the runs that are held out; of a kind whose runs have one
  strength, its exponent is 0."""
  by_case = {}
  for kind in Delay._fields:
    points = [
      (delay_cost.terms(_strength(delay), _steps(size, ratio), scale.parameters(size)), cost)
      for (size, ratio, delay), all_costs in costs.items()
      for cost in all_costs
      if _kind(delay) == kind and (size, ratio) not in HELD_OUT
    ]
    x = np.array([terms for terms, _ in points]).reshape(len(points), 4)
    y = np.log([max(cost, LEAST) for _, cost in points])
    free = len(points) - np.linalg.matrix_rank(x)
    if free < 3:
      continue
    inverse = np.linalg.pinv(x.T @ x)
    line = inverse @ x.T @ y
    deviation = math.sqrt(np.sum((y - x @ line) ** 2) / free)
    by_case[kind] = delay_cost.Law(
      tuple(line.round(4).tolist()),
      tuple(tuple(row) for row in (inverse.round(4) + 0.0).tolist()),
      round(deviation * scipy.stats.t.ppf(0.975, free), 4),
    )
  return by_case


def costs(quick: bool, book: study_lib.Book) -> dict[tuple[str, int, Delay], list[float]]:
  """By size, tokens for each parameter and delay: by what share each seed's loss is higher."""
  changes: dict[tuple[str, int, Delay], list[float]] = {}
  for (size, ratio), seeds in _cases(quick).items():
    for delay, seed in itertools.product(_delays(size, ratio), range(seeds)):
      row, without = (book.row(_arm(size, ratio, lag, seed)) for lag in (delay, WITHOUT))
      if row and without:
        changes.setdefault((size, ratio, delay), []).append(row['loss'] / without['loss'] - 1)
  return changes


def _kind(delay: Delay) -> str:
  return next(name for name, value in delay._asdict().items() if value)


def _strength(delay: Delay) -> float:
  """As of delay_cost; 1 for an outage."""
  return 1.0 if delay.outage else max(delay)


def _steps(size: str, ratio: int) -> int:
  return _arm(size, ratio, WITHOUT, 0).config.train.steps


STUDY = study_lib.Study(
  name=NAME, title='What delays cost as runs grow', plan=plan, conclude=conclude
)
