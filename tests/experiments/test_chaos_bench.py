"""The comparison of systems under kills: its kills, its accounts, its table, and the programs."""

import dataclasses
import pathlib

import pytest

from diloco_jax.launch import supervisor as supervisor_lib
from experiments import chaos_bench
from experiments.side_by_side import accounts, run, systems

SECOND_NS = accounts.SECOND_NS
NAMES = [f'l{n}' for n in range(4)]


@pytest.mark.parametrize('seed', range(5))
def test_each_learner_is_killed_once_a_minute_on_average_and_only_while_it_runs(seed: int):
  plan = systems.kills(seed, NAMES, 120.0)
  assert len(plan) == 8 and plan == systems.kills(seed, NAMES, 120.0)
  assert plan == sorted(plan, key=lambda fault: fault.at_ns)
  for name in NAMES:
    times_s = [fault.at_ns / SECOND_NS for fault in plan if fault.node == name]
    assert all(later - earlier > systems.DOWN_S for earlier, later in zip(times_s, times_s[1:]))


def test_the_kills_of_a_seed_are_the_same_for_all_systems():
  cells = chaos_bench.cells(short=False)
  by_seed = {
    cell.seed: [other.plan for other in cells if other.seed == cell.seed] for cell in cells
  }
  assert len(by_seed) == 3
  for plans in by_seed.values():
    assert len(plans) == len(systems.SYSTEMS) and all(plan == plans[0] for plan in plans)


def test_all_systems_train_the_same_model_with_the_same_batch():
  for system in systems.SYSTEMS:
    config, ours = systems.config_of(system, 1), systems.config_of(systems.DECOUPLED, 1)
    config.validate()
    for part in ('model', 'optimizer', 'data', 'mesh', 'train'):
      assert getattr(config, part) == getattr(ours, part)


def test_restart_all_runs_its_own_programs_and_no_syncer_and_elastic_one_that_waits_for_all():
  learner = ['python', '-m', 'diloco_jax', 'learner', '--workdir=w', '--learner=l0']
  syncer = ['python', '-m', 'diloco_jax', 'syncer', '--workdir=w']

  def command(system: str, words: list[str]) -> list[str] | None:
    program = supervisor_lib.LocalProgram(name='one', command=words, environment={})
    changed = systems.program(system, 0.2, program)
    return changed and list(changed.command)

  assert command(systems.RESTART_ALL, syncer) is None
  waits = ['python', '-m', 'experiments.side_by_side.elastic', '--workdir=w']
  assert command(systems.ELASTIC, syncer) == waits and command(systems.DECOUPLED, syncer) == syncer
  for system, module in ((systems.RESTART_ALL, 'data_parallel'), (systems.ELASTIC, 'floor')):
    changed = command(system, learner)
    assert changed[:3] == ['python', '-m', f'experiments.side_by_side.{module}']
    assert changed[3:] == [*learner[4:], '--floor_s=0.2']


# --- Accounts -------------------------------------------------------------------------------------


def steps(name: str, *times_s: float) -> list[tuple[str, dict]]:
  return [
    (name, {'name': 'step', 't_ns': round(at_s * SECOND_NS), 'step': n, 'seconds': 0.75})
    for n, at_s in enumerate(times_s, 1)
  ]


def every_second(since_s: int, upto_s: int) -> list[float]:
  return [at_s + 0.5 for at_s in range(since_s, upto_s)]


def window(*kills: tuple[int, str]) -> accounts.Window:
  return accounts.Window(
    begin_ns=0,
    kills_ns=10 * SECOND_NS,
    end_ns=30 * SECOND_NS,
    kills=tuple((at_s * SECOND_NS, name) for at_s, name in kills),
  )


def test_without_a_kill_nothing_is_lost():
  facts = [*steps('l0', *every_second(0, 30)), *steps('l1', *every_second(0, 30))]
  account = accounts.account(facts, ['l0', 'l1'], window())
  assert (account.rate, account.steps, account.goodput) == (2.0, 40, 1.0)
  assert (account.own, account.others, account.waits_s, account.restarts_s) == (0.0, 0.0, 0.0, ())
  assert account.cycle_s == 1.0 and account.exchange_s == pytest.approx(0.25)
  assert account.curve[:3] == (0, 2, 4) and account.curve[-1] == 60


