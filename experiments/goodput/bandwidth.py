"""The table of bandwidth: what a site's link must carry for a useful share (sites.py).

Nothing here was chosen for its result. Where a paper does not state an input, the table has results
for several values of it (`assuming`).
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.goodput import paper, sites
from experiments.goodput.tables import MACHINES, RING, Figure, Job, Table

GBIT = sites.GBIT
LAYERS = 48
CODECS = ('bf16', 'int8', 'int4')

DATA_PARALLEL = 'data-parallel, bf16'
METHODS = {
  'DiLoCo, bf16': sites.Method(codec='bfloat16', settings={'fragments': 1, 'overlap': 0}),
  'Streaming, bf16': sites.Method(codec='bfloat16', settings={'max_lag': 2}),
  'Streaming, int4': sites.Method(codec='int4', settings={'max_lag': 2}),
  'Decoupled, bf16': sites.Method(codec='bfloat16', waits=False),
  'Decoupled, int8': sites.Method(codec='int8', waits=False),
  'Decoupled, int4': sites.Method(codec='int4', waits=False),
}
_SLOW = {'period': 100, 'fragments': 16}
_OVERLAPPED = {**_SLOW, 'overlap': 1, 'max_lag': 1}
PREDECESSOR = {
  'DiLoCo': sites.Method(codec='bfloat16', settings={**_SLOW, 'fragments': 1, 'overlap': 0}),
  'Streaming': sites.Method(codec='bfloat16', settings={**_SLOW, 'overlap': 0}),
  'Streaming, overlapped': sites.Method(codec='bfloat16', settings=_OVERLAPPED),
  'Streaming, overlapped, 4 bits': sites.Method(codec='int4', settings=_OVERLAPPED),
}

# Another assumption, and what it changes: fields of sites.Where, and what an all-reduce hides.
ASSUMED: dict[str, dict[str, Any]] = {
  'as above': {},
  'an all-reduce hidden by nothing': {'hides': 'nothing'},
  'an all-reduce hidden by the whole step': {'hides': 'the whole step'},
  'latency and work of a wide-area network': {'delays': 'wan'},
  '5B': {'parameters': 5e9},
  'steps of 0.5 s': {'step_s': 0.5},
  'steps of 2.6 s': {'step_s': 2.6},
  "one link for all, the syncer's": {'hub': True},
}

SITES = "Gbit/s of a site's link: 12B, 8 learners, steps of 1 s"
BEFORE = "Gbit/s of a site's link: 10B, 2 sites, H=100, steps of 0.8 s"
ASSUMING = 'Gbit/s for 90 % at 8 sites, other things assumed'
FASTER = 'times as fast as data-parallel training: 12B, 4 sites'
SYNCER = 'shortest step in s for 90 %: 12B, 8 sites, one syncer process'

# GB/s each way through one syncer process, measured with 8 sessions and payloads of 16 MiB: on one
# core, with 0.83 CPU-ns for a byte to it and 0.61 for one from it; on any number of cores, since
# for 0.37 ns of each byte it needs Python's lock. Work on arrays is not counted.
PROCESS = {'one core': 1 / 1.44, "Python's lock": 1 / 0.74}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
  """How exactly: which useful shares, over how many periods, and with how many halvings."""

  shares: Sequence[float] = paper.SHARES
  periods: int = 3
  halvings: int = 5


def needed(
  method: sites.Method | None, where: sites.Where, effort: Effort, hides: str = sites.HIDDEN[1]
) -> list[float]:
  """Gbit/s of a site's link for each useful share; `method` None: data-parallel training."""
  if method is None:
    share = lambda rate: sites.ring(where, rate, LAYERS, hides=hides).useful
    start = where.parameters / where.step_s
  else:
    share = lambda rate: sites.run(method, where, rate, effort.periods).useful
    value_bytes = {'bfloat16': 2, 'int8': 1, 'int4': 0.5}[method.codec]
    behind = where.learners / (1 if where.hub else where.sites)
    period_s = method.config(where.learners).period * where.step_s
    start = behind * where.parameters * value_bytes / period_s  # about the mean traffic
  found = sites.needed(share, effort.shares, start, effort.halvings)
  return [found[share] / GBIT for share in effort.shares]


def by_share(
  what: str, row: str, method: sites.Method | None, where: sites.Where, effort: Effort
) -> list[Figure]:
  """A row of figures by useful share, beside the published ones of the predecessor."""
  published = dict(zip(paper.SHARES, paper.PREDECESSOR[row])) if what == BEFORE else {}
  return [
    Figure(
      what=what,
      made=MACHINES if method else RING,
      row=row,
      column=f'{share:.0%}',
      ours=gbit_s,
      paper=published.get(share),
    )
    for share, gbit_s in zip(effort.shares, needed(method, where, effort))
  ]


def assuming(row: str, effort: Effort) -> list[Figure]:
  """What another assumption makes of data-parallel training and of Decoupled DiLoCo."""
  changed = dict(ASSUMED[row])
  hides = changed.pop('hides', None)
  where = sites.Where(**changed)
  columns: dict[str, sites.Method | None] = {}
  if not changed.keys() & {'delays', 'hub'}:
    columns[DATA_PARALLEL] = None
  if hides is None:
    columns |= {name: METHODS[name] for name in ('Decoupled, int8', 'Decoupled, int4')}
  return [
    Figure(
      what=ASSUMING,
      made=MACHINES if method else RING,
      row=row,
      column=column,
      ours=needed(method, where, effort, hides or sites.HIDDEN[1])[0],
    )
    for column, method in columns.items()
  ]


