"""A learner that is offline for a large part of a run: what of its work is merged in the end. The
machines, all checkers on, and arrays that are the displacements (sim/arrays.py)."""

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import facts, messages
from diloco_jax.protocol.learner import anchor
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine, seeds
from diloco_jax.verification.sim import world as world_lib

MS = engine.MS
STEP_NS, STEPS, LEASE_STEPS = 100 * MS, 160, 20
BEFORE = 40  # steps before the pause
FRAGMENTS = 4


def ledger_after(offline: int, lease_steps: int = LEASE_STEPS, **settings) -> facts.Ledger:
  """The ledger of a run of four learners of which l3 is cut off for so many steps."""
  config = config_lib.ProtocolConfig(
    **{
      'learners': 4,
      'period': FRAGMENTS,
      'fragments': FRAGMENTS,
      'overlap': 2,
      'total_steps': STEPS,
      'lease_ns': lease_steps * STEP_NS,
      'save_steps': 0,
    }
    | settings
  )
  checkers = checkers_lib.Checkers(config)
  world = world_lib.World(config, watchers=(checkers,))
  for name in ('l0', 'l1', 'l2', 'l3'):
    world.island(name).step_ns = STEP_NS
    world.start(name)
  link = world.link('l3')
  world.engine.at(BEFORE * STEP_NS, lambda: link.cut.update(('up', 'down')))
  world.engine.at((BEFORE + offline) * STEP_NS, lambda: world.network.heal(link))
  world.run(seeds.CALM_NS, done=lambda: world.finished)
  assert world.finished, world.stuck()
  world.run(world.now_ns + seeds.GOODBYE_NS, done=lambda: not world.learners)
  checkers.finished(world.now_ns)
  return world.ledger()


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
  assert offline > (anchor.MOST_VERSIONS + 1) * FRAGMENTS
  assert set(ledger.discarded) == {messages.Reason.LATE}
  assert ledger.merged + ledger.discarded[messages.Reason.LATE] == FRAGMENTS * ledger.trained
  assert lost_steps(ledger) == pytest.approx(offline, abs=FRAGMENTS + 2)


@pytest.mark.parametrize('offline', [5 * FRAGMENTS, (anchor.MOST_VERSIONS - 1) * FRAGMENTS])
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
