"""The page of a run: its state, the file without a server, and the server."""

import contextlib
import html.parser
import http.client
import itertools
import json
import math
import pathlib
import re
import signal
import subprocess
import sys
import time

import hypothesis
import pytest
from hypothesis import strategies as st
from prometheus_client import parser

from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import facts
from diloco_jax.report import book as book_lib
from diloco_jax.report import facts as report_facts
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import page, picture, serve
from diloco_jax.report import state as state_lib
from diloco_jax.report import summary as summary_lib
from tests.launch.lib import command_line
from tests.report import browsers
from tests.report.rows import add, add_of, child, evaluation, exited, member, row, step

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 2_000


@pytest.fixture(name='workdir')
def _workdir(tmp_path) -> pathlib.Path:
  """l0 is killed at 60 s and trains again from 80 s on; l1 has a loss of NaN."""
  load.write(tmp_path, stdlib_lm.get_config('tiny'))
  add(tmp_path, *[child(0, name, 'starting') for name in ('l0', 'l1')])
  killed = [child(60, 'l0', 'down', 'killed'), exited(60, 'l0', -9)]
  add(tmp_path, *killed, child(70, 'l0', 'starting', 'restarted'))
  before = [step(10 + i / 40, i + 1, i + 1, 5 - i / STEPS) for i in range(STEPS)]
  after = [step(80 + i, STEPS + i, i + 1, 4.0) for i in range(10)]
  add_of(tmp_path, 'l0', *before, *after)
  own = step(11, 1, 1, math.nan), step(12, 2, 2, 4.5), step(65, 3, 3, 4.5)
  add_of(tmp_path, 'l1', *own)
  joined, left = member('l1', 'joined'), member('l1', 'lost', 1, 'left: done')
  add_of(tmp_path, 'syncer', row(9, joined), evaluation(85, 2, 3.25), row(90, left))
  return tmp_path


def read(workdir: pathlib.Path) -> dict:
  run = folder_lib.read(workdir)
  return state_lib.state(run.run, run.config, workdir.name)


def test_page_and_report_name_the_period_that_the_syncer_has_chosen(workdir):
  sentence = 'a period of 24 inner steps'
  assert sentence not in read(workdir)['about']
  tempo = facts.Tempo(factor=2, delay=3, period=24, sync=30)
  add(workdir, ('syncer', row(91, tempo)))
  assert sentence in read(workdir)['about']
  text = summary_lib.text(summary_lib.summarize(folder_lib.read(workdir)), workdir, 200)
  assert f'the syncer chose {sentence}' in text


def test_a_curve_has_few_points_and_no_line_bridges_an_absence_and_the_kill_is_marked(workdir):
  tokens, losses, ended = read(workdir)['learners']['l0']['curve']
  assert state_lib.POINTS / 2 < len(tokens) < state_lib.POINTS + 20
  assert tokens == sorted(set(tokens))
  gap = losses.index(None)
  assert ended[gap - 1] == 'killed' and ended.count('killed') == 1
  assert set(losses[gap + 1 : -1]) == {4.0} and losses[-1] is None
  assert losses[gap - 1] == pytest.approx(4.0, abs=0.01)


def test_it_is_strict_json_also_with_a_loss_that_is_none(workdir):
  state = read(workdir)
  assert state['learners']['l1']['curve'][1] == [None, 4.5, 4.5, None]
  json.dumps(state, allow_nan=False)


