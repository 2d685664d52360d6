"""Recovery: the machine state of a syncer from its last checkpoint and the log after it.

A record of the log is one outer step: the Merge that asked for it, with the machine state when the
syncer decided it, and the MergeDone that answered it. Outer steps are decided and logged in the
same order, so the machine state of the last record includes everything that was settled before. It
does not hold the results of the merges then in progress, its own among them; the records give
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
from diloco_jax.protocol.syncer import ledger

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
      account = ledger.Account(**row[2])
      account.close(messages.Reason.LEFT)
      row[2] = account.state()
  holders = state['data']['holders']
  state['data']['holders'] = [row for row in holders if row[1] not in left]
  return state
