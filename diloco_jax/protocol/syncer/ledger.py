"""The token ledger: every trained token is merged or discarded with a reason.

Each token trains all P fragments, and each fragment is merged on its own, so the unit of account is
the *fragment-token*: a token counts P times, once for each fragment. An incarnation's tokens are a
line 0 ... trained; for each fragment a cursor moves along it. A contribution covers a range of the
line, which is merged or discarded as a whole, and the cursor moves to its end. If learners rebase,
it begins at the cursor: a learner drops nothing that is not settled, unless a fault undid its steps
(`undone`). If they overwrite, the tokens between the cursor and its start were trained after the
last capture and are discarded as `overwritten`. Ranges never overlap, so no token counts twice.
When the incarnation ends, the rest of the line is discarded with the reason of its end. Hence
always, per incarnation::

    P * trained = merged + sum(discarded.values()) + unsettled,   unsettled = sum(trained - cursor)
"""

import collections
import dataclasses
from typing import Any

from diloco_jax.protocol import ids, messages
from diloco_jax.protocol.syncer import members as members_lib

Reason = messages.Reason


@dataclasses.dataclass(slots=True)
class Account:
  """One incarnation's line of tokens. All figures but `trained` are fragment-tokens."""

  cursors: list[int]
  trained: int = 0
  steps: int = 0
  merged: int = 0
  discarded: dict[str, int] = dataclasses.field(default_factory=dict)
  closed: bool = False

  def train(self, steps: int, tokens: int) -> None:
    """Records the learner's reported totals; a repeated or older report changes nothing."""
    self.steps = max(self.steps, steps)
    self.trained = max(self.trained, tokens)

  def discard(self, count: int, reason: str) -> None:
    if count:
      self.discarded[reason] = self.discarded.get(reason, 0) + count

  def drop(self, fragment: int, upto: int, reason: str) -> None:
    """The learner begins anew at token count `upto`: its unsettled tokens before are discarded."""
    self.trained = max(self.trained, upto)
    if upto > self.cursors[fragment]:
      self.discard(upto - self.cursors[fragment], reason)
      self.cursors[fragment] = upto

  def settle(self, fragment: int, start: int, end: int, reason: str, gap: str) -> bool:
    """Settles the range [start, end): merged if `reason` is empty; unsettled tokens before it are
    discarded for `gap`. False: it overlaps (duplicate), and only its new tokens are discarded."""
    self.trained = max(self.trained, end)
    if start < self.cursors[fragment]:
      self.discard(max(0, end - self.cursors[fragment]), Reason.DUPLICATE)
      self.cursors[fragment] = max(end, self.cursors[fragment])
      return False
    self.drop(fragment, start, gap)
    if reason:
      self.discard(end - start, reason)
    else:
      self.merged += end - start
    self.cursors[fragment] = end
    return True

  def revoke(self, count: int, reason: str) -> None:
    """A merge failed after its participants were settled: discards its tokens."""
    self.merged -= count
    self.discard(count, reason)

  @property
  def unsettled(self) -> int:
    return sum(self.trained - cursor for cursor in self.cursors)

  def close(self, reason: str) -> None:
    """The incarnation is over: discards the unsettled tokens."""
    self.discard(self.unsettled, reason)
    self.cursors = [self.trained] * len(self.cursors)
    self.closed = True

  def state(self) -> dict[str, Any]:
    """The fields, copied; dataclasses.asdict would copy each cursor by itself."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return fields | {'cursors': list(self.cursors), 'discarded': dict(self.discarded)}

  def check(self) -> None:
    total = self.merged + sum(self.discarded.values()) + self.unsettled
    assert len(self.cursors) * self.trained == total, (self, total)
    assert all(0 <= cursor <= self.trained for cursor in self.cursors), self
    assert not (self.closed and self.unsettled), self


FORMER = 0  # the incarnation of an account that is the sum of all ended ones


class Ledger:
  """All accounts of a run, by (learner, incarnation): one of the present incarnation of each
  learner, and one that sums up its ended ones, so that a restart of a learner adds no account."""

  def __init__(self, fragments: int):
    self._fragments = fragments
    self.accounts: dict[tuple[str, int], Account] = {}

  def open(self, learner: str, incarnation: int) -> Account:
    key = (learner, incarnation)
    if key not in self.accounts:
      self.accounts[key] = Account(cursors=[0] * self._fragments)
    return self.accounts[key]

  def of(self, member: members_lib.Member) -> Account:
    """The account of the present incarnation of a learner id."""
    return self.open(member.learner, member.incarnation)

  def revoke(self, learner: str, incarnation: int, count: int, reason: str) -> None:
    """A merge left out tokens of this incarnation after they were settled."""
    account = self.accounts.get((learner, incarnation)) or self.accounts[learner, FORMER]
    account.revoke(count, reason)

  def fold(self, learner: str, incarnation: int, into: str = '') -> None:
    """Closes the account and folds it into the account of the former incarnations."""
    ended = self.open(learner, incarnation)
    ended.close(Reason.LOST_WITH_PROCESS)
    del self.accounts[learner, incarnation]
    former = self.open(into or learner, FORMER)
    former.closed = True
    former.steps += ended.steps
    former.trained += ended.trained
    former.merged += ended.merged
    former.cursors = [former.trained] * self._fragments
    for reason, count in ended.discarded.items():
      former.discard(count, reason)

  def forget(self, learner: str) -> None:
    """Adds all accounts of a learner to the account of forgotten ids."""
    for name, incarnation in [key for key in self.accounts if key[0] == learner]:
      if self.accounts[name, incarnation].trained:
        self.fold(name, incarnation, ids.FORGOTTEN)
      else:
        del self.accounts[name, incarnation]

  def merged(self, learner: str) -> bool:
    """Whether tokens of this learner were ever merged."""
    return any(account.merged for (name, _), account in self.accounts.items() if name == learner)

  def close_all(self, reason: str) -> None:
    """Closes every account at the end of the run."""
    for account in self.accounts.values():
      account.close(reason)

  def totals(self) -> dict:
    """Sums over all accounts: tokens trained, and fragment-tokens merged, discarded, unsettled."""
    accounts = self.accounts.values()
    discarded = collections.Counter()
    for account in accounts:
      discarded.update(account.discarded)
    return {
      'fragments': self._fragments,
      'trained': sum(a.trained for a in accounts),
      'merged': sum(a.merged for a in accounts),
      'discarded': dict(sorted(discarded.items())),
      'unsettled': sum(a.unsettled for a in accounts),
    }

  def learners(self) -> dict[str, dict]:
    """Per learner over all its incarnations: incarnations, steps, tokens, merged, discarded."""
    rows: dict[str, dict] = {}
    for (learner, incarnation), account in sorted(self.accounts.items()):
      row = rows.setdefault(
        learner, {'incarnations': 0, 'steps': 0, 'tokens': 0, 'merged': 0, 'discarded': 0}
      )
      row['incarnations'] = max(row['incarnations'], incarnation)
      row['steps'] += account.steps
      row['tokens'] += account.trained
      row['merged'] += account.merged
      row['discarded'] += sum(account.discarded.values())
    return rows

  def trained(self, learner: str) -> tuple[int, int]:
    """Steps and tokens of a learner over all its incarnations."""
    steps = tokens = 0
    for (name, _), account in self.accounts.items():
      if name == learner:
        steps += account.steps
        tokens += account.trained
    return steps, tokens

  def check(self) -> None:
    for account in self.accounts.values():
      account.check()

  def state(self) -> list:
    return [
      [learner, incarnation, account.state()]
      for (learner, incarnation), account in sorted(self.accounts.items())
    ]

  def load(self, rows: list) -> None:
    for learner, incarnation, fields in rows:
      self.accounts[learner, incarnation] = Account(**fields)
