"""The syncer: gathers pseudo-gradients, has them merged, publishes the result.

The life of a sync (docs/protocol.md draws it from SYNC_STATES)::

    due --K live learners reached t, a slot is free--> gathering
    gathering --quorum and grace over, or all answered--> merging
    gathering --all answered, quorum impossible--> cancelled
    merging --outer step done--> published
    merging --result not finite--> cancelled

What may not happen, and why:
* No two syncs of one fragment are in flight: the second's pseudo-gradients would be measured from a
  value that the first is about to replace.
* A payload counts once. Its range of the learner's token line must not overlap what was settled
  before (ledger.py), whatever was repeated, delayed or resent.
* Nothing a session says before Joined touches the run, and nothing a replaced process says ever.
* The versions of a fragment are 0, 1, 2, ...: the outer steps that the ledger knows.

A payload that was delivered but not merged when its learner's stream closed is dropped without a
verdict: if the process comes back it sends those tokens again, if another takes its place or the run
ends they are settled as lost.
"""

import copy
import dataclasses
from typing import Any

from diloco_jax.protocol import actions
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import events
from diloco_jax.protocol import grace as grace_lib
from diloco_jax.protocol import ledger as ledger_lib
from diloco_jax.protocol import members as members_lib
from diloco_jax.protocol import messages
from diloco_jax.protocol import quorum as quorum_lib
from diloco_jax.protocol import schedule as schedule_lib

Reason = messages.Reason

SYNC_STATES = (
  ('due', 'gathering', 'K live learners have reached t and fewer than tau syncs are in flight'),
  ('gathering', 'merging', 'K payloads and the grace window is over, or all have answered'),
  ('gathering', 'cancelled', 'all have answered and the quorum cannot be reached'),
  ('merging', 'published', 'the outer step is done'),
  ('merging', 'cancelled', 'the result is not finite'),
)

CANCELLED = 'cancelled'


@dataclasses.dataclass(slots=True)
class _Offered:
  """A session that has been offered an incarnation and holds nothing yet."""

  join: messages.Join
  incarnation: int


