"""The state that survives a syncer: versions, ids and the ledger, implemented a second time.

The ledger here follows from the learners' messages and the verdicts sent to them. The syncer writes
one *record* per outer step before it tells any learner of it. So the next syncer continues after
the last record on the disk: with the machine state at that decision (a copy of the lineage then),
in which the outer steps in progress have ended as they did; or with a checkpoint saved after that
record. Published versions are *lost* only if an operator had to repair the log: the syncer may then
send an older version to a learner that holds a lost one.
"""

import copy
import dataclasses
from collections.abc import Collection
from typing import Any

from diloco_jax.protocol import actions, messages
from diloco_jax.protocol.syncer import screening as screening_lib

Reason = messages.Reason
Range = tuple[int, int]
FORMER = 0  # the incarnation under which accounts of replaced processes are summed up
NEWCOMERS = 2  # known ones, for each expected learner
FORGOTTEN = '(forgotten)'  # the learner under which accounts of forgotten ids are summed up


@dataclasses.dataclass(slots=True)
class Account:
  """One incarnation's tokens, from the learner's reports and the verdicts sent to it. All figures
  but `trained` are fragment-tokens."""

  cursors: list[int]
  trained: int = 0
  merged: int = 0
  discarded: dict[str, int] = dataclasses.field(default_factory=dict)

  def discard(self, count: int, reason: str) -> None:
    if count:
      self.discarded[reason] = self.discarded.get(reason, 0) + count

  def train(self, tokens: int) -> None:
    self.trained = max(self.trained, tokens)

  def move(self, p: int, upto: int, reason: str) -> None:
    """All tokens of fragment p before `upto` that have no verdict get this one."""
    self.train(upto)
    self.discard(max(0, upto - self.cursors[p]), reason)
    self.cursors[p] = max(upto, self.cursors[p])

  def settle(self, p: int, tokens: Range, reason: str, gap: str) -> None:
    """A contribution gets its verdict; '' is merged. The tokens before its range that have none get
    `gap`."""
    if tokens[0] < self.cursors[p]:
      self.move(p, tokens[1], Reason.DUPLICATE)
      return
    self.move(p, tokens[0], gap)
    if reason:
      self.move(p, tokens[1], reason)
    else:
      self.merged += tokens[1] - tokens[0]
      self.cursors[p] = tokens[1]
      self.train(tokens[1])

  @property
  def unsettled(self) -> int:
    return len(self.cursors) * self.trained - sum(self.cursors)

  def close(self, reason: str) -> None:
    for p in range(len(self.cursors)):
      self.move(p, self.trained, reason)

  def copy(self) -> 'Account':
    return dataclasses.replace(self, cursors=list(self.cursors), discarded=dict(self.discarded))


@dataclasses.dataclass(slots=True)
class Holder:
  """The process that holds a learner id, or held it last."""

  nonce: int
  incarnation: int
  left: bool = False
  claimed: int = 0  # its clock, as it says
  done: bool = False  # with its last step
  refusals: int = 0  # of its updates and messages, each a strike unless others clear it
  # Fragments of which it must drop its own steps when it adopts next, since the merge refused an
  # update; and those of which the syncer may ask for it, since a repair or a refusal was due once.
  refused: frozenset[int] = frozenset()
  spoiled: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True)
class Lineage:
  """The meaning of a syncer's machine state; copied and restored with it."""

  versions: list[int]
  digests: list[int]
  last_sync: list[int]
  cancelled: list[int]  # syncs that made no version
  next: int
  opened: int = 0
  skipped: int = 0  # syncs, per fragment
  repaired: int = 0  # adoptions that differed from what was published
  holders: dict[str, Holder] = dataclasses.field(default_factory=dict)
  accounts: dict[tuple[str, int], Account] = dataclasses.field(default_factory=dict)
  # (data shard, fragment): the end of the batches that were merged.
  batches: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
  readers: dict[int, str] = dataclasses.field(default_factory=dict)  # whose were merged last

  def copy(self) -> 'Lineage':
    lists = ('versions', 'digests', 'last_sync', 'cancelled')
    return dataclasses.replace(
      self,
      **{name: list(getattr(self, name)) for name in lists},
      holders={name: copy.copy(holder) for name, holder in self.holders.items()},
      accounts={key: tally.copy() for key, tally in self.accounts.items()},
      batches=dict(self.batches),
      readers=dict(self.readers),
    )

  def committed(self, shard: int) -> int:
    """The first batch that no merge has covered for any fragment."""
    return max((end for (of, _), end in self.batches.items() if of == shard), default=0)

  def account(self, learner: str, incarnation: int) -> Account:
    key = learner, incarnation
    if key not in self.accounts and (learner, FORMER) in self.accounts:
      if incarnation != self.holders[learner].incarnation:
        key = learner, FORMER
    return self.accounts.setdefault(key, Account([0] * len(self.versions)))

  def surplus(self, present: Collection[str], learners: int) -> list[str]:
    """The rule of protocol/syncer/join.py, implemented a second time: a new id replaces the absent
    newcomer that came first."""
    useful = {learner for (learner, _), account in self.accounts.items() if account.merged}
    newcomers = [learner for learner in self.holders if learner not in useful]
    absent = [learner for learner in newcomers if learner not in present]
    return absent[: max(0, len(newcomers) + 1 - NEWCOMERS * learners)]

  def forget(self, learner: str) -> None:
    """The syncer forgets an id: its accounts become part of one for all such ids."""
    for name, incarnation in [key for key in self.accounts if key[0] == learner]:
      account = self.accounts[name, incarnation]
      account.close(Reason.LOST_WITH_PROCESS)
      if account.trained:
        self.fold(name, incarnation, FORGOTTEN)
      else:
        del self.accounts[name, incarnation]
    del self.holders[learner]

  def fold(self, learner: str, incarnation: int, into: str = '') -> None:
    """The process of an incarnation is replaced, so its account is closed: adds it to those of
    earlier ones, number FORMER."""
    gone = self.accounts.pop((learner, incarnation))
    former = self.accounts.setdefault((into or learner, FORMER), Account([0] * len(self.versions)))
    former.cursors = [a + b for a, b in zip(former.cursors, gone.cursors)]
    former.trained, former.merged = former.trained + gone.trained, former.merged + gone.merged
    for reason, count in gone.discarded.items():
      former.discard(count, reason)

  def close_all(self) -> None:
    for account in self.accounts.values():
      account.close(Reason.END_OF_RUN)

  def totals(self) -> dict[str, Any]:
    """In the form of a `ledger` report."""
    discarded: dict[str, int] = {}
    trained = merged = unsettled = 0
    for account in self.accounts.values():
      trained += account.trained
      merged += account.merged
      unsettled += account.unsettled
      for reason, count in account.discarded.items():
        discarded[reason] = discarded.get(reason, 0) + count
    return {'trained': trained, 'merged': merged, 'discarded': discarded, 'unsettled': unsettled}

  def learners(self) -> dict[str, tuple[int, int, int, int]]:
    """Per learner id: its incarnations, tokens, merged, discarded."""
    rows: dict[str, tuple[int, int, int, int]] = {}
    for (learner, incarnation), account in self.accounts.items():
      number, tokens, merged, discarded = rows.get(learner, (0, 0, 0, 0))
      rows[learner] = (
        max(number, incarnation),
        tokens + account.trained,
        merged + account.merged,
        discarded + sum(account.discarded.values()),
      )
    return rows


