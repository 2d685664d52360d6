"""When the syncer saves: every so many outer steps, and once the books are closed.

A snapshot is of no half-done merge: Theta and the ledger must tell of the same outer steps. So a
save that is due waits for the merges under way and lets no other begin before it (the syncer *holds
back*); a busy syncer would never be between two of them otherwise. One save runs at a time; the
last one of a process is asked for after its books were closed, whatever was under way before.
"""


class Saving:
  """What is not saved yet, and the save under way."""

  def __init__(self, every: int):
    """`every`: how many outer steps between two saves, 0: only the last one."""
    self._every = every
    self._unsaved = 0
    self._last = False  # the newest save is the last one of this process
    self.running = False

  @property
  def due(self) -> bool:
    return bool(self._every) and self._unsaved >= self._every and not self.running

  def outer_step(self) -> None:
    self._unsaved += 1

  def begin(self, last: bool) -> None:
    self.running, self._unsaved, self._last = True, 0, last

  def end(self) -> bool:
    """The save is finished; whether it was the last one."""
    self.running = False
    return self._last
