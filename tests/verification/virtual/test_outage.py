"""The syncer, or its network, is away for many periods: what is merged on the return, and how. The
machines, all checkers on, and arrays that are the displacements (sim/arrays.py)."""

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import facts
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine, seeds
from diloco_jax.verification.sim import world as world_lib

STEP_NS, STEPS, FRAGMENTS = 100 * engine.MS, 400, 4
BEFORE = 40  # steps before the outage
LEARNERS = ('l0', 'l1', 'l2', 'l3')


class Merges(observers.Observer):
  """Of each outer step: when it was decided, its fragment and its participants."""

  def __init__(self):
    self.seen: list[tuple[int, int, tuple[str, ...]]] = []

  def saw(self, life, now_ns, event, out):
    for action in out:
      fact = getattr(action, 'fact', None)
      if isinstance(fact, facts.Merging):
        self.seen.append((now_ns, fact.fragment, fact.participants))


def run(away: int, kind: str, dead: str = '', mute: str = '', period: int = FRAGMENTS):
  """(the ledger, by fragment the participants of the first outer step after so many steps without
  the syncer, when the first of them was decided, in steps after the return, and the last). `dead`:
  a learner that does not return; `mute`: one whose payloads do not arrive any more."""
  config = config_lib.ProtocolConfig(
    learners=4,
    period=period,
    fragments=FRAGMENTS,
    overlap=2,
    total_steps=STEPS,
    lease_ns=20 * STEP_NS,
    save_steps=0,
  )
  checkers, merges = checkers_lib.Checkers(config), Merges()
  world = world_lib.World(config, watchers=(checkers, merges))
  at = lambda steps, call: world.engine.at(steps * STEP_NS, call)
  for name in LEARNERS:
    world.island(name).step_ns = STEP_NS
    world.start(name)
  if kind == 'kill':
    at(BEFORE, lambda: world.end(world.syncer))
    at(BEFORE + away, world.start_syncer)
  elif kind == 'freeze':
    at(BEFORE, lambda: world.syncer.freeze())
    at(BEFORE + away, lambda: world.syncer.thaw())
  for name in LEARNERS:
    link = world.link(name)
    if kind == 'partition':
      at(BEFORE, lambda link=link: link.cut.update(('up', 'down')))
      at(BEFORE + away, lambda link=link: world.network.heal(link))
  if dead:
    at(BEFORE, lambda: world.end(world.learners[dead]))
  if mute:
    at(BEFORE, lambda: setattr(world.link(mute), 'bulk_up_ns', seeds.CALM_NS))
  world.run(seeds.CALM_NS, done=lambda: world.finished)
  assert world.finished, world.stuck()
  world.run(world.now_ns + seeds.GOODBYE_NS, done=lambda: not world.learners)
  checkers.finished(world.now_ns)
  back_ns = (BEFORE + away) * STEP_NS
  after = [one for one in merges.seen if one[0] > back_ns]
  first = {p: (who, (now_ns - back_ns) / STEP_NS) for now_ns, p, who in reversed(after)}
  times = [at for _, at in first.values()]
  return world.ledger(), {p: who for p, (who, _) in first.items()}, min(times), max(times)


@pytest.mark.parametrize('kind', ['kill', 'partition', 'freeze'])
@pytest.mark.parametrize('periods', [3, 10, 40])
def test_the_first_outer_step_after_an_outage_has_all_learners_and_nothing_is_lost(kind, periods):
  """One after the other, displacements of so many steps would add up instead of having a mean."""
  ledger, first, *_ = run(periods * FRAGMENTS, kind)
  assert ledger.discarded == {} and ledger.merged == FRAGMENTS * ledger.trained
  if periods > 3:  # else payloads of before may be merged first
    assert first == dict.fromkeys(range(FRAGMENTS), LEARNERS)


def test_a_learner_that_does_not_return_is_waited_for_no_longer_than_a_lease_and_a_redial():
  ledger, first, waited, _ = run(40 * FRAGMENTS, 'kill', dead='l3')
  assert set(first.values()) == {LEARNERS[:3]}
  assert 10 < waited < 60  # lease and longest redial are 40 steps, the first returns in 20


def test_after_a_short_absence_nobody_is_waited_for():
  *_, waited, _ = run(2, 'kill', dead='l3', period=20)
  assert waited < 20


def test_a_learner_whose_payloads_never_arrive_takes_one_lease_of_all_fragments_together():
  _, first, waited, last = run(40 * FRAGMENTS, 'kill', mute='l3')
  assert set(first.values()) == {LEARNERS[:3]}
  assert 20 <= waited and last < waited + 10  # a lease is 20 steps, two syncs are open at a time
