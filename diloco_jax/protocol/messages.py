"""The messages between a learner and the syncer.

Every message is an immutable tuple of numbers and short strings. Array bytes never enter a
message: `Contribution` and `Publish` announce a *payload* by size and checksum, and the
transport delivers the message only once the payload is complete (see `transport/` and
`docs/wire_format.md`).

docs/protocol.md has the conversation of a learner with the syncer.
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.protocol import formats

PROTOCOL_VERSION = formats.NUMBERS['protocol']
CANCELLED = 'cancelled'  # Settled: the sync makes no version, its tokens can be sent again
# Why a session has closed, or is not opened, as the reason begins: nobody will answer any more.
ENDED, GONE = 'the run has ended', 'the syncer has ended for good'
# What the thread of the steps of a learner does.
READING, STEPPING, LOOPING, SYNCING = 'reading', 'stepping', 'looping', 'syncing'
SAVING, COMPILING, WAITING = 'saving', 'compiling', 'waiting'
DOING = {
  READING: 'reads its next batch',
  STEPPING: 'runs its step on the devices',
  LOOPING: 'has not called peer.sync',
  SYNCING: 'is in peer.sync, which compares and copies arrays',
  SAVING: 'saves a checkpoint',
  COMPILING: 'compiles',
  WAITING: 'waits for others',
}
# What may be under way to one learner (protocol/syncer/published.py).
MAX_VERSIONS_IN_FLIGHT = 4  # of one fragment
MAX_DELTA_BYTES = 4 << 30
MAX_WHOLES = 2


def most_delta_bytes(payload_bytes: Sequence[int]) -> int:
  """The most bytes of deltas in flight to one learner."""
  return max(MAX_DELTA_BYTES, MAX_VERSIONS_IN_FLIGHT * max(payload_bytes))


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def _message(cls):
  return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


@_message
class Payload:
  """Announces the bytes that belong to a message: their number and their CRC-32."""

  size_bytes: int
  crc32: int


@_message
class Held:
  """A fragment's published value as a learner holds it: version and 64-bit digest."""

  version: int
  digest: int


class ShardPosition(NamedTuple):
  """A data shard, and the next batch to read."""

  shard: int
  cursor: int


# --- From a learner -------------------------------------------------------------------------------


@_message
class Join:
  """First message on a session. `nonce` names the process; `agreement` is what both must share.
  `run` and `incarnation` are those under which the process has joined before; '' and 0: none."""

  protocol: int
  learner: str
  nonce: int
  agreement: str  # canonical JSON: flat names to values
  host: str
  pid: int
  run: str = ''
  incarnation: int = 0


@_message
class Confirm:
  """Accepts an Offer; `held` has one entry per fragment; `steps` and `tokens` are those of this
  incarnation. A process that continues its incarnation claims its data `shard` and its next batch
  (`cursor`)."""

  nonce: int
  incarnation: int
  clock: int
  steps: int
  tokens: int
  held: tuple[Held, ...]
  shard: int | None
  cursor: int


@_message
class Progress:
  """Report after an inner step: the clock, this incarnation's totals, and the step's duration.
  `loss`: the newest that the learner knows, for people; None: it knows none, or one that is not
  finite."""

  clock: int
  steps: int
  tokens: int
  step_ns: int
  finished: bool
  loss: float | None = None


@_message
class Contribution:
  """A pseudo-gradient (payload) measured from the anchor `version`.

  It covers the learner's own token count from `tokens_from` (what the syncer had settled before)
  to `tokens_to` (the capture): c_tokens = tokens_to - tokens_from, c_steps = `steps`. These tokens
  are the batches [cursor - steps, cursor) of data shard `shard` (protocol/syncer/shards.py).
  """

  sync: int
  fragment: int
  version: int
  steps: int
  tokens_from: int
  tokens_to: int
  shard: int
  cursor: int
  payload: Payload


@_message
class Decline:
  """Answers a Pull without a payload; `reason` is one of `Reason` or 'empty'."""

  sync: int
  fragment: int
  reason: str
  tokens_to: int


@_message
class Adopted:
  """The learner's anchor of `fragment` is now `version`; `matched`: the digests agree. Its next
  contribution begins at `tokens`: what is not settled before is discarded for `reason` ('' if
  nothing is)."""

  fragment: int
  version: int
  tokens: int
  matched: bool
  reason: str = ''


