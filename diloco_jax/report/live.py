"""The display of a local run: a live table on a terminal, else plain lines.

The table is redrawn in place, and the lines of the processes are in their logs only. If the output
is a file or a pipe, every line is printed with the name of its process, and a status line every few
seconds.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rich import box, live, progress_bar
from rich import console as console_lib
from rich import table as table_lib
from rich import text as text_lib

from diloco_jax.report import facts, run_facts

LOCAL = 'local'
_STATUS_S = 5.0
_REDRAW_S = 0.5
_COLOURS = {
  'training': 'green',
  'alone': 'yellow',
  'starting': 'cyan',
  'waiting': 'dim',
  'down': 'bold red',
  'failed': 'bold red',
  'refused': 'bold red',
  'done': 'blue',
  'trained': 'blue',
}


class Display(Protocol):
  """Shows a run."""

  def listen(self, name: str, line: str) -> None:
    """Takes a line that a process wrote; `name` 'local' is the supervisor itself."""

  def tick(self, view: run_facts.RunFacts) -> None:
    """Shows the state of the run; called a few times a second."""

  def close(self) -> None: ...


def make(stream=None) -> Display:
  """Makes the display that suits standard output."""
  stream = stream or sys.stdout
  return LiveDisplay(console_lib.Console(file=stream)) if stream.isatty() else PlainDisplay(stream)


class PlainDisplay:
  """Prints the lines of the processes, and a status line every five seconds."""

  def __init__(self, stream):
    self._stream = stream
    self._next_s = 0.0

  def listen(self, name: str, line: str) -> None:
    self._print(f'[{name}] {line}')

  def tick(self, view: run_facts.RunFacts) -> None:
    if time.monotonic() >= self._next_s:
      self._next_s = time.monotonic() + _STATUS_S
      self._print(f'[{LOCAL}] {status_line(view)}')

  def close(self) -> None: ...

  def _print(self, text: str) -> None:
    try:
      print(text, file=self._stream, flush=True)
    except (OSError, ValueError):
      pass  # the reader has closed the pipe; the logs have the line


class LiveDisplay:
  """One table, redrawn in place; once the terminal is closed, nothing."""

  def __init__(self, console: console_lib.Console):
    self._live = live.Live(console=console, auto_refresh=False)
    self._guard(self._live.start)
    self._started_s = time.monotonic()
    self._next_s = 0.0
    self._view: run_facts.RunFacts | None = None
    self._size = console.size

  def listen(self, name: str, line: str) -> None:
    if name == LOCAL or line.startswith('error: '):
      self._guard(lambda: self._live.console.print(text_lib.Text(f'[{name}] {line}')))

  def tick(self, view: run_facts.RunFacts) -> None:
    if time.monotonic() >= self._next_s:
      self._next_s = time.monotonic() + _REDRAW_S
      self._guard(lambda: self._draw(view))

  def _draw(self, view: run_facts.RunFacts) -> None:
    self._view = view
    console = self._live.console
    if console.size != self._size:  # the terminal has wrapped the old lines anew
      self._size = console.size
      console.clear()
    elapsed_s = time.monotonic() - self._started_s
    self._live.update(picture(view, elapsed_s, console.width), refresh=True)

  def close(self) -> None:
    if self._view is not None:
      self._guard(lambda: self._draw(self._view))  # the final state
    self._guard(self._live.stop)

  def _guard(self, draw: Callable[[], None]) -> None:
    """Draws; a closed terminal (EIO) must not end the supervisor. Later output goes nowhere."""
    try:
      draw()
    except OSError:
      terminal = os.fstat(self._live.console.file.fileno())
      nowhere = os.open(os.devnull, os.O_WRONLY)
      for stream in (sys.__stdout__.fileno(), sys.__stderr__.fileno()):
        if os.fstat(stream).st_rdev == terminal.st_rdev:
          os.dup2(nowhere, stream)


def status_line(view: run_facts.RunFacts) -> str:
  """The state of the run in one line."""
  learners = ', '.join(
    f'{name} {learner.state} {learner.step}' for name, learner in view.learners.items()
  )
  if view.syncer is None:
    return f'{view.progress:.0%}: {learners}'
  figures = view.figures
  goodput = f', goodput {_percent(figures.training_since_joined)}' if figures else ''
  return (
    f'{view.progress:.0%}: {learners}; {len(view.merges_s)} outer steps{goodput}, '
    f'up {size(view.wire.bytes_up)}, down {size(view.wire.bytes_down)}'
  )


def picture(view: run_facts.RunFacts, elapsed_s: float, width: int) -> console_lib.Group:
  """The whole display: progress, models, the last event, learners, syncer. A terminal that is too
  low shows its beginning."""
  parts = [_progress(view, elapsed_s)]
  parts += [text_lib.Text(f' {cost}', style='dim', no_wrap=True) for cost in _costs(view)]
  if view.last_event:
    parts.append(text_lib.Text(f' {view.last_event}', style='yellow', no_wrap=True))
  parts.append(_table(_learner_columns(view), width))
  if view.syncer is not None:
    parts.append(_table(_syncer_columns(view), width))
  return console_lib.Group(*parts)


class _Column(NamedTuple):
  name: str
  cells: list[str]
  colours: list[str] | None = None  # of the cells of a column of states
  text: bool = False  # left aligned; a number is right aligned

  @property
  def width(self) -> int:
    return max(map(len, [self.name, *self.cells]))


_GAP, _MORE = 2, '…'


def _table(columns: list[_Column], width: int) -> table_lib.Table:
  """The columns that fit into `width` characters; if some do not, the last one is a mark."""
  needs = [column.width + _GAP for column in columns]
  if sum(needs) > width:
    room = width - len(_MORE) - _GAP
    fit = sum(total <= room for total in itertools.accumulate(needs))
    columns = [*columns[:fit], _Column(_MORE, [''] * len(columns[0].cells), text=True)]
  table = table_lib.Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
  for column in columns:
    table.add_column(column.name, justify='left' if column.text else 'right', no_wrap=True)
  for row in range(len(columns[0].cells)):
    table.add_row(
      *(text_lib.Text(c.cells[row], style=c.colours[row] if c.colours else '') for c in columns)
    )
  return table


def _learner_columns(view: run_facts.RunFacts) -> list[_Column]:
  """The columns of the learners, the less important ones last."""
  learners = list(view.learners.values())
  states = [learner.state for learner in learners]
  losses = [f'{learner.steps[-1].loss:.3f}' if learner.steps else '' for learner in learners]
  rates = [f'{learner.tokens_per_second:,.0f}' for learner in learners]
  return [
    _Column('learner', list(view.learners), text=True),
    _Column('state    ', states, [_COLOURS.get(state, '') for state in states], text=True),
    _Column('    step', [str(learner.step) for learner in learners]),
    _Column('tokens/s', rates),
    *_speeds(learners),
    _Column('   loss', losses),
    _Column('goodput', [_percent(view.training(name)) for name in view.learners]),
    _Column('contributions', [str(len(learner.merged_s)) for learner in learners]),
    _Column('staleness', [str(learner.staleness) for learner in learners]),
    _Column('incarnation', [str(learner.incarnation) for learner in learners]),
  ]


def _costs(view: run_facts.RunFacts) -> list[str]:
  """What the learners train, and on what; those that are alike share a line."""
  alike: dict[str, list[str]] = {}
  for name, learner in view.learners.items():
    if learner.cost:
      alike.setdefault(str(learner.cost), []).append(name)
  return [f'{" ".join(names)}: {cost}' for cost, names in alike.items()]


def _speeds(learners: list[run_facts.Learner]) -> list[_Column]:
  """TFLOP/s of a device, MFU and memory: those that any learner can tell."""
  speeds, columns = [learner.speed for learner in learners], []
  for name, (title, form) in facts.SPEED.items():
    if any(name in speed for speed in speeds):
      cells = [form.format(speed[name]) if name in speed else '' for speed in speeds]
      columns.append(_Column(title, cells))
  return columns


def _syncer_columns(view: run_facts.RunFacts) -> list[_Column]:
  last, figures = view.synced, view.figures
  return [
    _Column('syncer ', [view.syncer], [_COLOURS.get(view.syncer, '')], text=True),
    _Column('sync', [str(last.sync if last else 0)]),
    _Column('outer steps', [str(len(view.merges_s))]),
    _Column('held-out loss', [f'{view.evaluations[-1].loss:.3f}' if view.evaluations else '']),
    _Column('goodput', [_percent(figures and figures.training_since_joined)]),
    _Column('of tokens', [_percent(figures and figures.token)]),
    _Column('uptime', [_percent(figures and figures.uptime)]),
    _Column('      up', [size(view.wire.bytes_up)]),
    _Column('    down', [size(view.wire.bytes_down)]),
    _Column('  grace', [f'{last.grace_ns / 1e6 if last else 0:.0f} ms']),
    _Column('participants', [' '.join(last.participants) if last else '-'], text=True),
  ]


def _percent(share: float | None) -> str:
  return '' if share is None else f'{share:.1%}'


def _progress(view: run_facts.RunFacts, elapsed_s: float) -> table_lib.Table:
  grid = table_lib.Table.grid(padding=(0, 1))
  grid.add_row(
    '',
    progress_bar.ProgressBar(total=1.0, completed=view.progress, width=20),
    f'{view.progress:4.0%} of {view.total_steps} steps, {elapsed_s:.0f} s',
  )
  return grid


def size(count_bytes: float) -> str:
  """Bytes for people.

  >>> size(512), size(2_500_000)
  ('512 B', '2.5 MB')
  """
  for unit in ('B', 'kB', 'MB', 'GB'):
    if count_bytes < 1000:
      return f'{count_bytes:.0f} B' if unit == 'B' else f'{count_bytes:.1f} {unit}'
    count_bytes /= 1000
  return f'{count_bytes:.1f} TB'
