"""Seeded bugs that the simulation must catch: a simulation is as good as its mutants.

A mutant is a patch of the production classes that lasts as long as a `with` block; production code
knows nothing of it. Each is a plausible bug, and names the invariants
(verification/checks/invariants) of which one must catch it within 1,000 seeds. A mutant that
survives shows a missing checker.

A mutant replaces whole functions instead of patching text, so that a change of the production code
is noticed here: a missing name is an error.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.learner import anchor as anchor_lib
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.learner import pulls as pulls_lib
from diloco_jax.protocol.syncer import join as join_lib
from diloco_jax.protocol.syncer import (
  ledger,
  members,
  pace,
  plausible,
  published,
  recovery,
  screening,
  shards,
  syncs,
  verdicts,
)
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import sync as sync_lib
from diloco_jax.storage import outer_log, wal
from diloco_jax.verification.sim import arrays, network, processes

Reason = messages.Reason
LearnerMachine, SyncerMachine = learner_machine.LearnerMachine, syncer_machine.SyncerMachine


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One seeded bug: `replace` are (owner, name, wrap: original -> replacement)."""

  name: str
  bug: str
  caught_by: tuple[str, ...]
  replace: tuple[tuple[Any, str, Callable[[Any], Any]], ...]

  @contextlib.contextmanager
  def applied(self) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
      for owner, name, wrap in self.replace:
        stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
      yield


MUTANTS: dict[str, Mutant] = {}


def mutant(bug: str, owner: Any, name: str, caught_by: str, also: tuple = ()) -> Callable:
  """Registers `wrap`, under its own name, as a mutant of owner.name (and of what `also` names)."""

  def register(wrap: Callable[[Any], Any]) -> Callable:
    key = wrap.__name__
    assert key not in MUTANTS, key
    MUTANTS[key] = Mutant(key, bug, tuple(caught_by.split()), ((owner, name, wrap), *also))
    return wrap

  return register


def _never_refuses(original: Any) -> Callable:
  """An account that reports every range as settled, so that a checker and not the machine's own
  assertion catches the mutant."""

  def settle(self, fragment, start, end, reason, gap):
    original(self, fragment, start, end, reason, gap)
    return True

  return settle


SETTLES = (ledger.Account, 'settle', _never_refuses)


# --- Contributions --------------------------------------------------------------------------------


@mutant(
  'The syncer counts a settled range again.',
  verdicts,
  'judge',
  'I7 I21 claim',
  also=(SETTLES, (shards.Shards, 'counts', lambda original: lambda *args: True)),
)
def no_dedup(original):
  def judge(message, name, sync, fragment, cursor, oldest):
    return original(message, name, sync, fragment, -1, oldest)

  return judge


@mutant('The syncer merges a payload with an anchor of any age.', verdicts, 'judge', 'I6')
def stale_base_merged(original):
  def judge(message, name, sync, fragment, cursor, oldest):
    return original(message, name, sync, fragment, cursor, 0)

  return judge


@mutant('The syncer merges payloads in the order of arrival.', syncs.Syncs, 'merge', 'I15')
def merge_in_arrival_order(original):
  def merge(self, now_ns, sync):
    with mock.patch.object(syncs, 'sorted', list, create=True):
      original(self, now_ns, sync)

  return merge


@mutant('The ledger does not record discarded tokens.', ledger.Account, 'settle', 'I7')
def discard_without_ledger(original):
  def settle(self, fragment, start, end, reason, gap):
    if reason:
      return True
    return original(self, fragment, start, end, reason, gap)

  return settle


@mutant(
  'A payload stays in its open sync when its tokens are overwritten.',
  syncs.Syncs,
  '_withdraw',
  'I7 claim',
  also=(SETTLES,),
)
def overwritten_payload_stays(original):
  return lambda self, member, fragment, upto: None


@mutant(
  'The syncer does not tell a learner that its contribution was merged.',
  syncs.Syncs,
  'send_verdict',
  'I7c',
)
def merged_payload_is_not_reported(original):
  def send_verdict(self, member, t, fragment, reason):
    if reason:
      original(self, member, t, fragment, reason)

  return send_verdict


