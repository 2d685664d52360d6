"""When a program that has ended is started again."""

import random

SHORT_LIFE_S = 20.0
MAX_SHORT_LIVES = 5
_BACKOFF_S = (0.5, 30.0)


class Restarts:
  """The pauses between the lives of one program."""

  def __init__(self, draw: random.Random):
    self._draw = draw
    self._failures = 0

  def pause_s(self, lived_s: float) -> float | None:
    """Before the next life, after one of `lived_s`: it doubles with each short life in a row, up to
    a limit, half of it random. None: MAX_SHORT_LIVES were short, so the program has failed."""
    self._failures = self._failures + 1 if lived_s < SHORT_LIFE_S else 1
    if self._failures >= MAX_SHORT_LIVES:
      return None
    longest = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2 ** (self._failures - 1))
    return longest * (0.5 + 0.5 * self._draw.random())

  def forget_failures(self) -> None:
    """The program was ended on purpose, so the short lives before do not count."""
    self._failures = 0
