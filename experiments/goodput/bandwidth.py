"""The table of bandwidth: what a site's link must carry for a useful share, and what was published.

Nothing here was chosen for its result. Where the papers do not state an input, the table has the
range of results instead (`assumptions`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from experiments.goodput import paper, sites
from experiments.goodput.tables import MACHINES, RING, Figure, Job, Table

GBIT = sites.GBIT
STEPS_S = (1.0, 2.6, 5.0)
RING_ROW = 'data-parallel, bf16'
LAYERS = 48
SHARES = tuple(paper.SHARES)

METHODS = {
  'DiLoCo, bf16': sites.Method(codec='bfloat16', settings={'fragments': 1, 'overlap': 0}),
  'Streaming, bf16': sites.Method(codec='bfloat16', settings={'max_lag': 2}),
  'Streaming, int4': sites.Method(codec='int4', settings={'max_lag': 2}),
  'Decoupled, int8': sites.Method(codec='int8', waits=False),
  'Decoupled, int4': sites.Method(codec='int4', waits=False),
}
_CUT = {'fragments': 16, 'period': 100}
PREDECESSORS = {
  'DiLoCo': sites.Method(codec='bfloat16', settings={**_CUT, 'fragments': 1, 'overlap': 0}),
  'Streaming': sites.Method(codec='bfloat16', settings={**_CUT, 'overlap': 0}),
  'Streaming, overlapped': sites.Method(
    codec='bfloat16', settings={**_CUT, 'overlap': 1, 'max_lag': 1}
  ),
  'Streaming, overlapped, 4 bits': sites.Method(
    codec='int4', settings={**_CUT, 'overlap': 1, 'max_lag': 1}
  ),
}
OF_PREDECESSOR = sites.Where(parameters=10e9, step_s=0.8, learners=2, sites=2)

NEEDED = "Gbit/s of a site's link, 12B, 8 learners, steps of 1 s"
PUBLISHED = "Gbit/s of a site's link, 10B, 2 sites, H=100, steps of 0.8 s"
FASTER = 'times as many {} as data-parallel training, 12B at 4 sites'
RANGE = 'Gbit/s for 90 % at 8 sites if something else is assumed'


def _start(method: sites.Method, where: sites.Where) -> float:
  """A quarter of the bytes per second that all methods but the lock-step ones need at least."""
  config = method.config(where.learners)
  value_bytes = {'bfloat16': 2, 'int8': 1, 'int4': 0.5}[method.codec]
  learners = where.learners / (1 if where.hub else where.sites)
  return learners * where.parameters * value_bytes / config.period / where.step_s / 4


def needed(
  method: sites.Method | None, where: sites.Where, shares: Sequence[float], periods: int
) -> dict[float, float]:
  """Gbit/s of a site's link by useful share; `method` None: data-parallel training on a ring."""
  if method is None:
    share = lambda rate: sites.ring(where, rate, LAYERS).useful
    start = where.parameters / where.step_s / 4
  else:
    share = lambda rate: sites.run(method, where, rate, periods).useful
    start = _start(method, where)
  return {at: rate / GBIT for at, rate in sites.needed(share, shares, start).items()}


def row(
  what: str,
  name: str,
  method: sites.Method | None,
  where: sites.Where,
  shares: Sequence[float],
  periods: int,
  published: Sequence[float | None],
) -> list[Figure]:
  """A row of a table by useful share."""
  found = needed(method, where, shares, periods)
  return [
    Figure(
      what=what,
      made=MACHINES if method else RING,
      row=name,
      column=f'{at:.0%}',
      ours=found[at],
      paper=theirs,
    )
    for at, theirs in zip(shares, published)
  ]