# --- Rebase ---------------------------------------------------------------------------------------


@mutant(
  'A learner takes a capture as merged, whatever the syncer says.',
  anchor_lib.Anchor,
  'adopt',
  'I25',
)
def capture_is_always_merged(original):
  def adopt(self, publish, steps, tokens, max_misses):
    if self.capture is not None:
      publish = dataclasses.replace(publish, settled_to=self.capture.tokens)
    return original(self, publish, steps, tokens, max_misses)

  return adopt


@mutant(
  'A learner takes no capture as merged, whatever the syncer says.',
  anchor_lib.Anchor,
  'adopt',
  'I25',
)
def capture_is_never_merged(original):
  def adopt(self, publish, steps, tokens, max_misses):
    publish = dataclasses.replace(publish, settled_to=min(publish.settled_to, self.tokens))
    return original(self, publish, steps, tokens, max_misses)

  return adopt


@mutant(
  'A learner carries its steps on although the syncer refused its update.',
  anchor_lib.Anchor,
  'adopt',
  'I25',
)
def keep_is_ignored(original):
  def adopt(self, publish, steps, tokens, max_misses):
    return original(self, dataclasses.replace(publish, keep=True), steps, tokens, max_misses)

  return adopt


@mutant(
  'A whole fragment counts the tokens of an outer step in progress as settled.',
  syncs.Syncs,
  'merging_from',
  'I25',
)
def whole_counts_the_step_in_progress(original):
  return lambda self, fragment: {}


@mutant(
  'A learner drops a capture that is late before it knows what became of it.',
  anchor_lib.Anchor,
  'adopt',
  'I1b I25 L4a',
)
def undecided_capture_is_dropped(original):
  def adopt(self, publish, steps, tokens, max_misses):
    new, keep, merged = original(self, publish, steps, tokens, max_misses)
    new.capture = None
    return new, keep, merged

  return adopt


@mutant('The syncer keeps all late payloads.', syncs.Syncs, '_next', 'I5 I7c I11 L2a')
def late_payloads_are_not_counted(original):
  def _next(self, member, message):
    found = original(self, member, message)
    if found is None and not self._config.closing(message.sync):
      fragment = message.fragment
      return self.due.setdefault(fragment, sync_lib.Sync(t=0, fragment=fragment))
    return found

  return _next


@mutant('The verdict on a late payload names another sync.', sync_lib.Sync, 'given_for', 'I7c')
def late_verdict_names_another_sync(original):
  def given_for(self, learner):
    return self.t

  return given_for


@mutant(
  'A learner that undoes its steps keeps its capture.', anchor_lib.Anchor, 'rewind', 'I1b I25'
)
def rewound_capture_stays(original):
  def rewind(self, steps, tokens):
    capture = self.capture
    original(self, steps, tokens)
    self.capture = capture

  return rewind


@mutant(
  'The ledger settles a late payload although its learner keeps the tokens.',
  syncs.Syncs,
  '_reject',
  'I25 I7',
)
def late_tokens_are_settled(original):
  def _reject(self, member, message, payload_id, reason):
    original(self, member, message, payload_id, reason)
    if reason == Reason.LATE:
      self._withdraw(member, message.fragment, message.tokens_to)
      self._settle_tokens(member, message, reason)

  return _reject


@mutant(
  'The next syncer has forgotten which learners must drop their steps.',
  members.Members,
  'state',
  'I10 I16 I25',
)
def spoiled_is_not_saved(original):
  return lambda self: [{**row, 'spoiled': []} for row in original(self)]


@mutant('A learner gives a fragment before it is due.', pulls_lib.Pulls, '_given_at', 'I1b')
def given_too_early(original):
  return lambda self, t: original(self, t) - 1


@mutant('A learner gives a fragment only when the sync has opened.', pulls_lib.Pulls, 'due', 'L4a')
def given_when_asked(original):
  def due(self, clock, ends):
    return [one for one in original(self, clock, ends) if ends or one[0] in self._open]

  return due