@pytest.mark.parametrize(
  'evaluated, losses',
  [
    ([(10, 4.9), (20, 4.8), (30, 4.7), (40, 4.6), (STEPS, 3.0)], [4.9, 4.8, 4.7, 4.6, None, 3.0]),
    ([(STEPS // 3, 4), (2 * STEPS // 3, 3), (STEPS, 2)], [4, 3, 2]),
  ],
  ids=['far apart', 'few'],
)
def test_no_line_joins_held_out_points_that_are_unusually_far_apart(workdir, evaluated, losses):
  assert read(workdir)['held_out'][1] == [3.25]
  rows = [evaluation(91 + i, clock, loss) for i, (clock, loss) in enumerate(evaluated)]
  add_of(workdir, 'syncer', *rows)
  tokens, found_losses = read(workdir)['held_out']
  assert found_losses == [3.25, *losses] and tokens == sorted(tokens)


def test_learners_with_models_of_their_own_have_losses_with_a_unit_and_a_curve(workdir):
  """LoRA: each learner evaluates, since the syncer has no base."""
  config = stdlib_lm.get_config('tiny')
  config.task = 'lora_decoder.py:task'
  load.write(workdir, config)
  add_of(workdir, 'l0', *[evaluation(91 + i, i, 3 - i / 10, 4.0) for i in range(3)])
  state = read(workdir)
  tokens, losses = state['learners']['l0']['held_out']
  assert losses == [3.0, 2.9, 2.8] and tokens == sorted(tokens) and tokens[0] > 0
  text = summary_lib.text(summary_lib.write(workdir), workdir, 200)
  assert 'own (nats per byte, on unseen data)\n           l0  3.000 before, 2.800 after' in text
  figure = picture.draw(state)
  lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
  assert lines['learner l0, held-out loss'] == losses


def test_a_process_that_starts_is_drawn_up_to_now_and_one_that_steps_up_to_its_last_fact(workdir):
  add(workdir, child(95, 'l1', 'starting'), child(99, 'l2', 'starting'))
  state = read(workdir)
  assert state['learners']['l1']['lives'][-1] == [95.0, None, 99.0, '']
  assert state['learners']['l0']['lives'][-1] == [70.0, 80.0, 89.0, '']


def test_a_program_that_failed_says_why(workdir):
  assert not any('failed' in notice or 'refused' in notice for notice in read(workdir)['notices'])
  add(workdir, child(99, 'l0', 'failed', 'exit code 1'), child(99, 'syncer', 'refused', 'no disk'))
  whole, program, *_ = read(workdir)['notices']
  assert whole.startswith('The run is dead: the syncer refused (no disk), 0 s ago. Read logs/sync')
  assert program.startswith('l0: failed: exit code 1, 0 s ago. Read logs/l0.log')


def test_the_mean_pace_of_a_run_that_has_ended_is_told(workdir):
  state = read(workdir)
  l0 = state['learners']['l0']
  assert l0['mean_tokens_per_second'] == pytest.approx(50 * 2_010 / 79, rel=1e-3)
  assert state['mean_tokens_per_second'] == pytest.approx(50 * 2_013 / 79, rel=1e-3)
  assert l0['loss'] == 4.0  # the mean of the last ten, as in the report


@hypothesis.given(st.floats(-9, 4), st.floats(0.002, 9), st.booleans())
def test_the_axis_of_a_loss_has_three_numbers_or_more_and_none_overlap(power, decades, log):
  low, high = 10**power, 10 ** (power + decades)
  numbers = picture.ticks(low, high, log)
  assert 3 <= len(numbers) <= 8 and numbers == sorted(set(numbers))
  assert low <= numbers[0] and numbers[-1] <= high
  place = math.log if log else float
  apart = (place(high) - place(low)) / 13
  assert all(place(b) - place(a) > 0.999 * apart for a, b in itertools.pairwise(numbers))
  assert len({f'{x:g}' for x in numbers}) == len(numbers)


def test_every_category_of_time_has_words_and_a_colour_of_its_own():
  script = page.text('page.js')
  spent = dict(re.findall(r"^  (\w+): \['(#\w{6})', '", script, re.M))
  learners = re.search("COLOURS = '(.*?)'", script)[1].split()
  assert set(spent) == set(book_lib.CATEGORIES)
  assert len({*spent.values(), *learners}) == len(spent) + len(learners)


def test_events_are_the_newest_first_and_who_left_or_was_killed_was_not_lost(workdir):
  lost = [row(at_s, member('l0', 'lost', 1, f'at {at_s}')) for at_s in (59, 88)]
  joined = [row(at_s, member('l0', 'joined', n)) for n, at_s in enumerate((8, 81), 1)]
  add_of(workdir, 'syncer', joined[0], lost[0], joined[1], lost[1])
  events = read(workdir)['events']
  assert [what for _, _, what in events if what.startswith('lost')] == ['lost: at 88']
  assert [at_s for at_s, *_ in events] == sorted((at_s for at_s, *_ in events), reverse=True)
  assert events[0] == [90.0, 'l1', 'left: done']
  assert [60.0, 'l0', 'killed'] in events and [70.0, 'l0', 'process 2 starts'] in events


class _Links(html.parser.HTMLParser):
  """What a page would load or lead to, and its data."""

  def __init__(self, text: str):
    super().__init__()
    self.links, self.data, self._tag = [], '', ''
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self._tag = dict(attrs).get('id') or tag
    self.links += [value for name, value in attrs if name in ('src', 'href')]

  def handle_data(self, data):
    self.data += data if self._tag == 'data' else ''


def test_the_inlined_page_is_one_file_with_the_runs(workdir):
  states = [read(workdir), read(workdir) | {'name': '</script><b>&"'}]
  text = page.inline(states)
  parsed = _Links(text)
  assert parsed.links == ['data:,', '#words']
  assert not re.search('https?:', text)
  assert json.loads(parsed.data) == states
  assert 'Permission is hereby granted' in text  # the licence of the charts goes with them
  assert len(text) < 150_000


def test_the_files_are_those_that_the_page_loads():
  assert {*_Links(page.text(page.PAGE)).links, page.PAGE} == {*page.FILES, 'data:,', '#words'}


@pytest.fixture(name='port')
def _port(workdir):
  with browsers.served(workdir) as url:
    port = int(re.fullmatch(r'http://127\.0\.0\.1:(\d+)/', url)[1])
    while json.loads(ask(port, '/run.json')[1])['behind']:  # an answer reads for half a second
      time.sleep(0.05)
    yield port


def ask(port: int, path: str, method: str = 'GET', **headers: str) -> tuple[int, str, dict]:
  with contextlib.closing(http.client.HTTPConnection('127.0.0.1', port, timeout=60)) as connection:
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_it_answers_this_host_and_only_reads(port):
  assert ask(port, '/')[0] == ask(port, '/', Host=f'localhost:{port}')[0] == 200
  assert ask(port, '/run.json', Host='evil.example')[0] == 421
  assert ask(port, '/run.json', Host=f'evil.example:{port}')[0] == 421
  for path in ('/', '/metrics', '/events'):
    status, text, headers = ask(port, path, 'HEAD')
    assert (status, text) == (200, '') and headers['Content-Type'].startswith('text/')
  assert ask(port, '/', 'POST')[0] == ask(port, '/', 'DELETE')[0] == 501
  assert ask(port, '/../state.py')[0] == ask(port, '/%2e%2e/state.py')[0] == 404


def test_scripts_come_from_itself_alone(port):
  status, text, headers = ask(port, '/')
  assert headers['Content-Security-Policy'].startswith("default-src 'none'; script-src 'self';")
  assert 'unsafe' not in headers['Content-Security-Policy'] and 'style=' not in text
  for name in page.FILES:
    status, text, headers = ask(port, f'/{name}')
    assert (status, text) == (200, page.text(name)), name
    kind = {'.js': 'javascript', '.css': 'css', '.html': 'html'}[pathlib.Path(name).suffix]
    assert kind in headers['Content-Type']


def test_the_state_follows_the_records(port, workdir):
  before = json.loads(ask(port, '/run.json')[1])
  still = lambda state: {name: state[name] for name in ('tokens', 'held_out', 'events', 'pauses')}
  assert still(before) == still(read(workdir)) and not before['behind']
  add(workdir, ('l7', step(95, 2_500, 1, 3.0)))  # that nobody has told of
  while 'l7' not in (now := json.loads(ask(port, '/run.json')[1]))['learners']:
    time.sleep(0.05)
  assert now['learners']['l7']['step'] == 2_500 and now['tokens'] == before['tokens'] + 50


def test_of_a_run_that_is_not_read_yet_nothing_is_told(workdir, monkeypatch):
  monkeypatch.setattr(serve, '_READ_S', 0.0)
  now = serve.watch_of(workdir).state()
  assert now['behind'] and serve.metrics(now) == ''
  (notice,) = now['notices']
  assert notice.startswith('The records are still being read')


def test_events_are_sent_as_they_come(port, workdir):
  with contextlib.closing(http.client.HTTPConnection('127.0.0.1', port, timeout=60)) as connection:
    connection.request('GET', '/events')
    answer = connection.getresponse()
    assert answer.headers['Content-Type'] == 'text/event-stream'
    state_of = lambda line: json.loads(line[6:])[0]['learners']['l0']['condition']['state']
    assert state_of(answer.readline()) != 'down'
    add(workdir, child(100, 'l0', 'down'))
    while not (line := answer.readline()).startswith(b'data: ') or state_of(line) != 'down':
      pass


def test_the_page_tells_how_many_follow_the_run_and_how_far_behind_they_are(workdir):
  figures = lambda state: (state['followers'], state['versions_behind'])
  assert figures(read(workdir)) == (0, 0)
  add_of(workdir, 'syncer', row(100, report_facts.Followers(count=3, behind=7)))
  assert figures(read(workdir)) == (3, 7)


def test_prometheus_reads_the_metrics(port):
  status, text, _ = ask(port, '/metrics')
  families = list(parser.text_string_to_metric_families(text))
  documented = (ROOT / 'docs' / 'reference' / 'metrics.md').read_text()
  assert all(family.type == 'gauge' and f'`{family.name}`' in documented for family in families)
  samples = {
    (sample.name, sample.labels.get('learner')): sample.value
    for family in families
    for sample in family.samples
  }
  assert samples['diloco_held_out_loss', None] == 3.25
  assert samples['diloco_learner_step', 'l0'] == STEPS + 9
  assert samples['diloco_tokens', None] == 50 * (STEPS + 13)
  assert (
    samples['diloco_learner_connected', 'l1'] == samples['diloco_learners_connected', None] == 0
  )
  assert all(family.documentation for family in families)


def test_the_command_serves_a_run_until_ctrl_c(workdir):
  slow = 'import runpy; from diloco_jax.report import serve; serve._READ_S = 0.01'  # it takes many
  slow += '; runpy.run_module("diloco_jax", run_name="__main__")'
  command = [sys.executable, '-c', slow, 'status', f'--workdir={workdir}']
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
    port = program.stdout.readline().strip('/\n').rpartition(':')[2]
    assert 'The records of the syncer ended' in program.stdout.readline(), 'once all is read'
    assert ask(int(port), '/run.json')[0] == 200
    done = command_line.diloco('status', f'--workdir={workdir}', f'--port={port}')
    assert done.returncode == 42 and f'port {port} is in use' in done.stderr
    program.send_signal(signal.SIGINT)
    assert program.wait(60) == 0
