"""Records survive kills, torn lines and full disks, and the fold follows them."""

import dataclasses
import json
import pathlib
import re
import resource
import sys
import typing
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import diloco_jax
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import facts, formats, safe_json
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.report import run_facts
from diloco_jax.report import state as state_lib
from tests.launch.lib import command_line
from tests.report.rows import child, joined, member, progress, row, synced


def write_lines(workdir: pathlib.Path, name: str, lines: Iterable[dict[str, Any]]) -> None:
  path = workdir / records_lib.RECORDS / f'{name}.jsonl'
  path.parent.mkdir(exist_ok=True)
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def step(number: int) -> report_facts.Step:
  return report_facts.Step(step=number, steps=number, tokens=8 * number, loss=2.5, seconds=0.5)


def test_facts_are_read_in_order_while_they_are_written(tmp_path):
  recorder = records_lib.Recorder(tmp_path, 'l0', tensorboard=False)
  tail = records_lib.Tail(tmp_path / 'records' / 'l0.jsonl')
  assert tail.read() == []
  recorder.report(dataclasses.replace(step(1), loss=np.float32(2.5)))
  (first,) = tail.read()
  assert first['name'] == 'step' and report_facts.parse(first) == step(1)
  assert first['t_ns'] > 0 and first['time'] > 0
  recorder.report(step(2))
  assert [fact['step'] for fact in tail.read()] == [2]
  recorder.close()


def test_a_file_of_facts_ends_at_its_limit_and_says_so_once(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(records_lib, 'LIMIT_BYTES', 1 << 20)
  recorder = records_lib.Recorder(tmp_path, 'l0', tensorboard=False)
  for number in range(20_000):
    recorder.report(step(number))
  path = tmp_path / 'records' / 'l0.jsonl'
  assert 0.99 < path.stat().st_size / (1 << 20) <= 1
  assert records_lib.Tail(path).read()[-1]['name'] == 'step'  # no torn line
  said = capsys.readouterr().err
  assert said.count('records are incomplete from here on') == 1 and 'has 1 MiB' in said
  recorder.close()


def test_a_torn_line_of_a_killed_process_is_skipped_and_then_cut_off(tmp_path):
  recorder = records_lib.Recorder(tmp_path, 'l0', tensorboard=False)
  recorder.report(step(1))
  recorder.close()
  path = tmp_path / 'records' / 'l0.jsonl'
  with open(path, 'ab') as file:
    file.write(b'{"name": "step", "st' + b' ' * (1 << 13))
  tail = records_lib.Tail(path)
  assert [fact['step'] for fact in tail.read()] == [1]
  again = records_lib.Recorder(tmp_path, 'l0', tensorboard=False)
  again.report(step(2))
  again.close()
  assert [fact['step'] for fact in tail.read()] == [2]
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line['step'] for line in lines if line['name'] == 'step'] == [1, 2]


def test_a_line_that_is_far_too_long_is_skipped_in_parts(tmp_path, monkeypatch):
  monkeypatch.setattr(records_lib, 'MAX_LINE_BYTES', 1 << 12)
  path = tmp_path / 'l0.jsonl'
  path.write_bytes(b'{"name": "' + b'x' * (1 << 14) + b'"}\n{"name": "y", "time": 0}\n{"torn')
  tail = records_lib.Tail(path)
  assert [fact['name'] for fact in tail.read()] == ['y']
  assert tail.read() == []


def test_all_files_are_merged_by_time_and_new_ones_are_found(tmp_path):
  tails = records_lib.TailAll(tmp_path)
  assert tails.read() == []
  for name, times in (('a', (1, 3)), ('b', (2, 4))):
    write_lines(tmp_path, name, [{'name': 'x', 'time': t} for t in times])
  streamed = list(records_lib.TailAll(tmp_path).stream())
  assert [(name, fact['time']) for name, fact in streamed] == [*zip('abab', (1, 2, 3, 4))]
  assert tails.read() == streamed
  assert next(diloco_jax.records(tmp_path)) == {'process': 'a', 'name': 'x', 'time': 1}
  write_lines(tmp_path, 'c', [{'name': 'x', 'time': 0}])
  assert [name for name, _ in tails.read()] == ['c']


