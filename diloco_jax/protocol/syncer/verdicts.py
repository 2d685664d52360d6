"""Judges a plausible contribution (plausible.py): pure decisions.

The verdict is the first that holds:

    REPEATED    the open sync has this learner's payload: the first copy counts
    CANCELLED   no version came of its sync: the tokens stay unsettled, the learner sends them again
    LATE        its sync is merging or over (REPEATED if its tokens are settled already)
    STALE       its anchor is more than `max_staleness` versions old
    DUPLICATE   its tokens begin before those that are settled
    ''          it counts

With a reason of messages.Reason its tokens are discarded.
"""

from diloco_jax.protocol import messages
from diloco_jax.protocol.syncer import gather as gather_lib
from diloco_jax.protocol.syncer import published

Reason = messages.Reason

REPEATED = 'repeated'


def judge(
  message: messages.Contribution,
  learner: str,
  gather: gather_lib.Gather | None,
  fragment: published.Fragment,
  cursor: int,
  max_staleness: int,
) -> str:
  """The verdict on a contribution.

  Args:
    message: the contribution.
    learner: its sender.
    gather: the sync it names, if that is open.
    fragment: the published fragment.
    cursor: the learner's tokens before this count are settled for this fragment.
    max_staleness: how many versions old its anchor may be.
  """
  if gather is not None and learner in gather.payloads:
    return REPEATED
  if gather is None and message.sync > fragment.last_sync:
    return messages.CANCELLED
  if gather is None or gather.merging or gather.fragment != message.fragment:
    return Reason.LATE if message.tokens_to > cursor else REPEATED
  if not 0 <= fragment.version - message.version <= max_staleness:
    return Reason.STALE
  return Reason.DUPLICATE if message.tokens_from < cursor else ''


def needs_anchor(
  message: messages.Contribution, version: int, anchor_tokens: int, reason: str
) -> bool:
  """Whether the syncer must send the fragment (now at `version`) after discarding a payload.

  A range that starts before the settled tokens, from an anchor that no publish is about to replace,
  would be refused again and again: only a fresh anchor helps. (A stale anchor is about to be
  replaced.) If the learner has since reported a fresh one (at token count `anchor_tokens`: control
  overtakes payloads), another one would overwrite more."""
  if message.tokens_from < anchor_tokens:
    return False
  return reason in (Reason.BAD_VALUE, Reason.DUPLICATE) and message.version == version
