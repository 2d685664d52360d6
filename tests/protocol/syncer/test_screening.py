"""Bad updates: each is refused by itself, its sender is told, and quarantined after three.

What is "too long" is pure; what follows is shown on one syncer with two learners.
"""

import dataclasses
import functools
import json

import pytest

from diloco_jax.protocol import actions, events, messages, rate_limited_log
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import recovery, screening
from diloco_jax.protocol.syncer import sync as sync_lib
from diloco_jax.verification.sim import network
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import single, transcript

UNIT, BAD = screening.UNIT, screening.NOT_FINITE
SECOND_NS = 10**9


def config(**changes):
  return transcript.protocol_config(
    **{
      'norm_factor': 10,
      'learners': 1,
      'fragments': 1,
      'period': 1,
      'overlap': 0,
      'quorum': 1,
      'total_steps': 9,
      **changes,
    }
  )


# --- The limit of norms ---------------------------------------------------------------------------


def usual(*norms: int, commits: int = 8, steps: int = 4) -> screening.Usual:
  """What is usual after merges of l0, l1, ..., each of them always with one norm."""
  made = screening.Usual()
  for _ in range(commits):
    made.merged({f'l{m}': (norm, steps) for m, norm in enumerate(norms)})
  return made


def test_the_limit_is_ten_times_the_median_of_the_learners_after_the_warm_up():
  norms = (3 * UNIT, UNIT, 2 * UNIT)
  assert usual(*norms).limits(4, config())[1] == 20 * UNIT
  assert usual(*norms, commits=7).limits(4, config()) == (0, None)  # not yet
  assert usual(*norms, commits=2).limits(4, config(norm_warmup=2))[1] == 20 * UNIT
  assert usual(*norms, commits=1).limits(4, config(norm_warmup=1)) == (0, None)  # no first norm
  assert usual(*norms).limits(4, config(norm_factor=3))[1] == 6 * UNIT
  assert usual(*norms).limits(4, config(norm_factor=0)) == (0, None)


def test_the_limit_grows_with_more_steps_up_to_a_bound_and_does_not_shrink_with_fewer():
  limits = [usual(2 * UNIT).limits(steps, config(), steps)[1] for steps in (1, 4, 8, 400, 10**6)]
  assert limits == [20 * UNIT, 20 * UNIT, 40 * UNIT, 640 * UNIT, 640 * UNIT]


def test_the_steps_of_one_learner_alone_do_not_make_the_limit_grow():
  """found A1: a claim of 900,000 steps made a norm of 320 times the usual one allowed."""
  limits = [usual(2 * UNIT).limits(10**6, config(), shared)[1] for shared in (0, 4, 8, 100)]
  assert limits == [80 * UNIT, 80 * UNIT, 160 * UNIT, 640 * UNIT]


def test_a_norm_that_has_all_but_vanished_is_refused_and_fewer_steps_may_be_shorter():
  made = usual(2 * UNIT, 2 * UNIT)
  least = [made.limits(steps, config())[0] for steps in (400, 4, 1)]
  assert least == [UNIT >> 19, UNIT >> 19, UNIT >> 21]


def test_steps_between_two_updates_of_an_accumulating_optimizer_have_no_vote():
  assert usual(0, 0).limits(4, config()) == (0, None)
  made = usual(2 * UNIT, 2 * UNIT, commits=2)
  for _ in range(9):
    made.merged({'l0': (0, 4), 'l1': (0, 4)})
  assert made.limits(4, config()) == (UNIT >> 19, 20 * UNIT)


def test_norms_that_are_not_finite_are_always_refused():
  assert screening.refused(BAD, 0, None) and screening.refused(BAD, 0, 10)
  assert not screening.refused(11, 0, None) and not screening.refused(10, 0, 10)
  assert screening.refused(11, 0, 10) and screening.refused(4, 5, 10)


