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
from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.learner import pulls as pulls_lib
from diloco_jax.protocol.syncer import (
  checkpoints,
  gathering,
  grace,
  ledger,
  links,
  members,
  pace,
  plausible,
  published,
  recovery,
  screening,
  shards,
  verdicts,
)
from diloco_jax.protocol.syncer import gather as gather_lib
from diloco_jax.protocol.syncer import join as join_lib
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.storage import outer_log, wal
from diloco_jax.verification.checks.invariants import data
from diloco_jax.verification.sim import arrays, faults, network, processes

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
  'I1 I7',
  also=(SETTLES, (shards.Shards, 'counts', lambda original: lambda *args: True)),
)
def no_dedup(original):
  def judge(message, name, gather, fragment, cursor, oldest):
    return original(message, name, gather, fragment, -1, oldest)

  return judge


@mutant('The syncer merges a payload with an anchor of any age.', verdicts, 'judge', 'I6')
def stale_base_merged(original):
  def judge(message, name, gather, fragment, cursor, oldest):
    return original(message, name, gather, fragment, cursor, 0)

  return judge


@mutant('The syncer merges payloads in the order of arrival.', gathering.Gathering, 'merge', 'I15')
def merge_in_arrival_order(original):
  def merge(self, now_ns, gather):
    with mock.patch.object(gathering, 'sorted', list, create=True):
      original(self, now_ns, gather)

  return merge


@mutant(
  'A contribution counts the reported tokens, not those of its range.',
  gathering.Gathering,
  '_participant',
  'I7',
)
def tokens_of_the_report(original):
  def _participant(self, name, message, *more):
    account = self._ledger.of(self._members.by_id[name])
    reported = account.trained - account.cursors[message.fragment]
    return dataclasses.replace(original(self, name, message, *more), tokens=reported)

  return _participant


@mutant('The ledger does not record discarded tokens.', ledger.Account, 'settle', 'I7')
def discard_without_ledger(original):
  def settle(self, fragment, start, end, reason, gap):
    if reason:
      return True
    return original(self, fragment, start, end, reason, gap)

  return settle


@mutant(
  'The ledger forgets the tokens that a learner drops when it adopts.',
  join_lib.Membership,
  'adopted',
  'I7 I16',
)
def overwrite_without_ledger(original):
  def adopted(self, now_ns, member, message):
    with mock.patch.object(ledger.Account, 'drop', lambda *args: None):
      original(self, now_ns, member, message)

  return adopted


@mutant(
  'A payload stays in its open sync when its tokens are overwritten.',
  gathering.Gathering,
  '_withdraw',
  'I1 I7',
  also=(SETTLES,),
)
def overwritten_payload_stays(original):
  return lambda self, member, fragment, upto: None


@mutant('A refused outer step keeps its tokens as merged.', ledger.Account, 'revoke', 'I7 I16')
def failed_merge_keeps_its_tokens(original):
  return lambda self, count, reason: None


@mutant(
  'The ledger counts a late payload as discarded twice.', gathering.Gathering, '_reject', 'I7'
)
def late_counted_twice(original):
  def _reject(self, member, message, payload_id, reason):
    original(self, member, message, payload_id, reason)
    if reason == Reason.LATE:
      self._ledger.of(member)._discard(message.tokens_to - message.tokens_from, reason)

  return _reject


@mutant(
  'The syncer drops a late payload without telling its learner.',
  gathering.Gathering,
  'settle',
  'I7c',
)
def late_payload_is_not_reported(original):
  def settle(self, member, sync, fragment, reason):
    if reason != Reason.LATE:
      original(self, member, sync, fragment, reason)

  return settle


@mutant(
  'Of two payloads of a learner the syncer keeps the older, late one, and is silent about the new.',
  gathering.Gathering,
  '_judge',
  'I7c',
)
def older_late_payload_stays(original):
  def judge(self, member, message, gather):
    if gather is not None and not gather.merging and member.learner in gather.payloads:
      return verdicts.REPEATED
    return original(self, member, message, gather)

  return judge


@mutant(
  'The syncer does not tell a learner that its contribution was merged.',
  gathering.Gathering,
  'settle',
  'I7c',
)
def merged_payload_is_not_reported(original):
  def settle(self, member, sync, fragment, reason):
    if reason:
      original(self, member, sync, fragment, reason)

  return settle


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
  gathering.Gathering,
  'merging_from',
  'I25',
)
def whole_counts_the_step_in_progress(original):
  return lambda self, fragment: {}


@mutant('A learner carries its steps on for ever.', anchor_lib.Anchor, 'adopt', 'I25')
def misses_are_not_counted(original):
  def adopt(self, publish, steps, tokens, max_misses):
    return original(self, publish, steps, tokens, max_misses and 10**9)

  return adopt


