"""Membership: how a process joins under a learner id, and how a member is lost or leaves.

Joining takes two phases, because a Join may be old or repeated::

    Join --refused--> closed, with the reason as text
    Join --Offer--> offered: the process holds nothing yet
    offered --Confirm of the offer, the id still free--> admitted: the process holds the id
    admitted --the run has begun: Joined--> joined, fragments are due
    joined --every due fragment adopted--> caught up: the learner contributes and sets the pace
    any of them --session closed, lease over--> lost: the process may rejoin (members.py)
    any of them --Leave--> left: the account is closed
    any of them --too many refused updates in a row--> quarantined: lost, may not rejoin

The syncer keeps these rules:
* No process displaces the live holder of an id: a second process that was given the same id by
  mistake must not ruin the first.
* A replaced process never rejoins under its id: its unmerged tokens were settled as lost and would
  count twice.
* A process in quarantine never rejoins (screening.py). Another process may take its id after some
  leases: else a host whose learner restarts would ruin three outer steps each time.
* The syncer forgets the oldest absent ids of which nothing was ever merged, beyond twice the
  expected number of learners, so that invented ids do not fill its memory.
* An offer reserves nothing. The syncer may offer two processes the same incarnation; the first
  Confirm gets it, so the syncer checks the offer again at Confirm.

A new run begins once all expected learners are admitted, or `start_wait_ns` after the first, so
that an early learner does not train alone and the others do not skip its syncs. Until then admitted
members are in the *waiting room*; later only members without a free shard wait there (shards.py). A
restored run has begun already.

When a learner enters, the syncer lists the syncs after the learner's clock that produced no
version; otherwise a lock-step learner would wait for them.

A lost learner is removed from the pace and from the open syncs; other learners do not wait for it.
Its process may reconnect and send the dropped payloads again, so its account stays open until
another process takes the id, the learner leaves, or the run ends.

"""

import dataclasses

from diloco_jax.protocol import actions, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import links as links_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import plausible, verdicts
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.protocol.syncer import syncs as syncs_lib

Reason = messages.Reason
SECOND_NS = config_lib.SECOND_NS
NEWCOMERS = 2  # known ones, for each expected learner: ids of which nothing was merged
SPARE_NEWCOMERS = 8  # live ones beyond the expected number of learners


@dataclasses.dataclass(frozen=True, slots=True)
class _Offered:
  """What a session was offered; it holds nothing yet."""

  join: messages.Join
  incarnation: int
  at_ns: int