@_message
class Heartbeat:
  """Renews the lease during a long step; the syncer answers with a Heartbeat. Of a learner whose
  step is missing (protocol/learner/missing_step.py): what it is `doing`, of DOING, and for how long
  it has made no step."""

  doing: str = ''
  idle_ns: int = 0


@_message
class Leave:
  """The learner leaves the run (`done`, `preempted`, ...) and contributes nothing more."""

  reason: str


# --- From the syncer ------------------------------------------------------------------------------


@_message
class Offer:
  """An incarnation of the learner in this `run`, which the process holds from Confirm on."""

  incarnation: int
  run: str


@_message
class Refused:
  """The syncer refuses the join. `retry_ns`: when to try again, None: never (exit 42)."""

  code: str
  text: str
  retry_ns: int | None = None


def unproved(why: str) -> Refused:
  """What a learner's transport passes to its machine when the syncer refuses the certificate."""
  return Refused(code='UNPROVED', text=why, retry_ns=0)


@_message
class Joined:
  """The learner is a member. It sets its clock to `clock`; the `due` fragments follow before it may
  train. It reads data shard `shard` from batch `cursor` on; if it claimed exactly that position, it
  continues there. `settled`: for each fragment, the token count of this incarnation up to which the
  ledger has merged or discarded."""

  incarnation: int
  clock: int
  shard: int
  cursor: int
  due: tuple[int, ...]
  settled: tuple[int, ...]


@_message
class Pull:
  """Asks for a pseudo-gradient of `fragment` for sync `sync`: at the step boundary where it is due,
  or, if the sync has opened (`now`), at the next one."""

  sync: int
  fragment: int
  now: bool


@_message
class Publish:
  """A new published value (payload): a delta to `base_version`, or whole if that is None.

  `settled_to`: the receiver's tokens before this count are settled, so this version contains its
  payload if that ends there. Tokens that an outer step in progress merges are not yet counted: the
  next version contains them. `keep`: the receiver may carry its other steps onto it; False after a
  refused update or a repair.
  """

  sync: int
  fragment: int
  version: int
  base_version: int | None
  digest: int
  settled_to: int
  keep: bool
  payload: Payload


@_message
class Settled:
  """The verdict on a contribution: merged, or not for `reason` (see `kept`)."""

  sync: int
  fragment: int
  merged: bool
  reason: str


@_message
class Finish:
  """The run is over; every fragment is closed."""


def kept(rebases: bool) -> tuple[str, ...]:
  """The reasons of a Settled after which the learner keeps the tokens and sends them again;
  `rebases`: whether learners carry their unmerged steps on."""
  return (CANCELLED, Reason.LATE, Reason.STALE) if rebases else (CANCELLED,)


class Reason:
  """Why tokens are discarded. The ledger's column names."""

  LATE = 'late'  # the sync had closed before the payload arrived (rebase: max_misses in a row)
  STALE = 'stale'  # the anchor was more than max_staleness versions old
  OVERWRITTEN = 'overwritten'  # trained after the capture, then overwritten by the publish
  UNDONE = 'undone'  # after a fault the learner went back to the published value
  BAD_VALUE = 'bad_value'  # NaN, Inf or an absurd norm, refused by the encoder or before the merge
  APART = 'apart'  # the learners had trained apart for so long that the run goes on from another
  LOST_WITH_PROCESS = 'lost_with_process'  # its process died before they were merged
  LEFT = 'left'  # the learner left before they were merged
  END_OF_RUN = 'end_of_run'  # the run ended before they were merged
  DUPLICATE = 'duplicate'  # covered by an earlier contribution
  ALL = (
    LATE,
    STALE,
    OVERWRITTEN,
    UNDONE,
    BAD_VALUE,
    APART,
    LOST_WITH_PROCESS,
    LEFT,
    END_OF_RUN,
    DUPLICATE,
  )


FromLearner = Join | Confirm | Progress | Contribution | Decline | Adopted | Heartbeat | Leave
FromSyncer = Offer | Refused | Joined | Pull | Publish | Settled | Finish | Heartbeat
Message = FromLearner | FromSyncer
