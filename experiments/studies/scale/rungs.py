"""Where the loss goes: from data-parallel training to a decoupled run with few bits, one rung at a
time, each with its own best inner rate (rungs.md)."""

import dataclasses
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.verification.virtual import conditions
from experiments.studies import scale
from experiments.studies.lib import arms, report
from experiments.studies.lib import study as study_lib
from experiments.studies.scale import records

NAME = 'scale.rungs'
LARGE = '0.9M'
BASE = 'data-parallel'


def quiet(late: int) -> dict[str, Any]:
  """No noise: every learner adopts `late` steps after its capture."""
  down = 0.01 + max(0, late - 1)  # in steps
  return {
    'hardware': conditions.Hardware(lognormal=0.0, merge=0.01),
    'network': conditions.Network(up=0.01, down=down),
  }


class Rung(NamedTuple):
  """What an exchange has. `late`: steps between a capture and its adoption in lock step; None:
  nobody waits, and the conditions are the usual ones."""

  period: int
  late: int | None = 0
  codec: str = 'float32'
  fragments: int = 0  # 0: as many as steps in a period

  def fields(self, learners: int) -> dict[str, Any]:
    """Those of a config."""
    overlap = min(3, self.period - 1) if self.late is None else self.late
    fields = records.exchange(self.codec, self.period, overlap)
    if self.fragments:
      fields['sync.fragments'] = self.fragments
    if self.late is not None:
      fields |= {'sync.quorum': learners, 'sync.max_lag': self.late}
    return fields


# Each is compared with the one before it; the first with data-parallel training.
LADDER = {
  'H=1': Rung(1),
  'P=H=3': Rung(3),
  'a step late': Rung(3, 1),
  'nobody waits': Rung(3, None),
  'int4': Rung(3, None, 'int4'),
}
BESIDE = {  # each is compared with int4
  'int2': Rung(3, None, 'int2'),
  'int4, P=H=6': Rung(6, None, 'int4'),
}
# At the small size, with eight learners: how the age of what a learner knows counts.
AGES = {
  'P=H=6': Rung(6),
  'P=H=12': Rung(12),
  'two steps late': Rung(3, 2),
  'P=H=6, a step late': Rung(6, 1),
  'P=H=6, three steps late': Rung(6, 3),
  'one fragment': Rung(3, 0, fragments=1),
  'one fragment, a step late': Rung(3, 1, fragments=1),
}
UNSEEN = 'two steps late', 'P=H=6, three steps late'  # the line through the others foretells them


class Case(NamedTuple):
  """A ladder. `batch`: so many times the windows of `scale`; `short`: windows are so many times
  shorter, and a batch has as many more of them."""

  size: str
  optimizer: str
  learners: int
  batch: float
  short: int = 1


