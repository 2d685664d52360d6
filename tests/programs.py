"""Programs that a test starts, and waits that say what they waited for.

A program leads a session of its own. Its output is read line by line while it runs, so it never
waits for the test; a wait that fails shows the last lines.
"""

import contextlib
import inspect
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEADLINE_S = 240.0
LAST = 30  # lines of a program that a failed wait shows


class Program:
  """A running program.

  Attributes:
    lines: its output so far.
  """

  def __init__(self, *command: str | os.PathLike, cwd: pathlib.Path = ROOT, **environment: str):
    quiet = {'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': '', 'PYTHONUNBUFFERED': '1'}
    self.process = subprocess.Popen(
      [sys.executable, *command],
      cwd=cwd,
      env={**os.environ, **quiet, **environment},
      encoding='utf-8',
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    self.lines: list[str] = []
    self._seen = 0  # lines that `wait_for` has gone through
    self._more = threading.Condition()
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    with self.process.stdout as output:
      for line in output:
        with self._more:
          self.lines.append(line.rstrip('\n'))
          self._more.notify_all()
    with self._more:
      self._more.notify_all()

  def wait_for(self, text: str, deadline_s: float = DEADLINE_S) -> str:
    """The next line that contains `text`."""
    end_s = time.monotonic() + deadline_s
    with self._more:
      while True:
        while self._seen < len(self.lines):
          self._seen += 1
          if text in self.lines[self._seen - 1]:
            return self.lines[self._seen - 1]
        left_s = end_s - time.monotonic()
        assert left_s > 0, f'{text!r} did not come within {deadline_s:g} s\n{self}'
        assert self._reader.is_alive(), f'{text!r} never came, the program has ended\n{self}'
        self._more.wait(min(left_s, 1.0))

  def end(self, deadline_s: float = DEADLINE_S) -> int:
    """Waits for the end of the program and of its output; returns the exit code."""
    try:
      code = self.process.wait(deadline_s)
    except subprocess.TimeoutExpired:
      raise AssertionError(f'the program has not ended within {deadline_s:g} s\n{self}') from None
    self._reader.join(deadline_s)
    return code

  @property
  def text(self) -> str:
    return '\n'.join(self.lines)

  @property
  def running(self) -> bool:
    return self.process.poll() is None

  def send(self, number: signal.Signals) -> None:
    self.process.send_signal(number)

  def kill(self) -> None:
    """Ends its session at once."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.end()

  def __str__(self) -> str:
    return '\n'.join(
      ['the last lines of ' + ' '.join(map(str, self.process.args[1:])), *self.lines[-LAST:]]
    )


@contextlib.contextmanager
def starting() -> Iterator[Callable[..., Program]]:
  """Starts programs (arguments of Program), and kills at the end what still runs."""
  started: list[Program] = []

  def start(*command: str | os.PathLike, **more: Any) -> Program:
    started.append(Program(*command, **more))
    return started[-1]

  try:
    yield start
  finally:
    for program in started:
      program.kill()


def diloco(*words: str | os.PathLike) -> tuple[str | os.PathLike, ...]:
  """The words of a command of ours, for Program."""
  return '-m', 'diloco_jax', *words


def until(condition: Callable[[], Any], *programs: Program, deadline_s: float = DEADLINE_S) -> Any:
  """Waits until `condition()` is true, and returns its value."""
  end_s = time.monotonic() + deadline_s
  while not (value := condition()):
    texts = '\n'.join(map(str, programs))
    assert time.monotonic() < end_s, f'not within {deadline_s:g} s: {source(condition)}\n{texts}'
    time.sleep(0.05)
  return value


def source(condition: Callable[[], Any]) -> str:
  """What a condition asks, as its author wrote it."""
  try:
    return inspect.getsource(condition).strip()
  except (OSError, TypeError):
    return repr(condition)
