"""The learner: trains, answers pulls and adopts published versions, all at its step boundaries.

Two state machines run in parallel: the *connection* (connection.py), and the *training*, which
needs the connection only once, to start from the published fragments (docs/protocol.md draws it
from TRAINING_STATES).

Training never waits for the connection, except where the settings ask for it: in lock-step modes a
learner may be at most `max_lag` steps ahead of the oldest sync that it has not adopted.

At a step boundary the learner does this, in this order: use another shard, capture and encode the
pulled fragments that are due, adopt arrived versions, save if a save is due, start the next step.
The clock grows by one per inner step, and adopting the version of sync t sets it to max(clock, t),
so that learners of different speeds stay aligned.

A fragment is due for sync t `ahead` steps before t, so that the payload is at the syncer when the
sync opens; a learner that is further behind is pulled again then, and answers at its next boundary.
The payload covers all steps that the syncer has not settled (anchor.py). While a capture may still
be merged, the learner makes no other one of that fragment, because it would count the same tokens
again: the pull waits. So does a pull that comes before the learner has trained on the fragment; the
learner declines it if it may not step before.
"""

import collections
from typing import Any

from diloco_jax.protocol import action_list, actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import schedule as schedule_lib
from diloco_jax.protocol import states as protocol_states
from diloco_jax.protocol.learner import anchor as anchor_lib
from diloco_jax.protocol.learner import checkpoints, connection
from diloco_jax.protocol.learner import pulls as pulls_lib

TRAINING_STATES = (
  ('waiting', 'training', 'every due fragment is adopted'),
  ('training', 'trained', 'the clock reached T'),
  ('waiting', 'ended', 'refused for good, asked to stop, Finish, or alone for too long'),
  ('training', 'ended', 'asked to stop, fenced, Finish, or alone for too long'),
  ('trained', 'ended', 'Finish: every fragment is closed, or alone for too long'),
)

Identity = connection.Identity


