"""The syncs in hand: those that are announced or open, their payloads, and how they end.

A sync pulls its fragment from every contributor: when it is announced, so that the learner sends it
when it is due, and again when it opens, from those that have not answered. Each contributor answers
once, with a payload or with a reason to send none; then the sync does not wait for it any more::

    asked --Pull--> waiting --Contribution that counts--> in payloads
    waiting --Contribution that does not count, Decline, disconnected--> answered, no payload

The sync holds a payload that counts until it merges or is cancelled. Before that the syncer
withdraws the payload when its learner's session closes (the learner sends the tokens again), or
when its learner drops the steps of it. If learners rebase, a payload that is late counts for the
next sync of its fragment. A payload that does not count is dropped immediately; the learner gets a
verdict, except for a repeat. Its tokens are discarded with the reason (verdicts.py), unless the
learner keeps them: after a cancelled sync, and, if learners rebase, when it was late or stale.

A sync ends with a published version, or cancelled. Each participant receives its verdict.
"""

from diloco_jax.protocol import actions, events, facts, messages, rate_limited_log
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import grace, verdicts
from diloco_jax.protocol.syncer import links as links_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.protocol.syncer import sync as sync_lib

Reason = messages.Reason
REST = 4  # leases after a wait for all in vain: who never answers costs a fifth of the time


