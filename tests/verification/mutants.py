"""Seeded bugs that the simulation must catch: a simulation is as good as its mutants.

A mutant is a row of the table below: its name, the bug in one sentence, the invariants
(verification/checks/invariants) of which one must catch it within 1,000 seeds, the function of the
production code that it replaces, and what is called instead, with the original as its first
argument. The patch lasts as long as a `with` block; production code knows nothing of it. A mutant
that survives shows a missing checker.

A mutant replaces whole functions instead of patching text, so that a change of the production code
is noticed here: a missing name is an error, and so is a missing argument.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.learner import anchor as anchor_lib
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.learner import pulls as pulls_lib
from diloco_jax.protocol.syncer import join as join_lib
from diloco_jax.protocol.syncer import ledger as ledger_lib
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import plausible, recovery, verdicts
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.protocol.syncer import shards as shards_lib
from diloco_jax.protocol.syncer import sync as sync_lib
from diloco_jax.protocol.syncer import syncs as syncs_lib
from diloco_jax.storage import outer_log, wal
from diloco_jax.verification.sim import arrays
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import processes as sim_processes

Reason = messages.Reason
replace = dataclasses.replace
LearnerMachine, SyncerMachine = learner_machine.LearnerMachine, syncer_machine.SyncerMachine
Anchor, Member, Members = anchor_lib.Anchor, members_lib.Member, members_lib.Members
Membership, Sync, Syncs = join_lib.Membership, sync_lib.Sync, syncs_lib.Syncs
Pace, Published, Shards = pace_lib.Pace, published_lib.Published, shards_lib.Shards


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One seeded bug: each of `replaced` is (owner, name, do), where do(original, *args) is called
  instead of owner.name."""

  name: str
  bug: str
  caught_by: tuple[str, ...]
  replaced: tuple[tuple[Any, str, Callable], ...]

  @contextlib.contextmanager
  def applied(self) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
      for owner, name, do in self.replaced:
        original = getattr(owner, name)
        if isinstance(original, property):
          new = property(functools.partial(do, original.fget))
        else:
          new = _call(do, original)
        stack.enter_context(mock.patch.object(owner, name, new))
      yield


def _call(do: Callable, original: Any) -> Callable:
  return lambda *args, **kwargs: do(original, *args, **kwargs)


# --- What is called instead of the original, in a few words ---------------------------------------


def returns(value: Any) -> Callable:
  return lambda original, *args, **kwargs: value


nothing = returns(None)


