"""From the last snapshot and the log to where a syncer was: pure arithmetic on JSON.

A record of the log is one outer step: what it merged, how it ended, and the *books*, the machine's
snapshot when it was decided. Outer steps are decided and written down in one order, so the books of
the last record know of everything that was settled before; what they cannot know yet is how the
merges ended that were under way then, this one among them. The records before it tell::

    state = books of the last record
            + of each merge under way in them: its version, digest, sync and the cursors of its
              data streams if it succeeded, its tokens revoked if the outer step was refused, or
              those of who was left out, their strikes, and the norms of the others (screening.py)

What was neither settled by a merge nor in the books of one (a report of progress, a late payload)
is told again: learners come back with their totals, and what they trained is settled anew.
"""

import copy
import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from diloco_jax.protocol import messages
from diloco_jax.protocol.syncer import ledger, screening, shards

UNSAVED = 'unsaved'  # of what `recovered` returns: how many outer steps no checkpoint holds
BACK = 'back'  # learners that were brought back with the run and have not joined since


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
  """One record of the log without its payloads: the Merge, and how it ended.

  `participants` are (learner, incarnation, tokens, steps); `digest` is that of the published value
  after it; `failed` in words if the outer step was refused. `norms` and `refused` are as in
  MergeDone; a log of a release that did not screen has neither.
  """

  sync: int
  fragment: int
  version: int
  participants: tuple[tuple[str, int, int, int], ...]
  digest: int
  failed: str
  books: dict[str, Any]
  norms: tuple[int, ...] = ()
  refused: tuple[str, ...] = ()


def recovered(snapshot: dict[str, Any], outcomes: Iterable[Outcome]) -> dict[str, Any]:
  """The snapshot of a syncer after all `outcomes`, of which `snapshot` knew none.

  Raises:
    ValueError: they do not continue the snapshot: a version is missing.
  """
  state, ended, unsaved = copy.deepcopy(snapshot), {}, 0
  versions, digests, syncs = (list(state[name]) for name in ('versions', 'digests', 'last_sync'))
  for outcome in outcomes:
    p, expected = outcome.fragment, versions[outcome.fragment] + 1
    if outcome.version != expected:
      raise ValueError(
        f'the log goes on with version {outcome.version} of fragment {p}, after version '
        f'{expected - 1}: records are missing between snapshot and log'
      )
    ended.pop(outcome.sync, None)  # a closing sync may have been opened once more
    ended[outcome.sync] = outcome
    unsaved += 1
    if not outcome.failed:
      versions[p], digests[p], syncs[p] = outcome.version, outcome.digest, outcome.sync
    state = copy.deepcopy(outcome.books)
  merging = state.pop('merging', ())
  for sync, outcome in ended.items():  # in the order in which they ended
    if sync in merging:
      _close(state, outcome)
  return {**state, 'versions': versions, 'digests': digests, 'last_sync': syncs, UNSAVED: unsaved}


def brought_back(
  snapshot: dict[str, Any], gone: Collection[str], back: Collection[str]
) -> dict[str, Any]:
  """The snapshot of a syncer of a run that was brought back: learners that are `gone` have left,
  and those that came `back` with it have moments of their own."""
  state = copy.deepcopy(snapshot)
  for row in state['members']:
    row['left'] = row['left'] or row['learner'] in gone
  for row in state['ledger']:
    if row[0] in gone:
      account = ledger.Account(**row[2])
      account.close(messages.Reason.LEFT)
      row[2] = dataclasses.asdict(account)
  holders = state['data']['holders']
  state['data']['holders'] = [[stream, who] for stream, who in holders if who not in gone]
  return {**state, BACK: sorted(back)}


def _close(state: dict[str, Any], outcome: Outcome) -> None:
  """A merge that was under way in the books has ended."""
  state['counts']['cancelled' if outcome.failed else 'synced'] += 1
  state['data'] = shards.ended(
    state['data'], outcome.sync, len(state['versions']), outcome.refused, made=not outcome.failed
  )
  accounts = {(learner, incarnation): fields for learner, incarnation, fields in state['ledger']}
  for learner, incarnation, tokens, _ in outcome.participants:
    if outcome.failed or learner in outcome.refused:
      account = accounts[learner, incarnation]
      account['merged'] -= tokens
      discarded = account['discarded']
      discarded[messages.Reason.BAD_VALUE] = discarded.get(messages.Reason.BAD_VALUE, 0) + tokens
  _screen(state, outcome)


def _screen(state: dict[str, Any], outcome: Outcome) -> None:
  """Norms and strikes, as Screening.ended has them."""
  rows, merged = {row['learner']: row for row in state['members']}, []
  for (learner, incarnation, _, steps), norm in zip(outcome.participants, outcome.norms):
    row = rows[learner]
    present = row['incarnation'] == incarnation
    if learner in outcome.refused and present:
      row['strikes'], row['worst'] = screening.struck(row['strikes'], row['worst'])
    elif learner not in outcome.refused and not outcome.failed:
      merged.append((norm, steps))
      row['strikes'] = 0 if present else row['strikes']
  if merged:
    p = outcome.fragment
    state['norms'][p] = screening.taken(state['norms'][p], merged)
