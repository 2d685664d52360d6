"""With rebase every trained token is merged, unless a fault explains why it is not.

The runs are those of the simulation (diloco_jax/verification/sim): random settings, hardware and
networks, all checkers on.
"""

import dataclasses

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import anchor as anchor_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import random_settings
from diloco_jax.verification.sim import seeds as seeds_lib
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import transcript
from tests.verification import mutants

MS = engine_lib.MS
SEEDS, STEPS = 60, 9
REBASE = config_lib.ADOPT.index('rebase')
UNCAPPED = 10**6
LONG_NS = 600 * 10**9  # closing syncs wait for a learner that trains on, but no longer than a lease


def faultless(seed: int, **settings) -> random_settings.Setting:
  """The setting of a seed, with rebase and without faults."""
  setting = random_settings.draw(seed)
  config = dataclasses.replace(
    setting.config,
    adopt=REBASE,
    max_misses=UNCAPPED,
    lease_ns=LONG_NS,
    strikes=0,
    norm_factor=0,
    **settings,
  )
  calm = {'plan': [], 'loss': 0, 'duplicate': 0, 'guest_ns': None, 'slow_link': None}
  return dataclasses.replace(setting, config=config, **calm)


def run(setting: random_settings.Setting, seed: int) -> world_lib.World:
  """Runs a setting to its end."""
  checkers = checkers_lib.Checkers(setting.config)
  world = world_lib.World(setting.config, seed, (checkers,))
  random_settings.furnish(world, setting)
  for which in range(setting.config.learners):
    world.start(f'l{which}')
  world.run(seeds_lib.CALM_NS, done=lambda: world.finished)
  assert world.finished, world.stuck()
  world.run(world.now_ns + seeds_lib.GOODBYE_NS, done=lambda: not world.learners)
  checkers.finished(world.now_ns)
  return world


@pytest.mark.parametrize(
  'first', [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(10, SEEDS, 10))]
)
def test_without_faults_nothing_is_discarded(first, monkeypatch):
  monkeypatch.setattr(
    anchor_lib, 'MOST_VERSIONS', UNCAPPED
  )  # the slowest miss more than 8 versions
  for seed in range(first, first + 10):
    setting = faultless(seed)
    ledger = run(setting, seed).ledger()
    assert ledger.discarded == {}, (seed, setting, ledger)
    assert ledger.merged == ledger.fragments * ledger.trained > 0, (seed, ledger)


class Cut(observers.Observer):
  """Breaks the session of a learner after the turn number `at` of the world."""

  def __init__(self, at: int):
    self.at, self.turns = at, 0
    self.clock = 0  # of the learner then
    self.world: world_lib.World | None = None

  def saw(self, observed, now_ns, event, out) -> None:
    self.turns += 1
    if self.turns == self.at and 'l1' in self.world.learners:
      process = self.world.learners['l1']
      self.clock = process.machine.clock
      self.world.engine.after(0, lambda: self.world.network.reset(process))


def run_with_cut(at: int) -> tuple[world_lib.World, Cut]:
  """A small run of two learners."""
  config = transcript.make_config(
    learners=2,
    fragments=2,
    period=3,
    overlap=1,
    quorum=1,
    total_steps=STEPS,
    max_misses=UNCAPPED,
  )
  cut, checkers = Cut(at), checkers_lib.Checkers(config)
  world = cut.world = world_lib.World(config, watchers=(cut, checkers))
  for name in ('l0', 'l1'):
    world.start(name)
    world.island(name).encode_ns = 30 * MS
  world.run(seeds_lib.CALM_NS, done=lambda: world.finished)
  assert world.finished, (at, world.stuck())
  world.run(world.now_ns + seeds_lib.GOODBYE_NS, done=lambda: not world.learners)
  checkers.finished(world.now_ns)
  return world, cut


def test_a_session_that_breaks_at_any_point_costs_no_token(counts):
  """A learner is back within a step; one that is away while the closing syncs end has lost what
  these would have merged."""
  world, cut = run_with_cut(10**9)
  assert world.ledger().discarded == {} and cut.turns > 200
  for at in range(1, cut.turns, 1 if counts.full else 5):
    world, cut = run_with_cut(at)
    ledger = world.ledger()
    away = cut.clock > STEPS - 2
    assert ledger.discarded.keys() <= ({'end_of_run'} if away else set()), (at, ledger)
    assert ledger.merged + sum(ledger.discarded.values()) == 2 * ledger.trained, (at, ledger)


@pytest.mark.parametrize(
  'name, sentence',
  [
    ('capture_is_always_merged', 'A learner gives up only what the adopted value contains.'),
    ('capture_is_never_merged', 'A learner carries on nothing that the adopted value contains.'),
  ],
)
def test_the_world_sees_lost_and_doubled_tokens(name, sentence):
  """By itself, without checkers: its arrays are the displacements."""
  with mutants.MUTANTS[name].applied(), pytest.raises(checkers_lib.Violation, match=sentence):
    for seed in range(30):
      setting = faultless(seed)
      world = world_lib.World(setting.config, seed)
      random_settings.furnish(world, setting)
      for which in range(setting.config.learners):
        world.start(f'l{which}')
      world.run(seeds_lib.CALM_NS, done=lambda: world.finished)
