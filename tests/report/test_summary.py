"""The report agrees with the records: sums add up, processes have their gaps, the picture
exists."""

import contextlib
import copy
import dataclasses
import errno
import json
import os
import pathlib
import re
import shlex
import sys
from typing import Any

import pytest

from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import facts
from diloco_jax.report import beside, live, programs, run_facts
from diloco_jax.report import facts as report_facts
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import records as records_lib
from diloco_jax.report import state as state_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.storage import json_files
from tests.launch.lib import command_line
from tests.launch.lib.command_line import diloco
from tests.report.rows import (
  add,
  child,
  evaluation,
  exited,
  joined,
  ledger,
  member,
  row,
  startup,
  step,
  synced,
)

_COUNTED = {
  'l0': {'incarnations': 2, 'steps': 3, 'tokens': 150, 'merged': 400},
  'l1': {'incarnations': 1, 'steps': 2, 'tokens': 100, 'merged': 201},
}
_DISCARDED = {'late': 150, 'overwritten': 249}
_LEDGER = ledger(250, _COUNTED, fragments=4, merged=601, discarded=_DISCARDED, synced=9, sync=9)


def adopted(at_s: float, steps_between: int, whole: bool) -> dict[str, Any]:
  zero = dict.fromkeys(('fragment', 'staleness'), 0)
  first = dict.fromkeys(('version', 'sync', 'clock'), 1)
  return row(
    at_s, facts.Adopted(**zero, **first, steps_between=steps_between, whole=whole, reason='')
  )


_SYNCED = synced(1, tokens=100)
_COSINES = {'body': 0.25, 'router': -0.125}
_OUTER = report_facts.Outer(sync=1, fragment=0, version=1, norm=2.0, cosines=_COSINES)
_TRAFFIC = report_facts.Traffic(bytes_up=1_000, bytes_down=3_000, bytes_data_parallel=80_000)
# Two learners; l0 is killed at 13 s and trains again from 22 s on.
_ROWS = [
  child(10, 'l0', 'starting'),
  child(10, 'l1', 'starting'),
  ('syncer', evaluation(10.5, 0, 5.5)),
  ('l0', step(11, 1, 1, 5.0)),
  ('l1', step(11.5, 1, 1, 5.2)),
  ('syncer', row(12, _OUTER)),
  ('syncer', row(12, _SYNCED)),
  ('l0', adopted(12, 4, True)),
  ('l0', adopted(12.1, 6, False)),
  ('l0', step(12.5, 2, 2, 4.5)),
  child(13, 'l0', 'down', 'killed by the chaos plan, back in 8 s'),
  exited(13, 'l0', -9),
  ('l1', step(14, 5, 2, 4.0)),
  child(21, 'l0', 'starting', 'restarted (process 2)'),
  ('l0', joined(21.5, 2, 5)),
  ('l0', step(22, 6, 1, 3.9)),
  ('syncer', evaluation(23, 6, 3.5, 5.049)),
  ('syncer', row(24, _LEDGER)),
  ('syncer', row(24, _TRAFFIC)),
  exited(25, 'l0', 0),
  exited(25, 'l1', 0),
]


def summarize(config, run: run_facts.RunFacts) -> dict[str, Any]:
  for name, (state, why) in {'l0': ('done', ''), 'l1': ('refused', 'another model')}.items():
    run.learners[name].state, run.learners[name].why = state, why
  return summary_lib.summarize(folder_lib.Read(pathlib.Path('x'), config, run))


def fold(*rows: tuple[str, dict[str, Any]], learners=('l0', 'l1')) -> run_facts.RunFacts:
  return run_facts.RunFacts(learners, 10).take(rows)


def lives(processes: list[programs.ProcessFacts]) -> list[tuple[float, float | None, str]]:
  """Of each process: when it started, when it ended, and how."""
  return [(process.started_s, process.ended_s, process.ended) for process in processes]


@pytest.fixture(name='config')
def _config():
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = 2
  return config


@pytest.fixture(name='run')
def _run():
  return fold(*_ROWS)


