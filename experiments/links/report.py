"""Tables, verdicts and the picture of the bench: pure functions of its rows."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure

from experiments.links import cells, small

Row = dict[str, Any]
SHARES = (0.50, 0.75, 0.90, 0.99)
UNSHAPED_LEAST = 0.97  # of the floor rate; with less the machine was busy with something else
# Adnan082/diloco-measured: four L40S, 30.8M float32 parameters, synchronous DiLoCo, 50 Mbit/s.
PUBLISHED = {'H=1': 0.0007, 'H=32': 0.024, 'H=128': 0.116}
PUBLISHED_MBIT = 50


def needed(points: Sequence[tuple[float, float]], share: float) -> str:
  """The bandwidth at which a method computes for a share of the time, in Mbit/s: on the straight
  line between two measured links over the logarithm of bandwidth. Outside of them it is unknown.

  Args:
    points: (Mbit/s, share that computes) of shaped links.

  >>> needed([(10, 0.2), (1000, 0.6)], 0.4)
  '100'
  >>> needed([(10, 0.2), (1000, 0.6)], 0.1), needed([(10, 0.2), (1000, 0.6)], 0.7)
  ('< 10', '> 1000')
  """
  points = sorted(points)
  if not points:
    return ''
  if points[0][1] >= share:
    return f'< {points[0][0]:g}'
  for (low, below), (high, above) in zip(points, points[1:]):
    if below < share <= above:
      part = (share - below) / (above - below)
      return f'{math.exp(math.log(low) + part * math.log(high / low)):.3g}'
  return f'> {points[-1][0]:g}'


def line(row: Row) -> str:
  """A finished run, for the screen."""
  if 'small' in row:
    merged = '' if row['merged'] is None else f', merged {row["merged"]:.1%}'
    return (
      f'{row["small"]}: {row["steps"]} steps, loss {row["loss"]:.4f}{merged}, {row["wall_s"]:.0f} s'
    )
  checked = row['checked_mbit']
  merged = ''
  if 'merged' in row:
    merged = f'merged {row["merged"]:.1%}, when due {row["on_time"]:.1%}; '
  return (
    f'{row["method"]}, {cells.link_name(row["mbit"])} (measured up {checked["up_least"]:.4g} to '
    f'{checked["up_most"]:.4g}, down {checked["down_least"]:.4g} to {checked["down_most"]:.4g}): '
    f'computes {row["computes"]:.1%}; {merged}{row["bytes_up"] / 1e6:.2f} MB up and '
    f'{row["bytes_down"] / 1e6:.2f} MB down a step; load {row["load"]:.1f}, {row["seconds"]:.0f} s'
  )


def table(rows: Sequence[Row]) -> str:
  """All tables, and what must hold."""
  large = [row for row in rows if 'small' not in row]
  parts = [_computes(large), _merged(large), _bytes(large)]
  tiny = [row for row in rows if 'small' in row]
  if tiny:
    parts.append(_losses(tiny))
  return '\n'.join([*parts, *verdicts(large, tiny), ''])


def _methods(rows: Sequence[Row]) -> list[str]:
  return [name for name in cells.METHODS if any(row['method'] == name for row in rows)]


def _links(rows: Sequence[Row]) -> list[float]:
  found = {row['mbit'] for row in rows}
  return sorted(found, key=lambda mbit: mbit or math.inf)


def _find(rows: Sequence[Row], method: str, mbit: float) -> Row | None:
  return next((row for row in rows if (row['method'], row['mbit']) == (method, mbit)), None)


def _grid(title: str, rows: Sequence[Row], cell: Any, more: Sequence[str] = (), tail=None) -> str:
  links = _links(rows)
  names = [cells.link_name(mbit) for mbit in links]
  lines = [title, '', f'| method | {" | ".join([*names, *more])} |']
  lines.append('|---' * (1 + len(names) + len(more)) + '|')
  for method in _methods(rows):
    found = [_find(rows, method, mbit) for mbit in links]
    texts = [cell(row) if row else '' for row in found]
    lines.append(f'| {" | ".join([method, *texts, *(tail(method) if tail else ())])} |')
  return '\n'.join([*lines, ''])


def _computes(rows: Sequence[Row]) -> str:
  def tail(method: str) -> list[str]:
    points = [(row['mbit'], row['computes']) for row in rows if row['method'] == method]
    return [needed([one for one in points if one[0]], share) for share in SHARES]

  title = (
    '## Share of the time that computes, and the bandwidth in Mbit/s that a share needs\n\n'
    'Interpolated between links that were measured.'
  )
  more = [f'{share:.0%} needs' for share in SHARES]
  text = _grid(title, rows, lambda row: f'{100 * row["computes"]:.3g} %', more, tail)
  published = ', '.join(f'{name} {100 * share:g} %' for name, share in PUBLISHED.items())
  return text + (
    f'\nPublished, of other hardware and another model (diloco-measured: four L40S, 30.8M float32 '
    f'parameters, synchronous DiLoCo, {PUBLISHED_MBIT} Mbit/s): {published}.\n'
  )


def _merged(rows: Sequence[Row]) -> str:
  ours = [row for row in rows if 'merged' in row]
  return _grid(
    '## Share of the tokens merged, and of it in the sync that they were due for',
    ours,
    lambda row: f'{100 * row["merged"]:.1f}, {100 * row["on_time"]:.1f} %',
  )


def _bytes(rows: Sequence[Row]) -> str:
  return _grid(
    '## MB of a learner and inner step, up and down, as its network device counts them',
    rows,
    lambda row: f'{row["bytes_up"] / 1e6:.3g}, {row["bytes_down"] / 1e6:.3g}',
  )


def _losses(rows: Sequence[Row]) -> str:
  lines = [
    f'## A model of {small.VALUES:,} values over links as thin for its payloads',
    '',
    '| method | as at | compared at | steps | tokens merged | held-out loss |',
    '|---|---|---|---|---|---|',
  ]
  for row in rows:
    merged = '' if row['merged'] is None else f'{100 * row["merged"]:.1f} %'
    link = cells.link_name(row['mbit'])
    texts = [row['method'], link, row['kind'], str(row['steps']), merged, f'{row["loss"]:.4f}']
    lines.append(f'| {" | ".join(texts)} |')
  return '\n'.join([*lines, ''])


def verdicts(large: Sequence[Row], tiny: Sequence[Row]) -> list[str]:
  """What must hold, with its figures; only of what was measured."""
  found: list[tuple[bool, str]] = []
  free = _find(large, cells.INT8, 0)
  if free:
    fast = free['computes'] >= UNSHAPED_LEAST
    found.append(
      (
        fast,
        f'Decoupled int8 computes {free["computes"]:.1%} of the floor rate over '
        f'links that are not shaped ({UNSHAPED_LEAST:.0%} at least, else the machine '
        'was busy)',
      )
    )
  for mbit in (50, 10):
    row = _find(large, cells.INT8, mbit)
    if row and free:
      ratio = row['computes'] / free['computes']
      found.append((ratio >= 0.97, f'... and at {mbit} Mbit/s {ratio:.1%} of that (97 % at least)'))
  for method in (cells.INT8, cells.INT4):
    row = _find(large, method, 50)
    if row:
      text = (
        f'{method} at 50 Mbit/s: {row["on_time"]:.1%} of the tokens are merged in the sync that '
        'they were due for (95 % at least)'
      )
      found.append((row['on_time'] >= 0.95, text))
  for method, most in ((cells.ALL_REDUCE, 0.02), (cells.TORCHFT_24, 0.25)):
    row = _find(large, method, 50)
    if row:
      found.append(
        (
          row['computes'] <= most,
          f'{method} computes {row["computes"]:.2%} of the time at 50 Mbit/s ({most:.0%} at most)',
        )
      )
  losses = {
    (row['method'], row['mbit']): row['loss'] for row in tiny if row['kind'] == small.TOKENS
  }
  usual = losses.get((cells.INT8, 0))
  alone = losses.get((small.ALONE, 0))
  for method in (cells.INT4, *small.LONGER):
    thin, thinner = (losses.get((method, mbit)) for mbit in (10, 2))
    if usual and thin:
      text = (
        f'small model, {method}, as at 10 Mbit/s and at equal tokens: its loss is '
        f'{thin / usual - 1:+.2%} from that over links that are not shaped (+1 % at most)'
      )
      found.append((thin <= 1.01 * usual, text))
    if alone and thinner:
      text = f'... as at 2 Mbit/s {thinner:.4f}, of one learner alone {alone:.4f}'
      found.append((thinner < alone, text))
  kept = {True: 'holds', False: 'DOES NOT HOLD'}
  return [f'* {kept[holds]}: {text}.' for holds, text in found]


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
  """The share that computes over the bandwidth, and the share of tokens merged."""
  large = [row for row in rows if 'small' not in row]
  figure = matplotlib.figure.Figure(figsize=(11, 5.2), layout='constrained')
  left, right = figure.subplots(1, 2)
  for place, method in enumerate(cells.METHODS):
    mine = sorted(
      (r for r in large if r['method'] == method and r['mbit']), key=lambda r: r['mbit']
    )
    if not mine:
      continue
    links = [row['mbit'] for row in mine]
    style = {'color': f'C{place}', 'marker': 'o', 'label': method}
    left.plot(links, [100 * row['computes'] for row in mine], **style)
    if 'merged' in mine[0] and method != cells.LOCK_STEP:
      right.plot(links, [100 * row['merged'] for row in mine], **style)
      due = [100 * row['on_time'] for row in mine]
      right.plot(links, due, **style | {'linestyle': ':', 'label': f'{method}, when due'})
  for number, (name, share) in enumerate(PUBLISHED.items()):
    label = 'published, other hardware: DiLoCo' if not number else None
    left.plot(PUBLISHED_MBIT, 100 * share, 'kx', label=label)
    left.annotate(f' {name}', (PUBLISHED_MBIT, 100 * share), fontsize=7)
  for one in (left, right):
    one.set_xscale('log')
    one.set(xlabel="Mbit/s of each learner's link, both ways", ylim=(-3, 103))
    one.set_xticks([mbit for mbit in cells.LINKS if mbit], [f'{m:g}' for m in cells.LINKS if m])
    one.minorticks_off()
    one.grid(alpha=0.3)
  left.set(ylabel='% of the time', title='computes (inner steps of 0.25 s, 25M values)')
  right.set(ylabel='% of the tokens', title='merged; dotted: in the sync that they were due for')
  for one in (left, right):
    if one.lines:
      one.legend(fontsize=7, ncol=2, loc='upper center', bbox_to_anchor=(0.5, -0.13))
  figure.savefig(path, dpi=120)
