"""A fake of Google Cloud Storage that serves HTTP, and the failures of a network before it.

Behind is gcp-storage-emulator. What it lacks and what this project rests on is here: generations
that are compared before a write (ifGenerationMatch, ifGenerationNotMatch: 412 and 304), also when
several clients write at once; objects of no bytes, and bytes that no MIME parser has touched; the
generation of what is read; ranges beyond an end; lists in pages, from startOffset to endOffset;
moveTo; the last part of a resumable upload that is sent again.

A *door* is an address of the fake, with failures of its own: each client can have one, and one door
may be shut while others are open. The objects live in this process, so they outlive every client.

Where it departs from the real service: nobody is asked who he is, no rate is limited (429), lists
come in pages of 100 names instead of 1,000, nothing is kept of a deleted object, `generation=`
reads no older version, moveTo, rewriteTo and compose compare no generations, and a resumable upload
keeps any number of bytes, not multiples of 256 KiB.

    python -m tests.storage.fake_gcs --bucket=bucket [--delay-ms=50]

serves until Ctrl-C and prints the environment of its clients.
"""

import argparse
import collections
import contextlib
import http.server
import io
import json
import random
import re
import shlex
import signal
import socket
import struct
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import NamedTuple

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.handlers import objects as resources
from gcp_storage_emulator.storage import Storage

PAGE = 100  # names in an answer to a list
SLOW_S = 1.0
KINDS = (
  '500',
  '503',
  'reset',  # before the request is carried out
  'lost answer',  # reset after it was carried out
  'slow',
  'truncated answer',
  'truncated upload',  # of a resumable one the half stays, of others nothing
)
_UPLOAD = re.compile(r'/upload/storage/v1/b/([^/]+)/o')
_LIST = re.compile(r'/storage/v1/b/([^/]+)/o')
_MOVE = re.compile(r'/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)')
_OBJECT = re.compile(r'(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)')


class Request(NamedTuple):
  """What a client asks for."""

  method: str
  path: str
  query: dict[str, str]
  body: bytes

  @property
  def name(self) -> str:
    """Of the object; '' of a list, and of an upload of several parts."""
    path = _OBJECT.match(self.path)
    return urllib.parse.unquote(path[2]) if path else self.query.get('name', '')


class Answer(NamedTuple):
  status: int
  headers: dict[str, str]
  body: bytes

  def to_bytes(self) -> bytes:
    lines = [f'HTTP/1.1 {self.status} {_phrase(self.status)}']
    headers = self.headers | {'Content-Length': str(len(self.body)), 'Server': 'fake'}
    lines += [f'{name}: {value}' for name, value in headers.items()]
    return '\r\n'.join(lines).encode() + b'\r\n\r\n' + self.body


class Faults:
  """Which requests fail, and how: drawn from a seed, in the order in which they come in.

  Args:
    seed: of the draws.
    rate: the share of the requests that fail.
    kinds: of the failures.
    most: after so many all requests succeed.
    only: the requests that may fail.
  """

  def __init__(
    self,
    seed: int,
    rate: float = 0.3,
    kinds: tuple[str, ...] = KINDS,
    most: int | None = None,
    only: Callable[[Request], bool] = lambda request: True,
  ):
    self._random = random.Random(seed)
    self._rate, self._kinds, self._most, self._only = rate, kinds, most, only
    self._lock = threading.Lock()
    self.injected: collections.Counter[str] = collections.Counter()

  def draw(self, request: Request) -> str:
    with self._lock:
      drawn = self._random.random() < self._rate, self._random.choice(self._kinds)
      full = self._most is not None and self.injected.total() >= self._most
      if full or not drawn[0] or not self._only(request):
        return ''
      self.injected[drawn[1]] += 1
      return drawn[1]


class Door:
  """An address of the fake. `environment` brings a process there that knows nothing of fakes."""

  def __init__(self, fake: 'FakeGcs'):
    self.faults: Faults | None = None
    self.shut = False  # every connection is reset
    self.silent = False  # no request is carried out or answered; once it is False they are reset
    self.refuses_with = 0  # an HTTP status for every request, such as 403
    self.delay_s = 0.0  # of every answer
    self._server = _Server(('127.0.0.1', 0), _Handler)
    self._server.fake, self._server.door = fake, self
    serve = lambda: self._server.serve_forever(poll_interval=0.05)
    threading.Thread(target=serve, name='fake-gcs', daemon=True).start()

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self._server.server_port}'

  @property
  def environment(self) -> dict[str, str]:
    """TensorStore's, then those of gcsfs, to which FSSPEC_GS gives the arguments of its file
    system. Without the rest both would look for credentials, and gcsfs for a gRPC service."""
    return {
      'TENSORSTORE_GCS_HTTP_URL': self.url,
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none',
      'STORAGE_EMULATOR_HOST': self.url,
      'FSSPEC_GS': json.dumps({'token': 'anon', 'project': 'fake'}),
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
    }

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()