@mutant('An announced sync pulls like an open one.', syncs.Syncs, '_pull', 'P1')
def announced_is_open(original):
  def _pull(self, sync, member):
    state, sync.state = sync.state, 'open'
    original(self, sync, member)
    sync.state = state

  return _pull


@mutant('A closing sync opens while a learner still trains.', pace.Pace, '_needed', 'P1')
def closes_too_early(original):
  return lambda self, t: self._config.quorum if self._config.closing(t) else original(self, t)


@mutant(
  'A closing sync ends with the grace window of the others.',
  syncs.Syncs,
  '_window_ns',
  'I5 L2a',
)
def closing_does_not_wait(original):
  return lambda self, now_ns, sync: original(self, now_ns, dataclasses.replace(sync, t=0))


# --- A learner's answers --------------------------------------------------------------------------


@mutant(
  'A learner sends a capture on whichever session is open when it is encoded.',
  LearnerMachine,
  '_encoded',
  'I1b',
)
def old_capture_on_a_new_session(original):
  def _encoded(self, encoded):
    if self._encoding and self._connection.joined:
      _, message = self._encoding[0]
      self._encoding[0] = self._connection.session, message
    original(self, encoded)

  return _encoded


@mutant(
  'The syncer pulls from a joiner before it has caught up.', members.Member, 'caught_up', 'P1 L5'
)
def contributes_while_due(original):
  return property(lambda self: self.live and self.joined)


@mutant(
  'After a cancelled sync the learner does not send its tokens again.',
  LearnerMachine,
  '_settled',
  'I1b L4a',
)
def no_resend_after_cancel(original):
  def _settled(self, settled):
    anchor = self._anchors[settled.fragment]
    capture = anchor.capture
    original(self, settled)
    anchor.capture = capture

  return _settled


@mutant(
  'After a reconnect the learner does not send its tokens again.',
  anchor_lib.Anchor,
  'settled',
  'I1b I25 L4a',
)
def no_resend_after_reconnect(original):
  return lambda self, tokens: None


@mutant(
  'A learner does not decline a pull whose capture has NaN.', LearnerMachine, '_encoded', 'I9'
)
def nan_is_not_declined(original):
  def _encoded(self, encoded):
    if encoded.payload_id is None:
      self._encoding.popleft()
    else:
      original(self, encoded)

  return _encoded


@mutant(
  'The syncer publishes a result that is not finite.',
  SyncerMachine,
  '_dispatch',
  'I9 I3',
)
def not_finite_is_published(original):
  def _dispatch(self, now_ns, event):
    if isinstance(event, events.MergeDone) and event.failed:
      payload = messages.Payload(size_bytes=64, crc32=0)
      event = dataclasses.replace(event, failed='', payload=payload)
    original(self, now_ns, event)

  return _dispatch


@mutant(
  'A learner defers its next step until its contribution is settled.',
  LearnerMachine,
  '_may_step',
  'L1',
)
def step_waits_for_verdict(original):
  return lambda self: original(self) and not any(one.capture for one in self._anchors)


@mutant('In lock-step modes a learner runs one step too far.', LearnerMachine, '_may_step', 'L1')
def lag_is_one_more(original):
  def _may_step(self):
    lag = self._config.lag
    ahead = (
      lag is not None
      and self._training == 'training'
      and (self.clock < min(one.next_due for one in self._anchors) + lag + 1)
    )
    return original(self) or ahead

  return _may_step


@mutant(
  'A late publish moves a learner back to an older version.',
  anchor_lib.Anchor,
  'covers',
  'I4 I4b',
)
def late_publish_moves_back(original):
  return lambda self, publish: False


@mutant(
  'A learner does not compare the digest of adopted bits.', LearnerMachine, '_adopt_done', 'I7b'
)
def digest_not_compared(original):
  def _adopt_done(self, done):
    original(self, dataclasses.replace(done, digest=self._adopting[0][1].digest))

  return _adopt_done