def test_the_summary_adds_up(config, run):
  summary = summarize(config, run)
  assert summary['tokens_trained'] == 250
  assert summary['tokens_merged'] + sum(summary['tokens_discarded'].values()) == 250
  assert summary['tokens_merged'] == 150
  assert (summary['eval_loss_start'], summary['eval_loss_end']) == (5.5, 3.5)
  assert (summary['outer_steps'], summary['inner_steps_between_syncs_mean']) == (9, 6)
  figures = [summary[f'wire_bytes_{name}'] for name in ('up', 'down', 'data_parallel')]
  assert figures == [1_000, 3_000, 80_000]


def test_a_stop_of_a_process_that_has_just_refused_is_not_why_it_has_ended():
  """Its interpreter ends some moments after its last record."""
  own = 'l0', exited(20, 'l0', 42)[1]
  run = fold(*_ROWS[:4], own, exited(20.5, 'l0', -15, stopped=True))
  assert [process.ended for process in run.learners['l0'].processes] == ['refused']


def test_tokens_of_which_the_syncer_has_not_heard_are_accounted_for(config):
  """l1 trains two steps alone, and ends before the syncer is back."""
  alone = [('l1', step(15 + number, 5 + number, 2 + number)) for number in (1, 2)]
  summary = summarize(config, fold(*_ROWS, *alone))
  assert (summary['tokens_trained'], summary['tokens_discarded']['untold']) == (350, 100)
  assert summary['tokens_merged'] + sum(summary['tokens_discarded'].values()) == 350
  assert sum(row['tokens'] for row in summary['learners'].values()) == 350
  forgotten = {'l0': _COUNTED['l0'], '(forgotten)': {'tokens': 100}}
  later = row(25, dataclasses.replace(_LEDGER, learners=forgotten))
  run = fold(*_ROWS, ('syncer', later))
  assert not run.book.untold, 'the syncer has heard of them, and forgotten who it was'


def _own_loop(began_s, *stepped_s):
  """A process that no supervisor has started; nobody records its end."""
  steps = [step(at_s, at_s, number) for number, at_s in enumerate(stepped_s, 1)]
  return [startup(began_s, 'restored'), startup(began_s, 'compiled'), *steps]


def test_who_was_alive_is_the_same_whoever_started_it():
  """l0 is killed at 20 s and back at 50 s; l1 loses its connection only; then
  all are killed at 60 s. l2 comes at 30 s. K is 2."""
  facts_of = {
    'l0': _own_loop(0, *range(2, 21, 2)) + _own_loop(50, *range(52, 61, 2)),
    'l1': _own_loop(0, *range(2, 61, 2)),
    'l2': _own_loop(25, *range(30, 61, 2)),
    'syncer': [
      startup(0, 'assembled'),
      *[row(1, member(name, 'joined')) for name in ('l0', 'l1')],
      row(21, member('l0', 'lost', 1, 'connection closed')),
      row(31, member('l1', 'lost', 1, 'silent')),
      row(35, member('l1', 'joined')),
      row(51, member('l0', 'joined', 2)),
      *[row(61, member(name, 'lost', 1, 'connection closed')) for name in ('l0', 'l1', 'l2')],
      row(120, facts.Cancelled(sync=1, fragment=0, why='no learner')),
    ],
  }
  rows = [(name, line) for name, lines in facts_of.items() for line in lines]
  rows.sort(key=lambda row: row[1]['time'])
  run = run_facts.RunFacts(['l0', 'l1', 'l2'], 100, quorum=2)
  then = lambda name, at_s: run.book.partition(name, at_s * 10**9)['infra_recovery'] / 1e9
  run.take(row for row in rows if row[1]['time'] < 34)
  assert (run.fate('l1'), then('l1', 34), then('l0', 34)) == ('alone', 0, 13)
  run.take(row for row in rows if row[1]['time'] >= 34)
  ends = {n: [life[1:] for life in lives(learner.processes)] for n, learner in run.learners.items()}
  assert ends == {'l0': [(21, 'lost'), (61, 'lost')], 'l1': [(61, 'lost')], 'l2': [(61, 'lost')]}
  assert {run.fate(name) for name in ends} == {'down'}
  assert [then(name, 120) for name in ends] == pytest.approx([29 + 59, 59, 59])
  uptime = run.book.figures(120 * 10**9).uptime
  assert uptime == pytest.approx((21 - 2 + 61 - 30) / 118, abs=0.01), 'l0 alone was missing'


