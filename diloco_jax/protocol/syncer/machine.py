"""The syncer: gathers pseudo-gradients, has them merged, publishes the result.

The syncer keeps these rules in the life of a sync (SYNC_STATES in sync.py):
* No two syncs of one fragment are announced or open: the second's pseudo-gradients would be
  measured from a value that the first is about to replace.
* A payload counts once: its range of the learner's tokens must not overlap a range that was settled
  before (ledger.py), whatever was repeated, delayed or sent again.
* No message of a session before Joined changes the run, and no message of a replaced process ever.
* The versions of a fragment are 0, 1, 2, ...: the outer steps that the ledger knows.

The syncer drops a payload without a verdict if its learner's session closes before the merge: when
the process reconnects it sends those tokens again; when another process takes the id, or the run
ends, they are settled as lost.

This file has `handle`, the decisions of a sync's life and the end of the run. It calls the parts
(protocol/syncer/__init__.py lists them); no part calls it.
"""

import copy
from typing import Any

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import join as join_lib
from diloco_jax.protocol.syncer import links as links_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.syncer import recovery
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.protocol.syncer import sync as sync_lib
from diloco_jax.protocol.syncer import syncs as syncs_lib

Reason = messages.Reason
OLDER_CHECKPOINTS_ARE_SAFE = 'the older ones are untouched and every outer step since is in the log'


