"""The facts that machines report: for the records and the checks, never for another machine.

The name of a fact is its class name in small letters. The facts of a process itself are in
report/facts.py. Each token counts once for each fragment (protocol/syncer/ledger.py).
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
class Opened:
  """A sync has opened: K live learners have reached its time."""

  sync: int
  fragment: int


@fact
class _OuterStep:
  """`participants`: learner ids; `late`: those of them whose payload was late for an earlier sync;
  `waited_ns`: from the opening to the decision; `grace_ns`: the grace window, from the opening;
  `staleness`: versions since the oldest anchor."""

  sync: int
  fragment: int
  version: int
  participants: tuple[str, ...]
  late: tuple[str, ...]
  waited_ns: int
  grace_ns: int
  tokens: int
  why: str
  staleness: int


@fact
class Merging(_OuterStep):
  """The syncer has decided an outer step."""


@fact
class Synced(_OuterStep):
  """The outer step is durable; `participants`, `late`, `tokens` exclude refused ones."""


@fact
class Cancelled:
  """A sync ended without a version."""

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
  """The present ledger: fragments * trained = merged + sum(discarded) + unsettled.

  Attributes:
    trained: tokens of all learners; merged, unsettled: fragment-tokens.
    discarded: fragment-tokens by reason.
    learners: of each learner over all its incarnations {incarnations, steps, tokens, merged,
      discarded}.
    synced, cancelled: how many syncs have ended so.
    repaired: fragments sent whole because a digest differed; skipped: overdue syncs.
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
  """The new state of a learner: waits (for a shard), joined or lost. `reason`: of the loss."""

  learner: str
  state: str
  incarnation: int
  reason: str = ''


@fact
class Progress:
  """The reports of a learner, once per heartbeat in which it steps and at its loss: its clock, the
  `steps` and `tokens` of all its incarnations, its loss (None: unknown) and its usual step time."""

  learner: str
  clock: int
  steps: int
  tokens: int
  loss: float | None
  step_ns: int


@fact
class Link:
  """What the syncer asks of a learner has changed with its link (protocol/syncer/links.py): the
  period factor r. `up_ns`: the time of a payload of mean size; `slot_ns`: between two syncs."""

  learner: str
  periods: int
  up_ns: int
  slot_ns: int


@fact
class Tempo:
  """The syncer has changed the period of the run, or how long an answer may take, both in inner
  steps (tempo.py). `factor`: the new period in those of the settings; `sync`: the first one
  that follows it."""

  factor: int
  delay: int
  period: int
  sync: int


@fact
class Closing:
  """The syncer merges what is left, or (`merged`) waits for learners to leave: whom it waits for,
  and how long at most."""

  learners: tuple[str, ...]
  merged: bool
  at_most_ns: int


# --- Of a learner ---------------------------------------------------------------------------------


@fact
class NoStep:
  """The learner lives and makes no step, once per heartbeat: from itself, and from the syncer if
  the step is missing. `doing`: of messages.DOING; '': a step runs, and is not missing yet."""

  learner: str
  doing: str
  idle_ns: int


@fact
class State:
  """The new state of the learner: joined, disconnected (with a reason), trained (to the end), or
  ending (and why)."""

  state: str
  incarnation: int | None
  clock: int
  reason: str = ''


@fact
class Adopted:
  """The learner adopts a new version of a fragment. `steps_between`: inner steps since the last
  one; `whole`: not a delta, as after a join; `staleness`: versions that it never adopted; `reason`:
  why it dropped its unmerged steps, '' if it carries them on."""

  fragment: int
  version: int
  sync: int
  clock: int
  steps_between: int
  whole: bool
  staleness: int
  reason: str


_SyncFact = Opened | Merging | Synced | Cancelled | Refused | Closing
_SyncerFact = _SyncFact | Ledger | Member | Progress | Link | Tempo
Fact = _SyncerFact | State | Adopted | NoStep