class Syncs:
  """The syncs in hand. Owns them, the grace window's averages, and the counts of syncs."""

  def __init__(
    self,
    books: books_lib.Books,
    published: published_lib.Published,
    screening: screening_lib.Screening,
    links: links_lib.Links,
  ):
    self._config = config = books.config
    self._tempo = books.tempo
    self._members = books.members
    self._ledger = books.ledger
    self._shards = books.shards
    self._out = books.out
    self._published = published
    self._screening = screening
    self._links = links
    self.grace = grace.Grace()
    self.open: dict[int, sync_lib.Sync] = {}
    self.announced: dict[int, sync_lib.Sync] = {}  # not open yet
    # By fragment: the next sync, if payloads were late for the last one.
    self.due: dict[int, sync_lib.Sync] = {}
    # Rejections after which a learner sends the tokens again, and the reason for tokens that a
    # learner has skipped without a verdict.
    self._kept = messages.kept(config.rebases)
    self._gap = Reason.UNDONE if config.rebases else Reason.OVERWRITTEN
    # Fragments that have had no outer step since the process began, the last learner was lost, or
    # all trained on without one (a full disk, a suspended machine).
    self._unmerged = set(range(config.fragments))
    self._all_ns: int | None = None  # until when the first outer steps of these wait for all
    self._in_vain = False  # one of them ended without a learner
    self.synced = self.cancelled = 0
    self._merged_ns: int | None = None  # the last outer step

  @property
  def merging(self) -> bool:
    """Whether an outer step is in progress."""
    return any(sync.merging for sync in self.open.values())

  @property
  def decided(self) -> bool:
    """Whether every open sync is merging."""
    return all(sync.merging for sync in self.open.values())

  @property
  def deadline_ns(self) -> int | None:
    """The next end of a grace window."""
    times = [sync.deadline_ns(self._config.needed(t)) for t, sync in self.open.items()]
    return min((time_ns for time_ns in times if time_ns is not None), default=None)

  def may_announce(self, fragment: int) -> bool:
    """Whether there is room for a sync of this fragment beside those in hand."""
    free = len(self.announced) < self._tempo.lead
    return free and all(sync.fragment != fragment for sync in self._in_hand())

  def _in_hand(self) -> list[sync_lib.Sync]:
    return [*self.open.values(), *self.announced.values()]

  def _all(self) -> list[sync_lib.Sync]:
    return [*self._in_hand(), *self.due.values()]

  def _find(self, t: int) -> sync_lib.Sync | None:
    return self.open.get(t) or self.announced.get(t)

  def announce(self, t: int, fragment: int) -> None:
    """Asks every contributor for the fragment when it is due."""
    sync = self.announced[t] = self._begin(t, fragment)
    self._pull_from(sync, self._members.live())

  def _begin(self, t: int, fragment: int) -> sync_lib.Sync:
    sync = self.due.pop(fragment, None) or sync_lib.Sync(t=t, fragment=fragment)
    sync.t = t
    sync.move('announced')
    if self._config.closing(t):  # the last one
      self._return_late(sync)
    return sync

  def _return_late(self, sync: sync_lib.Sync) -> None:
    """Drops the payloads for the sync before: their learners answer this one with all their
    steps."""
    for learner, (message, _) in sorted(sync.payloads.items()):
      if message.sync != sync.t:
        self.send_verdict(self._members.by_id[learner], message.sync, sync.fragment, Reason.LATE)
        self._out.drop(sync.withdraw(learner))
        sync.asked.discard(learner)

  def open_sync(self, now_ns: int, t: int, fragment: int) -> sync_lib.Sync:
    """The sync opens: asks every contributor that has not answered."""
    sync = self.announced.pop(t, None) or self._begin(t, fragment)
    sync.move('open')
    sync.opened_ns = now_ns
    self._choose_for_all(now_ns, sync)
    sync.grace_ns = self._window_ns(now_ns, sync)
    self.open[t] = sync
    if sync.for_all:
      self._return_late(sync)
    self._links.opened(sync)
    self._pull_from(sync, self._members.live())
    self._out.report(facts.Opened(sync=t, fragment=fragment))
    return sync

  def _choose_for_all(self, now_ns: int, sync: sync_lib.Sync) -> None:
    """Decides whether a sync waits for all learners: the first one of a fragment that they have
    trained on for long without an outer step. One lease serves all fragments: else a learner that
    never answers would take one of each. A closing sync has a lease anyway."""
    if self._config.closing(sync.t):
      return
    last, periods = self._published.fragments[sync.fragment].last_sync, 2 * self._tempo.period
    able = [member for member in self._members.live() if member.caught_up]
    if pace_lib.lower_median([member.clock for member in able]) - last > periods:
      self._unmerged.add(sync.fragment)
      rest_ns = REST * self._config.lease_ns if self._in_vain else 0
      if self._all_ns is not None and now_ns - self._all_ns > rest_ns:
        self._all_ns, self._in_vain = None, False
    # One of them may be far ahead of the run, which goes on at the clock of one that has returned.
    newest = max([sync.t, *(member.claimed for member in able)])
    sync.for_all = sync.fragment in self._unmerged and newest - last >= periods
    if sync.for_all and self._all_ns is None:
      self._all_ns = now_ns + self._config.lease_ns

  def _window_ns(self, now_ns: int, sync: sync_lib.Sync) -> int:
    """The grace window; of a sync for all the rest of their lease, at least the steps in which a
    learner answers."""
    if self._config.closing(sync.t):
      return self._config.lease_ns
    step_ns = pace_lib.step_ns(self._members)
    if sync.for_all:
      return max((self._all_ns or now_ns) - now_ns, self._tempo.in_flight * step_ns)
    return self.grace.window_ns(self._tempo, step_ns)

  def _pull_from(self, sync: sync_lib.Sync, members: list[members_lib.Member]) -> None:
    """Pulls from those that have not answered; only in some periods from one whose link is slow,
    if the sync has its quorum without it and is not for all."""
    able = [m.learner for m in self._members.live() if m.caught_up]
    turns = sync.asked | sync.payloads.keys()
    turns |= {m.learner for m in self._members.live() if self._links.pulls(m, sync.t)}
    every = sync.for_all or len(turns & {*able}) < self._config.quorum
    for member in members:
      asked = member.learner in sync.asked
      answered = member.learner in sync.payloads or asked and member.learner not in sync.waiting
      if member.caught_up and not answered and (every or member.learner in turns):
        if not asked:
          self._links.asked(member, sync.t)
        self._pull(sync, member)

  def _pull(self, sync: sync_lib.Sync, member: members_lib.Member) -> None:
    sync.asked.add(member.learner)
    sync.waiting.add(member.learner)
    now = sync.state != 'announced'
    pull = messages.Pull(sync=sync.t, fragment=sync.fragment, now=now)
    self._out.send(member.session, pull)

  def enter(self, member: members_lib.Member) -> None:
    """A learner has caught up: pulls from it for every sync that is not merging yet."""
    for sync in self._in_hand():
      if not sync.merging:
        self._pull_from(sync, [member])

  def drop_learner(self, learner: str) -> None:
    """A learner has disconnected: stops waiting for it and drops its payloads without a verdict."""
    for sync in self._all():
      sync.waiting.discard(learner)
      sync.asked.discard(learner)
      self._out.drop(sync.withdraw(learner))
    if not self._members.by_session:
      self.grace.all_lost()
      self._unmerged.update(range(self._config.fragments))
      self._all_ns = None

  # --- Answers ------------------------------------------------------------------------------------

  def contribution(
    self, member: members_lib.Member, message: messages.Contribution, payload_id: int
  ) -> None:
    member.contributed = True
    self._links.arrived(member, message)
    sync = self._find(message.sync)
    reason = self._judge(member, message, sync)
    if reason == Reason.LATE and self._config.rebases:
      later = self._next(member, message)
      if later is not None:
        sync, reason = later, self._judge(member, message, later)
    if not reason and not self._shards.counts(member.learner, message):
      reason = Reason.DUPLICATE
    if reason:
      self._reject(member, message, payload_id, reason)
      return
    # An older payload that was late may wait in this sync. The learner awaits the newer one's end.
    self._out.drop(sync.withdraw(member.learner))
    sync.waiting.discard(member.learner)
    sync.payloads[member.learner] = (message, payload_id)
    self._out.do(actions.Measure(fragment=message.fragment, payload_id=payload_id))

  def _judge(
    self,
    member: members_lib.Member,
    message: messages.Contribution,
    sync: sync_lib.Sync | None,
  ) -> str:
    fragment = self._published.fragments[message.fragment]
    oldest = fragment.version - self._config.max_staleness
    if self._config.closing(message.sync):
      oldest = 0  # a stale payload would find no later sync
    elif sync is not None and any(
      other.merging and other.fragment == message.fragment for other in self.open.values()
    ):
      oldest += 1  # before this sync merges
    cursor = self._ledger.of(member).cursors[message.fragment]
    return verdicts.judge(message, member.learner, sync, fragment, cursor, oldest)

  def _next(
    self, member: members_lib.Member, message: messages.Contribution
  ) -> sync_lib.Sync | None:
    """The sync for which a late payload counts. None: it would be one that the learner answers with
    all its steps, or P late payloads wait already."""
    p = message.fragment
    later = next((sync for sync in self._all() if sync.fragment == p and not sync.merging), None)
    if later is not None and (later.state != 'due' or member.learner in later.payloads):
      return None if self._config.closing(later.t) or later.for_all else later
    waiting = sum(len(sync.payloads) for sync in self.due.values())
    if self._config.closing(message.sync) or waiting >= self._config.fragments:
      return None
    return self.due.setdefault(p, sync_lib.Sync(t=0, fragment=p))

  def _reject(
    self, member: members_lib.Member, message: messages.Contribution, payload_id: int, reason: str
  ) -> None:
    """Drops a payload that does not count, with its verdict."""
    self._out.drop(payload_id)
    if reason == verdicts.REPEATED:
      return
    fragment = message.fragment
    member.rejected, member.last_reason = member.rejected + 1, reason
    if reason not in self._kept:
      self._withdraw(member, fragment, message.tokens_to)
      self._settle_tokens(member, message, reason)
    self.send_verdict(member, message.sync, fragment, reason)
    self._answered(member, message.sync)
    version = self._published.fragments[fragment].version
    copy = member.copies[fragment]
    if verdicts.needs_anchor(message, version, copy.tokens, reason):
      self._published.replace(member, fragment)
    elif reason == Reason.DUPLICATE:  # else it takes the next version for one with this payload
      copy.spoiled = True

  def _settle_tokens(
    self, member: members_lib.Member, message: messages.Contribution, reason: str
  ) -> bool:
    return self._ledger.of(member).settle(
      message.fragment, message.tokens_from, message.tokens_to, reason, self._gap
    )

  def decline(self, member: members_lib.Member, message: messages.Decline) -> None:
    if message.reason == Reason.BAD_VALUE:
      account = self._ledger.of(member)
      self._withdraw(member, message.fragment, message.tokens_to)
      account.drop(message.fragment, message.tokens_to, Reason.BAD_VALUE)
      self._published.replace(member, message.fragment)
    self._answered(member, message.sync)

  def say_if_idle(self, now_ns: int, contributors: int) -> None:
    """Says so if there was no outer step for a while, or none with a certain learner."""
    pause_ns = rate_limited_log.PAUSE_NS
    if self._merged_ns is None:
      self._merged_ns = now_ns
    if now_ns - self._merged_ns >= pause_ns:
      quorum, live = self._config.quorum, self._members.live()
      why = f'{contributors} learners contribute, an outer step needs {quorum}. Training continues'
      if not contributors:
        why = 'no learner trains. The run waits for learners'
      elif sum(now_ns - member.entered_ns >= pause_ns for member in live) < quorum <= contributors:
        why = f'{contributors} learners have only just joined. Training continues'
      self._out.notices.say(
        now_ns,
        'idle',
        f'no outer step for {(now_ns - self._merged_ns) // config_lib.SECOND_NS} s: {why} and '
        'nothing is lost.',
      )
      return
    for member in self._members.live():
      waited_ns = now_ns - max(member.entered_ns, member.merged_ns)
      if member.caught_up and waited_ns >= pause_ns and member.rejected:
        self._out.notices.say(
          now_ns,
          f'unmerged {member.learner}',
          f'nothing of {member.learner} was merged for {waited_ns // config_lib.SECOND_NS} s: '
          f'{member.rejected} payloads were rejected, the last one as {member.last_reason}.',
        )

  def _answered(self, member: members_lib.Member, t: int) -> None:
    self._links.answered(member, t)
    sync = self._find(t)
    if sync is not None:
      sync.waiting.discard(member.learner)

  def adopted(self, now_ns: int, member: members_lib.Member, adopted: messages.Adopted) -> None:
    """The learner replaced its anchor. Its payload in a sync of this fragment no longer counts if
    it dropped the steps of it: these tokens are discarded."""
    p, reason = adopted.fragment, adopted.reason or self._gap
    self._withdraw(member, p, adopted.tokens)
    self._ledger.of(member).drop(p, adopted.tokens, reason)
    self.grace.adopted(adopted.fragment, adopted.version, now_ns)

  def _withdraw(self, member: members_lib.Member, fragment: int, upto: int) -> None:
    """The learner's tokens before `upto` are being settled: its payload in a sync of this fragment
    may not count them again."""
    for sync in self._all():
      waits = sync.fragment == fragment and sync.payloads.get(member.learner)
      if waits and waits[0].tokens_from < upto:
        self._out.drop(sync.withdraw(member.learner))

  # --- How a sync is merged and ends --------------------------------------------------------------

  def merge(self, now_ns: int, sync: sync_lib.Sync) -> None:
    """Settles what is there, in the order of learner ids, for an outer step that begins now."""
    payloads = sorted(sync.payloads.items())
    sync.move('merging')
    self._in_vain |= sync.for_all and bool(sync.waiting)
    self._unmerged.discard(sync.fragment)
    shared_steps = self._shared_steps(sync)
    given = [(name, message) for name, (message, _) in payloads]
    merged = [self._ledger.of(self._members.by_id[name]).merged for name, _ in given]
    successor = self._screening.goes_on_from(now_ns, given, merged)
    sync.participants = tuple(
      self._participant(learner, message, payload_id, shared_steps, successor)
      for learner, (message, payload_id) in payloads
    )
    self._shards.merge(sync.t, sync.fragment, given)
    self._merged_ns = now_ns
    for learner, _ in payloads:
      member = self._members.by_id[learner]
      member.merged_ns, member.rejected = now_ns, 0
    version = self._published.fragments[sync.fragment].version + 1
    self.grace.merge_began(sync.fragment, version, now_ns)

  def _shared_steps(self, sync: sync_lib.Sync) -> int:
    """The steps since the last outer step of the fragment, as payloads and clocks show them: the
    lower median of the participants, or of all if there is one, that were there all the time."""
    last = self._published.fragments[sync.fragment].last_sync
    given = {learner: message.steps for learner, (message, _) in sync.payloads.items()}
    steps = [
      max(given.get(member.learner, 0), member.clock - last)
      for member in self._members.live()
      if (member.learner in given or len(given) == 1 and member.caught_up)
      and (member.since is None or member.since[0] < max(1, last))
    ]
    return pace_lib.lower_median(steps or [*given.values()])

  def merging_from(self, fragment: int) -> dict[tuple[str, int], int]:
    """For each (learner, incarnation) in an outer step of a fragment that is in progress: where the
    tokens of its contribution begin."""
    starts = {}
    for sync in self.open.values():
      for participant in sync.participants if sync.fragment == fragment else ():
        message, _ = sync.payloads[participant.learner]
        starts[participant.learner, participant.incarnation] = message.tokens_from
    return starts

  def _participant(
    self,
    learner: str,
    message: messages.Contribution,
    payload_id: int,
    shared_steps: int,
    successor: str,
  ) -> actions.Participant:
    """`successor`: the learner from which the run goes on, if not all are merged."""
    member = self._members.by_id[learner]
    settled = self._settle_tokens(member, message, '')
    assert settled, (learner, message)  # `_withdraw` keeps ranges apart
    usual = self._screening.usual[message.fragment]
    least, limit = usual.limits(message.steps, self._config, shared_steps)
    return actions.Participant(
      learner=learner,
      incarnation=member.incarnation,
      payload_id=payload_id,
      tokens=message.tokens_to - message.tokens_from,
      steps=message.steps,
      least=least,
      limit=limit,
      crc32=message.payload.crc32,
      slow=member.up.periods > 1,
      apart=successor not in ('', learner),
    )

  def end(self, now_ns: int, done: events.MergeDone) -> sync_lib.Sync:
    """The outer step of a sync has ended: ends the sync."""
    sync = self.open.pop(done.sync)
    self._shards.end(done.sync, done.refused, bool(done.failed))
    if done.failed:
      self._fail(now_ns, sync, done)
    else:
      self._publish(sync, done)
    return sync

  def _publish(self, sync: sync_lib.Sync, done: events.MergeDone) -> None:
    sync.move('published')
    publish = self._published.advance(done)
    self.synced += 1
    merged = [
      participant for participant in sync.participants if participant.learner not in done.refused
    ]
    names = tuple(participant.learner for participant in merged)
    if sync.facts:  # else it was decided by the process before
      late = tuple(name for name in sync.facts['late'] if name in names)
      tokens = sum(participant.tokens for participant in merged)
      changed = {'participants': names, 'late': late, 'tokens': tokens}
      self._out.report(facts.Synced(**(sync.facts | changed)))
    reasons = {}
    for participant in sync.participants:
      refused = participant.learner in done.refused
      reason = screening_lib.reason(participant) if refused else ''
      reasons[participant.learner, participant.incarnation] = reason
      if refused:  # the new version is its fresh anchor
        self._revoke(participant, sync.fragment)
    for member in self._members.live():
      reason = reasons.get((member.learner, member.incarnation))
      if reason is not None and member.joined:  # else its Joined has what is settled
        self.send_verdict(member, sync.given_for(member.learner), done.fragment, reason)
      self._published.send_delta(member, publish, done.payload_id)
    self._out.drop(done.payload_id)

  def _fail(self, now_ns: int, sync: sync_lib.Sync, done: events.MergeDone) -> None:
    """An outer step was refused: discards its participants' tokens and sends them a fresh anchor.
    Otherwise their next range would start among those tokens and be a duplicate for ever."""
    for participant in sync.participants:
      self._revoke(participant, sync.fragment)
    if any(done.norms):  # else the screening prints which learners trained nothing
      text = f'Outer step {sync.t} refused: {done.failed}'
      self._out.notices.say(now_ns, 'refused outer step', text)
    self.cancel(sync, done.failed)
    for participant in sync.participants:
      member = self._members.by_id[participant.learner]
      if member.joined and member.live and member.incarnation == participant.incarnation:
        self._published.replace(member, sync.fragment)

  def _revoke(self, refused: actions.Participant, fragment: int) -> None:
    """An update was refused: its tokens are discarded, and its learner needs a fresh anchor."""
    reason = screening_lib.reason(refused)
    self._ledger.revoke(refused.learner, refused.incarnation, refused.tokens, reason)
    member = self._members.by_id[refused.learner]
    if member.incarnation == refused.incarnation:
      member.copies[fragment].spoiled = True

  def skip(self, upto: int) -> None:
    """The syncs before `upto` that are announced will not open: drops their payloads, which the
    learners can send again."""
    for t in [t for t in self.announced if t < upto]:
      sync = self.announced.pop(t)
      names = sync.asked | sync.payloads.keys()
      self._end_without_version(sync, [m for m in self._members.live() if m.learner in names])

  def abandon(self) -> None:
    """The process ends: drops all payloads that are not being merged."""
    for sync in self._all():
      for payload_id in sync.abandon():
        self._out.drop(payload_id)

  def cancel(self, sync: sync_lib.Sync, why: str) -> None:
    """Ends a sync without a version. Its payloads are dropped unsettled: they can be sent again.

    Every joined learner gets a Settled, asked or not: one in lock step may wait for the sync."""
    self.open.pop(sync.t, None)
    self._end_without_version(sync, self._members.live())
    self.cancelled += 1
    self._out.report(facts.Cancelled(sync=sync.t, fragment=sync.fragment, why=why))

  def _end_without_version(self, sync: sync_lib.Sync, members: list[members_lib.Member]) -> None:
    for member in members:
      if member.joined:
        for t in sorted({sync.given_for(member.learner), sync.t}):
          self.send_verdict(member, t, sync.fragment, messages.CANCELLED)
    for payload_id in sync.abandon():
      self._out.drop(payload_id)
    sync.move('cancelled')

  # --- Verdicts sent to a learner -----------------------------------------------------------------

  def send_verdict(self, member: members_lib.Member, t: int, fragment: int, reason: str) -> None:
    """Sends a learner the verdict on its contribution to a sync; `reason` '' if it was merged."""
    settled = messages.Settled(sync=t, fragment=fragment, merged=not reason, reason=reason)
    self._out.send(member.session, settled)

  def check(self) -> None:
    """Asserts that no two open syncs have the same fragment, and that each is consistent."""
    syncs = self._in_hand()
    assert len({sync.fragment for sync in syncs}) == len(syncs), syncs
    live = {member.learner for member in self._members.by_session.values()}
    for sync in self._all():
      sync.check(live, self._config.needed(sync.t))
