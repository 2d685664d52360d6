"""Work on an island is stretched by all that happens to the island while it runs."""

import itertools

from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import hardware
from experiments.goodput import islands

MS, SECOND = engine_lib.MS, engine_lib.SECOND


def test_a_fault_stretches_the_step_that_runs():
  engine, ends = engine_lib.Engine(), []
  island = hardware.island(engine, 0, 'l0')
  island.begin(100 * MS, lambda: ends.append(engine.now_ns))
  engine.at(40 * MS, lambda: island.fault('slow', 3))  # 60 ms are left
  engine.at(70 * MS, lambda: island.fault('shrink', 2))  # 50 ms are left
  engine.at(190 * MS, lambda: island.fault('slow', 1))  # 30 ms are left
  engine.run(SECOND)
  assert ends == [250 * MS]


def test_work_ends_with_its_process():
  engine, ends = engine_lib.Engine(), []
  island = hardware.island(engine, 0, 'l0')
  island.begin(100 * MS, lambda: ends.append('killed'))
  engine.at(40 * MS, island.stop)
  engine.at(60 * MS, lambda: island.begin(100 * MS, lambda: ends.append(engine.now_ns)))
  engine.run(SECOND)
  assert ends == [160 * MS] and island.busy == 140 * MS


def test_failures_stretch_work_by_pauses_and_by_missing_slices():
  engine, spans = engine_lib.Engine(), []
  slices = hardware.Slices(chips=10**6, count=7, mtbi_s=5e7)  # a failure in 50 s
  island = hardware.island(engine, 1, 'l0', slices)
  work_ns = 600 * SECOND
  for _ in range(30):
    before = island.able, engine.now_ns
    island.begin(work_ns, lambda: spans.append(engine.now_ns - before[1]))
    number = len(spans)
    engine.run(1 << 62, done=lambda: len(spans) > number)
    island.settle()
    assert 0 <= island.able - before[0] - 7 * work_ns <= 100  # slice-ns: rounded once per change
  assert min(spans) > work_ns and len(set(spans)) == 30
  assert island.able == island.busy < 7 * island.up_ns


def test_the_goodput_of_islands_is_that_of_the_closed_form():
  elastic = hardware.of_chips(300_000)
  assert abs(islands.alone(elastic, 4, 24).goodput - islands.elastic_goodput(elastic)) < 0.01
  rigid = hardware.of_chips(300_000, rigid=True)
  assert abs(islands.alone(rigid, 1, 48).goodput - islands.rigid_goodput(rigid)) < 0.01


def test_uptime_is_that_of_independent_islands():
  fleet = islands.alone(hardware.of_chips(600_000), 2, 48)
  able = fleet.uptime(2) + (fleet.uptime(1) - fleet.uptime(2)) / 2  # share of time that one runs
  assert fleet.uptime(0) == 1 and abs(fleet.uptime(1) - (1 - (1 - able) ** 2)) < 0.01


def test_all_islands_of_a_fleet_cost_by_their_failures_and_repeat():
  first, again = (islands.alone(hardware.of_chips(10_000), 16, 100, seed=4) for _ in range(2))
  other = islands.alone(hardware.of_chips(10_000), 16, 100, seed=5)
  assert first.goodput == again.goodput != other.goodput
  assert all(a >= b for a, b in itertools.pairwise(first.uptime(k) for k in range(17)))