@mutant(
  'A learner waits for the version of a payload that was late.',
  LearnerMachine,
  '_settled',
  'I1b I25 L4a',
)
def late_capture_stays(original):
  def _settled(self, settled):
    anchor = self._anchors[settled.fragment]
    capture = anchor.capture
    original(self, settled)
    if settled.reason == Reason.LATE:
      anchor.capture = capture

  return _settled


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


@mutant('The syncer keeps all late payloads.', gathering.Gathering, '_next', 'I5 I7c I11 L2a')
def late_payloads_are_not_counted(original):
  def _next(self, member, message):
    found = original(self, member, message)
    if found is None and not self._config.closing(message.sync):
      fragment = message.fragment
      return self.due.setdefault(fragment, gather_lib.Gather(sync=0, fragment=fragment))
    return found

  return _next


@mutant('A late payload may be a version older than another.', gathering.Gathering, '_judge', 'I6')
def late_payload_is_older(original):
  def _judge(self, member, message, gather):
    held, self.open = self.open, {}
    try:
      return original(self, member, message, gather)
    finally:
      self.open = held

  return _judge


@mutant('The verdict on a late payload names another sync.', gather_lib.Gather, 'given_for', 'I7c')
def late_verdict_names_another_sync(original):
  def given_for(self, learner):
    return self.sync

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
  gathering.Gathering,
  '_reject',
  'I25 I7',
)
def late_tokens_are_settled(original):
  def _reject(self, member, message, payload_id, reason):
    original(self, member, message, payload_id, reason)
    if reason == Reason.LATE:
      self._withdraw(member, message.fragment, message.tokens_to)
      self._settle(member, message, reason)

  return _reject


@mutant(
  'The next syncer has forgotten which learners must drop their steps.',
  members.Members,
  'state',
  'I2 I10 I16 I25',
)
def spoiled_is_not_saved(original):
  return lambda self: [{**row, 'spoiled': []} for row in original(self)]


@mutant('A learner gives a fragment before it is due.', pulls_lib.Pulls, '_given_at', 'I1b')
def given_too_early(original):
  return lambda self, sync: original(self, sync) - 1


@mutant('A learner gives a fragment only when the sync has opened.', pulls_lib.Pulls, 'due', 'L4a')
def given_when_asked(original):
  def due(self, clock, ends):
    return [one for one in original(self, clock, ends) if ends or one[0] in self._open]

  return due


@mutant('An announced sync pulls like an open one.', gathering.Gathering, '_pull', 'P1')
def announced_is_open(original):
  def _pull(self, gather, member):
    state, gather.state = gather.state, 'gathering'
    original(self, gather, member)
    gather.state = state

  return _pull


@mutant('The grace window counts from the quorum.', gathering.Gathering, 'contribution', 'I5 L2a')
def window_from_the_quorum(original):
  def contribution(self, now_ns, member, message, payload_id):
    original(self, now_ns, member, message, payload_id)
    gather = self.open.get(message.sync)
    if gather is not None and len(gather.payloads) == self._config.quorum:
      gather.grace_ns += now_ns - gather.opened_ns

  return contribution


@mutant('A closing sync opens while a learner still trains.', pace.Pace, '_needed', 'P1')
def closes_too_early(original):
  return lambda self, sync: (
    self._config.quorum if self._config.closing(sync) else original(self, sync)
  )


@mutant('With wait_for=live a sync opens before a slow live learner.', pace.Pace, '_needed', 'P1')
def slow_live_learner_is_left_behind(original):
  return lambda self, sync: (
    original(self, sync) if self._config.closing(sync) else self._config.quorum
  )


@mutant(
  'A closing sync ends with the grace window of the others.',
  gathering.Gathering,
  '_window_ns',
  'I5 L2a',
)
def closing_does_not_wait(original):
  return lambda self, now_ns, gather: original(self, now_ns, dataclasses.replace(gather, sync=0))


@mutant('A closing sync needs two payloads.', gather_lib, 'decide', 'L2a claim')
def closing_needs_a_quorum(original):
  return lambda gather, now_ns, needed, live: original(gather, now_ns, needed or 2, live)


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
  return property(lambda self: self.live and bool(self.held_versions))


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


@mutant('A learner trains only while it is connected.', LearnerMachine, '_may_step', 'L1')
def step_waits_for_connection(original):
  return lambda self: original(self) and self._connection.joined


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


@mutant('No norm is ever too large.', screening.Usual, 'limits', 'I9b')
def no_limit(original):
  return lambda *args: (original(*args)[0], None)


@mutant('No norm is ever too small.', screening.Usual, 'limits', 'I9b')
def no_least(original):
  return lambda *args: (0, original(*args)[1])


