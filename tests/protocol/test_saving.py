"""When the syncer saves, and what comes back.

Each test opens with the sentence that it checks and its source.
"""

from diloco_jax.protocol import actions
from diloco_jax.sim import engine, network
from diloco_jax.sim import world as world_lib
from tests.protocol.single import advance, contribution, joined, merge_done, received
from tests.protocol.recording import Recording

MS = engine.MS


def test_a_busy_syncer_saves_too():
  # design section 4, Durability: a snapshot is of no half-done merge; merges that always overlap
  # must not keep it from being taken.
  seen = Recording(
    learners=1, fragments=8, period=8, overlap=3, quorum=1, total_steps=80, save_syncs=4)
  seen.start('l0', step_ms=20)
  seen.world.syncer.merge_ns = 30 * MS
  seen.run(2000)
  saves = [time for time, name, _ in seen.of(actions.Save) if name == 'syncer']
  assert len(saves) >= 5 and saves[0] < 400 * MS, saves


def test_a_snapshot_restores_the_machine():
  # Design section 1: snapshot(), restore(): the same state again.
  machine, session = joined()
  advance(machine, session, step=2)
  machine.handle(2, received(session, contribution(sync=2), handle=1))
  machine.handle(3, merge_done(2))
  again = type(machine).restore(
    machine._config, world_lib.AGREEMENT, (network.PAYLOAD_BYTES,), machine.snapshot())
  assert again.snapshot() == machine.snapshot()
  again.check()