MAIN = (*LADDER, *BESIDE)
FEW = 'H=1', 'P=H=3', 'int4'
SHORTER = 'H=1', 'P=H=3', 'a step late', 'int4', *BESIDE
# Cases, their rungs, and their seeds. Learners have batches of one window or more.
CASES: tuple[tuple[Case, tuple[str, ...], int], ...] = (
  (Case(scale.SMALL, 'muon', 8, 0.5), MAIN, 3),
  (Case(scale.SMALL, 'muon', 4, 0.25), MAIN, 3),
  (Case(scale.MIDDLE, 'muon', 8, 0.5), SHORTER, 3),
  (Case(scale.MIDDLE, 'muon', 4, 0.5), SHORTER, 3),
  (Case(LARGE, 'muon', 4, 1.0), ('int4',), 1),
  (Case(LARGE, 'muon', 8, 1.0), ('int4',), 1),
  (Case(scale.SMALL, 'muon', 8, 0.5), tuple(AGES), 3),
  (Case(scale.SMALL, 'adamw', 4, 0.25), FEW, 1),
  (Case(scale.SMALL, 'adamw', 8, 0.5), FEW, 1),
  (Case(scale.SMALL, 'muon', 2, 0.25), tuple(LADDER), 1),
  (Case(scale.SMALL, 'muon', 16, 1.0), tuple(LADDER), 1),
  *((Case(scale.SMALL, 'muon', 8, batch, short=4), FEW, 1) for batch in (0.5, 1.0, 2.0)),
)
QUICK = ((Case('13k', 'muon', 4, 1.0), tuple(LADDER), 1),)
# The inner rates of which the best one is used, by learners.
RATES: dict[tuple[str, str], dict[int, tuple[float, ...]]] = {
  (scale.SMALL, 'muon'): {
    1: (1.2e-2, 1.7e-2, 2.4e-2),
    2: (1.2e-2, 1.7e-2),
    4: (1.2e-2, 1.7e-2),
    8: (2.4e-2, 3.4e-2),
    16: (4.8e-2, 6.8e-2),
  },
  (scale.SMALL, 'adamw'): {1: (1.2e-2, 1.7e-2), 4: (1.2e-2, 1.7e-2), 8: (1.2e-2, 1.7e-2)},
  (scale.MIDDLE, 'muon'): {1: (2.4e-2,), 4: (1.2e-2, 1.7e-2), 8: (1.2e-2, 1.7e-2)},
  (LARGE, 'muon'): {1: (1.2e-2,), 4: (1.2e-2,), 8: (1.2e-2,)},
  ('13k', 'muon'): {1: (2.4e-2,), 4: (2.4e-2,)},
}
BATCHES = {'13k': 1.0, scale.SMALL: 0.25, scale.MIDDLE: 0.5, LARGE: 1.0}


def _rung(name: str) -> Rung | None:
  return (LADDER | BESIDE | AGES).get(name)


def _before(name: str, names: tuple[str, ...]) -> str:
  """The rung of these that one is compared with."""
  if name in BESIDE:
    return 'int4'
  return next(
    (earlier for earlier in reversed(names[: names.index(name)]) if earlier not in AGES), ''
  )


def _arm(case: Case, name: str, rate: float, seed: int) -> arms.Arm:
  """Data-parallel training, of which all cases of a size have the same, has the best batch."""
  rung = _rung(name)
  method, learners = ('decoupled', case.learners) if rung else scale.BASE
  ratio = scale.QUICK if case.size == '13k' else scale.SHORT
  arm = scale.arm(scale.Case(case.size, ratio, case.optimizer, method, learners), rate, seed)
  arm.config.data.seq_len //= case.short
  arm.config.data.batch_size *= case.short
  fields = {'batch': case.batch if rung else BATCHES[case.size]}
  fields |= records.WEIGHT if case.optimizer == 'muon' else {}
  fields |= records.SLOW if case.size == scale.SMALL else {}
  fields |= rung.fields(learners) if rung else {}
  words = [
    case.size,
    case.optimizer,
    *([f'windows of {arm.config.data.seq_len}'] * (case.short > 1)),
  ]
  words += [f'M={learners}, batch x{case.batch:g}'] if rung else []
  arm = scale.changed(arm, NAME, ', '.join([*words, name, f'{rate:g}']), fields)
  if rung is None or rung.late is None:
    return arm
  return dataclasses.replace(arm, where=quiet(rung.late))


