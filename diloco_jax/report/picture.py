"""The picture of what the page of a run shows (report/state.py): loss against tokens, and below it
the processes against time.

The colours are Okabe and Ito's, distinct for every kind of colour vision. The global model is black
and thick; every learner has one colour in both halves.
"""

import itertools
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import colors, lines, patches, patheffects, ticker
from matplotlib import figure as figure_lib

from diloco_jax.report import header
from diloco_jax.report import state as state_lib

_COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#B8A800', '#999999')
_SYNCER = '#444444'
DPI = 140  # of the file
MANY = 12  # learners, from which on the lanes are thin, and the legend has one line for all
_UNITS = ('days', 86400), ('hours', 3600), ('minutes', 60), ('seconds', 1)
_DEATHS = ('killed', 'failed', 'lost')


def draw(run: Mapping[str, Any]) -> figure_lib.Figure:
  """Draws the picture of a run, given by its state."""
  learners = {name: learner for name, learner in run['learners'].items() if learner['lives']}
  hues = (i * 0.382 % 1 for i in range(len(_COLOURS), len(learners)))
  more = [colors.to_hex(colors.hsv_to_rgb((hue, 0.6, 0.7))) for hue in hues]
  colours = dict(zip(learners, [*_COLOURS, *more]))
  rows = len(learners) + bool(run['syncer_lives'])
  high = (0.42 if len(learners) <= MANY else 0.12) * rows
  figure = figure_lib.Figure(figsize=(10, 5.2 + high), layout='constrained')
  top, bottom = figure.subplots(2, 1, height_ratios=[4.2, 0.6 + high])
  began = time.strftime('%Y-%m-%d %H:%M', time.localtime(run['began_s']))
  name = ' of '.join(filter(None, (run['name'], run['folder'])))
  top.set_title(f'{name}, {began}', loc='left', fontsize=10)
  _draw_loss(top, run, colours)
  _draw_processes(bottom, run, colours)
  return figure


def _draw_loss(axes: axes_lib.Axes, run: Mapping[str, Any], colours: Mapping[str, str]) -> None:
  for name, colour in colours.items():
    tokens, losses, ended = run['learners'][name]['curve']
    losses = np.array(losses, float)  # a None ends a line
    if not np.isfinite(losses).any():
      continue
    marker, label = '.' if len(tokens) < 20 else '', f'learner {name}, training loss'
    colour, width = ('#bbbbbb', 0.6) if len(colours) > MANY else (colour, 1.2)
    axes.plot(tokens, losses, color=colour, linewidth=width, marker=marker, label=label)
    for x, y, how in zip(tokens, losses, ended):
      if how in _DEATHS:
        _mark_death(axes, x, y)
        rim = [patheffects.withStroke(linewidth=3, foreground='white')]  # it lies upon curves
        where = {'xytext': (0, 7), 'textcoords': 'offset points', 'ha': 'center'}
        if len(colours) <= MANY:
          axes.annotate(f'{name} {how}', (x, y), fontsize=8, path_effects=rim, **where)
  style = {'linewidth': 2.2, 'marker': 'o', 'markersize': 4}
  own = [(f'learner {name}', run['learners'][name], colour) for name, colour in colours.items()]
  for label, source, colour in [*own, ('global model', run, 'black')]:
    if source['held_out'][0]:
      tokens, losses = source['held_out']  # a None, between points far apart, ends a line
      label = f'{label}, held-out loss'
      axes.plot(tokens, np.array(losses, float), color=colour, label=label, **style)
  if axes.get_lines():
    lines_, labels = axes.get_legend_handles_labels()
    if len(colours) > MANY:  # one of each kind
      pairs = {label.partition(', ')[2]: line for line, label in zip(lines_, labels)}
      lines_, labels = list(pairs.values()), [f'{len(colours)} learners, {pair}' for pair in pairs]
      labels = [label.replace(f'{len(colours)} learners, held-out', 'held-out') for label in labels]
    axes.legend(lines_, labels, frameon=False, fontsize=9)
  axes.set_xlabel('tokens trained by all learners')
  axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
  axes.margins(x=0.01)
  _scale(axes, run['loss_unit'])
  _open(axes)


def _scale(axes: axes_lib.Axes, unit: str) -> None:
  """A logarithmic axis of losses, unless one is not above 0; with ticks that people can read."""
  losses = [value for line in axes.get_lines() for value in np.asarray(line.get_ydata(), float)]
  losses = [value for value in losses if np.isfinite(value)]
  axes.set_ylabel(f'loss, {unit}' if unit else 'loss')
  if not losses:
    return
  if log := min(losses) > 0:
    axes.set_yscale('log')
    if max(losses) < 1.04 * min(losses):  # of one loss matplotlib would show a decade
      axes.set_ylim(min(losses) / 1.04, max(losses) * 1.04)
  axes.yaxis.set_major_locator(ticker.FixedLocator(ticks(*axes.get_ylim(), log=log)))
  axes.yaxis.set_major_formatter('{x:g}')
  axes.yaxis.set_minor_locator(ticker.NullLocator())


