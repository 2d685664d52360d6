"""When a program that has ended is started again."""

import random

SHORT_S = 20.0
MAX_SHORT_PROCESSES = 5
_BACKOFF_S = (0.5, 30.0)


class Restarts:
  """The pauses between two processes of one program."""

  def __init__(self, draw: random.Random):
    self._draw = draw
    self._failures = 0

  def pause_s(self, lived_s: float) -> float | None:
    """Before the next process, after one of `lived_s`: it doubles with each short one in a row, up
    to a limit, half of it random. None: MAX_SHORT_PROCESSES were short: the program has failed."""
    self._failures = self._failures + 1 if lived_s < SHORT_S else 1
    if self._failures >= MAX_SHORT_PROCESSES:
      return None
    longest = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2 ** (self._failures - 1))
    return longest * (0.5 + 0.5 * self._draw.random())

  def forget_failures(self) -> None:
    """The program was ended on purpose, so the short processes before do not count."""
    self._failures = 0