def _search(case: Case, name: str, book: study_lib.Book) -> tuple[list[arms.Arm], float | None]:
  """The arms of the search for the inner rate with the first seed, and the rate, None while it is
  unknown."""
  rates = RATES[case.size, case.optimizer][case.learners if _rung(name) else 1]
  rates = rates[1:2] if name in AGES else rates
  planned = [_arm(case, name, rate, 0) for rate in rates]
  best = book.best(planned) if planned[1:] else planned[0]
  return planned, best and best.config.optimizer.learning_rate


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The searches, then the other seeds."""
  planned: dict[str, arms.Arm] = {}
  for case, names, seeds in QUICK if quick else CASES:
    for name in (BASE, *names):
      searched, rate = _search(case, name, book)
      searched = searched + [_arm(case, name, rate, seed) for seed in range(1, seeds) if rate]
      planned |= {arm.key: arm for arm in searched}
  return list(planned.values())


def _losses(case: Case, name: str, seeds: int, book: study_lib.Book) -> dict[int, float]:
  """By seed, at the best rate; {} while it is unknown."""
  rate = _search(case, name, book)[1]
  rows = {seed: book.row(_arm(case, name, rate, seed)) for seed in range(seeds) if rate}
  return {seed: row['loss'] for seed, row in rows.items() if row}


def conclude(quick: bool, book: study_lib.Book, out: pathlib.Path) -> str:
  """What each rung adds to the loss, and the gap with all; then how the loss grows with age."""
  del out
  titles = ['', BASE, *LADDER, 'gap', *BESIDE]
  lines = ['| ' + ' | '.join(titles) + ' |', '|---' * len(titles) + '|']
  by_age: list[str] = []
  for case, names, seeds in QUICK if quick else CASES:
    names = ('H=1', 'P=H=3', 'a step late', *names) if names[0] in AGES else names
    losses = {name: _losses(case, name, seeds, book) for name in (BASE, *names)}
    if names[-1] in AGES:
      by_age = [*_by_age(losses)]
    elif any([*losses.values()][1:]):
      before = {name: _before(name, (BASE, *names)) for name in names}
      before |= {names[0]: BASE if names[0] == 'H=1' else names[0]}  # the gap is not what it adds
      added = {name: _mean(losses[name], losses[before[name]]) for name in names}
      last = losses[[name for name in names if name in LADDER][-1]]
      cells = [_describe(case), f'{statistics.mean(losses[BASE].values()):.4f}']
      cells += [added.get(name, '') for name in LADDER] + [_mean(last, losses[BASE])]
      lines.append('| ' + ' | '.join([*cells, *(added.get(name, '') for name in BESIDE)]) + ' |')
  return '\n'.join([*lines, '', *by_age])


def _describe(case: Case) -> str:
  short = ['windows of 16'] if case.short > 1 else []
  return ', '.join([case.size, case.optimizer, *short, f'M={case.learners}', f'x{case.batch:g}'])


def _mean(losses: dict[int, float], others: dict[int, float]) -> str:
  return report.changes(losses, others).partition(' (')[0]


def _age(rung: Rung) -> float:
  """How many steps of the others a learner lacks on average, in lock step."""
  return (rung.period - 1) / 2 + (rung.late or 0)


def _by_age(losses: dict[str, dict[int, float]]) -> Iterator[str]:
  """The loss over that at age 0, and the least-squares line through it of what is not in UNSEEN."""
  zero, gains = losses['H=1'], dict[str, float]()
  yield from ('| 63k, muon, M=8 | age | over H=1 |', '|---|---|---|')
  for name, rung in (LADDER | AGES).items():
    if losses.get(name):
      yield f'| {name} | {_age(rung):g} | {report.changes(losses[name], zero)} |'
      gains[name] = statistics.mean(losses[name][seed] / zero[seed] - 1 for seed in losses[name])
  ages = {name: _age((LADDER | AGES)[name]) for name in gains}
  seen = [name for name in gains if name not in UNSEEN]
  if len(seen) < 4:
    return
  line, cov = np.polyfit([ages[n] for n in seen], [gains[n] for n in seen], 1, cov=True)
  yield f'\nEach step of age: {line[0]:+.2%} ± {cov[0, 0] ** 0.5:.2%}. Not used for the line:'
  for name in UNSEEN:
    if name in gains:
      yield f'{name} {np.polyval(line, ages[name]):+.1%} by it, {gains[name]:+.1%} measured.'


STUDY = study_lib.Study(name=NAME, title='Where the loss goes', plan=plan, conclude=conclude)
