"""What a run's links make of it."""

import dataclasses

import pytest

from diloco_jax.protocol import config as config_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import conditions, links

CONFIG = config_lib.ProtocolConfig(
  learners=2, quorum=1, fragments=6, period=6, overlap=2, total_steps=60, save_steps=0
)
SIZES = links.sizes([32_000] * 6, 'int8', 'int8')
WIRE_BYTES = network_lib.wire_bytes(SIZES.payload_bytes[0])
STEP = conditions.Hardware(step_s=1.0)


def predict(*lines, hardware=STEP, config=CONFIG):
  return links.predict(config, SIZES, hardware, conditions.Network(lines=lines))


def test_sizes_are_those_of_the_codecs_and_whole_fragments_are_float32():
  sizes = links.sizes([32, 64], 'int8', 'int4')
  assert (sizes.payload_bytes, sizes.delta_bytes) == ((33, 66), (17, 34))
  assert sizes.whole_bytes == (128, 256)


def test_on_good_links_everything_is_merged_on_time_and_the_bytes_are_those_of_the_schedule():
  predicted = predict(conditions.Line(up=1e8, down=1e8))
  assert set(predicted.computing.values()) == set(predicted.merged.values()) == {1.0}
  assert min(predicted.on_time.values()) > 0.98
  for count in (*predicted.up_bytes.values(), *predicted.down_bytes.values()):
    assert count == pytest.approx(60 * WIRE_BYTES, rel=0.05)


def test_a_line_in_lock_step_costs_its_transfers():
  config = dataclasses.replace(CONFIG, overlap=0, quorum=2, fragments=1, total_steps=30)
  sizes = links.sizes([320_000], 'int8', 'int8')
  line = conditions.Line(up=100_000, down=50_000)
  predicted = links.predict(config, sizes, STEP, conditions.Network(lines=(line,)))
  wire_s = network_lib.wire_bytes(sizes.payload_bytes[0]) * (1 / line.up + 1 / line.down)
  # Five periods, and no sync between the last step and the end of the measured time.
  assert predicted.computing['l0'] == pytest.approx(30 / (30 + 4 * wire_s), abs=0.01)


def test_a_site_shares_its_line_and_a_thin_line_is_its_own_learners_alone():
  rate = 1.5 * WIRE_BYTES  # enough for one learner with a payload a step, too little for two
  as_set = dataclasses.replace(CONFIG, longest_period=0)
  own = predict(conditions.Line(up=rate, down=rate), config=as_set)
  shared = predict(conditions.Line(up=rate, down=rate, site='a'), config=as_set)
  assert min(own.merged.values()) == 1.0 and min(own.on_time.values()) > 0.95
  assert max(shared.on_time.values()) < 0.8
  wide, thin = conditions.Line(up=1e8, down=1e8), conditions.Line(up=WIRE_BYTES / 2, down=1e8)
  mixed = predict(wide, thin)
  assert mixed.merged['l0'] == 1.0 and mixed.on_time['l1'] < 0.8


def test_what_the_exchange_adds_to_a_step_is_not_computing():
  predicted = predict(hardware=conditions.Hardware(step_s=1.0, exchange=0.25))
  assert predicted.computing['l0'] == pytest.approx(0.8)


def test_a_learner_with_a_step_as_long_as_the_run_ends_behind_the_others():
  predicted = predict(hardware=conditions.Hardware(step_s=1.0, slowness=(1.0, 100.0)))
  assert predicted.steps['l0'] == 60 and predicted.on_time['l0'] > 0.98


def test_what_comes_before_the_warm_up_has_ended_does_not_count():
  wide, thin = (
    conditions.Network(lines=(conditions.Line(up=rate, down=1e8),))
    for rate in (1e8, WIRE_BYTES / 2)
  )
  whole, half = (links.predict(CONFIG, SIZES, STEP, wide, warm_up=steps) for steps in (0, 30))
  assert (whole.steps['l0'], half.steps['l0']) == (60, 30)
  assert half.up_bytes['l0'] == pytest.approx(30 * WIRE_BYTES, rel=0.08)
  late = links.predict(CONFIG, SIZES, STEP, thin, warm_up=60 - 1)  # all but the last is on time
  assert late.steps['l0'] == 1 and late.merged['l0'] > 0.9


def test_a_run_goes_on_after_its_sessions_broke_with_payloads_on_their_way():
  run = world_lib.World(CONFIG, 0, (), SIZES)
  thin = conditions.Network(lines=(conditions.Line(up=WIRE_BYTES, down=WIRE_BYTES, site='a'),))
  conditions.furnish(run, ['l0', 'l1'], STEP, thin, tokens=10)
  for name in ('l0', 'l1'):
    run.start(name)
  for at_s in (20, 40):
    run.run(at_s * engine_lib.SECOND)
    assert run.network.reset(run.learners['l0'])
  run.run(3_600 * engine_lib.SECOND, done=lambda: run.finished)
  assert run.finished and run.ledger().learners['l0']['steps'] > 40