@mutant('The syncer applies limits before the warm-up is over.', screening.Usual, 'limits', 'I9b')
def no_warm_up(original):
  def limits(self, steps, config, shared_steps):
    early = dataclasses.replace(config, norm_warmup=1)
    return original(self, steps, early, shared_steps)

  return limits


@mutant('Each norm has a vote, not each learner.', screening.Usual, 'votes', 'I9b')
def each_norm_votes(original):
  def votes(self, lower=False):
    return [pair for kept in self.pairs.values() for pair in kept] if original(self) else []

  return votes


@mutant(
  'Of two votes the larger one is usual for the lower limit, too.', screening, 'medians', 'I9b'
)
def larger_vote_counts(original):
  return lambda pairs, lower=False: original(pairs)


@mutant('The first norm of a learner has a vote.', screening, 'VOTES_AFTER', 'I9b')
def first_norm_votes(original):
  return 1


@mutant('Refused norms become usual.', screening.Screening, 'after_merge', 'I9b I10 I16')
def refused_norms_are_kept(original):
  def after_merge(self, now_ns, gather, done):
    for one, norm in zip(gather.participants, done.norms):
      if one.learner in done.refused and norm != screening.NOT_FINITE:
        self.usual[done.fragment].pairs.setdefault(one.learner, []).append([norm, one.steps])
    return original(self, now_ns, gather, done)

  return after_merge


@mutant(
  'The syncer keeps usual norms that most learners are far from.',
  screening.Screening,
  '_forget_if_wrong',
  'I13b I9b I10 I16',
)
def wrong_norms_stay(original):
  return lambda self, fragment, live: None


@mutant('The syncer merges a payload with NaN.', screening, 'refused', 'I9b')
def nan_is_merged(original):
  return lambda norm, least, limit: norm >= 0 and original(norm, least, limit)


def _without_refused(done: events.MergeDone) -> events.MergeDone:
  return dataclasses.replace(done, refused=())


@mutant(
  'The tokens of a refused participant stay merged.', gathering.Gathering, '_publish', 'I7 I7c I16'
)
def refused_tokens_stay_merged(original):
  return lambda self, gather, done: original(self, gather, _without_refused(done))


@mutant(
  'One refused participant makes the syncer refuse all of them.',
  gathering.Gathering,
  '_publish',
  'I7 I7c I16',
)
def all_participants_are_refused(original):
  def _publish(self, gather, done):
    all_of_them = tuple(one.learner for one in gather.participants) if done.refused else ()
    original(self, gather, dataclasses.replace(done, refused=all_of_them))

  return _publish


@mutant(
  'A merged contribution does not reset strikes.',
  screening.Screening,
  'after_merge',
  'I16 I13 I13b I10',
)
def strikes_stay(original):
  def ended(self, now_ns, gather, done):
    names = [one.learner for one in gather.participants]
    before = {name: self._members.by_id[name].strikes for name in names}
    out = original(self, now_ns, gather, done)
    for name, strikes in before.items():
      member = self._members.by_id[name]
      member.strikes = max(member.strikes, strikes)
    return out

  return ended


@mutant(
  'The syncer never quarantines a learner.',
  members.Members,
  'quarantined',
  'I9c',
)
def no_quarantine(original):
  return lambda self, member: False


@mutant('A quarantined process joins again.', verdicts, 'refuse_if_held', 'I9c')
def quarantined_joins_again(original):
  def taken(*args):
    refused = original(*args)
    return None if refused is not None and refused.code == 'QUARANTINED' else refused

  return taken


@mutant('A restarted syncer has forgotten all strikes.', recovery, 'replay_log', 'I10 I2')
def strikes_not_recovered(original):
  def recovered(load, machine_state, records):
    state = original(load, machine_state, records)
    for row in state['members']:
      row['strikes'] = row['max_strikes'] = 0
    return state

  return recovered


@mutant('A restarted syncer has forgotten the norms.', recovery, 'replay_log', 'I10 I2')
def norms_not_recovered(original):
  def recovered(load, machine_state, records):
    state = original(load, machine_state, records)
    return {**state, 'norms': [screening.Usual().state() for _ in state['norms']]}

  return recovered


@mutant(
  'The next syncer does not reopen a closing sync that ended with the last one.',
  pace.Pace,
  'reopen',
  'I7 P1',
)
def closing_syncs_are_lost(original):
  return lambda self, undecided: original(self, ())


@mutant('A replayed outer step merges refused payloads.', SyncerMachine, 'ended', 'I10 I2')
def recovery_merges_the_refused(original):
  return lambda self, merge, done: original(self, merge, dataclasses.replace(done, refused=()))