@pytest.mark.parametrize('jump_s', [-7200, 7200])
def test_the_times_of_a_program_never_go_back_and_nothing_is_left_out(jump_s, tmp_path):
  """A clock that is set within a process, and another machine that goes on."""
  opening = {'name': 'records', **formats.stamp('records')}
  wall_s = [*range(60), *range(60 + jump_s, jump_s + 90)]
  lines = [opening | {'t_ns': 1, 'time': 0}]
  lines += [{'name': 'x', 't_ns': (k + 1) * 10**9, 'time': s} for k, s in enumerate(wall_s)]
  lines += [opening | {'t_ns': 1, 'time': -5000}]  # where a clock is behind
  lines += [{'name': 'x', 't_ns': (k + 1) * 10**9, 'time': k - 5000} for k in range(9)]
  for name in ('l0', 'l1'):
    write_lines(tmp_path, name, lines[: 60 if name == 'l1' else None])
  rows = records_lib.TailAll(tmp_path).read()
  times = {name: [fact['time'] for who, fact in rows if who == name] for name in ('l0', 'l1')}
  assert times['l0'] == pytest.approx([*range(90), *range(89, 98)], abs=2)
  assert times['l1'] == times['l0'][:59]
  assert rows == list(records_lib.TailAll(tmp_path).stream())


@pytest.mark.parametrize('again', [False, True])
def test_a_learner_of_another_clock_is_on_that_of_the_syncer_and_no_line_is_parsed_twice(
  again, tmp_path, monkeypatch
):
  """`again`: a syncer on a host whose clock is behind goes on before the learner joins."""
  opening = {'name': 'records', **formats.stamp('records'), 't_ns': 1}
  line = lambda at_s, name, **more: {'t_ns': at_s * 10**9, 'time': at_s, 'name': name, **more}
  syncer = [opening | {'time': 0}, *(line(at_s, 'synced') for at_s in range(1, 300))]
  if again:
    syncer += [opening | {'time': -5000}]
    syncer += [line(at_s, 'synced') | {'time': at_s - 5000} for at_s in range(1, 300)]
  joined = syncer[-1] | {'name': 'member', 'learner': 'l0', 'state': 'joined', 'incarnation': 1}
  learner = [line(7000, 'startup'), line(7000, 'nostep')]
  learner += [line(7001, 'state', state='joined', incarnation=1)]
  write_lines(tmp_path, 'syncer', [*syncer, joined])
  write_lines(tmp_path, 'l0', [*learner, line(7002, 'step')])
  parsed, parse = [], safe_json.parse
  monkeypatch.setattr(safe_json, 'parse', lambda *of, **how: parsed.append(of) or parse(*of, **how))
  rows = list(records_lib.TailAll(tmp_path).stream())
  at_s = {row['name']: row['time'] for _, row in rows}
  for name in ('startup', 'nostep', 'step'):
    assert at_s[name] == pytest.approx(at_s['member'], abs=3)
  assert at_s['member'] == pytest.approx(299 + 298 * again, abs=3)
  assert len(parsed) < len(rows) + 10


def test_an_incarnation_that_comes_again_is_no_other_clock(tmp_path):
  """No commit of the syncer had the first one, so its next process gives it again."""
  opening = {'name': 'records', **formats.stamp('records'), 't_ns': 1, 'time': 0}
  line = lambda at_s, name, **more: {'t_ns': at_s * 10**9, 'time': at_s, 'name': name, **more}
  member = {'learner': 'l0', 'state': 'joined', 'incarnation': 4}
  joins = [line(at_s, 'member', **member) for at_s in (77, 140)]
  write_lines(tmp_path, 'syncer', [opening, *joins])
  joined = line(140, 'state', state='joined', incarnation=4)
  write_lines(tmp_path, 'l0', [opening, line(137, 'startup'), joined])
  tail = records_lib.TailAll(tmp_path)
  assert [row['time'] for who, row in tail.stream() if who == 'l0'] == [137, 140]
  assert not tail.shifts


