"""The display of a local run: a live table on a terminal, else plain lines.

The table is redrawn in place, and the lines of the processes are in their logs only. If the output
is a file or a pipe, every line is printed with the name of its process, and a status line every few
seconds, if it says something new.
"""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rich import box, live, progress_bar
from rich import console as console_lib
from rich import table as table_lib
from rich import text as text_lib

from diloco_jax.report import facts, header, run_facts

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
  'stopped': 'dim',
  'killed': 'bold red',
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
  console = console_lib.Console(file=stream)
  display = LiveDisplay(console) if stream.isatty() else PlainDisplay(stream)
  for name in ('listen', 'tick', 'close'):  # a fault of the display is none of the run
    show = header.until_it_fails(getattr(display, name), 'the display', 'diloco status')
    setattr(display, name, show)
  return display


class PlainDisplay:
  """Prints the lines of the processes, and every five seconds a status line, if it is new."""

  def __init__(self, stream):
    self._stream = stream
    self._next_s = 0.0
    self._said = ''

  def listen(self, name: str, line: str) -> None:
    text = f'{header.clock()}{line}' if name == LOCAL else line
    print(f'[{name}] {text}', file=self._stream, flush=True)

  def tick(self, view: run_facts.RunFacts) -> None:
    if time.monotonic() >= self._next_s:
      self._next_s = time.monotonic() + _STATUS_S
      if (line := status_line(view)) != self._said:
        self._said = line
        self.listen(LOCAL, line)

  def close(self) -> None: ...


class LiveDisplay:
  """One table, redrawn in place; once the terminal is closed, nothing."""

  def __init__(self, console: console_lib.Console):
    self._live = live.Live(console=console, auto_refresh=False)
    self._guard(self._live.start)
    self._started_s = time.monotonic()
    self._next_s = 0.0
    self._view: run_facts.RunFacts | None = None
    self._header = False  # whether it was printed
    self._size = console.size

  def listen(self, name: str, line: str) -> None:
    if name == LOCAL or line.startswith('error: '):
      self._print(f'[{name}] {header.clock()}{line}')

  def tick(self, view: run_facts.RunFacts) -> None:
    if time.monotonic() >= self._next_s:
      self._next_s = time.monotonic() + _REDRAW_S
      if view.layout and not self._header:
        self._header = True
        for line in view.layout.lines:
          self._print(line)
      self._guard(lambda: self._draw(view))

  def _print(self, line: str) -> None:
    self._guard(lambda: self._live.console.print(text_lib.Text(line)))

  def _draw(self, view: run_facts.RunFacts) -> None:
    self._view = view
    console = self._live.console
    if console.size != self._size:  # the terminal has wrapped the old lines anew
      self._size = console.size
      console.clear()
    elapsed_s = time.monotonic() - self._started_s
    self._live.update(picture(view, elapsed_s, console.width), refresh=True)

  def close(self) -> None:
    if (view := self._view) is not None:
      self._guard(lambda: self._draw(view))  # the final state
    self._guard(self._live.stop)

  def _guard(self, draw: Callable[[], None]) -> None:
    """Draws; a closed terminal (EIO) must not end the supervisor. Later output goes nowhere."""
    try:
      draw()
    except OSError:
      terminal = os.fstat(self._live.console.file.fileno())
      nowhere = os.open(os.devnull, os.O_WRONLY)
      for stream in (1, 2):
        if os.fstat(stream).st_rdev == terminal.st_rdev:
          os.dup2(nowhere, stream)


def status_line(view: run_facts.RunFacts) -> str:
  """The state of the run in one line."""
  learners = ', '.join(
    f'{name} {_activity(view, name)}{f" {learner.step}" if learner.step else ""}'
    for name, learner in view.learners.items()
  )
  told = _pace(view)
  if view.merges_s:
    up, down = header.size(view.wire.bytes_up), header.size(view.wire.bytes_down)
    told += [f'{len(view.merges_s)} outer steps', f'up {up}', f'down {down}']
    if view.figures:
      told.append(f'goodput {_percent(view.figures.training_since_joined)}')
  return f'{_done(view, "{:.0%}")}: {learners}{"; " if told else ""}{", ".join(told)}'


