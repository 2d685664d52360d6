"""The facts that machines report: for the records and the checks, never for another machine.

A fact is named as its class in small letters. Those that a process itself reports are in
report/facts.py. Tokens of a fragment count once for each fragment (syncer/ledger.py).
"""

import dataclasses
import typing
from typing import Any


def name(reported: Any) -> str:
  """The name of a fact, as records have it.

  >>> name(Cancelled(sync=3, fragment=0, why='all have answered'))
  'cancelled'
  """
  return type(reported).__name__.lower()


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def fact(cls):
  return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


# --- Of the syncer --------------------------------------------------------------------------------


@fact
class _OuterStep:
  """`participants`: learner ids; `grace_ns`: its grace window; `staleness`: of the oldest anchor, in versions."""

  sync: int
  fragment: int
  version: int
  participants: tuple[str, ...]
  grace_ns: int
  tokens: int
  why: str
  staleness: int


@fact
class Merging(_OuterStep):
  """An outer step is decided."""


@fact
class Synced(_OuterStep):
  """The outer step is durable; `participants` and `tokens` without those that were refused."""


@fact
class Cancelled:
  """No version comes of a sync."""

  sync: int
  fragment: int
  why: str


@fact
class Refused:
  """A payload was left out of an outer step."""

  sync: int
  fragment: int
  learner: str
  incarnation: int
  tokens: int
  why: str


@fact
class Ledger:
  """The books, as they stand. fragments * trained = merged + sum(discarded) + unsettled.

  Attributes:
    trained: tokens of all learners; merged, unsettled: fragment-tokens.
    discarded: fragment-tokens by reason.
    learners: of each learner over all its incarnations {incarnations, steps, tokens, merged,
      discarded}.
    synced, cancelled: how many syncs have ended so.
    repaired: fragments sent whole because a digest differed; skipped: syncs that were left out.
    sync: the syncer's clock.
  """

  fragments: int
  trained: int
  merged: int
  discarded: dict[str, Any]
  unsettled: int
  learners: dict[str, Any]
  synced: int
  cancelled: int
  repaired: int
  skipped: int
  sync: int


@fact
class Member:
  """What became of a learner: it waits (for its lease), has joined, recovered, is lost. `reason`
  of the loss; `by`: where its moments come from (protocol/messages.py, Way)."""

  learner: str
  state: str
  incarnation: int
  reason: str = ''
  by: str = ''


@fact
class Snapshot:
  """A snapshot of the run has ended: the learners that are in it, those that are missing, or the
  error for which it was given up."""

  number: int
  parts: tuple[str, ...] = ()
  missing: tuple[str, ...] = ()
  error: str = ''


# --- Of a learner ---------------------------------------------------------------------------------


@fact
class State:
  """What the learner does from now on: joined, disconnected (with a reason), trained (to the end)."""

  state: str
  incarnation: int | None
  clock: int
  reason: str = ''


@fact
class Adopted:
  """A new version of a fragment goes into the model. `steps_between`: inner steps since the last
  one; `whole`: not a delta, as after a join; `staleness`: versions that were left out."""

  fragment: int
  version: int
  sync: int
  clock: int
  steps_between: int
  whole: bool
  staleness: int


@fact
class Moments:
  """Where a learner that came back has its moments from (protocol/messages.py, Way): a donor and
  its step, or else why there was no donation."""

  by: str
  clock: int
  donor: str
  donor_step: int
  reason: str


_OfSyncer = Merging | Synced | Cancelled | Refused | Ledger | Member | Snapshot
Fact = _OfSyncer | State | Adopted | Moments
