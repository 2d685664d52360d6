"""The events that a machine handles.

They hold integers, short strings and messages only. A *payload id* is an integer by which the shell
finds bytes that it holds (a received payload, an encoded fragment); a machine passes it on or drops
it.
"""

import dataclasses
import typing

from diloco_jax.protocol import messages


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def _event(cls):
  return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


@_event
class Connected:
  """A session with a peer is open; its number `session` is never used again. `learner`: the id that
  the peer has proved, which no other id may use; '': none is proved."""

  session: int
  learner: str = ''


@_event
class Disconnected:
  """The session is closed and delivers no further message."""

  session: int
  reason: str


@_event
class Received:
  """A whole message; `payload_id` is its payload if it announces one (size and checksum
  verified)."""

  session: int
  message: messages.Message
  payload_id: int | None = None


@_event
class Wake:
  """The machine's `deadline_ns` has passed."""


@_event
class Stop:
  """The supervisor or user asks the process to end in an orderly way (SIGTERM, Ctrl-C)."""

  reason: str


# --- Answers to the learner's work ----------------------------------------------------------------


@_event
class StepDone:
  """One inner step on `tokens` tokens (0: given up) is done, or is dispatched and the step before
  is done. The first one that is done and that no StepDone has reported yet took `step_ns` (0: there
  is none), of it `data_ns` to wait for its batch; `saving_ns`: how long saves have kept the island
  before it. `loss`: of the newest step of which it is known and finite."""

  tokens: int
  step_ns: int
  data_ns: int = 0
  saving_ns: int = 0
  loss: float | None = None


@_event
class Examined:
  """What the thread of the steps is doing, of messages.DOING, and its innermost calls; '': it waits
  for work."""

  doing: str
  where: str


@_event
class Encoded:
  """The pseudo-gradient of an Encode; `payload_id` None: the encoder refused it (NaN or Inf)."""

  sync: int
  fragment: int
  payload_id: int | None
  payload: messages.Payload | None


@_event
class AdoptDone:
  """The anchor of `fragment` now has this version, and this digest of its bits."""

  fragment: int
  version: int
  digest: int


# --- Answers to the syncer's work -----------------------------------------------------------------


@_event
class MergeDone:
  """The outer step of `sync` is done: `payload_id` is the encoded delta to the version before.

  `norms` are those of the participants' pseudo-gradients, in their order (screening.py: in parts of
  1.0, -1 not finite); `refused` are the learners that were left out. `failed` is a text if the
  outer step was refused (no participant is left, or the result is not finite): Theta is unchanged.
  """

  sync: int
  fragment: int
  payload_id: int | None
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
  payload_id: int
  payload: messages.Payload
  digest: int


@_event
class SaveDone:
  """A Save is finished. `error` in words if it failed (training continues)."""

  clock: int
  error: str = ''


Event = (
  Connected
  | Disconnected
  | Received
  | Wake
  | Stop
  | StepDone
  | Examined
  | Encoded
  | AdoptDone
  | MergeDone
  | FragmentRead
  | SaveDone
)