# --- Quorum and pace ------------------------------------------------------------------------------


@mutant(
  'The payload of a dead learner counts for the quorum.',
  gathering.Gathering,
  'drop_learner',
  'I5 I7c',
)
def dead_learner_counts(original):
  def leave(self, name):
    for gather in self._all():
      gather.waiting.discard(name)
      gather.asked.discard(name)

  return leave


@mutant('One payload too few makes a quorum.', gather_lib, 'decide', 'I5')
def quorum_is_one_less(original):
  def decide(gather, now_ns, needed, live):
    return original(gather, now_ns, needed and max(1, needed - 1), live)

  return decide


def _decides_with_repeats(original):
  def decide(gather, now_ns, needed, live):
    repeats = sum(name.endswith(' again') for name in gather.asked)
    return original(gather, now_ns, needed and max(1, needed - repeats), live)

  return decide


def _fails_without_repeats(original):
  def _fail(self, now_ns, gather, why):
    gather.asked = {name for name in gather.asked if not name.endswith(' again')}
    original(self, now_ns, gather, why)

  return _fail


@mutant(
  'The quorum counts a duplicated payload twice.',
  gathering.Gathering,
  'contribution',
  'I5 L2a',
  also=(
    (gather_lib, 'decide', _decides_with_repeats),
    (gathering.Gathering, '_fail', _fails_without_repeats),
  ),
)
def quorum_counts_a_learner_twice(original):
  def contribution(self, now_ns, member, message, payload_id):
    gather = self._find(message.sync)
    if gather is not None and member.learner in gather.payloads:
      gather.asked.add(f'{member.learner} again')
    original(self, now_ns, member, message, payload_id)

  return contribution


@mutant('The syncer waits for no other learner once it has a quorum.', gather_lib, 'decide', 'I5')
def no_grace(original):
  def decide(gather, now_ns, needed, live):
    if not gather.merging and len(gather.payloads) >= max(1, needed):
      return 'merge', 'there is a quorum'
    return original(gather, now_ns, needed, live)

  return decide


@mutant('There is no grace window.', grace.Grace, 'window_ns', 'I5')
def window_is_zero(original):
  return lambda self, tempo, step_ns: 0


@mutant('The grace window takes all of the overlap.', grace.Grace, 'window_ns', 'I5')
def window_is_the_longest(original):
  return lambda self, tempo, step_ns: tempo.overlap * step_ns


@mutant(
  'The grace window is of the step times that learners report.',
  members.Member,
  'inner_step_ns',
  'I5',
)
def reported_steps_are_believed(original):
  return property(lambda self: self.step_ns.value if self.step_ns.samples else 0)


@mutant(
  'The grace window is of the times between reports.', members.Member, 'inner_step_ns', 'I5 L2a'
)
def slow_reports_are_long_steps(original):
  return property(lambda self: self.report_ns.value if self.step_ns.samples else 0)


@mutant('The shortest step decides how long the others may take.', pace, 'step_ns', 'I5')
def fastest_is_usual(original):
  times = lambda of: filter(None, (one.inner_step_ns for one in of.by_session.values()))
  return lambda of: min(times(of), default=0)


@mutant('The grace window never closes.', gather_lib.Gather, 'close_ns', 'L2a')
def grace_never_ends(original):
  return property(lambda self: 10**18)


@mutant('A sync that can no longer reach its quorum stays open.', gather_lib, 'decide', 'L2a')
def never_cancelled(original):
  def decide(*args):
    verdict, why = original(*args)
    return ('wait', why) if verdict == 'cancel' else (verdict, why)

  return decide


@mutant('The fastest learner alone sets the pace.', pace.Pace, 'reached', 'P1')
def fastest_sets_the_pace(original):
  return property(
    lambda self: (
      not self.over and bool(self._ready) and (len(self.contributors) >= self._config.quorum)
    )
  )


@mutant('The syncer believes the clock of every learner.', pace.Pace, '_limit', 'I16 I10 P1 I7')
def clock_is_believed(original):
  return lambda self, now_ns, member: member.claimed


@mutant('Twice the usual speed is too fast.', pace, 'SPEED', 'I16 P1')
def twice_as_fast_is_too_fast(original):
  return 2


@mutant('What did not count of a clock never counts later.', pace.Pace, 'measure', 'I16 P1')
def clock_is_not_caught_up(original):
  def measure(self, now_ns):
    with mock.patch.object(pace.Pace, 'advance', lambda *args: None):
      original(self, now_ns)

  return measure


@mutant('The syncer opens a second sync of a fragment in flight.', SyncerMachine, '_may_open', 'P1')
def fragment_in_flight_twice(original):
  def _may_open(self):
    free = len(self._gathering.open) < self._tempo.in_flight
    return not self._stopping and self._pace.reached and free

  return _may_open


