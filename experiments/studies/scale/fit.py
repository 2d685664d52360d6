"""The trend of the gap against the size, its extrapolation, and the picture."""

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.axes
import matplotlib.figure
import numpy as np
import scipy.stats

FAR = 1e9  # parameters
# Decoupled DiLoCo with M = 8 learners and deaths, 5B parameters (arXiv 2604.21428): by what share
# its text score is below that of data-parallel training without failures. A score is no loss.
PUBLISHED = 5e9, 1 - 69.8 / 70.1


class Result(NamedTuple):
  """A case that has run: its rate and the baseline's, and the losses of both for each seed."""

  case: Any
  parameters: int
  rates: list[float]
  losses: list[tuple[float, float]]

  @property
  def gaps(self) -> list[float]:
    """By what share the loss is higher than the baseline's."""
    return [loss / base - 1 for loss, base in self.losses]

  @property
  def error(self) -> float:
    """Standard error of the mean gap; 0: one seed has none."""
    return statistics.stdev(self.gaps) / len(self.gaps) ** 0.5 if self.gaps[1:] else 0.0


def trend(
  results: Sequence[Result], at: float = FAR, power: bool = False
) -> tuple[list[float], list[float]] | None:
  """A least-squares line against ln N through all single gaps: the gap at `at` parameters, and its
  change with ten times the parameters, each with the ends of its 95 % interval.

  The line is of ln(1 + gap), as of a quotient of two power laws of the loss, and changes its sign
  somewhere. power: of ln(gap), a power law of the gap itself, and never does; its change is a share
  of the gap. None: fewer than two sizes or three runs, or the logarithm of a gap below zero.
  """
  gaps = [(result.parameters, gap) for result in results for gap in result.gaps]
  if (
    len(gaps) < 3
    or len({size for size, _ in gaps}) < 2
    or (power and min(gap for _, gap in gaps) <= 0)
  ):
    return None
  ln, exp = (math.log, math.exp) if power else (math.log1p, math.expm1)
  x, y = zip(*((math.log(size / at), ln(gap)) for size, gap in gaps), strict=True)
  line, wide = scipy.stats.linregress(x, y), scipy.stats.t.ppf(0.975, len(x) - 2)
  far = [exp(line.intercept + k * wide * line.intercept_stderr) for k in (0, -1, 1)]
  return far, [10 ** (line.slope + k * wide * line.stderr) - 1 for k in (0, -1, 1)]


def conclude(results: Sequence[Result], out: pathlib.Path) -> str:
  """Draws OUT/scale.png; returns the tables of gaps and trends in Markdown."""
  of, groups = {result.case: result for result in results}, {}
  rows = [
    '| case | rates | loss | baseline | behind | seeds | against lock step |',
    '|---|---|---|---|---|---|---|',
  ]
  for result in results:
    groups.setdefault(result.case._replace(size=''), []).append(result)
    loss, base = map(statistics.mean, zip(*result.losses, strict=True))
    gaps = ', '.join(f'{gap:+.2%}' for gap in result.gaps)
    lock_step = of.get(result.case._replace(method='diloco'))
    pairs = zip(result.losses, lock_step.losses if lock_step else (), strict=False)
    others = [here / small - 1 for (here, _), (small, _) in pairs]
    other = f'{statistics.mean(others):+.2%}' if others else ''
    rates = ', '.join(f'{rate:g}' for rate in result.rates)
    behind = f'{statistics.mean(result.gaps):+.2%}' + f' ± {result.error:.2%}' * (result.error > 0)
    rows.append(
      f'| {result.case} | {rates} | {loss:.4f} | {base:.4f} | {behind} | {gaps} | {other} |'
    )
  rows += ['', '| trend | runs | ten times the parameters | at 1B | at 1B, power law of the gap |']
  rows += ['|---|---|---|---|---|']
  show = '{:+.2%} ({:+.2%} to {:+.2%})'.format
  for case, members in groups.items():
    if law := trend(members):
      far, decade = (show(*part) for part in law)
      law_of_gap = trend(members, power=True)
      power = show(*law_of_gap[0]) if law_of_gap else ''
      sizes = ' '.join(member.case.size for member in members)
      runs = sum(len(member.gaps) for member in members)
      rows.append(f'| {sizes}{case} | {runs} | {decade} | {far} | {power} |')
  _draw({case: groups[case] for case in groups if case.method == 'decoupled'}, out / 'scale.png')
  return '\n'.join([*rows, ''])


def _draw(groups: dict[Any, list[Result]], path: pathlib.Path) -> None:
  """The gaps of Decoupled DiLoCo: a panel for each number of tokens and of learners."""
  panels = sorted({(case.learners, case.ratio) for case in groups}) or [(4, 0)]
  high, wide = -(-len(panels) // 2), min(2, len(panels))
  figure = matplotlib.figure.Figure(figsize=(6 * wide, 4.5 * high), layout='constrained')
  grid = figure.subplots(high, wide, sharey=True, squeeze=False).flat
  top = max(
    (gap for members in groups.values() for member in members for gap in member.gaps), default=0
  )
  for axes, (learners, ratio) in zip(grid, panels, strict=False):
    for case, members in groups.items():
      if (case.learners, case.ratio) == (learners, ratio):
        _series(axes, members, {'muon': 'tab:blue'}.get(case.optimizer, 'tab:orange'))
    size, share = PUBLISHED
    axes.plot(size, 100 * share, '*', color='0.3', label='arXiv 2604.21428: share of text score')
    title = f'Decoupled, M={learners}, {ratio} tokens for each parameter'
    axes.set(xscale='log', xlabel='parameters', title=title, ylim=(-2, max(9, 120 * top)))
    axes.axhline(0, color='0.7', linewidth=0.8)
    axes.legend(fontsize=7)
  figure.supylabel('behind data-parallel training, %')
  figure.savefig(path, dpi=100)


def _series(axes: matplotlib.axes.Axes, members: list[Result], color: str) -> None:
  sizes = [member.parameters for member in members]
  means = [100 * statistics.mean(member.gaps) for member in members]
  errors = [100 * member.error for member in members]
  name = f'{members[0].case.optimizer}: mean and standard error'
  axes.errorbar(sizes, means, errors, fmt='o', color=color, capsize=3, label=name)
  for power in (False, True):
    for begin, end, style in (
      (min(sizes), max(sizes), '-'),
      (max(sizes), FAR, '-.' if power else ':'),
    ):
      x = np.geomspace(begin, end)
      if trends := [
        trend(members, exponent, power) for exponent in x if trend(members, exponent, power)
      ]:
        middle, low, high = 100 * np.array([far for far, _ in trends]).T
        axes.plot(x, middle, style, color=color)
        axes.fill_between(x, low, high, color=color, alpha=0.1, linewidth=0)