def test_one_learner_has_one_vote_however_often_it_is_merged():
  made = usual(2 * UNIT, 2 * UNIT)
  for _ in range(1000):
    made.merged({'liar': (1, 4)})
  assert made.limits(4, config()) == (UNIT >> 19, 20 * UNIT)
  assert sum(map(len, made.pairs.values())) <= screening.KEPT


@pytest.mark.parametrize('other', [1, 2**40 * UNIT])
def test_of_two_votes_none_makes_the_norms_of_the_other_wrong(other):
  least, limit = usual(2 * UNIT, other).limits(4, config())
  assert not screening.refused(2 * UNIT, least, limit)


def test_a_single_vote_makes_no_norm_too_small():
  made = usual(2 * UNIT)
  assert made.limits(4, config()) == (0, 20 * UNIT)


def test_more_than_half_of_the_learners_are_not_wrong():
  # One learner cannot do it (above), so the usual norm is wrong: nobody is quarantined for it.
  duo = warm()
  for _ in range(2):
    assert not any(isinstance(one, actions.Close) for one in duo.round(60 * UNIT, 60 * UNIT))
  out = duo.round(60 * UNIT, 60 * UNIT)
  assert not any(isinstance(one, actions.Close) for one in out)
  assert duo.version > 8 and duo.member()['strikes'] == 0


def test_a_norm_that_is_common_among_the_live_learners_is_not_too_large():
  """After a change of the learning rate all have grown. No half of them makes a norm common."""
  limit, far = 10 * UNIT, 60 * UNIT

  def left_out(*norms: int, live: int) -> tuple[str, ...]:
    participants = [
      actions.Participant(
        learner=f'l{m}', incarnation=1, payload_id=m, tokens=40, steps=4, limit=limit
      )
      for m in range(len(norms))
    ]
    return screening.left_out(participants, norms, live, 10)

  assert left_out(far, far, 2 * far, live=3) == ()
  assert left_out(UNIT, far, far, 2 * far, live=4) == ()
  assert left_out(UNIT, UNIT, far, far, live=4) == ('l2', 'l3')  # half of them
  assert left_out(UNIT, far, live=2) == ('l1',)
  assert left_out(far, live=1) == left_out(far, live=4) == ('l0',)
  assert left_out(far, far, live=4) == ('l0', 'l1')  # two of four
  assert left_out(far, far, BAD, 800 * far, live=4) == ('l2', 'l3')


# --- Steps that the learners share after a stall --------------------------------------------------


