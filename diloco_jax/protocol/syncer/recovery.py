"""From the last checkpoint and the log to where a syncer was.

A record of the log is one outer step: the Merge that asked for it, with the *books*, the machine's
state when it was decided, and the MergeDone that answered it. Outer steps are decided and
written down in one order, so the books of the last record know of everything that was settled
before; what they cannot know yet is how the merges ended that were under way then, this one among
them. The records tell::

    state = the machine of the last record's books,
            after the MergeDone of each merge that was under way in them

So recovery is what the machine does; as no learner is connected yet, its actions have no receiver.

What was neither settled by a merge nor in the books of one (a report of progress, a late payload)
is told again: learners come back with their totals, and what they trained is settled anew.
"""

import copy
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import ledger

UNSAVED = 'unsaved'  # of what `replay_log` returns: how many outer steps no checkpoint holds
BROUGHT_BACK = 'back'  # learners that were brought back with the run and have not joined since

Ended = tuple[actions.Merge, events.MergeDone]


class Machine(Protocol):
  """What recovery needs of a SyncerMachine."""

  def ended(self, merge: actions.Merge, done: events.MergeDone) -> None: ...

  def state(self) -> dict[str, Any]: ...


def replay_log(
  load: Callable[[dict[str, Any]], Machine], machine_state: dict[str, Any], records: Sequence[Ended]
) -> dict[str, Any]:
  """The machine state of a syncer after the outer steps of all `records`.

  Args:
    load: makes the machine of a state (SyncerMachine.load).
    machine_state: of the newest checkpoint; it includes none of the records.
    records: of the log after it, in order.
  """
  if not records:
    return {**machine_state, UNSAVED: 0}
  ended: dict[int, Ended] = {}
  for merge, done in records:
    ended.pop(merge.sync, None)  # a closing sync may have been opened once more
    ended[merge.sync] = merge, done
  machine_state = records[-1][0].machine_state
  machine = load(machine_state)
  for sync, (merge, done) in ended.items():  # in the order in which they ended
    if sync in machine_state['merging']:
      machine.ended(merge, done)
  return {**machine.state(), 'undecided': machine_state['undecided'], UNSAVED: len(records)}


def brought_back(
  machine_state: dict[str, Any], gone: Collection[str], back: Collection[str]
) -> dict[str, Any]:
  """The machine state of a syncer of a run that was restored: learners that are `gone` have left,
  and those that came `back` with it have moments of their own."""
  state = copy.deepcopy(machine_state)
  for row in state['members']:
    row['left'] = row['left'] or row['learner'] in gone
  for row in state['ledger']:
    if row[0] in gone:
      account = ledger.Account(**row[2])
      account.close(messages.Reason.LEFT)
      row[2] = dataclasses.asdict(account)
  holders = state['data']['holders']
  state['data']['holders'] = [[shard, who] for shard, who in holders if who not in gone]
  return {**state, BROUGHT_BACK: sorted(back)}