@mutant(
  'A learner counts the tokens of its last incarnation again.',
  LearnerMachine,
  '_begin_life',
  'I7b I25 I7',
)
def tokens_of_the_last_incarnation(original):
  return lambda self: None


# --- Bad updates ----------------------------------------------------------------------------------


@mutant('The syncer merges a payload with NaN.', screening, 'refused', 'claim')
def nan_is_merged(original):
  return lambda norm, least, limit: norm >= 0 and original(norm, least, limit)


def _without_refused(done: events.MergeDone) -> events.MergeDone:
  return dataclasses.replace(done, refused=())


@mutant('The tokens of a refused participant stay merged.', syncs.Syncs, '_publish', 'I7 I7c I16')
def refused_tokens_stay_merged(original):
  return lambda self, sync, done: original(self, sync, _without_refused(done))


@mutant(
  'The next syncer does not reopen a closing sync that ended with the last one.',
  pace.Pace,
  'reopen',
  'I7 P1',
)
def closing_syncs_are_lost(original):
  return lambda self, undecided: original(self, ())


# --- Quorum and pace ------------------------------------------------------------------------------


@mutant('One payload too few makes a quorum.', sync_lib, 'decide', 'I5')
def quorum_is_one_less(original):
  def decide(sync, now_ns, needed, live):
    return original(sync, now_ns, needed and max(1, needed - 1), live)

  return decide


@mutant('The syncer waits for no other learner once it has a quorum.', sync_lib, 'decide', 'I5')
def no_grace(original):
  def decide(sync, now_ns, needed, live):
    if not sync.merging and len(sync.payloads) >= max(1, needed):
      return 'merge', 'there is a quorum'
    return original(sync, now_ns, needed, live)

  return decide


@mutant('The grace window never closes.', sync_lib.Sync, 'close_ns', 'L2a')
def grace_never_ends(original):
  return property(lambda self: 10**18)


@mutant('A sync that can no longer reach its quorum stays open.', sync_lib, 'decide', 'L2a')
def never_cancelled(original):
  def decide(*args):
    verdict, why = original(*args)
    return ('wait', why) if verdict == 'cancel' else (verdict, why)

  return decide


@mutant('The fastest learner alone sets the pace.', pace.Pace, 'is_reached', 'P1')
def fastest_sets_the_pace(original):
  def is_reached(self, front):
    if front is self.announcing:
      return original(self, front)
    some = bool(front.ready) and len(self.contributors) >= self._config.quorum
    return some and not self.over

  return is_reached


@mutant('The syncer opens a second sync of a fragment in flight.', SyncerMachine, '_may_open', 'P1')
def fragment_in_flight_twice(original):
  def _may_open(self):
    free = len(self._syncs.open) < self._tempo.in_flight
    return not self._stopping and self._pace.is_reached(self._pace.opening) and free

  return _may_open


@mutant(
  'The syncer skips a single fragment when syncs are overdue.', pace.Pace, 'skip_overdue', 'P1'
)
def skips_single_syncs(original):
  def skip_overdue(self):
    periods = original(self)
    if periods:
      self.opening.t = self._schedule.next(self.opening.t)
    return periods

  return skip_overdue


@mutant('Every fragment has a turn in every period.', pace.Pace, '_after', 'P1')
def every_sync_has_a_turn(original):
  return lambda self, t: self._schedule.next(t)


@mutant(
  'Open syncs do not pull from a joiner that has just caught up.',
  syncs.Syncs,
  'enter',
  'L5',
)
def late_joiner_is_not_asked(original):
  return lambda self, member: None


@mutant('The slowest learner sets the pace.', pace.Pace, 'is_reached', 'P1')
def slowest_sets_the_pace(original):
  def is_reached(self, front):
    slowest = front is self.announcing or len(front.ready) >= len(self.contributors)
    return original(self, front) and slowest

  return is_reached


@mutant('The syncer opens one sync at a time, whatever tau is.', SyncerMachine, '_may_open', 'P1')
def one_in_flight(original):
  return lambda self: not self._syncs.open and original(self)