class Stalled:
  """A syncer with quorum 1 whose disk was full after 9 outer steps of l0 and l1, norms of 2."""

  def __init__(self, *steps: int, joined: bool = False):
    """In the last one each has made so many steps; `joined`: l1 is another process since."""
    self.machine, _ = single.joined(quorum=1, learners=2, total_steps=400, norm_factor=10)
    self.lease_ns = self.machine._config.lease_ns
    self.now_ns, self.tokens, self.merges = 2, 0, []
    self.send(2, single.join(learner='l1', nonce=8))
    self.send(2, single.confirm(nonce=8))
    for sync in range(2, 20, 2):
      self.contribute(sync, 0, 1, to=10 * sync - 10)
      for m in (0, 1):
        self.send(m + 1, single.progress(sync))
      for m in (0, 1) if sync == 18 else ():
        self.send(m + 1, single.progress(sync + steps[m]))
      done = dataclasses.replace(single.merge_done(sync), norms=(2 * UNIT, 2 * UNIT))
      self.handle(done)
      for m in (0, 1):
        adopted = messages.Adopted(fragment=0, version=sync // 2, tokens=self.tokens, matched=True)
        self.send(m + 1, adopted)
    if joined:
      self.handle(events.Disconnected(session=2, reason='killed'))
      self.send(3, single.join(learner='l1', nonce=9))
      held = (messages.Held(version=9, digest=78),)
      self.send(3, dataclasses.replace(single.confirm(nonce=9), incarnation=2, held=held))
    self.sync = self.machine.clock
    self.merges.clear()

  def handle(self, event: events.Event) -> None:
    self.now_ns += self.lease_ns // 100
    out = self.machine.handle(self.now_ns, event)
    self.machine.check()
    self.merges += [one for one in out if isinstance(one, actions.Merge)]

  def send(self, session: int, message: messages.Message, payload_id: int | None = None) -> None:
    self.handle(single.received(session, message, payload_id))

  def contribute(self, sync: int, *learners: int, to: int) -> None:
    """They answer with all that they have trained up to the token `to`."""
    for m in learners:
      self.send(m + 1, single.progress(to // 10))
      said = single.contribution(sync, self.tokens, to, shard=m)
      steps, version = (to - self.tokens) // 10, self.machine.state()['versions'][0]
      self.send(m + 1, dataclasses.replace(said, steps=steps, version=version), payload_id=m)
    self.tokens = to

  def back(self, session: int, m: int, clock: int, version: int = 9) -> None:
    """The process of a learner connects again."""
    join = single.join(learner=f'l{m}', nonce=7 + m, incarnation=1)
    self.send(session, dataclasses.replace(join, run='r0'))
    held = (messages.Held(version=version, digest=78),)
    claim = dataclasses.replace(single.confirm(nonce=7 + m), clock=clock, steps=clock, held=held)
    claim = dataclasses.replace(claim, tokens=10 * clock, shard=m, cursor=clock)
    self.send(session, claim)

  def limits(self) -> list[int]:
    return [one.limit for merge in self.merges for one in merge.participants]


def test_after_a_stall_the_first_outer_step_waits_for_all_and_no_honest_norm_is_too_large():
  """D1b: a full disk, and each learner had 150 steps when it could write again."""
  run = Stalled(150, 150)
  run.contribute(run.sync, 0, to=1680)
  assert not run.merges
  run.now_ns += run.lease_ns // 2
  run.send(2, messages.Heartbeat())
  assert not run.merges
  run.send(2, messages.Decline(sync=run.sync, fragment=0, reason='empty', tokens_to=170))
  assert run.limits() == [20 * screening.GROWTH * UNIT]
  for _ in range(3):  # the next stall, soon after
    run.now_ns += run.lease_ns // 2
    for session in (1, 2):
      run.send(session, single.progress(318))
  run.handle(single.merge_done(run.sync))
  (sync,) = run.machine._syncs.open.values()
  assert sync.grace_ns == run.lease_ns


@pytest.mark.parametrize('when', ['waits in its sync', 'comes later'])
def test_a_late_payload_of_the_time_before_a_stall_is_no_answer_for_the_steps_of_it(when):
  """l0 was late for the last sync before the stall: it answers the first one after it anew."""
  run = Stalled(0, 0)
  late = dataclasses.replace(single.contribution(20, 170, 200), steps=3, version=9)
  for session in (1, 2):
    run.send(session, single.progress(20))
  run.contribute(20, 1, to=200)
  run.now_ns += run.lease_ns // 2
  run.send(2, messages.Heartbeat())
  assert [[one.learner for one in merge.participants] for merge in run.merges] == [['l1']]
  if when == 'waits in its sync':
    run.send(1, late, payload_id=7)
  for session in (1, 2):
    run.send(session, single.progress(168))
  run.merges.clear()
  run.handle(dataclasses.replace(single.merge_done(20), norms=(2 * UNIT,)))
  run.contribute(run.machine.clock, 1, to=1680)
  if when == 'comes later':
    run.send(1, late, payload_id=7)
  assert run.machine.clock == 168 and not run.merges, 'it waits for l0'
  run.tokens = 170
  run.contribute(168, 0, to=1680)
  (merge,) = run.merges
  assert [(one.learner, one.steps) for one in merge.participants] == [('l0', 151), ('l1', 148)]


def test_what_was_open_before_a_stall_is_no_wait_in_vain():
  """A frozen syncer wakes up, and the window of the sync that was open has ended meanwhile."""
  run = Stalled(0, 0)
  for session in (1, 2):
    run.send(session, single.progress(20))
  run.now_ns += 2 * run.lease_ns
  for m in (0, 1):
    run.handle(events.Disconnected(session=1 + m, reason='lease expired'))
  for m in (0, 1):
    run.back(3 + m, m, clock=168)
  said = dataclasses.replace(single.contribution(20, 170, 1680), steps=151, version=9)
  run.send(3, said, payload_id=5)
  assert [[one.learner for one in merge.participants] for merge in run.merges] == [['l0']]
  assert not run.machine._syncs._in_vain


def test_each_outage_has_its_own_lease_to_wait_for_all():
  """Also the second one, soon after the first."""
  run = Stalled(0, 0)
  for outage in (1, 2):
    for m in (0, 1):
      run.handle(events.Disconnected(session=2 * outage - 1 + m, reason='cut'))
    run.now_ns += run.lease_ns
    for m in (0, 1):
      run.back(2 * outage + 1 + m, m, clock=18 + 40 * outage)
    (sync,) = run.machine._syncs.open.values()
    assert sync.grace_ns == run.lease_ns
    for m in (0, 1):
      said = messages.Decline(sync=sync.t, fragment=0, reason='empty', tokens_to=0)
      run.send(2 * outage + 1 + m, said)


def test_a_learner_far_ahead_of_one_that_returned_is_waited_for():
  """l1 died with the syncer, and a new process of it joins before l0 has answered: the run goes on
  at its clock, but l0 has trained 150 steps alone."""
  run = Stalled(0, 0)
  run.machine = syncer_machine.SyncerMachine.restore(
    run.machine._config, world_lib.AGREEMENT, (network.PAYLOAD_BYTES,), run.machine.state()
  )
  run.back(3, 0, clock=168)
  run.send(4, single.join(learner='l1', nonce=9))
  held = (messages.Held(version=9, digest=78),)
  run.send(4, dataclasses.replace(single.confirm(nonce=9), incarnation=2, held=held))
  (sync,) = run.machine._syncs.open.values()
  assert sync.t == 20 and sync.grace_ns == run.lease_ns
  one_step = dataclasses.replace(single.contribution(20, 0, 10, shard=1), steps=1, version=9)
  one_step = dataclasses.replace(one_step, cursor=18)
  all_steps = dataclasses.replace(single.contribution(20, 170, 1680), steps=151, version=9)
  run.send(4, dataclasses.replace(single.progress(20), steps=1, tokens=10))
  run.send(4, one_step, payload_id=4)
  assert not run.merges
  run.send(3, all_steps, payload_id=3)
  assert run.limits() == [20 * screening.GROWTH * UNIT, 20 * UNIT]


def test_an_outage_after_a_wait_in_vain_has_its_lease_too():
  """l1 never answers after the first outage; soon after it all are lost once more."""
  run = Stalled(150, 150)
  run.contribute(run.sync, 0, to=1680)
  for _ in range(3):
    run.now_ns += run.lease_ns // 2
    for session in (1, 2):
      run.send(session, messages.Heartbeat())
  assert [[one.learner for one in merge.participants] for merge in run.merges] == [['l0']]
  run.handle(dataclasses.replace(single.merge_done(run.sync), norms=(2 * UNIT,)))
  for m in (0, 1):
    run.handle(events.Disconnected(session=1 + m, reason='cut'))
  run.now_ns += run.lease_ns
  for m in (0, 1):
    run.back(3 + m, m, clock=208, version=10)
  (sync,) = run.machine._syncs.open.values()
  assert sync.grace_ns == run.lease_ns


def test_who_lived_on_while_the_others_began_anew_is_not_measured_by_them():
  """D1: l0 lived on, l1 has joined a moment ago and knows nothing of the stall."""
  run = Stalled(0, 0, joined=True)
  run.now_ns += run.lease_ns // 2
  run.send(1, single.progress(168))
  run.contribute(run.machine.clock, 0, to=1680)
  assert run.limits() == [20 * screening.GROWTH * UNIT]


def test_the_steps_of_one_learner_do_not_count_where_the_clock_of_another_does_not_show_them():
  run = Stalled(150, 2)
  run.contribute(run.machine.clock, 0, to=1680)
  assert run.limits() == [20 * screening.LONGER * UNIT]


# --- Strikes and quarantine -----------------------------------------------------------------------


class Duo:
  """A syncer with l0 on session 1 and l1 on session 2; every sync gets a payload of both."""

  def __init__(self, **settings):
    settings = {'norm_factor': 10, **settings}
    self.machine = single.two_learners_of(quorum=2, total_steps=400, **settings)
    self.sync, self.version, self.now_ns = 2, 0, 2
    self.tokens = [0, 0]
    self.out: list = []
    self.merge: actions.Merge | None = None

  def send(self, session: int, message: messages.Message, payload_id: int | None = None) -> None:
    self.now_ns += 1
    self.out += self.machine.handle(self.now_ns, single.received(session, message, payload_id))
    self.machine.check()

  def contribute(self) -> actions.Merge:
    """Both answer the open sync; returns the resulting Merge."""
    self.out = []
    for m in (0, 1):
      said = dataclasses.replace(
        single.contribution(self.sync, self.tokens[m], self.tokens[m] + 20, shard=m),
        version=self.version,
      )
      self.send(m + 1, said, payload_id=10 + m)
      self.tokens[m] += 20
    (self.merge,) = [one for one in self.out if isinstance(one, actions.Merge)]
    return self.merge

  def ends(self, *norms: int) -> list:
    """The outer step ends with these norms; returns the syncer's actions."""
    refused = tuple(
      one.learner
      for one, norm in zip(self.merge.participants, norms)
      if screening.refused(norm, one.least, one.limit)
    )
    failed = 'every payload' if len(refused) == len(norms) else ''
    self.now_ns += 1
    done = events.MergeDone(
      sync=self.sync,
      fragment=0,
      payload_id=None if failed else 50,
      digest=78,
      payload=None if failed else messages.Payload(size_bytes=64, crc32=0),
      failed=failed,
      norms=norms,
      refused=refused,
    )
    out = self.machine.handle(self.now_ns, done)
    self.machine.check()
    self.version += not failed
    return out

  def next(self) -> None:
    """Both adopt and continue to train; the next sync opens."""
    self.out = []
    for m in (0, 1):
      self.send(
        m + 1,
        messages.Adopted(fragment=0, version=self.version, tokens=self.tokens[m], matched=True),
      )
      self.send(m + 1, single.progress(self.sync + 2))
    self.sync += 2

  def round(self, *norms: int) -> list:
    self.contribute()
    out = self.ends(*norms)
    self.next()
    return out

  def member(self, name: str = 'l1') -> dict:
    (row,) = [one for one in self.machine.state()['members'] if one['learner'] == name]
    return row


def told(out: list, session: int) -> list:
  return [one.message for one in out if isinstance(one, actions.Send) and one.session == session]


def said(out: list) -> list[str]:
  return [one.text for one in out if isinstance(one, actions.Say)]


def warm(**settings) -> Duo:
  """After the warm-up: norms of 2."""
  duo = Duo(**settings)
  for _ in range(8):
    duo.round(2 * UNIT, 2 * UNIT)
  return duo


def test_a_bad_payload_does_not_affect_the_others():
  duo = warm()
  merged = duo.machine._ledger.totals()['merged']
  assert {one.limit for one in duo.contribute().participants} == {20 * UNIT}
  out = duo.ends(2 * UNIT, 60 * UNIT)
  settled = [[m for m in told(out, s) if isinstance(m, messages.Settled)] for s in (1, 2)]
  assert [(one.merged, one.reason) for (one,) in settled] == [(True, ''), (False, 'bad_value')]
  for session in (1, 2):  # the new version is the fresh anchor of the refused one
    assert [one.version for one in told(out, session) if isinstance(one, messages.Publish)] == [9]
  totals = duo.machine._ledger.totals()
  assert totals['merged'] == merged + 20 and totals['discarded']['bad_value'] == 20


def test_the_console_names_the_host_to_check():
  duo = warm()
  duo.contribute()
  (line,) = said(duo.ends(2 * UNIT, 60 * UNIT))
  assert line == (
    'Learner l1 on host sent norm 60, usual is 2 for fragment 0; rejected before '
    'merging, and the learner gets a fresh fragment. Check that host for faulty hardware.'
  )


def test_a_learner_that_trained_nothing_in_some_steps_gets_no_strike():
  duo = warm()
  for number in range(9):
    duo.contribute()
    norms = (0, 0) if number % 3 == 0 else (2 * UNIT, 0)
    out = duo.ends(*norms)
    settled = [one for one in told(out, 2) if isinstance(one, messages.Settled)]
    reason = 'bad_value' if any(norms) else 'cancelled'
    assert [(one.merged, one.reason) for one in settled] == [(False, reason)]
    assert not any(isinstance(one, actions.Close) for one in out)
    if not number:
      assert sum('(gradient accumulation?)' in line for line in said(out)) == 2
    duo.next()
  assert (duo.member()['strikes'], duo.member()['max_strikes']) == (0, 0)
  assert {one.limit for one in duo.contribute().participants} == {20 * UNIT}, 'nothing is forgotten'


def test_a_learner_that_was_merged_since_is_not_in_doubt():
  """Else two single faults of two learners, hours apart, would lift all limits."""
  duo = warm()
  duo.round(2 * UNIT, 60 * UNIT)
  duo.round(2 * UNIT, 2 * UNIT)
  duo.round(60 * UNIT, 2 * UNIT)
  assert {one.limit for one in duo.contribute().participants} == {20 * UNIT}


def test_a_merge_of_the_process_before_makes_nobody_sure_of_its_successor():
  """Of `others_merged`: the norms of a process alone may be right, and the usual ones wrong."""
  books = books_lib.begin(config())
  screen, members = screening.Screening(books), books.members
  member = members.bind('l0', nonce=2, incarnation=2, session=1, now_ns=0)
  member.strikes = 1
  for name in ('l0', 'l1'):
    members.by_id.setdefault(name, members_lib.Member(name, incarnation=1))
    one = actions.Participant(learner=name, incarnation=1, payload_id=0, tokens=1, steps=1)
    done = dataclasses.replace(single.merge_done(1), norms=(UNIT,))
    screen.after_merge(0, sync_lib.Sync(1, 0, participants=(one,), live=('l0', 'l1')), done)
    assert member.others_merged == (name == 'l1')


def test_a_refused_norm_does_not_enter_the_median():
  duo = warm()
  for _ in range(20):
    duo.round(2 * UNIT, 60 * UNIT)
    duo.round(2 * UNIT, 2 * UNIT)
  assert {one.limit for one in duo.contribute().participants} == {20 * UNIT}


def test_three_strikes_in_a_row_quarantine_and_a_merge_resets_them():
  duo = Duo()
  for norm in (BAD, BAD, 2 * UNIT, BAD, BAD):
    assert not any(isinstance(one, actions.Close) for one in duo.round(UNIT, norm))
  assert (duo.member()['strikes'], duo.member()['max_strikes']) == (2, 2)
  duo.contribute()
  out = duo.ends(UNIT, BAD)
  (refused,) = [one for one in told(out, 2) if isinstance(one, messages.Refused)]
  assert (refused.code, refused.retry_ns) == ('QUARANTINED', None)
  for words in ('"l1" is in quarantine', '3 updates in a row', 'host (pid 1)', 'updates are safe'):
    assert words in refused.text
  assert refused.text in said(out)
  assert [one.session for one in out if isinstance(one, actions.Close)] == [2]
  # The other learner continues alone if the quorum allows it; no sync waits for this one.
  assert [member.learner for member in duo.machine._members.live()] == ['l0']


@pytest.mark.parametrize('fragments', [2, 4])
def test_a_norm_alone_is_sure_once_another_learner_was_merged(fragments):
  """Else it may be the usual norm that is wrong, of each of the fragments."""
  books = books_lib.begin(config(learners=4, fragments=fragments, period=fragments))
  members = books.members
  for m in range(8):
    members.bind(f'l{m}', m, 1, m, 0)
  screen = screening.Screening(books)

  def merge(sync: int, norms: dict[str, int], refused: tuple[str, ...]) -> list[str]:
    participants = tuple(
      actions.Participant(learner=name, incarnation=1, payload_id=0, tokens=1, steps=1)
      for name in norms
    )
    fragment = sync % fragments
    done = single.merge_done(sync)
    done = dataclasses.replace(
      done,
      fragment=fragment,
      norms=tuple(norms.values()),
      refused=refused,
      failed='every payload' if len(refused) == len(norms) else '',
    )
    made = sync_lib.Sync(
      sync, fragment, participants=participants, live=tuple(sorted(members.by_id))
    )
    return [one.learner for one in screen.after_merge(0, made, done)]

  large = 60 * UNIT
  for sync in range(3 * fragments - 1):  # the norms of all have grown, half of them are there
    assert not merge(sync, {'l0': large, 'l1': large}, ('l0', 'l1'))
  merge(3 * fragments, {'l2': UNIT}, ())
  assert merge(3 * fragments + 1, {'l0': large, 'l2': UNIT}, ('l0',)) == ['l0']
  assert merge(3 * fragments + 2, {'l1': BAD}, ('l1',)) == ['l1']
  for sync, found in ((0, []), (1, []), (2, ['l3'])):
    assert merge(sync, {'l2': UNIT, 'l3': large}, ('l3',)) == found, 'as of any other strike'


def quarantined() -> Duo:
  duo = Duo()
  for _ in range(2):
    duo.round(UNIT, BAD)
  duo.contribute()
  duo.ends(UNIT, BAD)
  duo.machine.handle(duo.now_ns, events.Disconnected(session=2, reason='closed'))
  return duo


def answers(machine, now_ns: int, session: int, nonce: int, incarnation: int = 0) -> list:
  join = dataclasses.replace(single.join(learner='l1', nonce=nonce), incarnation=incarnation)
  return told(machine.handle(now_ns, single.received(session, join)), session)


def test_a_quarantined_process_never_rejoins_and_another_starts_later_without_strikes():
  duo = quarantined()
  (refused,) = answers(duo.machine, duo.now_ns, 3, nonce=8)
  assert (refused.code, refused.retry_ns) == ('QUARANTINED', None)
  (refused,) = answers(duo.machine, duo.now_ns, 6, nonce=9)
  assert refused.code == 'ID_IN_QUARANTINE' and refused.retry_ns > 0
  duo.now_ns += refused.retry_ns
  (offer,) = answers(duo.machine, duo.now_ns, 4, nonce=9)
  assert offer == messages.Offer(run='r0', incarnation=2)
  duo.machine.handle(
    duo.now_ns, single.received(4, dataclasses.replace(single.confirm(nonce=9), incarnation=2))
  )
  duo.machine.check()
  assert (duo.member()['strikes'], duo.member()['max_strikes']) == (0, 0)
  (fenced,) = answers(duo.machine, duo.now_ns, 5, nonce=8, incarnation=1)
  assert (fenced.code, fenced.retry_ns) == ('FENCED', None)


def test_quarantine_outlives_the_syncer():
  duo = quarantined()
  machine_state = json.loads(json.dumps(duo.machine.state()))
  again = syncer_machine.SyncerMachine.restore(
    duo.machine._config, world_lib.AGREEMENT, (network.PAYLOAD_BYTES,), machine_state
  )
  (refused,) = answers(again, 5, 1, nonce=8)
  assert refused.code == 'QUARANTINED' and 'host (pid 1)' in refused.text
  (refused,) = answers(again, duo.now_ns, 2, nonce=9)  # its id rests, counted from the restart
  assert refused.code == 'ID_IN_QUARANTINE'
  assert refused.retry_ns == 3 * duo.machine._config.lease_ns - (duo.now_ns - 5)
  free = syncer_machine.SyncerMachine.restore(
    dataclasses.replace(duo.machine._config, strikes=0),
    world_lib.AGREEMENT,
    (network.PAYLOAD_BYTES,),
    machine_state,
  )
  assert answers(free, 5, 1, nonce=8) == [messages.Offer(run='r0', incarnation=1)]  # switched off


def test_a_refusal_by_the_encoder_is_a_strike_too():
  duo = Duo()
  for number in range(3):
    duo.out = []
    duo.send(2, messages.Decline(sync=2, fragment=0, reason='bad_value', tokens_to=10))
    refusals = [one for one in told(duo.out, 2) if isinstance(one, messages.Refused)]
    assert len(refusals) == (number == 2)


def test_without_strikes_there_is_no_quarantine():
  duo = Duo(strikes=0)
  for _ in range(9):
    assert not any(isinstance(one, actions.Close) for one in duo.round(UNIT, BAD))


def test_repeats_are_said_after_a_pause_with_their_number():
  duo = Duo(strikes=0, lease_ms=3_600_000)
  lines = [said(duo.round(UNIT, BAD)) for _ in range(5)]
  assert [len(one) for one in lines] == [1, 0, 0, 0, 0]
  duo.now_ns += rate_limited_log.PAUSE_NS - 100
  assert not said(duo.round(UNIT, BAD))
  duo.now_ns += 100
  (line,) = said(duo.round(UNIT, BAD))
  assert 'NaN or Inf for fragment 0' in line and '(5 more since the last such line)' in line


@pytest.mark.parametrize('lost', [False, True])
@pytest.mark.parametrize(
  'norms',
  [
    (UNIT, UNIT),
    (UNIT, BAD),
    (BAD, BAD),
    (60 * UNIT, 60 * UNIT),
    (UNIT, 60 * UNIT),
    (UNIT, 0),
    (0, 0),
  ],
)
def test_recovery_of_a_record_agrees_with_the_machine(norms, lost):
  """Strikes, norms and tokens: the state at the decision plus its end equal the machine
  afterwards."""
  duo = warm()
  duo.round(UNIT, 60 * UNIT)
  before = json.loads(json.dumps(duo.machine.state()))
  merge = duo.contribute()
  if lost:  # between the decision and the end
    duo.machine.handle(duo.now_ns, events.Disconnected(session=2, reason='cut'))
  duo.ends(*norms)
  refused = tuple(
    one.learner
    for one, norm in zip(merge.participants, norms)
    if screening.refused(norm, one.least, one.limit)
  )
  done = events.MergeDone(
    sync=merge.sync,
    fragment=0,
    payload_id=None,
    payload=None,
    digest=78,
    failed='every payload' if len(refused) == 2 else '',
    norms=norms,
    refused=refused,
  )
  load = functools.partial(
    syncer_machine.SyncerMachine.load,
    duo.machine._config,
    world_lib.AGREEMENT,
    (network.PAYLOAD_BYTES,),
  )
  state = recovery.replay_log(load, before, [(merge, done)])
  after = json.loads(json.dumps(duo.machine.state()))
  assert json.loads(json.dumps(state)) == {**after, recovery.UNSAVED: 1}
