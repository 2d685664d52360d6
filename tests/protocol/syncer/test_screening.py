"""Bad updates: each is refused by itself, its sender is told, and quarantined after three.

What is "too long" is pure; what follows is shown on one syncer with two learners.
"""

import dataclasses
import json
from typing import Any

import pytest

from diloco_jax.protocol import actions, events, messages, rate_limited_log
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import recovery
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.protocol.syncer import sync as sync_lib
from tests.protocol import single, transcript
from tests.protocol.talk import Talk

UNIT, BAD = screening_lib.UNIT, screening_lib.NOT_FINITE


def config(**changes):
  usual = {'norm_factor': 10, 'learners': 1, 'fragments': 1, 'period': 1, 'overlap': 0}
  return transcript.make_config(**usual | changes)


# --- The limit of norms ---------------------------------------------------------------------------


def usual(*norms: int, commits: int = 8, steps: int = 4) -> screening_lib.Usual:
  """What is usual after merges of l0, l1, ..., each of them always with one norm."""
  history = screening_lib.Usual()
  for _ in range(commits):
    history.merged({f'l{m}': (norm, steps) for m, norm in enumerate(norms)})
  return history


def test_the_limit_is_ten_times_the_median_of_the_learners_after_the_warm_up():
  norms = (3 * UNIT, UNIT, 2 * UNIT)
  assert usual(*norms).limits(4, config())[1] == 20 * UNIT
  assert usual(*norms, commits=7).limits(4, config()) == (1, None)  # not yet
  assert usual(*norms, commits=2).limits(4, config(norm_warmup=2))[1] == 20 * UNIT
  assert usual(*norms, commits=1).limits(4, config(norm_warmup=1)) == (0, None)  # no first norm
  assert usual(2 * UNIT).limits(4, config()) == (1, 20 * UNIT)  # no vote of one but for 0
  assert usual(*norms).limits(4, config(norm_factor=3))[1] == 6 * UNIT
  assert usual(*norms).limits(4, config(norm_factor=0)) == (1, None)


@pytest.mark.parametrize(
  'steps, shared, factor',
  [
    # It grows with more steps up to a bound and does not shrink with fewer.
    *[(1, 1, 20), (4, 4, 20), (8, 8, 40), (400, 400, 640), (10**6, 10**6, 640)],
    # found A1: a claim of one learner of 900,000 steps allowed a norm of 320 times the usual one.
    *[(10**6, 0, 80), (10**6, 4, 80), (10**6, 8, 160), (10**6, 100, 640)],
  ],
)
def test_the_limit_grows_with_steps_that_the_learners_share(steps, shared, factor):
  assert usual(2 * UNIT).limits(steps, config(), shared)[1] == factor * UNIT


def test_a_norm_that_has_all_but_vanished_is_refused_and_fewer_steps_may_be_shorter():
  history = usual(2 * UNIT, 2 * UNIT)
  least = [history.limits(steps, config())[0] for steps in (400, 4, 1)]
  assert least == [UNIT >> 19, UNIT >> 19, UNIT >> 21]


def test_steps_between_two_updates_of_an_accumulating_optimizer_have_no_vote():
  assert usual(0, 0).limits(4, config()) == (0, None)
  history = usual(2 * UNIT, 2 * UNIT, commits=2)
  for _ in range(9):
    history.merged({'l0': (0, 4), 'l1': (0, 4)})
  assert history.limits(4, config()) == (UNIT >> 19, 20 * UNIT)


def test_norms_that_are_not_finite_are_always_refused():
  assert screening_lib.refused(BAD, 0, None) and screening_lib.refused(BAD, 0, 10)
  assert not screening_lib.refused(11, 0, None) and not screening_lib.refused(10, 0, 10)
  assert screening_lib.refused(11, 0, 10) and screening_lib.refused(4, 5, 10)