@mutant(
  'A syncer exits before all learners know that the run is over.',
  SyncerMachine,
  '_finish',
  'P2 I7',
)
def ends_too_early(original):
  def _finish(self, now_ns):
    original(self, now_ns)
    self._linger_ns = now_ns

  return _finish


# --- Membership leases ----------------------------------------------------------------------------


@mutant('No lease ever ends.', members.Members, 'expired', 'L8')
def lease_never_ends(original):
  return lambda self, now_ns: []


# --- Ids and versions -----------------------------------------------------------------------------


@mutant('A replaced process may rejoin.', members.Members, 'replaced', 'I12')
def no_fencing(original):
  return lambda self, learner, nonce, incarnation: False


@mutant(
  'A second process displaces the live holder of an id.', members.Members, 'held_by_other', 'I13'
)
def no_hold_on_a_live_id(original):
  return lambda self, name, nonce: None


@mutant(
  'A Join holds the id before its Confirm.',
  join_lib.Membership,
  'join',
  'I7 I12 I13 I16 I19',
)
def one_phase_join(original):
  def join(self, now_ns, session, message):
    original(self, now_ns, session, message)
    offered = self._offered.get(session)
    if offered is None:
      return
    before = self._members.by_id.get(message.learner)
    if before is not None and before.nonce not in (None, message.nonce):
      before.nonce, before.incarnation = message.nonce, offered.incarnation

  return join


@mutant(
  'A repeated Join of the same process begins another incarnation.', members.Members, 'offer', 'I12'
)
def join_not_idempotent(original):
  def offer(self, join):
    member = self.by_id.get(join.learner)
    return 1 if member is None else member.incarnation + 1

  return offer


@mutant(
  'The ledger forgets the unsettled tokens of a replaced process.',
  ledger.Account,
  'close',
  'I7 I16',
)
def lost_with_process_forgotten(original):
  def close(self, reason):
    if reason != Reason.LOST_WITH_PROCESS:
      original(self, reason)

  return close


@mutant('The account of a replaced process disappears.', ledger.Ledger, 'fold', 'I7 I16')
def replaced_account_disappears(original):
  def fold(self, learner, incarnation, into=''):
    del self.accounts[learner, incarnation]

  return fold


@mutant(
  'A clock that jumped to an open sync is implausible.',
  plausible.Plausibility,
  '_newest_clock',
  'I13',
)
def jumped_clock_is_implausible(original):
  return lambda self, member: member.claimed


@mutant('A process is admitted before its Confirm.', join_lib.Membership, 'join', 'I19')
def strangers_are_admitted(original):
  def join(self, now_ns, session, message):
    original(self, now_ns, session, message)
    self._out.do(actions.Admit(session=session))

  return join


@mutant('A member is taken for a stranger.', join_lib.Membership, '_admit', 'I19')
def members_are_not_admitted(original):
  def _admit(self, *args):
    with mock.patch.object(self._out, 'do'):
      original(self, *args)

  return _admit


@mutant(
  'The syncer sends a delta to every learner, whatever it holds.',
  published.Published,
  'send_delta',
  'I4b',
)
def delta_to_every_learner(original):
  def send_delta(self, member, publish, payload_id):
    in_flight = member.copies[publish.fragment].in_flight
    if member.joined and len(in_flight) < messages.MAX_VERSIONS_IN_FLIGHT:
      self._send(member, publish, payload_id)

  return send_delta


@mutant(
  'The syncer sends a slow learner any number of versions.',
  published.Published,
  'send_delta',
  'I11',
)
def slow_learner_is_flooded(original):
  def send_delta(self, member, publish, payload_id):
    if member.joined and member.copies[publish.fragment].state == 'follows':
      self._send(member, publish, payload_id)

  return send_delta


@mutant(
  'The syncer sends a joiner every fragment that is due to it at once.',
  published.Published,
  'catch_up',
  'I11',
)
def joiner_is_flooded(original):
  def catch_up(self, member):
    with mock.patch.object(messages, 'MAX_WHOLES', len(self.fragments)):
      original(self, member)

  return catch_up


