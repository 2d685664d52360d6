"""Records survive kills, torn lines and full disks, and the view follows them."""

import json

import numpy as np

from diloco_jax.report import records
from diloco_jax.report import run_state as run_state_lib


def test_facts_come_back_in_order_while_they_are_written(tmp_path):
  recorder = records.Recorder(tmp_path, 'l0', tensorboard=False)
  tail = records.Tail(tmp_path / 'records' / 'l0.jsonl')
  assert tail.read() == []
  recorder.report('step', {'step': 1, 'loss': np.float32(2.5), 'shape': np.arange(2)})
  first = tail.read()
  assert first[0].items() >= {'name': 'step', 'step': 1, 'loss': 2.5}.items()
  assert first[0]['shape'] == [0, 1]
  assert first[0]['t_ns'] > 0 and first[0]['time'] > 0
  recorder.report('step', {'step': 2})
  assert [fact['step'] for fact in tail.read()] == [2]
  recorder.close()


def test_a_line_that_a_killed_process_left_torn_harms_nobody(tmp_path):
  recorder = records.Recorder(tmp_path, 'l0', tensorboard=False)
  recorder.report('step', {'step': 1})
  recorder.close()
  path = tmp_path / 'records' / 'l0.jsonl'
  with open(path, 'ab') as file:
    file.write(b'{"name": "step", "st')
  tail = records.Tail(path)
  assert [fact['step'] for fact in tail.read()] == [1]
  again = records.Recorder(tmp_path, 'l0', tensorboard=False)
  again.report('step', {'step': 2})
  again.close()
  assert [fact['step'] for fact in tail.read()] == [2]
  assert tail.skipped == 1


def test_lines_that_are_no_facts_are_skipped(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_bytes(b'\xff\xfe\n[1]\n{"step": 1}\n\n{"name": "step"}\n')
  tail = records.Tail(path)
  assert tail.read() == [{'name': 'step'}]
  assert tail.skipped == 3


def test_all_files_are_merged_by_time_and_new_ones_are_found(tmp_path):
  folder = tmp_path / 'records'
  folder.mkdir()
  tails = records.TailAll(tmp_path)
  assert tails.read() == []
  for name, times in (('a', (1, 3)), ('b', (2, 4))):
    (folder / f'{name}.jsonl').write_text(
      ''.join(json.dumps({'name': 'x', 'time': t}) + '\n' for t in times)
    )
  assert [(name, fact['time']) for name, fact in tails.read()] == [
    ('a', 1),
    ('b', 2),
    ('a', 3),
    ('b', 4),
  ]
  (folder / 'c.jsonl').write_text('{"name": "x", "time": 0}\n')
  assert [name for name, _ in tails.read()] == ['c']


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, capsys):
  (tmp_path / 'records').mkdir()
  (tmp_path / 'records' / 'l0.jsonl').symlink_to('/dev/full')
  recorder = records.Recorder(tmp_path, 'l0', tensorboard=False)
  for step in range(3):
    recorder.report('step', {'step': step})
  recorder.close()
  recorder.report('late', {})
  assert capsys.readouterr().err.count('records are incomplete') == 1


def test_curves_and_log_lines(tmp_path, capsys):
  recorder = records.Recorder(tmp_path, 'l0')
  recorder.scalars(3, {'learning/loss': 2.0, 'perf/step_time_seconds': 0.1})
  recorder.completed(step=20, seconds=0.187, tokens=2044, loss=3.0214)
  recorder.close()
  assert capsys.readouterr().out == (
    'completed step: 20, seconds: 0.187, tokens/s: 10930, loss: 3.021\n'
  )
  events = b''.join(p.read_bytes() for p in (tmp_path / 'tensorboard' / 'l0').iterdir())
  assert b'learning/loss' in events and b'perf/step_time_seconds' in events


def test_the_view_follows_a_life():
  view = run_state_lib.RunView(['l0', 'l1'], total_steps=100)
  for process, fact in (
    ('supervisor', {'name': 'process', 'child': 'l0', 'state': 'starting', 'text': ''}),
    ('l0', {'name': 'state', 'state': 'joined', 'incarnation': 2, 'step': 40}),
    ('l0', {'name': 'step', 'step': 41, 'steps': 2, 'tokens': 200, 'loss': 3.0, 'seconds': 0.5}),
    ('l0', {'name': 'adopted', 'staleness': 1}),
    ('l0', {'name': 'settled', 'merged': True, 'reason': ''}),
    ('syncer', {'name': 'synced', 'sync': 7, 'participants': ['l0'], 'grace_ns': 20_000_000}),
    ('syncer', {'name': 'eval', 'step': 40, 'loss': 2.5}),
    ('somebody', {'name': 'step', 'step': 99, 'seconds': 1}),
  ):
    view.update(process, fact)
  learner = view.learners['l0']
  assert (learner.state, learner.step, learner.incarnation, learner.staleness, learner.merged) == (
    'training',
    41,
    2,
    1,
    1,
  )
  assert learner.tokens_per_second == 200
  assert view.progress == 0.41
  assert (view.syncer.sync, view.syncer.outer_steps, view.syncer.eval_loss) == (7, 1, 2.5)
  view.update('supervisor', {'name': 'process', 'child': 'l0', 'state': 'down', 'text': 'killed'})
  assert (learner.state, learner.tokens_per_second, view.last_event) == ('down', 0, 'l0: killed')