def faster(gbit_s: float, step_s: float, periods: int) -> list[Figure]:
  """Steps per second, and tokens per second that are merged in time, with int4."""
  where = sites.Where(step_s=step_s, learners=4, sites=4)
  baseline = sites.ring(where, gbit_s * GBIT, LAYERS).computing
  found = sites.run(METHODS['Decoupled, int4'], where, gbit_s * GBIT, periods)
  return [
    Figure(
      what=FASTER,
      made=MACHINES,
      row=f'{counted}, {gbit_s:g} Gbit/s',
      column=f'steps of {step_s:g} s',
      ours=share / baseline,
      paper=published,
    )
    for counted, share, published in (
      ('steps', found.computing, paper.FASTER),
      ('tokens merged in time', found.useful, None),
    )
  ]


def shortest(row: str, limit: str, effort: Effort) -> list[Figure]:
  """The shortest step whose payloads pass through one syncer process, on links without limit."""
  where = sites.Where(hub=True)

  def share(step_s: float) -> float:
    at = dataclasses.replace(where, step_s=step_s)
    return sites.run(METHODS[row], at, PROCESS[limit] * 1e9, effort.periods).useful

  (step_s,) = sites.needed(share, effort.shares, 1.0, effort.halvings).values()
  return [Figure(what=SYNCER, made=MACHINES, row=row, column=limit, ours=step_s)]


def table(quick: bool) -> Table:
  """`quick`: one share, one period, two learners."""
  effort = Effort(shares=(0.9,), periods=1, halvings=2) if quick else Effort()
  once, one = dataclasses.replace(effort, periods=1), dataclasses.replace(effort, shares=(0.9,))
  jobs = []

  def add(name: str, cost: float, make: Callable[..., list[Figure]], *args: Any) -> None:
    jobs.append(Job(name=name, make=functools.partial(make, *args), cost=cost))

  where = sites.Where(parameters=10e9, step_s=0.8, learners=2, sites=2)
  for row in tuple(paper.PREDECESSOR)[:2] if quick else paper.PREDECESSOR:
    add(f'{row}, 10B', 2, by_share, BEFORE, row, PREDECESSOR.get(row), where, once)
  for count in (2,) if quick else (2, 4, 8):
    where = sites.Where(learners=2 if quick else 8, sites=count)
    for name, method in {DATA_PARALLEL: None, **METHODS}.items():
      row = f'{name}, {count} sites'
      add(row, 8, by_share, SITES, row, method, where, effort)
  for gbit_s in paper.FASTER_GBIT:
    for step_s in (1.0,) if quick else (1.0, 2.6, 5.0):
      add(f'{gbit_s:g} Gbit/s, {step_s:g} s', 0.3, faster, gbit_s, step_s, effort.periods)
  for row in () if quick else ASSUMED:
    add(row, 6, assuming, row, one)
  for row in () if quick else ('Decoupled, int8', 'Decoupled, int4'):
    for limit in PROCESS:
      add(f'{row}, {limit}', 6, shortest, row, limit, one)
  return Table(
    title='Bandwidth between sites, by useful share of the time',
    jobs=jobs,
    notes=NOTES,
    verdicts=_verdicts,
  )


NOTES = """\
Useful: the share of the learners' time whose tokens are merged in the sync for which they were due.
Of learners that wait for one another (all but Decoupled) that is the compute utilisation. Learners
of Decoupled DiLoCo compute all the time at any bandwidth.
Assumed for machines: a site's link has the same rate each way, and those that send at the same time
have equal shares of it; 4.8 % headers; no latency, no time for work on payloads, no noise, nothing
fails; fragments of one size; deltas down have the codec of payloads up; the syncer's own link is no
limit; P = H = 24, tau = 2, K = 1 as in the paper (Decoupled), or K = M;
`ahead`, `gamma` and all else as by default. DiLoCo: P = 1.
Assumed for the ring: 48 layers of one size in bf16, reduced one after the other while the backward
pass, 2/3 of a step, is at the layers before; within a site for nothing.
The paper states neither model, bits, step time nor utilisation of "198 to 0.84 Gbit/s", and neither
model, sites, bits nor utilisation of "104 to 1.7 Gbit/s at steps of 1 s"; so they are to be
compared with all shares and the other assumptions. Table 4 of arXiv 2501.18512 states model, step
time, H and fragments; 2 sites and 1 step of overlap are those of its experiments, 16 bits follow
from its table 1. Its link is that of a collective, without a syncer between, and nearly all
its figures are points of a grid that are 20.7 % apart, seemingly the first that was enough."""


def _verdicts(figures: Sequence[Figure]) -> Iterator[str]:
  for row in dict.fromkeys(one.row for one in figures if one.what == BEFORE):
    ratios = [one.ours / one.paper for one in figures if (one.what, one.row) == (BEFORE, row)]
    mean = statistics.geometric_mean(ratios)
    yield f'10B, {row}: {min(ratios):.2f} to {max(ratios):.2f} times the published, mean {mean:.2f}'
  most = max(int(one.row.split()[-2]) for one in figures if one.what == SITES)
  cells = {(one.row, one.column): one.ours for one in figures if one.what == SITES}
  published = ', '.join(f'{theirs / ours:.0f}' for theirs, ours in paper.BANDWIDTH)
  for column in dict.fromkeys(column for _, column in cells):
    ring = cells[f'{DATA_PARALLEL}, {most} sites', column]
    needs = {codec: cells[f'Decoupled, {codec}, {most} sites', column] for codec in CODECS}
    times = ', '.join(f'{ring / gbit_s:.0f} {codec}' for codec, gbit_s in needs.items())
    yield f'12B, {most} sites, {column}: the ring needs so many times more: {times} ({published})'