def test_lost_time_is_a_learners_own_or_waited_for_others():
  # l0 is killed at 12 s and steps again at 18.5 s; l1 waits from 11.5 to 14.5 s. Both make a step a
  # second otherwise.
  facts = [
    *steps('l0', *every_second(0, 12), *every_second(18, 30)),
    *steps('l1', *every_second(0, 12), *every_second(14, 30)),
  ]
  account = accounts.account(facts, ['l0', 'l1'], window((12, 'l0')))
  assert account.own == pytest.approx(6 / 40) and account.others == pytest.approx(2 / 40)
  assert account.goodput == pytest.approx(1 - account.own - account.others) == 32 / 40
  assert account.restarts_s == (6.5,) and account.waits_s == pytest.approx(2.0)


def test_a_learner_that_does_not_return_is_down_until_the_end():
  facts = [*steps('l0', *every_second(0, 20)), *steps('l1', *every_second(0, 30))]
  account = accounts.account(facts, ['l0', 'l1'], window((20, 'l0')))
  assert account.own == pytest.approx(10 / 40, abs=0.02) and account.restarts_s == ()


def test_tokens_in_the_model_are_those_merged_in_the_window():
  merged = [
    ('syncer', {'name': 'synced', 't_ns': s * SECOND_NS, 'tokens': 100}) for s in (9, 11, 31)
  ]
  assert accounts.merged(merged, 4, window()) == 25
  assert accounts.clock_at(steps('l0', 1.0, 2.0, 3.0), 2 * SECOND_NS + 1) == 2


# --- The report -----------------------------------------------------------------------------------


def row(system: str, seed: int, goodput: float) -> chaos_bench.Row:
  return {
    'system': system,
    'seed': seed,
    'learners': 4,
    'clean_s': 2.0,
    'kills_s': 3.0,
    'kills': 1,
    'floor_s': 0.2,
    'rate': 20.0,
    'cycle_s': 0.2 + 0.1 * seed,
    'exchange_s': 0.01,
    'goodput': goodput,
    'token_goodput': goodput,
    'own': 1 - goodput,
    'others': 0.0,
    'restarts_s': [] if seed else [12.0],
    'waits_s': 0.0,
    'loss': 2.5,
    'seconds': 9.0,
    'curve': [0, 20, 40, 50, 60],
  }


def test_the_report_says_what_holds(tmp_path: pathlib.Path):
  goodput = dict(zip(systems.SYSTEMS, (0.8, 0.4, 0.6, 0.7)))
  rows = [row(system, seed, goodput[system]) for seed in (0, 1) for system in systems.SYSTEMS]
  text = chaos_bench.table(rows)
  for system in systems.SYSTEMS:
    assert f'| {system} | ' in text
  assert 'DOES NOT HOLD: the goodput of Decoupled is 1.33 times' in text
  assert 'holds: it is +10.0 points' in text
  assert 'THE MACHINE WAS BUSY in 4 of 8 runs' in text and 'up to 300 ms' in text
  chaos_bench.write_csv(rows, tmp_path / 'rows.csv')
  chaos_bench.plot(rows, tmp_path / 'plot.png')
  assert len((tmp_path / 'rows.csv').read_text().splitlines()) == 1 + len(rows)
  assert (tmp_path / 'plot.png').stat().st_size


def test_another_setting_is_another_run():
  cell = run.Cell(system=systems.DECOUPLED, seed=0, clean_s=1.0, kills_s=60.0)
  changes = [{'seed': 1}, {'system': systems.ELASTIC}, {'kills_s': 75.0}, {'floor_s': 0.1}]
  changed = [dataclasses.replace(cell, **change) for change in changes]
  assert len({cell.key, *(other.key for other in changed)}) == 5
