"""The way in and out: how a process comes to hold a learner id, and a member's life to its end.

Joining takes two phases, because a Join may be old or repeated::

    Join --refused--> closed, with the reason in words
    Join --Offer--> offered: it holds nothing yet
    offered --Confirm of what was offered, the id still free--> admitted: the id is its own
    admitted --the run has begun: Joined--> welcome, fragments are due to it
    welcome --every due fragment adopted--> caught up: it contributes and sets the pace
    any of them --session closed, lease over--> lost: it may come back (members.py)
    any of them --Leave--> left: its account is closed
    any of them --too many refused updates in a row--> quarantined: lost, and may not come back

What may not happen, and why:
* A live holder is never displaced by another process: a second process that was given the same id
  by mistake must not ruin the first.
* A process that was replaced never comes back under its id: what it holds was settled as lost, and
  its tokens would count twice.
* A process in quarantine never comes back (screening.py); another one may take its id.
* An offer binds nobody. Two processes may be offered the same incarnation; the first Confirm gets
  it, so the offer is looked at again before it counts.

A new run begins with everybody who is expected, or `start_wait_ns` after the first was admitted,
so that a quick starter does not train alone for the others to skip. Until then the admitted are in
the *waiting room*; once the run has begun only those stay there for whom there is no shard
(shards.py). A restored run has begun already.

A learner that enters hears of the syncs after its clock of which no version came: in lock-step
modes it would wait for them.

Losing a learner disturbs nobody: it is taken out of the pace and of the open syncs, that is all.
While a process goes on in its incarnation its account stays open, since it will send again what was
dropped; it is closed when another process takes the id, by Leave, or with the run.

Refusals are pure functions: the first reason that holds, with both sides and the remedy.
"""

import dataclasses

from diloco_jax.protocol import action_list, facts, messages
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import gathering as gathering_lib
from diloco_jax.protocol.syncer import ledger as ledger_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import moments_relay as moments_relay_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.syncer import screening
from diloco_jax.protocol.syncer import shards as shards_lib

Reason = messages.Reason


# --- Refusals -------------------------------------------------------------------------------------


def refuse_unfit(join: messages.Join, agreement: str) -> messages.Refused | None:
  """Why this process can never take part, if so: it speaks or trains something else."""
  if join.protocol != messages.PROTOCOL_VERSION:
    side = 'the syncer' if join.protocol > messages.PROTOCOL_VERSION else 'this learner'
    return messages.Refused(
      code='PROTOCOL',
      text=f'The syncer speaks protocol {messages.PROTOCOL_VERSION}, this learner '
      f'{join.protocol}. Nothing was sent. Upgrade {side}.',
      retry_ns=None,
    )
  if not members_lib.ID.fullmatch(join.learner):
    return messages.Refused(
      code='BAD_ID',
      text=f'{join.learner[:80]!r} is not a learner id: use up to 63 of a-z 0-9 _ -, a letter '
      'or digit first.',
      retry_ns=None,
    )
  difference = agreement_lib.refusal(join.agreement, agreement)
  if difference:
    return messages.Refused(code='MISMATCH', text=difference, retry_ns=None)
  return None


def refuse_if_held(
  join: messages.Join, members: members_lib.Members, config: config_lib.ProtocolConfig, now_ns: int
) -> messages.Refused | None:
  """Why the id is not this process's to take, if so: it is fenced or in quarantine, or another one
  lives."""
  if members.replaced(join.learner, join.nonce):
    return messages.Refused(
      code='FENCED',
      text=f'Another process has taken learner id "{join.learner}" since; this one was fenced and '
      'nothing it sends is merged. What was merged of its work is safe. Give it another '
      '--learner_id, or stop the other.',
      retry_ns=None,
    )
  member = members.by_id.get(join.learner)
  if member is not None and member.nonce == join.nonce and members.quarantined(member):
    return screening.quarantine(member)
  holder = members.held_by_other(join.learner, join.nonce)
  if holder is None:
    return None
  heard_s = (now_ns - holder.heard_ns) / config_lib.SECOND_NS
  lease_s = config.lease_ns / config_lib.SECOND_NS
  return messages.Refused(
    code='ID_IN_USE',
    text=f'Learner id "{join.learner}" is in use by {holder.host} pid {holder.pid}, last heard '
    f'{heard_s:.1f} s ago, and goes on undisturbed. Use another --learner_id, or stop the other '
    f'and wait {lease_s:g} s.',
    retry_ns=members.lease_left_ns(holder, now_ns) + config.heartbeat_ns,
  )


