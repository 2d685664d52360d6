"""How the gap to data-parallel training changes as models grow (scale.md).

Sizes train equally many tokens for each parameter, in global batches that grow with the root of the
size. M learners share a global batch, so that all of them have one baseline. DiLoCo with M=1 is
data-parallel training with an outer step.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from diloco_jax.train import config as train_config
from diloco_jax.verification.virtual import virtual
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib
from experiments.studies.scale import fit

SIZES = {  # layers, width, hidden units of a block
  '13k': (1, 24, 64),
  '30k': (2, 32, 80),
  '63k': (2, 48, 128),
  '230k': (2, 96, 256),
  '0.9M': (4, 144, 360),
  '1.8M': (4, 192, 576),
  '6.6M': (4, 384, 1024),
}
SMALL, MIDDLE = '63k', '230k'  # whose best rates are searched
LENGTH = 64  # bytes of a window
SHORT, LONG, QUICK = 5, 20, 2  # trained tokens for each parameter
RATES = (1.2e-2, 2.4e-2)  # the first ones of each search
BASE = 'data-parallel', 1
PAIR = (BASE, ('decoupled', 4))
FIRST = (*PAIR, ('diloco', 4))
REST = (('decoupled', 8), ('streaming', 4), ('diloco', 8), ('streaming', 8))
METHODS = *FIRST, *REST
EIGHT, ONE = (('decoupled', 8),), (('diloco', 1),)
MUON, ADAMW, BOTH = ('muon',), ('adamw',), ('muon', 'adamw')


class Case(NamedTuple):
  """A method at a size; `ratio`: trained tokens for each parameter."""

  size: str
  ratio: int
  optimizer: str
  method: str
  learners: int

  def __str__(self) -> str:
    together = '' if self.method == BASE[0] else f', M={self.learners}'
    return f'{self.size} x{self.ratio}, {self.optimizer}, {self.method}{together}'


def parameters(size: str) -> int:
  """Of a decoder: embedding, attention of four heads, feed-forward blocks, norms."""
  layers, width, hidden = SIZES[size]
  return width * 257 + layers * (width * (3 * width + 3 * hidden + 2) + width // 2)


def arm(case: Case, rate: float, seed: int, against: str = '') -> arms.Arm:
  """A run of a case. A global batch of the small size has 16 windows, of all sizes a multiple of 8,
  and is split over the learners."""
  layers, width, hidden = SIZES[case.size]
  windows = 8 * max(1, round(2 * math.sqrt(parameters(case.size) / parameters(SMALL))))
  steps = round(case.ratio * parameters(case.size) / (windows * LENGTH))
  batch = windows // case.learners
  config = arms.small(
    case.optimizer, rate, steps=steps, learners=case.learners, batch=batch, seed=seed
  )
  config.model = train_config.ModelConfig(
    num_layers=layers,
    embed_dim=width,
    num_heads=4,
    num_kv_heads=2,
    head_dim=width // 4,
    hidden_dim=hidden,
  )
  config.data.seq_len, config.data.eval_batches = LENGTH, 32
  config.train.eval_every = max(1, steps // 4)
  alone = case.method == BASE[0]
  return arms.Arm(
    study='scale',
    name=f'{case}, {rate:g}',
    config=virtual.data_parallel(config) if alone else arms.with_method(config, case.method),
    kind='alone' if alone else 'train',
    against=against,
  )


def changed(arm: arms.Arm, study: str, name: str, fields: Mapping[str, Any]) -> arms.Arm:
  """An arm of another study, with other fields of its config ('sync.period'). `batch`: so many
  times the windows, at equal tokens; `warm_up`: the share of the steps."""
  config, fields = arm.config, dict(fields)
  batch, warm_up = fields.pop('batch', 1.0), fields.pop('warm_up', 0.05)
  config.data.batch_size = round(config.data.batch_size * batch)
  config.train.steps = steps = round(config.train.steps / batch)
  config.train.eval_every = max(1, steps // 4)
  config.optimizer.warmup_steps = int(steps * warm_up)
  for field, value in fields.items():
    part, last = field.split('.')
    setattr(getattr(config, part), last, value)
  return dataclasses.replace(arm, study=study, name=name)


def rates(case: Case, book: study_lib.Book) -> tuple[tuple[arms.Arm, ...], float | None]:
  """The arms of the search for the inner rate of a case, and the rate, None while it is unknown.

  The two small sizes have searches of their own with few tokens, by factors of 2, and the small one
  with many, too. The best rates of data-parallel training at the two are the ends of a power law.
  It moves the best rate of each method on, from 230k to larger sizes, and from 63k to 230k with
  many tokens, rounded to a factor of 2. Half and twice that rate are tried, too, but for the large
  sizes with many tokens; the best one that has run is used.
  """
  planned, rate = _rates(case, book, len(book))
  return tuple(planned), rate


@functools.lru_cache(maxsize=4096)
def _rates(case: Case, book: study_lib.Book, rows: int) -> tuple[list[arms.Arm], float | None]:
  del rows  # while the book has so many, nothing changes
  if case.ratio == QUICK:
    return [], RATES[case.optimizer == 'muon']
  make = lambda rate: arm(case, rate, 0, baseline(case, book))
  if case.size == SMALL:
    return study_lib.best_rate(make, RATES, book)
  own = lambda size, ratio: rates(case._replace(size=size, ratio=ratio), book)[1]
  if (case.size, case.ratio) == (MIDDLE, SHORT):
    small = own(SMALL, SHORT)
    return study_lib.best_rate(make, (small / 2, small), book) if small else ([], None)
  law = [rates(Case(size, SHORT, case.optimizer, *BASE), book)[1] for size in (SMALL, MIDDLE)]
  near = SMALL if case.size == MIDDLE else MIDDLE
  begin = own(near, case.ratio)
  if begin is None or None in law:
    return [], None
  apart = lambda size, other: math.log(parameters(other) / parameters(size))
  moved = math.log2(law[1] / law[0]) * apart(near, case.size) / apart(SMALL, MIDDLE)
  rate = begin * 2 ** round(moved)
  checked = near == SMALL or case.ratio == SHORT
  planned = [make(tried) for tried in ((rate, rate / 2, 2 * rate) if checked else (rate,))]
  ran = [planned_arm for planned_arm in planned if book.row(planned_arm)]
  best = book.best(ran) if planned[0] in ran else None
  return planned, best and best.config.optimizer.learning_rate


def baseline(case: Case, book: study_lib.Book) -> str:
  """The name of the arm to compare with; '' while its rate is unknown, and of the baseline."""
  other = case._replace(method=BASE[0], learners=BASE[1])
  rate = None if case == other else rates(other, book)[1]
  return '' if rate is None else f'{other}, {rate:g}'


def stages(quick: bool) -> Iterator[dict[Case, int]]:
  """The cases of the grid with their numbers of seeds, 0: the search alone, in the order of value
  for the cost."""

  def cases(size, ratio, optimizers=BOTH, methods=METHODS, seeds=3):
    return {
      Case(size, ratio, optimizer, *method): seeds for optimizer in optimizers for method in methods
    }

  if quick:
    yield from (cases(size, QUICK, seeds=1) for size in ('13k', '30k', SMALL))
    return
  for size in (SMALL, MIDDLE):
    yield cases(size, SHORT, methods=FIRST, seeds=0) | cases(size, SHORT, MUON, EIGHT, 0)
  yield cases(SMALL, SHORT, methods=FIRST) | cases(MIDDLE, SHORT, methods=FIRST)
  yield cases(SMALL, SHORT) | cases(MIDDLE, SHORT)
  yield cases(SMALL, SHORT, methods=ONE) | cases(MIDDLE, SHORT, methods=ONE)
  yield cases('0.9M', SHORT, MUON, FIRST)
  yield cases('1.8M', SHORT, MUON, FIRST, 2)
  yield cases('0.9M', SHORT, MUON, EIGHT)
  yield cases('6.6M', SHORT, MUON, PAIR, 1)
  yield cases('0.9M', SHORT, ADAMW, FIRST)
  yield cases('1.8M', SHORT, MUON, EIGHT, 2)
  yield cases('1.8M', SHORT, ADAMW, FIRST, 2)
  yield cases('6.6M', SHORT, ADAMW, PAIR, 1)
  yield cases(SMALL, LONG) | cases(MIDDLE, LONG) | cases('0.9M', LONG, MUON, PAIR, 1)
  for ratio in (SHORT, LONG):
    yield cases('0.9M', ratio) | cases('1.8M', ratio, seeds=2)


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The arms that are known, in the order of value for the cost: of a case whose rate is unknown,
  those of the search."""
  planned = {}
  for stage in stages(quick):
    for case, seeds in stage.items():
      searched, rate = rates(case, book)
      against = baseline(case, book)
      searched += tuple(arm(case, rate, seed, against) for seed in range(seeds) if rate)
      planned |= {found_arm.key: found_arm for found_arm in searched}
  return list(planned.values())


def results(quick: bool, book: study_lib.Book) -> list[fit.Result]:
  """The cases that have run, each at its rate, beside their baselines."""
  lines = []
  for case in dict.fromkeys(case for stage in stages(quick) for case in stage):
    both = case, case._replace(method=BASE[0], learners=BASE[1])
    chosen = [rates(compared, book)[1] for compared in both]
    if case == both[1] or None in chosen:
      continue
    row = lambda of, seed, both=both, chosen=chosen: book.row(arm(both[of], chosen[of], seed))
    pairs = [(row(0, seed), row(1, seed)) for seed in range(3)]
    losses = [(loss['loss'], base['loss']) for loss, base in pairs if loss and base]
    if losses:
      lines.append(fit.Result(case, parameters(case.size), chosen, losses))
  return lines


def conclude(quick: bool, book: study_lib.Book, out: pathlib.Path) -> str:
  """The gaps and their trend."""
  return fit.conclude(results(quick, book), out)


STUDY = study_lib.Study(
  name='scale',
  title='The gap to data-parallel training as models grow',
  plan=plan,
  conclude=conclude,
)
