"""A learner that is offline for a large part of a run: what of its work is merged in the end. The
machines, all checkers on, and arrays that are the displacements (sim/arrays.py)."""

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import messages
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine, seeds
from diloco_jax.verification.sim import world as world_lib

MS = engine.MS
STEP_NS, STEPS, LEASE_STEPS = 100 * MS, 200, 20
FRAGMENTS = 4


def ledger_after(offline: int, from_step: int = 40, **settings):
  """The ledger of a run of four learners of which l3 is cut off for so many steps."""
  config = config_lib.ProtocolConfig(
    **{
      'learners': 4,
      'period': FRAGMENTS,
      'fragments': FRAGMENTS,
      'overlap': 2,
      'total_steps': STEPS,
      'lease_ns': LEASE_STEPS * STEP_NS,
      'heartbeat_ns': LEASE_STEPS * STEP_NS // 5,
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
  world.engine.at(from_step * STEP_NS, lambda: link.cut.update(('up', 'down')))
  world.engine.at((from_step + offline) * STEP_NS, lambda: world.network.heal(link))
  world.run(seeds.CALM_NS, done=lambda: world.finished)
  assert world.finished, world.stuck()
  world.run(world.now_ns + seeds.GOODBYE_NS, done=lambda: not world.learners)
  checkers.finished(world.now_ns)
  return world.ledger()


@pytest.mark.parametrize('offline', [STEPS // 4, pytest.param(STEPS // 2, marks=pytest.mark.full)])
def test_all_steps_of_a_learner_that_was_offline_are_merged(offline):
  """It is lost, returns as the same process, and carries all its steps onto the newest version,
  which counts as one miss."""
  ledger = ledger_after(offline)
  assert ledger.learners['l3']['tokens'] > 0.9 * ledger.learners['l0']['tokens']
  assert ledger.discarded == {} and ledger.merged == FRAGMENTS * ledger.trained


@pytest.mark.parametrize('max_misses, lost', [(2, True), (10**6, False)])
def test_a_pause_within_the_lease_costs_what_max_misses_says(max_misses, lost):
  """The session lives on, so the versions of the pause arrive one after the other. After more than
  `max_misses` of them without a merge the learner drops what it has, and nothing else."""
  pause = 3 * LEASE_STEPS // 4
  ledger = ledger_after(pause, max_misses=max_misses)
  discarded = dict(ledger.discarded)
  assert (discarded.pop(messages.Reason.LATE, 0) > 0) == lost
  assert discarded == {}
  tokens_per_step = ledger.learners['l0']['tokens'] / STEPS
  most = FRAGMENTS * tokens_per_step * (pause + 2 * FRAGMENTS)
  assert ledger.merged >= FRAGMENTS * ledger.trained - most
