"""The life of a member, from its Confirm to its end, as the syncer sees it::

    admitted --the run has begun: Joined--> welcome, fragments are due to it
    welcome --every due fragment adopted--> caught up: it contributes and sets the pace
    any of them --stream closed, lease over--> lost: it may come back (members.py)
    any of them --Leave--> left: its account is closed
    any of them --too many refused updates in a row--> quarantined: lost, and may not come back

Losing a learner disturbs nobody: it is taken out of the pace and of the open syncs, that is all.
While a process goes on in its incarnation its account stays open, since it will send again what was
dropped; it is closed when another process takes the id (join.py), by Leave, or with the run.

A learner that enters hears of the syncs after its clock of which no version came: in lock-step
modes it would wait for them.
"""

from diloco_jax.protocol import action_list, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import gathering as gathering_lib
from diloco_jax.protocol.syncer import join as join_lib
from diloco_jax.protocol.syncer import ledger as ledger_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import moments_relay as moments_relay_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.syncer import screening
from diloco_jax.protocol.syncer import shards as shards_lib

Reason = messages.Reason


class Membership:
  """Brings members in and out of everything that knows them. Owns the admission and the count of
  repairs."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    agreement: str,
    members: members_lib.Members,
    ledger: ledger_lib.Ledger,
    pace: pace_lib.Pace,
    published: published_lib.Published,
    gathering: gathering_lib.Gathering,
    streams: shards_lib.Streams,
    relay: moments_relay_lib.Relay,
    out: action_list.Outbox,
  ):
    self._config = config
    self._streams = streams
    self._members = members
    self._ledger = ledger
    self._pace = pace
    self._published = published
    self._gathering = gathering
    self._relay = relay
    self._out = out
    self.admission = join_lib.Admission(config, agreement, members, ledger, streams, out)
    self.brought_back: set[str] = set()  # with the run (recovery.BACK)
    self.repaired = 0  # adopted values that differed from what was published
    self._told_to_wait: set[int] = set()  # sessions

  # --- In -----------------------------------------------------------------------------------------

  def confirm(self, now_ns: int, session: int, confirm: messages.Confirm) -> None:
    join = self.admission.confirm(now_ns, session, confirm)
    if join is None:
      return
    before = self._members.by_id.get(join.learner)
    if before is not None and before.live:  # the same process on a new stream
      self._close(before, 'the process opened a new stream', 'replaced by a new stream')
    self.admission.admit(now_ns, session, join, confirm)

  def welcome(self, now_ns: int, finished: bool) -> None:
    """Takes in who may enter now; `finished`: only to hear that the run is over."""
    for member, confirm in self.admission.welcome(now_ns):
      lease = self._lease(member, confirm)
      if lease is None:
        self._wait(member, confirm)
        continue
      self._welcome(now_ns, member, confirm.held, lease, finished)
      if finished:
        self._out.send(member.session, messages.Finish())
      elif member.caught_up:
        self._caught_up(member)

  def _lease(self, member: members_lib.Member, confirm: messages.Confirm) -> messages.Lease | None:
    claim = None if confirm.stream is None else messages.Lease(confirm.stream, confirm.cursor)
    return self._streams.lease(member.learner, claim, member.stream, self._live())

  def _live(self) -> set[str]:
    return {member.learner for member in self._members.by_session.values()}

  def _wait(self, member: members_lib.Member, confirm: messages.Confirm) -> None:
    self.admission.wait(member.session, confirm)
    if member.session not in self._told_to_wait and self._streams.all_read(self._live()):
      self._told_to_wait.add(member.session)
      self._report(member, 'waits')
      self._out.say(
        f'{member.learner} waits: others read all {self._config.data_streams} data streams, and '
        'text that two learners read would count twice. It enters once a stream is free; a run '
        'with a larger data.streams takes more learners.'
      )

  def _welcome(
    self,
    now_ns: int,
    member: members_lib.Member,
    held: tuple[messages.Held, ...],
    lease: messages.Lease,
    finished: bool,
  ) -> None:
    member.stream = lease.stream
    self._published.compare(member, held)
    self._say_if_ahead(member, held)
    syncs = self._gathering.open
    clock = min(syncs) - 1 if syncs else self._pace.opened
    member.step = max(member.step, clock)  # as the learner itself will do
    due = tuple(sorted(member.due))
    member.awaits = 0
    if not finished and self._needs_moments(member):
      member.awaits = self._relay.promise(now_ns, member, clock)
    self._out.send(
      member.session,
      messages.Joined(
        incarnation=member.incarnation,
        step=clock,
        stream=lease.stream,
        cursor=lease.cursor,
        due=due,
        donation=member.awaits,
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

  def _say_if_ahead(self, member: members_lib.Member, held: tuple[messages.Held, ...]) -> None:
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
    member.step = max(member.step, progress.step)
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
    member.anchored[adopted.fragment] = adopted.tokens
    self._published.adopted(member, adopted.fragment, adopted.version)
    if adopted.fragment in member.due:
      member.due.discard(adopted.fragment)
      if member.caught_up:
        self._caught_up(member)

  def recovered(self, member: members_lib.Member, recovered: messages.Recovered) -> None:
    """A joiner has its moments, whichever way; said again it is no news."""
    if recovered.transfer != member.awaits:
      return
    member.awaits = 0
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
    self.admission.forget(session)
    self._told_to_wait.discard(session)
    member = self._members.release(session)
    if member is None:
      return
    self._pace.leave(member.learner)
    self._gathering.leave(member.learner)
    self._relay.leave(member)
    self._report(member, 'lost', reason=reason)

  def leave(self, member: members_lib.Member, reason: str, finished: bool) -> None:
    """It contributes no more; its account is closed."""
    self._close(member, f'left: {reason}', 'left')
    member.left = True
    self._streams.give_back(member.learner)
    self._ledger.of(member).close(Reason.END_OF_RUN if finished else Reason.LEFT)

  def expire(self, now_ns: int) -> None:
    """Whose lease is over is lost; a frozen process that wakes comes back on a new stream."""
    for member in self._members.expired(now_ns):
      self._close(member, 'lease expired', 'lease expired')

  def quarantine(self, member: members_lib.Member) -> None:
    """It is refused for good; if it is away it hears so when it comes back (join.py)."""
    if member.live:
      self._out.send(member.session, screening.quarantine(member))
      self._close(member, 'quarantined', 'QUARANTINED')

  def _close(self, member: members_lib.Member, reason: str, told: str) -> None:
    """Loses a member whose stream is open still; `told` is what it hears."""
    session = member.session
    self.lose(session, reason)
    self._out.close(session, told)

  def _report(self, member: members_lib.Member, state: str, **values: str) -> None:
    self._out.report(
      facts.Member(learner=member.learner, state=state, incarnation=member.incarnation, **values)
    )

  def check(self) -> None:
    for session, member in self._members.by_session.items():
      assert member.session == session, (session, member)
      assert not self._members.quarantined(member), member
    self.admission.check()