class LearnerMachine:
  """The learner's half of the protocol (see the top of this file)."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    identity: Identity,
    digests: tuple[int, ...] | None,
  ):
    """Starts a process.

    Args:
      config: the protocol's settings.
      identity: the learner id and the process that holds it.
      digests: of its fragments at version 0 (its own initialisation); None: it was restored from a
        checkpoint and takes every fragment from the syncer.
    """
    self._config = config
    self._schedule = schedule_lib.Schedule(config)
    self._identity = identity
    self._out = action_list.ActionList()
    self._connection = connection.Connection(config, identity, self._out)
    self._missing_step = self._connection.missing_step
    # Where it reads, what its last Confirm claimed, and where it reads from the next boundary on.
    self._position: messages.ShardPosition | None = None
    self._claim: messages.ShardPosition | None = None
    self._next_position: messages.ShardPosition | None = None
    self._training = 'waiting'
    self.clock = 0
    self.steps = 0
    self.tokens = 0
    self._loss: float | None = None
    held = (
      [anchor_lib.UNKNOWN] * config.fragments
      if digests is None
      else [messages.Held(version=0, digest=digest) for digest in digests]
    )
    self._anchors = [
      anchor_lib.Anchor(h.version, h.digest, next_due=self._schedule.offsets[p])
      for p, h in enumerate(held)
    ]
    self._due: set[int] = set()
    self._pulls = pulls_lib.Pulls(config)
    self._unsettled: set[int] = set()  # syncs of this session that owe it a verdict
    self._leave_ns = 0  # a learner that was asked to end waits for these verdicts until then
    # Work in progress, in the order in which it will be answered, with the session it began on: the
    # session may break, and the same sync or version may come again, before the answer.
    self._encoding: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
    self._adopting: collections.deque[tuple[int, anchor_lib.Anchor]] = collections.deque()
    self._arrivals: list[tuple[messages.Publish, int]] = []
    self._running = self._exited = False
    self._reported_clock = -1  # the last one reported on this session
    self._ending = self._refused = ''
    self._saving = checkpoints.LearnerSaves(config, self._out)

  # --- The one entry ------------------------------------------------------------------------------

  def handle(self, now_ns: int, event: events.Event) -> list[actions.Action]:
    """Handles one event at time `now_ns`; returns the actions in order."""
    self._connection.alone.note_time(now_ns, self._running)
    self._dispatch(now_ns, event)
    if not self._exited:
      self._connection.keep(now_ns, self._leaving)
      self._missing_step.look(now_ns, self._running)
    if not self._running and not self._exited:
      self._boundary(now_ns)
    return self._out.take()

  @property
  def deadline_ns(self) -> int | None:
    """When the machine needs a Wake."""
    if self._exited:
      return None
    times = [self._connection.deadline_ns(self._leaving), self._missing_step.deadline_ns]
    if self._waits_for_verdicts:
      times.append(self._leave_ns)
    return min((time for time in times if time is not None), default=None)

  @property
  def _waits_for_verdicts(self) -> bool:
    """Whether only missing verdicts keep the learner from leaving."""
    return bool(self._ending and self._unsettled) and not (self._running or self._saving.running)

  @property
  def _leaving(self) -> bool:
    """Whether the process is about to end, so that it dials no more."""
    return bool(self._ending or self._refused)

  def _dispatch(self, now_ns: int, event: events.Event) -> None:
    match event:
      case events.StepDone():
        self._step_done(now_ns, event)
      case events.Examined():
        if self._running and (end := self._missing_step.examined(now_ns, event)):
          text = f'{self._summary()}; {end.text}' if self._ending else end.text
          self._exit(end.code, text, abandons=True)
      case events.Received(session=session, payload_id=payload_id) if (
        session != self._connection.session
      ):
        self._out.drop(payload_id)
      case events.Received(message=message, payload_id=payload_id):
        self._connection.heard(now_ns)
        self._receive(now_ns, message, payload_id)
      case events.Connected(session=session):
        if session == self._connection.session:
          self._connection.connected(now_ns)
      case events.Disconnected(session=session, reason=reason):
        if session == self._connection.session:
          self._disconnected(now_ns, reason)
      case events.Encoded():
        self._encoded(event)
      case events.AdoptDone():
        self._adopt_done(event)
      case events.SaveDone():
        self._saving.saved(now_ns, event)
        if self._refused:
          self._exit_refused()
      case events.Stop(reason=reason):
        self._begin_end(now_ns, reason)
        self._leave_ns = self._leave_ns or now_ns + self._config.drain_ns
      case events.Wake():
        pass
      case _:
        raise TypeError(f'not an event of a learner: {event}')

  # --- Connection ---------------------------------------------------------------------------------

  def _disconnected(self, now_ns: int, reason: str) -> None:
    """Discards the state of the old session; training continues."""
    joined = self._connection.joined
    self._reported_clock = -1
    self._pulls.forget()
    self._unsettled.clear()
    self._drop_arrivals()
    if self._connection.has_ended(reason):
      self._begin_end(now_ns, reason)
    stuck = bool(self._missing_step.doing)
    self._connection.disconnected(now_ns, reason, self._leaving, stuck)
    if joined:
      self._report_state('disconnected', reason)
    if not (self._running or self._leaving) and self._connection.alone.gives_up(now_ns, reason):
      self._begin_end(now_ns, 'no syncer')

  def _receive(self, now_ns: int, message: messages.Message, payload_id: int | None) -> None:
    match message:
      case messages.Offer():
        if self._connection.offered(message):
          self._confirm(now_ns, message.incarnation)
      case messages.Refused():
        self._refused = self._connection.refused(now_ns, message) or self._refused
        if self._refused:
          self._exit_refused()
      case messages.Joined() if self._connection.state == 'joining':
        self._joined(now_ns, message)
      case messages.Pull():
        self._pulls.add(message)
      case messages.Publish():
        self._arrivals.append((message, payload_id))
      case messages.Settled():
        self._connection.standing.settled(now_ns, message)
        self._settled(message)
      case messages.Finish():
        self._begin_end(now_ns, 'done')
      case messages.Heartbeat() | messages.Joined():
        pass  # a Joined is a repeat here
      case _:
        raise TypeError(f'not a message of a syncer: {message}')

  def _confirm(self, now_ns: int, incarnation: int) -> None:
    continues = incarnation == self._connection.incarnation
    self._claim = (self._next_position or self._position) if continues else None
    shard, cursor = self._claim or (None, 0)
    self._connection.confirm(
      now_ns,
      messages.Confirm(
        nonce=self._identity.nonce,
        incarnation=incarnation,
        clock=self.clock,
        steps=self.steps if continues else 0,
        tokens=self.tokens if continues else 0,
        held=tuple(messages.Held(version=a.version, digest=a.digest) for a in self._anchors),
        shard=shard,
        cursor=cursor,
      ),
    )

  def _joined(self, now_ns: int, joined: messages.Joined) -> None:
    if joined.incarnation != self._connection.incarnation:
      self._begin_incarnation()
    self._connection.welcomed(now_ns, joined.incarnation)
    if (joined.shard, joined.cursor) != self._claim:
      self._next_position = messages.ShardPosition(joined.shard, joined.cursor)
    self.clock = max(self.clock, joined.clock)
    self._due = set(joined.due)
    self._progress(0)  # the steps since Confirm, before a message that counts them
    for fragment, anchor in enumerate(self._anchors):
      anchor.settled(joined.settled[fragment])
      self._renew(fragment, anchor, joined.clock)
    self._report_state('joined')

  def _renew(self, fragment: int, anchor: anchor_lib.Anchor, clock: int) -> None:
    """A session begins."""
    due = self._schedule.due(fragment, clock)
    # Syncs may close out of order: this learner may hold the version of a sync after `clock`.
    anchor.next_due = due if fragment in self._due else max(anchor.next_due, due)
    if not anchor.sound and fragment not in self._due:
      self._report_adopted(fragment, anchor, anchor.version, matched=False)

  def _begin_incarnation(self) -> None:
    """Begins an incarnation: its steps and tokens count from 0."""
    self.steps = self.tokens = 0
    self._saving.begin_incarnation()
    for anchor in self._anchors:
      anchor.begin_incarnation()

  def _encoded(self, encoded: events.Encoded) -> None:
    """Sends the encoded capture, unless the session has changed since."""
    session, covers = self._encoding.popleft()
    assert (covers['sync'], covers['fragment']) == (encoded.sync, encoded.fragment), encoded
    if not self._connection.joined or session != self._connection.session:
      self._out.drop(encoded.payload_id)
    elif encoded.payload_id is None:
      self._unsettled.discard(encoded.sync)
      self._connection.send(
        messages.Decline(
          sync=encoded.sync,
          fragment=encoded.fragment,
          reason=messages.Reason.BAD_VALUE,
          tokens_to=covers['tokens_to'],
        )
      )
    else:
      message = messages.Contribution(**covers, payload=encoded.payload)
      self._connection.send(message, encoded.payload_id)
      self._out.drop(encoded.payload_id)

  def _settled(self, settled: messages.Settled) -> None:
    anchor = self._anchors[settled.fragment]
    self._unsettled.discard(settled.sync)
    if settled.reason in messages.kept(self._config.rebases):
      anchor.rejected(settled.sync, missed=settled.reason != messages.CANCELLED)
    if settled.reason == messages.CANCELLED:
      anchor.next_due = max(anchor.next_due, self._schedule.due(settled.fragment, settled.sync))
      self._pulls.ended(settled.fragment, settled.sync)

  # --- Training -----------------------------------------------------------------------------------

  def _train(self, state: str) -> None:
    self._training = protocol_states.move(TRAINING_STATES, self._training, state)

  def _step_done(self, now_ns: int, done: events.StepDone) -> None:
    self._running = False
    self._missing_step.stepped(now_ns, done.step_ns)
    if not done.tokens:  # given up: a loop of the user's own was left
      return
    self.clock += 1
    self.steps += 1
    self.tokens += done.tokens
    self._loss = done.loss
    self._position = self._position._replace(cursor=self._position.cursor + 1)
    self._progress(done.step_ns)

  def _progress(self, step_ns: int) -> None:
    if self._connection.joined:
      self._reported_clock = self.clock
      self._connection.send(
        messages.Progress(
          clock=self.clock,
          steps=self.steps,
          tokens=self.tokens,
          step_ns=step_ns,
          finished=self.clock >= self._config.total_steps,
          loss=self._loss,
        )
      )

  def _boundary(self, now_ns: int) -> None:
    """Between two steps: only here parameters are read or replaced."""
    if self._next_position is not None:
      self._use_shard(self._next_position)
    self._answer_pulls()
    for publish, payload_id in self._arrivals:
      self._adopt(publish, payload_id)
    self._arrivals.clear()
    if self._training == 'waiting' and self._position is not None and not self._due:
      self._train('training')
    if self._training == 'training' and self.clock >= self._config.total_steps:
      self._train('trained')
      self._report_state('trained')
    self._answer_pulls()  # an adoption may have moved the clock
    trains = self._training in ('training', 'trained')
    if trains and not (self._ending or self._refused) and self._saving.due(self.clock, self.steps):
      self._saving.begin(self.clock, self.steps, self.state())
    if self._ending:
      self._end(now_ns)
    elif self._may_step():
      self._running = True
      self._missing_step.asked(now_ns)
      self._out.do(actions.Step(clock=self.clock))
    elif self._reported_clock != self.clock:
      self._progress(0)  # no step will report it: Joined or an adoption moved the clock

  def _use_shard(self, position: messages.ShardPosition) -> None:
    """Reads from another position. The learner undoes its steps since its anchors, because another
    learner reads those batches."""
    self._out.do(
      actions.UseShard(
        shard=position.shard, cursor=position.cursor, rewind=self._position is not None
      )
    )
    self._position, self._next_position = position, None
    for anchor in self._anchors:
      anchor.rewind(self.steps, self.tokens)

  def _may_step(self) -> bool:
    if self._training != 'training' or self._ending:
      return False
    lag = self._config.lag
    return lag is None or self.clock < min(a.next_due for a in self._anchors) + lag

  def _adopt(self, publish: messages.Publish, payload_id: int) -> None:
    fragment, anchor = publish.fragment, self._anchors[publish.fragment]
    if fragment not in self._due and anchor.covers(publish):
      self._out.drop(payload_id)
      return
    whole = publish.base_version is None
    if not whole and publish.base_version != anchor.version:
      self._out.drop(payload_id)
      self._report_adopted(fragment, anchor, publish.version, matched=False)
      return
    max_misses = self._config.max_misses if self._config.rebases else None
    new, keep, merged = anchor.adopt(publish, self.steps, self.tokens, max_misses)
    reason = '' if keep else new.reason
    self._out.do(
      actions.Adopt(
        fragment=fragment,
        version=publish.version,
        payload_id=payload_id,
        whole=whole,
        keep=keep,
        merged=merged,
      )
    )
    self._out.report(
      facts.Adopted(
        fragment=fragment,
        version=publish.version,
        sync=publish.sync,
        clock=self.clock,
        steps_between=self.steps - anchor.adopted,
        whole=whole,
        staleness=publish.version - anchor.version - 1 if anchor.version >= 0 else 0,
        reason=reason,
      )
    )
    if anchor.capture is not None and new.capture is None:  # no verdict on it need follow
      self._unsettled.discard(anchor.capture.sync)
    new.next_due = max(anchor.next_due, self._schedule.due(fragment, publish.sync))
    self._anchors[fragment] = new
    self._adopting.append((self._connection.session, new))
    self._pulls.ended(fragment, publish.sync)
    self.clock = max(self.clock, publish.sync)
    self._due.discard(fragment)

  def _adopt_done(self, done: events.AdoptDone) -> None:
    """Compares the digest: learner and syncer must hold the same bits, or deltas would diverge."""
    session, anchor = self._adopting.popleft()
    assert anchor.version == done.version, (anchor, done)
    anchor.sound = done.digest == anchor.digest
    # An adoption of an older session needs no report after a new join, but wrong bits do.
    wrong = not anchor.sound and anchor is self._anchors[done.fragment]
    if self._connection.joined and (session == self._connection.session or wrong):
      self._report_adopted(done.fragment, anchor, anchor.version, anchor.sound)

  def _report_adopted(
    self, fragment: int, anchor: anchor_lib.Anchor, version: int, matched: bool
  ) -> None:
    self._connection.send(
      messages.Adopted(
        fragment=fragment,
        version=version,
        tokens=anchor.tokens,
        matched=matched,
        reason=anchor.reason if matched else '',
      )
    )
    if matched:
      anchor.reason = ''

  def _answer_pulls(self) -> None:
    """Captures, declines, or leaves for a later boundary."""
    ends = bool(self._ending) or self._training != 'training'
    for fragment, sync in self._pulls.due(self.clock, ends):
      self._answer(fragment, sync)

  def _answer(self, fragment: int, sync: int) -> None:
    anchor = self._anchors[fragment]
    if fragment in self._due or len(self._encoding) >= self._config.in_flight:
      return  # captures occupy the device: at most as many as syncs may be open
    if anchor.capture is not None:
      return  # the version with it, or its verdict, is on the way
    if not all(publish.keep for publish, _ in self._arrivals if publish.fragment == fragment):
      return  # its steps are about to be dropped
    if self.steps == anchor.steps:
      if self._may_step():
        return
      self._connection.send(
        messages.Decline(sync=sync, fragment=fragment, reason='empty', tokens_to=self.tokens)
      )
    else:
      self._unsettled.add(sync)
      covers = anchor.give(sync, self.steps, self.tokens)
      covers |= {'fragment': fragment, **self._position._asdict()}
      self._encoding.append((self._connection.session, covers))
      self._out.do(actions.Encode(sync=sync, fragment=fragment))
    self._pulls.answered(fragment)

  # --- Saving and ending --------------------------------------------------------------------------

  def _begin_end(self, now_ns: int, reason: str) -> None:
    if not self._ending:
      self._ending = reason
      self._missing_step.over_ns = now_ns
      self._report_state('ending', reason)

  def _drop_arrivals(self) -> None:
    for _, payload_id in self._arrivals:
      self._out.drop(payload_id)
    self._arrivals.clear()

  def _exit_refused(self) -> None:
    """After a final refusal: ends the process, but not during a save."""
    if not self._saving.running:
      self._exit(42, self._refused, abandons=bool(self._missing_step.doing))

  def _end(self, now_ns: int) -> None:
    """Saves, waits for verdicts, sends Leave and exits, each once. The syncer drops the payloads of
    a learner that leaves, so this wait saves the work since the anchor."""
    if self._saving.running:
      return
    if self._saving.unsaved(self.steps):
      self._saving.begin(self.clock, self.steps, self.state())
      return
    if self._waits_for_verdicts and now_ns < self._leave_ns:
      return
    self._exit(0, self._summary())

  def _summary(self) -> str:
    total = self._config.total_steps  # beyond it closing syncs move the clock
    where = f' at clock {min(self.clock, total)} of {total}' if self.clock else ''  # 0: unknown
    return f'{self._ending}{where}: {self.steps} steps, {self.tokens} tokens'

  def _exit(self, code: int, text: str, abandons: bool = False) -> None:
    """Ends the process; one that ends by itself leaves the run."""
    self._drop_arrivals()
    if self._ending and self._connection.joined:
      self._connection.send(messages.Leave(reason=self._ending))
      self._out.close(self._connection.session, self._ending)
    code, text = self._connection.alone.end or (code, text)
    self._train('ended')
    self._exited = True
    self._out.do(actions.Exit(code=code, text=text, abandons=abandons))

  # --- Reports, machine state, checks -------------------------------------------------------------

  def _report_state(self, state: str, reason: str = '') -> None:
    number = self._connection.incarnation
    self._out.report(facts.State(state=state, incarnation=number, clock=self.clock, reason=reason))

  def state(self) -> dict[str, Any]:
    """The machine state in a checkpoint, as JSON types."""
    return {
      'learner': self._identity.learner,
      'run': self._connection.run,
      'incarnation': self._connection.incarnation,
      'clock': self.clock,
      'steps': self.steps,
      'tokens': self.tokens,
      'versions': [anchor.version for anchor in self._anchors],
    }

  @classmethod
  def restore(
    cls, config: config_lib.ProtocolConfig, identity: Identity, state: dict[str, Any]
  ) -> 'LearnerMachine':
    """A new process after a checkpoint: it takes the clock and every fragment from the syncer and
    counts steps and tokens from 0 (they belong to its own incarnation).

    It does not take the clock of the checkpoint, which may be ahead of the syncer's: a lock-step
    learner would then wait for a sync that waits for its first step.
    """
    assert state['learner'] == identity.learner, (state['learner'], identity.learner)
    machine = cls(config, identity, None)
    machine._connection.run = state['run']
    return machine

  def check(self) -> None:
    """Asserts what must hold between any two events."""
    assert 0 <= self.steps <= self.tokens or not self.tokens, (self.steps, self.tokens)
    for fragment, anchor in enumerate(self._anchors):
      assert anchor.steps <= self.steps and anchor.tokens <= self.tokens, (fragment, anchor)
    assert not (self._running and self._arrivals and self._training == 'waiting')
