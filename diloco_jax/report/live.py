"""The display of a local run: the lines of its processes, and every few seconds its state.

Every line is printed with the name of its process; the state is one line, printed if it has
changed.
"""

import collections
import math
import os
import shutil
import sys
import time

from diloco_jax.report import condition, header, run_facts

LOCAL = 'local'
_STATUS_S = 5.0
_EACH = 8  # learners that a line shows one by one


class Display:
  """Shows a run."""

  def __init__(self, stream=None):
    self._stream = stream or sys.stdout
    self._next_s = 0.0
    self._said = ''
    guarded = lambda show: header.until_it_fails(show, 'the display', 'diloco status')
    self.listen = guarded(self._listen)  # a fault of the display is none of the run
    self.tick = guarded(self._tick)

  def _listen(self, name: str, line: str) -> None:
    """Takes a line that a process wrote; `name` LOCAL is the supervisor itself."""
    text = f'[{name}] {header.clock()}{line}' if name == LOCAL else f'[{name}] {line}'
    try:
      print('\n'.join(self._fitted(text)), file=self._stream, flush=True)
    except OSError:  # a closed terminal must not end the supervisor: later output goes nowhere
      closed, nowhere = os.fstat(self._stream.fileno()), os.open(os.devnull, os.O_WRONLY)
      for number in (1, 2):
        if os.path.samestat(os.fstat(number), closed):
          os.dup2(nowhere, number)

  def _fitted(self, text: str) -> list[str]:
    """The lines of a text on a terminal, whose own breaks are within words; else it is one."""
    width = shutil.get_terminal_size().columns
    return header.wrap(text, width, indent=4) if self._stream.isatty() else [text]

  def _tick(self, view: run_facts.RunFacts) -> None:
    """Shows the state of the run; called a few times a second."""
    if time.monotonic() >= self._next_s:
      self._next_s = time.monotonic() + _STATUS_S
      view.look(time.time())
      if (line := status_line(view)) != self._said:
        self._said = line
        self._listen(LOCAL, line)


def status_line(view: run_facts.RunFacts) -> str:
  """The state of the run in one line."""
  parts = _pace(view)
  if view.evaluations:
    parts.append(f'held-out loss {view.evaluations[-1].loss:.3f}')
  if view.merges_s:
    up, down = header.size(view.wire.bytes_up), header.size(view.wire.bytes_down)
    parts += [f'{len(view.merges_s)} outer steps', f'up {up}', f'down {down}']
    if view.figures and view.figures.training_since_joined is not None:
      parts.append(f'goodput since joined {view.figures.training_since_joined:.1%}')
  done = f'{view.progress:.0%}' if view.total_steps < math.inf else 'length not recorded'
  whole = condition.of_run(view)
  if whole.kind in (condition.FAULT, condition.SILENT) or whole.state == 'closing':
    parts.append('the run is ' * (not whole.silent) + whole.brief)
  return f'{done}: {", ".join(_learners(view))}{"; " if parts else ""}{", ".join(parts)}'


def _learners(view: run_facts.RunFacts) -> list[str]:
  """A text for each learner; of many learners only the faulty ones, and counts of the others."""
  so = {name: view.condition(name) for name in view.ordered}
  steps = {name: f' {view.learners[name].step}' * bool(view.learners[name].step) for name in so}
  bad = {condition.FAULT, condition.SILENT}
  shown = [name for name in so if len(so) <= _EACH or so[name].kind in bad]
  rest = collections.Counter(so[name].state for name in so if name not in shown)
  more = len(shown) - _EACH
  return [
    *(f'{count} {state}' for state, count in rest.items()),
    *(f'{name} {so[name].brief}{steps[name]}' for name in shown[:_EACH]),
    *([f'{more} more not well'] if more > 0 else []),
  ]


def _pace(view: run_facts.RunFacts) -> list[str]:
  """What the learners train together, and how long the run will take."""
  left_s = view.seconds_left
  return [
    *([f'{view.trained:,} tokens'] if view.trained else []),
    *([f'{view.tokens_per_second:,.0f} tokens/s'] if view.tokens_per_second else []),
    *([f'{header.duration(left_s)} left'] if left_s else []),
  ]