def _arguments(original: Callable, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
  return inspect.signature(original).bind(*args, **kwargs)


def sees(**changed: Any) -> Callable:
  """The original gets these arguments instead of its own; a function is called with them all."""

  def do(original, *args, **kwargs):
    bound = _arguments(original, args, kwargs)
    it = types.SimpleNamespace(**bound.arguments)
    for name, value in changed.items():
      assert name in inspect.signature(original).parameters, name
      bound.arguments[name] = value(it) if callable(value) else value
    return original(*bound.args, **bound.kwargs)

  return do


def only(when: Callable, otherwise: Any = None) -> Callable:
  """The original is called only if when(its arguments)."""

  def do(original, *args, **kwargs):
    it = types.SimpleNamespace(**_arguments(original, args, kwargs).arguments)
    return original(*args, **kwargs) if when(it) else otherwise

  return do


def patched(owner: Any, name: str, value: Any, create: bool = False) -> Callable:
  """The original runs while owner.name is `value`."""

  def do(original, *args, **kwargs):
    with mock.patch.object(owner, name, value, create=create):
      return original(*args, **kwargs)

  return do


# --- Contributions --------------------------------------------------------------------------------


def _never_refuses(original, self, fragment, start, end, reason, gap):
  """An account that reports every range as settled, so that a checker and not the machine's own
  assertion catches the mutant."""
  original(self, fragment, start, end, reason, gap)
  return True


SETTLES = (ledger_lib.Account, 'settle', _never_refuses)
ALL_COUNT = (Shards, 'counts', returns(True))


def _all_are_merged(it):
  capture = it.self.capture
  return replace(it.publish, settled_to=capture.tokens) if capture else it.publish


def _drops_capture(original, self, publish, steps, tokens, max_misses):
  new, keep, merged = original(self, publish, steps, tokens, max_misses)
  new.capture = None
  return new, keep, merged


def _finds_a_sync(original, self, member, message):
  verdict = original(self, member, message)
  if verdict is None and not self._config.closing(message.sync):
    return self.due.setdefault(message.fragment, Sync(t=0, fragment=message.fragment))
  return verdict


def _keeps_capture(original, self, steps, tokens):
  capture = self.capture
  original(self, steps, tokens)
  self.capture = capture


def _settles_late(original, self, member, message, payload_id, reason):
  original(self, member, message, payload_id, reason)
  if reason == Reason.LATE:
    self._withdraw(member, message.fragment, message.tokens_to)
    self._settle_tokens(member, message, reason)


def _pulls(original, self, sync, member):
  state, sync.state = sync.state, 'open'
  original(self, sync, member)
  sync.state = state


# --- A learner's answers --------------------------------------------------------------------------


def _on_the_open_session(original, self, encoded):
  if self._encoding and self._connection.joined:
    _, message = self._encoding[0]
    self._encoding[0] = self._connection.session, message
  original(self, encoded)


def _capture_stays(original, self, settled):
  anchor = self._anchors[settled.fragment]
  capture = anchor.capture
  original(self, settled)
  anchor.capture = capture


def _leaves_without_answer(original, self, encoded):
  if encoded.payload_id is None:
    self._encoding.popleft()
  else:
    original(self, encoded)


def _finite(it):
  if not isinstance(it.event, events.MergeDone) or not it.event.failed:
    return it.event
  return replace(it.event, failed='', payload=messages.Payload(size_bytes=64, crc32=0))


def _one_step_more(original, self):
  lag = self._config.lag
  ahead = (
    lag is not None
    and self._training == 'training'
    and self.clock < min(anchor.next_due for anchor in self._anchors) + lag + 1
  )
  return original(self) or ahead


def _answers_beside_the_queue(original, self, fragment, t):
  encoding, self._encoding = self._encoding, []
  original(self, fragment, t)
  encoding.extend(self._encoding)
  self._encoding = encoding


def _forgets_pull(original, self, fragment, t):
  if self._anchors[fragment].capture:
    self._pulls.answered(fragment)
  else:
    original(self, fragment, t)


def _adopts_at_once(original, self, now_ns, message, payload_id):
  original(self, now_ns, message, payload_id)
  if self._training == 'training':
    for publish, arrived in self._arrivals:
      self._adopt(publish, arrived)
    self._arrivals.clear()


def _keeps_steps(original, self, position):
  before = [(anchor.steps, anchor.tokens, anchor.capture) for anchor in self._anchors]
  original(self, position)
  self._out._actions[-1] = replace(self._out._actions[-1], rewind=False)
  for anchor, (steps, tokens, capture) in zip(self._anchors, before):
    anchor.steps, anchor.tokens, anchor.capture = steps, tokens, capture


def _claims_one_more(original, self, now_ns, incarnation):
  position = self._position
  if position is not None:
    self._position = position._replace(cursor=position.cursor + 1)
  original(self, now_ns, incarnation)
  self._position = position


# --- Quorum and pace ------------------------------------------------------------------------------


def _merges_at_quorum(original, sync, now_ns, needed, live):
  if not sync.merging and len(sync.payloads) >= max(1, needed):
    return 'merge', 'there is a quorum'
  return original(sync, now_ns, needed, live)


def _waits(original, *args):
  verdict, why = original(*args)
  return ('wait' if verdict == 'cancel' else verdict), why


def _first_is_enough(original, self, front):
  if front is self.announcing:
    return original(self, front)
  return bool(front.ready) and len(self.contributors) >= self._config.quorum and not self.over


def _last_is_needed(original, self, front):
  slowest = front is self.announcing or len(front.ready) >= len(self.contributors)
  return original(self, front) and slowest


def _in_flight_or_not(original, self):
  free = len(self._syncs.open) < self._tempo.in_flight
  return not self._stopping and self._pace.is_reached(self._pace.opening) and free


def _skips_one_more(original, self):
  periods = original(self)
  if periods:
    self.opening.t = self._schedule.next(self.opening.t)
  return periods


def _lingers_no_time(original, self, now_ns):
  original(self, now_ns)
  self._linger_ns = now_ns


# --- Members and what they get --------------------------------------------------------------------


def _holds_at_join(original, self, now_ns, session, message):
  original(self, now_ns, session, message)
  offered = self._offered.get(session)
  before = self._members.by_id.get(message.learner)
  if offered and before is not None and before.nonce not in (None, message.nonce):
    before.nonce, before.incarnation = message.nonce, offered.incarnation


def _offers_another(original, self, join):
  member = self.by_id.get(join.learner)
  return 1 if member is None else member.incarnation + 1


def _admits_at_join(original, self, now_ns, session, message):
  original(self, now_ns, session, message)
  self._out.do(actions.Admit(session=session))


def _admits_nobody(original, self, *args):
  with mock.patch.object(self._out, 'do'):
    original(self, *args)


def _does_not_answer(original, self, now_ns, session, confirm):
  offered = self._offered.get(session)
  if offered is None or offered.incarnation == 1:
    return original(self, now_ns, session, confirm)


def _only_counts(original, self, now_ns, member, adopted):
  self.repaired += 1


def _sends_whatever_it_holds(original, self, member, publish, payload_id):
  in_flight = member.copies[publish.fragment].in_flight
  if member.joined and len(in_flight) < messages.MAX_VERSIONS_IN_FLIGHT:
    self._send(member, publish, payload_id)


def _sends_any_number(original, self, member, publish, payload_id):
  if member.joined and member.copies[publish.fragment].state == 'follows':
    self._send(member, publish, payload_id)


def _sends_all_at_once(original, self, member):
  with mock.patch.object(messages, 'MAX_WHOLES', len(self.fragments)):
    original(self, member)


def _sends_one_at_a_time(original, self, member):
  if not any(copy.is_whole for copy in member.copies):
    with mock.patch.object(messages, 'MAX_WHOLES', 1):
      original(self, member)


def _sends_no_newest(original, self, member, adopted):
  with mock.patch.object(self, 'catch_up'):
    original(self, member, adopted)


def _keeps_payloads(original, self, name):
  for sync in self._all():
    sync.waiting.discard(name)
    sync.asked.discard(name)
    sync.withdraw(name)


def _in_some_order(original, self):
  """As a set orders them under some hash seed: under most, or the mutant would be right by
  chance."""
  names = {member.learner: member for member in self.by_session.values()}
  return [names[name] for name in sorted(names, key=lambda name: zlib.crc32(name.encode()))]


def _raises(original, self, member, reason, finished):
  raise KeyError(member.learner)


# --- Durability -----------------------------------------------------------------------------------


def _goes_on(original, self, *args, **kwargs):
  try:
    return original(self, *args, **kwargs)
  except wal.WalBroken:
    self._broken = ''


def _reads_unchecked(original, files, run, base, last):
  for number in range(base + 1, last + 1):
    kind, size, chain = wal._header(files, run, number, base)
    payload = files.read(wal.name_of(number), wal.HEADER_BYTES, size)
    yield wal.Record(number, kind, chain, memoryview(payload))


def _drops_damage(original, files, run, *args):
  while True:
    try:
      return original(files, run, *args)
    except wal.WalDamaged:
      numbers = wal.numbers(files)
      if len(numbers) < 2:
        raise
      files.remove(wal.name_of(numbers[-1]))


def _names_unfinished(original, files, *args, **kwargs):
  if wal.NEW in files.names() and (numbers := wal.numbers(files)):
    files.rename(wal.NEW, wal.name_of(numbers[-1] + 1))
  return original(files, *args, **kwargs)


def _compacts_first(original, self, save):
  self.log.drop_before(self.log.committed)
  self.world.logged('compacted', self.log.first + 1)
  yield from original(self, save)


def _state_at_the_end(original, self, now_ns, event):
  return [
    replace(action, machine_state=self.state()) if isinstance(action, actions.Merge) else action
    for action in original(self, now_ns, event)
  ]


def _moves_at_once(original, self, t, fragment, payloads):
  original(self, t, fragment, payloads)
  moves = self._moves[t]
  self.end(t, (), failed=False)
  self._moves[t] = moves


def _lets_another_hold(original, self, learner, position):
  position = original(self, learner, position)
  del self._holders[position.shard]
  self._holders[position.shard - self._shards] = learner
  return position


def _fragment_0_is_never_finite(original, self, merge):
  self._process.not_finite |= merge.fragment == 0
  return original(self, merge)


def _posts_no_time(it):
  return replace(it.event, step_ns=0) if isinstance(it.event, events.StepDone) else it.event


# --- The table ------------------------------------------------------------------------------------


def _row(name: str, caught_by: str, bug: str, *replaced: Any) -> Mutant:
  owner, attribute, do, *also = replaced
  return Mutant(name, bug, tuple(caught_by.split()), ((owner, attribute, do), *also))


# fmt: off
_ROWS = (
  # Contributions
  _row('no_dedup', 'I7 I21 claim', 'The syncer counts a settled range again.',
       verdicts, 'judge', sees(cursor=-1), SETTLES, ALL_COUNT),
  _row('stale_base_merged', 'I6', 'The syncer merges a payload with an anchor of any age.',
       verdicts, 'judge', sees(oldest=0)),
  _row('merge_in_arrival_order', 'I15', 'The syncer merges payloads in the order of arrival.',
       Syncs, 'merge', patched(syncs_lib, 'sorted', list, create=True)),
  _row('discard_without_ledger', 'I7', 'The ledger does not record discarded tokens.',
       ledger_lib.Account, 'settle', only(lambda it: not it.reason, otherwise=True)),
  _row('overwritten_payload_stays', 'I7 claim',
       'A payload stays in its open sync when its tokens are overwritten.',
       Syncs, '_withdraw', nothing, SETTLES),
  _row('merged_payload_is_not_reported', 'I7c',
       'The syncer does not tell a learner that its contribution was merged.',
       Syncs, 'send_verdict', only(lambda it: it.reason)),
  _row('long_payloads_count_in_full', 'I7', 'Long payloads count in full.',
       Syncs, '_participant', lambda original, *args: replace(original(*args), slow=False)),

  # Rebase
  _row('capture_is_always_merged', 'I25',
       'A learner takes a capture as merged, whatever the syncer says.',
       Anchor, 'adopt', sees(publish=_all_are_merged)),
  _row('capture_is_never_merged', 'I25',
       'A learner takes no capture as merged, whatever the syncer says.',
       Anchor, 'adopt',
       sees(publish=lambda it: replace(
         it.publish, settled_to=min(it.publish.settled_to, it.self.tokens)))),
  _row('keep_is_ignored', 'I25',
       'A learner carries its steps on although the syncer refused its update.',
       Anchor, 'adopt', sees(publish=lambda it: replace(it.publish, keep=True))),
  _row('whole_counts_the_step_in_progress', 'I25',
       'A whole fragment counts the tokens of an outer step in progress as settled.',
       Syncs, 'merging_from', returns({})),
  _row('undecided_capture_is_dropped', 'I1b I25 L4a',
       'A learner drops a capture that is late before it knows what became of it.',
       Anchor, 'adopt', _drops_capture),
  _row('late_payloads_are_not_counted', 'I5 I7c I11 L2a', 'The syncer keeps all late payloads.',
       Syncs, '_next', _finds_a_sync),
  _row('late_verdict_names_another_sync', 'I7c',
       'The verdict on a late payload names another sync.',
       Sync, 'given_for', lambda original, self, learner: self.t),
  _row('rewound_capture_stays', 'I1b I25', 'A learner that undoes its steps keeps its capture.',
       Anchor, 'rewind', _keeps_capture),
  _row('late_tokens_are_settled', 'I25 I7',
       'The ledger settles a late payload although its learner keeps the tokens.',
       Syncs, '_reject', _settles_late),
  _row('spoiled_is_not_saved', 'I10 I16 I25',
       'The next syncer has forgotten which learners must drop their steps.',
       Members, 'state', lambda original, self: [{**row, 'spoiled': []} for row in original(self)]),
  _row('given_too_early', 'I1b', 'A learner gives a fragment before it is due.',
       pulls_lib.Pulls, '_given_at', lambda original, self, t: original(self, t) - 1),
  _row('given_when_asked', 'L4a', 'A learner gives a fragment only when the sync has opened.',
       pulls_lib.Pulls, 'due', lambda original, self, clock, ends: [
       due for due in original(self, clock, ends) if ends or due[0] in self._open]),
  _row('announced_is_open', 'P1', 'An announced sync pulls like an open one.',
       Syncs, '_pull', _pulls),
  _row('closes_too_early', 'P1', 'A closing sync opens while a learner still trains.',
       Pace, '_needed', lambda original, self, t: (
       self._config.quorum if self._config.closing(t) else original(self, t))),
  _row('closing_does_not_wait', 'I5 L2a',
       'A closing sync ends with the grace window of the others.',
       Syncs, '_window_ns', sees(sync=lambda it: replace(it.sync, t=0))),
  _row('closing_syncs_are_lost', 'I7 P1',
       'The next syncer does not reopen a closing sync that ended with the last one.',
       Pace, 'reopen', sees(undecided=())),

  # A learner's answers
  _row('old_capture_on_a_new_session', 'I1b',
       'A learner sends a capture on whichever session is open when it is encoded.',
       LearnerMachine, '_encoded', _on_the_open_session),
  _row('contributes_while_due', 'P1 L5', 'The syncer pulls from a joiner before it has caught up.',
       Member, 'caught_up', lambda original, self: self.live and self.joined),
  _row('no_resend_after_cancel', 'I1b L4a',
       'After a cancelled sync the learner does not send its tokens again.',
       LearnerMachine, '_settled', _capture_stays),
  _row('no_resend_after_reconnect', 'I1b I25 L4a',
       'After a reconnect the learner does not send its tokens again.',
       Anchor, 'settled', nothing),
  _row('nan_is_not_declined', 'I9', 'A learner does not decline a pull whose capture has NaN.',
       LearnerMachine, '_encoded', _leaves_without_answer),
  _row('step_waits_for_verdict', 'L1',
       'A learner defers its next step until its contribution is settled.',
       LearnerMachine, '_may_step',
       lambda original, self: (
         original(self) and not any(anchor.capture for anchor in self._anchors))),
  _row('lag_is_one_more', 'L1', 'In lock-step modes a learner runs one step too far.',
       LearnerMachine, '_may_step', _one_step_more),
  _row('late_publish_moves_back', 'I4 I4b',
       'A late publish moves a learner back to an older version.',
       Anchor, 'covers', returns(False)),
  _row('adopts_during_a_step', 'I26',
       'A learner adopts a version that arrives during a step at once.',
       LearnerMachine, '_receive', _adopts_at_once),
  _row('digest_not_compared', 'I7b', 'A learner does not compare the digest of adopted bits.',
       LearnerMachine, '_adopt_done',
       sees(done=lambda it: replace(it.done, digest=it.self._adopting[0][1].digest))),
  _row('tokens_of_the_last_incarnation', 'I7b I25 I7',
       'A learner counts the tokens of its last incarnation again.',
       LearnerMachine, '_begin_incarnation', nothing),
  _row('pull_is_forgotten', 'L4a', 'A learner forgets a pull while it has nothing to contribute.',
       LearnerMachine, '_answer', _forgets_pull),
  _row('captures_pile_up', 'I11', 'Captures pile up before a slow encoder.',
       LearnerMachine, '_answer', _answers_beside_the_queue),
  _row('counts_steps_that_still_run', 'I26', 'A learner counts steps of which none is complete.',
       sim_processes.Learner, 'post', sees(event=_posts_no_time)),

  # Bad updates
  _row('nan_is_merged', 'claim', 'The syncer merges a payload with NaN.',
       screening_lib, 'refused',
       lambda original, norm, least, limit: norm >= 0 and original(norm, least, limit)),
  _row('refused_tokens_stay_merged', 'I7 I7c I16',
       'The tokens of a refused participant stay merged.',
       Syncs, '_publish', sees(done=lambda it: replace(it.done, refused=()))),
  _row('not_finite_is_published', 'I9 I3', 'The syncer publishes a result that is not finite.',
       SyncerMachine, '_dispatch', sees(event=_finite)),
  _row('fragment_is_never_merged', 'L2', 'No outer step of fragment 0 is finite any more.',
       arrays.Syncer, '_merge', _fragment_0_is_never_finite),

  # Quorum and pace
  _row('quorum_is_one_less', 'I5', 'One payload too few makes a quorum.',
       sync_lib, 'decide', sees(needed=lambda it: it.needed and max(1, it.needed - 1))),
  _row('no_grace', 'I5', 'The syncer waits for no other learner once it has a quorum.',
       sync_lib, 'decide', _merges_at_quorum),
  _row('grace_never_ends', 'L2a', 'The grace window never closes.',
       Sync, 'close_ns', returns(10**18)),
  _row('never_cancelled', 'L2a', 'A sync that can no longer reach its quorum stays open.',
       sync_lib, 'decide', _waits),
  _row('fastest_sets_the_pace', 'P1', 'The fastest learner alone sets the pace.',
       Pace, 'is_reached', _first_is_enough),
  _row('slowest_sets_the_pace', 'P1', 'The slowest learner sets the pace.',
       Pace, 'is_reached', _last_is_needed),
  _row('fragment_in_flight_twice', 'P1', 'The syncer opens a second sync of a fragment in flight.',
       SyncerMachine, '_may_open', _in_flight_or_not),
  _row('skips_single_syncs', 'P1', 'The syncer skips a single fragment when syncs are overdue.',
       Pace, 'skip_overdue', _skips_one_more),
  _row('every_sync_has_a_turn', 'P1', 'Every fragment has a turn in every period.',
       Pace, '_after', lambda original, self, t: self._schedule.next(t)),
  _row('late_joiner_is_not_asked', 'L5',
       'Open syncs do not pull from a joiner that has just caught up.',
       Syncs, 'enter', nothing),
  _row('one_in_flight', 'P1', 'The syncer opens one sync at a time, whatever tau is.',
       SyncerMachine, '_may_open', lambda original, self: not self._syncs.open and original(self)),
  _row('ends_too_early', 'P2 I7', 'A syncer exits before all learners know that the run is over.',
       SyncerMachine, '_finish', _lingers_no_time),
  _row('cancel_is_not_reported', 'I7c L1 L2a',
       'The syncer does not tell a waiting lock-step learner of a cancelled sync.',
       Syncs, 'cancel', patched(Syncs, 'send_verdict', lambda *args: None)),

  # Members: leases, ids and versions
  _row('lease_never_ends', 'L8', 'No lease ever ends.',
       Members, 'expired', returns([])),
  _row('no_fencing', 'I12', 'A replaced process may rejoin.',
       Members, 'replaced', returns(False)),
  _row('no_hold_on_a_live_id', 'I13', 'A second process displaces the live holder of an id.',
       Members, 'held_by_other', nothing),
  _row('one_phase_join', 'I7 I12 I13 I16 I19', 'A Join holds the id before its Confirm.',
       Membership, 'join', _holds_at_join),
  _row('join_not_idempotent', 'I12',
       'A repeated Join of the same process begins another incarnation.',
       Members, 'offer', _offers_another),
  _row('lost_with_process_forgotten', 'I7 I16',
       'The ledger forgets the unsettled tokens of a replaced process.',
       ledger_lib.Account, 'close', only(lambda it: it.reason != Reason.LOST_WITH_PROCESS)),
  _row('replaced_account_disappears', 'I7 I16', 'The account of a replaced process disappears.',
       ledger_lib.Ledger, 'fold', lambda original, self, learner, incarnation, into='': (
         self.accounts.pop((learner, incarnation)))),
  _row('jumped_clock_is_implausible', 'I13', 'A clock that jumped to an open sync is implausible.',
       plausible.Plausibility, '_newest_clock', lambda original, self, member: member.claimed),
  _row('strangers_are_admitted', 'I19', 'A process is admitted before its Confirm.',
       Membership, 'join', _admits_at_join),
  _row('members_are_not_admitted', 'I19', 'A member is taken for a stranger.',
       Membership, '_admit', _admits_nobody),
  _row('taking_over_is_ignored', 'I7 L3 L5 I13 I19',
       'The syncer never answers a process that takes over an id.',
       Membership, 'confirm', _does_not_answer),
  _row('wrong_bits_are_left', 'I4b', 'The syncer counts wrong bits but does not replace them.',
       Membership, '_repair', _only_counts),
  _row('machine_raises', 'crash', 'A machine raises.',
       Membership, 'leave', _raises),
  _row('delta_to_every_learner', 'I4b',
       'The syncer sends a delta to every learner, whatever it holds.',
       Published, 'send_delta', _sends_whatever_it_holds),
  _row('slow_learner_is_flooded', 'I11', 'The syncer sends a slow learner any number of versions.',
       Published, 'send_delta', _sends_any_number),
  _row('joiner_is_flooded', 'I11',
       'The syncer sends a joiner every fragment that is due to it at once.',
       Published, 'catch_up', _sends_all_at_once),
  _row('one_whole_at_a_time', 'L5 I4b',
       'A joiner has the next fragment read only when it has adopted the one before.',
       Published, 'catch_up', _sends_one_at_a_time),
  _row('never_catches_up', 'I4b L5',
       'The syncer never sends the newest value to a learner that fell behind.',
       Published, 'adopted', _sends_no_newest),

  # Resources and determinism
  _row('withdrawn_payload_leaks', 'I11 I5', 'The syncer never frees a withdrawn payload.',
       Syncs, 'drop_learner', _keeps_payloads),
  _row('order_of_a_set', 'I15',
       'The order of a set, which depends on the hash seed, decides which learner is served first.',
       Members, 'live', _in_some_order),
  _row('payloads_before_heartbeats', 'L11',
       'A transport hands all payloads to the link at once, so heartbeats wait behind them.',
       network_lib.Link, '__init__', lambda original, *args, **settings: (
       original(*args, **(settings | {'queue_ns': 10**12})))),

  # Durability
  _row('finish_before_it_is_saved', 'I8b P2',
       'The syncer sends Finish before the disk shows that the run is over.',
       SyncerMachine, '_close_run', lambda original, self, now_ns: self._finish(now_ns)),
  _row('failed_save_counts', 'I8b', 'The syncer treats a failed last checkpoint as a good one.',
       recovery.SyncerSaves, 'end', sees(failed=False)),
  _row('failed_fsync_ignored', 'I8', 'The log ignores a failed fsync and goes on.',
       wal.Wal, '_do', _goes_on),
  _row('record_is_not_fsynced', 'I8', 'A commit does not fsync the record.',
       wal.Wal, '_do', only(lambda it: it.call.__name__ != 'fsync')),
  _row('broken_payload_accepted', 'I10',
       'Recovery accepts a record of which only the header is whole.',
       wal, '_records', _reads_unchecked),
  _row('damage_is_dropped', 'I10', 'Recovery drops a damaged record and those behind it.',
       wal, '_verify', _drops_damage),
  _row('unfinished_record_counts', 'I8', 'Recovery gives the unfinished record its name.',
       wal, 'open_log', _names_unfinished),
  _row('last_record_forgotten', 'I10', 'Recovery forgets the last record.',
       recovery, 'replay_log', sees(records=lambda it: it.records[:-1])),
  _row('refused_merge_counts', 'I10', 'Recovery counts an outer step that was refused.',
       SyncerMachine, 'ended', sees(done=lambda it: replace(it.done, failed=''))),
  _row('outer_steps_in_progress_forgotten', 'I10',
       'Recovery forgets the outer steps in progress in the machine state.',
       SyncerMachine, 'ended', nothing),
  _row('position_is_one_too_far', 'I10', 'A checkpoint claims to cover one record too many.',
       outer_log, 'position',
       lambda original, log: {**original(log), 'log': log.committed + 1}),
  _row('compacts_too_early', 'I20', 'Compaction runs before the checkpoint is verified.',
       sim_processes.Syncer, '_checkpoint', _compacts_first),
  _row('saves_during_a_merge', 'I16',
       'The syncer saves its state while an outer step is in progress.',
       SyncerMachine, '_save_waits', returns(False)),
  _row('machine_state_after_the_turn', 'I16',
       'The machine state of an outer step is that at the end of the turn, not at its decision.',
       SyncerMachine, 'handle', _state_at_the_end),

  # Data shards
  _row('cursor_moves_at_decision', 'I16',
       'A cursor moves when the outer step is decided, and its machine state has the new one.',
       Shards, 'merge', _moves_at_once),
  _row('refused_cursor_stays', 'I10 I16 I21 I21a', 'A refused outer step moves its cursors.',
       Shards, 'end', sees(refused=(), failed=False)),
  _row('cursors_forgotten', 'I10 I16 I21 I21a', 'A restarted syncer has forgotten the cursors.',
       Shards, 'load', sees(state=lambda it: {**it.state, 'merged': []})),
  _row('committed_for_all_fragments', 'I10 I16 I21 I21a',
       'A batch is committed once it is merged for all fragments.',
       Shards, 'committed', lambda original, self, shard: min(self._merged.get(shard, (0,)))),
  _row('two_learners_one_shard', 'I10 I16 I21 I21a',
       'The syncer gives a shard to a learner although another one reads it.',
       Shards, '_hold', _lets_another_hold),
  _row('leased_during_a_merge', 'I21a',
       'The syncer gives out a shard while an outer step may move its cursor.',
       Shards, '_moving', returns(False)),
  _row('number_not_kept', 'I21a',
       'A learner with data of its own that returns begins them again, under a new number.',
       Shards, '_number', sees(former=None)),
  _row('not_rewound', 'I21b I25',
       'A process that is given another shard keeps the steps trained on the last one.',
       LearnerMachine, '_use_shard', _keeps_steps),
  _row('claims_too_much', 'I21b', 'A learner claims a position one batch too far.',
       LearnerMachine, '_confirm', _claims_one_more),
)
# fmt: on

MUTANTS: dict[str, Mutant] = {row.name: row for row in _ROWS}
assert len(MUTANTS) == len(_ROWS), 'two mutants have one name'
