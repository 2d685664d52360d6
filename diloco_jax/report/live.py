"""The display of a local run: a live table on a terminal, else plain lines.

The table is redrawn in place, and the lines of the processes are in their logs only. If the output
is a file or a pipe, every line is printed with the name of its process, and a status line every few
seconds.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

from rich import box, live, progress_bar
from rich import console as console_lib
from rich import table as table_lib
from rich import text as text_lib

from diloco_jax.report import run_facts

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

  def listen(self, name: str, line: str) -> None:
    if name == LOCAL or line.startswith('error: '):
      self._guard(lambda: self._live.console.print(text_lib.Text(f'[{name}] {line}')))

  def tick(self, view: run_facts.RunFacts) -> None:
    if time.monotonic() >= self._next_s:
      self._next_s = time.monotonic() + _REDRAW_S
      self._guard(lambda: self._draw(view))

  def _draw(self, view: run_facts.RunFacts) -> None:
    self._view = view
    self._live.update(picture(view, time.monotonic() - self._started_s), refresh=True)

  def close(self) -> None:
    if self._view is not None:
      self._guard(lambda: self._draw(self._view))  # the final state
    self._guard(self._live.stop)

  def _guard(self, draw: Callable[[], None]) -> None:
    """Draws; a closed terminal (EIO) must not end the supervisor. Later output goes nowhere."""
    try:
      draw()
    except OSError:
      os.dup2(os.open(os.devnull, os.O_WRONLY), self._live.console.file.fileno())


def status_line(view: run_facts.RunFacts) -> str:
  """The state of the run in one line."""
  learners = ', '.join(
    f'{name} {learner.state} {learner.step}' for name, learner in view.learners.items()
  )
  if view.syncer is None:
    return f'{view.progress:.0%}: {learners}'
  return (
    f'{view.progress:.0%}: {learners}; {len(view.syncs)} outer steps, '
    f'up {size(view.wire.bytes_up)}, down {size(view.wire.bytes_down)}'
  )


def picture(view: run_facts.RunFacts, elapsed_s: float) -> console_lib.Group:
  """The whole display: learners, syncer, progress, the last event."""
  parts = [_learner_table(view)]
  if view.syncer is not None:
    parts.append(_syncer_table(view))
  parts.append(_progress(view, elapsed_s))
  if view.last_event:
    parts.append(text_lib.Text(f' {view.last_event}', style='yellow'))
  return console_lib.Group(*parts)


def _learner_table(view: run_facts.RunFacts) -> table_lib.Table:
  table = table_lib.Table(box=box.SIMPLE_HEAD, pad_edge=False)
  table.add_column('learner')
  table.add_column('state', min_width=9)
  for name in ('step', 'tokens/s', 'loss', 'staleness', 'incarnation', 'contributions'):
    table.add_column(name, justify='right', min_width=8)
  for name, learner in view.learners.items():
    table.add_row(
      name,
      text_lib.Text(learner.state, style=_COLOURS.get(learner.state, '')),
      str(learner.step),
      f'{learner.tokens_per_second:,.0f}',
      f'{learner.steps[-1].loss:.3f}' if learner.steps else '',
      str(learner.staleness),
      str(learner.incarnation),
      str(len(learner.merged_s)),
    )
  return table


def _syncer_table(view: run_facts.RunFacts) -> table_lib.Table:
  last = view.syncs[-1] if view.syncs else None
  table = table_lib.Table(box=box.SIMPLE_HEAD, pad_edge=False)
  for name in ('syncer', 'participants'):
    table.add_column(name)
  for name in ('sync', 'outer steps', 'grace', 'up', 'down', 'held-out loss'):
    table.add_column(name, justify='right')
  table.add_row(
    text_lib.Text(view.syncer, style=_COLOURS.get(view.syncer, '')),
    ' '.join(last.participants) if last else '-',
    str(last.sync if last else 0),
    str(len(view.syncs)),
    f'{last.grace_ns / 1e6 if last else 0:.0f} ms',
    size(view.wire.bytes_up),
    size(view.wire.bytes_down),
    f'{view.evaluations[-1].loss:.3f}' if view.evaluations else '',
  )
  return table


def _progress(view: run_facts.RunFacts, elapsed_s: float) -> table_lib.Table:
  grid = table_lib.Table.grid(padding=(0, 1))
  grid.add_row(
    '',
    progress_bar.ProgressBar(total=1.0, completed=view.progress, width=40),
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