def test_one_learner_has_one_vote_however_often_it_is_merged():
  history = usual(2 * UNIT, 2 * UNIT)
  for _ in range(1000):
    history.merged({'liar': (1, 4)})
  assert history.limits(4, config()) == (UNIT >> 19, 20 * UNIT)
  assert sum(map(len, history.pairs.values())) <= screening_lib.KEPT


@pytest.mark.parametrize('other', [1, 2**40 * UNIT])
def test_of_two_votes_none_makes_the_norms_of_the_other_wrong(other):
  least, limit = usual(2 * UNIT, other).limits(4, config())
  assert not screening_lib.refused(2 * UNIT, least, limit)


def test_more_than_half_of_the_learners_are_not_wrong():
  # One learner cannot do it (above), so the usual norm is wrong: nobody is quarantined for it.
  duo = warm()
  for _ in range(3):
    duo.round(60 * UNIT, 60 * UNIT)
    assert not duo.closed
  assert duo.version > 8 and duo.member('l1')['strikes'] == 0


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
    return screening_lib.left_out(participants, norms, live, 10)

  assert left_out(far, far, 2 * far, live=3) == ()
  assert left_out(UNIT, far, far, 2 * far, live=4) == ()
  assert left_out(UNIT, UNIT, far, far, live=4) == ('l2', 'l3')  # half of them
  assert left_out(UNIT, far, live=2) == ('l1',)
  assert left_out(far, live=1) == left_out(far, live=4) == ('l0',)
  assert left_out(far, far, live=4) == ('l0', 'l1')  # two of four
  assert left_out(far, far, BAD, 800 * far, live=4) == ('l2', 'l3')


# --- Steps that the learners share after a stall --------------------------------------------------


