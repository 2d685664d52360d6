"""What can happen to a machine.

Integers, short strings and messages only. A *handle* is an integer by which the shell finds bytes
that it holds (a received payload, an encoded fragment); a machine passes it on or drops it.
"""

import dataclasses

from diloco_jax.protocol import messages


def _event(cls):
  return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


@_event
class Connected:
  """A stream to a peer is open; `session` names it and is never used again."""

  session: int


@_event
class Disconnected:
  """The stream is gone. Nothing more will come from it."""

  session: int
  reason: str


@_event
class Received:
  """A whole message; `handle` holds its payload if it announces one (size, checksum verified)."""

  session: int
  message: messages.Message
  handle: int | None = None


@_event
class Wake:
  """The machine's `deadline_ns` has come."""


@_event
class Stop:
  """The process was asked to end in an orderly way (SIGTERM, Ctrl-C)."""

  reason: str


@_event
class TakeSnapshot:
  """Somebody asks the syncer for a snapshot of the whole run now."""


# --- Answers to the learner's work ----------------------------------------------------------------


@_event
class StepDone:
  """One inner step is done: it trained on `tokens` and took `step_ns`."""

  tokens: int
  step_ns: int


@_event
class Encoded:
  """The pseudo-gradient of an Encode; `handle` None: it held NaN or Inf and was refused."""

  sync: int
  fragment: int
  handle: int | None
  payload: messages.Payload | None


@_event
class AdoptDone:
  """The anchor of `fragment` is `version` now, with this digest of its bits."""

  fragment: int
  version: int
  digest: int


@_event
class MomentsRead:
  """The snapshot of a ReadMoments, with the digest of its arrays; `handle` None: it held NaN or Inf
  and is nothing to give away."""

  transfer: int
  handle: int | None
  payload: messages.Payload | None
  digest: int


@_event
class MomentsTaken:
  """`matched`: the inner optimizer's state is the donated one now; else it is what it was."""

  transfer: int
  matched: bool


# --- Answers to the syncer's work -----------------------------------------------------------------


@_event
class MergeDone:
  """The outer step of `sync` is done: `handle` holds the encoded delta to the version before.

  `norms` are those of the participants' pseudo-gradients, in their order (screening.py: in parts of
  1.0, -1 not finite); `refused` are the learners that were left out. `failed` in words if the outer
  step was refused (nobody is left, or the result is not finite): Theta is unchanged.
  """

  sync: int
  fragment: int
  handle: int | None
  payload: messages.Payload | None
  digest: int
  failed: str = ''
  norms: tuple[int, ...] = ()
  refused: tuple[str, ...] = ()


@_event
class FragmentRead:
  """The whole published value of `fragment`, read at `version`."""

  fragment: int
  version: int
  handle: int
  payload: messages.Payload
  digest: int


@_event
class ManifestWritten:
  """A WriteManifest is finished; `error` in words if it failed: there is no such snapshot then."""

  snapshot: int
  error: str = ''


@_event
class SaveDone:
  """A Save is finished: it is checkpoint number `checkpoint`, and the SHA-256 of its record stands
  for its content (storage/checkpoint.py). `error` in words if it failed (training goes on)."""

  step: int
  checkpoint: int = 0
  record_sha256: str = ''
  error: str = ''


Event = (
  Connected
  | Disconnected
  | Received
  | Wake
  | Stop
  | TakeSnapshot
  | StepDone
  | Encoded
  | AdoptDone
  | MomentsRead
  | MomentsTaken
  | MergeDone
  | FragmentRead
  | ManifestWritten
  | SaveDone
)