@mutant(
  'The syncer skips a single fragment when syncs are overdue.', pace.Pace, 'skip_overdue', 'P1'
)
def skips_single_syncs(original):
  def skip_overdue(self):
    periods = original(self)
    if periods:
      self.next = self._schedule.next(self.next)
    return periods

  return skip_overdue


@mutant('Every fragment has a turn in every period.', pace.Pace, '_after', 'P1')
def every_sync_has_a_turn(original):
  return lambda self, sync: self._schedule.next(sync)


@mutant('A longer period begins in the past.', pace.Pace, 'retime', 'P1')
def longer_period_from_the_last_opened_sync(original):
  def retime(self):
    original(self)
    self.next = self.soon = self._schedule.next(self.opened)

  return retime


@mutant(
  'Open syncs do not pull from a joiner that has just caught up.',
  gathering.Gathering,
  'enter',
  'L5',
)
def late_joiner_is_not_asked(original):
  return lambda self, member: None


@mutant('The slowest learner sets the pace.', pace.Pace, 'reached', 'P1')
def slowest_sets_the_pace(original):
  return property(lambda self: original.fget(self) and len(self._ready) >= len(self.contributors))


@mutant('The syncer opens one sync at a time, whatever tau is.', SyncerMachine, '_may_open', 'P1')
def one_in_flight(original):
  return lambda self: not self._gathering.open and original(self)


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


@mutant('A lease lasts ten times as long.', members.Members, 'lease_left_ns', 'L8 I13b')
def lease_is_too_long(original):
  def lease_left_ns(self, member, now_ns):
    return max(0, member.heard_ns + 10 * self._config.lease_ns - now_ns)

  return lease_left_ns


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
  'I7 I12 I13 I13b I16 I19',
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
  'A process that takes over an id continues the previous incarnation.',
  members.Members,
  'offer',
  'I12',
)
def incarnation_is_reused(original):
  def offer(self, join):
    member = self.by_id.get(join.learner)
    return 1 if member is None else member.incarnation

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


@mutant(
  'The ledger keeps only the last of the accounts of replaced processes.',
  ledger.Ledger,
  'fold',
  'I7 I16',
)
def last_folded_account_only(original):
  def fold(self, learner, incarnation, into=''):
    self.accounts.pop((learner, ledger.FORMER), None)
    original(self, learner, incarnation, into)

  return fold


@mutant('The account of a replaced process disappears.', ledger.Ledger, 'fold', 'I7 I16')
def replaced_account_disappears(original):
  def fold(self, learner, incarnation, into=''):
    del self.accounts[learner, incarnation]

  return fold


@mutant(
  'A report of the last step, made when the run is over, is implausible.',
  plausible.Plausibility,
  '_totals',
  'I13 I13b',
)
def last_step_is_implausible(original):
  def _totals(self, clock, steps, tokens):
    return original(self, clock + 2, steps, tokens)

  return _totals


@mutant(
  'A clock that jumped to an open sync is implausible.',
  plausible.Plausibility,
  '_newest_clock',
  'I13',
)
def jumped_clock_is_implausible(original):
  return lambda self, member: member.claimed


def _rots(original):
  """Every kill damages the disk: a version comes back with another value after a repair only."""

  def _kill(self, process):
    self._odds = self._odds._replace(rotten=1000)
    original(self, process)

  return _kill


@mutant(
  'A fragment of the same version and another digest is not due to a learner.',
  published.Published,
  'compare',
  'I4b',
  also=((faults.Nemesis, '_kill', _rots),),
)
def versions_without_digests(original):
  def compare(self, member, learner_held):
    ours = (one.digest for one in self.fragments)
    held = tuple(dataclasses.replace(one, digest=our) for one, our in zip(learner_held, ours))
    original(self, member, held)

  return compare


@mutant(
  'The syncer sends a delta to every learner, whatever it holds.',
  published.Published,
  'send_delta',
  'I4b',
)
def delta_to_every_learner(original):
  def send_delta(self, member, publish, payload_id):
    if (
      member.held_versions
      and len(member.versions_in_flight[publish.fragment]) < published.MAX_VERSIONS_IN_FLIGHT
    ):
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
    if member.held_versions and member.held_versions[publish.fragment] == publish.base_version:
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
    with mock.patch.object(published, 'MAX_WHOLES', len(self.fragments)):
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
    if not member.wholes:
      with mock.patch.object(published, 'MAX_WHOLES', 1):
        original(self, member)

  return catch_up


