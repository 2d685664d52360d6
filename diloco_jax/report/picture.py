"""The pictures of a run: loss against tokens, and below it the processes against time; the losses
of several runs.

The colours are Okabe and Ito's, distinct for every kind of colour vision. The global model is black
and thick; every learner has one colour in both halves.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping

import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
from matplotlib import lines, patches, ticker

from diloco_jax.report import folder, header, run_facts
from diloco_jax.report import steps as steps_lib

_COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#999999')
_SYNCER = '#444444'
_SMOOTHING_STEPS = 10
DPI = 140  # of the files
_COUNT = ticker.EngFormatter(sep='', places=1)
_DEATHS = ('killed', 'failed', 'lost')
_TOKENS, _SECONDS = 'tokens trained by all learners', 'seconds since the start'


def draw(found: folder.Read) -> figure_lib.Figure:
  """Draws the picture of a run."""
  run = found.run
  learners = [name for name, learner in run.learners.items() if learner.processes]
  rows = len(learners) + bool(run.syncer_processes)
  figure = figure_lib.Figure(figsize=(10, 5.2 + 0.42 * rows), layout='constrained')
  top, bottom = figure.subplots(2, 1, height_ratios=[4.2, 0.6 + 0.42 * rows])
  colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(learners)}
  _draw_loss(top, run, colours)
  _scale(top, found.loss_unit)
  top.set_title(_title(found), loc='left', fontsize=10)
  _draw_processes(bottom, run, colours)
  return figure


def draw_beside(runs: Mapping[str, folder.Read]) -> figure_lib.Figure:
  """Draws the held-out losses of several runs: over the tokens, and over the time. Of a run without
  evaluations these are the training losses."""
  figure = figure_lib.Figure(figsize=(12, 4.8), layout='constrained')
  both = figure.subplots(1, 2, sharey=True)
  for index, (name, found) in enumerate(runs.items()):
    run, colour = found.run, _COLOURS[index % len(_COLOURS)]
    for learner in run.learners.values():
      for _, steps in _of_processes(learner):
        losses = smooth([step.loss for step in steps])
        for axes, x in zip(both, ([s.tokens for s in steps], [s.at_s for s in steps])):
          axes.plot(x, losses, color=colour, linewidth=0.8, alpha=0.35)
    label = f'{name}: held-out loss' if run.evaluations else f'{name}: training loss'
    values = [one.loss for one in run.evaluations]
    for axes, x in zip(both, (run.evaluated_tokens, run.evaluated_s)):
      axes.plot(x, values, color=colour, linewidth=2.2, marker='o', markersize=4, label=label)
  for axes, what in zip(both, (_TOKENS, _SECONDS)):
    axes.set_xlabel(what)
    axes.margins(x=0.01)
    _open(axes)
  _scale(both[0], next(iter(runs.values())).loss_unit)
  both[0].xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
  both[1].legend(frameon=False, fontsize=9)
  return figure


def _title(found: folder.Read) -> str:
  """Which run it is, of what size, and how its fragments are exchanged."""
  run, config = found.run, found.config
  words = [config.name if config else 'config not recorded']
  if run.began_s is not None:
    words.append(time.strftime('%Y-%m-%d %H:%M', time.localtime(run.began_s)))
  if run.layout:
    words.append(f'{_COUNT(run.layout.parameters)} parameters')
  if config and run.syncer is not None:
    sync = config.sync
    words.append(
      f'M={sync.learners} K={sync.quorum} H={sync.period} P={sync.fragments} tau={sync.overlap}'
    )
    words.append(f'{sync.codec_up} up, {sync.codec_down} down')
  return ', '.join(words)


def smooth(values: list[float], steps: int = _SMOOTHING_STEPS) -> list[float]:
  """The mean of each value and up to steps - 1 before it.

  >>> smooth([2.0, 4.0, 6.0], 2)
  [2.0, 3.0, 5.0]
  """
  return [
    sum(values[max(0, i + 1 - steps) : i + 1]) / min(steps, i + 1) for i in range(len(values))
  ]


def _draw_loss(axes: axes_lib.Axes, run: run_facts.RunFacts, colours: dict[str, str]) -> None:
  for name in colours:
    for process, steps in _of_processes(run.learners[name]):
      tokens, losses = [step.tokens for step in steps], [step.loss for step in steps]
      shown = smooth(losses)
      axes.plot(tokens, losses, color=colours[name], linewidth=0.5, alpha=0.25)
      marker = '.' if len(steps) < 20 else ''
      axes.plot(tokens, shown, color=colours[name], linewidth=1.2, marker=marker)
      if process.ended in _DEATHS:
        _mark_death(axes, tokens[-1], shown[-1])
        told = f'\n{name} {process.ended}'  # below the mark
        axes.text(tokens[-1], shown[-1], told, ha='center', va='top', fontsize=8)
  if run.evaluations:
    axes.plot(
      run.evaluated_tokens,
      [e.loss for e in run.evaluations],
      color='black',
      linewidth=2.2,
      marker='o',
      markersize=4,
    )
  handles = [
    lines.Line2D([], [], color=colour, label=f'learner {name}, training loss')
    for name, colour in colours.items()
    if run.learners[name].steps
  ]
  if run.evaluations:
    handles.append(
      lines.Line2D(
        [],
        [],
        color='black',
        linewidth=2.2,
        marker='o',
        markersize=4,
        label='global model, held-out loss',
      )
    )
  axes.legend(handles=handles, frameon=False, fontsize=9)
  axes.set_xlabel(_TOKENS)
  axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
  axes.margins(x=0.01)
  _open(axes)


def _scale(axes: axes_lib.Axes, unit: str) -> None:
  """A logarithmic axis of losses, unless one is not above 0; with ticks that people can read."""
  losses = [value for line in axes.get_lines() for value in np.asarray(line.get_ydata(), float)]
  axes.set_ylabel(f'loss, {unit}' if unit else 'loss')
  if losses and min(losses) > 0:
    axes.set_yscale('log')
    if max(losses) < 20 * min(losses):
      axes.yaxis.set_major_locator(ticker.MaxNLocator(9, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter('{x:g}')
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _of_processes(
  learner: run_facts.Learner,
) -> Iterator[tuple[run_facts.Process, list[steps_lib.Step]]]:
  """Each process that stepped, and its steps, so that no line bridges an absence; but
  for those whose loss is not known."""
  begin_s = float('-inf')
  for process, following in itertools.zip_longest(learner.processes, learner.processes[1:]):
    end_s = following.started_s if following else float('inf')
    steps = [step for step in learner.steps if begin_s <= step.at_s < end_s]
    if steps := [step for step in steps if not math.isnan(step.loss)]:
      yield process, steps
    begin_s = end_s


def _draw_processes(axes: axes_lib.Axes, run: run_facts.RunFacts, colours: dict[str, str]) -> None:
  names = ['syncer'] if run.syncer_processes else []
  for process in run.syncer_processes:
    _draw_process(axes, 0, process, process is run.syncer_processes[0], _SYNCER)
  for name, colour in colours.items():
    row, learner = len(names), run.learners[name]
    for process in learner.processes:
      _draw_process(axes, row, process, process is learner.processes[0], colour)
    axes.vlines(learner.merged_s, row - 0.36, row - 0.22, color='black', linewidth=0.6)
    names.append(name)
  for at_s, pause_s in run.pauses:
    _draw_pause(axes, at_s, pause_s)
  axes.set_yticks(range(len(names)), names)
  axes.set_ylim(len(names) - 0.4, -0.6)
  axes.set_xlim(0, run.end_s * 1.01)
  axes.set_xlabel(_SECONDS + (', with shorter pauses' if run.pauses else ''))
  axes.legend(
    handles=_process_legend(),
    frameon=False,
    fontsize=8,
    ncols=5,
    loc='lower center',
    bbox_to_anchor=(0.5, 1.0),
    handletextpad=0.5,
    columnspacing=1.5,
  )
  _open(axes)


def _draw_process(
  axes: axes_lib.Axes, row: int, process: run_facts.Process, first: bool, colour: str
) -> None:
  """A process that was not seen to end ends with its last fact."""
  over_s = process.last_s if process.ended_s is None else process.ended_s
  ready_s = over_s if process.first_step_s is None else process.first_step_s
  axes.barh(
    row,
    ready_s - process.started_s,
    left=process.started_s,
    height=0.4,
    color=colour,
    alpha=0.25,
    linewidth=0,
  )
  axes.barh(row, over_s - ready_s, left=ready_s, height=0.4, color=colour, linewidth=0)
  if process.ended in _DEATHS:
    _mark_death(axes, over_s, row)
  if not first and process.first_step_s is not None:
    axes.plot(ready_s, row, marker='>', color='black', markersize=9, zorder=4, clip_on=False)


def _mark_death(axes: axes_lib.Axes, x: float, y: float) -> None:
  axes.plot(x, y, marker='X', color='black', markersize=10, zorder=4, clip_on=False)


def _draw_pause(axes: axes_lib.Axes, at_s: float, pause_s: float) -> None:
  axes.axvline(at_s, color='black', linewidth=0.8, linestyle=':')
  axes.annotate(
    f' {header.duration(pause_s)} pause',
    (at_s, 0),
    xycoords=('data', 'axes fraction'),
    fontsize=8,
    va='bottom',
  )


def _process_legend() -> list:
  def mark(marker: str, label: str, size: float = 7):
    return lines.Line2D(
      [], [], color='black', marker=marker, linestyle='', markersize=size, label=label
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
