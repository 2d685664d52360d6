"""The display of a local run: the lines of its processes, and every few seconds its state.

Every line is printed with the name of its process; the state is one line, printed if it says
something new.
"""

import math
import os
import sys
import time

from diloco_jax.report import header, run_facts

LOCAL = 'local'
_STATUS_S = 5.0


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
    text = f'{header.clock()}{line}' if name == LOCAL else line
    try:
      print(f'[{name}] {text}', file=self._stream, flush=True)
    except OSError:  # a closed terminal must not end the supervisor: later output goes nowhere
      closed, nowhere = os.fstat(self._stream.fileno()), os.open(os.devnull, os.O_WRONLY)
      for number in (1, 2):
        if os.path.samestat(os.fstat(number), closed):
          os.dup2(nowhere, number)

  def _tick(self, view: run_facts.RunFacts) -> None:
    """Shows the state of the run; called a few times a second."""
    if time.monotonic() >= self._next_s:
      self._next_s = time.monotonic() + _STATUS_S
      if (line := status_line(view)) != self._said:
        self._said = line
        self._listen(LOCAL, line)


def status_line(view: run_facts.RunFacts) -> str:
  """The state of the run in one line."""
  learners = ', '.join(
    f'{name} {_activity(view, name)}{f" {learner.step}" if learner.step else ""}'
    for name, learner in view.learners.items()
  )
  told = _pace(view)
  if view.evaluations:
    told.append(f'held-out loss {view.evaluations[-1].loss:.3f}')
  if view.merges_s:
    up, down = header.size(view.wire.bytes_up), header.size(view.wire.bytes_down)
    told += [f'{len(view.merges_s)} outer steps', f'up {up}', f'down {down}']
    if view.figures and view.figures.training_since_joined is not None:
      told.append(f'goodput since joined {view.figures.training_since_joined:.1%}')
  done = f'{view.progress:.0%}' if view.total_steps < math.inf else 'length not recorded'
  return f'{done}: {learners}{"; " if told else ""}{", ".join(told)}'


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
