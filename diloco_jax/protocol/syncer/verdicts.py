"""Verdicts on contributions and joins: pure decisions.

The verdict on a plausible contribution (plausible.py) is the first that holds:

    REPEATED    the open sync has this learner's payload: the first copy counts
    CANCELLED   no version came of its sync: the tokens stay unsettled, the learner sends them again
    LATE        its sync is merging or over (REPEATED if its tokens are settled already); if
                learners rebase, it is judged for the next sync of the fragment
    STALE       its anchor is more than `max_staleness` versions old
    DUPLICATE   its tokens begin before those that are settled
    ''          it counts

With a reason of messages.Reason its tokens are discarded; if learners rebase, the tokens of a late
or stale one stay unsettled, and the learner carries them on. The verdict on a Join is None, or a
refusal with the first reason that holds, the syncer's and the learner's value, and what to do.
"""

from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import formats, ids, messages
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.protocol.syncer import sync as sync_lib

Reason = messages.Reason

REPEATED = 'repeated'
QUARANTINE_LEASES = 3  # for which no other process may take the id


# --- On a contribution ----------------------------------------------------------------------------


def judge(
  message: messages.Contribution,
  learner: str,
  sync: sync_lib.Sync | None,
  fragment: published_lib.Fragment,
  cursor: int,
  oldest: int,
) -> str:
  """The verdict on a contribution.

  Args:
    message: the contribution.
    learner: its sender.
    sync: the one that it names, if that is announced or open.
    fragment: the published fragment.
    cursor: the learner's tokens before this count are settled for this fragment.
    oldest: the oldest version that its anchor may have.
  """
  held = sync.payloads.get(learner) if sync is not None else None
  if held is not None and (held[0] == message or not sync.merging and held[0].sync >= message.sync):
    return REPEATED  # else what is held was late for a sync before
  if sync is None and message.sync > fragment.last_sync:
    return messages.CANCELLED
  if sync is None or sync.merging or sync.fragment != message.fragment:
    return Reason.LATE if message.tokens_to > cursor else REPEATED
  if not oldest <= message.version <= fragment.version:
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


# --- On a Join ------------------------------------------------------------------------------------


def refuse_unfit(join: messages.Join, agreement: str, run: str) -> messages.Refused | None:
  """Refuses a process with another protocol version, a bad id, another run, or another
  agreement."""
  if other := formats.refusal('protocol', join.protocol, 'This learner'):
    text = f'{other}. Syncer and learners need one number.'
    return messages.Refused(code='PROTOCOL', text=text)
  if not ids.is_learner(join.learner):
    return messages.Refused(
      code='BAD_ID',
      text=f'{join.learner[:80]!r} is not a learner id: {ids.RULE}.',
    )
  if join.run not in ('', run):
    return messages.Refused(
      code='OTHER_RUN',
      text=f'This learner belongs to run {join.run}, the syncer that answers to run {run}. Nothing '
      'was sent, and its checkpoint is untouched. Give it the address of the syncer of its run, or '
      'start it in another workdir to join this run anew.',
    )
  difference = agreement_lib.refusal(join.agreement, agreement)
  if difference:
    return messages.Refused(code='MISMATCH', text=difference)
  return None


def refuse_unproved(join: messages.Join, proved: str) -> messages.Refused | None:
  """Refuses a process that has proved another id than the one that it wants."""
  if proved in ('', join.learner):
    return None
  return messages.Refused(
    code='NOT_YOURS',
    text=f'The certificate of this process is of learner "{proved}", it cannot join as '
    f'"{join.learner}". Nothing was merged. Start it as learner "{proved}", or with the '
    f'certificate of "{join.learner}".',
  )


def refuse_if_held(
  join: messages.Join,
  members: members_lib.Members,
  config: config_lib.ProtocolConfig,
  now_ns: int,
  proved: str,
) -> messages.Refused | None:
  """Refuses a process that is fenced or in quarantine, or whose id another live process holds. The
  holder of a proved id is another process of the same owner, so it is worth waiting for its end."""
  if members.replaced(join.learner, join.nonce, join.incarnation):
    return messages.Refused(
      code='FENCED',
      text=f'Another process has taken learner id "{join.learner}"; this one is fenced and nothing '
      'that it sends is merged. Its merged updates are safe. Give it another learner id, or stop '
      'the other process.',
    )
  member = members.by_id.get(join.learner)
  if member is not None and members.quarantined(member):
    if member.nonce == join.nonce:
      return screening_lib.quarantine(member)
    heard_ns = max(member.heard_ns, members.began_ns)  # a restarted syncer has heard no learner yet
    rests_ns = heard_ns + QUARANTINE_LEASES * config.lease_ns - now_ns
    if rests_ns > 0:
      return messages.Refused(
        code='ID_IN_QUARANTINE',
        text=f'The last process of learner id "{join.learner}" is in quarantine. This one may take '
        f'the id in {rests_ns / config_lib.SECOND_NS:.0f} s; it tries again by itself.',
        retry_ns=rests_ns,
      )
  holder = members.held_by_other(join.learner, join.nonce)
  if holder is None:
    return None
  heard_s = (now_ns - holder.heard_ns) / config_lib.SECOND_NS
  lease_s = config.lease_ns / config_lib.SECOND_NS
  return messages.Refused(
    code='YOUR_ID_IN_USE' if proved else 'ID_IN_USE',
    text=f'Learner id "{join.learner}" is in use by {holder.host} pid {holder.pid}, last heard '
    f'{heard_s:.1f} s ago; that process continues. Use another learner id, or stop the other '
    f'process and wait {lease_s:g} s.',
    retry_ns=members.lease_left_ns(holder, now_ns) + config.heartbeat_ns,
  )
