"""A learner, the syncer or its network is away for many periods: what is merged on the return, how,
and what is lost. The machines, all checkers on, and arrays that are the displacements
(verification/sim/arrays.py)."""

import functools
from collections.abc import Callable

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import facts, messages
from diloco_jax.protocol.learner import anchor as anchor_lib
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import seeds as seeds_lib
from diloco_jax.verification.sim import world as world_lib

STEP_NS, STEPS, FRAGMENTS = 100 * engine_lib.MS, 160, 4
BEFORE, LEASE_STEPS = 40, 20  # steps before the absence, and of a lease
LEARNERS = ('l0', 'l1', 'l2', 'l3')


class Merges(observers.Observer):
  """Of each outer step: when it was decided, its fragment and its participants."""

  def __init__(self):
    self.seen: list[tuple[int, int, tuple[str, ...]]] = []

  def saw(self, process, now_ns, event, out):
    for action in out:
      fact = getattr(action, 'fact', None)
      if isinstance(fact, facts.Merging):
        self.seen.append((now_ns, fact.fragment, fact.participants))


class Run:
  """Four learners and their outer steps; `at` plans what happens after so many steps."""

  def __init__(self, steps: int = STEPS, lease_steps: int = LEASE_STEPS, **settings):
    config = config_lib.ProtocolConfig(
      **{'learners': 4, 'period': FRAGMENTS, 'fragments': FRAGMENTS, 'overlap': 2} | settings,
      total_steps=steps,
      lease_ns=lease_steps * STEP_NS,
      save_steps=0,
    )
    self.checkers, self.merges = checkers_lib.Checkers(config), Merges()
    self.world = world_lib.World(config, watchers=(self.checkers, self.merges))
    for name in LEARNERS:
      self.world.island(name).step_ns = STEP_NS
      self.world.start(name)

  def at(self, steps: int, call: Callable, *args) -> None:
    self.world.engine.at(steps * STEP_NS, functools.partial(call, *args))

  def cut_off(self, name: str, away: int) -> None:
    link = self.world.link(name)
    self.at(BEFORE, link.cut.update, ('up', 'down'))
    self.at(BEFORE + away, self.world.network.heal, link)

  def ledger(self) -> facts.Ledger:
    """At its end."""
    self.world.run(seeds_lib.CALM_NS, done=lambda: self.world.finished)
    assert self.world.finished, self.world.stuck()
    self.world.run(self.world.now_ns + seeds_lib.GOODBYE_NS, done=lambda: not self.world.learners)
    self.checkers.finished(self.world.now_ns)
    return self.world.ledger()


# --- A learner ------------------------------------------------------------------------------------


def ledger_after(offline: int, **settings) -> facts.Ledger:
  """The ledger of a run of which l3 is cut off for so many steps."""
  run = Run(**settings)
  run.cut_off('l3', offline)
  return run.ledger()


def lost_steps(ledger: facts.Ledger) -> float:
  """Steps of a learner that were discarded."""
  return ledger.trained and sum(ledger.discarded.values()) * STEPS / (
    FRAGMENTS * ledger.learners['l0']['tokens']
  )


