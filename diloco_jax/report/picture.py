"""The picture of a run: loss against tokens, and below it the processes against time.

The colours are Okabe and Ito's, distinct for every kind of colour vision. The global model is black
and thick; every learner has one colour in both halves.
"""

import pathlib

from matplotlib import axes as axes_lib
from matplotlib import figure as figure_lib
from matplotlib import lines, patches, ticker

from diloco_jax.report import run_facts

_COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#999999')
_SYNCER = '#444444'
_SMOOTHING_STEPS = 10


def draw(run: run_facts.RunFacts, path: pathlib.Path, title: str) -> None:
  """Writes the picture as PNG."""
  figure(run, title).savefig(path, dpi=140)


def figure(run: run_facts.RunFacts, title: str) -> figure_lib.Figure:
  """Draws the picture."""
  learners = [name for name, learner in run.learners.items() if learner.processes]
  rows = len(learners) + bool(run.syncer_processes)
  drawn = figure_lib.Figure(figsize=(10, 5.2 + 0.42 * rows), layout='constrained')
  top, bottom = drawn.subplots(2, 1, height_ratios=[4.2, 0.6 + 0.42 * rows])
  colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(learners)}
  _draw_loss(top, run, colours)
  _draw_processes(bottom, run, colours)
  top.set_title(title, loc='left', fontsize=11)
  return drawn


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
    for tokens, losses in _process_curves(run.learners[name]):
      axes.plot(tokens, losses, color=colours[name], linewidth=0.5, alpha=0.25)
      axes.plot(tokens, smooth(losses), color=colours[name], linewidth=1.2, label=name)
  if run.evaluations:
    axes.plot(
      run.evaluated_tokens,
      [e.loss for e in run.evaluations],
      color='black',
      linewidth=2.2,
      marker='o',
      markersize=4,
      label='held-out',
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
  axes.set_xlabel('tokens trained by all learners')
  axes.set_ylabel('loss')
  axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
  axes.margins(x=0.01)
  _open(axes)


def _process_curves(learner: run_facts.Learner):
  """Yields (tokens, losses) of each process that stepped, so that no line bridges an absence."""
  starts = [process.started_s for process in learner.processes[1:]] + [float('inf')]
  begin_s = float('-inf')
  for end_s in starts:
    part = [step for step in learner.steps if begin_s <= step.at_s < end_s]
    if part:
      yield [step.tokens for step in part], [step.loss for step in part]
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
  axes.set_xlabel('seconds since the start' + (', with shorter pauses' if run.pauses else ''))
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
  axes: axes_lib.Axes,
  row: int,
  process: run_facts.Process,
  first: bool,
  colour: str,
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
  if process.ended in ('killed', 'failed'):
    axes.plot(over_s, row, marker='X', color='black', markersize=10, zorder=4, clip_on=False)
  if not first and process.first_step_s is not None:
    axes.plot(ready_s, row, marker='>', color='black', markersize=9, zorder=4, clip_on=False)


def _draw_pause(axes: axes_lib.Axes, at_s: float, pause_s: float) -> None:
  axes.axvline(at_s, color='black', linewidth=0.8, linestyle=':')
  axes.annotate(
    f' {_duration(pause_s)} pause',
    (at_s, 0),
    xycoords=('data', 'axes fraction'),
    fontsize=8,
    va='bottom',
  )


def _duration(seconds: float) -> str:
  """Seconds for people.

  >>> _duration(90), _duration(1_830), _duration(40_000)
  ('90 s', '30 min', '11 h')
  """
  if seconds < 120:
    return f'{seconds:.0f} s'
  return f'{seconds / 60:.0f} min' if seconds < 7200 else f'{seconds / 3600:.0f} h'


def _process_legend() -> list:
  def mark(marker: str, label: str, size: float = 7):
    return lines.Line2D(
      [], [], color='black', marker=marker, linestyle='', markersize=size, label=label
    )

  return [
    patches.Patch(color='#666666', label='training or merging'),
    patches.Patch(color='#666666', alpha=0.25, label='starting'),
    mark('X', 'killed'),
    mark('>', 'works again'),
    mark('|', 'contribution merged'),
  ]


def _open(axes: axes_lib.Axes) -> None:
  """Removes the frame at the top and on the right."""
  axes.spines[['top', 'right']].set_visible(False)
  axes.grid(axis='x' if axes.yaxis_inverted() else 'both', alpha=0.2)
