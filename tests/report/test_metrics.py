"""/metrics of a syncer and a learner: what they tell, to whom, and that training never waits."""

import contextlib
import http.client
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import parser

from diloco_jax.configs import stdlib_lm
from diloco_jax.report import serve
from tests.launch.lib import command_line
from tests.report.rows import add_of, evaluation, member, progress, row

DEADLINE_S = 240


def ask(port: int, path: str = '/metrics', method: str = 'GET') -> tuple[int, str]:
  with contextlib.closing(
    http.client.HTTPConnection('127.0.0.1', port, timeout=DEADLINE_S)
  ) as connection:
    connection.request(method, path, headers={'Host': 'anything.example'})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def figures(port: int) -> dict[tuple[str, str], float]:
  """By name and learner."""
  families = parser.text_string_to_metric_families(ask(port)[1])
  samples = [sample for family in families for sample in family.samples]
  return {(sample.name, sample.labels.get('learner', '')): sample.value for sample in samples}


def until(port: int, name: str, learner: str = '', above: float = 0.0) -> float:
  """The figure, once it is there and above a value."""
  end_s = time.monotonic() + DEADLINE_S
  while (value := figures(port).get((name, learner), -1.0)) <= above:
    assert time.monotonic() < end_s, name
    time.sleep(0.1)
  return value


def test_a_program_that_starts_again_tells_of_itself_alone(tmp_path):
  joined, now_s = member('l0', 'joined'), time.time()
  lines = [row(now_s, joined), row(now_s, progress('l0', 10, 10)), evaluation(now_s, 1, 9.0)]
  add_of(tmp_path, 'syncer', *lines)
  port = serve.serve_metrics(stdlib_lm.get_config('tiny'), str(tmp_path), 'syncer', 0)
  assert figures(port) == {}
  later = row(now_s, progress('l0', 20, 20)), evaluation(now_s, 2, 3.0)
  add_of(tmp_path, 'syncer', *lines[:2], *later)
  assert until(port, 'diloco_tokens') == 8 * 10
  values = figures(port)
  assert values['diloco_held_out_loss', ''] == 3.0
  assert values['diloco_learner_loss', 'l0'] == 2.5 and values['diloco_learner_step', 'l0'] == 20


def test_it_only_reads_and_has_one_thread_whoever_connects(tmp_path, monkeypatch):
  assert 0 < serve._Metrics.timeout < 10
  monkeypatch.setattr(serve._Metrics, 'timeout', 0.5)
  before = threading.active_count()
  port = serve.serve_metrics(stdlib_lm.get_config('tiny'), str(tmp_path), 'l0', 0)
  with contextlib.ExitStack() as open_ones:
    for _ in range(4):  # which ask nothing
      open_ones.enter_context(socket.create_connection(('127.0.0.1', port)))
    assert ask(port)[0] == 200  # once they have been given up
    assert threading.active_count() == before + 1
  assert ask(port, '/metrics', 'HEAD') == (200, '')
  assert ask(port, '/metrics', 'POST')[0] == ask(port, '/metrics', 'DELETE')[0] == 501
  for path in ('/', '/run.json', '/events', '/metrics/../run.json', '/app.js'):
    assert ask(port, path)[0] == 404


@contextlib.contextmanager
def started(command: str, workdir: pathlib.Path, *words: str) -> Iterator[subprocess.Popen]:
  config = ['--config=stdlib_lm:tiny', '--config.train.steps=1000000', '--config.train.drain_s=120']
  argv = [sys.executable, '-m', 'diloco_jax', command, *config, f'--workdir={workdir}', *words]
  with subprocess.Popen(
    argv, cwd=command_line.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as process:
    try:
      yield process
    finally:
      process.kill()


def line(process: subprocess.Popen, words: str) -> str:
  said = []
  for text in process.stdout:
    said.append(text)
    if words in text:
      threading.Thread(target=process.stdout.read, daemon=True).start()
      return text.strip()
  raise AssertionError(''.join(said))


@pytest.mark.timeout(900)
@pytest.mark.full
def test_a_syncer_and_a_learner_serve_their_own_while_they_train(tmp_path):
  """One after the other is asked; a reader that never asks stops no step; both end in order."""
  learner = ('--learner=l0', f'--syncer=file:{tmp_path}/syncer/address')
  with (
    started('syncer', tmp_path, '--metrics_port=0') as first,
    started('learner', tmp_path, *learner, '--metrics_port=0') as second,
  ):
    ports = [int(line(process, '/metrics is served').split()[-1]) for process in (first, second)]
    until(ports[0], 'diloco_learner_step', 'l0')
    silent = socket.create_connection(('127.0.0.1', ports[1]))
    step = until(ports[1], 'diloco_learner_step', 'l0')
    until(ports[1], 'diloco_learner_step', 'l0', above=step)
    until(ports[0], 'diloco_outer_steps')
    texts = [ask(port)[1] for port in ports]
    for text in texts:
      assert 'diloco_learner_loss{learner="l0"}' in text
      for secret in (socket.gethostname(), str(tmp_path), tmp_path.name, '/', 'tiny'):
        assert secret not in text
    assert 'diloco_bytes_up 0' not in texts[0]  # of the syncer; a learner does not know it
    silent.close()
    for process in (second, first):
      process.send_signal(signal.SIGTERM)
      assert process.wait(DEADLINE_S) == 0


@pytest.mark.timeout(900)
def test_a_port_that_is_in_use_stops_no_training(tmp_path):
  with socket.create_server(('', 0)) as in_use:
    port = in_use.getsockname()[1]
    with started('syncer', tmp_path, f'--metrics_port={port}') as process:
      said = line(process, 'metrics')
      assert said == f'/metrics is not served, port {port}: Address already in use'
      while not (tmp_path / 'syncer' / 'address').exists():
        assert process.poll() is None
        time.sleep(0.1)
