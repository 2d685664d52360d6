"""The tables of `python -m experiments.goodput`: the paper's figures, and how ours are made.

A table is a list of jobs, each of which gives some figures in a process of its own. The table of
bandwidth is in bandwidth.py.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from diloco_jax.protocol import config as config_lib
from diloco_jax.verification.sim import hardware
from experiments.goodput import formulas, islands, machines, paper

MACHINES, ISLANDS, FORMULA, RING = 'machines', 'islands', 'formula', 'ring'
GOODPUT, UPTIME = 'goodput, %', 'uptime, %'
EQUAL = 0.01  # points by which machines and islands may differ


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """One number. `made`: MACHINES, ISLANDS, FORMULA or RING; `paper`: the published one."""

  what: str
  made: str
  row: str
  column: str
  ours: float
  paper: float | None = None

  @property
  def difference(self) -> float | None:
    return None if self.paper is None else self.ours - self.paper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """Some figures of a table; `cost`: about its CPU seconds."""

  name: str
  make: Callable[[], list[Figure]]
  cost: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """A study. `notes`: what is assumed, and what the figures mean. `verdicts`: statements about all
  of its figures, one line each."""

  title: str
  jobs: Sequence[Job]
  notes: str
  verdicts: Callable[[Sequence[Figure]], Iterator[str]] = lambda figures: iter(())


def _learners(row: str) -> int:
  return int(row.removeprefix('M=')) if row.startswith('M=') else 1


def _column(chips: float) -> str:
  return f'{chips / 1e6:g}M' if chips >= 1e6 else f'{chips / 1e3:g}k'


def _percent(what: str, made: str, row: str, column: str, share: float, paper_=None) -> Figure:
  return Figure(what=what, made=made, row=row, column=column, ours=100 * share, paper=paper_)


# --- Failures -------------------------------------------------------------------------------------


def _slices(row: str, chips: int) -> hardware.Slices:
  return hardware.of_chips(chips / _learners(row), rigid=row == paper.RIGID)


def islands_of(row: str, chips: int, hours: float) -> list[Figure]:
  """A cell of the failure table, from islands alone and from the closed form."""
  slices, column = _slices(row, chips), _column(chips)
  published = paper.GOODPUT[row][paper.CHIPS.index(chips)]
  fleet = islands.alone(slices, _learners(row), hours)
  form = formulas.rigid if slices.rigid else formulas.elastic
  return [
    _percent(GOODPUT, ISLANDS, row, column, fleet.goodput, published),
    _percent(GOODPUT, FORMULA, row, column, form(slices), published),
    _percent(UPTIME, ISLANDS, row, column, fleet.uptime(), None),
  ]


def machines_of(row: str, chips: int, delays: str, warm_up_s: int, measured_s: int) -> list[Figure]:
  """The same cell from machines, and from islands alone in the same time.

  Raises:
    RuntimeError: the two differ, so some step waited.
  """
  slices, learners, column = _slices(row, chips), _learners(row), _column(chips)
  config = machines.settings(learners)
  result = machines.run(
    config, slices=slices, delays=delays, warm_up_s=warm_up_s, measured_s=measured_s
  )
  alone = islands.alone(slices, learners, measured_s / 3_600, warm_up_s=warm_up_s)
  if abs(result.goodput - alone.goodput) * 100 > EQUAL:
    raise RuntimeError(
      f'{row} with {chips:,} chips: machines trained {result.goodput:.4%} of the time, islands '
      f'alone {alone.goodput:.4%}: a step waited, which is a bug of the protocol or the simulator'
    )
  at = f'{row}, {delays}'
  return [
    _percent('goodput of the same minutes, %', MACHINES, at, column, result.goodput),
    _percent('goodput of the same minutes, %', ISLANDS, at, column, alone.goodput),
    _percent('uptime of the same minutes, %', MACHINES, at, column, result.uptime),
    _percent('token goodput of the same minutes, %', MACHINES, at, column, result.token_goodput),
    _percent('merged in time, % of the trained', MACHINES, at, column, result.on_time),
    Figure(
      what='longest time between outer steps, s',
      made=MACHINES,
      row=at,
      column=column,
      ours=result.longest_gap_s,
    ),
  ]


def failures(quick: bool) -> Table:
  hours = 8 if quick else 48
  times = (60, 240) if quick else (machines.WARM_UP_S, machines.MEASURED_S)
  jobs = []
  for row in paper.GOODPUT:
    for chips in paper.CHIPS:
      learners = _learners(row)
      make = functools.partial(islands_of, row, chips, hours)
      jobs.append(Job(name=f'{row}, {chips:,} chips', make=make, cost=chips * hours / 3e8))
      for delays in ('lan', 'wan') if learners > 1 else ():
        make = functools.partial(machines_of, row, chips, delays, *times)
        cost = sum(times) * learners / 2_000
        jobs.append(Job(name=f'{row}, {chips:,} chips, {delays}', make=make, cost=cost))
  return Table(
    title='Chips that fail once a year: 6 ways to train on 150 thousand to 2.4 million of them',
    jobs=jobs,
    notes=f'Islands alone for {hours} h; machines for {times[1] / 60:g} minutes after '
    f'{times[0] / 60:g} that all checkers watch, on the same failures, P = H = 24, K = 1, steps of '
    '1 s with 2 % noise. Times of pauses and recoveries were fitted to the published goodput '
    '(verification/sim/hardware.py). "DP, elastic" is one island of all chips. Uptime: at least '
    'one island runs. Of the machines, goodput counts chips that train, token goodput tokens that '
    'were merged.',
    verdicts=_failure_verdicts,
  )


def _failure_verdicts(figures: Sequence[Figure]) -> Iterator[str]:
  cells = [one for one in figures if one.what == GOODPUT and one.made == ISLANDS]
  for name, rows in (('elastic and decoupled', False), ('rigid', True)):
    differences = [one.difference for one in cells if (one.row == paper.RIGID) == rows]
    rms = math.sqrt(sum(one**2 for one in differences) / len(differences))
    worst = max(map(abs, differences))
    yield f'{name} cells: RMS {rms:.2f} points from the paper, worst {worst:.2f}'
  form = {(o.row, o.column): o.ours for o in figures if o.made == FORMULA}
  worst = max(abs(one.ours - form[one.row, one.column]) for one in cells)
  yield f'islands and closed form differ by at most {worst:.2f} points'
  many = [o.ours for o in figures if o.what == UPTIME and _learners(o.row) >= 4]
  yield f'uptime with 4 learners and more: at least {min(many):.2f} %'
  short = 'goodput of the same minutes, %'
  pairs: dict[tuple[str, str], list[float]] = {}
  for one in figures:
    if one.what == short:
      pairs.setdefault((one.row, one.column), []).append(one.ours)
  worst = max(max(both) - min(both) for both in pairs.values())
  yield f'machines and islands differ by at most {worst:.5f} points in {len(pairs)} cells'


# --- Unequal learners, and lock-step --------------------------------------------------------------

OVERWRITE = {'adopt': config_lib.ADOPT.index('overwrite'), 'ahead': 0, 'overlap': 2}
BARRIER = {'quorum': 8, 'overlap': 0}


def unequal(
  row: str, delays: str, measured_s: int, published: float | None, **more
) -> list[Figure]:
  """Eight learners, four of an older generation."""
  slowness = (1.0,) * 4 + (paper.SLOWER,) * 4
  result = machines.run(
    machines.settings(8, **more),
    delays=delays,
    slowness=slowness,
    noise=paper.NOISE,
    warm_up_s=60,
    measured_s=measured_s,
  )
  shares = list(result.merged_of.values())
  compared = published if delays == 'none' else None
  return [
    _percent(GOODPUT, MACHINES, row, delays, result.goodput, compared),
    _percent('merged, % of the trained', MACHINES, row, delays, result.merged),
    _percent('merged of the fast, %', MACHINES, row, delays, sum(shares[:4]) / 4),
    _percent('merged of the slow, %', MACHINES, row, delays, sum(shares[4:]) / 4),
    _percent('merged in time, % of the trained', MACHINES, row, delays, result.on_time),
    Figure(
      what='learners in an outer step',
      made=MACHINES,
      row=row,
      column=delays,
      ours=result.participants,
    ),
  ]


def heterogeneous(quick: bool) -> Table:
  no_grace = {'grace_permille': 0}
  rows = {
    'K=8': BARRIER,
    'K=1': {**OVERWRITE, **no_grace},
    'K=1 with grace': OVERWRITE,
    'K=1, ours': no_grace,
    'K=1 with grace, ours': {},
  }
  seconds = 240 if quick else 900
  jobs = [
    Job(
      name=f'{row}, {delays}',
      make=functools.partial(unequal, row, delays, seconds, paper.HETEROGENEOUS.get(row), **more),
      cost=seconds / 250,
    )
    for row, more in rows.items()
    for delays in ('none', 'lan', 'wan')
  ]
  return Table(
    title='Four fast and four slow learners',
    jobs=jobs,
    notes=f'{seconds / 60:g} minutes, P = H = 24; four learners take {paper.SLOWER} times as long, '
    'and all steps have 10 % noise. K=8: a barrier at every step. "K=1" follows the paper: a '
    'fragment is captured when it is pulled, and adoption overwrites (tau = 2). "ours": the '
    "package's defaults: captured when due, and adoption keeps what was not merged.",
  )


def waiting(row: str, chips: int, delays: str, measured_s: int, **more) -> list[Figure]:
  """Eight learners that wait for one another, on islands that fail."""
  slices, column = hardware.of_chips(chips / 8), _column(chips)
  result = machines.run(
    machines.settings(8, **more),
    slices=slices,
    delays=delays,
    warm_up_s=60,
    measured_s=measured_s,
  )
  return [
    _percent(GOODPUT, MACHINES, row, column, result.goodput),
    _percent('goodput if no step waited, %', ISLANDS, row, column, result.able),
  ]


def lockstep(quick: bool) -> Table:
  rows = {
    'DiLoCo, H=24': {**BARRIER, 'fragments': 1},
    'DiLoCo, H=100': {**BARRIER, 'fragments': 1, 'period': 100},
    'Streaming, H=24': {'quorum': 8, 'overlap': 2, 'max_lag': 2},
    'a barrier at every step': BARRIER,
    'Decoupled': {},
  }
  seconds = 240 if quick else machines.MEASURED_S
  jobs = [
    Job(
      name=f'{row}, {chips:,} chips',
      make=functools.partial(waiting, row, chips, 'lan', seconds, **more),
      cost=seconds / 250,
    )
    for row, more in rows.items()
    for chips in paper.CHIPS
  ]
  return Table(
    title='Learners that wait for one another while chips fail: M=8, K=8',
    jobs=jobs,
    notes=f'{seconds / 60:g} minutes at delays lan; the paper has no such table. All rows but the '
    'last: K = 8. Streaming: max_lag = 2.',
  )


# --- Formulas -------------------------------------------------------------------------------------


def _scavenging() -> list[Figure]:
  figures = []
  for extra, published in paper.SCAVENGING.items():
    ours = formulas.scavenged_elastic(extra), formulas.scavenged_decoupled(extra)
    for row, value, theirs in zip((paper.ELASTIC, 'Decoupled'), ours, published):
      figures.append(
        Figure(
          what='time to the same tokens',
          made=FORMULA,
          row=row,
          column=f'+{extra:.0%}',
          ours=value,
          paper=theirs,
        )
      )
  return figures


def scavenging(quick: bool) -> Table:
  return Table(
    title='Extra compute for half of the work',
    jobs=[Job(name='formulas', make=_scavenging, cost=0)],
    notes='Assumed: half of the work runs with the extra compute, Decoupled uses all of it, and '
    'elastic data-parallel pays for changes of membership a share of that half that was fitted to '
    "the paper's row: 1.41 * (1 - exp(-extra / 0.665)).",
  )


# --- Growth ---------------------------------------------------------------------------------------


def many_islands(learners: int, chips: int, hours: float) -> list[Figure]:
  slices, row = hardware.of_chips(chips / learners), f'M={learners}'
  fleet = islands.alone(slices, learners, hours)
  return [
    _percent(GOODPUT, ISLANDS, row, _column(chips), fleet.goodput),
    _percent(GOODPUT, FORMULA, row, _column(chips), formulas.elastic(slices)),
    _percent(UPTIME, ISLANDS, row, _column(chips), fleet.uptime()),
  ]


def many_machines(learners: int, chips: int, measured_s: int) -> list[Figure]:
  slices, row = hardware.of_chips(chips / learners), f'M={learners}, wan'
  result = machines.run(
    machines.settings(learners),
    slices=slices,
    delays='wan',
    warm_up_s=60,
    measured_s=measured_s,
    checked=learners <= 16,
  )
  made = {
    'goodput of the same minutes, %': result.goodput,
    'token goodput of the same minutes, %': result.token_goodput,
    'merged in time, % of the trained': result.on_time,
  }
  return [_percent(what, MACHINES, row, _column(chips), share) for what, share in made.items()]


def growth(quick: bool) -> Table:
  sizes, hours, seconds = (2_400_000, 5_000_000, 10_000_000), 2 if quick else 24, 600
  jobs = [
    Job(
      name=f'M={learners}, {chips:,} chips',
      make=functools.partial(many_islands, learners, chips, hours),
      cost=chips * hours / 1e8,
    )
    for learners in (8, 32, 128, 512)
    for chips in sizes
  ] + [
    Job(
      name=f'M={learners}, {chips:,} chips, machines',
      make=functools.partial(many_machines, learners, chips, 120 if quick else seconds),
      cost=learners / 2,
    )
    for learners in (8, 16, 32, 64)
    for chips in sizes
  ]
  return Table(
    title='More learners and more chips',
    jobs=jobs,
    notes=f'Islands alone for {hours} h, 8 to 512 learners; machines for '
    f'{2 if quick else seconds // 60} minutes at delays wan, 8 to 64 learners.',
  )


TABLES: dict[str, Callable[[bool], Table]] = {
  one.__name__: one for one in (failures, heterogeneous, lockstep, scavenging, growth)
}