@mutant(
  'The syncer never sends the newest value to a learner that fell behind.',
  published.Published,
  'adopted',
  'I4b L5',
)
def never_catches_up(original):
  def adopted(self, member, fragment, version):
    versions_in_flight = member.versions_in_flight[fragment]
    member.versions_in_flight[fragment] = [one for one in versions_in_flight if one > version]

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
  gathering.Gathering,
  'cancel',
  'I7c L1 L2a',
)
def cancel_is_not_reported(original):
  def cancel(self, gather, why):
    with mock.patch.object(gathering.Gathering, 'settle', lambda *args: None):
      original(self, gather, why)

  return cancel


# --- Resources and determinism --------------------------------------------------------------------


@mutant(
  'The syncer never frees a withdrawn payload.', gathering.Gathering, 'drop_learner', 'I11 I5'
)
def withdrawn_payload_leaks(original):
  def leave(self, name):
    for gather in self._all():
      gather.waiting.discard(name)
      gather.asked.discard(name)
      gather.withdraw(name)

  return leave


@mutant('Captures pile up before a slow encoder.', LearnerMachine, '_answer', 'I11')
def captures_pile_up(original):
  def _answer(self, fragment, sync):
    encoding, self._encoding = self._encoding, []
    original(self, fragment, sync)
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
  'The syncer reports an outer step before its record is durable.',
  processes.Syncer,
  '_commit',
  'I8',
)
def ack_before_fsync(original):
  def _commit(self, step):
    job = original(self, step)
    for delay_ns in job:
      if self.log._appended:
        self.world.engine.after(delay_ns, lambda: next(job, None))
        return
      yield delay_ns

  return _commit


@mutant(
  'The syncer sends Finish before the disk shows that the run is over.',
  SyncerMachine,
  '_close_run',
  'I8b P2',
)
def finish_before_it_is_saved(original):
  return lambda self, now_ns: self._finish(now_ns)


@mutant(
  'The syncer treats a failed last checkpoint as a good one.', checkpoints.Saving, 'end', 'I8b'
)
def failed_save_counts(original):
  return lambda self, failed, again_ns: original(self, False, again_ns)


def _without(method):
  """The log without the calls of one method of its disk."""

  def wrap(original):
    def _do(self, doing, call, *args, needed=0):
      if call.__name__ != method:
        return original(self, doing, call, *args, needed=needed)

    return _do

  return wrap


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
  return _without('fsync')(original)


@mutant('A commit does not fsync the folder.', wal.Wal, '_do', 'I8')
def folder_is_not_fsynced(original):
  return _without('fsync_names')(original)


def _read_unchecked(files, run, base, last):
  for number in range(base + 1, last + 1):
    kind, size, chain = wal._header(files, run, number, base)
    payload = files.read(wal.name_of(number), wal.HEADER_BYTES, size)
    yield wal.Record(number, kind, chain, memoryview(payload))


@mutant('Recovery accepts a record of which only the header is whole.', wal, '_records', 'I10 I2')
def broken_payload_accepted(original):
  return _read_unchecked


@mutant('Recovery drops a damaged record and those behind it.', wal, '_verify', 'I2')
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


@mutant('Recovery forgets the last record.', recovery, 'replay_log', 'I2 I10')
def last_record_forgotten(original):
  return lambda load, machine_state, records: original(load, machine_state, records[:-1])


@mutant('Recovery counts an outer step that was refused.', SyncerMachine, 'ended', 'I10')
def refused_merge_counts(original):
  return lambda self, merge, done: original(self, merge, dataclasses.replace(done, failed=''))


@mutant(
  'Recovery forgets the outer steps in progress in the machine state.',
  SyncerMachine,
  'ended',
  'I10 I2',
)
def outer_steps_in_progress_forgotten(original):
  return lambda self, merge, done: None


@mutant('Recovery replays records that the checkpoint covers.', wal.Wal, 'records', 'I10')
def replays_what_is_saved(original):
  return lambda self, after=0: original(self, max(after - 1, 0))


@mutant(
  'A checkpoint claims to cover one record too many.',
  outer_log,
  'position',
  'I2 I10',
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


@mutant('The machine state of an outer step lacks its own tokens.', SyncerMachine, '_merge', 'I16')
def machine_state_before_the_merge(original):
  def _merge(self, now_ns, gather, why):
    books = self.state()
    with mock.patch.object(
      self, 'state', lambda: {**books, 'merging': [*books['merging'], gather.sync]}, create=True
    ):
      original(self, now_ns, gather, why)

  return _merge


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
  'I7 L3 L5 I13',
)
def taking_over_is_ignored(original):
  def confirm(self, now_ns, session, confirm):
    offered = self._offered.get(session)
    if offered is not None and offered.incarnation > 1:
      return None
    return original(self, now_ns, session, confirm)

  return confirm