def _done(view: run_facts.RunFacts, form: str) -> str:
  known = view.total_steps < math.inf
  return form.format(view.progress, view.total_steps) if known else 'length not recorded'


def _pace(view: run_facts.RunFacts) -> list[str]:
  """What the learners train together, and how long the run will take."""
  left_s = view.seconds_left
  return [
    *([f'{view.tokens:,} tokens'] if view.tokens else []),
    *([f'{view.tokens_per_second:,.0f} tokens/s'] if view.tokens_per_second else []),
    *([f'{header.duration(left_s)} left'] if left_s else []),
  ]


def _activity(view: run_facts.RunFacts, name: str) -> str:
  """What a learner does, in words; of the phases of its start the present one."""
  learner = view.learners[name]
  if learner.phase == 'waiting':
    others = [other for other, one in view.learners.items() if not one.is_live]
    more = ' …' if len(others) > 1 else ''
    return f'waiting for {others[0]}{more}' if others else 'joined'
  return learner.phase or learner.state


def picture(view: run_facts.RunFacts, elapsed_s: float, width: int) -> console_lib.Group:
  """The whole display: progress, models, the last event, learners, syncer. A terminal that is too
  low shows its beginning."""
  parts = [_progress(view, elapsed_s)]
  dim = [*_costs(view), ', '.join(word for word in _pace(view) if 'tokens' in word)]
  parts += [text_lib.Text(f' {line}', style='dim', no_wrap=True) for line in dim if line]
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
  states = ['starting' if learner.phase else learner.state for learner in learners]
  now_s = view.seconds_at(time.time())
  doing = [
    f'{_activity(view, name)}{f" {now_s - one.phase_s:.0f} s" if one.phase else ""}'
    for name, one in view.learners.items()
  ]
  losses = ['' if learner.loss is None else f'{learner.loss:.3f}' for learner in learners]
  held_out = [f'{one.held_out[-1]:.3f}' if one.held_out else '' for one in learners]
  rates = [f'{learner.tokens_per_second:,.0f}' for learner in learners]
  return [
    _Column('learner', list(view.learners), text=True),
    _Column('state     ', doing, [_COLOURS.get(state, '') for state in states], text=True),
    _Column('    step', [str(learner.step) for learner in learners]),
    _Column('tokens/s', rates),
    *_speeds(learners),
    _Column('   loss', losses),
    *([_Column('held-out', held_out)] if any(held_out) else []),
    _Column('goodput', [_percent(view.training(name)) for name in view.learners]),
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
  last, figures, state = view.synced, view.figures, view.syncer or ''
  names, narrow = (last.participants, last.narrow) if last else (('-',), ())
  merged = [f'{name} (narrow)' if name in narrow else name for name in names]
  return [
    _Column('syncer ', [state], [_COLOURS.get(state, '')], text=True),
    _Column('sync', [str(last.sync if last else 0)]),
    _Column('outer steps', [str(len(view.merges_s))]),
    _Column('held-out', [f'{view.evaluations[-1].loss:.3f}' if view.evaluations else '']),
    _Column('goodput', [_percent(figures and figures.training_since_joined)]),
    _Column('of tokens', [_percent(figures and figures.token)]),
    _Column('uptime', [_percent(figures and figures.uptime)]),
    _Column('      up', [header.size(view.wire.bytes_up)]),
    _Column('    down', [header.size(view.wire.bytes_down)]),
    _Column('merged', [' '.join(merged)], text=True),
  ]


def _percent(share: float | None) -> str:
  return '' if share is None else f'{share:.1%}'


def _progress(view: run_facts.RunFacts, elapsed_s: float) -> table_lib.Table:
  told = [_done(view, '{:4.0%} of {} steps'), header.duration(elapsed_s)]
  grid = table_lib.Table.grid(padding=(0, 1))
  grid.add_row(
    '',
    progress_bar.ProgressBar(total=1.0, completed=view.progress, width=20),
    ', '.join(told + [word for word in _pace(view) if word.endswith('left')]),
    text_lib.Text(header.clock(), style='dim'),
  )
  return grid
