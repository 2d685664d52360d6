"""Random orders of events: whatever is delayed, cut, killed or frozen, the promises hold.

Hypothesis draws a small config and a plan of faults. `check()` runs after every event, the world's
oracle watches every merge and adoption (tests/protocol/world.py). Then everything is healed and the
run must come to its end: safety throughout, liveness after healing (reliability.md section 3).
"""

from typing import Any

import hypothesis
from hypothesis import strategies as st

from diloco_jax.protocol import config as config_lib
from tests.protocol import processes
from tests.protocol import world as world_lib

MS = world_lib.MS
CALM_NS = 1_200_000 * MS  # far more than any healed run needs


@st.composite
def configs(draw: st.DrawFn) -> config_lib.ProtocolConfig:
  learners = draw(st.integers(1, 5))
  period = draw(st.integers(1, 6))
  return world_lib.protocol_config(
    learners=learners,
    period=period,
    fragments=draw(st.integers(1, period)),
    overlap=draw(st.integers(0, min(3, period - 1))),
    quorum=draw(st.integers(1, learners)),
    max_lag=draw(st.none() | st.integers(0, period - 1)),
    max_staleness=draw(st.integers(0, 2)),
    grace_permille=draw(st.sampled_from([0, 500, 999])),
    total_steps=draw(st.integers(1, 24) | st.integers(60, 90)),
    start_wait_ms=draw(st.sampled_from([0, 300])),
    save_steps=draw(st.sampled_from([0, 3])),
    save_syncs=draw(st.sampled_from([0, 1, 4])),
  )


FAULTS = ('cut', 'kill', 'revive', 'freeze', 'thaw', 'partition', 'heal', 'nan', 'flip', 'stop',
          'second', 'fail merge', 'freeze syncer', 'thaw syncer', 'slow', 'kill syncer',
          'restart syncer')
PLANS = st.lists(
  st.tuples(st.sampled_from(FAULTS), st.integers(0, 4), st.integers(0, 400)), max_size=25)
TIMES = st.lists(st.sampled_from([0, 1, 7, 40, 150, 700]), min_size=5, max_size=5)


def set_pace(process: processes.Learner, times: list[int]) -> None:
  up, down, bulk, encode, step = times
  process.up_ns, process.down_ns = min(up, 200) * MS, min(down, 200) * MS  # well within a lease
  process.bulk_ns = bulk * MS
  process.encode_ns = process.adopt_ns = min(encode, 150) * MS
  process.step_ns = (step + 10) * MS


def fault(world: world_lib.World, kind: str, which: int, times: list[int]) -> None:
  """Does one thing to a learner, if it is in a state to have it done."""
  name = f'l{which % world.config.learners}'
  process = world.learners.get(name)
  match kind:
    case 'revive' if process is None:
      set_pace(world.start(name, restored=which % 2 == 0), times)
    case 'freeze syncer' if world.syncer.alive:
      world.syncer.freeze()
    case 'kill syncer' if world.syncer.alive:
      world.end(world.syncer)
    case 'restart syncer' if not world.syncer.alive and world.syncer.exit is None:
      world.start_syncer()
    case 'thaw syncer':
      world.syncer.thaw()
    case 'fail merge':
      world.syncer.fail = True
    case _ if process is None:
      pass
    case 'cut':
      world.cut(name)
    case 'kill':
      world.end(process)
    case 'freeze':
      process.freeze()
    case 'thaw':
      process.thaw()
    case 'partition' if process.stalled is None:
      world.partition(name)
    case 'heal':
      world.heal(name)
    case 'nan':
      process.nan.add(which % world.config.fragments)
    case 'flip':
      process.flips.add(which % world.config.fragments)
    case 'stop':
      process.stop('preempted')
    case 'second' if f'{name}*' not in world.learners:
      world.start(name, second=True)
    case 'slow':
      process.step_ns *= 5


def calm(world: world_lib.World) -> None:
  """Heals everything, as a supervisor would: whoever is down is started again; links are good."""
  world.syncer.thaw()
  world.syncer.fail = False
  for process in list(world.learners.values()):
    process.thaw()
    if process.stalled is not None and process.alive:
      world.heal(process.name)
    set_pace(process, [1, 1, 1, 1, 90])
  if not world.syncer.alive and world.syncer.exit is None:
    world.start_syncer()
  for which in range(world.config.learners):
    if world.syncer.alive and f'l{which}' not in world.learners:
      world.start(f'l{which}')


def steps_left(world: world_lib.World) -> int:
  """How many steps of the clock nobody has made."""
  steps = [process.machine.step for process in world.learners.values()]
  return world.config.total_steps - max([world.syncer.machine.clock, *steps])


def finish(world: world_lib.World) -> None:
  """After healing every process comes to an end; those that outlive the syncer are stopped."""
  def over() -> bool:
    if world.syncer.exit is None:
      for which in range(world.config.learners):  # a supervisor starts again whoever has ended
        if not any(name.startswith(f'l{which}') for name in world.learners):
          world.start(f'l{which}')
    return world.syncer.exit is not None

  world.run(world.now + CALM_NS, done=over)
  assert world.syncer.exit is not None, ('the syncer never ends', world.stuck())
  world.run(world.now + 30_000 * MS)
  for process in list(world.learners.values()):
    process.stop('the run is over')
  world.run(world.now + 30_000 * MS)
  assert not world.learners, ('a learner never ends', world.stuck())


def check_books(world: world_lib.World) -> None:
  """The last ledger against what the world saw (fragment-tokens)."""
  ledger = world.ledger()
  total = ledger['merged'] + sum(ledger['discarded'].values()) + ledger['unsettled']
  assert ledger['fragments'] * ledger['trained'] == total, ledger
  assert ledger['unsettled'] == 0, ledger
  assert world.flipped or not ledger['repaired'], 'a delta went to a learner of another version'
  assert ledger['merged'] == sum(world.oracle.merged.values()), (ledger, world.oracle)
  for name, row in ledger['learners'].items():
    trained = sum(p.tokens for p in world.ended if p.name.rstrip('*') == name)
    assert row['merged'] == world.oracle.merged.get(name, 0), (name, row, world.oracle)
    assert world.rolled_back or row['tokens'] <= trained, (name, row, trained)


def run_plan(config: config_lib.ProtocolConfig, times: list, plan: list, watch: Any = None) -> Any:
  world = world_lib.World(config, *([watch] if watch else []))
  for which in range(config.learners):
    set_pace(world.start(f'l{which}'), times[which])
  for kind, which, wait in plan:
    world.run(world.now + wait * MS)
    fault(world, kind, which, times[which])
  calm(world)
  left, before = steps_left(world), list(world.oracle.versions)
  finish(world)
  # Liveness L2 and L6: every fragment is merged again. 20 steps are two leases: everybody is back.
  if left >= 20 + 4 * config.period:
    after = world.oracle.versions
    assert all(b > a for a, b in zip(before, after)), (before, after, world.ledger())
  check_books(world)
  return world


@hypothesis.settings(
  max_examples=250, deadline=None, derandomize=True, database=None, print_blob=False,
  suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(configs(), st.lists(TIMES, min_size=5, max_size=5), PLANS)
def test_every_order_keeps_the_promises(config, times, plan):
  run_plan(config, times, plan)