def test_a_syncer_that_nobody_saw_end_was_down_since_its_last_record():
  begins = startup(0, 'assembled')
  rows = [begins, row(10, member('l0', 'joined')), begins | {'time': 40}]
  run = fold(*[('syncer', line) for line in rows], learners=())
  assert lives(run.syncer_processes) == [(0, 10, 'lost'), (40, None, '')]
  run.book.waits('l0', 0)
  assert run.book.partition('l0', 40 * 10**9)['syncer_down'] == 30 * 10**9


def test_one_line_says_which_tokens_were_not_merged_if_they_are_many(config, run):
  summary = summarize(config, run)
  line = 'trained 250 tokens, merged 60%, late 15%, overwritten 25%: see docs/howto/report.md'
  assert summary_lib.merged_line(summary) == line
  assert line in summary_lib.text(summary, pathlib.Path('x'), width=200)
  assert not summary_lib.merged_line({**summary, 'tokens_merged': 240})


def test_downtime_lasts_until_the_next_step(config, run):
  learners = summarize(config, run)['learners']
  expected = {'incarnations': 2, 'steps': 3, 'seconds_down': 9.0, 'kills': 1}
  assert learners['l0'].items() >= expected.items()
  assert learners['l1']['seconds_down'] == 0
  assert [ended for _, _, ended in lives(run.learners['l0'].processes)] == ['killed', 'stopped']


def test_a_process_that_the_supervisor_cut_off_counts_as_stopped_not_as_killed(config):
  """After a second Ctrl-C."""
  run = fold(*_ROWS[:-2], exited(26, 'l0', -9, True))
  assert [ended for _, _, ended in lives(run.learners['l0'].processes)] == ['killed', 'stopped']
  summary = summarize(config, run)
  assert summary['learners']['l0']['kills'] == len(summary['kills']) == 1


def test_the_time_of_a_learner_is_accounted_for_from_its_records(config, run):
  """l0 is killed after 13 s, starts again at 21 s, and trains no more after 22 s."""
  goodput = summarize(config, run)['goodput']
  account = goodput['learners']['l0']
  assert account['wall_s'] == 15 and sum(account['shares'].values()) == pytest.approx(1)
  assert account['shares'] == pytest.approx(
    {
      'merged_progress': 1 / 15,  # two of its steps of half a second were merged
      'wasted_progress': (0.5 + 0.5) / 15,
      'comm_exposed': 1 / 15,
      'init': (0.5 + 0.5) / 15,
      'infra_recovery': (8 + 3) / 15,
    }
  )
  assert goodput['merged'] == pytest.approx(0.601)


def test_a_clock_that_was_wrong_for_a_moment_is_set_right():
  days = 40 * 86_400
  wrong_s = [0, 0, days, days, 0, 0]
  run = fold(*(('l0', step(n + wrong, n, 1)) for n, wrong in enumerate(wrong_s)))
  assert run.end_s == 5


def test_a_process_that_was_not_seen_to_end_ends_with_its_last_fact():
  """The supervisor was killed; the run continues half an hour later, without l1."""
  run = fold(
    *[child(1, name, 'starting') for name in ('syncer', 'l0', 'l1')],
    ('l0', step(2, 1, 1, 5.0)),
    ('l1', step(3, 1, 1, 5.0)),
    ('syncer', row(4, _SYNCED)),
    *[child(1_804, name, 'starting') for name in ('syncer', 'l0')],
    ('l0', step(1_805, 2, 1, 4.0)),
    exited(1_806, 'syncer', -9),
    ('l2', evaluation(1_807, 1, 5.0)),
    learners=('l0', 'l1', 'l2'),
  )
  assert state_lib.state(run, None)['pauses'] == [[3, 1_800]] and run.end_s == 1_806
  assert [process.last_s for process in run.learners['l1'].processes] == [2]
  assert lives(run.learners['l0'].processes) == [(0, 1, 'stopped'), (1_803, None, '')]
  assert run.learners['l0'].seconds_down(run.end_s) == 0
  assert lives(run.syncer_processes) == [(0, 3, 'stopped'), (1_803, 1_805, 'killed')]
  assert [process.first_step_s for process in run.syncer_processes] == [3, None]
  assert run.learners['l2'].processes == []  # never trained: no row in the picture


