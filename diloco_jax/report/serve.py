"""Serves the page of a run on loopback. It reads the records alone, so that it cannot harm a run,
and answers only GET, to this machine's own names: a page of another site, whose name leads to
127.0.0.1, must not read it (DNS rebinding). Every user of this machine can."""

import http.server
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from diloco_jax.config import load
from diloco_jax.protocol import ids
from diloco_jax.report import page, records, run_facts, state, summary

_READ_S = 0.5  # the longest that an answer reads records: those of a long run are minutes of work
_EVERY_S = 1.0  # one state is sent
_HEADERS = {
  'Content-Security-Policy': "default-src 'none'; script-src 'self'; style-src 'self'; "
  "connect-src 'self'; img-src data:; frame-ancestors 'none'",
  'X-Content-Type-Options': 'nosniff',
  'Referrer-Policy': 'no-referrer',
  'Cache-Control': 'no-store',
}
_KINDS = {'.js': 'text/javascript', '.css': 'text/css'}


class Watch:
  """The newest state of a run. Thread-safe. Raises ValueError, OSError: no run in the folder."""

  def __init__(self, workdir: str | os.PathLike):
    self._config = load.read(pathlib.Path(workdir))
    steps, pace = self._config.train.steps, summary.pace(self._config)
    self._run = run_facts.RunFacts((), steps, **pace)
    self._tails, self._rows = records.TailAll(workdir), iter(())
    self._lock, self._state, self._made_s = threading.Lock(), {}, -_EVERY_S

  def state(self) -> dict[str, Any]:
    """See report/state.py; at most half a second old."""
    with self._lock:
      if time.monotonic() > self._made_s + _EVERY_S / 2:
        self._run.take(self._new(time.monotonic() + _READ_S))
        self._state = state.state(self._run, self._config)
        self._made_s = time.monotonic()
      return self._state

  def _new(self, until_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """New records; those that are left at `until_s` come the next time."""
    while time.monotonic() < until_s:
      if (found := next(self._rows, None)) is None:
        self._rows = self._tails.stream()
        if (found := next(self._rows, None)) is None:
          return
      for name in (found[0], found[1].get('child', 'syncer')):
        if name not in ids.NO_LEARNERS:
          self._run.learners.setdefault(name, run_facts.Learner())
      yield found


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  timeout = 60
  watch: Watch

  def do_GET(self) -> None:
    name = self.path.partition('?')[0][1:] or 'page.html'
    if self.headers.get('Host', '').rpartition(':')[0] not in ('127.0.0.1', 'localhost'):
      self._answer('text/plain', 'not a name of this host\n', 421)
    elif name == 'page.html':
      self._answer('text/html', page.text(name))
    elif name in page.FILES:
      self._answer(_KINDS[pathlib.Path(name).suffix], page.text(name))
    elif name == 'run.json':
      self._answer('application/json', json.dumps(self.watch.state()))
    elif name == 'metrics':
      self._answer('text/plain; version=0.0.4', metrics(self.watch.state()))
    elif name == 'events':
      self._stream()
    else:
      self._answer('text/plain', 'not found\n', 404)

  def _stream(self) -> None:
    self.close_connection = True
    self._head('text/event-stream')
    while True:
      self.wfile.write(f'data: {json.dumps([self.watch.state()])}\n\n'.encode())
      time.sleep(_EVERY_S)

  def _answer(self, kind: str, text: str, code: int = 200) -> None:
    body = text.encode()
    self._head(kind, code, {'Content-Length': str(len(body))})
    self.wfile.write(body)

  def _head(self, kind: str, code: int = 200, more: dict[str, str] | None = None) -> None:
    self.send_response(code)
    for name, value in {
      **_HEADERS,
      'Content-Type': f'{kind}; charset=utf-8',
      **(more or {}),
    }.items():
      self.send_header(name, value)
    self.end_headers()

  def log_message(self, *_) -> None: ...


class _Server(http.server.ThreadingHTTPServer):
  def handle_error(self, request, client_address) -> None:
    if not isinstance(sys.exception(), OSError):  # the reader has gone
      super().handle_error(request, client_address)


def make(workdir: str | os.PathLike, port: int = 0) -> tuple[http.server.HTTPServer, str]:
  """A server and its URL. Raises ValueError: there is no run; OSError: the port is in use."""
  handler = type('Handler', (_Handler,), {'watch': Watch(workdir)})
  server = _Server(('127.0.0.1', port), handler)
  return server, f'http://127.0.0.1:{server.server_port}/'


def metrics(run: dict[str, Any]) -> str:
  """A state in the text format of Prometheus."""
  names = 'progress', 'total_steps', 'tokens', 'tokens_per_second', 'outer_steps', 'seconds_left'
  rows = [(name, '', run[name]) for name in names]
  rows += [(name, '', run['figures'].get(name)) for name in ('training', 'token', 'uptime')]
  rows += [(f'wire_bytes_{name}', '', count) for name, count in run['wire'].items()]
  rows += [('held_out_loss', '', loss) for loss in run['held_out'][1][-1:]]
  for learner, found in run['learners'].items():
    for name in 'step', 'tokens_per_second', 'loss', 'goodput', 'merged', 'staleness':
      rows.append((f'learner_{name}', f'{{learner={json.dumps(learner)}}}', found[name]))
  told = sorted(row for row in rows if row[2] is not None)
  return ''.join(f'diloco_{name}{labels} {value}\n' for name, labels, value in told)