class Stalled(Talk):
  """A syncer with quorum 1 whose disk was full after 9 outer steps of l0 and l1, norms of 2."""

  def __init__(self, *steps: int, joined: bool = False):
    """In the last one each has made so many steps; `joined`: l1 is another process since."""
    self.tokens, self.all = 0, []
    super().__init__('l0', 'l1', quorum=1, total_steps=400, norm_factor=10)
    self.lease_ns = self.machine._config.lease_ns
    for t in range(2, 20, 2):
      self.contribute(t, 'l0', 'l1', to=10 * t - 10)
      self.steps('l0', 'l1', to=t)
      for name, more in zip(('l0', 'l1'), steps if t == 18 else ()):
        self.steps(name, to=t + more)
      self.turn(dataclasses.replace(single.merge_done(t), norms=(2 * UNIT, 2 * UNIT)))
      self.adopts('l0', 'l1', version=t // 2, tokens=self.tokens)
    if joined:
      self.loses('l1')
      self.joins('l1', process=2, held=HELD)
    self.sync = self.machine.clock
    self.all.clear()

  def turn(self, *happened: events.Event) -> list[actions.Action]:
    """Time passes with every turn; `all` has the participants of all merges."""
    self.now_ns += 10**7
    super().turn(*happened)
    self.all += [merge.participants for merge in self.merges]
    return self.out

  def contribute(self, t: int, *learners: str, to: int) -> None:
    """They answer with all that they have trained up to the token `to`."""
    for name in learners:
      self.steps(name, to=to // 10)
      said = single.contribution(t, self.tokens, to, shard=int(name[1:]))
      steps, version = (to - self.tokens) // 10, self.machine.state()['versions'][0]
      said = dataclasses.replace(said, steps=steps, version=version)
      self.hears(name, said, payload_id=int(name[1:]))
    self.tokens = to

  def back(self, *names: str, clock: int, version: int = 9) -> None:
    """The processes of learners connect again."""
    for name in names:
      self.joins(
        name,
        join={'run': 'r0', 'incarnation': 1},
        clock=clock,
        steps=clock,
        tokens=10 * clock,
        cursor=clock,
        shard=int(name[1:]),
        held=(messages.Held(version=version, digest=78),),
      )

  def waits(self, leases: float) -> None:
    self.now_ns += round(leases * self.lease_ns)

  def limits(self) -> list[int]:
    return [participant.limit for participants in self.all for participant in participants]

  def merged(self) -> list[list[str]]:
    return [[participant.learner for participant in participants] for participants in self.all]

  @property
  def open(self) -> Any:
    """The sync that is open."""
    (sync,) = self.machine._syncs.open.values()
    return sync


HELD = (messages.Held(version=9, digest=78),)
ALL_STEPS = dataclasses.replace(single.contribution(20, 170, 1680), steps=151, version=9)


def test_after_a_stall_the_first_outer_step_waits_for_all_and_no_honest_norm_is_too_large():
  """D1b: a full disk, and each learner had 150 steps when it could write again."""
  run = Stalled(150, 150)
  run.contribute(run.sync, 'l0', to=1680)
  run.waits(0.5)
  run.hears('l1', messages.Heartbeat())
  assert not run.all
  run.hears('l1', messages.Decline(sync=run.sync, fragment=0, reason='empty', tokens_to=170))
  assert run.limits() == [20 * screening_lib.GROWTH * UNIT]
  for _ in range(3):  # the next stall, soon after
    run.waits(0.5)
    run.steps('l0', 'l1', to=318)
  run.turn(single.merge_done(run.sync))
  assert run.open.grace_ns == run.lease_ns


@pytest.mark.parametrize('when', ['waits in its sync', 'comes later'])
def test_a_late_payload_of_the_time_before_a_stall_is_no_answer_for_the_steps_of_it(when):
  """l0 was late for the last sync before the stall: it answers the first one after it anew."""
  run = Stalled(0, 0)
  late = dataclasses.replace(single.contribution(20, 170, 200), steps=3, version=9)
  run.steps('l0', 'l1', to=20)
  run.contribute(20, 'l1', to=200)
  run.waits(0.5)
  run.hears('l1', messages.Heartbeat())
  assert run.merged() == [['l1']]
  if when == 'waits in its sync':
    run.hears('l0', late, payload_id=7)
  run.steps('l0', 'l1', to=168)
  run.all.clear()
  run.turn(dataclasses.replace(single.merge_done(20), norms=(2 * UNIT,)))
  run.contribute(run.machine.clock, 'l1', to=1680)
  if when == 'comes later':
    run.hears('l0', late, payload_id=7)
  assert run.machine.clock == 168 and not run.all, 'it waits for l0'
  run.tokens = 170
  run.contribute(168, 'l0', to=1680)
  (participants,) = run.all
  steps = {participant.learner: participant.steps for participant in participants}
  assert steps == {'l0': 151, 'l1': 148}


def test_what_was_open_before_a_stall_is_no_wait_in_vain():
  """A frozen syncer wakes up, and the window of the sync that was open has ended meanwhile."""
  run = Stalled(0, 0)
  run.steps('l0', 'l1', to=20)
  run.waits(2)
  run.loses('l0', 'l1')
  run.back('l0', 'l1', clock=168)
  run.hears('l0', ALL_STEPS, payload_id=5)
  assert run.merged() == [['l0']] and not run.machine._syncs._in_vain


def test_each_outage_has_its_own_lease_to_wait_for_all():
  """Also the second one, soon after the first."""
  run = Stalled(0, 0)
  for clock in (58, 98):
    run.loses('l0', 'l1')
    run.waits(1)
    run.back('l0', 'l1', clock=clock)
    assert run.open.grace_ns == run.lease_ns
    said = messages.Decline(sync=run.open.t, fragment=0, reason='empty', tokens_to=0)
    for name in ('l0', 'l1'):
      run.hears(name, said)


def test_a_learner_far_ahead_of_one_that_returned_is_waited_for():
  """l1 died with the syncer, and a new process of it joins before l0 has answered: the run goes on
  at its clock, but l0 has trained 150 steps alone."""
  run = Stalled(0, 0)
  run.machine = run.restarted().machine
  run.back('l0', clock=168)
  run.joins('l1', process=2, held=HELD)
  assert run.open.t == 20 and run.open.grace_ns == run.lease_ns
  run.steps('l1', to=20, steps=1, tokens=10)
  one_step = dataclasses.replace(single.contribution(20, 0, 10, shard=1), steps=1, version=9)
  run.hears('l1', dataclasses.replace(one_step, cursor=18), payload_id=4)
  assert not run.all
  run.hears('l0', ALL_STEPS, payload_id=3)
  assert run.limits() == [20 * screening_lib.GROWTH * UNIT, 20 * UNIT]


def test_an_outage_after_a_wait_in_vain_has_its_lease_too():
  """l1 never answers after the first outage; soon after it all are lost once more."""
  run = Stalled(150, 150)
  run.contribute(run.sync, 'l0', to=1680)
  for _ in range(3):
    run.waits(0.5)
    for name in ('l0', 'l1'):
      run.hears(name, messages.Heartbeat())
  assert run.merged() == [['l0']]
  run.turn(dataclasses.replace(single.merge_done(run.sync), norms=(2 * UNIT,)))
  run.loses('l0', 'l1')
  run.waits(1)
  run.back('l0', 'l1', clock=208, version=10)
  assert run.open.grace_ns == run.lease_ns


@pytest.mark.parametrize(
  'steps, joined, factor',
  [
    # D1: l0 lived on, l1 has joined a moment ago and knows nothing of the stall.
    ((0, 0), True, screening_lib.GROWTH),
    # The clock of l1 does not show the steps of l0.
    ((150, 2), False, screening_lib.LONGER),
  ],
)
def test_the_steps_of_one_learner_count_as_far_as_the_clocks_of_those_that_were_there_show_them(
  steps, joined, factor
):
  run = Stalled(*steps, joined=joined)
  if joined:
    run.waits(0.5)
    run.steps('l0', to=168)
  run.contribute(run.machine.clock, 'l0', to=1680)
  assert run.limits() == [20 * factor * UNIT]


# --- Strikes and quarantine -----------------------------------------------------------------------


class Duo(Talk):
  """A syncer with l0 and l1; every sync gets a payload of both."""

  def __init__(self, **settings):
    given = {'quorum': 2, 'total_steps': 400, 'norm_factor': 10, **settings}
    super().__init__('l0', 'l1', **given)
    self.steps('l0', 'l1', to=2)
    self.sync, self.version, self.tokens = 2, 0, 0
    self.merge: actions.Merge | None = None

  def contribute(self) -> actions.Merge:
    """Both answer the open sync; returns the resulting Merge."""
    for m in (0, 1):
      said = single.contribution(self.sync, self.tokens, self.tokens + 20, shard=m)
      self.hears(f'l{m}', dataclasses.replace(said, version=self.version), payload_id=10 + m)
    self.tokens += 20
    (self.merge,) = self.merges
    return self.merge

  def done(self, *norms: int) -> events.MergeDone:
    """The end of its outer step with these norms."""
    refused = tuple(
      participant.learner
      for participant, norm in zip(self.merge.participants, norms)
      if screening_lib.refused(norm, participant.least, participant.limit)
    )
    failed = 'every payload' if len(refused) == len(norms) else ''
    done = dataclasses.replace(
      single.merge_done(self.sync), failed=failed, norms=norms, refused=refused
    )
    return dataclasses.replace(done, payload_id=None, payload=None) if failed else done

  def ends(self, *norms: int) -> list:
    """The outer step ends with these norms; returns the syncer's actions."""
    done = self.done(*norms)
    self.version += not done.failed
    self.now_ns += 1
    return self.turn(done)

  def next(self) -> None:
    """Both adopt and continue to train; the next sync opens."""
    self.adopts('l0', 'l1', version=self.version, tokens=self.tokens)
    self.steps('l0', 'l1', to=self.sync + 2)
    self.sync += 2

  def round(self, *norms: int) -> None:
    """A whole sync with these norms; `said` and `closed` are of its end."""
    self.contribute()
    out = self.ends(*norms)
    self.next()
    self.out = out

  def is_usual(self) -> bool:
    """Whether the limit is that of the warm-up."""
    return {participant.limit for participant in self.contribute().participants} == {20 * UNIT}


def warm(**settings) -> Duo:
  """After the warm-up: norms of 2."""
  duo = Duo(**settings)
  for _ in range(8):
    duo.round(2 * UNIT, 2 * UNIT)
  return duo


def test_a_bad_payload_does_not_affect_the_others_and_the_console_names_the_host_to_check():
  duo = warm()
  merged = duo.machine._ledger.totals()['merged']
  assert duo.is_usual()
  duo.ends(2 * UNIT, 60 * UNIT)
  settled = [message for name in ('l0', 'l1') for message in duo.sent(messages.Settled, name)]
  assert [message.reason for message in settled] == ['', 'bad_value']
  for name in ('l0', 'l1'):  # the new version is the fresh anchor of the refused one
    assert [message.version for message in duo.sent(messages.Publish, name)] == [9]
  totals = duo.machine._ledger.totals()
  assert totals['merged'] == merged + 20 and totals['discarded']['bad_value'] == 20
  assert duo.said == [
    'Learner l1 on host sent norm 60, usual is 2 for fragment 0; rejected before '
    'merging, and the learner gets a fresh fragment. Check that host for faulty hardware.'
  ]


def test_a_learner_that_trained_nothing_in_some_steps_gets_no_strike():
  duo = warm()
  for number in range(9):
    duo.contribute()
    norms = (0, 0) if number % 3 == 0 else (2 * UNIT, 0)
    duo.ends(*norms)
    reason = 'bad_value' if any(norms) else 'cancelled'
    settled = duo.sent(messages.Settled, 'l1')
    assert [(message.merged, message.reason) for message in settled] == [(False, reason)]
    assert not duo.closed
    if not number:
      assert len(duo.said) == sum('(gradient accumulation?)' in line for line in duo.said) == 2
    duo.next()
  assert (duo.member('l1')['strikes'], duo.member('l1')['max_strikes']) == (0, 0)
  assert duo.is_usual(), 'nothing is forgotten'


@pytest.mark.parametrize('settings', [{}, {'norm_factor': 0}], ids=str)
@pytest.mark.parametrize('rounds', [2, 9], ids=['new run', 'usual norms'])
def test_what_has_had_no_update_is_not_merged_also_of_one_learner(rounds, settings):
  """As the first payload after a restart, between two updates of accumulated gradients."""
  books = books_lib.Books(config(**settings))
  screen = screening_lib.Screening(books)
  books.members.bind('l0', nonce=1, incarnation=1, session=1, now_ns=0)
  for number, norm in enumerate([0, *rounds * [2 * UNIT], 0, 2 * UNIT]):
    least, limit = screen.usual[0].limits(4, books.config)
    participant = actions.Participant(
      learner='l0', incarnation=1, payload_id=0, tokens=1, steps=4, least=least, limit=limit
    )
    refused = screening_lib.left_out((participant,), (norm,), 1, books.config.norm_factor)
    assert bool(refused) == (norm == 0 and number > 0), 'the first zero is of a warm-up'
    sync = sync_lib.Sync(1, 0, participants=(participant,), live=('l0',))
    done = dataclasses.replace(
      single.merge_done(1), norms=(norm,), refused=refused, failed='all' if refused else ''
    )
    assert not screen.after_merge(number, sync, done)
  said = [action.text for action in books.out.take() if isinstance(action, actions.Say)]
  (line,) = said
  assert line.startswith('Learner l0 trained nothing in these steps (gradient accumulation?)')


@pytest.mark.parametrize(
  'rounds',
  [
    # A learner that was merged since is not in doubt: else two single faults of two learners, hours
    # apart, would lift all limits.
    [(2, 60), (2, 2), (60, 2)],
    # A refused norm does not enter the median.
    [(2, 60), (2, 2)] * 20,
  ],
)
def test_a_norm_that_was_refused_changes_no_limit(rounds):
  duo = warm()
  for norms in rounds:
    duo.round(*(norm * UNIT for norm in norms))
  assert duo.is_usual()


def test_a_merge_of_the_process_before_makes_nobody_sure_of_its_successor():
  """Of `others_merged`: the norms of a process alone may be right, and the usual ones wrong."""
  books = books_lib.Books(config())
  screen, members = screening_lib.Screening(books), books.members
  member = members.bind('l0', nonce=2, incarnation=2, session=1, now_ns=0)
  member.strikes = 1
  for name in ('l0', 'l1'):
    members.by_id.setdefault(name, members_lib.Member(name, incarnation=1))
    participant = actions.Participant(learner=name, incarnation=1, payload_id=0, tokens=1, steps=1)
    done = dataclasses.replace(single.merge_done(1), norms=(UNIT,))
    screen.after_merge(0, sync_lib.Sync(1, 0, participants=(participant,), live=('l0', 'l1')), done)
    assert member.others_merged == (name == 'l1')


def test_three_strikes_in_a_row_quarantine_and_a_merge_resets_them():
  duo = Duo()
  for norm in (BAD, BAD, 2 * UNIT, BAD, BAD):
    duo.round(UNIT, norm)
    assert not duo.closed
  assert (duo.member('l1')['strikes'], duo.member('l1')['max_strikes']) == (2, 2)
  duo.contribute()
  duo.ends(UNIT, BAD)
  (refused,) = duo.sent(messages.Refused, 'l1')
  assert (refused.code, refused.retry_ns) == ('QUARANTINED', None)
  for words in ('l1 is in quarantine', '3 updates in a row', 'host (pid 1)', 'updates are safe'):
    assert words in refused.text
  assert refused.text in duo.said
  assert duo.closed == [duo.session['l1']]
  # The other learner continues alone if the quorum allows it; no sync waits for this one.
  assert [member.learner for member in duo.machine._members.live()] == ['l0']


@pytest.mark.parametrize('fragments', [2, 4])
def test_a_norm_alone_is_sure_once_another_learner_was_merged(fragments):
  """Else it may be the usual norm that is wrong, of each of the fragments."""
  books = books_lib.Books(config(learners=4, fragments=fragments, period=fragments))
  members = books.members
  for m in range(8):
    members.bind(f'l{m}', m, 1, m, 0)
  screen = screening_lib.Screening(books)

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
    sync_made = sync_lib.Sync(
      sync, fragment, participants=participants, live=tuple(sorted(members.by_id))
    )
    return [member.learner for member in screen.after_merge(0, sync_made, done)]

  large = 60 * UNIT
  for sync in range(3 * fragments - 1):  # the norms of all have grown, half of them are there
    assert not merge(sync, {'l0': large, 'l1': large}, ('l0', 'l1'))
  merge(3 * fragments, {'l2': UNIT}, ())
  assert merge(3 * fragments + 1, {'l0': large, 'l2': UNIT}, ('l0',)) == ['l0']
  assert merge(3 * fragments + 2, {'l1': BAD}, ('l1',)) == ['l1']
  for sync, struck in ((0, []), (1, []), (2, ['l3'])):
    assert merge(sync, {'l2': UNIT, 'l3': large}, ('l3',)) == struck, 'as of any other strike'


def quarantined() -> Duo:
  duo = Duo()
  for _ in range(2):
    duo.round(UNIT, BAD)
  duo.contribute()
  duo.ends(UNIT, BAD)
  duo.loses('l1')
  return duo


def answers(talk: Talk, process: int, incarnation: int = 0) -> Any:
  """What the syncer sends to a process of l1 that would join."""
  talk.asks('l1', process=process, incarnation=incarnation)
  (answer,) = talk.sent()
  return answer


def test_a_quarantined_process_never_rejoins_and_another_starts_later_without_strikes():
  duo = quarantined()
  refused = answers(duo, process=1)
  assert (refused.code, refused.retry_ns) == ('QUARANTINED', None)
  refused = answers(duo, process=2)
  assert refused.code == 'ID_IN_QUARANTINE' and refused.retry_ns > 0
  duo.now_ns += refused.retry_ns
  assert answers(duo, process=2) == messages.Offer(run='r0', incarnation=2)
  duo.confirms('l1')
  assert (duo.member('l1')['strikes'], duo.member('l1')['max_strikes']) == (0, 0)
  fenced = answers(duo, process=1, incarnation=1)
  assert (fenced.code, fenced.retry_ns) == ('FENCED', None)


def test_quarantine_outlives_the_syncer():
  duo = quarantined()
  state = json.loads(json.dumps(duo.machine.state()))
  again = duo.restarted(state)
  again.now_ns = 5
  refused = answers(again, process=1)
  assert refused.code == 'QUARANTINED' and 'host (pid 1)' in refused.text
  again.now_ns = duo.now_ns
  refused = answers(again, process=2)  # its id rests, counted from the restart
  assert refused.code == 'ID_IN_QUARANTINE'
  assert refused.retry_ns == 3 * duo.machine._config.lease_ns - (duo.now_ns - 5)
  free = duo.restarted(state, strikes=0)  # switched off
  assert answers(free, process=1) == messages.Offer(run='r0', incarnation=1)


def test_a_refusal_by_the_encoder_is_a_strike_too():
  duo = Duo()
  for number in range(3):
    duo.hears('l1', messages.Decline(sync=2, fragment=0, reason='bad_value', tokens_to=10))
    assert bool(duo.refusals) == (number == 2)


def test_without_strikes_repeats_are_one_line_a_pause_with_their_number_and_no_quarantine():
  duo = Duo(strikes=0, lease_ms=3_600_000)
  counts = []
  for wait_ns in (0, 0, 0, 0, 0, rate_limited_log.PAUSE_NS - 6, 6):
    duo.now_ns += wait_ns
    duo.round(UNIT, BAD)
    counts.append(len(duo.said))
    assert not duo.closed, 'there is no quarantine'
  assert counts == [1, 0, 0, 0, 0, 0, 1]
  (line,) = duo.said
  assert 'NaN or Inf for fragment 0' in line and '(5 more since the last such line)' in line


FAR = 60 * UNIT
NORMS = [(UNIT, UNIT), (UNIT, BAD), (BAD, BAD), (FAR, FAR), (UNIT, FAR), (UNIT, 0), (0, 0)]


@pytest.mark.parametrize('lost', [False, True])
@pytest.mark.parametrize('norms', NORMS)
def test_recovery_of_a_record_agrees_with_the_machine(norms, lost):
  """Strikes, norms and tokens: the state at the decision plus its end equal the machine
  afterwards."""
  duo = warm()
  duo.round(UNIT, 60 * UNIT)
  before = json.loads(json.dumps(duo.machine.state()))
  merge, done = duo.contribute(), duo.done(*norms)
  if lost:  # between the decision and the end
    duo.loses('l1')
  duo.ends(*norms)
  state = duo.recovered(before, (merge, dataclasses.replace(done, payload_id=None, payload=None)))
  after = json.loads(json.dumps(duo.machine.state()))
  assert json.loads(json.dumps(state)) == {**after, recovery.UNSAVED: 1}
