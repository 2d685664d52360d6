"""When the syncer saves: every so many outer steps, when every sync is over, and at its end.

A snapshot is of no half-done merge: Theta and the ledger must tell of the same outer steps. So a
save that is due waits for the merges under way and lets no other begin before it (the syncer *holds
back*); a busy syncer would never be between two of them otherwise. One save runs at a time; the
last one of a process is asked for after its books were closed, whatever was under way before.

Learners leave for good once they hear Finish. So it waits for the *farewell*: the disk says that
the run is over, and a syncer that begins there has only to say it again. A save that was asked for
when every sync was over makes it so. If that save fails, the log will do, but only if the books of
its last outer step know that no sync is to open any more: a sync that was cancelled leaves no
record. Else the save is tried again.
"""


class Saving:
  """What is not saved yet, and the save under way."""

  def __init__(self, every: int):
    """`every`: how many outer steps between two saves, 0: only the last one."""
    self._every = every
    self._unsaved = 0
    self._last = False  # the newest save is the last one of this process
    self._closed = False  # it was asked for when every sync was over
    self._logged = False  # the newest outer step was decided when no other was to come
    self.running = False
    self.farewell = False  # the disk says that the run is over
    self.again_ns = 0  # a save that failed is not tried again before

  @property
  def due(self) -> bool:
    return bool(self._every) and self._unsaved >= self._every and not self.running

  def resume(self, unsaved: int) -> None:
    """A syncer goes on behind a checkpoint and so many outer steps of its log: however often it
    dies before the next save is due, that save will come; but first an outer step, so that a save
    that kills it does not stop the run."""
    self._unsaved = min(unsaved, max(0, self._every - 1))

  def outer_step(self) -> None:
    self._unsaved += 1

  def decided(self, over: bool) -> None:
    """An outer step is on its way to the log; `over`: no other sync is undecided, or to open."""
    self._logged = over

  def begin(self, closed: bool, last: bool) -> None:
    """A save is asked for; `closed`: every sync is over, `last`: the process ends after it."""
    self.running, self._unsaved, self._closed, self._last = True, 0, closed, last

  def end(self, failed: bool, again_ns: int) -> bool:
    """The save is finished; whether it was the last one."""
    self.running = False
    if self._closed and (self._logged or not failed):
      self.farewell = True
    if failed:
      self.again_ns = again_ns
    return self._last
