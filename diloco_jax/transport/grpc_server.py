"""The syncer's end of the wire: a gRPC server behind a door (doors.py).

Both streams of a session arrive as calls of their own. Control comes first: the server answers
with a random token in its initial metadata; Bulk must bring it back. When it does (and gets the
token for an answer, too), the session is open. Where the door asks for certificates, both calls
must come with the same one, and the session ends when its certificate ends or is revoked. The
synchronous API is used throughout: for bulk, threads are a little faster than asyncio, and every
large copy and checksum runs without the GIL.
"""

import dataclasses
import itertools
import secrets
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from diloco_jax.certs import proofs
from diloco_jax.node import ports
from diloco_jax.protocol import events, messages
from diloco_jax.transport import (
  addresses,
  credentials,
  doors,
  grpc_session,
  link,
)

_SPARE_CALLS = 16  # health checks, and calls that are about to be refused

_OPTIONS = grpc_session.COMMON_OPTIONS + (
  ('grpc.so_reuseport', 0),  # else a second syncer would silently share the port
  ('grpc.http2.min_ping_interval_without_data_ms', 5_000),
)


class GrpcSyncerTransport(grpc_session.Sessions):
  """The port `node.ports.Transport` for the syncer; listens from construction to `shutdown`.

  Args:
    address: where to listen (addresses.py); port 0 takes a free one, see `address`.
    limits: what each learner is granted.
    say: takes lines about certificates.
    access: whether learners must prove their names.

  Raises:
    ValueError: `access` is not enough for the address, or its files are wrong.
    OSError: the address cannot be bound.
  """

  def __init__(
    self,
    address: str,
    post: ports.Post,
    payloads: ports.Payloads,
    limits: link.Limits,
    say: credentials.Say = print,
    *,
    access: addresses.Access = addresses.LOCAL,
  ):
    super().__init__(lambda event: post(_with_public_nonce(event)), payloads, limits)
    self._numbers = itertools.count(1)
    self._unclaimed: dict[str, grpc_session.Session] = {}  # by token, until Bulk has come
    self._proofs: dict[int, proofs.Proof] = {}  # by session, of those that have one
    self._closing = False
    calls = 2 * limits.max_sessions + _SPARE_CALLS
    self._pool = futures.ThreadPoolExecutor(calls, thread_name_prefix='syncer-grpc')
    self._server = grpc.server(self._pool, options=_OPTIONS, maximum_concurrent_rpcs=calls)
    self._health = self._add_services()
    try:
      self._door = doors.Door(self._server, address, access, say)
    except (ValueError, OSError):
      self._pool.shutdown()
      raise
    self.address = self._door.address
    self._server.start()
    self._ended = threading.Event()
    if self._door.proves:
      grpc_session.start_thread('certificates', self._watch_proofs)

  @property
  def port(self) -> int:
    """Of a HOST:PORT."""
    return int(self.address.rpartition(':')[2])

  def dial(self, session: int) -> None:
    raise ValueError(f'a syncer listens, it never dials: session {session}')

  def shutdown(self, grace_s: float) -> None:
    with self._lock:
      self._closing = True
    self._health.enter_graceful_shutdown()
    self._close_all('the syncer shut down', grace_s)
    self._ended.set()
    self._server.stop(grace=None).wait()
    self._pool.shutdown()
    self._door.close()

  def _add_services(self) -> health.HealthServicer:
    handlers = {
      'Control': grpc.stream_stream_rpc_method_handler(self._control),
      'Bulk': grpc.stream_stream_rpc_method_handler(self._bulk),
    }
    generic = grpc.method_handlers_generic_handler(grpc_session.SERVICE, handlers)
    self._server.add_generic_rpc_handlers((generic,))
    servicer = health.HealthServicer(
      experimental_non_blocking=True, experimental_thread_pool=self._pool
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
    for service in ('', grpc_session.SERVICE):
      servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    return servicer

  # --- The two calls of a session, each on its own thread -----------------------------------------

  def _control(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    session, token = self._admit(context, self._prove(context))
    context.send_initial_metadata(((grpc_session.TOKEN, token),))
    if not session.wait_open(self._limits.handshake_s):
      session.fail(f'no Bulk stream within {self._limits.handshake_s} s')
    grpc_session.start_thread(f'control-{session.number}', session.read_control, requests)
    yield from session.control_frames()
    _conclude(session, context)

  def _bulk(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    token = dict(context.invocation_metadata()).get(grpc_session.TOKEN, '')
    proof = self._prove(context)
    with self._lock:
      session = self._unclaimed.get(token)
      if session is not None and self._proofs.get(session.number) != proof:
        session = None  # the token of another learner
      else:
        self._unclaimed.pop(token, None)
    if session is None:
      context.abort(grpc.StatusCode.UNAUTHENTICATED, 'unknown session token: open Control first')
    self._watch(session, context)
    context.send_initial_metadata(((grpc_session.TOKEN, token),))
    session.open()
    grpc_session.start_thread(f'bulk-{session.number}', session.read_bulk, requests)
    yield from session.bulk_frames()
    _conclude(session, context)

  def _prove(self, context: grpc.ServicerContext) -> proofs.Proof | None:
    try:
      return self._door.prove(context)
    except proofs.Unproved as error:
      context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

  def _watch_proofs(self) -> None:
    """Ends the sessions whose certificate has ended or was revoked."""
    while not self._ended.wait(credentials.WATCH_S):
      with self._lock:
        live = [(self._sessions[number], proof) for number, proof in self._proofs.items()]
      self._door.refresh([proof for _, proof in live])
      for session, proof in live:
        try:
          self._door.require(proof)
        except proofs.Unproved as error:
          session.fail(str(error))

  def _admit(
    self, context: grpc.ServicerContext, proof: proofs.Proof | None
  ) -> tuple[grpc_session.Session, str]:
    with self._lock:
      number = len(self._sessions)
      if not self._closing and number < self._limits.max_sessions:
        session = self._add(next(self._numbers), dialed=False)
        if proof is not None:
          session.learner = proof.name.id
          self._proofs[session.number] = proof
        token = secrets.token_hex(16)
        self._unclaimed[token] = session
        self._watch(session, context)
        return session, token
    if self._closing:
      context.abort(grpc.StatusCode.UNAVAILABLE, 'the syncer shuts down')
    context.abort(
      grpc.StatusCode.RESOURCE_EXHAUSTED,
      f'{number} sessions are open, at most {self._limits.max_sessions} are granted',
    )

  def _watch(self, session: grpc_session.Session, context: grpc.ServicerContext) -> None:
    session.add_stream(context.cancel)
    if not context.add_callback(lambda: self._gone(session)):
      # The call ended before we could ask to be told. From a thread: the caller may hold the lock.
      grpc_session.start_thread(f'gone-{session.number}', self._gone, session)

  def _gone(self, session: grpc_session.Session) -> None:
    if not session.stream_gone():
      return
    with self._lock:
      self._sessions.pop(session.number, None)
      self._proofs.pop(session.number, None)
      for token in [t for t, s in self._unclaimed.items() if s is session]:
        del self._unclaimed[token]


def _conclude(session: grpc_session.Session, context: grpc.ServicerContext) -> None:
  """Ends a stream of an ended session and tells the learner why."""
  if session.failed:
    context.abort(grpc.StatusCode.ABORTED, session.reason)
  # An orderly end must have status OK (any other lets gRPC drop what was sent before), and gRPC
  # does not transport the details of an OK.
  context.set_trailing_metadata(((grpc_session.REASON, session.reason.encode()),))


def _with_public_nonce(event: events.Event) -> events.Event:
  match event:
    case events.Received(message=messages.Join() | messages.Confirm() as message):
      nonce = grpc_session.public_nonce(message.nonce)
      return dataclasses.replace(event, message=dataclasses.replace(message, nonce=nonce))
  return event
