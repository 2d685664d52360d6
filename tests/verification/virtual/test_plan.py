"""What a run needs before it starts."""

import dataclasses
import json
import pathlib
import resource

import pytest

from diloco_jax.config import build
from diloco_jax.configs import gemma, stdlib_lm
from diloco_jax.numerics import codecs
from diloco_jax.protocol import config as config_lib
from diloco_jax.verification.commands import plan as command
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.virtual import conditions, plan
from tests.launch.lib import command_line

ROOT = pathlib.Path(__file__).parents[3]
GIB = 1 << 30


def run_of(config, **more) -> plan.Run:
  layout = build.assemble(config, data=False).layout
  return plan.Run(
    protocol=config.protocol(),
    values=tuple(map(layout.size, range(layout.num_fragments))),
    codecs=(config.sync.codec_up, config.sync.codec_down),
    **{'step_s': (0.1,)} | more,
  )


def test_the_plan_of_the_demo_is_its_arithmetic(monkeypatch):
  monkeypatch.setattr(plan, 'PERIODS', 3)
  run = run_of(stdlib_lm.get_config('cpu'))
  facts = plan.facts(run, step_tokens=1_000, tokens=4e6)
  codec, steps_s = codecs.get('int8'), run.protocol.period * 0.1
  wire = sum(network_lib.wire_bytes(codec.encoded_size(size)) for size in run.values)
  assert facts['fits'] and not facts['change']
  assert facts['up_bytes'] == facts['down_bytes'] == wire
  assert facts['syncer_bytes_per_s'] == pytest.approx(2 * 4 * wire / steps_s)
  assert facts['data_parallel_bytes_per_s'] == pytest.approx(2 * 3 / 4 * 2 * sum(run.values) / 0.1)
  assert facts['seconds'] == pytest.approx(4e6 / (4 * 1_000 / 0.1), rel=0.03)
  assert wire / steps_s <= facts['needed_bytes_per_s'] < 3 * wire / steps_s


@pytest.mark.full
def test_what_one_process_cannot_carry_needs_transport_processes_until_the_machine_ends():
  protocol = config_lib.ProtocolConfig(learners=8, fragments=24, period=24)
  run = plan.Run(
    protocol=protocol, values=(500_000_000,) * 24, codecs=('int8', 'int8'), step_s=(2.6,)
  )
  facts = plan.facts(run, step_tokens=1_000, tokens=None)
  assert facts['fits'] and facts['transport_processes'] == 6 and facts['syncer_cores'] < 6
  small = dataclasses.replace(run, values=(50_000_000,) * 24)
  assert plan.facts(small, 1_000, None)['transport_processes'] == 0
  fast = dataclasses.replace(run, step_s=(0.6,), codecs=('int4', 'int4'))
  assert fast.misfit().startswith('syncer (outer steps fill 5.3 cores, it uses 4)')


def test_with_the_needed_links_a_run_fits_and_with_half_of_them_other_settings_do():
  protocol = config_lib.ProtocolConfig(learners=2, fragments=6, period=6, overlap=2)
  run = plan.Run(protocol=protocol, values=(32_000,) * 6, codecs=('int8', 'int8'), step_s=(1.0,))
  enough = plan.needed(run)
  on = lambda rate: dataclasses.replace(run, lines=(conditions.Line(rate, rate),))
  assert not on(enough).misfit() and on(enough / 2).misfit() == 'links'
  other = plan.fitting(on(enough / 2))
  assert not other.misfit() and other.codecs == ('int2', 'int2')
  assert plan.fitting(on(enough / 1_000)) is None


def test_a_link_that_carries_a_run_has_narrow_codecs_in_a_shorter_period_for_a_lower_loss():
  protocol = config_lib.ProtocolConfig(learners=2, fragments=12, period=12, overlap=3)
  run = plan.Run(protocol=protocol, values=(32_000,) * 12, codecs=('int8', 'int8'), step_s=(1.0,))
  on = lambda rate: dataclasses.replace(run, lines=(conditions.Line(rate, rate),))
  enough, least = on(plan.needed(run)), max(map(sum, run.bytes)) / run.period_s
  better = plan.facts(enough, step_tokens=1_000, tokens=None)['better']
  other = plan.fitting(enough)
  assert other.codecs == ('int2', 'int2') and other.protocol.fragments == other.protocol.period == 4
  assert '--config.sync.codec_up=int2' in better and '--config.sync.period=4' in better
  assert max(map(sum, other.bytes)) / other.period_s < 1.2 * least
  assert not plan.facts(run, step_tokens=1_000, tokens=None)['better'], 'no link, nothing is given'


@pytest.mark.parametrize('step_s', [0.4, 0.15])
def test_a_slow_learner_is_late_on_any_link_and_needs_the_link_of_the_others(step_s):
  protocol = config_lib.ProtocolConfig(learners=2, fragments=4, period=8, overlap=2)
  run = plan.Run(
    protocol=protocol, values=(250_016,) * 4, codecs=('int8', 'int8'), step_s=(0.1, step_s)
  )
  assert run.predict().on_time['l1'] < 0.6 and not run.misfit()
  even = dataclasses.replace(run, step_s=(0.1,))
  assert plan.needed(run) == plan.needed(even)
  thin = dataclasses.replace(run, lines=(conditions.Line(), conditions.Line(1e6, 1e6)))
  assert thin.misfit() == 'links'


