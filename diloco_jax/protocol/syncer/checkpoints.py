"""When the syncer saves: after so many outer steps, every `keep_every` of its clock, at its end.

Theta and the ledger of a checkpoint must include the same outer steps. So a due save waits for the
merges in progress, and no other merge begins before it; otherwise a busy syncer would never be
between two merges. One save runs at a time. The last save of a process begins after the syncer has
closed the ledger; a save that was in progress then is not the last one.

Learners leave for good when they receive Finish. So the syncer sends Finish only after the *durable
end*: the disk says that the run is over, so that a restarted syncer only sends Finish again. A save
that was asked for when every sync was over makes the end durable, if the log says it, too, which
then is enough even if that save fails: the machine state in its last record says that no sync will
open any more. A cancelled sync leaves no record; then the syncer saves a second time, since a
checkpoint can be lost and no learner would come back for the sync. A failed save is tried again.

A run goes back (launch/restore.py) to any checkpoint of the syncer that is kept: parameters, clock,
ledger and data cursors all come from it. A learner adds the moments of its own checkpoint, for
which any one near that clock will do, so no node waits for another.
"""


class Saving:
  """Counts the unsaved outer steps and tracks the save in progress."""

  def __init__(self, every: int, keep_every: int):
    """`every`: how many outer steps between two saves, 0: only the last one; `keep_every`: how many
    inner steps of the clock between two that are kept, 0: none is."""
    self._every = every
    self._keep_every = keep_every
    self._unsaved = 0
    self._interval = 0  # of `keep_every`: that of the newest save, or of the start
    self._last = False  # the newest save is the last one of this process
    self._closed = False  # the newest save was asked for when every sync was over
    self._ends = 0  # complete saves of the end of the run
    self._logged = False  # the newest outer step was decided as the last one of the run
    self.running = False
    self.end_is_durable = False  # the disk says that the run is over
    self.again_ns = 0  # a failed save is not tried again before

  def due(self, clock: int) -> bool:
    often = bool(self._every) and self._unsaved >= self._every
    return not self.running and (often or self._interval_of(clock) > self._interval)

  def _interval_of(self, clock: int) -> int:
    return clock // self._keep_every if self._keep_every else 0

  def resume(self, unsaved: int, clock: int) -> None:
    """Continues after a checkpoint and `unsaved` outer steps of the log, so that a save becomes due
    even if the syncer dies again and again. One more outer step comes before it, so that a save
    that kills the syncer does not stop the run."""
    self._unsaved = min(unsaved, max(0, self._every - 1))
    self._interval = self._interval_of(clock)

  def outer_step(self) -> None:
    self._unsaved += 1

  def decided(self, over: bool) -> None:
    """An outer step was decided; `over`: no other sync is undecided or still to open."""
    self._logged = over

  def begin(self, clock: int, closed: bool, last: bool) -> None:
    """Begins a save; `closed`: every sync is over, `last`: the process ends after it."""
    self.running, self._unsaved, self._closed, self._last = True, 0, closed, last
    self._interval = self._interval_of(clock)

  def end(self, failed: bool, again_ns: int) -> bool:
    """Ends the save; returns whether it was the last one."""
    self.running = False
    if self._closed:
      self._ends += not failed
      self.end_is_durable |= self._logged or self._ends > 1
    if failed:
      self.again_ns = again_ns
    return self._last