def test_a_second_process_by_hand_is_a_process_of_its_own():
  """Its counts begin again; no supervisor tells of it."""
  run = fold(*[('l0', line) for line in (step(1, 1, 1), step(2, 2, 2), step(9, 3, 1))])
  assert lives(run.learners['l0'].processes) == [(0, 1, 'lost'), (8, None, '')]


def test_processes_that_no_supervisor_starts_begin_with_their_first_fact():
  """As of a notebook, or of a syncer whose learners are elsewhere; the second time it continues."""
  run = run_facts.RunFacts(['l0'], 10)
  for at in (0, 100):
    run.take(
      [
        ('syncer', startup(at, 'assembled')),
        ('l0', startup(at + 1, 'built')),
        ('l0', startup(at + 2, 'compiled')),
        ('l0', step(at + 3, at + 1, 1, 5.0)),
        ('l0', startup(at + 3, 'compiled')),
        ('syncer', row(at + 4, _SYNCED)),
      ]
    )
  for processes, begin, ready in (
    (run.learners['l0'].processes, 1, 3),
    (run.syncer_processes, 0, 4),
  ):
    assert [process.first_step_s for process in processes] == [ready, 100 + ready]
    assert lives(processes) == [(begin, ready, 'lost'), (100 + begin, None, '')]


def test_a_learner_that_the_config_has_no_longer_is_passed_over():
  """Of a run that was restored with fewer learners."""
  run = fold(('l1', startup(1, 'built')), ('l0', step(2, 1, 1, 5.0)), learners=['l0'])
  assert run.learners.keys() == {'l0'} and run.learners['l0'].step == 1


def test_evaluations_after_a_restore_stand_at_the_tokens_trained_by_then():
  """The clocks went back from 8 to 4."""
  recovered = report_facts.Recovered(replayed=0, sync=4, log=1, versions=[1])
  run = fold(
    ('l0', step(1, 4, 1, 5.0)),
    ('l0', step(2, 8, 2, 5.0)),
    ('syncer', evaluation(3, 8, 3.0)),
    ('syncer', row(4, recovered)),
    ('l0', step(5, 8, 1, 5.0)),
    ('syncer', evaluation(6, 8, 2.9)),
  )
  assert run.evaluated_tokens == [100, 150]


def test_the_loss_before_training_stays_although_nobody_has_told_of_a_step_yet():
  """Learners on other machines tell their steps at heartbeats."""
  run = fold(*(('syncer', evaluation(1, clock, 5.5 - clock)) for clock in (0, 1, 2)), learners=())
  assert [fact.step for fact in run.evaluations] == [0, 2] and run.evaluated_tokens == [0, 1]


def test_curves_are_over_the_tokens_of_all_learners(run):
  assert [s.tokens for s in run.learners['l0'].steps] == [50, 150, 250]
  assert [s.tokens for s in run.learners['l1'].steps] == [100, 200]
  assert run.evaluated_tokens == [0, 250]


def test_bytes_add_up_over_the_processes_of_a_syncer():
  wire = programs.Wire()
  for up, down in ((5, 9), (7, 9), (1, 2), (3, 2)):
    wire.take(report_facts.Traffic(bytes_up=up, bytes_down=down, bytes_data_parallel=0))
  assert (wire.bytes_up, wire.bytes_down) == (10, 11)


