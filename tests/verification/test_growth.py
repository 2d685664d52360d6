"""An event costs the same with many learners as with few, and late as early: counted in calls and
in what is kept, not in seconds."""

import collections
import random
import sys
from typing import Any

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.checks.books import run as run_book
from diloco_jax.verification.sim import arrays
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import seeds as seeds_lib
from diloco_jax.verification.sim import world as world_lib

DEATHS = 12
ROUNDS = 9


def calm_run(config: config_lib.ProtocolConfig) -> int:
  """Runs without faults, with unequal steps and all checkers; returns the number of events."""
  count, checkers = observers.Count(), checkers_lib.Checkers(config)
  world = world_lib.World(config, watchers=(count, checkers))
  for which in range(config.learners):
    world.island(f'l{which}').noise = 200
    world.start(f'l{which}')
  world.run(seeds_lib.CALM_NS, done=lambda: world.finished)
  arrays.require(world.finished, 'A run ends.', world.stuck())
  checkers.finished(world.now_ns)
  return count.events


def calls_per_event(learners: int, steps: int) -> float:
  """Python and built-in calls of a whole run, including the checkers, per event."""
  config = config_lib.ProtocolConfig(
    learners=learners, fragments=4, period=4, overlap=2, quorum=learners // 2, total_steps=steps
  )
  calls = 0

  def profile(frame, event, argument):
    nonlocal calls
    calls += event in ('call', 'c_call')

  sys.setprofile(profile)
  try:
    events = calm_run(config)
  finally:
    sys.setprofile(None)
  return calls / events


@pytest.mark.long
def test_128_learners_cost_at_most_twice_the_calls_of_8():
  few, many = calls_per_event(8, steps=20), calls_per_event(128, steps=4)
  assert many < 2 * few, (few, many)


def sizes(root: Any) -> collections.Counter[str]:
  """The elements of all collections that an object reaches, by the way there, without the calls
  that are to come; None is none."""
  seen: set[int] = set()
  counted: collections.Counter[str] = collections.Counter()
  todo = [(root, type(root).__name__)]
  while todo:
    item, way = todo.pop()
    if id(item) in seen or isinstance(item, type | random.Random | engine_lib.Engine):
      continue
    seen.add(id(item))
    if isinstance(item, list | tuple | set | frozenset | collections.deque | dict):
      inside = list(item.values() if isinstance(item, dict) else item)
      counted[way] += sum(each is not None for each in inside)
      todo += ((each, f'{way}[]') for each in inside)
    else:
      slots = [name for kind in type(item).__mro__ for name in getattr(kind, '__slots__', ())]
      names = (*getattr(item, '__dict__', ()), *slots)
      todo += ((getattr(item, name, None), f'{way}.{name}') for name in names)
  return counted


@pytest.mark.long
def test_books_of_machines_checkers_and_world_do_not_grow_with_deaths_nor_with_time(monkeypatch):
  monkeypatch.setattr(run_book, 'KEPT', 8)
  config = config_lib.ProtocolConfig(
    learners=3,
    fragments=2,
    period=6,
    overlap=2,
    quorum=1,
    total_steps=10**6,
    save_steps=6,
    save_syncs=6,
  )
  world = world_lib.World(config, watchers=(checkers_lib.Checkers(config),))
  for which in range(config.learners):
    world.start(f'l{which}')

  def deaths() -> collections.Counter[str]:
    for which in range(DEATHS):
      name = f'l{which % config.learners}'
      world.run(world.now_ns + 2 * engine_lib.SECOND)
      world.end(world.learners[name])
      world.start(name, restored=True)
    world.run(world.now_ns + 2 * engine_lib.SECOND)
    return sizes(world)

  deaths()
  versions = sum(world.syncer.theta.versions)
  before, *_, after = (deaths() for _ in range(ROUNDS))
  assert sum(world.syncer.theta.versions) > versions + 5 * DEATHS
  # A leak grows with every death. The objects of a save or a merge come and go, up to 30.
  most = (ROUNDS - 1) * DEATHS // 2
  assert not {way: (before[way], after[way]) for way in after if after[way] > before[way] + most}
