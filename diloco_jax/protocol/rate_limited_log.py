"""Rate-limited log lines: one per subject and interval."""

from collections.abc import Callable

PAUSE_NS = 60 * 10**9  # between two lines about the same trouble
SUBJECTS_KEPT = 1_000  # peers may invent subjects


class Notices:
  """Prints a line about a subject, and counts those that follow within the interval."""

  def __init__(self, pause_ns: int, out: Callable[[str], None]):
    self._pause_ns = pause_ns
    self._out = out
    self._said: dict[str, tuple[int, int]] = {}  # subject: time of its last line, events since

  def say(self, now_ns: int, subject: str, text: str, always: bool = False) -> bool:
    """Prints `text`, unless a line about this subject was printed within the pause; `always`: in
    any case. Returns whether it did."""
    said_ns, more = self._said.pop(subject, (now_ns - self._pause_ns, 0))
    if now_ns - said_ns < self._pause_ns and not always:
      self._said[subject] = said_ns, more + 1
      return False
    self._said[subject] = now_ns, 0
    if len(self._said) > SUBJECTS_KEPT:
      del self._said[next(iter(self._said))]
    self._out(f'{text} ({more} more since the last such line)' if more else text)
    return True