def test_the_text_has_the_summary(config, run, tmp_path):
  text = summary_lib.text(summarize(config, run), tmp_path)
  for words in (
    'held-out loss  5.500 before, 3.500 after (nats per byte, on unseen data)\n'
    '               5.049 bits per byte after\n',
    'learner l0  3 steps, 150 tokens, 100 tokens/s in a usual step, loss 4.467, 1\n'
    '            updates of a fragment merged, incarnation 2, staleness 0; killed\n'
    '            once, down for 9.0 s\n',
    'What the figures mean',
    'cosines      between the updates of two learners, on average: body 0.25, router\n',
    'loss 4.600, 1\n            updates of a fragment merged; refused: another model\n',
    'alone        a learner alone trains as many tokens in 5 steps: compare with that\n'
    '             (--syncer=none --config.train.steps=5)\n',
    'is a clock, not a number of steps',
    'tokens trained          250  in 9 outer steps',
    '15.2%  late',
    'would have moved 80.0 kB, 20 times as much',
    'infra_recovery              73.3',
    'in inner steps at the ideal\n               pace, merged or not;',
  ):
    assert words in text


@pytest.fixture(name='workdir')
def _workdir(config, tmp_path):
  """The folder of a run with records."""
  load.write(tmp_path, config)
  add(tmp_path, *_ROWS)
  return tmp_path


def test_the_text_names_only_files_that_exist(config, workdir, monkeypatch):
  """After Ctrl-C there is no picture, not even an older one, and early on no checkpoints."""
  monkeypatch.chdir(pathlib.Path(__file__).parent)  # the absolute path is shorter
  (workdir / 'report').mkdir()
  (workdir / 'report' / 'timeline.png').touch()
  summary = summary_lib.write(workdir, plot=False)
  text = summary_lib.text(summary, workdir, 200)
  assert f'report {workdir / "report"}: report.txt, summary.json' in ' '.join(text.split())
  for word in ('timeline.png', 'checkpoints', 'tensorboard'):
    assert word not in text
  (workdir / 'islands').mkdir()
  text = summary_lib.text(summary, workdir, 200)
  assert f'checkpoints  {workdir / "islands"}\n' in text
  assert f'diloco_jax.load_params({str(workdir)!r})' in text
  (workdir / 'model').mkdir()
  assert f'v1.load({str(workdir / "model")!r})' in summary_lib.text(summary, workdir, 200)


def test_what_the_report_says_of_the_model_can_be_pasted(config, tmp_path):
  """From a folder with spaces, in a narrow terminal, of a run that began with a Hugging Face
  folder."""
  workdir = tmp_path / 'a run of mine'
  for folder_ in ('islands', 'model', 'hf', 'tensorboard'):
    (workdir / folder_).mkdir(parents=True)
  (workdir / 'hf' / 'model.safetensors').touch()
  config.train.init_from = str(workdir / 'hf')
  load.write(workdir, config)
  add(workdir, *_ROWS)
  lines = summary_lib.text(summary_lib.write(workdir, plot=False), workdir, 40).splitlines()
  python = [line[13:] for line in lines if 'load' in line]
  assert len(python) == 2
  for line in python:
    *imports, call = line.split('; ')
    scope: dict[str, Any] = {}
    exec('\n'.join(imports), scope)
    assert callable(eval(call.partition('(')[0], scope))
  words = [shlex.split(line[13:]) for line in lines if 'diloco ' in line]
  read = command_line.read(words, folder=tmp_path)
  assert {os.path.abspath(command['workdir']) for command in read} == {str(workdir)}
  assert read[0]['out'] == 'NEW_FOLDER'


VIEWS = ['summary.json', 'index.html', 'timeline.png', 'report.txt']


