"""`diloco track`: every row of the records becomes a point once, in the line of its process."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib

ROOT = pathlib.Path(__file__).parents[2]
_READ = """
import json, pathlib, sys
from wandb.proto import wandb_internal_pb2

def records(data):  # of a log of LevelDB, of blocks of 32 KiB, after 7 bytes
  at, whole = 7, b''
  while at < len(data):
    left = -at % 32768
    if left < 7:
      at += left
      continue
    size, kind = int.from_bytes(data[at + 4 : at + 6], 'little'), data[at + 6]
    whole += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # whole, or the last piece
      yield wandb_internal_pb2.Record.FromString(whole)
      whole = b''

for path in sorted(pathlib.Path(sys.argv[1]).glob('wandb/offline-run-*/run-*.wandb')):
  points, run = [], None
  for record in records(path.read_bytes()):
    if record.WhichOneof('record_type') == 'run':
      run = record.run
    if record.WhichOneof('record_type') == 'history':
      items = record.history.item
      points.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
  print(json.dumps([run.run_id, run.display_name, run.run_group, run.project, points]))
"""


def _train(workdir: pathlib.Path, first: int) -> None:
  """What a process of a learner and one of the syncer record."""
  with contextlib.closing(records_lib.Recorder(workdir, 'l0', tensorboard=False)) as l0:
    for step in range(first, first + 3):
      l0.report(report_facts.Step(step=step, steps=1, tokens=8, loss=5.0 - step, seconds=0.1))
  with contextlib.closing(records_lib.Recorder(workdir, 'syncer', tensorboard=False)) as syncer:
    syncer.report(report_facts.Eval(step=first, loss=6.0))


def _track(workdir: pathlib.Path, *words: str, **environment: str) -> subprocess.Popen[str]:
  return subprocess.Popen(
    [sys.executable, '-P', '-m', 'diloco_jax', 'track', f'--workdir={workdir}', *words],
    env={**os.environ, 'PYTHONPATH': str(ROOT), **environment},
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


@pytest.fixture(name='workdir')
def _workdir(tmp_path):
  return tmp_path / 'a_run'


def test_without_a_login_it_says_what_to_do(workdir, monkeypatch):
  _train(workdir, 1)
  for name in [name for name in os.environ if name.startswith('WANDB')]:
    monkeypatch.delenv(name)
  track = _track(workdir, HOME=str(workdir), NETRC=str(workdir / 'none'))
  stdout, stderr = track.communicate()
  assert (track.returncode, stdout) == (42, '')
  said = 'error: wandb: .*The run and its records are as they were: `wandb login`, or .*\n'
  assert re.fullmatch(said, stderr)


_WANDB = """
import os
Settings, errors = dict, type('errors', (), {'Error': RuntimeError})
class Run:
  offline, dir = True, '.'
  define_metric = finish = lambda *args, **named: None
  def log(self, values):
    print(values['clock'], file=open(os.environ['SENT'], 'a'))
init = lambda **named: Run()
"""


def test_each_row_is_sent_once_whatever_its_time_is(workdir, tmp_path):
  """A learner goes on where a clock is two hours behind; then its file is another one."""
  path, sent = workdir / 'records' / 'l0.jsonl', tmp_path / 'sent'
  path.parent.mkdir(parents=True)
  (tmp_path / 'wandb.py').write_text(_WANDB, 'utf-8')
  row = lambda clock, at_s: json.dumps({'name': 'step', 'step': clock, 'time': at_s}) + '\n'
  texts = [row(1, 9000) + row(2, 9001), row(3, 1800) + row(4, 1801), '']
  texts += [row(5, 9000), 'cut']
  said = []
  for text in texts:
    with open(path, 'a', encoding='utf-8') as file:
      file.write(text)
    if text == 'cut':
      os.truncate(path, len(row(1, 9000)))
    track = _track(workdir, PYTHONPATH=f'{tmp_path}:{ROOT}', SENT=str(sent))
    said.append(track.communicate()[0])
    assert track.returncode == 0
  assert sent.read_text('utf-8').split() == ['1', '2', '3', '4', '5', '1']
  assert [f'{path} is not the file that was sent' in text for text in said] == [False] * 4 + [True]


@pytest.mark.long
def test_a_run_that_is_continued_continues_its_lines(workdir):
  _train(workdir, 1)
  offline = {'WANDB_MODE': 'offline'}
  with _track(workdir, '--project=p', **offline) as first:
    said = first.stdout.read().splitlines()
  assert first.returncode == 0 and {line.split(':')[0] for line in said} == {'l0', 'syncer'}

  with _track(
    workdir, '--project=p', '--follow', **offline
  ) as second:  # it begins after the rows that were sent
    _train(workdir, 4)
    for _ in range(2):
      assert second.stdout.readline()
    second.send_signal(signal.SIGTERM)
  assert second.returncode == 0

  read = subprocess.run(
    [sys.executable, '-c', _READ, str(workdir)], text=True, capture_output=True, check=True
  )
  lines: dict[tuple, list[dict]] = {}
  for line in map(json.loads, read.stdout.splitlines()):
    lines.setdefault(tuple(line[:4]), []).extend(line[4])
  assert {key[1:] for key in lines} == {('l0', 'a_run', 'p'), ('syncer', 'a_run', 'p')}
  assert len(lines) == 2, 'each process has one id'
  points = {key[1]: points_ for key, points_ in lines.items()}
  assert [(point['clock'], point['step/loss']) for point in points['l0']] == [
    (step, 5.0 - step) for step in range(1, 7)
  ]
  assert [point['eval/loss'] for point in points['syncer']] == [6.0, 6.0]