def test_a_short_latency_makes_payloads_late_and_the_overlap_has_to_include_the_round_trip():
  words = '--config=own_loop --parameters=1e5 --step_s=0.01 --latency_s=0.02 --json'.split()
  ended = command_line.diloco('plan', *words)
  assert ended.returncode == 42
  assert max(json.loads(ended.stdout)['learners']['on_time'].values()) < 0.5
  assert 'does not fit its links; use --config.sync.overlap=6' in ended.stderr
  again = command_line.diloco('plan', *words, '--config.sync.overlap=6')
  assert again.returncode == 0
  assert min(json.loads(again.stdout)['learners']['on_time'].values()) > plan.FITS


def test_the_syncer_waits_a_long_latency_in_a_period_that_includes_the_round_trip():
  protocol = config_lib.ProtocolConfig(learners=2, fragments=4, period=8, overlap=2)
  run = plan.Run(
    protocol=protocol, values=(25_024,) * 4, codecs=('int8', 'int8'), step_s=(0.1,), latency_s=0.1
  )
  assert not run.misfit() and run.predict().on_time['l0'] > plan.FITS  # 8 > 2 + 2 + 1
  far = dataclasses.replace(run, latency_s=0.9)
  assert far.misfit() == 'links' and plan.needed(far) is None
  assert min(far.predict().on_time.values()) > plan.FITS
  assert far.predict(adapts=True).period == 24 < plan.fitting(far).protocol.period == 32


def test_learners_of_a_site_have_a_part_of_its_link_each():
  lines = (conditions.Line(100.0, 0.0), conditions.Line(60.0, 60.0, 'a'))
  protocol = config_lib.ProtocolConfig(learners=4)
  values = (32,) * 12
  run = plan.Run(
    protocol=protocol, values=values, codecs=('int8', 'int8'), step_s=(1.0,), lines=lines
  )
  assert run.rates == [30.0, 30.0]


def test_twelve_billion_parameters_are_planned_without_their_memory():
  run = run_of(gemma.get_config('12b'), step_s=(2.6,), lines=(conditions.Line(625e6, 625e6),))
  assert sum(run.values) > 11e9 and run.in_time()
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 8 * GIB


@pytest.mark.parametrize('word', ['50', '5Mbit/', 'l9=5Mbit', '0Mbit', 'l0+l9=5Mbit', '=5Mbit'])
def test_a_wrong_link_is_refused_with_the_right_forms(word):
  with pytest.raises(ValueError, match='write a rate as 50Mbit'):
    command.links([word], ['l0', 'l1'])


def test_links_are_of_all_or_of_some_and_may_be_shared():
  fast, thin = conditions.Line(125e6, 125e6), conditions.Line(1.25e6, 2.5e6, 'l1+l2')
  assert command.links(['1Gbit', 'l1+l2=10Mbit/20Mbit'], ['l0', 'l1', 'l2']) == (fast, thin, thin)
  assert command.links([], ['l0']) == ()


def test_more_step_times_than_learners_are_refused():
  words = '--config=own_loop --parameters=1e6 --step_s=0.1 --step_s=0.1 --step_s=5'.split()
  ended = command_line.diloco('plan', *words)
  assert ended.returncode == 42 and not ended.stdout
  assert '--step_s is given 3 times for 2 learners' in ended.stderr


def test_the_command_refuses_a_run_that_cannot_fit_and_says_what_to_change():
  words = '--config=own_loop --parameters=25e6 --step_s=0.25 --link=l1=20Mbit'.split()
  ended = command_line.diloco('plan', *words, '--json')
  assert ended.returncode == 42
  planned = json.loads(ended.stdout)
  on_time = planned['learners']['on_time']
  assert on_time['l1'] < plan.FITS < on_time['l0']
  assert planned['change'] in ended.stderr and '--config.sync.' in planned['change']


def test_the_period_that_the_syncer_will_choose_is_in_the_plan():
  """Of payloads that are long enough for the syncer to measure their links."""
  protocol = config_lib.ProtocolConfig(learners=2, fragments=6, period=6, overlap=2)

  def plan_of(values: int):
    line = conditions.Line(values / 3, values / 3)  # a payload takes about three steps
    run = plan.Run(
      protocol=protocol,
      values=(values,) * 6,
      codecs=('int8', 'int8'),
      step_s=(1.0,),
      lines=(line,),
    )
    return plan.facts(run, step_tokens=1_000, tokens=None)

  planned = plan_of(200_000)
  assert not planned['fits'] and planned['period'] >= 3 * protocol.period
  assert plan_of(20_000)['period'] == protocol.period


def test_a_plan_says_what_its_delays_cost_and_where_no_law_holds(monkeypatch):
  monkeypatch.setattr(plan, 'PERIODS', 3)
  protocol = config_lib.ProtocolConfig(learners=4, fragments=12, period=12, total_steps=600)
  run = plan.Run(
    protocol=protocol, values=(5_280,) * 12, codecs=('int8', 'int8'), step_s=(0.1,), latency_s=0.2
  )
  thin = conditions.Line(*[max(map(sum, run.bytes)) / run.period_s / 4] * 2)  # a quarter
  for lines, steps, kinds in (((), 600, {'latency'}), ((thin,), 600, {'latency', 'thin'})):
    losses = dataclasses.replace(run, lines=lines).loss(steps)
    assert set(losses) == kinds and all(
      loss.low < loss.mean < loss.high for loss in losses.values()
    )
  assert 0.01 < losses['latency'].mean < 0.04 and 0.07 < losses['thin'].mean < 0.15
  longer = dataclasses.replace(run, lines=(thin,)).loss(6_000)
  assert all(longer[kind].mean < losses[kind].mean for kind in losses)
  assert dataclasses.replace(run, lines=(thin,)).loss(200)['thin'] is None