@mutant(
  'A joiner has the next fragment read only when it has adopted the one before.',
  published.Published,
  'catch_up',
  'L5 I4b',
)
def one_whole_at_a_time(original):
  def catch_up(self, member):
    if not any(copy.is_whole for copy in member.copies):
      with mock.patch.object(messages, 'MAX_WHOLES', 1):
        original(self, member)

  return catch_up


@mutant(
  'The syncer never sends the newest value to a learner that fell behind.',
  published.Published,
  'adopted',
  'I4b L5',
)
def never_catches_up(original):
  def adopted(self, member, adopted):
    with mock.patch.object(self, 'catch_up'):
      original(self, member, adopted)

  return adopted


@mutant(
  'The syncer saves its state while an outer step is in progress.',
  SyncerMachine,
  '_save_waits',
  'I16',
)
def saves_during_a_merge(original):
  return property(lambda self: False)


@mutant(
  'The syncer does not tell a waiting lock-step learner of a cancelled sync.',
  syncs.Syncs,
  'cancel',
  'I7c L1 L2a',
)
def cancel_is_not_reported(original):
  def cancel(self, sync, why):
    with mock.patch.object(syncs.Syncs, 'send_verdict', lambda *args: None):
      original(self, sync, why)

  return cancel


# --- Resources and determinism --------------------------------------------------------------------


@mutant('The syncer never frees a withdrawn payload.', syncs.Syncs, 'drop_learner', 'I11 I5')
def withdrawn_payload_leaks(original):
  def leave(self, name):
    for sync in self._all():
      sync.waiting.discard(name)
      sync.asked.discard(name)
      sync.withdraw(name)

  return leave


@mutant('Captures pile up before a slow encoder.', LearnerMachine, '_answer', 'I11')
def captures_pile_up(original):
  def _answer(self, fragment, t):
    encoding, self._encoding = self._encoding, []
    original(self, fragment, t)
    encoding.extend(self._encoding)
    self._encoding = encoding

  return _answer


@mutant(
  'The order of a set, which depends on the hash seed, decides which learner is served first.',
  members.Members,
  'live',
  'I15',
)
def order_of_a_set(original):
  def live(self):
    names = {member.learner: member for member in self.by_session.values()}
    # As a set orders them under some hash seed: under most, or the mutant would be right by chance.
    return [names[name] for name in sorted(names, key=lambda name: zlib.crc32(name.encode()))]

  return live


# --- Durability -----------------------------------------------------------------------------------


@mutant(
  'The syncer sends Finish before the disk shows that the run is over.',
  SyncerMachine,
  '_close_run',
  'I8b P2',
)
def finish_before_it_is_saved(original):
  return lambda self, now_ns: self._finish(now_ns)


@mutant('The syncer treats a failed last checkpoint as a good one.', recovery.Saving, 'end', 'I8b')
def failed_save_counts(original):
  return lambda self, failed, again_ns: original(self, False, again_ns)


@mutant('The log ignores a failed fsync and goes on.', wal.Wal, '_do', 'I8')
def failed_fsync_ignored(original):
  def _do(self, *args, **kwargs):
    try:
      return original(self, *args, **kwargs)
    except wal.WalBroken:
      self._broken = ''

  return _do


@mutant('A commit does not fsync the record.', wal.Wal, '_do', 'I8')
def record_is_not_fsynced(original):
  def _do(self, doing, call, *args, needed=0):
    if call.__name__ != 'fsync':
      return original(self, doing, call, *args, needed=needed)

  return _do


def _read_unchecked(files, run, base, last):
  for number in range(base + 1, last + 1):
    kind, size, chain = wal._header(files, run, number, base)
    payload = files.read(wal.name_of(number), wal.HEADER_BYTES, size)
    yield wal.Record(number, kind, chain, memoryview(payload))


@mutant('Recovery accepts a record of which only the header is whole.', wal, '_records', 'I10')
def broken_payload_accepted(original):
  return _read_unchecked


