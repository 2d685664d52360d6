"""Gathering: the open syncs, the learners they wait for, their payloads, and how they end.

An open sync pulls its fragment from every contributor. Each contributor answers once, with a
payload or with a reason to send none; then the sync does not wait for it any more::

    asked --Pull--> waiting --Contribution that counts--> in payloads
    waiting --Contribution that does not count, Decline, disconnected--> answered, no payload

The sync holds a payload that counts until it merges or is cancelled. Before that the syncer
withdraws the payload when its learner's session closes (the learner sends the tokens again), or
when its learner adopts another value of the fragment (the tokens count as overwritten). A payload
that does not count is dropped immediately. Its tokens are discarded with the reason (verdicts.py),
unless the sync was cancelled; the learner is told, except of repeats.

A sync ends with a published version, or cancelled. Each participant receives its verdict.
"""

from diloco_jax.protocol import action_list, actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import gather as gather_lib
from diloco_jax.protocol.syncer import grace as grace_lib
from diloco_jax.protocol.syncer import ledger as ledger_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.protocol.syncer import shards as shards_lib
from diloco_jax.protocol.syncer import verdicts

Reason = messages.Reason


class Gathering:
  """The open syncs. Owns their gathers, the grace window's averages, and the counts of syncs."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    members: members_lib.Members,
    ledger: ledger_lib.Ledger,
    published: published_lib.Published,
    shards: shards_lib.Shards,
    screening: screening_lib.Screening,
    out: action_list.ActionList,
  ):
    self._shards = shards
    self._config = config
    self._members = members
    self._ledger = ledger
    self._published = published
    self._screening = screening
    self._out = out
    self.grace = grace_lib.Grace()
    self.open: dict[int, gather_lib.Gather] = {}
    self.synced = self.cancelled = 0
    self._merged_ns: int | None = None  # the last outer step

  @property
  def merging(self) -> bool:
    """Whether an outer step is in progress."""
    return any(gather.merging for gather in self.open.values())

  def pull(self, gather: gather_lib.Gather, member: members_lib.Member) -> None:
    gather.asked.add(member.learner)
    gather.waiting.add(member.learner)
    self._out.send(member.session, messages.Pull(sync=gather.sync, fragment=gather.fragment))

  def enter(self, member: members_lib.Member) -> None:
    """A learner has caught up: pulls from it for every open sync that is not merging yet."""
    for gather in self.open.values():
      if not gather.merging:
        self.pull(gather, member)

  def drop_learner(self, learner: str) -> None:
    """A learner has disconnected: stops waiting for it and drops its payloads without a verdict."""
    for gather in self.open.values():
      gather.waiting.discard(learner)
      self._out.drop(gather.withdraw(learner, self._config.quorum))

  # --- Answers ------------------------------------------------------------------------------------

  def contribution(
    self, now_ns: int, member: members_lib.Member, message: messages.Contribution, payload_id: int
  ) -> None:
    member.contributed = True
    gather = self.open.get(message.sync)
    reason = verdicts.judge(
      message,
      member.learner,
      gather,
      self._published.fragments[message.fragment],
      self._ledger.of(member).cursors[message.fragment],
      self._config.max_staleness,
    )
    if not reason and not self._shards.counts(member.learner, message):
      reason = Reason.DUPLICATE
    if reason:
      self._reject(member, message, payload_id, reason)
      return
    gather.waiting.discard(member.learner)
    gather.payloads[member.learner] = (message, payload_id)
    if len(gather.payloads) == self._config.quorum and gather.quorum_at_ns is None:
      self._quorum_reached(now_ns, gather)

  def _quorum_reached(self, now_ns: int, gather: gather_lib.Gather) -> None:
    gather.quorum_at_ns = now_ns
    self.grace.quorum_ns.add(now_ns - gather.opened_ns)
    times = [member.inner_step_ns for member in self._members.by_session.values()]
    step_ns = pace_lib.lower_median([time_ns for time_ns in times if time_ns])
    gather.grace_ns = self.grace.window_ns(self._config, step_ns)

  def _reject(
    self, member: members_lib.Member, message: messages.Contribution, payload_id: int, reason: str
  ) -> None:
    """Drops a payload that does not count, with its verdict."""
    self._out.drop(payload_id)
    if reason == verdicts.REPEATED:
      return
    fragment = message.fragment
    member.rejected, member.last_reason = member.rejected + 1, reason
    if reason != messages.CANCELLED:
      self._withdraw(member, fragment, message.tokens_to)
      self._ledger.of(member).settle(fragment, message.tokens_from, message.tokens_to, reason)
    self.settle(member, message.sync, fragment, reason)
    self._answered(member, message.sync)
    version = self._published.fragments[fragment].version
    if verdicts.needs_anchor(message, version, member.anchor_tokens.get(fragment, 0), reason):
      self._published.resend_whole(member, fragment)

  def decline(self, member: members_lib.Member, message: messages.Decline) -> None:
    if message.reason == Reason.BAD_VALUE:
      account = self._ledger.of(member)
      start = account.cursors[message.fragment]
      self._withdraw(member, message.fragment, message.tokens_to)
      account.settle(message.fragment, start, max(start, message.tokens_to), Reason.BAD_VALUE)
      self._published.resend_whole(member, message.fragment)
    self._answered(member, message.sync)

  def say_if_idle(self, now_ns: int, contributors: int) -> None:
    """Says so if there was no outer step for a while, or none with a certain learner."""
    pause_ns = self._config.say_again_ns
    if self._merged_ns is None:
      self._merged_ns = now_ns
    if now_ns - self._merged_ns >= pause_ns:
      self._screening.notices.say(
        now_ns,
        'idle',
        f'no outer step for {(now_ns - self._merged_ns) // config_lib.SECOND_NS} s: '
        f'{contributors} learners contribute, an outer step needs {self._config.quorum}. Training '
        'continues and nothing is lost.',
      )
      return
    for member in self._members.live():
      waited_ns = now_ns - max(member.admitted_ns, member.merged_ns)
      if member.caught_up and waited_ns >= pause_ns and member.rejected:
        self._screening.notices.say(
          now_ns,
          f'unmerged {member.learner}',
          f'nothing of {member.learner} was merged for {waited_ns // config_lib.SECOND_NS} s: '
          f'{member.rejected} payloads were rejected, the last one as {member.last_reason}.',
        )

  def _answered(self, member: members_lib.Member, sync: int) -> None:
    if sync in self.open:
      self.open[sync].waiting.discard(member.learner)

  def adopted(self, now_ns: int, member: members_lib.Member, adopted: messages.Adopted) -> None:
    """The learner replaced its anchor. Its payload in an open sync of this fragment (if the
    replacement was a repair) no longer counts: these tokens are overwritten."""
    self._withdraw(member, adopted.fragment, adopted.tokens)
    self.grace.adopted(adopted.fragment, adopted.version, now_ns)

  def _withdraw(self, member: members_lib.Member, fragment: int, upto: int) -> None:
    """The learner's tokens before `upto` are being settled: its payload in an open sync of this
    fragment may not count them again."""
    for gather in self.open.values():
      waits = gather.fragment == fragment and gather.payloads.get(member.learner)
      if waits and waits[0].tokens_from < upto:
        self._out.drop(gather.withdraw(member.learner, self._config.quorum))

  # --- How a sync is merged and ends --------------------------------------------------------------

  def merge(self, now_ns: int, gather: gather_lib.Gather) -> None:
    """Settles what is there, in the order of learner ids, for an outer step that begins now."""
    payloads = sorted(gather.payloads.items())
    gather.move('merging')
    gather.participants = tuple(
      self._participant(learner, message, payload_id) for learner, (message, payload_id) in payloads
    )
    contributions = ((learner, message) for learner, (message, _) in payloads)
    self._shards.merge(gather.sync, gather.fragment, contributions)
    self._merged_ns = now_ns
    for learner, _ in payloads:
      member = self._members.by_id[learner]
      member.merged_ns, member.rejected = now_ns, 0
    version = self._published.fragments[gather.fragment].version + 1
    self.grace.merge_began(gather.fragment, version, now_ns)

  def _participant(
    self, learner: str, message: messages.Contribution, payload_id: int
  ) -> actions.Participant:
    member = self._members.by_id[learner]
    settled = self._ledger.of(member).settle(
      message.fragment, message.tokens_from, message.tokens_to, ''
    )
    assert settled, (learner, message)  # `_withdraw` keeps ranges apart
    least, limit = self._screening.limits(learner, message.fragment, message.steps)
    return actions.Participant(
      learner=learner,
      incarnation=member.incarnation,
      payload_id=payload_id,
      tokens=message.tokens_to - message.tokens_from,
      steps=message.steps,
      least=least,
      limit=limit,
    )

  def end(self, now_ns: int, done: events.MergeDone) -> gather_lib.Gather:
    """The outer step of a sync has ended: ends the sync."""
    gather = self.open.pop(done.sync)
    self._shards.end(done.sync, done.refused, made=not done.failed)
    if done.failed:
      self._fail(now_ns, gather, done.failed)
    else:
      self._publish(gather, done)
    return gather

  def _publish(self, gather: gather_lib.Gather, done: events.MergeDone) -> None:
    gather.move('published')
    publish = self._published.advance(done)
    self.synced += 1
    merged = [one for one in gather.participants if one.learner not in done.refused]
    names, tokens = tuple(one.learner for one in merged), sum(one.tokens for one in merged)
    if gather.facts:  # else it was decided by the process before
      self._out.report(facts.Synced(**{**gather.facts, 'participants': names, 'tokens': tokens}))
    ends = {(one.learner, one.incarnation): '' for one in gather.participants}
    for one in gather.participants:
      if one.learner in done.refused:  # the new version is its fresh anchor
        ends[one.learner, one.incarnation] = Reason.BAD_VALUE
        self._ledger.revoke(one.learner, one.incarnation, one.tokens)
    for member in self._members.live():
      end = ends.get((member.learner, member.incarnation))
      if end is not None:
        self.settle(member, done.sync, done.fragment, end)
      self._published.send_delta(member, publish, done.payload_id)
    self._out.drop(done.payload_id)

  def _fail(self, now_ns: int, gather: gather_lib.Gather, why: str) -> None:
    """An outer step was refused: discards its participants' tokens and sends them a fresh anchor.
    Otherwise their next range would start among those tokens and be a duplicate for ever."""
    self.grace.merge_failed(gather.fragment)
    for one in gather.participants:
      self._ledger.revoke(one.learner, one.incarnation, one.tokens)
    text = f'Outer step {gather.sync} refused: {why}'
    self._screening.notices.say(now_ns, 'refused outer step', text)
    self.cancel(gather, why)
    for member in self._members.live():
      if member.learner in gather.asked and member.held_versions:
        self._published.resend_whole(member, gather.fragment)

  def cancel(self, gather: gather_lib.Gather, why: str) -> None:
    """Ends a sync without a version. Its payloads are dropped unsettled: they can be sent again.

    Every joined learner is told, asked or not: a lock-step learner may be waiting for the sync."""
    self.open.pop(gather.sync, None)
    for payload_id in gather.abandon():
      self._out.drop(payload_id)
    gather.move('cancelled')
    for member in self._members.live():
      if member.held_versions:
        self.settle(member, gather.sync, gather.fragment, messages.CANCELLED)
    self.cancelled += 1
    self._out.report(facts.Cancelled(sync=gather.sync, fragment=gather.fragment, why=why))

  # --- Verdicts sent to a learner -----------------------------------------------------------------

  def settle(self, member: members_lib.Member, sync: int, fragment: int, reason: str) -> None:
    """Sends a learner the verdict on its contribution to a sync; `reason` '' if it was merged."""
    settled = messages.Settled(sync=sync, fragment=fragment, merged=not reason, reason=reason)
    self._out.send(member.session, settled)

  def check(self) -> None:
    """Asserts that no two open syncs have the same fragment, and that each is consistent."""
    gathers = list(self.open.values())
    assert len(gathers) <= self._config.in_flight, gathers
    assert len({gather.fragment for gather in gathers}) == len(gathers), gathers
    live = {member.learner for member in self._members.by_session.values()}
    for gather in gathers:
      gather.check(live, self._config.quorum)