@mutant(
  'The syncer refuses an id although its holder has disconnected.',
  members.Members,
  'held_by_other',
  'I13b',
)
def disconnected_holder_holds(original):
  def held_by_other(self, learner, nonce):
    member = self.by_id.get(learner)
    return member if member is not None and member.nonce != nonce else None

  return held_by_other


@mutant(
  'A learner forgets a pull while it has nothing to contribute.', LearnerMachine, '_answer', 'L4a'
)
def pull_is_forgotten(original):
  def _answer(self, fragment, sync):
    if self._anchors[fragment].capture:
      self._pulls.answered(fragment)
    else:
      original(self, fragment, sync)

  return _answer


# --- States ---------------------------------------------------------------------------------------


@mutant(
  'A sync that has no quorum is tried once more after it was cancelled.',
  gathering.Gathering,
  'cancel',
  'crash',
)
def cancelled_sync_gathers_again(original):
  def cancel(self, gather, why):
    original(self, gather, why)
    if not why.startswith('all'):
      return
    gather.move('gathering')
    for member in self._members.live():
      if member.caught_up:
        self._pull(gather, member)

  return cancel


@mutant(
  'A learner that hears nothing while it joins dials at once, over the session that it has.',
  connection.Connection,
  'keep',
  'crash',
)
def dials_while_joining(original):
  def keep(self, now_ns, ending):
    if self.state == 'joining' and now_ns - self._heard_ns > self._config.heartbeat_ns:
      self._dial(now_ns)
    original(self, now_ns, ending)

  return keep


@mutant(
  'A learner whose clock has reached T goes on training while it is not told to end.',
  LearnerMachine,
  '_may_step',
  'crash',
)
def trains_after_the_last_step(original):
  def _may_step(self):
    if self._training == 'trained' and not self._ending:
      self._train('training')
    return original(self)

  return _may_step


# --- Data shards ----------------------------------------------------------------------------------


@mutant(
  'A cursor moves when a contribution arrives, not when it is merged.',
  gathering.Gathering,
  'contribution',
  'I21 I21a',
)
def cursor_moves_at_contribution(original):
  def contribution(self, now_ns, member, message, payload_id):
    original(self, now_ns, member, message, payload_id)
    if member.learner in getattr(self.open.get(message.sync), 'payloads', ()):
      self._shards.merge(-1, message.fragment, [(member.learner, message)])
      self._shards.end(-1, (), made=True)

  return contribution


@mutant(
  'A cursor moves when the outer step is decided, and its machine state has the new one.',
  shards.Shards,
  'merge',
  'I21',
)
def cursor_moves_at_decision(original):
  def merge(self, sync, fragment, payloads):
    original(self, sync, fragment, payloads)
    moves = self._moves[sync]
    self.end(sync, (), made=True)
    self._moves[sync] = moves

  return merge


@mutant('A refused outer step moves its cursors.', shards.Shards, 'end', 'I21 I21a')
def refused_cursor_stays(original):
  return lambda self, sync, refused, made: original(self, sync, (), True)


@mutant('A restarted syncer has forgotten the cursors.', shards.Shards, 'load', 'I21 I21a')
def cursors_forgotten(original):
  return lambda self, machine_state: original(self, {**machine_state, 'merged': []})


@mutant(
  'Recovery forgets the cursors of outer steps in progress in the machine state.',
  SyncerMachine,
  'ended',
  'I21 I21a',
)
def cursors_in_progress_forgotten(original):
  end = shards.Shards.end

  def ended(self, merge, done):
    with mock.patch.object(shards.Shards, 'end', lambda *args, made: end(*args, made=False)):
      original(self, merge, done)

  return ended


@mutant('Every reader begins at the first batch.', shards.Shards, '_begin', 'I21 I21a')
def readers_begin_at_zero(original):
  return lambda self, learner, shard: self._hold(learner, messages.ShardPosition(shard, 0))


@mutant(
  'A batch is committed once it is merged for all fragments.',
  shards.Shards,
  'committed',
  'I21 I21a',
)
def committed_for_all_fragments(original):
  return lambda self, shard: min(self._merged.get(shard, (0,)))


@mutant(
  'The syncer gives a shard to a learner although another one reads it.',
  shards.Shards,
  '_hold',
  'I21 I21a',
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
  'A learner with data of its own gets the number of another one that is away.',
  shards.Shards,
  '_number',
  'I21 I21a',
)
def number_of_another(original):
  def _number(self, former):
    taken = [number for number in range(9) if number not in self._holders and number != former]
    return min(taken) if self._merged.keys() & set(taken) else original(self, former)

  return _number