class SyncerMachine:
  """The syncer's half of the protocol (see the top of this file)."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    agreement: str,
    digests: tuple[int, ...],
    payload_bytes: tuple[int, ...],
  ):
    """Starts a run at version 0.

    Args:
      config: the numbers of the run.
      agreement: what every learner must share (agreement.encode).
      digests: of each fragment's published value, version 0.
      payload_bytes: size of each fragment's encoded pseudo-gradient.
    """
    self._config = config
    self._schedule = schedule_lib.Schedule(config)
    self._agreement = agreement
    self._payload_bytes = payload_bytes
    self._members = members_lib.Members(config)
    self._offered: dict[int, _Offered] = {}
    self._waiting_room: dict[int, tuple[messages.Held, ...]] = {}  # session: what it holds
    self._started = False
    self._start_ns: int | None = None
    self._ledger = ledger_lib.Ledger(config.fragments)
    self._grace = grace_lib.Grace()
    self._versions = [0] * config.fragments
    self._digests = list(digests)
    self._last_sync = [0] * config.fragments
    self._next = self._schedule.next(0)
    self._opened = 0
    self._gathers: dict[int, quorum_lib.Gather] = {}
    self._contributors: set[str] = set()  # caught-up live learners
    self._ready: set[str] = set()  # contributors whose step has reached self._next
    self._reads: set[int] = set()  # fragments being read whole
    self._merge_started: dict[int, tuple[int, int]] = {}  # fragment: version, when
    self._counts = {'synced': 0, 'cancelled': 0, 'repaired': 0, 'skipped': 0}
    self._unsaved = 0
    self._saving = False
    self._last_save = False  # of this process: begun after the books were closed
    self._stopping = ''
    self._finished = False
    self._exiting = False
    self._exited = False
    self._linger_ns: int | None = None
    self._sweep_ns = 0
    self._out: list[actions.Action] = []

  # --- The one entry ------------------------------------------------------------------------------

  def handle(self, now_ns: int, event: events.Event) -> list[actions.Action]:
    """Takes one event at time `now_ns` and returns what is to be done, in order."""
    self._out = []
    self._dispatch(now_ns, event)
    if now_ns >= self._sweep_ns and not self._exited:
      self._sweep(now_ns)
    self._advance(now_ns)
    return self._out

  @property
  def deadline_ns(self) -> int | None:
    """When a Wake is wanted."""
    if self._exiting:
      return None if self._exited else self._sweep_ns
    times = [] if self._holds_back else [
      g.deadline_ns for g in self._gathers.values() if g.deadline_ns is not None
    ]
    if self._linger_ns is not None:
      times.append(self._linger_ns)
    if self._waiting_room:
      times.append(self._start_ns)
    return min([self._sweep_ns, *times])

  @property
  def clock(self) -> int:
    """The last sync that was opened."""
    return self._opened

  def _dispatch(self, now_ns: int, event: events.Event) -> None:
    match event:
      case events.Received(session=session, message=message, handle=handle):
        self._receive(now_ns, session, message, handle)
      case events.Disconnected(session=session, reason=reason):
        self._disconnect(session, reason)
      case events.MergeDone():
        self._merged(now_ns, event)
      case events.FragmentRead():
        self._publish_whole(event)
      case events.SaveDone():
        self._saved(event)
      case events.Stop(reason=reason):
        self._stopping = self._stopping or reason
      case events.Connected() | events.Wake():
        pass
      case _:
        raise TypeError(f'not an event of a syncer: {event}')

  def _do(self, action: actions.Action) -> None:
    self._out.append(action)

  def _send(self, session: int, message: messages.FromSyncer, handle: int | None = None) -> None:
    self._do(actions.Send(session=session, message=message, handle=handle))

  # --- What learners say --------------------------------------------------------------------------

  def _receive(self, now_ns: int, session: int, message: messages.Message, handle: int | None):
    member = self._members.by_session.get(session)
    if member is not None:
      member.heard_ns = now_ns
    match message:
      case messages.Join():
        self._join(now_ns, session, message)
      case messages.Confirm():
        self._confirm(now_ns, session, message)
      case _ if member is None or self._exiting or self._impossible(member, message):
        # It speaks for nobody (replaced, timed out, never joined), it makes no sense, or the books
        # are closed and what comes now is for the next syncer.
        if handle is not None:
          self._do(actions.Drop(handle=handle))
        self._do(actions.Close(session=session, reason='not a member, or not a possible message'))
      case messages.Progress():
        self._progress(member, message)
      case messages.Contribution():
        self._contribution(now_ns, member, message, handle)
      case messages.Decline():
        self._decline(member, message)
      case messages.Adopted():
        self._adopted(now_ns, member, message)
      case messages.Heartbeat():
        self._send(session, messages.Heartbeat())
      case messages.Leave(reason=reason):
        self._leave(member, reason)
      case _:
        raise TypeError(f'not a message of a learner: {message}')

  def _impossible(self, member: members_lib.Member, message: messages.FromLearner) -> bool:
    """Whether no learner of this run would say this: nothing about fragments before Joined, nothing
    about fragments that do not exist, no tokens that run backwards."""
    if isinstance(message, messages.Heartbeat | messages.Leave):
      return False
    if not member.sent:
      return True
    if isinstance(message, messages.Contribution) and (
      message.steps < 1 or message.tokens_from > message.tokens_to
    ):
      return True
    return getattr(message, 'fragment', 0) >= self._config.fragments

  def _join(self, now_ns: int, session: int, join: messages.Join) -> None:
    if session in self._members.by_session or self._exiting:
      return  # repeated on a session that is a member already, or too late
    refused = self._refusal(now_ns, join)
    if refused is not None:
      self._refuse(session, refused)
      return
    incarnation = self._members.offer(join.learner, join.nonce)
    self._offered[session] = _Offered(join=join, incarnation=incarnation)
    self._send(session, messages.Offer(incarnation=incarnation))

  def _refuse(self, session: int, refused: messages.Refused) -> None:
    self._send(session, refused)
    self._do(actions.Close(session=session, reason=refused.code))

  def _refusal(self, now_ns: int, join: messages.Join) -> messages.Refused | None:
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
    difference = agreement_lib.refusal(join.agreement, self._agreement)
    if difference:
      return messages.Refused(code='MISMATCH', text=difference, retry_ns=None)
    return self._in_use(now_ns, join)

  def _in_use(self, now_ns: int, join: messages.Join) -> messages.Refused | None:
    if self._members.replaced(join.learner, join.nonce):
      return messages.Refused(
        code='FENCED',
        text=f'Another process has taken learner id "{join.learner}" since; this one was fenced and '
        'nothing it sends is merged. What was merged of its work is safe. Give it another '
        '--learner_id, or stop the other.',
        retry_ns=None,
      )
    holder = self._members.held_by_other(join.learner, join.nonce)
    if holder is None:
      return None
    heard_s = (now_ns - holder.heard_ns) / config_lib.SECOND_NS
    lease_s = self._config.lease_ns / config_lib.SECOND_NS
    return messages.Refused(
      code='ID_IN_USE',
      text=f'Learner id "{join.learner}" is in use by {holder.host} pid {holder.pid}, last heard '
      f'{heard_s:.1f} s ago, and goes on undisturbed. Use another --learner_id, or stop the other '
      f'and wait {lease_s:g} s.',
      retry_ns=self._members.lease_left_ns(holder, now_ns) + self._config.heartbeat_ns,
    )

  def _confirm(self, now_ns: int, session: int, confirm: messages.Confirm) -> None:
    offered = self._offered.pop(session, None)
    if session in self._members.by_session or self._exiting:
      return
    if offered is None or (
      (offered.join.nonce, offered.incarnation, self._config.fragments)
      != (confirm.nonce, confirm.incarnation, len(confirm.held))
    ):
      self._do(actions.Close(session=session, reason='confirmed what was not offered'))
      return
    join = offered.join
    # Another process may have taken the id between Offer and Confirm.
    refused = self._in_use(now_ns, join)
    if refused is None and self._members.offer(join.learner, join.nonce) != offered.incarnation:
      refused = messages.Refused(
        code='OFFER_PASSED', text='Another process took this id meanwhile.',
        retry_ns=self._config.heartbeat_ns,
      )
    if refused is not None:
      self._refuse(session, refused)
      return
    self._admit(now_ns, session, join, confirm)

  def _admit(
    self, now_ns: int, session: int, join: messages.Join, confirm: messages.Confirm
  ) -> None:
    """The id is this process's from here on."""
    before = self._members.by_id.get(join.learner)
    if before is not None and before.live:  # the same process on a new stream
      old = before.session
      self._lose(old, 'the process opened a new stream')
      self._do(actions.Close(session=old, reason='replaced by a new stream'))
    if before is not None and before.nonce != join.nonce:
      self._account(before).close(Reason.LOST_WITH_PROCESS)
    member = self._members.bind(
      join.learner, join.nonce, confirm.incarnation, session, now_ns
    )
    member.host, member.pid = join.host, join.pid
    member.step = max(member.step, confirm.step)
    account = self._account(member)
    account.closed = False  # a process that outlived the end of a run comes back to it
    account.train(confirm.steps, confirm.tokens)
    member.sent = []
    self._waiting_room[session] = confirm.held
    if self._start_ns is None:
      self._start_ns = now_ns + self._config.start_wait_ns

  def _welcome_all(self, now_ns: int) -> None:
    """A run begins with everybody who is expected, so that a quick starter does not train alone
    for the others to skip; once it has begun nobody waits here."""
    if not self._started and self._start_ns is not None:
      expected = len(self._members.by_session) >= self._config.learners
      self._started = expected or now_ns >= self._start_ns
    if not self._started:
      return
    for session, held in self._waiting_room.items():
      self._welcome(self._members.by_session[session], held)
    self._waiting_room.clear()

  def _welcome(self, member: members_lib.Member, learner_held: tuple[messages.Held, ...]) -> None:
    now_held = [messages.Held(version=v, digest=d) for v, d in zip(self._versions, self._digests)]
    member.sent = [
      held.version if held == ours else None for held, ours in zip(learner_held, now_held)
    ]
    member.due = {p for p, version in enumerate(member.sent) if version is None}
    clock = min(self._gathers) - 1 if self._gathers else self._opened
    member.step = max(member.step, clock)  # as the learner itself will do
    self._send(
      member.session,
      messages.Joined(
        incarnation=member.incarnation, step=clock, stream=member.stream,
        due=tuple(sorted(member.due)),
      ),
    )
    self._tell_cancelled(member, clock)
    for fragment in sorted(member.due):
      self._read(fragment)
    self._report_member(member, 'joined', due=len(member.due), step=clock)
    if self._finished:
      self._send(member.session, messages.Finish())
    elif member.caught_up:
      self._caught_up(member)

  def _tell_cancelled(self, member: members_lib.Member, clock: int) -> None:
    """Syncs after `clock` of which no version came: a lock-step learner shall not wait for them."""
    for fragment, last in enumerate(self._last_sync):
      sync = self._schedule.due(fragment, self._opened) - self._config.period
      if sync > clock and sync != last and sync not in self._gathers:
        self._settle(member.session, sync, fragment, CANCELLED)

  def _caught_up(self, member: members_lib.Member) -> None:
    """It holds published values only: it counts, and may still join the syncs that are open."""
    self._contributors.add(member.learner)
    self._mark_ready(member)
    for gather in self._gathers.values():
      if not gather.merging:
        self._pull(gather, member)

  def _account(self, member: members_lib.Member) -> ledger_lib.Account:
    return self._ledger.open(member.learner, member.incarnation)

  def _progress(self, member: members_lib.Member, progress: messages.Progress) -> None:
    self._account(member).train(progress.steps, progress.tokens)
    member.step = max(member.step, progress.step)
    member.finished = member.finished or progress.finished
    if progress.step_ns:
      member.step_ns.add(progress.step_ns)
    self._mark_ready(member)

  def _mark_ready(self, member: members_lib.Member) -> None:
    if member.caught_up and self._pace(member) >= self._next:
      self._ready.add(member.learner)

  def _pace(self, member: members_lib.Member) -> int:
    """A learner that has done its last step holds up none of the closing syncs."""
    return self._schedule.last if member.finished else member.step

  def _adopted(
    self, now_ns: int, member: members_lib.Member, adopted: messages.Adopted
  ) -> None:
    fragment = adopted.fragment
    if not adopted.matched:
      self._counts['repaired'] += 1
      self._do(actions.Say(
        text=f'{member.learner}: published fragment {fragment} differs from version '
        f'{adopted.version}; sending it whole.'
      ))
      self._resend_whole(member, fragment)
      return
    self._withdraw(member, fragment)
    self._account(member).overwrite(fragment, adopted.tokens)
    version, started_ns = self._merge_started.get(fragment, (None, 0))
    if version == adopted.version:
      self._grace.sync_ns.add(now_ns - started_ns)
      del self._merge_started[fragment]
    if fragment in member.due:
      member.due.discard(fragment)
      if member.caught_up:
        self._caught_up(member)

  def _withdraw(self, member: members_lib.Member, fragment: int) -> None:
    """A payload that waits in an open sync of a fragment which its learner has just had replaced
    (a repair) does not count: what it covers is overwritten."""
    for gather in self._gathers.values():
      if gather.fragment == fragment and not gather.merging:
        self._take_out(gather, member.learner)

  def _take_out(self, gather: quorum_lib.Gather, learner: str) -> None:
    if learner in gather.payloads:
      _, handle = gather.payloads.pop(learner)
      self._do(actions.Drop(handle=handle))
      if len(gather.payloads) < self._config.quorum:
        gather.quorum_at_ns = None

  def _resend_whole(self, member: members_lib.Member, fragment: int) -> None:
    member.sent[fragment] = None
    self._read(fragment)

  def _read(self, fragment: int) -> None:
    if fragment not in self._reads:
      self._reads.add(fragment)
      self._do(actions.ReadFragment(fragment=fragment))

  # --- Gather -------------------------------------------------------------------------------------

  def _contribution(
    self, now_ns: int, member: members_lib.Member, message: messages.Contribution, handle: int
  ) -> None:
    gather = self._gathers.get(message.sync)
    if gather is None and message.sync > self._last_sync[message.fragment]:
      # It was cancelled while this was under way: no version replaces the learner's anchor, so
      # these tokens stay unsettled and are sent again.
      self._do(actions.Drop(handle=handle))
      self._settle(member.session, message.sync, message.fragment, CANCELLED)
      return
    age = self._versions[message.fragment] - message.version
    reason = ''
    if message.payload.size_bytes != self._payload_bytes[message.fragment]:
      reason = Reason.BAD_VALUE
    elif gather is None or gather.merging or gather.fragment != message.fragment:
      reason = Reason.LATE
    elif member.learner in gather.payloads:
      self._do(actions.Drop(handle=handle))
      return  # repeated: the first one stands
    elif not 0 <= age <= self._config.max_staleness:
      reason = Reason.STALE
    elif message.tokens_from < self._account(member).cursors[message.fragment]:
      reason = Reason.DUPLICATE
    if reason:
      self._discard(member, message, handle, reason)
      if gather is not None:
        gather.waiting.discard(member.learner)
      # A range that starts before what is settled, from an anchor that is not about to be replaced,
      # would be refused again and again: only a fresh anchor puts it right.
      if reason == Reason.STALE or (reason != Reason.LATE and age == 0):
        self._resend_whole(member, message.fragment)
      return
    gather.waiting.discard(member.learner)
    gather.payloads[member.learner] = (message, handle)
    if len(gather.payloads) == self._config.quorum and gather.quorum_at_ns is None:
      self._quorum_reached(now_ns, gather)

  def _quorum_reached(self, now_ns: int, gather: quorum_lib.Gather) -> None:
    gather.quorum_at_ns = now_ns
    self._grace.quorum_ns.add(now_ns - gather.opened_ns)
    times = [m.step_ns.value for m in self._members.by_session.values() if m.step_ns.samples]
    gather.grace_ns = self._grace.window_ns(self._config, min(times, default=0))

  def _discard(
    self, member: members_lib.Member, message: messages.Contribution, handle: int, reason: str
  ) -> None:
    self._do(actions.Drop(handle=handle))
    self._account(member).settle(
      message.fragment, message.tokens_from, message.tokens_to, reason
    )
    self._settle(member.session, message.sync, message.fragment, reason)

  def _settle(self, session: int, sync: int, fragment: int, reason: str) -> None:
    self._send(
      session,
      messages.Settled(sync=sync, fragment=fragment, merged=not reason, reason=reason),
    )

  def _decline(self, member: members_lib.Member, message: messages.Decline) -> None:
    if message.reason == Reason.BAD_VALUE:
      account = self._account(member)
      start = account.cursors[message.fragment]
      account.settle(message.fragment, start, max(start, message.tokens_to), Reason.BAD_VALUE)
      self._do(actions.Say(
        text=f'{member.learner} on {member.host} has NaN or Inf in fragment {message.fragment}; '
        'refused before merging, its fragment is replaced. Check that host for faulty hardware.'
      ))
      self._resend_whole(member, message.fragment)
    gather = self._gathers.get(message.sync)
    if gather is not None:
      gather.waiting.discard(member.learner)

  def _pull(self, gather: quorum_lib.Gather, member: members_lib.Member) -> None:
    gather.asked.add(member.learner)
    gather.waiting.add(member.learner)
    self._send(member.session, messages.Pull(sync=gather.sync, fragment=gather.fragment))

  # --- Opening and closing syncs ------------------------------------------------------------------

  def _advance(self, now_ns: int) -> None:
    if self._exiting:
      return
    self._welcome_all(now_ns)
    if self._save_due and not self._holds_back:
      self._save()
    for gather in list(self._gathers.values()):
      if not self._holds_back:
        self._decide(now_ns, gather)
    while self._may_open():
      self._open(now_ns)
    self._end(now_ns)

  def _may_open(self) -> bool:
    if self._stopping or self._next > self._schedule.last:
      return False
    if len(self._ready) < self._config.quorum or len(self._gathers) >= self._config.in_flight:
      return False
    fragment = self._schedule.fragment(self._next)
    return all(gather.fragment != fragment for gather in self._gathers.values())

  def _open(self, now_ns: int) -> None:
    self._skip_overdue()
    sync = self._next
    gather = quorum_lib.Gather(
      sync=sync, fragment=self._schedule.fragment(sync), opened_ns=now_ns
    )
    self._gathers[sync] = gather
    self._opened = sync
    self._next = self._schedule.next(sync)
    self._ready.clear()
    for member in self._members.live():
      if member.caught_up:
        self._pull(gather, member)
        self._mark_ready(member)

  def _skip_overdue(self) -> None:
    """Syncs that are a whole period late are left out: catching up would sync a fragment again
    after a few inner steps, so H would shrink. Whole periods keep each fragment's turn."""
    steps = [m.step for m in self._members.by_session.values() if m.caught_up]
    periods = (quorum_lib.kth_step(steps, self._config.quorum) - self._next) // self._config.period
    if periods > 0:
      self._counts['skipped'] += periods * self._config.fragments
      self._next += periods * self._config.period
      self._tell_skipped()

  def _tell_skipped(self) -> None:
    """A lock-step learner shall not wait for a sync that was left out."""
    if self._config.lag is None:
      return
    for member in self._members.live():
      for fragment in range(self._config.fragments if member.sent else 0):
        due = self._schedule.due(fragment, self._next - 1)
        self._settle(member.session, due - self._config.period, fragment, CANCELLED)

  def _decide(self, now_ns: int, gather: quorum_lib.Gather) -> None:
    closing = gather.sync > self._config.total_steps
    verdict, why = quorum_lib.decide(
      gather, now_ns, self._config.quorum, len(self._contributors), closing
    )
    if verdict == 'merge':
      self._merge(now_ns, gather, why)
    elif verdict == 'cancel':
      self._cancel(gather, why)

  def _merge(self, now_ns: int, gather: quorum_lib.Gather, why: str) -> None:
    """Settles what is there, in the order of learner ids, and has it merged."""
    participants = []
    for learner, (message, handle) in sorted(gather.payloads.items()):
      member = self._members.by_id[learner]
      settled = self._account(member).settle(
        message.fragment, message.tokens_from, message.tokens_to, ''
      )
      assert settled, (learner, message)
      participants.append(actions.Participant(
        learner=learner, incarnation=member.incarnation, handle=handle,
        tokens=message.tokens_to - message.tokens_from, steps=message.steps,
      ))
    gather.merging, gather.participants = True, tuple(participants)
    version = self._versions[gather.fragment] + 1
    self._merge_started[gather.fragment] = (version, now_ns)
    self._do(actions.Merge(
      sync=gather.sync, fragment=gather.fragment, version=version,
      participants=tuple(participants),
    ))
    self._do(actions.Report(name='synced', values={
      'sync': gather.sync, 'fragment': gather.fragment, 'version': version,
      'participants': [p.learner for p in participants],
      'waited_ns': now_ns - gather.opened_ns, 'grace_ns': gather.grace_ns,
      'tokens': sum(p.tokens for p in participants), 'why': why,
      'staleness': max(
        self._versions[gather.fragment] - m.version for m, _ in gather.payloads.values()
      ),
    }))

  def _cancel(self, gather: quorum_lib.Gather, why: str) -> None:
    """No version comes of this sync. Payloads are dropped unsettled: they can be sent again.

    Everybody is told, also who was not asked: a lock-step learner may be waiting for the sync."""
    self._drop_payloads(gather)
    for member in self._members.live():
      if member.sent:
        self._settle(member.session, gather.sync, gather.fragment, CANCELLED)
    del self._gathers[gather.sync]
    self._counts['cancelled'] += 1
    self._do(actions.Report(name='cancelled', values={
      'sync': gather.sync, 'fragment': gather.fragment, 'why': why,
    }))

  def _drop_payloads(self, gather: quorum_lib.Gather) -> None:
    if not gather.merging:  # else they are the shell's already
      for _, handle in gather.payloads.values():
        self._do(actions.Drop(handle=handle))
      gather.payloads.clear()

  # --- Publish ------------------------------------------------------------------------------------

  def _merged(self, now_ns: int, done: events.MergeDone) -> None:
    gather = self._gathers[done.sync]
    if done.failed:
      self._merge_started.pop(done.fragment, None)
      for participant in gather.participants:
        self._ledger.accounts[participant.learner, participant.incarnation].revoke(
          participant.tokens, Reason.BAD_VALUE
        )
      self._do(actions.Say(text=f'Outer step {done.sync} refused: {done.failed}'))
      self._cancel(gather, done.failed)
      self._replace(gather)
      return
    del self._gathers[done.sync]
    fragment = done.fragment
    base = self._versions[fragment]
    self._versions[fragment] = base + 1
    self._digests[fragment] = done.digest
    self._last_sync[fragment] = done.sync
    self._counts['synced'] += 1
    self._unsaved += 1
    publish = self._publish_message(fragment, base, done.payload)
    for member in self._members.live():
      if member.learner in gather.payloads:
        self._settle(member.session, done.sync, fragment, '')
      if member.sent and member.sent[fragment] == base:
        self._send(member.session, publish, done.handle)
        member.sent[fragment] = base + 1
    self._do(actions.Drop(handle=done.handle))

  def _replace(self, gather: quorum_lib.Gather) -> None:
    """An outer step failed, its participants' tokens are discarded: they need a fresh anchor, or
    their next range would start among those tokens and be refused as a duplicate for ever."""
    for learner in sorted(gather.asked):
      member = self._members.by_id[learner]
      if member.live and member.sent:
        self._resend_whole(member, gather.fragment)

  def _publish_message(
    self, fragment: int, base: int | None, payload: messages.Payload
  ) -> messages.Publish:
    return messages.Publish(
      sync=self._last_sync[fragment], fragment=fragment, version=self._versions[fragment],
      base_version=base, digest=self._digests[fragment], payload=payload,
    )

  def _publish_whole(self, read: events.FragmentRead) -> None:
    """Sends the whole fragment to every learner that holds no version we know."""
    fragment = read.fragment
    self._reads.discard(fragment)
    assert (read.version, read.digest) == (self._versions[fragment], self._digests[fragment]), read
    publish = self._publish_message(fragment, None, read.payload)
    for member in self._members.live():
      if member.sent and member.sent[fragment] is None:
        self._send(member.session, publish, read.handle)
        member.sent[fragment] = read.version
    self._do(actions.Drop(handle=read.handle))

  # --- Leaving and ending -------------------------------------------------------------------------

  def _disconnect(self, session: int, reason: str) -> None:
    self._offered.pop(session, None)
    if session in self._members.by_session:
      self._lose(session, reason)

  def _lose(self, session: int, reason: str) -> None:
    """The learner is not live any more. Others go on without noticing."""
    member = self._members.release(session)
    self._waiting_room.pop(session, None)
    self._contributors.discard(member.learner)
    self._ready.discard(member.learner)
    for gather in self._gathers.values():
      gather.waiting.discard(member.learner)
      if not gather.merging:
        self._take_out(gather, member.learner)
    self._report_member(member, 'lost', reason=reason)

  def _leave(self, member: members_lib.Member, reason: str) -> None:
    """It contributes no more; its account is closed."""
    session = member.session
    self._lose(session, f'left: {reason}')
    member.left = True
    self._account(member).close(Reason.END_OF_RUN if self._finished else Reason.LEFT)
    self._do(actions.Close(session=session, reason='left'))

  def _sweep(self, now_ns: int) -> None:
    """Once per heartbeat: whose lease is over? Its stream is closed; a frozen process that wakes
    comes back on a new one."""
    self._sweep_ns = now_ns + self._config.heartbeat_ns
    for member in self._members.expired(now_ns):
      session = member.session
      self._lose(session, 'lease expired')
      self._do(actions.Close(session=session, reason='lease expired'))
    self._report_ledger()

  def _end(self, now_ns: int) -> None:
    """Whatever ends the process: every fragment closed, or it was asked to stop."""
    if self._exiting or any(gather.merging for gather in self._gathers.values()):
      return
    if not self._finished and self._next > self._schedule.last and not self._gathers:
      self._finished = True
      self._linger_ns = now_ns + self._config.lease_ns
      for member in self._members.live():
        self._send(member.session, messages.Finish())
    # Whoever is away but has not left is given a lease to come back and hear that it is over.
    gone = all(member.left for member in self._members.by_id.values())
    over = self._finished and (gone or now_ns >= self._linger_ns)
    if over:
      for account in self._ledger.accounts.values():
        account.close(Reason.END_OF_RUN)
    if over or self._stopping:
      self._exiting = True
      for gather in self._gathers.values():
        self._drop_payloads(gather)
      self._report_ledger()
      if not self._saving:
        self._save()

  @property
  def _save_due(self) -> bool:
    every = self._config.save_syncs
    return bool(every) and self._unsaved >= every and not self._saving

  @property
  def _holds_back(self) -> bool:
    """A save waits for the merges under way, and lets no other begin before it: a busy syncer would
    never be between two of them."""
    return self._save_due and any(gather.merging for gather in self._gathers.values())

  def _save(self) -> None:
    self._saving, self._unsaved, self._last_save = True, 0, self._exiting
    self._do(actions.Save(step=self._opened, snapshot=self.snapshot()))

  def _saved(self, done: events.SaveDone) -> None:
    self._saving = False
    if done.error:
      self._do(actions.Say(text=f'checkpoint of step {done.step} failed: {done.error}'))
    if not self._exiting:
      return
    if not self._last_save:
      self._save()
      return
    self._exited = True
    what = 'every fragment is closed' if self._finished else f'stopped: {self._stopping}'
    self._do(actions.Exit(
      code=0, text=f'syncer done at sync {self._opened}, {self._counts["synced"]} outer steps: {what}'
    ))

  # --- What others may see ------------------------------------------------------------------------

  def _report_member(self, member: members_lib.Member, state: str, **values: Any) -> None:
    self._do(actions.Report(name='member', values={
      'learner': member.learner, 'state': state, 'incarnation': member.incarnation, **values,
    }))

  def _report_ledger(self) -> None:
    self._do(actions.Report(name='ledger', values={
      **self._ledger.totals(), 'learners': self._ledger.learners(), **self._counts,
      'sync': self._opened,
    }))

  def snapshot(self) -> dict[str, Any]:
    """Everything that outlives a restart, as JSON types. Taken when no merge is under way."""
    return {
      'versions': list(self._versions), 'digests': list(self._digests),
      'last_sync': list(self._last_sync), 'next': self._next, 'opened': self._opened,
      'counts': dict(self._counts), 'finished': self._finished,
      'members': self._members.snapshot(), 'ledger': self._ledger.snapshot(),
    }

  @classmethod
  def restore(
    cls, config: config_lib.ProtocolConfig, agreement: str, payload_bytes: tuple[int, ...],
    snapshot: dict[str, Any],
  ) -> 'SyncerMachine':
    """A syncer that goes on from a snapshot. Nobody is live; learners come back by themselves."""
    snapshot = copy.deepcopy(snapshot)
    machine = cls(config, agreement, tuple(snapshot['digests']), payload_bytes)
    machine._versions = list(snapshot['versions'])
    machine._last_sync = list(snapshot['last_sync'])
    machine._started = True
    machine._next, machine._opened = snapshot['next'], snapshot['opened']
    machine._counts = dict(snapshot['counts'])
    machine._members = members_lib.Members.restore(config, snapshot['members'])
    machine._ledger = ledger_lib.Ledger.restore(config.fragments, snapshot['ledger'])
    return machine

  def check(self) -> None:
    """Asserts what must hold between any two events."""
    config = self._config
    assert len(self._gathers) <= config.in_flight, self._gathers
    open_fragments = [gather.fragment for gather in self._gathers.values()]
    assert len(set(open_fragments)) == len(open_fragments), open_fragments
    assert all(sync < self._next for sync in self._gathers), (self._gathers, self._next)
    live = {member.learner for member in self._members.by_session.values()}
    assert self._ready <= self._contributors <= live, (self._ready, self._contributors, live)
    for session, member in self._members.by_session.items():
      assert member.session == session, (session, member)
    for gather in self._gathers.values():
      if gather.merging:
        assert len(gather.participants) >= config.quorum, gather
      else:
        assert gather.payloads.keys() <= live, gather
        assert gather.waiting <= live, gather
    for account in self._ledger.accounts.values():
      account.check()
    merged = sum(account.merged for account in self._ledger.accounts.values())
    assert merged or not sum(self._versions), self._versions