class FakeGcs:
  """The buckets, and doors to them."""

  def __init__(self) -> None:
    self._storage = _Storage(use_memory_fs=True)
    self._lock = threading.RLock()
    self._doors: list[Door] = []
    self._moved: dict[str, Answer] = {}  # the answers, for requests that are sent again
    self._finished: dict[str, Answer] = {}  # of resumable uploads
    self.broken: list[str] = []  # tracebacks of the fake itself

  def door(self) -> Door:
    self._doors.append(Door(self))
    return self._doors[-1]

  def add_bucket(self, name: str) -> None:
    with self._lock:
      bucket = buckets.create_bucket(name, self._storage)
      bucket['softDeletePolicy'] = {'retentionDurationSeconds': 0}

  def objects(self, bucket: str) -> dict[str, bytes]:
    """All objects of a bucket, by name."""
    with self._lock:
      names = self._storage.objects.get(bucket, {})
      return {name: self._storage.get_file(bucket, name) for name in sorted(names)}

  def put(self, bucket: str, name: str, data: bytes) -> None:
    """Replaces an object, as something else than a client would."""
    with self._lock:
      self._store(bucket, name, data)

  def remove(self, bucket: str, name: str) -> None:
    with self._lock:
      self._storage.delete_file(bucket, name)

  def close(self) -> None:
    for door in self._doors:
      door.close()

  def answer(self, request: Request, handler: '_Handler') -> Answer:
    """Carries a request out. Nothing comes between its comparison of generations and its write."""
    with self._lock:
      try:
        return self._answer(request, handler)
      except Exception:
        self.broken.append(traceback.format_exc())
        return Answer(501, {}, self.broken[-1].encode())

  def _answer(self, request: Request, handler: '_Handler') -> Answer:
    upload, listed = _UPLOAD.fullmatch(request.path), _LIST.fullmatch(request.path)
    named, moved = _OBJECT.fullmatch(request.path), _MOVE.fullmatch(request.path)
    if (session := request.query.get('upload_id')) in self._finished:
      return self._finished[session]
    if upload:
      kind = request.query.get('uploadType')
      name, data = request.query.get('name', ''), request.body
      if kind == 'multipart':
        name, data = _parts(request, handler.headers['Content-Type'])
      if refused := self._refuses(request, upload[1], name):
        return refused
      if kind in ('media', 'multipart'):
        return self._store(upload[1], name, data)
    elif listed and request.method == 'GET':
      return self._list(listed[1], request.query)
    elif moved:
      token = handler.headers.get('X-Goog-GCS-Idempotency-Token', '')
      if not token or token not in self._moved:
        self._moved[token] = self._move(moved[1], *map(urllib.parse.unquote, moved.groups()[1:]))
      return self._moved[token]
    elif named:
      bucket, name = named[1], urllib.parse.unquote(named[2])
      if refused := self._refuses(request, bucket, name):
        return refused
      if request.method == 'GET' and request.query.get('alt') == 'media':
        return self._read(bucket, name, handler.headers.get('Range', ''))
    answer = handler.emulate(self._storage, request)
    if session and answer.status == 200:
      self._finished[session] = answer
    return answer

  def _generation(self, bucket: str, name: str) -> int:
    """0: there is no such object."""
    resource = self._storage.objects.get(bucket, {}).get(name)
    return int(resource['generation']) if resource else 0

  def _refuses(self, request: Request, bucket: str, name: str) -> Answer | None:
    now = self._generation(bucket, name)
    wanted = request.query.get('ifGenerationMatch')
    if wanted is not None and int(wanted) != now:
      return _error(412, 'conditionNotMet')
    if now and request.query.get('ifGenerationNotMatch') == str(now):
      return Answer(304, {}, b'')
    return None

  def _store(self, bucket: str, name: str, data: bytes) -> Answer:
    if bucket not in self._storage.buckets:
      return _error(404, 'notFound')
    kind = 'application/octet-stream'
    resource = resources._make_object_resource('', bucket, name, kind, str(len(data)))
    resource = resources._checksums(data, resource)
    self._storage.create_file(bucket, name, data, resource)
    return _json(resource)

  def _move(self, bucket: str, name: str, to: str) -> Answer:
    if not self._generation(bucket, name):
      return _error(404, 'notFound')
    stored = self._store(bucket, to, self._storage.get_file(bucket, name))
    self._storage.delete_file(bucket, name)
    return stored

  def _read(self, bucket: str, name: str, wanted: str) -> Answer:
    if not (generation := self._generation(bucket, name)):
      return _error(404, 'notFound')
    data = self._storage.get_file(bucket, name)
    checksums = self._storage.objects[bucket][name]
    headers = {
      'Content-Type': 'application/octet-stream',
      'x-goog-generation': str(generation),
      'x-goog-metageneration': '1',
      'x-goog-hash': f'crc32c={checksums["crc32c"]},md5={checksums["md5Hash"]}',
    }
    if not wanted:
      return Answer(200, headers, data)
    first, last = re.fullmatch(r'bytes=(\d*)-(\d*)', wanted).groups()
    if not first:  # the last bytes
      first, last = max(len(data) - int(last), 0), ''
    start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
    if start >= stop:
      return Answer(416, {'Content-Range': f'bytes */{len(data)}'}, b'')
    headers['Content-Range'] = f'bytes {start}-{stop - 1}/{len(data)}'
    return Answer(206, headers, data[start:stop])

  def _list(self, bucket: str, query: dict[str, str]) -> Answer:
    if bucket not in self._storage.buckets:
      return _error(404, 'notFound')
    files, prefixes = self._storage.get_file_list(
      bucket, query.get('prefix'), query.get('delimiter'), query.get('matchGlob')
    )
    entries = {file['name']: file for file in files} | dict.fromkeys(prefixes)
    names = sorted(
      name
      for name in entries
      if name >= query.get('startOffset', '')
      and (not query.get('endOffset') or name < query['endOffset'])
      and name > query.get('pageToken', '')
    )
    page = names[: min(PAGE, int(query.get('maxResults', PAGE)))]
    answer = {'kind': 'storage#objects', 'items': [entries[name] for name in page if entries[name]]}
    answer['prefixes'] = [name for name in page if entries[name] is None]
    if len(page) < len(names):
      answer['nextPageToken'] = page[-1]
    return _json(answer)