def _fail(*_):
  raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize(
  'fault, missing',
  [
    ('a full disk', VIEWS),
    ('no matplotlib', ['timeline.png']),
    ('a folder that is none', VIEWS),
    ('a fault of the page', ['index.html']),
  ],
)
def test_a_view_that_fails_costs_itself_only(fault, missing, config, workdir, monkeypatch, capsys):
  report = workdir / 'report'
  with monkeypatch.context() as patch:
    if fault == 'a full disk':
      summary_lib.write(workdir, plot=False)
      patch.setattr(json_files.os, 'fsync', _fail)
    elif fault == 'no matplotlib':
      patch.setitem(sys.modules, 'matplotlib', None)
      patch.delitem(sys.modules, 'diloco_jax.report.picture', raising=False)
      patch.delattr('diloco_jax.report.picture', raising=False)
    elif fault == 'a folder that is none':
      report.write_text('')
    else:
      patch.setattr(summary_lib.page, 'inline', lambda states: states[0]['no such field'])
    summary = summary_lib.write(workdir)
  assert summary['tokens_trained'] == 250 and sorted(summary['missing']) == sorted(missing)
  errors = capsys.readouterr().err.splitlines()
  for name, line in zip(summary['missing'], errors, strict=True):
    assert line.startswith(f'error: {report}/{name} is missing (')
    assert line.endswith(f'; the run is safe. Later: diloco report {workdir}')
  assert {path.name for path in report.glob('*')} == {*VIEWS} - {*missing}, 'and none is old'
  text = summary_lib.text(summary, workdir, 300)
  assert ('\nreport  ' in text) == (missing != VIEWS)
  if fault == 'a full disk':
    assert 'OSError: [Errno 28] No space' in errors[0]
    assert 'missing' not in summary_lib.write(workdir, plot=False)


def test_a_path_that_is_not_utf8_is_no_fault_of_the_report(config, workdir):
  odd = workdir.rename(workdir.with_name(os.fsdecode(b'caf\xe9')))
  assert 'missing' not in summary_lib.write(odd)
  assert 'caf?' in (odd / 'report' / 'report.txt').read_text('utf-8')


def test_the_report_says_what_a_full_disk_has_cost(config, run, tmp_path):
  assert 'disk  ' not in summary_lib.text(summarize(config, run), tmp_path)
  for count in (3, 4):
    run.take([('l0', row(30, report_facts.Missing(facts=count, error='No space left on device')))])
  text = summary_lib.text(summarize(config, run), tmp_path)
  assert '7 facts of l0 could not be written (No space left on device)' in text
  event = [20, 'l0', '4 facts could not be written: No space left on device']
  assert event in state_lib.state(run, config)['events']
  before, last = run.tokens, run.learners['l0'].steps[-1]
  run.take([('l0', step(31, last.step + 8, run.learners['l0'].processes[-1].steps + 8))])
  assert run.tokens - before == 8 * 50, 'the tokens of the steps that are missing'


def test_the_report_is_written_from_the_records_of_a_run(config, workdir):
  summary = summary_lib.write(workdir)
  assert json.loads((workdir / 'report' / 'summary.json').read_text()) == summary
  assert (workdir / 'report' / 'report.txt').read_text().startswith('tiny: 15 s, 250 tokens in 9')
  assert (workdir / 'report' / 'timeline.png').read_bytes().startswith(b'\x89PNG')


def test_a_run_without_a_step_has_a_report(config, tmp_path):
  load.write(tmp_path, config)
  summary = summary_lib.write(tmp_path)
  assert (summary['tokens_trained'], summary['eval_loss_start']) == (0, None)
  assert 'was not measured' in summary_lib.text(summary, tmp_path)


def test_a_learner_alone_has_no_ledger(config):
  run = fold(('l0', evaluation(1, 0, 5.0)), ('l0', step(2, 1, 1, 4.0)))
  summary = summarize(config, run)
  assert (summary['tokens_trained'], summary['tokens_merged'], summary['outer_steps']) == (50, 0, 0)


def _costs():
  """l0 trains on TPUs, l1 on CPUs, whose peak and memory nobody tells."""
  tpu = {'kind': 'TPU v6 lite', 'peak_flops': 918e12, 'memory_limit_bytes': 32 << 30}
  cpu = {'kind': 'cpu', 'peak_flops': 0.0, 'memory_limit_bytes': 0}
  for name, flops, memory, kind in (('l0', 150e12, 24 << 30, tpu), ('l1', 5e9, 0, cpu)):
    given = {'parameters': 2_500_000, 'tokens': 1024, 'devices': 4, **kind}
    yield name, row(12.5, report_facts.Cost(flops=flops, memory_bytes=memory, **given))