@mutant('Recovery drops a damaged record and those behind it.', wal, '_verify', 'I10')
def damage_is_dropped(original):
  def _verify(files, run, *args):
    while True:
      try:
        return original(files, run, *args)
      except wal.WalDamaged:
        found = wal.numbers(files)
        if len(found) < 2:
          raise
        files.remove(wal.name_of(found[-1]))

  return _verify


@mutant('Recovery gives the unfinished record its name.', wal, 'open_log', 'I8')
def unfinished_record_counts(original):
  def open_log(files, *args, **kwargs):
    if wal.NEW in files.names() and (found := wal.numbers(files)):
      files.rename(wal.NEW, wal.name_of(found[-1] + 1))
    return original(files, *args, **kwargs)

  return open_log


@mutant('Recovery forgets the last record.', recovery, 'replay_log', 'I10')
def last_record_forgotten(original):
  return lambda load, machine_state, records: original(load, machine_state, records[:-1])


@mutant('Recovery counts an outer step that was refused.', SyncerMachine, 'ended', 'I10')
def refused_merge_counts(original):
  return lambda self, merge, done: original(self, merge, dataclasses.replace(done, failed=''))


@mutant(
  'Recovery forgets the outer steps in progress in the machine state.',
  SyncerMachine,
  'ended',
  'I10',
)
def outer_steps_in_progress_forgotten(original):
  return lambda self, merge, done: None


@mutant(
  'A checkpoint claims to cover one record too many.',
  outer_log,
  'position',
  'I10',
)
def position_is_one_too_far(original):
  return lambda log: {**original(log), 'log': log.committed + 1}


@mutant(
  'Compaction runs before the checkpoint is verified.',
  processes.Syncer,
  '_checkpoint',
  'I20',
)
def compacts_too_early(original):
  def _checkpoint(self, save):
    self.log.drop_before(self.log.committed)
    self.world.logged('compacted', self.log.first + 1)
    yield from original(self, save)

  return _checkpoint


@mutant(
  'The machine state of an outer step is that at the end of the turn, not at its decision.',
  SyncerMachine,
  'handle',
  'I16',
)
def machine_state_after_the_turn(original):
  def handle(self, now_ns, event):
    return [
      dataclasses.replace(one, machine_state=self.state())
      if isinstance(one, actions.Merge)
      else one
      for one in original(self, now_ns, event)
    ]

  return handle


@mutant(
  'The syncer counts wrong bits but does not replace them.', join_lib.Membership, '_repair', 'I4b'
)
def wrong_bits_are_left(original):
  def _repair(self, now_ns, member, adopted):
    self.repaired += 1

  return _repair


@mutant(
  'The syncer never answers a process that takes over an id.',
  join_lib.Membership,
  'confirm',
  'I7 L3 L5 I13 I19',
)
def taking_over_is_ignored(original):
  def confirm(self, now_ns, session, confirm):
    offered = self._offered.get(session)
    if offered is not None and offered.incarnation > 1:
      return None
    return original(self, now_ns, session, confirm)

  return confirm


@mutant(
  'A learner forgets a pull while it has nothing to contribute.', LearnerMachine, '_answer', 'L4a'
)
def pull_is_forgotten(original):
  def _answer(self, fragment, t):
    if self._anchors[fragment].capture:
      self._pulls.answered(fragment)
    else:
      original(self, fragment, t)

  return _answer


# --- States ---------------------------------------------------------------------------------------


# --- Data shards ----------------------------------------------------------------------------------


@mutant(
  'A cursor moves when the outer step is decided, and its machine state has the new one.',
  shards.Shards,
  'merge',
  'I16',
)
def cursor_moves_at_decision(original):
  def merge(self, t, fragment, payloads):
    original(self, t, fragment, payloads)
    moves = self._moves[t]
    self.end(t, (), made=True)
    self._moves[t] = moves

  return merge


@mutant('A refused outer step moves its cursors.', shards.Shards, 'end', 'I10 I16 I21 I21a')
def refused_cursor_stays(original):
  return lambda self, t, refused, made: original(self, t, (), True)