@dataclasses.dataclass(slots=True)
class Saved:
  """A checkpoint that a syncer asked for; `undecided` are its open syncs, `position` is the last
  record that it covers; `closed`: every sync was over; `verified`: it was written and read back."""

  machine_state: dict[str, Any]
  lineage: Lineage
  undecided: tuple[int, ...]
  position: int
  closed: bool = False
  verified: bool = False


@dataclasses.dataclass(slots=True)
class Record:
  """An outer step as it was decided; `lineage` and `undecided` (other open syncs) are of that
  moment; `under_way` are the outer steps in progress then, this one included. `digest` is None
  until the end of this one is known."""

  merge: actions.Merge
  lineage: Lineage
  undecided: tuple[int, ...]
  under_way: tuple['Record', ...] = ()
  batches: tuple[tuple[int, int, int], ...] = ()  # data shard, first, the one after the last
  digest: int | None = None
  failed: str = ''
  refused: tuple[str, ...] = ()
  number: int = 0  # outer steps end in this order

  @property
  def moves(self) -> list[list[Any]]:
    """Which cursors in the data it moves, as a machine state has them."""
    shares = zip(self.merge.participants, self.batches)
    return [
      [participant.learner, shard, self.merge.fragment, end]
      for participant, (shard, _, end) in shares
    ]

  def end(self, lineage: Lineage) -> None:
    """Updates the lineage with the end of this outer step."""
    p = self.merge.fragment
    if self.failed:
      lineage.cancelled[p] += 1
    else:
      lineage.versions[p] += 1
      lineage.digests[p], lineage.last_sync[p] = self.digest, self.merge.sync
    for participant, (shard, _, end) in zip(self.merge.participants, self.batches):
      if self.failed or participant.learner in self.refused:
        account = lineage.account(participant.learner, participant.incarnation)
        account.merged -= participant.tokens
        account.discard(participant.tokens, screening_lib.reason(participant))
        holder = lineage.holders[participant.learner]
        if holder.incarnation == participant.incarnation:
          holder.refused |= {p}
          holder.refusals += participant.learner in self.refused and not participant.apart
      else:
        lineage.batches[shard, p] = max(end, lineage.batches.get((shard, p), 0))
        lineage.readers[shard] = participant.learner


def difference(machine_state: dict[str, Any], lineage: Lineage) -> str:
  """Describes the first difference between a syncer's machine state and its lineage; '' if none."""
  true: dict[str, Any] = {
    name: getattr(lineage, name) for name in ('versions', 'digests', 'last_sync', 'next', 'opened')
  }
  seen = {name: machine_state[name] for name in true}
  seen['members'] = {
    row['learner']: (row['nonce'], row['incarnation'], row['left'])
    for row in machine_state['members']
  }
  true['members'] = {
    name: (holder.nonce, holder.incarnation, holder.left)
    for name, holder in lineage.holders.items()
  }
  seen['ledger'] = {
    (learner, incarnation): (row['trained'], row['merged'], row['cursors'], row['discarded'])
    for learner, incarnation, row in machine_state['ledger']
  }
  true['ledger'] = {
    key: (account.trained, account.merged, account.cursors, account.discarded)
    for key, account in lineage.accounts.items()
  }
  counts = 'synced', 'cancelled', 'repaired'
  seen['counts'] = tuple(machine_state['counts'][name] for name in counts)
  true['counts'] = sum(lineage.versions), sum(lineage.cancelled), lineage.repaired
  seen['batches'] = {
    (shard, p): cursor
    for shard, cursors in machine_state['data']['merged']
    for p, cursor in enumerate(cursors)
    if cursor
  }
  true['batches'] = lineage.batches
  for name, value in true.items():
    if seen[name] != value:
      return f'{name}: {seen[name]}, it should be {value}'
  return ''