class Membership:
  """Adds members to the parts of the syncer and removes them. It owns the offers, the waiting room
  and the count of repairs, binds ids in `members`, opens and closes accounts."""

  def __init__(
    self,
    books: books_lib.Books,
    pace: pace_lib.Pace,
    published: published_lib.Published,
    syncs: syncs_lib.Syncs,
    screening: screening_lib.Screening,
    links: links_lib.Links,
  ):
    self._config = books.config
    self._agreement = books.agreement
    self._run = books.run
    self._members = books.members
    self._ledger = books.ledger
    self._schedule = books.schedule
    self._shards = books.shards
    self._out = books.out
    self._pace = pace
    self._published = published
    self._syncs = syncs
    self._screening = screening
    self._links = links
    self.plausibility = plausible.Plausibility(books, pace, published)
    self._proved: dict[int, str] = {}  # ids, by session, where they are proved
    self._offered: dict[int, _Offered] = {}
    self._waiting_room: dict[int, messages.Confirm] = {}  # by session
    self._told_to_wait: set[int] = set()  # sessions
    self._closing: tuple[bool, tuple[str, ...]] = (False, ())  # for whom the end of the run waits
    self._start_ns: int | None = None
    self.started = False  # true from the beginning in a restored run
    self.repaired = 0  # adopted values that differed from the published ones

  @property
  def deadline_ns(self) -> int | None:
    """When the run begins without the missing learners, if a member waits for that."""
    return self._start_ns if self._waiting_room and not self.started else None

  # --- From Join to the waiting room --------------------------------------------------------------

  def connected(self, session: int, proved: str) -> None:
    if proved:
      self._proved[session] = proved

  def join(self, now_ns: int, session: int, join: messages.Join) -> None:
    """Offers an incarnation or refuses."""
    if session in self._members.by_session:
      return  # repeated by a member
    proved = self._proved.get(session, '')
    refused = (
      verdicts.refuse_unfit(join, self._agreement, self._run)
      or verdicts.refuse_unproved(join, proved)
      or verdicts.refuse_if_held(join, self._members, self._config, now_ns, proved)
    )
    if refused is not None:
      self._refuse(session, refused)
      return
    incarnation = self._members.offer(join)
    self._offered[session] = _Offered(join, incarnation, now_ns)
    self._out.send(session, messages.Offer(run=self._run, incarnation=incarnation))

  def confirm(self, now_ns: int, session: int, confirm: messages.Confirm) -> None:
    """Gives the process its id if that is still free."""
    offered = self._offered.pop(session, None)
    if session in self._members.by_session:
      return  # repeated by a member
    if offered is None or (
      (offered.join.nonce, offered.incarnation, self._config.fragments)
      != (confirm.nonce, confirm.incarnation, len(confirm.held))
    ):
      self._out.close(session, 'confirmed what was not offered')
      return
    before = self._members.by_id.get(offered.join.learner)
    known = before if before is not None and before.nonce == confirm.nonce else None
    fault = self.plausibility.confirm_fault(now_ns, known, confirm)
    if fault and known is not None:
      self.implausible(now_ns, known, fault)
    elif fault:
      self._say_implausible(now_ns, offered.join.learner, offered.join.host, fault)
    if fault:
      self._out.close(session, f'implausible: {fault}')
      return
    refused = self._refuse_if_full(offered.join.learner) or self._recheck_offer(
      now_ns, offered, self._proved.get(session, '')
    )
    if refused is not None:
      self._refuse(session, refused)
      return
    if known is not None and known.live:
      self._close(known, 'the process opened a new session', 'replaced by a new session')
    self._admit(now_ns, session, offered.join, confirm)
    member = self._members.by_session.get(session)
    if member is not None:
      member.round_trip_ns = now_ns - offered.at_ns

  def _recheck_offer(self, now_ns: int, offered: _Offered, proved: str) -> messages.Refused | None:
    """Refuses if another process took the id between Offer and Confirm."""
    join = offered.join
    refused = verdicts.refuse_if_held(join, self._members, self._config, now_ns, proved)
    if refused is None and self._members.offer(join) != offered.incarnation:
      return messages.Refused(
        code='OFFER_PASSED',
        text='Another process took this id after the offer.',
        retry_ns=self._config.heartbeat_ns,
      )
    return refused

  def _refuse_if_full(self, learner: str) -> messages.Refused | None:
    """Refuses a newcomer for now if too many are live: others need seats, too."""
    newcomers = [name for name in self._live() if not self._ledger.merged(name)]
    room = self._config.learners + SPARE_NEWCOMERS
    if len(newcomers) < room or learner in newcomers or self._ledger.merged(learner):
      return None
    return messages.Refused(
      code='FULL',
      text=f'{len(newcomers)} learners are connected of which nothing was merged yet, at most '
      f'{room} may be at once. Nothing is lost.',
      retry_ns=self._config.lease_ns,
    )

  def _refuse(self, session: int, refused: messages.Refused) -> None:
    self._out.send(session, refused)
    self._out.close(session, refused.code)

  def _admit(
    self, now_ns: int, session: int, join: messages.Join, confirm: messages.Confirm
  ) -> None:
    """Binds the id, which has no live holder, to the process. The unsettled tokens of a replaced
    process are lost."""
    before = self._members.by_id.get(join.learner)
    if before is None:
      self._forget_newcomers()
    elif before.nonce != join.nonce:
      self._ledger.fold(join.learner, before.incarnation)
      self._shards.give_back(join.learner)
    member = self._members.bind(join.learner, join.nonce, confirm.incarnation, session, now_ns)
    member.host, member.pid = join.host, join.pid
    self._pace.claim(member, confirm.clock)
    self._pace.advance(now_ns, member)
    account = self._ledger.of(member)
    account.closed = False  # the process may be older than the end of the run
    account.train(confirm.steps, confirm.tokens)
    self._pace.mark_steps(now_ns, member, account.steps)
    self._waiting_room[session] = confirm
    self._out.do(actions.Admit(session=session))
    if self._start_ns is None:
      self._start_ns = now_ns + self._config.start_wait_ns

  def _forget_newcomers(self) -> None:
    """Forgets the oldest absent newcomers, if there are too many newcomers."""
    busy = {name for sync in self._syncs.open.values() for name in sync.payloads}
    newcomers = [name for name in self._members.by_id if not self._ledger.merged(name)]
    absent = [n for n in newcomers if not self._members.by_id[n].live and n not in busy]
    for learner in absent[: max(0, len(newcomers) + 1 - NEWCOMERS * self._config.learners)]:
      self._shards.give_back(learner)
      self._ledger.forget(learner)
      self._screening.forget(learner)
      self._members.forget(learner)

  # --- From the waiting room to the run -----------------------------------------------------------

  def welcome(self, now_ns: int, finished: bool) -> None:
    """Lets waiting members enter once the run has begun; `finished`: they then receive Finish."""
    if not self.started and self._start_ns is not None:
      expected = len(self._members.by_session) >= self._config.learners
      self.started = expected or now_ns >= self._start_ns
    if not self.started or not self._waiting_room:
      return
    entering, self._waiting_room = self._waiting_room, {}
    for session, confirm in entering.items():
      self._enter(now_ns, self._members.by_session[session], confirm, finished)

  def _enter(
    self, now_ns: int, member: members_lib.Member, confirm: messages.Confirm, finished: bool
  ) -> None:
    claim = None if confirm.shard is None else messages.ShardPosition(confirm.shard, confirm.cursor)
    wanted = member.learner, claim, member.shard, self._live(), confirm.steps
    lease = self._shards.assign(*wanted)
    if lease is None and self._make_room(now_ns, member):
      lease = self._shards.assign(*wanted)
    if lease is None:
      self._wait(member, confirm)
      return
    self._welcome(now_ns, member, confirm.held, lease)
    if finished:
      self._out.send(member.session, messages.Finish())
    elif member.caught_up:
      self._caught_up(member)

  def _make_room(self, now_ns: int, member: members_lib.Member) -> bool:
    """Closes the session of a reader that has contributed nothing for a lease, if nothing of it was
    ever merged, for a learner of which something was: ids that only read cannot keep a learner of
    the run out. Returns whether there was one."""
    if self._config.local or not self._ledger.merged(member.learner):
      return False  # with data of its own it waits for the end of an outer step, not for a shard
    for reader in self._members.live():
      idle = not reader.contributed and now_ns - reader.entered_ns >= self._config.lease_ns
      if reader.joined and idle and not self._ledger.merged(reader.learner):
        self._close(reader, 'its shard went to a learner that contributes', 'no free shard')
        self._shards.give_back(reader.learner)
        return True
    return False

  def _live(self) -> set[str]:
    return {member.learner for member in self._members.by_session.values()}

  def _wait(self, member: members_lib.Member, confirm: messages.Confirm) -> None:
    """Puts a member without a shard back into the waiting room."""
    self._waiting_room[member.session] = confirm
    if member.session not in self._told_to_wait and self._shards.all_read(self._live()):
      self._told_to_wait.add(member.session)
      self._report(member, 'waits')
      self._out.say(
        f'{member.learner} waits: others read all {self._config.data_shards} shards, and '
        'text that two learners read would count twice. It enters once a shard is free; a run '
        'with a larger data.shards takes more learners.'
      )

  def _welcome(
    self,
    now_ns: int,
    member: members_lib.Member,
    held: tuple[messages.Held, ...],
    lease: messages.ShardPosition,
  ) -> None:
    member.shard, member.entered_ns = lease.shard, now_ns
    member.first_batch = lease.cursor - self._ledger.of(member).steps
    self._published.compare(member, held)
    self._warn_if_ahead(member, held)
    syncs = self._syncs.open
    clock = min(syncs) - 1 if syncs else self._pace.opening.last
    self._pace.claim(member, clock)  # the learner does the same
    self._pace.advance(now_ns, member)
    if member.since is not None and not member.since[0]:
      member.since = member.clock, now_ns
    due = tuple(p for p, copy in enumerate(member.copies) if copy.due)
    self._out.send(
      member.session,
      messages.Joined(
        incarnation=member.incarnation,
        clock=clock,
        shard=lease.shard,
        cursor=lease.cursor,
        due=due,
        settled=tuple(self._ledger.of(member).cursors),
      ),
    )
    self._tell_cancelled(member, clock)
    self._published.catch_up(member)
    self._report(member, 'joined')

  def _warn_if_ahead(self, member: members_lib.Member, held: tuple[messages.Held, ...]) -> None:
    """Prints a line if a restore or a repair of the log has undone a version of the learner."""
    for p, (own, here) in enumerate(zip(held, self._published.fragments)):
      if own.version > here.version:
        self._out.say(
          f'{member.learner} holds version {own.version} of fragment {p}, this run is at '
          f'{here.version}: a restore or a repair has undone the versions between. The learner is '
          'sent the fragments of this run, and its tokens from before do not count.'
        )
        return

  def _tell_cancelled(self, member: members_lib.Member, clock: int) -> None:
    for p, fragment in enumerate(self._published.fragments):
      t = self._schedule.last_due(p, self._pace.opening.last)  # opened or skipped
      if t > clock and t != fragment.last_sync and t not in self._syncs.open:
        self._syncs.send_verdict(member, t, p, messages.CANCELLED)

  def _caught_up(self, member: members_lib.Member) -> None:
    """Counts a learner that now holds published values only, and pulls for the open syncs."""
    self._pace.enter(member)
    self._syncs.enter(member)

  # --- Reports of a member ------------------------------------------------------------------------

  def progress(self, now_ns: int, member: members_lib.Member, progress: messages.Progress) -> None:
    account = self._ledger.of(member)
    new_steps = max(0, progress.steps - account.steps)
    account.train(progress.steps, progress.tokens)
    if progress.step_ns:
      member.step_ns.add(progress.step_ns)
    member.loss = progress.loss
    self._links.reported(member, progress.tokens)
    self._pace.report(now_ns, member, progress.clock, account.steps, new_steps)

  def heartbeat(self, member: members_lib.Member, heartbeat: messages.Heartbeat) -> None:
    self._out.send(member.session, messages.Heartbeat())
    before, member.doing, idle_ns = member.doing, heartbeat.doing, heartbeat.idle_ns
    if not member.doing:
      return
    self._out.report(facts.NoStep(learner=member.learner, doing=member.doing, idle_ns=idle_ns))
    if member.doing not in (before, messages.COMPILING):
      total, live = self._config.total_steps, self._members.live()
      train = [m for m in live if not m.doing and m.claimed < total and self._ledger.of(m).steps]
      goes_on = train and self._config.lag is None  # in lock step they wait for this one
      others = f' Other learners that train on: {len(train)}.' if goes_on else ''
      self._out.say(
        f'{member.learner} on {member.host} has made no step for {idle_ns // SECOND_NS} s: it '
        f'{messages.DOING[member.doing]}. Its log has the calls.{others}'
      )

  def say_closing(self, now_ns: int, linger_ns: int | None) -> None:
    """Prints for whom the end of the run waits. `linger_ns`: until when it waits for learners to
    leave; None: not every sync is over."""
    merged, until_ns = linger_ns is not None, linger_ns or 0
    names = {name for name, member in self._members.by_id.items() if merged and not member.left}
    left = self._pace.last - self._pace.opening.last  # closing syncs that have not opened
    for sync in self._syncs.open.values():
      if self._config.closing(sync.t):
        rounds_ns = -(-left // self._config.in_flight) * self._config.lease_ns
        names, until_ns = names | sync.waiting, max(until_ns, sync.close_ns + rounds_ns)
    closing = merged, tuple(sorted(names))
    before, self._closing = self._closing, closing
    if not names:
      return
    most_ns = max(0, until_ns - now_ns)
    self._out.report(facts.Closing(learners=closing[1], merged=merged, at_most_ns=most_ns))
    if closing != before:
      doing = {name: messages.DOING.get(self._members.by_id[name].doing) for name in closing[1]}
      who = ', '.join(f'{name} (it {does})' if does else name for name, does in doing.items())
      what = 'the run closes: its last syncs wait'
      if merged:
        what = 'the run is over: the syncer waits'
      self._out.say(f'{what} for {who}, at most {-(-most_ns // SECOND_NS)} s more.')

  def adopted(self, now_ns: int, member: members_lib.Member, adopted: messages.Adopted) -> None:
    if not adopted.matched:
      self._repair(now_ns, member, adopted)
      return
    self._syncs.adopted(now_ns, member, adopted)
    was_due = member.copies[adopted.fragment].due
    self._published.adopted(member, adopted)
    if was_due and member.caught_up:
      self._caught_up(member)

  def _repair(self, now_ns: int, member: members_lib.Member, adopted: messages.Adopted) -> None:
    """Sends the fragment whole, at most once per heartbeat: `sweep` sends what is wanted again."""
    self.repaired += 1
    copy = member.copies[adopted.fragment]
    copy.repaired, copy.differs = True, copy.repaired
    if copy.differs:
      return
    self._out.notices.say(
      now_ns,
      f'repair {member.learner}',
      f'{member.learner}: published fragment {adopted.fragment} differs from version '
      f'{adopted.version}; sending it whole.',
    )
    self._published.replace(member, adopted.fragment)

  def implausible(self, now_ns: int, member: members_lib.Member, fault: str) -> None:
    """A message that no learner of this run could send: closes the session and counts a strike."""
    self._say_implausible(now_ns, member.learner, member.host, fault)
    if member.joined and self._screening.add_strike(member, fault):
      self.quarantine(member)
    elif member.live:
      self._close(member, f'implausible: {fault}')

  def _say_implausible(self, now_ns: int, learner: str, host: str, fault: str) -> None:
    self._out.notices.say(
      now_ns,
      f'implausible {learner}',
      f'Learner {learner} on {host} sent a message that no learner of this run sends: {fault}. '
      'Its session is closed and nothing of the run has changed.',
    )

  # --- Out ----------------------------------------------------------------------------------------

  def lose(self, session: int, reason: str) -> None:
    """Removes a closed session and its learner from every part; the other learners continue."""
    self._proved.pop(session, None)
    self._offered.pop(session, None)
    self._waiting_room.pop(session, None)
    self._told_to_wait.discard(session)
    member = self._members.release(session)
    if member is None:
      return
    self._pace.drop_learner(member.learner)
    self._syncs.drop_learner(member.learner)
    self.report_progress(member)
    self._report(member, 'lost', reason=reason)

  def leave(self, member: members_lib.Member, reason: str, finished: bool) -> None:
    """Ends the learner's part in the run and closes its account."""
    self._close(member, f'left: {reason}', 'left')
    member.left = True
    self._shards.give_back(member.learner)
    self._ledger.of(member).close(Reason.END_OF_RUN if finished else Reason.LEFT)

  def sweep(self, now_ns: int) -> None:
    """Loses members whose lease is over (a frozen process that wakes rejoins on a new session),
    and does what waited for this heartbeat."""
    for member in self._members.expired(now_ns):
      self._close(member, 'lease expired')
    self._pace.measure(now_ns)
    for member in self._members.live():
      for fragment, copy in enumerate(member.copies):
        copy.repaired, copy.differs = copy.differs, False
        if copy.repaired and member.joined:
          self._published.replace(member, fragment)

  def quarantine(self, member: members_lib.Member) -> None:
    """Closes the member's session; a disconnected process is refused when it rejoins."""
    refused = screening_lib.quarantine(member)
    self._out.say(refused.text)
    if member.live:
      self._out.send(member.session, refused)
      self._close(member, f'quarantined: {member.fault}', 'QUARANTINED')

  def _close(self, member: members_lib.Member, reason: str, sent_reason: str = '') -> None:
    """Loses a member whose session is still open; `sent_reason`: that of the close, if another."""
    session = member.session
    self.lose(session, reason)
    self._out.close(session, sent_reason or reason)

  def _report(self, member: members_lib.Member, state: str, **values: str) -> None:
    self._out.report(
      facts.Member(learner=member.learner, state=state, incarnation=member.incarnation, **values)
    )

  def report_progress(self, member: members_lib.Member) -> None:
    """Reports the steps since the last report."""
    steps, tokens = self._ledger.trained(member.learner)
    if steps <= member.recorded_steps:
      return
    member.recorded_steps = steps
    self._out.report(
      facts.Progress(
        learner=member.learner,
        clock=member.claimed,
        steps=steps,
        tokens=tokens,
        loss=member.loss,
        step_ns=member.inner_step_ns,
      )
    )

  def check(self) -> None:
    """Asserts that only members wait, and that no session is both offered and admitted."""
    members = self._members.by_session
    for session, member in members.items():
      assert member.session == session, (session, member)
      assert not self._members.quarantined(member), member
    assert self._waiting_room.keys() <= members.keys(), (self._waiting_room, members)
    assert not self._offered.keys() & members.keys(), (self._offered, members)