def test_what_devices_do_is_in_the_summary_where_it_is_known(config, tmp_path):
  """Steps take half a second."""
  run = fold(*_ROWS[:9], *_costs(), *_ROWS[9:])
  summary = summarize(config, run)
  learner = summary['learners']['l0']
  assert learner['cost']['parameters'] == 2_500_000
  assert learner['speed'] == pytest.approx({'tflops': 300, 'mfu': 300 / 918, 'memory': 0.75})
  text = summary_lib.text(json.loads(json.dumps(summary)), tmp_path)
  text = text.replace('\n            ', ' ')
  assert ', 4 x TPU v6 lite, TFLOP/s 300, MFU 33%, HBM 75%, 1 updates' in text
  assert ', 4 x cpu, TFLOP/s 0.01, 1 updates' in text


def test_plain_lines_name_their_process_and_a_closed_pipe_stops_no_process(tmp_path):
  with open(tmp_path / 'out', 'w', encoding='utf-8') as stream:
    display = live.Display(stream)
    display.listen('l0', '12:00:00 completed step: 1')
    display.tick(run_facts.RunFacts(['l0'], total_steps=10))
  display.listen('l0', 'after the end')
  step, status = (tmp_path / 'out').read_text().splitlines()
  assert step == '[l0] 12:00:00 completed step: 1'
  assert re.fullmatch(r'\[local\] \d\d:\d\d:\d\d 0%: l0 waiting', status)


def test_a_run_is_read_from_its_folder_alone(config, workdir):
  """Also when no supervisor is left to say how it ended."""
  read = folder_lib.read(workdir)
  assert read.config.to_dict() == config.to_dict() and read.run.end_s == 15
  assert [read.run.fate(name) for name in read.run.learners] == ['stopped', 'stopped']
  assert read.run.syncer == 'merging'
  add(workdir, child(26, 'l1', 'refused', 'another model'))
  again = folder_lib.read(workdir).run
  assert (again.fate('l1'), again.learners['l1'].why) == ('refused', 'another model')
  with pytest.raises(ValueError, match='there is no run in'):
    folder_lib.read(workdir / 'records')


def test_of_learners_whose_syncer_is_elsewhere_there_is_no_config(workdir):
  for name in ('config.json', 'records/syncer.jsonl', 'records/supervisor.jsonl'):
    (workdir / name).unlink()
  read = folder_lib.read(workdir)
  assert list(read.run.learners) == ['l0', 'l1'] and read.run.syncer is None
  assert read.run.tokens == 250
  (workdir / 'islands').mkdir()
  text = summary_lib.text(summary_lib.summarize(read), workdir, 200)
  assert 'checkpoints  ' in text and 'load_params' not in text and 'export' not in text


def test_the_closing_evaluation_stands_at_all_tokens_and_none_twice(run):
  """Sync 12 of 10 steps has merged what was left; the last one came to no new token."""
  run.take([('l1', step(25.5, 6, 3, 3.6)), ('syncer', evaluation(26, 12, 3.1))])
  assert run.evaluated_tokens == [0, 250, 300]
  run.take([('syncer', evaluation(27, 13, 3.0))])
  assert run.evaluated_tokens == [0, 250, 300]
  assert [fact.loss for fact in run.evaluations] == [5.5, 3.5, 3.0]


@pytest.mark.parametrize('width', [40, 80, 200])
def test_lines_end_with_the_terminal_and_the_headline_comes_first_and_last(config, run, width):
  """Rows of the table that are 0.0 for all are left out, and a wide table is cut in two."""
  run.take([child(20, f'x{number}', 'starting') for number in range(9)])
  summary = summarize(config, run)
  lines = summary_lib.text(summary, pathlib.Path('x'), width).splitlines()
  assert max(map(len, lines)) <= width
  (first, last) = [at for at, line in enumerate(lines) if line.startswith('tiny: 15 s')]
  assert first == 0 and lines[last + 1].startswith('held-out loss  5.500 before, 3.5')
  tables = [line for line in lines if line.startswith('wall time, %')]
  assert [len(line.split()) - 3 for line in tables] == {40: [1] * 11, 80: [6, 5], 200: [11]}[width]
  assert not any(line.split()[1:] and set(line.split()[1:]) == {'0.0'} for line in lines)