class SyncerMachine:
  """The syncer's half of the protocol (see the top of this file)."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    agreement: str,
    run: str,
    digests: tuple[int, ...],
    payload_bytes: tuple[int, ...],
    links_measured: bool = False,
  ):
    """Starts a run at version 0.

    Args:
      config: the protocol's settings.
      agreement: what every learner must share (agreement.encode).
      run: the name of the run, for its whole life.
      digests: of each fragment's published value, version 0.
      payload_bytes: size of each fragment's encoded pseudo-gradient.
      links_measured: whether the time of a payload is that of its link (tempo.are_measured).
    """
    books = books_lib.Books(config, agreement, run)
    self._config = config
    self._run = run
    self._schedule = books.schedule
    self._tempo = books.tempo
    self._members = books.members
    self._ledger = books.ledger
    self._shards = books.shards
    self._out = books.out
    self._pace = pace_lib.Pace(books)
    self._screening = screening_lib.Screening(books)
    self._links = links_lib.Links(books, payload_bytes, links_measured)
    fragments = list(map(published_lib.Fragment, digests, payload_bytes))
    self._published = published_lib.Published(books, fragments, self._links)
    self._syncs = syncs_lib.Syncs(books, self._published, self._screening, self._links)
    self._membership = join_lib.Membership(
      books, self._pace, self._published, self._syncs, self._screening, self._links
    )
    self._saving = recovery.SyncerSaves(config.save_syncs, config.keep_every)
    self._skipped = 0
    self._stopping = ''
    self.finished = False  # Finish is sent: learners know that the run is over
    self._exiting = False
    self._exited = False
    self._linger_ns: int | None = None
    self._sweep_ns = 0

  # --- The one entry ------------------------------------------------------------------------------

  def handle(self, now_ns: int, event: events.Event) -> list[actions.Action]:
    """Handles one event at time `now_ns`; returns the actions in order."""
    if self._members.began_ns is None:
      self._members.began_ns = now_ns
    self._links.now_ns = now_ns
    self._dispatch(now_ns, event)
    if now_ns >= self._sweep_ns and not self._exited:
      self._sweep(now_ns)
    if not self._exiting:
      self._advance(now_ns)
    return self._out.take()

  @property
  def deadline_ns(self) -> int | None:
    """When the machine needs a Wake."""
    if self._exiting:
      return None if self._exited else self._sweep_ns
    pace_ns, membership_ns = self._pace.deadline_ns, self._membership.deadline_ns
    times = [self._sweep_ns, self._linger_ns, membership_ns, pace_ns]
    if not self._save_waits:
      times.append(self._syncs.deadline_ns)
    return min(time for time in times if time is not None)

  @property
  def clock(self) -> int:
    """The last sync that has opened."""
    return self._pace.opening.last

  def _dispatch(self, now_ns: int, event: events.Event) -> None:
    match event:
      case events.Received(session=session, payload_id=payload_id) if session in self._out.closing:
        self._out.drop(payload_id)  # received on a session that the syncer is closing
      case events.Received(session=session, message=message, payload_id=payload_id):
        self._receive(now_ns, session, message, payload_id)
      case events.Disconnected(session=session, reason=reason):
        self._out.closing.discard(session)
        self._membership.lose(session, reason)
      case events.MergeDone():
        self._merged(now_ns, event)
      case events.FragmentRead():
        self._published.send_whole(event, self._syncs.merging_from(event.fragment))
      case events.SaveDone():
        self._saved(now_ns, event)
      case events.Stop(reason=reason):
        self._stopping = self._stopping or reason
        ending = facts.State(state='ending', incarnation=0, clock=self.clock, reason=reason)
        self._out.report(ending)
      case events.Connected(session=session, learner=learner):
        self._membership.connected(session, learner)
      case events.Wake():
        pass
      case _:
        raise TypeError(f'not an event of a syncer: {event}')

  def _receive(
    self, now_ns: int, session: int, message: messages.Message, payload_id: int | None
  ) -> None:
    member = self._members.by_session.get(session)
    if member is not None:
      member.heard_ns = now_ns
    match message:
      case messages.Join() | messages.Confirm() if self._exiting:
        pass  # too late
      case messages.Join():
        self._membership.join(now_ns, session, message)
      case messages.Confirm():
        self._membership.confirm(now_ns, session, message)
      case _ if member is None or self._exiting:
        # The session has no member (replaced, timed out, never joined), or the ledger is closed and
        # the next syncer must handle the message.
        self._out.drop(payload_id)
        self._out.close(session, 'not a member')
      case _ if fault := self._membership.plausibility.fault(now_ns, member, message):
        self._out.drop(payload_id)
        self._membership.implausible(now_ns, member, fault)
      case messages.Progress():
        self._membership.progress(now_ns, member, message)
      case messages.Contribution():
        self._syncs.contribution(member, message, payload_id)
      case messages.Decline():
        self._syncs.decline(member, message)
        if message.reason == Reason.BAD_VALUE:
          if self._screening.strike(now_ns, member, message.fragment, 'NaN or Inf'):
            self._membership.quarantine(member)
      case messages.Adopted():
        self._membership.adopted(now_ns, member, message)
      case messages.Heartbeat():
        self._membership.heartbeat(member, message)
      case messages.Leave(reason=reason):
        self._membership.leave(member, reason, self.finished)
      case _:
        raise TypeError(f'not a message of a learner: {message}')

  def _advance(self, now_ns: int) -> None:
    """Takes every decision that the time and the state allow, whichever event came."""
    self._membership.welcome(now_ns, self.finished)
    if self._saving.due(self.clock) and not self._save_waits:
      self._save()
    for sync in list(self._syncs.open.values()):
      self._decide(now_ns, sync)
    self._pace.limit_wait(now_ns)
    while self._may_open() and not self._pace.awaits(now_ns):
      self._open(now_ns)
    while self._may_announce() and not self._pace.awaits(now_ns):
      t = self._pace.announce()
      self._syncs.announce(t, self._schedule.fragment(t))
    self._end(now_ns)

  def _retime(self) -> None:
    """Changes the period of the run if most links ask for it, but not at its end, nor before a sync
    has opened since the last change. The announced syncs are cancelled, since others have their
    turn now: the learners send the steps again."""
    if self._pace.opening.last == self._pace.retimed:
      return
    before = self._tempo.factor
    if self._stopping or self._config.closing(self._pace.announcing.t) or not self._links.retime():
      return
    if self._tempo.factor != before:
      self._syncs.skip(self._schedule.last + 1)
      self._pace.retime()
    self._out.report(self._tempo.fact(self._pace.opening.t))

  # --- The life of a sync -------------------------------------------------------------------------

  def _may_open(self) -> bool:
    if self._stopping or not self._pace.is_reached(self._pace.opening):
      return False
    fragments = [sync.fragment for sync in self._syncs.open.values()]
    free = len(fragments) < self._tempo.in_flight
    return free and self._schedule.fragment(self._pace.opening.t) not in fragments

  def _may_announce(self) -> bool:
    front = self._pace.announcing
    if self._stopping or not self._pace.is_reached(front):
      return False
    return self._syncs.may_announce(self._schedule.fragment(front.t))

  def _open(self, now_ns: int) -> None:
    self._skip_overdue()
    t = self._pace.open()
    sync = self._syncs.open_sync(now_ns, t, self._schedule.fragment(t))
    self._decide(now_ns, sync)  # all may have answered already

  def _skip_overdue(self) -> None:
    """Skips overdue syncs and cancels them for lock-step learners, which would wait for them."""
    periods = self._pace.skip_overdue()
    self._skipped += periods * self._tempo.factor * self._config.fragments
    self._syncs.skip(self._pace.opening.t)
    if not periods or self._config.lag is None:
      return
    for member in self._members.live():
      for fragment in range(self._config.fragments if member.joined else 0):
        due = self._schedule.last_due(fragment, self._pace.opening.t - 1)
        self._syncs.send_verdict(member, due, fragment, messages.CANCELLED)

  def _decide(self, now_ns: int, sync: sync_lib.Sync) -> None:
    if self._save_waits:
      return
    needed, live = self._config.needed(sync.t), len(self._pace.contributors)
    verdict, why = sync_lib.decide(sync, now_ns, needed, live)
    if verdict == 'merge':
      self._merge(now_ns, sync, why)
    elif verdict == 'cancel':
      self._syncs.cancel(sync, why)

  def _merge(self, now_ns: int, sync: sync_lib.Sync, why: str) -> None:
    self._syncs.merge(now_ns, sync)
    sync.live = tuple(member.learner for member in self._members.live())
    base = self._published.fragments[sync.fragment].version
    self._out.do(
      actions.Merge(
        sync=sync.t,
        fragment=sync.fragment,
        version=base + 1,
        participants=sync.participants,
        machine_state=self.state(),
        live=sync.live,
      )
    )
    sync.set_facts(now_ns, base, why)
    self._out.report(facts.Merging(**sync.facts))
    self._saving.decided(over=self._pace.over and self._syncs.decided)

  def _merged(self, now_ns: int, done: events.MergeDone) -> None:
    sync = self._syncs.end(now_ns, done)
    if not done.failed:
      self._saving.outer_step()
    for member in self._screening.after_merge(now_ns, sync, done):
      self._membership.quarantine(member)

  def ended(self, merge: actions.Merge, done: events.MergeDone) -> None:
    """Applies the end of an outer step that the last process had in progress (recovery.py)."""
    sync = sync_lib.Sync(merge.sync, merge.fragment, 0, 'merging')
    sync.participants, sync.live = merge.participants, merge.live
    self._syncs.open[merge.sync] = sync
    self._merged(0, done)
    self._out.take()

  # --- The end of the run -------------------------------------------------------------------------

  def _sweep(self, now_ns: int) -> None:
    """Once per heartbeat: ends leases, judges the period of the run, reports the ledger."""
    self._sweep_ns = now_ns + self._config.heartbeat_ns
    self._membership.sweep(now_ns)
    self._membership.say_closing(now_ns, self._linger_ns)
    if self._membership.started and not (self.closed or self._exiting):
      self._syncs.say_if_idle(now_ns, len(self._pace.contributors))
      self._retime()
    self._report_ledger()

  def _end(self, now_ns: int) -> None:
    """Ends the process once every fragment is closed, or the syncer was asked to stop."""
    if self._syncs.merging:
      return
    if self.closed and not self.finished and not self._stopping:
      self._close_run(now_ns)
    # A disconnected learner that has not left gets one lease to reconnect and receive Finish.
    all_left = all(member.left for member in self._members.by_id.values())
    over = self.finished and bool(all_left or self._stopping or now_ns >= self._linger_ns)
    if over:
      self._ledger.close_all(Reason.END_OF_RUN)
    if over or self._stopping:
      self._exit()

  @property
  def closed(self) -> bool:
    """Every sync is over."""
    return self._pace.over and not self._syncs.open

  def _close_run(self, now_ns: int) -> None:
    """Sends Finish once the end of the run is durable, because learners leave when they receive it.
    A syncer killed after this point restarts and only sends Finish again."""
    if self._saving.end_is_durable:
      self._finish(now_ns)
    elif not self._saving.running and now_ns >= self._saving.again_ns:
      self._save()

  def _finish(self, now_ns: int) -> None:
    self.finished = True
    self._linger_ns = now_ns + self._config.lease_ns
    for member in self._members.live():
      if member.joined:  # else the member receives it after its Joined
        self._out.send(member.session, messages.Finish())

  def _exit(self) -> None:
    """Begins the last save; the process ends after it."""
    self._exiting = True
    self._syncs.abandon()
    self._report_ledger()
    if not self._saving.running:
      self._save()

  @property
  def _save_waits(self) -> bool:
    """Whether a due save waits for the merges in progress: until it has begun, no other merge may
    begin (recovery.py)."""
    return self._saving.due(self.clock) and self._syncs.merging

  def _save(self) -> None:
    self._saving.begin(self.clock, closed=self.closed, last=self._exiting)
    self._out.do(actions.Save(clock=self.clock, machine_state=self.state()))

  def _saved(self, now_ns: int, done: events.SaveDone) -> None:
    last = self._saving.end(bool(done.error), now_ns + self._config.heartbeat_ns)
    if done.error and not last:
      self._say_save_failed(now_ns, done)
    if not self._exiting:
      return
    if not last:
      self._save()
      return
    self._exited = True
    what = 'every fragment is closed' if self.finished else f'stopped: {self._stopping}'
    if done.error:
      what += f'. Its last checkpoint failed: {done.error}; {OLDER_CHECKPOINTS_ARE_SAFE}'
    text = f'syncer done at sync {self.clock}, {self._syncs.synced} outer steps: {what}'
    self._out.do(actions.Exit(code=0, text=text))

  def _say_save_failed(self, now_ns: int, done: events.SaveDone) -> None:
    """Prints a line, with a pause, since a save that must succeed is tried again and again."""
    wait = ''
    if self.closed and not self._saving.end_is_durable:
      wait = ' Learners hear that the run is over once it can be written; it is tried again.'
    self._out.notices.say(
      now_ns,
      'save',
      f'checkpoint of step {done.clock} failed: {done.error}; {OLDER_CHECKPOINTS_ARE_SAFE}.{wait}',
    )

  # --- Reports, machine state, checks -------------------------------------------------------------

  def _report_ledger(self) -> None:
    for member in self._members.live():
      self._membership.report_progress(member)
    ledger = self._ledger.totals() | self._counts()
    self._out.report(facts.Ledger(**ledger, learners=self._ledger.learners(), sync=self.clock))

  def _counts(self) -> dict[str, int]:
    return {
      'synced': self._syncs.synced,
      'cancelled': self._syncs.cancelled,
      'repaired': self._membership.repaired,
      'skipped': self._skipped,
    }

  def state(self) -> dict[str, Any]:
    """The machine state, as JSON types: what must survive a restart. `merging` are the syncs whose
    outer steps are in progress (recovery.py), `undecided` the other open syncs."""
    syncs = self._syncs.open
    return {
      'run': self._run,
      'merging': [t for t, sync in syncs.items() if sync.merging],
      'undecided': [t for t, sync in syncs.items() if not sync.merging],
      **self._published.state(),
      'next': self._pace.opening.t,
      'opened': self._pace.opening.last,
      'counts': self._counts(),
      'finished': self.finished,
      'members': self._members.state(),
      'ledger': self._ledger.state(),
      'norms': [usual.state() for usual in self._screening.usual],
      'data': self._shards.state(),
    }

  @classmethod
  def restore(
    cls,
    config: config_lib.ProtocolConfig,
    agreement: str,
    payload_bytes: tuple[int, ...],
    machine_state: dict[str, Any],
    links_measured: bool = False,
  ) -> 'SyncerMachine':
    """A syncer that continues from a machine state. No learner is live; learners reconnect.

    Beside the items of `state()`, the machine state may hold recovery.UNSAVED."""
    machine = cls.load(config, agreement, payload_bytes, machine_state, links_measured)
    machine._pace.reopen(machine_state['undecided'])
    machine._saving.end_is_durable = machine._pace.over
    machine._saving.resume(machine_state.get(recovery.UNSAVED, 0), machine.clock)
    return machine

  @classmethod
  def load(
    cls,
    config: config_lib.ProtocolConfig,
    agreement: str,
    payload_bytes: tuple[int, ...],
    machine_state: dict[str, Any],
    links_measured: bool = False,
  ) -> 'SyncerMachine':
    """The machine of a machine state without its open syncs: recovery.py ends the merging ones,
    `restore` opens the undecided ones again."""
    machine_state = copy.deepcopy(machine_state)
    digests = tuple(machine_state['digests'])
    machine = cls(config, agreement, machine_state['run'], digests, payload_bytes, links_measured)
    machine._published.load(machine_state)
    machine._members.load(machine_state['members'])
    machine._pace.load(machine_state['next'], machine_state['opened'])
    machine._ledger.load(machine_state['ledger'])
    machine._screening.usual = [screening_lib.Usual.load(row) for row in machine_state['norms']]
    machine._shards.load(machine_state['data'])
    machine._membership.started = True
    counts = machine_state['counts']
    machine._syncs.synced = counts['synced']
    machine._syncs.cancelled = counts['cancelled']
    machine._membership.repaired, machine._skipped = counts['repaired'], counts['skipped']
    return machine

  def check(self) -> None:
    """Asserts what must hold between any two events."""
    self._membership.check()
    self._published.check()
    self._syncs.check()
    self._pace.check()
    self._ledger.check()
    self._shards.check()
    self._screening.check()
    syncs = self._syncs.open.keys()
    assert all(t < self._pace.opening.t for t in syncs), (syncs, self._pace.opening)
    merged = sum(account.merged for account in self._ledger.accounts.values())
    versions = self._published.state()['versions']
    assert merged or not any(versions), versions