def faster(gbit_s: float, step_s: float, periods: int) -> list[Figure]:
  """The 12B model over four sites."""
  where = sites.Where(step_s=step_s, learners=4, sites=4)
  baseline = sites.ring(where, gbit_s * GBIT, LAYERS).computing
  found = sites.run(METHODS['Decoupled, int4'], where, gbit_s * GBIT, periods)
  made = {'steps': found.computing, 'tokens merged in time': found.useful}
  return [
    Figure(
      what=FASTER.format(what),
      made=MACHINES,
      row=f'Decoupled, int4, {gbit_s:g} Gbit/s',
      column=f'steps of {step_s:g} s',
      ours=share / baseline,
      paper=paper.FASTER if what == 'steps' else None,
    )
    for what, share in made.items()
  ]


_ASSUMED: dict[str, tuple[str, dict]] = {
  'as above': ('the backward pass', {}),
  'the all-reduce beside nothing': ('nothing', {}),
  'the all-reduce beside the whole step': ('the whole step', {}),
  'latency and work of a wide-area network': ('the backward pass', {'delays': 'wan'}),
  '5B': ('the backward pass', {'parameters': 5e9}),
  'steps of 0.5 s': ('the backward pass', {'step_s': 0.5}),
  'steps of 2.6 s': ('the backward pass', {'step_s': 2.6}),
  "all payloads through the syncer's one link": ('the backward pass', {'hub': True}),
}


def assumptions(name: str, share: float, periods: int) -> list[Figure]:
  """What one other assumption makes of data-parallel training and of Decoupled DiLoCo."""
  hides, changed = _ASSUMED[name]
  where = sites.Where(**changed)
  figures = []
  ring = lambda rate: sites.ring(where, rate, LAYERS, hides=hides).useful
  if 'delays' not in changed and 'hub' not in changed:
    (rate,) = sites.needed(ring, [share], where.parameters / where.step_s / 4).values()
    figures.append((RING_ROW, RING, rate / GBIT))
  if hides == 'the backward pass':
    for column in ('Decoupled, int8', 'Decoupled, int4'):
      (gbit_s,) = needed(METHODS[column], where, [share], periods).values()
      figures.append((column, MACHINES, gbit_s))
  return [
    Figure(what=RANGE, made=made, row=name, column=column, ours=gbit_s)
    for column, made, gbit_s in figures
  ]


def table(quick: bool) -> Table:
  """`quick`: two learners, two shares, one period."""
  shares = (0.5, 0.9) if quick else SHARES
  periods = 1 if quick else 3
  jobs = []
  for name in ('data-parallel', *PREDECESSORS):
    known = dict(zip(SHARES, paper.PREDECESSOR[name]))
    make = functools.partial(
      row,
      PUBLISHED,
      name,
      PREDECESSORS.get(name),
      OF_PREDECESSOR,
      shares,
      1,
      [known[share] for share in shares],
    )
    jobs.append(Job(name=f'{name}, predecessor', make=make, cost=8))
  for count in (2,) if quick else (2, 4, 8):
    where = sites.Where(learners=2 if quick else 8, sites=count)
    for name, method in {RING_ROW: None, **METHODS}.items():
      at = f'{name}, {count} sites'
      make = functools.partial(
        row, NEEDED, at, method, where, shares, periods, [None] * len(shares)
      )
      jobs.append(Job(name=at, make=make, cost=10))
  for gbit_s in paper.FASTER_GBIT:
    for step_s in STEPS_S[:1] if quick else STEPS_S:
      make = functools.partial(faster, gbit_s, step_s, periods)
      jobs.append(Job(name=f'{gbit_s:g} Gbit/s, steps of {step_s:g} s', make=make, cost=1))
  if not quick:
    for name in _ASSUMED:
      make = functools.partial(assumptions, name, 0.9, periods)
      jobs.append(Job(name=name, make=make, cost=8))
  return Table(
    title='Bandwidth between sites by useful share',
    jobs=jobs,
    notes=_NOTES,
    verdicts=functools.partial(_verdicts),
  )


_NOTES = 'notes'


def _verdicts(figures: Sequence[Figure]) -> Iterator[str]:
  yield ''