def test_a_folder_without_records_is_named(tmp_path):
  with pytest.raises(ValueError, match='no records in .*it has no folder records/'):
    diloco_jax.records(tmp_path)


def test_a_full_disk_is_reported_once_and_training_continues(tmp_path, capsys):
  (tmp_path / 'records').mkdir()
  (tmp_path / 'records' / 'l0.jsonl').symlink_to('/dev/full')
  recorder = records_lib.Recorder(tmp_path, 'l0', tensorboard=False)
  for number in range(3):
    recorder.report(step(number))
  recorder.close()
  recorder.report(step(9))
  assert capsys.readouterr().err.count('records are incomplete') == 1


def test_what_a_full_disk_has_cost_is_a_fact_once_there_is_space(tmp_path, capsys):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  path = tmp_path / 'records' / 'l0.jsonl'
  try:  # as a full disk does, it takes a part of the line first
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, hard))
    recorder = records_lib.Recorder(tmp_path, 'l0', tensorboard=False)
    recorder.report(step(0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    recorder.report(step(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
    for number in (2, 3):
      recorder.report(step(number))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  recorder.report(step(4))
  recorder.close()
  tail = records_lib.Tail(path)
  facts_ = [report_facts.parse(row) for row in tail.read()]
  missing = [report_facts.Missing(facts=count, error='File too large') for count in (1, 2)]
  assert facts_ == [missing[0], step(1), missing[1], step(4)]
  assert path.read_text().count('"name": "records"') == 1, 'what a process writes first'
  assert capsys.readouterr().err.count('records are incomplete') == 1


_FILLS_ITS_DISK = """
import resource, signal, sys
from diloco_jax.report import facts, records
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
recorder = records.Recorder(sys.argv[1], 'l0')
for step in range(2_000):
  recorder.scalars(step, {'learning/loss': 1.0})
  recorder.report(facts.Startup(phase='compiled', cpu_s=1.0))
recorder.close()
print('ended')
"""


def test_curves_on_a_full_disk_do_not_stop_training(tmp_path):
  """A queue behind a writer that has died would block the step thread. No half of a fact stays."""
  ended = command_line.python('-c', _FILLS_ITS_DISK, tmp_path)
  assert ended.stdout == 'ended\n'
  assert ended.stderr.count('records are incomplete') == 1
  lines = (tmp_path / 'records' / 'l0.jsonl').read_text().splitlines()
  assert {json.loads(line)['name'] for line in lines} == {'records', 'startup'}


def test_curves_and_log_lines(tmp_path, capsys):
  recorder = records_lib.Recorder(tmp_path, 'l0')
  recorder.config({'train': {'steps': 24}})
  recorder.scalars(3, {'learning/loss': 2.0, 'perf/step_time_seconds': 0.1})
  of_chip = {'kind': 'TPU v6 lite', 'peak_flops': 918e12, 'memory_limit_bytes': 32 << 30}
  of_step = {'parameters': 10**9, 'tokens': 65_536, 'devices': 16, 'flops': 412e12}
  cost = report_facts.Cost(**of_chip, **of_step, memory_bytes=28 << 30)
  loss, slow = {'loss': 3.0214}, dataclasses.replace(cost, flops=0.0)
  recorder.completed(20, 0.187, loss, slow)
  recorder.completed(99_990, 1.187, loss, cost)
  recorder.completed(99_990, 1.187, loss, dataclasses.replace(cost, peak_flops=0.0, memory_bytes=0))
  recorder.completed(20, 0.187, {**loss, 'accuracy': 0.51234}, slow)
  recorder.completed(20, 0.187, {}, dataclasses.replace(slow, memory_bytes=0))
  recorder.close()
  clocks, lines = zip(*(line.split(' ', 1) for line in capsys.readouterr().out.splitlines()))
  assert all(re.fullmatch(r'\d\d:\d\d:\d\d', clock) for clock in clocks)
  long = 'completed step: 99990, seconds: 1.187, tokens/s: 55211, loss: 3.021, TFLOP/s 347'
  assert list(lines) == [
    'completed step: 20, seconds: 0.187, tokens/s: 350460, loss: 3.021, HBM 88%',
    f'{long}, MFU 38%, HBM 88%',
    long,
    'completed step: 20, seconds: 0.187, tokens/s: 350460, loss: 3.021, accuracy: 0.5123, HBM 88%',
    'completed step: 20, seconds: 0.187, tokens/s: 350460',
  ]
  assert all(len(line) <= 100 for line in lines)
  events = b''.join(p.read_bytes() for p in (tmp_path / 'tensorboard' / 'l0').iterdir())
  assert b'learning/loss' in events and b'perf/step_time_seconds' in events
  assert b'config/text_summary' in events and b'    "steps": 24' in events


def test_every_fact_is_read_from_its_line(tmp_path):
  recorder = records_lib.Recorder(tmp_path, 'l0', tensorboard=False)
  values = {str: 'x', int: 1, float: 0.5, bool: True, int | None: None, float | None: 0.5}
  reported = []
  for kind in typing.get_args(report_facts.Fact):
    hints = typing.get_type_hints(kind)
    reported.append(kind(**{name: values.get(hint, []) for name, hint in hints.items()}))
    recorder.report(reported[-1])
  recorder.close()
  rows = records_lib.Tail(tmp_path / 'records' / 'l0.jsonl').read()
  assert [report_facts.parse(row) for row in rows] == reported
  assert len({row['name'] for row in rows}) == len(reported)


def test_rows_that_are_no_facts_are_skipped():
  fields = {'name': 'eval', 'step': 1, 'loss': 2.0, 'bits_per_byte': 0.0}
  row = {'t_ns': 1, 'time': 1.0, **fields}
  for other in ({**row, 'name': 'x'}, {**row, 'more': 1}, fields):
    assert report_facts.parse(other) is None
  assert report_facts.parse(row) == report_facts.Eval(step=1, loss=2.0)


def test_the_fold_follows_a_process():
  run = run_facts.RunFacts(['l0', 'l1'], total_steps=100)
  of_sync = {'fragment': 0, 'version': 1, 'sync': 7, 'clock': 41, 'reason': ''}
  adopted = facts.Adopted(**of_sync, steps_between=4, whole=False, staleness=1)
  last = report_facts.Step(step=41, steps=2, tokens=200, loss=3.0, seconds=0.5)
  for process, fact in (
    ('supervisor', report_facts.Process(child='l0', state='starting', text='')),
    ('l0', facts.State(state='joined', incarnation=2, clock=40)),
    ('l0', last),
    ('l0', adopted),
    ('syncer', synced(7, 'l0', waited_ns=15_000_000)),
    ('syncer', report_facts.Eval(step=40, loss=2.5)),
    ('unknown', dataclasses.replace(last, step=99)),
  ):
    run.take([(process, row(1.0, fact))])
  learner = run.learners['l0']
  figures = learner.step, learner.incarnation, learner.staleness
  assert (learner.state, *figures) == ('training', 41, 2, 1)
  assert learner.tokens_per_second == 200 and len(learner.merged_s) == 1
  assert run.progress == 0.08  # the next outer step is the one of clock 8
  assert (run.synced.sync, run.syncer, run.evaluations[-1].loss) == (7, 'merging', 2.5)
  run.take([child(2.0, 'l0', 'down', 'killed')])
  assert (learner.state, run.tokens_per_second) == ('down', 0)


def test_a_learner_that_joins_by_hand_is_followed():
  run = run_facts.RunFacts(['l0'], total_steps=10)

  def of_hand(state: str, reason: str = '') -> tuple[str, dict[str, Any]]:
    return 'syncer', row(1.0, member('hand', state, 1, reason))

  run.take([of_hand('waits')])
  assert list(run.learners) == ['l0']
  run.take([of_hand('joined'), ('hand', row(2.0, step(5)))])
  assert list(run.learners) == ['l0', 'hand']
  hand = run.learners['hand']
  assert (hand.state, hand.step, hand.incarnation) == ('training', 5, 1)
  run.take([of_hand('lost', 'lease expired')])
  assert hand.state == 'down'
  run.take([of_hand('joined'), of_hand('lost', 'left: done')])
  assert hand.state == 'done'


def test_a_learner_on_another_machine_is_followed_by_what_the_syncer_records():
  """`own` has records in this folder, so what the syncer says of its steps does not count twice."""
  run = run_facts.RunFacts(['own'], total_steps=40)

  def report(at_s: float, *about: Any) -> None:
    run.take([('syncer', row(at_s, progress(*about)))])

  def of(at_s: float, *about: Any):
    return 'syncer', row(at_s, member(*about))

  run.take([of(1, 'own', 'joined'), ('own', joined(1)), of(1, 'far', 'joined')])
  run.take([('own', row(2, step(5)))])
  report(3, 'own', 5, 5)
  report(3, 'far', 10, 10)
  far = run.learners['far']
  assert (far.state, far.step, far.tokens_per_second, run.tokens) == ('training', 10, 80, 88)
  assert run.progress == 0.25 and far.steps[-1].loss == 2.5
  run.take([of(4, 'far', 'lost', 1, 'lease expired'), of(6, 'far', 'joined', 2)])
  report(7, 'far', 30, 16, None)
  report(8, 'far', 40, 20)
  report(9, 'far', 40, 20)
  run.take([of(9, 'far', 'lost', 2, 'left: done')])
  assert [step.tokens for step in far.steps] == [88, 136, 168]
  assert (far.state, far.step) == ('done', 40)
  assert [(p.steps, p.first_step_s, p.ended_s, p.ended) for p in far.processes] == [
    (10, 2, 3, 'lost'),
    (10, 6, 8, 'done'),
  ]
  assert 'far' not in run.book.learners and run.spent_note.startswith('Where the time of far went')


def test_a_learner_on_another_machine_trains_again_after_a_restore():
  """The syncer counts its steps from those of the checkpoint on, and its incarnations."""
  run = run_facts.RunFacts([], total_steps=40)

  def take(at_s: float, fact: report_facts.Fact) -> None:
    run.take([('syncer', row(at_s, fact))])

  def stepped(at_s: float, steps: int) -> None:
    take(at_s, progress('l0', steps, steps))

  take(0, member('l0', 'joined', 1))
  stepped(2, 20)
  take(2, member('l0', 'lost', 1, 'lease expired'))
  take(2, member('l0', 'joined', 2))
  stepped(4, 40)
  take(4, synced(40, 'l0'))
  take(4, member('l0', 'lost', 2, 'left: done'))
  take(9, report_facts.Recovered(replayed=0, sync=20, log=1, versions=[1]))
  take(10, member('l0', 'joined', 2))  # the checkpoint knows its first incarnation alone
  for at_s in range(11, 20):
    stepped(at_s, 20 + 2 * (at_s - 10))
  far = run.learners['l0']
  assert (far.state, far.step, far.incarnation) == ('training', 38, 2)
  assert [process.ended for process in far.processes] == ['lost', 'done', '']
  config = stdlib_lm.get_config('tiny')
  events = state_lib.state(run, config)['events']
  assert [9.0, 'syncer', 'continues from clock 20 after a restore'] in events


def test_records_that_cannot_be_read_now_are_read_later(tmp_path):
  tail = records_lib.Tail(tmp_path / 'l0.jsonl')
  (tmp_path / 'l0.jsonl').mkdir()  # stands for a disk error, or too many open files
  assert tail.read() == []
  (tmp_path / 'l0.jsonl').rmdir()
  (tmp_path / 'l0.jsonl').write_text('{"name": "step"}\n')
  assert tail.read() == [{'name': 'step'}]


def test_without_tensorboard_there_are_facts(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  recorder = records_lib.Recorder(tmp_path, 'l0')
  recorder.report(step(1))
  recorder.scalars(1, {'learning/loss': 2.5})
  recorder.close()
  assert len(records_lib.Tail(tmp_path / 'records' / 'l0.jsonl').read()) == 1
  assert 'tensorboardX' in capsys.readouterr().err