def ticks(low: float, high: float, log: bool) -> list[float]:
  """The most numbers on an axis, at most 8, that lie a 13th of it or more apart: three at least.
  report/web/page.js has the same function.

  >>> ticks(4.3, 5.5, log=True)
  [4.4, 4.6, 4.8, 5.0, 5.2, 5.4]
  """
  scale = math.log if log else float
  apart, size = (scale(high) - scale(low)) / 13, 10 ** math.floor(math.log10(high - low))
  sets = []
  for digits in ([1, 1.5, 2, 3, 5, 7], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]) if log else ():
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for stride in (1, 2, 3, 5):
      some = [decade for decade in decades if decade % stride == 0]
      sets.append([float(f'{digit}e{decade}') for decade in some for digit in digits])
  for part in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5):
    step = part * size
    first, last = math.ceil(low / step), math.floor(high / step)
    sets.append([k * step for k in range(first, min(last + 1, first + 99))])
  sets = [[float(f'{x:.9g}') for x in some] for some in sets]
  shown = [[x for x in some if low <= x <= high] for some in sets]
  far = lambda some: all(scale(b) - scale(a) >= apart for a, b in itertools.pairwise(some))
  return max((some for some in shown if len(some) < 9 and far(some)), key=len, default=[])


def _draw_processes(
  axes: axes_lib.Axes, run: Mapping[str, Any], colours: Mapping[str, str]
) -> None:
  lanes = {'syncer': run['syncer_lives']} if run['syncer_lives'] else {}
  lanes |= {name: run['learners'][name]['lives'] for name in colours}
  long_s = state_lib.shorten(run['pauses'], run['end_s'])
  unit, unit_s = next(row for row in _UNITS if long_s >= 5 * row[1] or row[1] == 1)
  short = lambda at_s: state_lib.shorten(run['pauses'], at_s) / unit_s
  for row, (name, processes) in enumerate(lanes.items()):
    for number, (*times, ended) in enumerate(processes):
      moments = [None if at_s is None else short(at_s) for at_s in times]
      _draw_process(axes, row, moments, ended, number == 0, colours.get(name, _SYNCER))
    merged = [short(at_s) for at_s in run['learners'].get(name, {}).get('merges_s', ())]
    axes.vlines(merged, row - 0.36, row - 0.22, color='black', linewidth=0.6)
  for at_s, pause_s in run['pauses']:
    axes.axvline(short(at_s), color='black', linewidth=0.8, linestyle=':')
    text, point = f' {header.duration(pause_s)} pause', (short(at_s), 0)
    axes.annotate(text, point, xycoords=('data', 'axes fraction'), fontsize=8, va='bottom')
  named = max(1, len(lanes) // MANY)
  axes.set_yticks(range(0, len(lanes), named), list(lanes)[::named])
  axes.set_ylim(len(lanes) - 0.4, -0.6)
  axes.set_xlim(0, max(0.01, short(run['end_s']) * 1.01))
  axes.set_xlabel(f'{unit} since the start' + (', with shorter pauses' if run['pauses'] else ''))
  where = {'loc': 'lower center', 'bbox_to_anchor': (0.5, 1.0), 'ncols': 5}
  axes.legend(handles=_process_legend(), frameon=False, fontsize=8, **where)
  _open(axes)


def _draw_process(
  axes: axes_lib.Axes, row: int, times: list[float | None], ended: str, first: bool, colour: str
) -> None:
  """`times`: of its start, its first step and its end."""
  began_s, stepped_s, over_s = times
  ready_s = over_s if stepped_s is None else stepped_s
  style = {'height': 0.4, 'color': colour, 'linewidth': 0}
  axes.barh(row, ready_s - began_s, left=began_s, alpha=0.25, **style)
  axes.barh(row, over_s - ready_s, left=ready_s, **style)
  if ended in _DEATHS:
    _mark_death(axes, over_s, row)
  if not first and stepped_s is not None:
    axes.plot(ready_s, row, marker='>', color='black', markersize=9, zorder=4, clip_on=False)


def _mark_death(axes: axes_lib.Axes, x: float, y: float) -> None:
  axes.plot(x, y, marker='X', color='black', markersize=10, zorder=4, clip_on=False)


def _process_legend() -> list:
  mark = lambda marker, label: lines.Line2D(
    [], [], color='black', marker=marker, linestyle='', markersize=7, label=label
  )
  return [
    patches.Patch(color='#666666', label='training or merging'),
    patches.Patch(color='#666666', alpha=0.25, label='starting'),
    mark('X', 'killed or lost'),
    mark('>', 'works again'),
    mark('|', 'contribution merged'),
  ]


def _open(axes: axes_lib.Axes) -> None:
  """Removes the frame at the top and on the right."""
  axes.spines[['top', 'right']].set_visible(False)
  axes.grid(axis='x' if axes.yaxis_inverted() else 'both', alpha=0.2)
