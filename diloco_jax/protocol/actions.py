"""The actions that a machine asks its shell to carry out.

The shell carries out transport actions (Dial ... Close) and work actions (Step ... Save) in the
order given; the event named in a work action's docstring answers it later. Work of one machine runs
first in, first out, so an Adopt given before a Step is finished before that step begins.
"""

import dataclasses
import typing
from typing import Any

from diloco_jax.protocol import facts, messages

NOT_IN_TIME = 75  # the code of an Exit that a later start mends


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def _action(cls):
  return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)


# --- Transport ------------------------------------------------------------------------------------


@_action
class Dial:
  """Open a session with the syncer; answered by Connected or Disconnected."""

  session: int


@_action
class Admit:
  """The peer of a session is a member now: the session may last, and take a member's seat."""

  session: int


@_action
class Send:
  """Send a message on a session, with the bytes of `payload_id` as its payload."""

  session: int
  message: messages.Message
  payload_id: int | None = None


@_action
class Close:
  """Close a session after all messages sent on it have gone out."""

  session: int
  reason: str


@_action
class Drop:
  """Free the bytes of `payload_id` (sends in progress keep their own reference)."""

  payload_id: int


# --- Work of a learner ----------------------------------------------------------------------------


@_action
class Step:
  """Run the inner step that begins at `clock`; answered by StepDone."""

  clock: int


@_action
class Examine:
  """Tell at once, whatever the work does, what the thread of the steps is doing; Examined."""


@_action
class Encode:
  """Capture anchor - local of a fragment and encode it on the device; answered by Encoded. The
  shell keeps what was encoded until the next Encode or Adopt(merged) of the fragment."""

  sync: int
  fragment: int


@_action
class Adopt:
  """Take the published value of `payload_id` (`whole`, else a delta to the anchor) as anchor;
  answered by AdoptDone. The shell drops the id afterwards.

  `keep`: carry local - anchor onto the new value, less the newest capture of the fragment if it is
  `merged`; else the parameters become the new value.
  """

  fragment: int
  version: int
  payload_id: int
  whole: bool
  keep: bool
  merged: bool


@_action
class UseShard:
  """Read batch `cursor` of data shard `shard` in the next step. `rewind`: reset the parameters to
  the anchors, because another learner will read the batches trained since then again."""

  shard: int
  cursor: int
  rewind: bool


# --- Work of the syncer ---------------------------------------------------------------------------


@_action
class Participant:
  """One learner's share of an outer step (paper section 4: w = c_tokens * c_tokens / c_steps).

  Its norm must be at least `least` and at most `limit`, else it is left out (screening.py); None:
  any finite norm is allowed. `crc32`: of the payload's bytes, as they arrived. `slow`: the
  learner's link is too slow for a payload in each period. `apart`: it is left out, as the run goes
  on from another participant.
  """

  learner: str
  incarnation: int
  payload_id: int
  tokens: int
  steps: int
  least: int = 0
  limit: int | None = None
  crc32: int = 0
  slow: bool = False
  apart: bool = False


@_action
class Measure:
  """Measure the lengths of the tensors in a payload that counts, before its outer step. No event
  answers it: the shell keeps them until the merge."""

  fragment: int
  payload_id: int


@_action
class Merge:
  """Run the outer step that makes `version`; participants in the order of learner ids. A
  participant that is `apart`, whose value is not finite, or whose norm is not within its limits, is
  left out.

  Answered by MergeDone once it is committed: the shell has logged what it needs to run the outer
  step again, with `machine_state`, the machine state with this merge in progress (recovery.py). The
  shell sends no result before. It drops the participants' ids afterwards. `live`: the learners that
  are live at the decision.
  """

  sync: int
  fragment: int
  version: int
  participants: tuple[Participant, ...]
  machine_state: dict[str, Any]
  live: tuple[str, ...] = ()


@_action
class ReadFragment:
  """Read the whole published value of a fragment; answered by FragmentRead."""

  fragment: int


# --- Both -----------------------------------------------------------------------------------------


@_action
class Save:
  """Write a checkpoint: the arrays as they are now and `machine_state`, this machine's state;
  SaveDone."""

  clock: int
  machine_state: dict[str, Any]


@_action
class Report:
  """A fact for the records. Changes nothing."""

  fact: facts.Fact


@_action
class Say:
  """One line for people."""

  text: str


@_action
class Exit:
  """End the process: exit code (process/exits.py) and its last line of output. `abandons`: the step
  that runs is stuck, and not waited for."""

  code: int
  text: str
  abandons: bool = False


Transport = Dial | Admit | Send | Close | Drop
Work = Step | Examine | Encode | Adopt | UseShard | Measure | Merge | ReadFragment | Save
Action = Transport | Work | Report | Say | Exit