# --- A member's life ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Offered:
  """A session that has been offered an incarnation and holds nothing yet."""

  join: messages.Join
  incarnation: int


class Membership:
  """Brings members in and out of everything that knows them. Owns the offers, the waiting room and
  the count of repairs; binds ids in `members`, opens and closes their accounts."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    agreement: str,
    members: members_lib.Members,
    ledger: ledger_lib.Ledger,
    pace: pace_lib.Pace,
    published: published_lib.Published,
    gathering: gathering_lib.Gathering,
    shards: shards_lib.Shards,
    relay: moments_relay_lib.Relay,
    out: action_list.ActionList,
  ):
    self._config = config
    self._agreement = agreement
    self._members = members
    self._ledger = ledger
    self._pace = pace
    self._published = published
    self._gathering = gathering
    self._shards = shards
    self._relay = relay
    self._out = out
    self._offered: dict[int, _Offered] = {}
    self._waiting_room: dict[int, messages.Confirm] = {}  # by session
    self._told_to_wait: set[int] = set()  # sessions
    self._start_ns: int | None = None
    self.started = False  # set for a run that goes on from a snapshot
    self.brought_back: set[str] = set()  # with the run (recovery.BROUGHT_BACK)
    self.repaired = 0  # adopted values that differed from what was published

  @property
  def deadline_ns(self) -> int | None:
    """When the run begins whoever is there, if somebody waits for that."""
    return self._start_ns if self._waiting_room and not self.started else None

  # --- From Join to the waiting room --------------------------------------------------------------

  def join(self, now_ns: int, session: int, join: messages.Join) -> None:
    """Offers an incarnation, or says why not."""
    if session in self._members.by_session:
      return  # repeated by a member
    refused = refuse_unfit(join, self._agreement) or refuse_if_held(
      join, self._members, self._config, now_ns
    )
    if refused is not None:
      self._refuse(session, refused)
      return
    incarnation = self._members.offer(join.learner, join.nonce)
    self._offered[session] = _Offered(join, incarnation)
    self._out.send(session, messages.Offer(incarnation=incarnation))

  def confirm(self, now_ns: int, session: int, confirm: messages.Confirm) -> None:
    """The id is this process's from here on, if it is free still."""
    offered = self._offered.pop(session, None)
    if session in self._members.by_session:
      return  # repeated by a member
    if offered is None or (
      (offered.join.nonce, offered.incarnation, self._config.fragments)
      != (confirm.nonce, confirm.incarnation, len(confirm.held))
    ):
      self._out.close(session, 'confirmed what was not offered')
      return
    refused = self._recheck_offer(now_ns, offered)
    if refused is not None:
      self._refuse(session, refused)
      return
    before = self._members.by_id.get(offered.join.learner)
    if before is not None and before.live:  # the same process on a new session
      self._close(before, 'the process opened a new session', 'replaced by a new session')
    self._admit(now_ns, session, offered.join, confirm)

  def _recheck_offer(self, now_ns: int, offered: _Offered) -> messages.Refused | None:
    """Another process may have taken the id between Offer and Confirm."""
    join = offered.join
    refused = refuse_if_held(join, self._members, self._config, now_ns)
    if refused is None and self._members.offer(join.learner, join.nonce) != offered.incarnation:
      return messages.Refused(
        code='OFFER_PASSED',
        text='Another process took this id meanwhile.',
        retry_ns=self._config.heartbeat_ns,
      )
    return refused

  def _refuse(self, session: int, refused: messages.Refused) -> None:
    self._out.send(session, refused)
    self._out.close(session, refused.code)

  def _admit(
    self, now_ns: int, session: int, join: messages.Join, confirm: messages.Confirm
  ) -> None:
    """Nobody is live under the id. What the process before left unsettled is lost with it."""
    before = self._members.by_id.get(join.learner)
    if before is not None and before.nonce != join.nonce:
      self._ledger.of(before).close(Reason.LOST_WITH_PROCESS)
      self._shards.give_back(join.learner)
    member = self._members.bind(join.learner, join.nonce, confirm.incarnation, session, now_ns)
    member.host, member.pid = join.host, join.pid
    member.clock = max(member.clock, confirm.clock)
    member.held_versions = []
    account = self._ledger.of(member)
    account.closed = False  # a process that outlived the end of a run comes back to it
    account.train(confirm.steps, confirm.tokens)
    self._waiting_room[session] = confirm
    if self._start_ns is None:
      self._start_ns = now_ns + self._config.start_wait_ns

  # --- From the waiting room to the run -----------------------------------------------------------

  def welcome(self, now_ns: int, finished: bool) -> None:
    """Takes in the members that may enter now; `finished`: only to hear that the run is over."""
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
    lease = self._shards.assign(member.learner, claim, member.shard, self._live())
    if lease is None:
      self._wait(member, confirm)
      return
    self._welcome(now_ns, member, confirm.held, lease, finished)
    if finished:
      self._out.send(member.session, messages.Finish())
    elif member.caught_up:
      self._caught_up(member)

  def _live(self) -> set[str]:
    return {member.learner for member in self._members.by_session.values()}

  def _wait(self, member: members_lib.Member, confirm: messages.Confirm) -> None:
    """Back to the waiting room: there is no shard to read."""
    self._waiting_room[member.session] = confirm
    if member.session not in self._told_to_wait and self._shards.all_read(self._live()):
      self._told_to_wait.add(member.session)
      self._report(member, 'waits')
      self._out.say(
        f'{member.learner} waits: others read all {self._config.data_shards} shards, and '
        'text that two learners read would count twice. It enters once a session is free; a run '
        'with a larger data.shards takes more learners.'
      )

  def _welcome(
    self,
    now_ns: int,
    member: members_lib.Member,
    held: tuple[messages.Held, ...],
    lease: messages.ShardPosition,
    finished: bool,
  ) -> None:
    member.shard = lease.shard
    self._published.compare(member, held)
    self._warn_if_ahead(member, held)
    syncs = self._gathering.open
    clock = min(syncs) - 1 if syncs else self._pace.opened
    member.clock = max(member.clock, clock)  # as the learner itself will do
    due = tuple(sorted(member.due))
    member.awaited_transfer = 0
    if not finished and self._needs_moments(member):
      member.awaited_transfer = self._relay.promise(now_ns, member, clock)
    self._out.send(
      member.session,
      messages.Joined(
        incarnation=member.incarnation,
        clock=clock,
        shard=lease.shard,
        cursor=lease.cursor,
        due=due,
        donation=member.awaited_transfer,
      ),
    )
    self._tell_cancelled(member, clock)
    for fragment in due:
      self._published.read(fragment)
    self._report(member, 'joined')

  def _needs_moments(self, member: members_lib.Member) -> bool:
    """It has trained nothing yet, and was not brought back with the run, moments and all."""
    back = member.learner in self.brought_back
    self.brought_back.discard(member.learner)
    return self._ledger.of(member).trained == 0 and not back

  def _warn_if_ahead(self, member: members_lib.Member, held: tuple[messages.Held, ...]) -> None:
    """It saw what a restore, or a repair of the log, has gone back over."""
    for p, (own, here) in enumerate(zip(held, self._published.fragments)):
      if own.version > here.version:
        self._out.say(
          f'{member.learner} holds version {own.version} of fragment {p}, this run is at '
          f'{here.version}: it saw what a restore or a repair has gone back over. It is sent the '
          'fragments as they are here, and nothing of its own counts that was trained before.'
        )
        return

  def _tell_cancelled(self, member: members_lib.Member, clock: int) -> None:
    for p, fragment in enumerate(self._published.fragments):
      sync = self._pace.last_due(p)
      if sync > clock and sync != fragment.last_sync and sync not in self._gathering.open:
        self._gathering.settle(member, sync, p, messages.CANCELLED)

  def _caught_up(self, member: members_lib.Member) -> None:
    """It holds published values only: it counts, and may still join the syncs that are open."""
    self._pace.enter(member)
    self._gathering.enter(member)

  # --- What it tells of itself --------------------------------------------------------------------

  def progress(self, member: members_lib.Member, progress: messages.Progress) -> None:
    self._ledger.of(member).train(progress.steps, progress.tokens)
    member.clock = max(member.clock, progress.clock)
    member.finished = member.finished or progress.finished
    if progress.step_ns:
      member.step_ns.add(progress.step_ns)
    self._pace.mark(member)

  def adopted(self, now_ns: int, member: members_lib.Member, adopted: messages.Adopted) -> None:
    if not adopted.matched:
      self._repair(member, adopted)
      return
    self._gathering.adopted(now_ns, member, adopted)
    self._ledger.of(member).overwrite(adopted.fragment, adopted.tokens)
    member.anchor_tokens[adopted.fragment] = adopted.tokens
    self._published.adopted(member, adopted.fragment, adopted.version)
    if adopted.fragment in member.due:
      member.due.discard(adopted.fragment)
      if member.caught_up:
        self._caught_up(member)

  def recovered(self, member: members_lib.Member, recovered: messages.Recovered) -> None:
    """A joiner has its moments, whichever way; said again it is no news."""
    if recovered.transfer != member.awaited_transfer:
      return
    member.awaited_transfer = 0
    self._relay.done(recovered.transfer)
    self._report(member, 'recovered', by=recovered.way)
    if member.caught_up:
      self._caught_up(member)

  def _repair(self, member: members_lib.Member, adopted: messages.Adopted) -> None:
    self.repaired += 1
    self._out.say(
      f'{member.learner}: published fragment {adopted.fragment} differs from version '
      f'{adopted.version}; sending it whole.'
    )
    self._published.resend_whole(member, adopted.fragment)

  # --- Out ----------------------------------------------------------------------------------------

  def lose(self, session: int, reason: str) -> None:
    """The session is gone. Its learner is not live any more; others go on without noticing."""
    self._offered.pop(session, None)
    self._waiting_room.pop(session, None)
    self._told_to_wait.discard(session)
    member = self._members.release(session)
    if member is None:
      return
    self._pace.drop_learner(member.learner)
    self._gathering.drop_learner(member.learner)
    self._relay.drop_learner(member)
    self._report(member, 'lost', reason=reason)

  def leave(self, member: members_lib.Member, reason: str, finished: bool) -> None:
    """It contributes no more; its account is closed."""
    self._close(member, f'left: {reason}', 'left')
    member.left = True
    self._shards.give_back(member.learner)
    self._ledger.of(member).close(Reason.END_OF_RUN if finished else Reason.LEFT)

  def expire(self, now_ns: int) -> None:
    """Whose lease is over is lost; a frozen process that wakes comes back on a new session."""
    for member in self._members.expired(now_ns):
      self._close(member, 'lease expired', 'lease expired')

  def quarantine(self, member: members_lib.Member) -> None:
    """It is refused for good; if it is away it hears so when it comes back."""
    if member.live:
      self._out.send(member.session, screening.quarantine(member))
      self._close(member, 'quarantined', 'QUARANTINED')

  def _close(self, member: members_lib.Member, reason: str, told: str) -> None:
    """Loses a member whose session is open still; `told` is what it hears."""
    session = member.session
    self.lose(session, reason)
    self._out.close(session, told)

  def _report(self, member: members_lib.Member, state: str, **values: str) -> None:
    self._out.report(
      facts.Member(learner=member.learner, state=state, incarnation=member.incarnation, **values)
    )

  def check(self) -> None:
    """Asserts that only the admitted wait, and that no session is at two places on the way in."""
    members = self._members.by_session
    for session, member in members.items():
      assert member.session == session, (session, member)
      assert not self._members.quarantined(member), member
    assert self._waiting_room.keys() <= members.keys(), (self._waiting_room, members)
    assert not self._offered.keys() & members.keys(), (self._offered, members)
