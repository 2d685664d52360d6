"""What a learner says, judged before anything is done with it: pure decisions.

A message is *impossible* if no learner of this run would say it, in its place, at this time: its
stream is closed and nothing changes. A contribution is judged against what was settled before:

    it counts            ''
    its sync was         CANCELLED: no version replaces the learner's anchor, so its tokens stay
      cancelled          unsettled and are sent again
    it is there already  REPEATED: the first one stands, nothing is settled
    otherwise            one of messages.Reason, by which its tokens are discarded
"""

from diloco_jax.protocol import messages
from diloco_jax.protocol.syncer import gather as gather_lib
from diloco_jax.protocol.syncer import published

Reason = messages.Reason

REPEATED = 'repeated'


def impossible(message: messages.FromLearner, joined: bool, fragments: int) -> bool:
  """Whether no learner of this run would say this: nothing about fragments before Joined, nothing
  about fragments that do not exist, no tokens that run backwards."""
  if isinstance(message, messages.Heartbeat | messages.Leave):
    return False
  if not joined:
    return True
  if isinstance(message, messages.Contribution) and (
    message.steps < 1 or message.tokens_from > message.tokens_to or message.cursor < message.steps
  ):
    return True
  return getattr(message, 'fragment', 0) >= fragments


def judge(
  message: messages.Contribution,
  learner: str,
  gather: gather_lib.Gather | None,
  fragment: published.Fragment,
  cursor: int,
  max_staleness: int,
) -> str:
  """What is to become of a contribution.

  Args:
    message: the contribution.
    learner: whose it is.
    gather: the sync it names, if that is open.
    fragment: as published.
    cursor: up to where the learner's tokens are settled for this fragment.
    max_staleness: how many versions old its anchor may be.
  """
  if gather is not None and learner in gather.payloads:
    return REPEATED
  if gather is None and message.sync > fragment.last_sync:
    return messages.CANCELLED
  if message.payload.size_bytes != fragment.payload_bytes:
    return Reason.BAD_VALUE
  if gather is None or gather.merging or gather.fragment != message.fragment:
    return Reason.LATE if message.tokens_to > cursor else REPEATED
  if not 0 <= fragment.version - message.version <= max_staleness:
    return Reason.STALE
  return Reason.DUPLICATE if message.tokens_from < cursor else ''


def needs_anchor(message: messages.Contribution, version: int, anchored: int, reason: str) -> bool:
  """Whether a learner whose payload was discarded must be sent the fragment (now at `version`).

  A range that starts before what is settled, from an anchor that is not about to be replaced, would
  be refused again and again: only a fresh anchor puts it right. If the learner has told of one
  since (at token count `anchored`: control overtakes payloads), another would overwrite more."""
  if message.tokens_from < anchored:
    return False
  if reason in (Reason.BAD_VALUE, Reason.DUPLICATE):
    return message.version == version
  return reason == Reason.STALE
