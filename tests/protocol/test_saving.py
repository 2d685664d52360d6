"""When the syncer saves, and what comes back.

Each test opens with the sentence that it checks and its source.
"""

from diloco_jax.protocol import actions
from tests.protocol import world as world_lib
from tests.protocol.single import advance, contribution, joined, merge_done, received
from tests.protocol.tape import Tape

MS = world_lib.MS


def test_a_busy_syncer_saves_too():
  # design section 4, Durability: a snapshot is of no half-done merge; merges that always overlap
  # must not keep it from being taken.
  tape = Tape(
    learners=1, fragments=8, period=8, overlap=3, quorum=1, total_steps=80, save_syncs=4)
  tape.start('l0', step_ms=20)
  tape.world.syncer.merge_ns = 30 * MS
  tape.run(2000)
  saves = [time for time, name, _ in tape.of(actions.Save) if name == 'syncer']
  assert len(saves) >= 5 and saves[0] < 400 * MS, saves


def test_a_snapshot_restores_the_machine():
  # Design section 1: snapshot(), restore(): the same state again.
  machine, session = joined()
  advance(machine, session, step=2)
  machine.handle(2, received(session, contribution(sync=2), handle=1))
  machine.handle(3, merge_done(2))
  again = type(machine).restore(
    machine._config, world_lib.AGREEMENT, (world_lib.PAYLOAD_BYTES,), machine.snapshot())
  assert again.snapshot() == machine.snapshot()
  again.check()
