"""What an honest syncer does after odd peers, full disks and its own death is no violation."""

import pytest

from diloco_jax.proof.checks import checkers as checkers_lib
from diloco_jax.proof.sim import world as world_lib
from diloco_jax.protocol import facts
from tests.protocol import transcript

MS = transcript.MS


def watched(**settings) -> world_lib.World:
  config = transcript.protocol_config(
    **{'learners': 1, 'quorum': 1, 'fragments': 1, 'period': 8, 'overlap': 2, 'shards': 4}
    | settings
  )
  world = world_lib.World(config, watchers=[checkers_lib.Checkers(config)])
  start(world, 'l0')
  world.run(3_000 * MS)
  return world


def start(world, name):
  process = world.start(name)
  process.island.step_ns = 100 * MS
  return process


@pytest.mark.parametrize('trains_ms', [0, 250])
def test_ids_that_the_syncer_forgets(trains_ms):
  world = watched()
  for number in range(12):
    stranger = start(world, f's{number * 7 % 12}')
    world.run(world.now_ns + (60 + trains_ms) * MS)
    world.end(stranger)
    world.run(world.now_ns + 300 * MS)
    if number == 6:
      world.end(world.syncer)
      world.run(world.now_ns + 100 * MS)
      world.start_syncer()
      world.run(world.now_ns + 2_000 * MS)
  rows = world.ledger().learners
  assert ('(forgotten)' in rows) == (trains_ms > 0) and len(rows) < 8
  merged = rows['l0']['merged']
  world.run(world.now_ns + 3_000 * MS)
  assert world.ledger().learners['l0']['merged'] > merged