class _Storage(Storage):
  """Of the emulator, which would write a table of all objects after each change, and number an
  object when its upload begins."""

  _last_generation = 0

  def create_file(self, bucket_name, file_name, content, file_obj, file_id=None) -> None:
    self._last_generation = max(time.time_ns(), self._last_generation + 1)
    file_obj['generation'] = str(self._last_generation)
    super().create_file(bucket_name, file_name, content, file_obj, file_id)

  def _write_config_to_file(self) -> None:
    pass


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 256
  fake: FakeGcs
  door: Door

  def shutdown_request(self, request: socket.socket) -> None:
    self.close_request(request)  # no FIN before a reset

  def handle_error(self, request, client_address) -> None:
    pass  # clients that are killed, and those whose connection was reset here


class _Handler(http.server.BaseHTTPRequestHandler):
  """Keeps connections open, and writes each answer at once."""

  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True
  server: _Server

  def log_message(self, format: str, *args) -> None:
    pass

  def _serve(self) -> None:
    door = self.server.door
    target = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(target.query, keep_blank_values=True))
    length = int(self.headers.get('Content-Length') or 0)
    asked = Request(self.command, target.path, query, b'')
    kind = door.faults.draw(asked) if door.faults else ''
    silent = door.silent
    while door.silent:
      time.sleep(0.02)
    if door.shut or silent or (kind == 'truncated upload' and not self._is_chunk(query)):
      self.rfile.read(length // 2)
      return self._reset()
    asked = asked._replace(body=self.rfile.read(length))
    if len(asked.body) < length:
      return self._reset()  # the client has died: nothing is carried out
    time.sleep(door.delay_s + SLOW_S * (kind == 'slow'))
    if kind in ('500', '503') or door.refuses_with:
      return self._write(_error(int(kind or door.refuses_with), 'backendError').to_bytes())
    if kind == 'reset':
      return self._reset()
    if kind == 'truncated upload':
      asked = asked._replace(body=asked.body[: length // 2])
    data = self.server.fake.answer(asked, self).to_bytes()
    if kind == 'truncated answer':
      head = data.index(b'\r\n\r\n') + 4
      self._write(data[: head + (len(data) - head) // 2])
    if kind in ('truncated answer', 'lost answer'):
      return self._reset()
    return self._write(data)

  do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

  def emulate(self, storage: Storage, request: Request) -> Answer:
    """What the emulator answers."""
    if self._is_chunk(request.query) and request.body:
      span = re.match(r'bytes (\d+)-\d+/(.*)', self.headers['Content-Range'])
      if span:  # of a truncated upload the range has more bytes than have come
        last = int(span[1]) + len(request.body) - 1
        self.headers.replace_header('Content-Range', f'bytes {span[1]}-{last}/{span[2]}')
    self.storage = storage
    files, self.rfile, self.wfile = (self.rfile, self.wfile), io.BytesIO(request.body), io.BytesIO()
    length = str(len(request.body))
    if 'Content-Length' in self.headers:
      self.headers.replace_header('Content-Length', length)
    try:
      emulator.Router(self).handle(self.command)
      head, body = self.wfile.getvalue().split(b'\r\n\r\n', 1)
    finally:
      self.rfile, self.wfile = files
    first, *lines = head.decode().split('\r\n')
    headers = dict(line.split(': ', 1) for line in lines)
    for name in ('Content-Length', 'Server', 'Date'):
      headers.pop(name, None)
    return Answer(int(first.split()[1]), headers, body)

  @staticmethod
  def _is_chunk(query: dict[str, str]) -> bool:
    return 'upload_id' in query

  def _write(self, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the client is gone
      self.connection.sendall(data)

  def _reset(self) -> None:
    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    self.close_connection = True


def _phrase(status: int) -> str:
  return 'Resume Incomplete' if status == 308 else HTTPStatus(status).phrase


def _json(value: dict) -> Answer:
  return Answer(200, {'Content-Type': 'application/json'}, json.dumps(value).encode())


def _error(status: int, reason: str) -> Answer:
  text = {'error': {'code': status, 'message': reason, 'errors': [{'reason': reason}]}}
  return _json(text)._replace(status=status)


def _parts(request: Request, content_type: str) -> tuple[str, bytes]:
  """Name and bytes of a multipart upload. gcsfs ends its lines with LF alone."""
  boundary = b'--' + re.search(r'boundary="?([^";]+)', content_type)[1].encode()
  end = b'\r\n' if request.body.startswith(boundary + b'\r\n') else b'\n'
  about, data = request.body.removeprefix(boundary + end).split(end + boundary + end)
  about, data = (part.split(end + end, 1)[1] for part in (about, data))
  return request.query.get('name') or json.loads(about)['name'], data.rsplit(end + boundary, 1)[0]


# --- For tests ------------------------------------------------------------------------------------


class Bucket(NamedTuple):
  """An empty bucket of a test, and the door to it that the environment of the test names."""

  name: str
  fake: FakeGcs
  door: Door

  @property
  def url(self) -> str:
    return f'gs://{self.name}'

  @property
  def objects(self) -> dict[str, bytes]:
    return self.fake.objects(self.name)


@contextlib.contextmanager
def serving() -> Iterator[FakeGcs]:
  fake = FakeGcs()
  try:
    yield fake
  finally:
    fake.close()


def forget_in_this_process() -> None:
  """gcsfs has one file system for a process, with the lists that it has read."""
  import fsspec

  fsspec.config.conf['gs'] = {'token': 'anon', 'project': 'fake'}  # the environment was read before
  from gcsfs import GCSFileSystem

  for file_system in GCSFileSystem._cache.values():
    file_system.invalidate_cache()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--bucket', default='bucket')
  parser.add_argument('--delay-ms', type=float, default=0)
  flags = parser.parse_args()
  with serving() as fake:
    fake.add_bucket(flags.bucket)
    door = fake.door()
    door.delay_s = flags.delay_ms / 1e3
    for name, value in door.environment.items():
      print(f'export {name}={shlex.quote(value)}', flush=True)
    print(f'# gs://{flags.bucket}', flush=True)
    with contextlib.suppress(KeyboardInterrupt):
      while True:
        signal.pause()


if __name__ == '__main__':
  main()