@mutant('A restarted syncer has forgotten the cursors.', shards.Shards, 'load', 'I10 I16 I21 I21a')
def cursors_forgotten(original):
  return lambda self, machine_state: original(self, {**machine_state, 'merged': []})


@mutant(
  'A batch is committed once it is merged for all fragments.',
  shards.Shards,
  'committed',
  'I10 I16 I21 I21a',
)
def committed_for_all_fragments(original):
  return lambda self, shard: min(self._merged.get(shard, (0,)))


@mutant(
  'The syncer gives a shard to a learner although another one reads it.',
  shards.Shards,
  '_hold',
  'I10 I16 I21 I21a',
)
def two_learners_one_shard(original):
  def _hold(self, learner, position):
    position = original(self, learner, position)
    del self._holders[position.shard]
    self._holders[position.shard - self._shards] = learner
    return position

  return _hold


@mutant(
  'The syncer gives out a shard while an outer step may move its cursor.',
  shards.Shards,
  '_moving',
  'I21a',
)
def leased_during_a_merge(original):
  return lambda self, shard: False


@mutant(
  'A learner with data of its own that returns begins them again, under a new number.',
  shards.Shards,
  '_number',
  'I21a',
)
def number_not_kept(original):
  return lambda self, former: original(self, None)


@mutant(
  'A process that is given another shard keeps the steps trained on the last one.',
  LearnerMachine,
  '_use_shard',
  'I21b I25',
)
def not_rewound(original):
  def _use_shard(self, position):
    before = [(one.steps, one.tokens, one.capture) for one in self._anchors]
    original(self, position)
    self._out._actions[-1] = dataclasses.replace(self._out._actions[-1], rewind=False)
    for anchor, (steps, tokens, capture) in zip(self._anchors, before):
      anchor.steps, anchor.tokens, anchor.capture = steps, tokens, capture

  return _use_shard


@mutant('A learner claims a position one batch too far.', LearnerMachine, '_confirm', 'I21b')
def claims_too_much(original):
  def _confirm(self, now_ns, incarnation):
    position = self._position
    if position is not None:
      self._position = position._replace(cursor=position.cursor + 1)
    original(self, now_ns, incarnation)
    self._position = position

  return _confirm


@mutant('No outer step of fragment 0 is finite any more.', arrays.Syncer, '_merge', 'L2')
def fragment_is_never_merged(original):
  def _merge(self, merge):
    self._process.not_finite |= merge.fragment == 0
    return original(self, merge)

  return _merge


# --- The link, and machines that raise ------------------------------------------------------------


@mutant(
  'A transport hands all payloads to the link at once, so heartbeats wait behind them.',
  network.Link,
  '__init__',
  'L11',
)
def payloads_before_heartbeats(original):
  def __init__(self, *args, **settings):
    original(self, *args, **(settings | {'queue_ns': 10**12}))

  return __init__


@mutant('Long payloads count in full.', syncs.Syncs, '_participant', 'I7')
def long_payloads_count_in_full(original):
  return lambda self, *args: dataclasses.replace(original(self, *args), slow=False)


@mutant(
  'A learner adopts a version that arrives during a step at once.',
  LearnerMachine,
  '_receive',
  'I26',
)
def adopts_during_a_step(original):
  def _receive(self, now_ns, message, payload_id):
    original(self, now_ns, message, payload_id)
    if self._training == 'training':
      for publish, arrived in self._arrivals:
        self._adopt(publish, arrived)
      self._arrivals.clear()

  return _receive


@mutant('A learner counts steps of which none is complete.', processes.Learner, 'post', 'I26')
def counts_steps_that_still_run(original):
  def post(self, event, *more):
    if isinstance(event, events.StepDone):
      event = dataclasses.replace(event, step_ns=0)
    original(self, event, *more)

  return post


@mutant('A machine raises.', join_lib.Membership, 'leave', 'crash')
def machine_raises(original):
  def leave(self, member, reason, finished):
    raise KeyError(member.learner)

  return leave