@pytest.mark.parametrize(
  'offline', [3 * STEPS // 8, pytest.param(5 * STEPS // 8, marks=pytest.mark.full)]
)
def test_a_learner_that_was_offline_for_long_drops_those_steps_and_no_others(offline):
  """It is lost, and returns as the same process more than MOST_VERSIONS versions later."""
  ledger = ledger_after(offline)
  assert offline > (anchor_lib.MOST_VERSIONS + 1) * FRAGMENTS
  assert set(ledger.discarded) == {messages.Reason.LATE}
  assert ledger.merged + ledger.discarded[messages.Reason.LATE] == FRAGMENTS * ledger.trained
  assert lost_steps(ledger) == pytest.approx(offline, abs=FRAGMENTS + 2)


@pytest.mark.parametrize(
  'offline',
  [
    pytest.param(5 * FRAGMENTS, marks=pytest.mark.long),
    (anchor_lib.MOST_VERSIONS - 1) * FRAGMENTS,
  ],
)
def test_a_learner_that_was_offline_for_a_few_periods_loses_nothing(offline):
  """With a short lease it is lost, too; it carries all its steps onto the newest version."""
  ledger = ledger_after(offline, lease_steps=FRAGMENTS)
  assert ledger.discarded == {} and ledger.merged == FRAGMENTS * ledger.trained


@pytest.mark.parametrize('max_misses', [2, 10**6])
def test_a_pause_within_the_lease_costs_at_most_what_max_misses_says(max_misses):
  """The session lives on, and the versions of the pause arrive one after the other."""
  pause = 3 * LEASE_STEPS // 4
  ledger = ledger_after(pause, max_misses=max_misses)
  assert set(ledger.discarded) <= {messages.Reason.LATE}
  assert lost_steps(ledger) <= (pause + 2 * FRAGMENTS if max_misses == 2 else 0)


# --- The syncer, or its network -------------------------------------------------------------------


def outage(away: int, kind: str, dead: str = '', mute: str = '', period: int = FRAGMENTS):
  """(the ledger, by fragment the participants of the first outer step after so many steps without
  the syncer, when the first of them was decided, in steps after the return, and the last). `dead`:
  a learner that does not return; `mute`: one whose payloads do not arrive any more."""
  run = Run(steps=away + 240, period=period)
  world = run.world
  if kind == 'kill':
    run.at(BEFORE, lambda: world.end(world.syncer))
    run.at(BEFORE + away, world.start_syncer)
  elif kind == 'freeze':
    run.at(BEFORE, lambda: world.syncer.freeze())
    run.at(BEFORE + away, lambda: world.syncer.thaw())
  else:
    for name in LEARNERS:
      run.cut_off(name, away)
  if dead:
    run.at(BEFORE, lambda: world.end(world.learners[dead]))
  if mute:
    run.at(BEFORE, setattr, world.link(mute), 'bulk_up_ns', seeds_lib.CALM_NS)
  ledger, back_ns = run.ledger(), (BEFORE + away) * STEP_NS
  after = [merge for merge in run.merges.seen if merge[0] > back_ns]
  first = {p: (who, (now_ns - back_ns) / STEP_NS) for now_ns, p, who in reversed(after)}
  times = [at for _, at in first.values()]
  return ledger, {p: who for p, (who, _) in first.items()}, min(times), max(times)


@pytest.mark.parametrize('kind', ['kill', 'partition', 'freeze'])
@pytest.mark.parametrize(
  'periods', [10, *(pytest.param(periods, marks=pytest.mark.long) for periods in (3, 40))]
)
def test_the_first_outer_step_after_an_outage_has_all_learners_and_nothing_is_lost(kind, periods):
  """One after the other, displacements of so many steps would add up instead of having a mean."""
  ledger, first, *_ = outage(periods * FRAGMENTS, kind)
  assert ledger.discarded == {} and ledger.merged == FRAGMENTS * ledger.trained
  if periods > 3:  # else payloads of before may be merged first
    assert first == dict.fromkeys(range(FRAGMENTS), LEARNERS)


@pytest.mark.parametrize('kind', ['kill', pytest.param('partition', marks=pytest.mark.long)])
def test_learners_that_have_trained_apart_for_too_long_go_on_from_one_of_them(kind, monkeypatch):
  """The same one for all fragments, or the model would be none that was ever trained."""
  monkeypatch.setattr(screening_lib, 'APART', 12)  # else the test takes ten times as long
  away = (screening_lib.APART + 2) * screening_lib.SHORTEST
  ledger, first, *_ = outage(away, kind)
  assert first == dict.fromkeys(range(FRAGMENTS), LEARNERS)
  lost = sorted(row['discarded'] / row['tokens'] for row in ledger.learners.values())
  assert lost[0] == 0 and lost[1] > 0.9 * FRAGMENTS * away / (away + 240)
  assert set(ledger.discarded) == {messages.Reason.APART, messages.Reason.UNDONE}
  assert ledger.discarded[messages.Reason.UNDONE] < ledger.discarded[messages.Reason.APART] / 50


def test_a_learner_that_does_not_return_is_waited_for_no_longer_than_a_lease_and_a_redial():
  ledger, first, waited, _ = outage(40 * FRAGMENTS, 'kill', dead='l3')
  assert set(first.values()) == {LEARNERS[:3]}
  assert 10 < waited < 60  # lease and longest redial are 40 steps, the first returns in 20


def test_after_a_short_absence_nobody_is_waited_for():
  *_, waited, _ = outage(2, 'kill', dead='l3', period=20)
  assert waited < 20


def test_a_learner_whose_payloads_never_arrive_takes_one_lease_of_all_fragments_together():
  _, first, waited, last = outage(40 * FRAGMENTS, 'kill', mute='l3')
  assert set(first.values()) == {LEARNERS[:3]}
  assert 20 <= waited and last < waited + 10  # a lease is 20 steps, two syncs are open at a time
