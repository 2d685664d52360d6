"""Saves and recovery: when the syncer saves its state, and how the next process goes on from it.

**Saves.** After so many outer steps, every `keep_every` of its clock, and at its end.

Theta and the ledger of a checkpoint must include the same outer steps. So a due save waits for the
merges in progress, and no other merge begins before it; otherwise a busy syncer would never be
between two merges. One save runs at a time. The last save of a process begins after the syncer has
closed the ledger; a save that was in progress then is not the last one.

Learners leave for good when they receive Finish. So the syncer sends Finish only after the *durable
end*: the disk shows that the run is over, so that a restarted syncer only sends Finish again. A
save that was asked for when every sync was over makes the end durable, if the log shows it, too,
which then is enough even if that save fails: by the machine state in its last record no sync will
open any more. A cancelled sync leaves no record; then the syncer saves a second time, since a
checkpoint can be lost and no learner would come back for the sync. A failed save is tried again.

A run goes back (process/restore.py) to any checkpoint of the syncer that is kept: parameters,
clock, ledger and data cursors all come from it. A learner adds the moments of its own checkpoint,
for which any one near that clock will do, so no node waits for another.

**Recovery.** The machine state comes from the last checkpoint and the log after it.

A record of the log is one outer step: the Merge that asked for it, with the machine state when the
syncer decided it, and the MergeDone that answered it. Outer steps are decided and logged in the
same order, so the machine state of the last record includes everything that was settled before. It
does not hold the results of the merges then in progress, its own among them; the records have
them::

    state = the machine of the last record's machine state,
            after the MergeDone of each merge that was in progress in it

So recovery runs the machine itself; no learner is connected yet, so its actions have no receiver.

The log lacks reports of progress and late payloads since its last record: learners reconnect with
their totals, and the syncer settles those tokens again.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import ledger as ledger_lib

UNSAVED = 'unsaved'  # added by `replay_log`: how many outer steps no checkpoint holds

Ended = tuple[actions.Merge, events.MergeDone]


def replay_log(
  load: Callable[[dict[str, Any]], Any], machine_state: dict[str, Any], records: Sequence[Ended]
) -> dict[str, Any]:
  """The machine state of a syncer after the outer steps of all `records`.

  Args:
    load: makes the machine of a machine state (SyncerMachine.load).
    machine_state: of the newest checkpoint; it includes none of the records.
    records: of the log after it, in order.
  """
  if not records:
    return {**machine_state, UNSAVED: 0}
  ended: dict[int, Ended] = {}
  for merge, done in records:
    ended.pop(merge.sync, None)  # a restarted syncer may have opened a closing sync again
    ended[merge.sync] = merge, done
  machine_state = records[-1][0].machine_state
  machine = load(machine_state)
  for sync, (merge, done) in ended.items():  # in the order in which they ended
    if sync in machine_state['merging']:
      machine.ended(merge, done)
  return {**machine.state(), 'undecided': machine_state['undecided'], UNSAVED: len(records)}


def without(machine_state: dict[str, Any], left: Collection[str]) -> dict[str, Any]:
  """The machine state of the syncer of a restored run, which some learners have `left`."""
  state = copy.deepcopy(machine_state)
  for row in state['members']:
    row['left'] = row['left'] or row['learner'] in left
  for row in state['ledger']:
    if row[0] in left:
      account = ledger_lib.Account(**row[2])
      account.close(messages.Reason.LEFT)
      row[2] = account.state()
  holders = state['data']['holders']
  state['data']['holders'] = [row for row in holders if row[1] not in left]
  return state


class SyncerSaves:
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
    self.end_is_durable = False  # the disk shows that the run is over
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
