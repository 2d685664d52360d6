"""Serves the page of a run on loopback. It reads records alone, so that it cannot harm the run. It
answers GET and HEAD alone, and only under this host's own names: no page of another site whose name
leads to 127.0.0.1 may read it (DNS rebinding). Every user of this machine can."""

import http.server
import itertools
import json
import mimetypes
import os
import pathlib
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.config import run_config
from diloco_jax.protocol import ids
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import page, programs, run_facts
from diloco_jax.report import records as records_lib
from diloco_jax.report import state as state_lib
from diloco_jax.storage import files as files_lib

_READ_S = 0.5  # the longest that an answer reads records: all those of a long run take minutes
_EVERY_S = 1.0  # one state is sent
_READS = 'The records are still being read: what is shown is an earlier moment of the run.'
_POLICY = (
  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)

# What /metrics has (docs/reference/metrics.md); all are gauges, as a restore takes counts back.
_RUN_METRICS = 'held_out_loss progress seconds_left tokens tokens_per_second outer_steps bytes_up'
_RUN_METRICS += (
  ' bytes_down goodput token_goodput uptime learners_connected followers versions_behind'
)
_LEARNER_METRICS = 'connected loss step tokens_per_second staleness incarnation goodput merged'


class Watch:
  """The newest state of a run, at most half a second old. Thread-safe. Raises ValueError."""

  def __init__(
    self,
    config_of: Callable[[], run_config.Config | None],
    begin: Callable[[], Callable[[], Iterator]],
    name: str = '',
    **how: Any,
  ):
    """`config_of`: None until the syncer has started. `begin` returns what returns, at each call,
    the records that are new. `name`: of the run's folder. `how`: arguments of RunFacts."""
    self._config_of, self._stream_of, self._name, self._how = config_of, begin, name, how
    self._lock, self._state, self._made_s = threading.Lock(), {}, -_EVERY_S
    self._shifts: dict[str, float] = {}
    self._begin()

  def _begin(self) -> None:
    self._config = self._config_of()
    how = {'syncer': bool(self._config), **folder_lib.pace(self._config), **self._how}
    self._run = run_facts.RunFacts((), **how)
    self._stream, self._rows = self._stream_of(), iter(())
    self._behind, self._grew_s = True, dict[str, float]()  # when new records came, of each process

  def state(self) -> dict[str, Any]:
    with self._lock:
      if time.monotonic() > self._made_s + _EVERY_S / 2:
        if self._config is None and self._config_of():  # the syncer has started
          self._begin()
        self._run.take(self._new(time.monotonic() + _READ_S))
        shifts = getattr(getattr(self._stream, '__self__', None), 'shifts', {})
        if not self._behind and self._shifts != shifts:  # a clock was found to be another one
          self._shifts = dict(shifts)
          self._begin()
          self._run.take(self._new(time.monotonic() + _READ_S))
        looked_at = None if self._behind else time.time()  # nobody is silent whom nobody has read
        grew = {who: time.monotonic() - at_s for who, at_s in self._grew_s.items()}
        fresh = {who: ago_s for who, ago_s in grew.items() if ago_s < self._run.silent_s}
        self._run.look(looked_at, fresh)
        now = state_lib.state(self._run, self._config, self._name)
        notices = [_READS] if self._behind else now['notices']
        self._state = now | {'behind': self._behind, 'notices': notices}
        self._made_s = time.monotonic()
      return self._state

  def _new(self, until_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """New records; those that are left at `until_s` come the next time."""
    first, self._behind = self._behind, True
    while time.monotonic() < until_s:
      if (new := next(self._rows, None)) is None:
        self._rows = self._stream()
        if (new := next(self._rows, None)) is None:
          self._behind = False
          return
      for name in (new[0], new[1].get('child', new[0])):
        if name not in ids.NO_LEARNERS:
          self._run.learners.setdefault(name, programs.LearnerFacts())
      if not first:
        self._grew_s[new[0]] = time.monotonic()
      yield new


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  timeout = 60  # of a reader that reads nothing
  watch: Watch

  def do_GET(self) -> None:
    name = self.path.partition('?')[0][1:] or page.PAGE
    if self.headers.get('Host', '').rpartition(':')[0] not in ('127.0.0.1', '[::1]', 'localhost'):
      self._answer('host.txt', 'not a name of this host\n', 421)
    elif name in page.FILES:
      self._answer(name, page.text(name))
    elif name == 'run.json':
      self._answer(name, json.dumps(self.watch.state()))
    elif name == 'metrics':
      self._answer('metrics.txt', metrics(self.watch.state()))
    elif name == 'events':
      self._head('text/event-stream', 200)
      while self.command == 'GET':
        self.wfile.write(f'data: {json.dumps([self.watch.state()])}\n\n'.encode())
        time.sleep(_EVERY_S)
    else:
      self._answer('none.txt', 'not found\n', 404)

  do_HEAD = do_GET

  def _answer(self, name: str, text: str, code: int = 200) -> None:
    body = text.encode()
    self._head(f'{mimetypes.guess_type(name)[0]}; charset=utf-8', code, str(len(body)))
    if self.command == 'GET':
      self.wfile.write(body)

  def _head(self, kind: str, code: int, length: str = '') -> None:
    self.send_response(code)
    self.send_header('Content-Type', kind)
    self.send_header('Content-Security-Policy', _POLICY)
    self.send_header('X-Content-Type-Options', 'nosniff')
    self.send_header('Cache-Control', 'no-store')
    self.send_header(*(('Content-Length', length) if length else ('Connection', 'close')))
    self.end_headers()

  def log_message(self, format: str, *args: Any) -> None: ...


class _Metrics(_Handler):
  """/metrics alone, for whoever reaches the port."""

  protocol_version, timeout = 'HTTP/1.0', 5

  def do_GET(self) -> None:
    if self.path != '/metrics':
      self._answer('none.txt', 'not found\n', 404)
    else:
      self._answer('metrics.txt', metrics(self.watch.state()))

  do_HEAD = do_GET


class _Server(http.server.ThreadingHTTPServer):
  def handle_error(self, request, client_address) -> None:
    if not isinstance(sys.exception(), OSError):  # else the reader has gone
      super().handle_error(request, client_address)


class _OneReader(_Server):
  """With one thread and one connection, whoever asks; it looks up no name."""

  process_request = socketserver.BaseServer.process_request  # type: ignore[assignment]

  def server_bind(self) -> None:
    if self.address_family == socket.AF_INET6:  # at the addresses of IPv4, too
      self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    socketserver.TCPServer.server_bind(self)


def watch_of(workdir: str | os.PathLike) -> Watch:
  """Watches the run in a folder. Raises ValueError: there is none."""
  run = pathlib.Path(workdir)
  name = run.absolute().name
  return Watch(lambda: folder_lib.config_of(run), lambda: records_lib.TailAll(run).stream, name)


def make(workdir: str | os.PathLike, port: int = 0) -> tuple[http.server.HTTPServer, str]:
  """A server and its URL. Raises ValueError: there is no run; OSError: the port is in use."""
  handler = type('Handler', (_Handler,), {'watch': watch_of(workdir)})
  host = files_lib.loopback().rpartition(':')[0]
  kind = _of_ipv6(_Server) if ':' in host else _Server
  server = kind((host.strip('[]'), port), handler)
  return server, f'http://{host}:{server.server_port}/'


def _of_ipv6(kind: type[_Server]) -> type[_Server]:
  return type(kind.__name__, (kind,), {'address_family': socket.AF_INET6})


def serve_metrics(config: run_config.Config, workdir: str, process: str, port: int) -> int:
  """Serves /metrics of this process, from now on, at every address of its machine; returns the
  port. Raises OSError."""
  path = pathlib.Path(workdir, records_lib.RECORDS, f'{process}.jsonl')
  tail = records_lib.Tail(path, path.stat().st_size if path.exists() else 0)
  stream = lambda: zip(itertools.repeat(process), tail.stream())
  watch = Watch(lambda: config, lambda: stream, counted=None)
  kind = _of_ipv6(_OneReader) if socket.has_dualstack_ipv6() else _OneReader
  server = kind(('', port), type('Handler', (_Metrics,), {'watch': watch}))
  threading.Thread(target=server.serve_forever, name='metrics', daemon=True).start()
  return server.server_address[1]


def _states(what: str, rows: dict[str, dict[str, Any]]) -> str:
  """The state of each, as the page has it: 1 under its name."""
  text = f'# HELP diloco_{what}_state docs/reference/metrics.md\n# TYPE diloco_{what}_state gauge\n'
  for name, row in rows.items():
    so = row['condition']
    labels = [f'learner={json.dumps(name)}'] if name else []
    labels += [f'state={json.dumps("silent" if so["kind"] == "silent" else so["state"])}']
    text += f'diloco_{what}_state{{{",".join(labels)}}} 1\n'
  return text


def metrics(run: dict[str, Any]) -> str:
  """A state in the text format of Prometheus; '' of an earlier moment, or without a fact, as a led
  host has none."""
  if run.get('behind') or run['began_s'] is None:
    return ''
  flat = run | run['figures'] | {f'bytes_{name}': count for name, count in run['wire'].items()}
  flat['held_out_loss'] = next(reversed(run['held_out'][1]), None)
  flat |= {'goodput': flat.get('training_since_joined'), 'token_goodput': flat.get('token')}
  learners = {f'{{learner={json.dumps(name)}}}': row for name, row in run['learners'].items()}
  text = _states('run', {'': run}) + _states('learner', run['learners'])
  for start, names, rows in (
    ('', _RUN_METRICS, {'': flat}),
    ('learner_', _LEARNER_METRICS, learners),
  ):
    for name in names.split():
      samples = [(labels, row[name]) for labels, row in rows.items() if row.get(name) is not None]
      about = f'{name.replace("_", " ")}: docs/reference/metrics.md'
      text += f'# HELP diloco_{start}{name} {about}\n# TYPE diloco_{start}{name} gauge\n'
      text += ''.join(f'diloco_{start}{name}{labels} {value}\n' for labels, value in samples)
  return text