def test_a_long_name_does_not_touch_its_neighbour(config, run):
  run.take([child(20, name, 'starting') for name in ('vm-9a7b81', 'vm-c95bdb')])
  summary = summarize(config, run)
  (table,) = [line for line in summary_lib.goodput_lines(summary['goodput'], 120) if 'wall' in line]
  assert table.split()[-2:] == ['vm-9a7b81', 'vm-c95bdb']


def _write_alone(workdir, config, *parts, bits: float = 0.0) -> pathlib.Path:
  """A learner alone; parts: clock and loss of an evaluation, and how many steps follow it.
  `bits`: per byte, for each nat of the loss."""
  load.write(workdir, config)
  with contextlib.closing(records_lib.Recorder(workdir, 'l0', tensorboard=False)) as recorder:
    for clock, loss, following in parts:
      recorder.report(report_facts.Eval(step=clock, loss=loss, bits_per_byte=bits * loss))
      for number in range(clock + 1, clock + following + 1):
        recorder.report(report_facts.parse(step(0, number, number, 4.5)))
  return workdir


def test_runs_are_set_beside_each_other_after_equal_tokens_and_at_equal_clocks(config, workdir):
  """The second run is a learner alone: 5.0, 4.0 and 3.0 after 0, 250 and 300 tokens. Only what
  both have measured is compared."""
  alone = _write_alone(workdir / 'alone', config, (0, 5.0, 5), (5, 4.0, 1), (6, 3.0, 0))
  done = diloco('report', str(workdir), str(alone))
  assert done.returncode == 0, done.stderr
  rows = {line[:26].strip(): line[26:].split() for line in done.stdout.splitlines()}
  assert rows['held-out loss at its end'] == ['3.500', '3.000']
  assert rows['after 250 tokens'] == ['3.500', '4.000']
  assert rows['at clock 6'] == ['3.500', '3.000']
  assert rows['tokens trained'] == ['250', '300'] and rows['outer steps'] == ['9', '0']
  text, places = done.stdout.rsplit('\n\n', 1)
  assert (workdir / 'report' / 'beside.txt').read_text() == text + '\n'
  assert places == f'in {workdir}/report: beside.txt, beside.html\n'


def test_runs_with_other_tokenizers_are_compared_in_bits_per_byte(config, workdir):
  other = copy.deepcopy(config)
  other.data.tokenizer = str(workdir / 'words.json')
  (workdir / 'words.json').write_text('{}')
  _write_alone(workdir / 'other', other, (0, 9.0, 6), (6, 5.0, 0), bits=0.5)
  rows = beside.text(beside.read([workdir, workdir / 'other'])).splitlines()
  assert rows[0].startswith('loss in nats per byte and nats per token')
  assert next(row.split()[-1] for row in rows if 'at clock 6, bits per byte' in row) == '2.500'
  assert not any('tokens' in row and row.split()[-1] == '5.000' for row in rows)


def test_the_command_reports_a_run_of_which_nobody_tells_the_end(workdir):
  """Its supervisor was killed; the folder is named in both ways."""
  path = workdir / 'records' / 'supervisor.jsonl'
  path.write_text(''.join(path.read_text().splitlines(keepends=True)[:-2]))
  done = diloco('report', f'--workdir={workdir}', '--noplot', f'--out={workdir / "elsewhere"}')
  assert done.returncode == 0, done.stderr
  assert 'held-out loss  5.500 before, 3.500 after' in done.stdout
  assert 'not ended      at clock 6 of 24' in done.stdout
  assert 'training when its records ended' in done.stdout.replace('\n            ', ' ')
  assert not (workdir / 'report').exists()
  names = sorted(path.name for path in (workdir / 'elsewhere').iterdir())
  assert names == ['index.html', 'report.txt', 'summary.json']
  refused = diloco('report', 'none')
  assert (refused.returncode, refused.stdout) == (42, '')
  assert 'there is no run in' in refused.stderr