@mutant(
  'A learner with data of its own that returns begins them again, under a new number.',
  shards.Shards,
  '_number',
  'I21a',
)
def number_not_kept(original):
  return lambda self, former: original(self, None)


@mutant(
  'Learners with data of their own wait for one of V shards.',
  shards.Shards,
  '__init__',
  'I21a',
)
def own_data_are_leased(original):
  return lambda self, shards, fragments, local: original(self, 3 if local else shards, fragments)


def _says_one_batch_too_early(original):
  def send(self, message, payload_id=None):
    if isinstance(message, messages.Contribution) and message.cursor > message.steps:
      message = dataclasses.replace(message, cursor=message.cursor - 1)
    original(self, message, payload_id)

  return send


# No honest learner sends batches that were merged before, so the two guards below need a liar, and
# the checker of honest learners looks away.
LIES = (connection.Connection, 'send', _says_one_batch_too_early)
UNNOTICED = (data.HonestReader, 'fail', lambda original: lambda self, *seen: None)


@mutant(
  'The syncer counts batches that were merged before.',
  shards.Shards,
  'counts',
  'I21',
  also=(LIES, UNNOTICED),
)
def merged_batches_count(original):
  return lambda self, learner, contribution: self._holders.get(contribution.shard) == learner


@mutant(
  'The syncer counts a range whose first batch was merged before.',
  shards.Shards,
  'counts',
  'I21',
  also=(LIES, UNNOTICED),
)
def last_merged_batch_counts(original):
  def counts(self, learner, contribution):
    later = dataclasses.replace(contribution, cursor=contribution.cursor + 1)
    return original(self, learner, later)

  return counts


def _claims_a_million_steps(original):
  def send(self, message, payload_id=None):
    if isinstance(message, messages.Contribution):
      steps, cursor = message.steps + 10**6, message.cursor + 10**6
      message = dataclasses.replace(message, steps=steps, cursor=cursor)
    original(self, message, payload_id)

  return send


@mutant(
  'The syncer believes the steps of a contribution.',
  plausible.Plausibility,
  '_contribution',
  'P3',
  also=(
    (connection.Connection, 'send', _claims_a_million_steps),
    UNNOTICED,
  ),
)
def steps_are_believed(original):
  return lambda self, member, said: ''


@mutant(
  'A process that the syncer does not know continues the incarnation that it claims.',
  members.Members,
  'offer',
  'I12',
  also=((plausible.Plausibility, 'confirm_fault', lambda original: lambda self, *said: ''),),
)
def claimed_incarnations_continue(original):
  def offer(self, join):
    member = self.by_id.get(join.learner)
    return 1 if member is None else member.incarnation + (member.nonce != join.nonce)

  return offer


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


@mutant(
  'A sync waits for learners that it has not pulled.', gathering.Gathering, '_pull_from', 'L2a'
)
def waits_for_all(original):
  def _pull_from(self, gather, members):
    original(self, gather, members)
    gather.waiting |= {
      m.learner for m in members if m.caught_up and m.learner not in gather.payloads
    }

  return _pull_from


@mutant('A learner with a slow link is pulled for every sync.', links.Links, 'pulls', 'L12')
def slow_links_are_asked_for_everything(original):
  return lambda self, member, sync: True


@mutant('A learner with a slow link is never pulled.', links.Links, 'pulls', 'L5')
def slow_links_are_never_asked(original):
  return lambda self, member, sync: original(self, member, sync) and member.up.periods == 1


@mutant('The period factor never shrinks.', links.Links, '_judge_up', 'L13')
def periods_never_shrink(original):
  def _judge_up(self, member):
    before = member.up.periods
    original(self, member)
    member.up.periods = max(before, member.up.periods)

  return _judge_up


@mutant(
  'Deltas go to a learner whose link carries no more.', published.Published, '_has_room', 'I4b I11'
)
def deltas_on_slow_links(original):
  def _has_room(self, member, fragment):
    with mock.patch.object(member.down, 'sparse', False):
      return original(self, member, fragment)

  return _has_room


@mutant('Steps on old whole fragments are carried on.', published.Published, '_send', 'I25')
def steps_on_old_wholes_are_carried(original):
  def _send(self, member, *args):
    with mock.patch.object(member.down, 'sparse', False):
      original(self, member, *args)

  return _send


@mutant('Long payloads count in full.', gathering.Gathering, '_participant', 'L12')
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


@mutant(
  'A learner answers a pull that arrives during a step at once.', LearnerMachine, '_receive', 'I26'
)
def captures_during_a_step(original):
  def _receive(self, now_ns, message, payload_id):
    original(self, now_ns, message, payload_id)
    if isinstance(message, messages.Pull) and self._training == 'training':
      self._answer_pulls()

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
